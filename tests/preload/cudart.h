/* What the programs here call of the CUDA runtime, of the driver, and of the stand-in GPU: no
 * toolkit is needed to build them. */
#ifndef GRUYERE_TEST_CUDART_H
#define GRUYERE_TEST_CUDART_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

typedef int cudaError_t;
typedef struct CUstream_st *cudaStream_t;
typedef struct CUevent_st *cudaEvent_t;
typedef struct CUgraph_st *cudaGraph_t;
typedef struct CUgraphExec_st *cudaGraphExec_t;
typedef struct CUmemPool_st *cudaMemPool_t;
typedef unsigned long long CUdeviceptr;

enum {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorNotReady = 600
};
enum {
    cudaMemcpyHostToDevice = 1,
    cudaMemcpyDeviceToHost = 2,
    cudaMemcpyDeviceToDevice = 3,
    cudaMemcpyDefault = 4
};
enum { cudaStreamNonBlocking = 1, cudaEventDisableTiming = 2 };
enum {
    cudaMemoryTypeUnregistered = 0,
    cudaMemoryTypeHost = 1,
    cudaMemoryTypeDevice = 2,
    cudaMemoryTypeManaged = 3
};

struct cudaPitchedPtr { void *ptr; size_t pitch, xsize, ysize; };
struct cudaExtent { size_t width, height, depth; };
struct cudaMemLocation { int type, id; };
struct cudaPointerAttributes {
    int type;
    int device;
    void *devicePointer;
    void *hostPointer;
    long reserved[8];
};
typedef struct { char reserved[64]; } cudaIpcMemHandle_t;
struct cudaMemPoolProps {
    int allocType, handleTypes;
    struct { int type, id; } location;
    void *security;
    size_t maxSize;
    unsigned char reserved[56];
};

cudaError_t cudaSetDevice(int device);
cudaError_t cudaDeviceSynchronize(void);
cudaError_t cudaDeviceReset(void);
cudaError_t cudaDeviceGetAttribute(int *value, int attribute, int device);
cudaError_t cudaGetDeviceProperties(void *properties, int device);
cudaError_t cudaGetLastError(void);
const char *cudaGetErrorName(cudaError_t error);

cudaError_t cudaMalloc(void **pointer, size_t bytes);
cudaError_t cudaFree(void *pointer);
cudaError_t cudaMallocPitch(void **pointer, size_t *pitch, size_t width, size_t height);
cudaError_t cudaMalloc3D(struct cudaPitchedPtr *pointer, struct cudaExtent extent);
cudaError_t cudaMallocAsync(void **pointer, size_t bytes, cudaStream_t stream);
cudaError_t cudaMallocAsync_ptsz(void **pointer, size_t bytes, cudaStream_t stream);
cudaError_t cudaMallocFromPoolAsync(void **pointer, size_t bytes, cudaMemPool_t pool,
                                    cudaStream_t stream);
cudaError_t cudaFreeAsync(void *pointer, cudaStream_t stream);
cudaError_t cudaFreeAsync_ptsz(void *pointer, cudaStream_t stream);
cudaError_t cudaMallocManaged(void **pointer, size_t bytes, unsigned flags);
cudaError_t cudaMemPrefetchAsync(const void *pointer, size_t bytes, struct cudaMemLocation to,
                                 unsigned flags, cudaStream_t stream);
cudaError_t cudaFreeHost(void *pointer);
cudaError_t cudaMemGetInfo(size_t *free, size_t *total);
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device);
cudaError_t cudaDeviceGetMemPool(cudaMemPool_t *pool, int device);
cudaError_t cudaDeviceSetMemPool(int device, cudaMemPool_t pool);
cudaError_t cudaMemPoolCreate(cudaMemPool_t *pool, const struct cudaMemPoolProps *props);
cudaError_t cudaMemPoolDestroy(cudaMemPool_t pool);
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, int kind);
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, int kind,
                            cudaStream_t stream);
cudaError_t cudaMemcpy2D(void *to, size_t to_pitch, const void *from, size_t from_pitch,
                         size_t width, size_t height, int kind);
cudaError_t cudaMemset(void *pointer, int value, size_t bytes);
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer);

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamSynchronize_ptsz(cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags);
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, int mode);
cudaError_t cudaStreamBeginCaptureToGraph(cudaStream_t stream, cudaGraph_t graph,
                                          const void *dependencies, const void *edges, size_t n,
                                          int mode);
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph);
cudaError_t cudaGraphCreate(cudaGraph_t *graph, unsigned flags);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph,
                                 unsigned long long flags);
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream);
cudaError_t cudaGraphDestroy(cudaGraph_t graph);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaEventQuery(cudaEvent_t event);
cudaError_t cudaEventSynchronize(cudaEvent_t event);

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *pointer);
cudaError_t cudaIpcOpenMemHandle(void **pointer, cudaIpcMemHandle_t handle, unsigned flags);
cudaError_t cudaIpcCloseMemHandle(void *pointer);

int cuCtxRecordEvent(void *context, cudaEvent_t event);
int cuDeviceGetAttribute(int *value, int attribute, int device);
int cuDeviceGetName(char *name, int length, int device);
int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags,
                        int *status);
int cuMemAddressReserve(CUdeviceptr *address, size_t bytes, size_t align, CUdeviceptr hint,
                        unsigned long long flags);
int cuMemAllocManaged(CUdeviceptr *address, size_t bytes, unsigned flags);
int cuMemFree_v2(CUdeviceptr address);
int cuPointerGetAttribute(void *value, int attribute, CUdeviceptr address);
int cuMemAllocPitch_v2(CUdeviceptr *address, size_t *pitch, size_t width, size_t height,
                       unsigned element);

/* The stand-in's own (crates/phantom/abi/src/control.rs). */
#define EVERY_STREAM ((cudaStream_t)-1)
uint64_t phantom_physical(uint32_t device);
uint64_t phantom_plain(uint32_t device);
uint64_t phantom_pools(uint32_t device);
uint64_t phantom_handles(uint32_t device);
uint64_t phantom_misuses(void);
uint64_t phantom_hazards(void);
uint64_t phantom_owned(void);
uint64_t phantom_calls(const char *call);
uint64_t phantom_host_now(void);
uint64_t phantom_device_end(void);
void phantom_host_spend(uint64_t nanoseconds);
void phantom_owns(const void *pointer, uint64_t bytes, cudaStream_t stream);
void phantom_disowns(const void *pointer);
int phantom_touch(cudaStream_t stream, const void *pointer, uint64_t bytes);
int phantom_launch(cudaStream_t stream, uint64_t kernels);

/* Ends the program where something is not as it should be. */
#define CHECK(condition) \
    do { \
        if (!(condition)) { \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
            exit(1); \
        } \
    } while (0)

#define OK(call) \
    do { \
        int code_ = (call); \
        if (code_ != 0) { \
            fprintf(stderr, "%s:%d: %s = %d\n", __FILE__, __LINE__, #call, code_); \
            exit(1); \
        } \
    } while (0)

#endif
