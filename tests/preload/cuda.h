/* What the programs of tests/preload use of the CUDA runtime, and of the stand-in. */
#ifndef PRELOAD_CUDA_H
#define PRELOAD_CUDA_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

typedef int cudaError_t;
typedef void *cudaStream_t;
typedef void *cudaEvent_t;
typedef void *cudaMemPool_t;
typedef void *cudaGraph_t;
struct cudaPitchedPtr {
    void *ptr;
    size_t pitch, xsize, ysize;
};
struct cudaExtent {
    size_t width, height, depth;
};
typedef struct {
    char reserved[64];
} cudaIpcMemHandle_t;

cudaError_t cudaMalloc(void **, size_t);
cudaError_t cudaFree(void *);
cudaError_t cudaMallocAsync(void **, size_t, cudaStream_t);
cudaError_t cudaMallocAsync_ptsz(void **, size_t, cudaStream_t);
cudaError_t cudaFreeAsync(void *, cudaStream_t);
cudaError_t cudaFreeAsync_ptsz(void *, cudaStream_t);
cudaError_t cudaMallocFromPoolAsync(void **, size_t, cudaMemPool_t, cudaStream_t);
cudaError_t cudaMallocPitch(void **, size_t *, size_t, size_t);
cudaError_t cudaMalloc3D(struct cudaPitchedPtr *, struct cudaExtent);
cudaError_t cudaMemGetInfo(size_t *, size_t *);
cudaError_t cudaStreamCreate(cudaStream_t *);
cudaError_t cudaStreamDestroy(cudaStream_t);
cudaError_t cudaDeviceSynchronize(void);
cudaError_t cudaDeviceReset(void);
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned);
cudaError_t cudaGetDevice(int *);
cudaError_t cudaSetDevice(int);
cudaError_t cudaStreamBeginCapture(cudaStream_t, int);
cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t *);
cudaError_t cudaStreamIsCapturing(cudaStream_t, int *);
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *, void *);
cudaError_t cudaGetLastError(void);
cudaError_t cudaLaunchHostFunc(cudaStream_t, void (*)(void *), void *);
cudaError_t cudaStreamAddCallback(cudaStream_t, void (*)(cudaStream_t, cudaError_t, void *), void *,
                                  unsigned);
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *, int);
cudaError_t cudaDeviceSetMemPool(int, cudaMemPool_t);
struct cudaMemPoolProps {
    int allocType, handleTypes;
    struct {
        int type, id;
    } location;
    void *win32SecurityAttributes;
    size_t maxSize;
    unsigned char reserved[56];
};
struct cudaMemAccessDesc {
    struct {
        int type, id;
    } location;
    int flags;
};
cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const struct cudaMemAccessDesc *, size_t);
cudaError_t cudaMemPoolCreate(cudaMemPool_t *, const struct cudaMemPoolProps *);

/* The driver's, and the stand-in's own. */
int cuMemGetAccess(unsigned long long *, const void *, uint64_t);
int cuCtxGetCurrent(void **);
int cuCtxCreate_v2(void **, unsigned, int);
int cuCtxPopCurrent_v2(void **);
uint64_t phantom_calls(const char *);

/* What libgruyere.so exports when it is preloaded (the test puts include/ on the path); NULL
 * without. */
#include "gruyere.h"
#pragma weak gruyere_stats
#pragma weak gruyere_validate

static inline void check(int holds, const char *what, int line) {
    if (!holds) {
        fprintf(stderr, "line %d: %s does not hold\n", line, what);
        _Exit(1);
    }
}
#define CHECK(condition) check(condition, #condition, __LINE__)
#define OK(call) check((call) == 0, #call " == 0", __LINE__)
#define MIB ((size_t)1 << 20)

/* How often the stand-in was asked for memory as a program asks (pages of the heap's own are made
 * by cuMemCreate). */
static inline uint64_t real_mallocs(void) {
    return phantom_calls("cuMemAlloc") + phantom_calls("cuMemAllocFromPoolAsync");
}
static inline uint64_t real_frees(void) {
    return phantom_calls("cuMemFree") + phantom_calls("cuMemFreeAsync");
}

/* Live bytes of device 0 on the record, 0 where there is none. */
static inline uint64_t live(void) {
    GruyereStats stats = {.size = sizeof stats};
    return gruyere_stats && gruyere_stats(0, &stats) == 0 ? stats.live : 0;
}

#endif
