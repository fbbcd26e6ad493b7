#include "kernels.h"

#include <string.h>

CUfunction kernel(const char *text, const char *name, CUresult *code) {
    CUmodule module = NULL;
    CUfunction function = NULL;
    *code = cuda.cuModuleLoadData(&module, text);
    if (!*code) *code = cuda.cuModuleGetFunction(&function, module, name);
    return *code ? NULL : function;
}

CUresult launch(CUfunction function, unsigned blocks, unsigned threads, CUstream stream,
                int dependent, void **arguments) {
    CUlaunchAttribute early;
    CUlaunchConfig config;
    memset(&early, 0, sizeof early);
    memset(&config, 0, sizeof config);
    early.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    early.value[0] = 1;
    config.gridDimX = blocks;
    config.blockDimX = threads;
    config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1;
    config.hStream = stream;
    config.attrs = dependent ? &early : NULL;
    config.numAttrs = dependent ? 1 : 0;
    return cuda.cuLaunchKernelEx(&config, function, arguments, NULL);
}

CUresult fill(CUfunction function, CUdeviceptr at, unsigned value, unsigned words,
              uint64_t nanoseconds, CUstream stream) {
    void *arguments[] = {&at, &value, &words, &nanoseconds};
    return launch(function, 256, 256, stream, 0, arguments);
}

CUresult differ(CUfunction function, CUdeviceptr at, unsigned value, unsigned words,
                CUdeviceptr counter, CUstream stream, int dependent) {
    void *arguments[] = {&at, &value, &words, &counter};
    return launch(function, words / 1024, 256, stream, dependent, arguments);
}

int kernels_run(void) {
    CUresult code;
    CUfunction write = kernel(BASIC, "fill", &code);
    CUdeviceptr at = 0;
    unsigned word = 0;
    if (!write || cuda.cuMemAlloc_v2(&at, PAGE)) return 0;
    if (cuda.cuMemsetD32Async(at, 0, 1, NULL) || fill(write, at, 4711, 1, 0, NULL) ||
        cuda.cuCtxSynchronize())
        return 0;
    if (cuda.cuMemcpyDtoH_v2(&word, at, sizeof word)) return 0;
    cuda.cuMemFree_v2(at);
    return word == 4711;
}
