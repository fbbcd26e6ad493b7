/* The CUDA driver as these programs get at it: STATIC_RUNTIME (as nvcc's default runtime: dlopen,
 * dlsym of cuGetProcAddress_v2, and that for everything else), BY_DLSYM (every function by dlsym),
 * or linked to libcuda. And what the stand-in and libgruyere.so tell a test. */
#ifndef PRELOAD_DRIVER_H
#define PRELOAD_DRIVER_H

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gruyere.h"

typedef unsigned CUresult;
typedef uint64_t CUdeviceptr;
typedef void *CUcontext, *CUstream, *CUmemoryPool, *CUgraph;
typedef struct {
    int kind, handle_types, location_kind, location;
    void *metadata;
    unsigned char flags[8];
} CUmemAllocationProp;

typedef struct {
    int location_kind, location, flags;
} CUmemAccessDesc;

/* name as cuGetProcAddress has it, name as libcuda exports it, arguments */
#define DRIVER(F)                                                                               \
    F(cuInit, cuInit, (unsigned))                                                               \
    F(cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain, (CUcontext *, int))                   \
    F(cuDevicePrimaryCtxReset, cuDevicePrimaryCtxReset_v2, (int))                               \
    F(cuCtxSetCurrent, cuCtxSetCurrent, (CUcontext))                                            \
    F(cuCtxCreate, cuCtxCreate_v2, (CUcontext *, unsigned, int))                                \
    F(cuCtxSynchronize, cuCtxSynchronize, (void))                                               \
    F(cuMemAlloc, cuMemAlloc_v2, (CUdeviceptr *, size_t))                                       \
    F(cuMemFree, cuMemFree_v2, (CUdeviceptr))                                                   \
    F(cuMemAllocPitch, cuMemAllocPitch_v2, (CUdeviceptr *, size_t *, size_t, size_t, unsigned)) \
    F(cuMemGetInfo, cuMemGetInfo_v2, (size_t *, size_t *))                                      \
    F(cuMemAllocAsync, cuMemAllocAsync, (CUdeviceptr *, size_t, CUstream))                      \
    F(cuMemFreeAsync, cuMemFreeAsync, (CUdeviceptr, CUstream))                                  \
    F(cuMemAllocFromPoolAsync, cuMemAllocFromPoolAsync,                                         \
      (CUdeviceptr *, size_t, CUmemoryPool, CUstream))                                          \
    F(cuDeviceGetDefaultMemPool, cuDeviceGetDefaultMemPool, (CUmemoryPool *, int))              \
    F(cuMemPoolCreate, cuMemPoolCreate, (CUmemoryPool *, const void *))                         \
    F(cuMemPoolSetAccess, cuMemPoolSetAccess, (CUmemoryPool, const CUmemAccessDesc *, size_t))  \
    F(cuMemGetAccess, cuMemGetAccess, (unsigned long long *, const void *, CUdeviceptr))        \
    F(cuMemcpyHtoD, cuMemcpyHtoD_v2, (CUdeviceptr, const void *, size_t))                       \
    F(cuMemcpyDtoH, cuMemcpyDtoH_v2, (void *, CUdeviceptr, size_t))                             \
    F(cuStreamCreate, cuStreamCreate, (CUstream *, unsigned))                                   \
    F(cuStreamDestroy, cuStreamDestroy_v2, (CUstream))                                          \
    F(cuStreamBeginCapture, cuStreamBeginCapture_v2, (CUstream, int))                           \
    F(cuStreamEndCapture, cuStreamEndCapture, (CUstream, CUgraph *))                            \
    F(cuIpcGetMemHandle, cuIpcGetMemHandle, (void *, CUdeviceptr))                              \
    F(cuMemAddressReserve, cuMemAddressReserve,                                                 \
      (CUdeviceptr *, size_t, size_t, CUdeviceptr, uint64_t))                                   \
    F(cuMemAddressFree, cuMemAddressFree, (CUdeviceptr, size_t))                                \
    F(cuMemCreate, cuMemCreate, (uint64_t *, size_t, const CUmemAllocationProp *, uint64_t))    \
    F(cuMemRelease, cuMemRelease, (uint64_t))                                                   \
    F(cuMemMap, cuMemMap, (CUdeviceptr, size_t, size_t, uint64_t, uint64_t))                    \
    F(cuMemUnmap, cuMemUnmap, (CUdeviceptr, size_t))

#define CHECK(condition)                                                                \
    do {                                                                                \
        if (!(condition)) {                                                             \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);             \
            exit(1);                                                                    \
        }                                                                               \
    } while (0)
#define OK(call) CHECK((call) == 0)

#if defined(STATIC_RUNTIME) || defined(BY_DLSYM)
#define POINTER(name, symbol, arguments) static CUresult(*name) arguments;
DRIVER(POINTER)

static void *libcuda;

static void *symbol_of(const char *symbol) {
    void *address = dlsym(libcuda, symbol);
    CHECK(address != NULL);
    CHECK(dlerror() == NULL);
    return address;
}

#ifndef GET_VERSION
#define GET_VERSION 12000
#endif
#ifndef GET_FLAGS
#define GET_FLAGS 0
#endif

static inline void driver_open(void) {
    if (libcuda) return;
    CHECK((libcuda = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL)) != NULL);
#ifdef STATIC_RUNTIME
    CUresult (*get)(const char *, void **, int, uint64_t, int *) = symbol_of("cuGetProcAddress_v2");
    void *again = NULL;
    int status = -1;
    /* The runtime asks it for itself as well. */
    OK(get("cuGetProcAddress", &again, GET_VERSION, GET_FLAGS, &status));
    CHECK(again == (void *)get && status == 0);
#define GET(name, symbol, arguments)                                            \
    status = -1;                                                                \
    OK(get(#name, (void **)&name, GET_VERSION, GET_FLAGS, &status));            \
    CHECK(name != NULL && status == 0);
#else
#define GET(name, symbol, arguments) name = symbol_of(#symbol);
#endif
    DRIVER(GET)
}
#else
#define DECLARE(name, symbol, arguments) CUresult symbol arguments;
DRIVER(DECLARE)
#define cuDevicePrimaryCtxReset cuDevicePrimaryCtxReset_v2
#define cuCtxCreate cuCtxCreate_v2
#define cuMemAlloc cuMemAlloc_v2
#define cuMemFree cuMemFree_v2
#define cuMemAllocPitch cuMemAllocPitch_v2
#define cuMemGetInfo cuMemGetInfo_v2
#define cuMemcpyHtoD cuMemcpyHtoD_v2
#define cuMemcpyDtoH cuMemcpyDtoH_v2
#define cuStreamDestroy cuStreamDestroy_v2
#define cuStreamBeginCapture cuStreamBeginCapture_v2
static inline void driver_open(void) {}
#endif

/* CUDA as the runtime sets it up: the device's primary context is current. */
static inline void driver_start(void) {
    CUcontext context;
    driver_open();
    OK(cuInit(0));
    OK(cuDevicePrimaryCtxRetain(&context, 0));
    OK(cuCtxSetCurrent(context));
}

/* A function of libgruyere.so, NULL where it is not preloaded. */
static void *of_gruyere(const char *name) { return dlsym(RTLD_DEFAULT, name); }

/* Bytes live in libgruyere.so's books; UINT64_MAX where there are none. */
static inline uint64_t live(void) {
    int (*stats)(int, struct GruyereStats *) = (int (*)(int, struct GruyereStats *))of_gruyere(
        "gruyere_stats");
    struct GruyereStats now;
    memset(&now, 0, sizeof now);
    now.size = sizeof now;
    if (!stats || stats(0, &now) != 0) return UINT64_MAX;
    return now.live;
}

#endif
