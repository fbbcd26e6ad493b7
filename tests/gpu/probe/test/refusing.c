/* For the probe's own test: a driver that is the stand-in but for a few calls, each of which does
 * what some real driver may do. */
#define _GNU_SOURCE
#include "../driver.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <unistd.h>

/* The stand-in's: this library is linked to it. */
#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

/* Refused in a capture, and the capture is lost. */
CUresult cuStreamGetId(CUstream stream, unsigned long long *id) {
    int capturing = 0;
    CUresult code = NEXT(cuStreamIsCapturing)(stream, &capturing);
    if (code) abort(); /* Destroyed: a crash. */
    if (!capturing) return NEXT(cuStreamGetId)(stream, id);
    NEXT(cuStreamQuery)(stream); /* Which the stand-in takes badly. */
    return 900;
}

/* A hang. */
CUresult cuMemExportToShareableHandle(void *shared, CUmemGenericAllocationHandle handle, int type,
                                      unsigned long long flags) {
    (void)shared, (void)handle, (void)type, (void)flags;
    for (;;) pause();
}

/* The flag is offered, and refused. */
CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes,
                     const CUmemAllocationProp *prop, unsigned long long flags) {
    return prop->allocFlags.gpuDirectRDMACapable ? CUDA_ERROR_NOT_SUPPORTED
                                                 : NEXT(cuMemCreate)(handle, bytes, prop, flags);
}

/* Refused where no case reckons with it. */
CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) {
    return bytes == 64 * MIB ? 999 : NEXT(cuMemAddressFree)(address, bytes);
}
