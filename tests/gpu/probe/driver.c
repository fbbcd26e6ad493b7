/* libcuda, opened and entered. */
#include "driver.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

struct driver cuda;
CUcontext context;
const CUmemAccessDesc own_access = {{CU_MEM_LOCATION_TYPE_DEVICE, 0},
                                    CU_MEM_ACCESS_FLAGS_PROT_READWRITE};

static CUresult absent(void) { return ABSENT; }

const char *driver_open(const char *library) {
    void *handle = dlopen(library ? library : "libcuda.so.1", RTLD_NOW);
    if (!handle) return dlerror();
    /* A caller's arguments are the caller's on the ABIs that there are drivers for: `absent` may be
     * called with any. */
#define FIND(name, arguments)                                           \
    {                                                                   \
        void *found = dlsym(handle, #name), *none = (void *)absent;     \
        memcpy(&cuda.name, found ? &found : &none, sizeof cuda.name);   \
    }
    FUNCTIONS(FIND)
    return NULL;
}

void must(CUresult code, const char *call, const char *file, int line) {
    if (code == CUDA_SUCCESS) return;
    fprintf(stderr, "%s:%d: %s answered %u\n", file, line, call, code);
    /* An illegal access, and whatever else a context does not survive: something touched what was
     * not its own. */
    exit(code == 700 || (code >= 714 && code <= 719) ? LOST : 1);
}

void driver_enter(void) {
    MUST(cuda.cuInit(0));
    MUST(cuda.cuDevicePrimaryCtxRetain(&context, 0));
    MUST(cuda.cuCtxSetCurrent(context));
}

int attribute(int which) {
    int value = 0;
    return cuda.cuDeviceGetAttribute(&value, which, 0) == CUDA_SUCCESS ? value : 0;
}

size_t free_memory(void) {
    size_t available = 0, total = 0;
    MUST(cuda.cuMemGetInfo_v2(&available, &total));
    return available;
}

size_t total_memory(void) {
    size_t total = 0;
    MUST(cuda.cuDeviceTotalMem_v2(&total, 0));
    return total;
}

double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1e9 + time.tv_nsec;
}

/* Some devices offer the flag and refuse what is made with it, at once or when access is set. */
static int rdma_works(CUmemAllocationProp prop) {
    CUmemGenericAllocationHandle handle = 0;
    CUdeviceptr at = reserve(PAGE);
    if (cuda.cuMemCreate(&handle, PAGE, &prop, 0)) return 0;
    CUresult mapped = cuda.cuMemMap(at, PAGE, 0, handle, 0);
    CUresult access = mapped ? mapped : cuda.cuMemSetAccess(at, PAGE, &own_access, 1);
    if (!mapped) MUST(cuda.cuMemUnmap(at, PAGE));
    MUST(cuda.cuMemRelease(handle));
    MUST(cuda.cuMemAddressFree(at, PAGE));
    return !access;
}

CUmemAllocationProp ordinary(void) {
    static CUmemAllocationProp prop;
    if (!prop.type) {
        memset(&prop, 0, sizeof prop);
        prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
        prop.location = own_access.location;
        prop.allocFlags.gpuDirectRDMACapable =
            attribute(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED) != 0;
        if (prop.allocFlags.gpuDirectRDMACapable)
            prop.allocFlags.gpuDirectRDMACapable = (unsigned char)rdma_works(prop);
    }
    return prop;
}

CUstream new_stream(void) {
    CUstream stream = NULL;
    MUST(cuda.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    return stream;
}

CUevent new_event(void) {
    CUevent event = NULL;
    MUST(cuda.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    return event;
}

CUdeviceptr reserve(size_t bytes) {
    CUdeviceptr at = 0;
    MUST(cuda.cuMemAddressReserve(&at, bytes, PAGE, 0, 0));
    return at;
}

CUmemGenericAllocationHandle create(size_t bytes) {
    CUmemGenericAllocationHandle handle = 0;
    CUmemAllocationProp prop = ordinary();
    MUST(cuda.cuMemCreate(&handle, bytes, &prop, 0));
    return handle;
}

void map(CUdeviceptr at, size_t bytes, CUmemGenericAllocationHandle handle) {
    MUST(cuda.cuMemMap(at, bytes, 0, handle, 0));
    MUST(cuda.cuMemSetAccess(at, bytes, &own_access, 1));
}
