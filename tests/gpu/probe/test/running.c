/* For the tests of the probe and of the canaries: a driver that is the stand-in, and besides runs
 * the probe's kernels (on the host, one after another), keeps contents by handle, and is busy for
 * as long as a kernel says. RUNNING_STALE: contents are kept by address, so that what is written
 * through one mapping is not seen through another. (A kernel's memory lies in one mapping, unless
 * they are.) */
#define _GNU_SOURCE
#include "../driver.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* The stand-in's: this library is linked to it. */
#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

/* Where the bytes of a mapping are. */
enum { MAPPINGS = 1 << 16 };
static struct {
    CUdeviceptr at;
    size_t bytes;
    CUmemGenericAllocationHandle handle;
} mappings[MAPPINGS];
static struct {
    CUmemGenericAllocationHandle handle;
    char *bytes;
} contents[MAPPINGS];
static int mapping_count;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static char *bytes_of(CUmemGenericAllocationHandle handle, size_t bytes) {
    for (int i = 0; i < MAPPINGS; i++) {
        if (contents[i].handle == handle) return contents[i].bytes;
        if (contents[i].handle) continue;
        contents[i].handle = handle;
        return contents[i].bytes = calloc(1, bytes);
    }
    abort();
}

static void *host(CUdeviceptr at) {
    void *found = (void *)(uintptr_t)at;
    if (getenv("RUNNING_STALE")) return found;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < mapping_count; i++)
        if (at >= mappings[i].at && at - mappings[i].at < mappings[i].bytes)
            found = bytes_of(mappings[i].handle, mappings[i].bytes) + (at - mappings[i].at);
    pthread_mutex_unlock(&lock);
    return found;
}

CUresult cuMemMap(CUdeviceptr at, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
    CUresult code = NEXT(cuMemMap)(at, bytes, offset, handle, flags);
    pthread_mutex_lock(&lock);
    if (!code && mapping_count < MAPPINGS) {
        mappings[mapping_count].at = at;
        mappings[mapping_count].bytes = bytes;
        mappings[mapping_count++].handle = handle;
    }
    pthread_mutex_unlock(&lock);
    return code;
}

CUresult cuMemUnmap(CUdeviceptr at, size_t bytes) {
    CUresult code = NEXT(cuMemUnmap)(at, bytes);
    if (code) return code;
    pthread_mutex_lock(&lock);
    for (int i = mapping_count; i-- > 0;)
        if (mappings[i].at >= at && mappings[i].at < at + bytes)
            mappings[i] = mappings[--mapping_count];
    pthread_mutex_unlock(&lock);
    return code;
}

/* When the device will be done, by the host's clock. */
static double busy_until;
static pthread_mutex_t busy_lock = PTHREAD_MUTEX_INITIALIZER;

static double clock_now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1e9 + time.tv_nsec;
}

static void be_busy(double nanoseconds) {
    double from = clock_now();
    pthread_mutex_lock(&busy_lock);
    busy_until = (busy_until > from ? busy_until : from) + nanoseconds;
    pthread_mutex_unlock(&busy_lock);
}

static int is_busy(void) {
    pthread_mutex_lock(&busy_lock);
    int busy = clock_now() < busy_until;
    pthread_mutex_unlock(&busy_lock);
    return busy;
}

static void wait_for_device(void) {
    while (is_busy()) usleep(100);
}

CUresult cuStreamQuery(CUstream stream) {
    return is_busy() ? CUDA_ERROR_NOT_READY : NEXT(cuStreamQuery)(stream);
}

CUresult cuStreamSynchronize(CUstream stream) {
    wait_for_device();
    return NEXT(cuStreamSynchronize)(stream);
}

CUresult cuCtxSynchronize(void) {
    wait_for_device();
    return NEXT(cuCtxSynchronize)();
}

/* Waits for all work, as the driver's documentation says. */
CUresult cuMemFree_v2(CUdeviceptr at) {
    wait_for_device();
    return NEXT(cuMemFree_v2)(at);
}

CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t bytes) {
    wait_for_device();
    CUresult code = NEXT(cuMemcpyDtoH_v2)(to, from, bytes);
    if (!code) memcpy(to, host(from), bytes);
    return code;
}

CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t bytes, CUstream stream) {
    CUresult code = NEXT(cuMemcpyDtoHAsync_v2)(to, from, bytes, stream);
    if (!code && bytes < MIB) memcpy(to, host(from), bytes);
    if (!code && bytes >= MIB) be_busy(5e6);
    return code;
}

CUresult cuMemsetD32Async(CUdeviceptr at, unsigned value, size_t words, CUstream stream) {
    CUresult code = NEXT(cuMemsetD32Async)(at, value, words, stream);
    unsigned *word = host(at);
    for (size_t i = 0; !code && words < MIB && i < words; i++) word[i] = value;
    return code;
}

/* The probe's kernels by name, as kernels.h declares them; a function's handle is its name. */
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    (void)module;
    *function = (CUfunction)(uintptr_t)strdup(name);
    return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **arguments,
                          void **extra) {
    const char *name = (const char *)function;
    CUresult code = NEXT(cuLaunchKernelEx)(config, function, arguments, extra);
    if (code) return code;
#define ARGUMENT(type, index) (*(type *)arguments[index])
    unsigned *first = host(ARGUMENT(CUdeviceptr, 0)), found = 0;
    unsigned threads = config->gridDimX * config->gridDimY * config->blockDimX * config->blockDimY;
    if (!strncmp(name, "fill", 4)) {
        const unsigned value = ARGUMENT(unsigned, 1), words = ARGUMENT(unsigned, 2);
        for (unsigned i = 0; i < words; i++) first[i] = value;
        be_busy((double)ARGUMENT(uint64_t, 3));
    } else if (!strncmp(name, "differ", 6)) {
        /* A tile of 4 KiB for each block, where it is the copy engine that reads. */
        const unsigned value = ARGUMENT(unsigned, 1), words = !strcmp(name, "differ_bulk")
                                                                  ? config->gridDimX * 1024
                                                                  : ARGUMENT(unsigned, 2);
        for (unsigned i = 0; i < words; i++) found += first[i] != value;
        *(unsigned *)host(ARGUMENT(CUdeviceptr, 3)) += found;
    } else if (!strcmp(name, "product")) {
        unsigned *second = host(ARGUMENT(CUdeviceptr, 1)), *result = host(ARGUMENT(CUdeviceptr, 2)),
                 side = ARGUMENT(unsigned, 3);
        if (threads != side * side) return CUDA_ERROR_INVALID_VALUE;
        /* The first row is enough of it to be wrong; the others are as it is. */
        for (unsigned column = 0; column < side; column++) {
            unsigned sum = 0;
            for (unsigned k = 0; k < side; k++) sum += first[k] * second[k * side + column];
            for (unsigned row = 0; row < side; row++) result[row * side + column] = sum;
        }
    } else if (!strcmp(name, "write_read")) {
        unsigned *second = host(ARGUMENT(CUdeviceptr, 1)), value = ARGUMENT(unsigned, 2);
        for (unsigned i = 0; i < threads; i++) {
            first[i] = value;
            found += second[i] != value;
        }
        *(unsigned *)host(ARGUMENT(CUdeviceptr, 3)) += found;
    } else {
        return 500; /* No kernel of this name. */
    }
    return CUDA_SUCCESS;
}
