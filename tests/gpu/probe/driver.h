/* What the probe calls of libcuda: no toolkit is needed to build it. `cargo xtask test` holds what
 * is declared here to NVIDIA's own cuda.h. */
#ifndef PROBE_DRIVER_H
#define PROBE_DRIVER_H

#include <stddef.h>
#include <stdint.h>

typedef unsigned CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr, CUmemGenericAllocationHandle;
typedef struct CUctx_st *CUcontext;
typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent;
typedef struct CUgraph_st *CUgraph;
typedef struct CUgraphExec_st *CUgraphExec;
typedef struct CUmemPoolHandle_st *CUmemoryPool;
typedef struct CUmod_st *CUmodule;
typedef struct CUfunc_st *CUfunction;

typedef struct {
    int type, id;
} CUmemLocation;

typedef struct {
    int type, requestedHandleTypes;
    CUmemLocation location;
    void *win32HandleMetaData;
    struct {
        unsigned char compressionType, gpuDirectRDMACapable;
        unsigned short usage;
        unsigned char reserved[4];
    } allocFlags;
} CUmemAllocationProp;

typedef struct {
    CUmemLocation location;
    int flags;
} CUmemAccessDesc;

typedef struct {
    int allocType, handleTypes;
    CUmemLocation location;
    void *win32SecurityAttributes;
    size_t maxSize;
    unsigned char reserved[56];
} CUmemPoolProps;

/* An attribute of a launch; the value is a union of 64 bytes, of which the probe sets an int. */
typedef struct {
    int id, pad;
    int value[16];
} CUlaunchAttribute;

typedef struct {
    unsigned gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes;
    CUstream hStream;
    CUlaunchAttribute *attrs;
    unsigned numAttrs;
} CUlaunchConfig;

enum {
    CUDA_SUCCESS = 0,
    CUDA_ERROR_INVALID_VALUE = 1,
    CUDA_ERROR_OUT_OF_MEMORY = 2,
    CUDA_ERROR_NOT_READY = 600,
    CUDA_ERROR_NOT_SUPPORTED = 801,
    CU_STREAM_NON_BLOCKING = 1,
    CU_EVENT_DEFAULT = 0,
    CU_EVENT_DISABLE_TIMING = 2,
    CU_STREAM_CAPTURE_MODE_GLOBAL = 0,
    CU_STREAM_CAPTURE_MODE_THREAD_LOCAL = 1,
    CU_STREAM_CAPTURE_MODE_RELAXED = 2,
    CU_STREAM_CAPTURE_STATUS_ACTIVE = 1,
    CU_MEM_ALLOCATION_TYPE_PINNED = 1,
    CU_MEM_LOCATION_TYPE_DEVICE = 1,
    CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3,
    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1,
    CU_MEM_HANDLE_TYPE_FABRIC = 8,
    CU_MEM_ALLOC_GRANULARITY_MINIMUM = 0,
    CU_MEM_ALLOC_GRANULARITY_RECOMMENDED = 1,
    CU_MEMPOOL_ATTR_RELEASE_THRESHOLD = 4,
    CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION = 6,
    CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16,
    CU_DEVICE_ATTRIBUTE_INTEGRATED = 18,
    CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING = 41,
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75,
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76,
    CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 102,
    CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED = 103,
    CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED = 110,
    CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED = 115,
    CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES = 119,
    CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED = 128,
};

/* name as libcuda exports it, arguments */
#define FUNCTIONS(F)                                                                               \
    F(cuInit, (unsigned flags))                                                                    \
    F(cuDriverGetVersion, (int *version))                                                          \
    F(cuDeviceGetName, (char *name, int length, CUdevice device))                                  \
    F(cuDeviceGetAttribute, (int *value, int attribute, CUdevice device))                          \
    F(cuDeviceTotalMem_v2, (size_t *bytes, CUdevice device))                                       \
    F(cuDevicePrimaryCtxRetain, (CUcontext * context, CUdevice device))                            \
    F(cuCtxSetCurrent, (CUcontext context))                                                        \
    F(cuCtxGetCurrent, (CUcontext * context))                                                      \
    F(cuCtxSynchronize, (void))                                                                    \
    F(cuCtxRecordEvent, (CUcontext context, CUevent event))                                        \
    F(cuThreadExchangeStreamCaptureMode, (int *mode))                                              \
    F(cuMemGetInfo_v2, (size_t *free, size_t *total))                                              \
    F(cuMemAlloc_v2, (CUdeviceptr * address, size_t bytes))                                        \
    F(cuMemFree_v2, (CUdeviceptr address))                                                         \
    F(cuMemHostAlloc, (void **pointer, size_t bytes, unsigned flags))                              \
    F(cuMemFreeHost, (void *pointer))                                                              \
    F(cuMemcpyHtoD_v2, (CUdeviceptr to, const void *from, size_t bytes))                           \
    F(cuMemcpyDtoH_v2, (void *to, CUdeviceptr from, size_t bytes))                                 \
    F(cuMemcpyDtoHAsync_v2, (void *to, CUdeviceptr from, size_t bytes, CUstream stream))           \
    F(cuMemsetD32Async, (CUdeviceptr address, unsigned value, size_t words, CUstream stream))      \
    F(cuMemGetAllocationGranularity, (size_t *bytes, const CUmemAllocationProp *prop, int option)) \
    F(cuMemAddressReserve, (CUdeviceptr * address, size_t bytes, size_t alignment,                 \
                            CUdeviceptr wish, unsigned long long flags))                           \
    F(cuMemAddressFree, (CUdeviceptr address, size_t bytes))                                       \
    F(cuMemCreate, (CUmemGenericAllocationHandle * handle, size_t bytes,                           \
                    const CUmemAllocationProp *prop, unsigned long long flags))                    \
    F(cuMemRelease, (CUmemGenericAllocationHandle handle))                                         \
    F(cuMemMap, (CUdeviceptr address, size_t bytes, size_t offset,                                 \
                 CUmemGenericAllocationHandle handle, unsigned long long flags))                   \
    F(cuMemUnmap, (CUdeviceptr address, size_t bytes))                                             \
    F(cuMemSetAccess,                                                                              \
      (CUdeviceptr address, size_t bytes, const CUmemAccessDesc *access, size_t count))            \
    F(cuMemExportToShareableHandle,                                                                \
      (void *shared, CUmemGenericAllocationHandle handle, int type, unsigned long long flags))     \
    F(cuMemImportFromShareableHandle,                                                              \
      (CUmemGenericAllocationHandle * handle, void *shared, int type))                             \
    F(cuMemPoolCreate, (CUmemoryPool * pool, const CUmemPoolProps *props))                         \
    F(cuMemPoolDestroy, (CUmemoryPool pool))                                                       \
    F(cuMemPoolTrimTo, (CUmemoryPool pool, size_t keep))                                           \
    F(cuMemPoolSetAttribute, (CUmemoryPool pool, int attribute, void *value))                      \
    F(cuMemPoolSetAccess, (CUmemoryPool pool, const CUmemAccessDesc *access, size_t count))        \
    F(cuMemAllocFromPoolAsync,                                                                     \
      (CUdeviceptr * address, size_t bytes, CUmemoryPool pool, CUstream stream))                   \
    F(cuMemFreeAsync, (CUdeviceptr address, CUstream stream))                                      \
    F(cuStreamCreate, (CUstream * stream, unsigned flags))                                         \
    F(cuStreamDestroy_v2, (CUstream stream))                                                       \
    F(cuStreamSynchronize, (CUstream stream))                                                      \
    F(cuStreamQuery, (CUstream stream))                                                            \
    F(cuStreamWaitEvent, (CUstream stream, CUevent event, unsigned flags))                         \
    F(cuStreamGetId, (CUstream stream, unsigned long long *id))                                    \
    F(cuStreamIsCapturing, (CUstream stream, int *status))                                         \
    F(cuStreamGetCaptureInfo_v2,                                                                   \
      (CUstream stream, int *status, uint64_t *id, CUgraph *graph, void *nodes, size_t *count))    \
    F(cuStreamBeginCapture_v2, (CUstream stream, int mode))                                        \
    F(cuStreamEndCapture, (CUstream stream, CUgraph * graph))                                      \
    F(cuGraphInstantiateWithFlags, (CUgraphExec * exec, CUgraph graph, unsigned long long flags))  \
    F(cuGraphLaunch, (CUgraphExec exec, CUstream stream))                                          \
    F(cuGraphExecDestroy, (CUgraphExec exec))                                                      \
    F(cuGraphDestroy, (CUgraph graph))                                                             \
    F(cuEventCreate, (CUevent * event, unsigned flags))                                            \
    F(cuEventDestroy_v2, (CUevent event))                                                          \
    F(cuEventRecord, (CUevent event, CUstream stream))                                             \
    F(cuEventQuery, (CUevent event))                                                               \
    F(cuEventSynchronize, (CUevent event))                                                         \
    F(cuEventElapsedTime, (float *milliseconds, CUevent from, CUevent to))                         \
    F(cuModuleLoadData, (CUmodule * module, const void *image))                                    \
    F(cuModuleGetFunction, (CUfunction * function, CUmodule module, const char *name))             \
    F(cuLaunchKernelEx,                                                                            \
      (const CUlaunchConfig *config, CUfunction function, void **arguments, void **extra))

#define DECLARE(name, arguments) CUresult name arguments;
FUNCTIONS(DECLARE)

/* The functions that were found; one that the driver lacks answers ABSENT. */
#define POINTER(name, arguments) __typeof__(&name) name;
struct driver {
    FUNCTIONS(POINTER)
};
extern struct driver cuda;
#define ABSENT 99999u

#define MIB ((size_t)1 << 20)
#define GIB ((size_t)1 << 30)
/* What the library maps and unmaps by. */
#define PAGE (2 * MIB)

/* Opens libcuda (NULL: libcuda.so.1) and looks everything up; why not, or NULL. */
const char *driver_open(const char *library);
/* Makes the first device's primary context current. Ends the process where there is none. */
void driver_enter(void);

extern CUcontext context;
int attribute(int which);
size_t free_memory(void);
size_t total_memory(void);
/* Nanoseconds. */
double now(void);

/* Memory of the device as the library makes it; with the RDMA flag where it works. Asked for the
 * first time outside of captures. */
CUmemAllocationProp ordinary(void);
extern const CUmemAccessDesc own_access;
CUstream new_stream(void);
CUevent new_event(void);
/* Calls that cannot be gone on without: the process ends, and says which failed; with LOST where
 * work of the device has gone wrong. */
#define LOST 3
#define MUST(call) must(call, #call, __FILE__, __LINE__)
void must(CUresult code, const char *call, const char *file, int line);

/* Address space, physical memory and a mapping with access, one after another. */
CUdeviceptr reserve(size_t bytes);
CUmemGenericAllocationHandle create(size_t bytes);
void map(CUdeviceptr at, size_t bytes, CUmemGenericAllocationHandle handle);

#endif
