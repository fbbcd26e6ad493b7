/* What torch wheels for CUDA 12 call and the phantom, whose runtime is CUDA 13's, has otherwise.
 * Preloaded behind it, by matrix only. */

#include <stddef.h>
#include <string.h>

/* cudaDeviceProp as CUDA 12 has it; CUDA 13 took the clock rates out. */
struct properties {
    char name[256], uuid[16], luid[8];
    unsigned luidDeviceNodeMask;
    size_t totalGlobalMem, sharedMemPerBlock;
    int regsPerBlock, warpSize;
    size_t memPitch;
    int maxThreadsPerBlock, maxThreadsDim[3], maxGridSize[3], clockRate;
    size_t totalConstMem;
    int major, minor;
    size_t textureAlignment, texturePitchAlignment;
    int deviceOverlap, multiProcessorCount, kernelExecTimeoutEnabled, integrated, canMapHostMemory,
        computeMode;
    int textures[24], surfaces[17];
    size_t surfaceAlignment;
    int concurrentKernels, ECCEnabled, pciBusID, pciDeviceID, pciDomainID, tccDriver,
        asyncEngineCount, unifiedAddressing;
    int memoryClockRate, memoryBusWidth, l2CacheSize, persistingL2CacheMaxSize,
        maxThreadsPerMultiProcessor;
    char rest[512];
};

/* Bytes that CUDA 12's struct has; ours may be longer, and the caller's is not. */
#define PROPERTIES_BYTES 1032

int cudaGetDeviceProperties_v2(struct properties *out, int device) {
    struct properties filled = {.name = "Phantom H100",
                                .totalGlobalMem = (size_t)80 << 30,
                                .sharedMemPerBlock = 48 << 10,
                                .regsPerBlock = 64 << 10,
                                .warpSize = 32,
                                .maxThreadsPerBlock = 1024,
                                .maxThreadsDim = {1024, 1024, 64},
                                .maxGridSize = {2147483647, 65535, 65535},
                                .major = 9,
                                .textureAlignment = 512,
                                .multiProcessorCount = 132,
                                .asyncEngineCount = 3,
                                .unifiedAddressing = 1,
                                .l2CacheSize = 50 << 20,
                                .maxThreadsPerMultiProcessor = 2048};
    (void)device;
    memcpy(out, &filled, PROPERTIES_BYTES);
    return 0;
}

/* CUDA 13 put an argument for the edges' data before the last. */
int cudaStreamGetCaptureInfo(void *, void *, void *, void *, void *, void *, void *);
int cudaStreamGetCaptureInfo_v2(void *stream, void *status, void *id, void *graph, void *nodes,
                                void *count) {
    return cudaStreamGetCaptureInfo(stream, status, id, graph, nodes, NULL, count);
}

int nvtxMarkA(const char *message) { return message != NULL; }
int nvtxRangePushA(const char *message) { return message != NULL; }
int nvtxRangePop(void) { return 0; }
unsigned long nvtxRangeStartA(const char *message) { return message != NULL; }
void nvtxRangeEnd(unsigned long id) { (void)id; }
