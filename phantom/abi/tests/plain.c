/* What a plain program may expect of the stand-in's runtime. One part a run: the first argument
 * names it. */
#include "../../../tests/preload/cudart.h"
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define MIB ((size_t)1 << 20)

static void pitch(void) {
    void *rows;
    size_t step;
    OK(cudaMallocPitch(&rows, &step, 1000, 3));
    CHECK(step == 1024 && phantom_plain(0) == 2 * MIB);
    struct cudaPointerAttributes facts;
    OK(cudaPointerGetAttributes(&facts, (char *)rows + 2 * 1024 + 999));
    CHECK(facts.type == cudaMemoryTypeDevice && facts.device == 0);
    OK(cudaFree(rows));
    struct cudaPitchedPtr volume;
    OK(cudaMalloc3D(&volume, (struct cudaExtent){513, 1024, 4}));
    CHECK(volume.pitch == 1024 && volume.xsize == 513 && volume.ysize == 1024 &&
          phantom_plain(0) == 4 * MIB);
    OK(cudaFree(volume.ptr));
    OK(cudaMallocPitch(&rows, &step, 0, 3));
    CHECK(rows == NULL);
    CHECK(cudaMallocPitch(&rows, &step, SIZE_MAX / 2, 16) == cudaErrorMemoryAllocation);
    CUdeviceptr address;
    OK(cuMemAllocPitch_v2(&address, &step, 100, 100, 4));
    CHECK(step == 512);
    CHECK(cuMemAllocPitch_v2(&address, &step, 100, 100, 3) == cudaErrorInvalidValue);
}

/* Stream 0 of the twins is the thread's own: a free on the legacy stream, which waits for it, may
 * be reused there. */
static void twins(void) {
    void *a, *b;
    OK(cudaMallocAsync_ptsz(&a, MIB, 0));
    OK(phantom_launch((cudaStream_t)2, 1));
    OK(cudaFreeAsync_ptsz(a, 0));
    OK(cudaMallocAsync_ptsz(&b, MIB, 0));
    CHECK(a == b);
    OK(cudaFreeAsync_ptsz(b, 0));
    CHECK(phantom_host_now() < phantom_device_end());
    OK(cudaStreamSynchronize_ptsz(0));
    CHECK(phantom_host_now() == phantom_device_end());
    void *plain, *twin;
    int status;
    OK(cuGetProcAddress_v2("cuMemFreeAsync", &plain, 13000, 0, &status));
    OK(cuGetProcAddress_v2("cuMemFreeAsync", &twin, 13000, 2, &status));
    CHECK(plain != NULL && twin != NULL && plain != twin);
    OK(cuGetProcAddress_v2("cuMemFree", &twin, 13000, 2, &status));
    CHECK(twin != NULL);
}

static void pools(void) {
    cudaMemPool_t usual, own, now;
    struct cudaMemPoolProps props = {.allocType = 1, .location = {1, 0}};
    void *block;
    OK(cudaDeviceGetDefaultMemPool(&usual, 0));
    OK(cudaMemPoolCreate(&own, &props));
    OK(cudaDeviceGetMemPool(&now, 0));
    CHECK(now == usual && own != usual);
    OK(cudaDeviceSetMemPool(0, own));
    OK(cudaDeviceGetMemPool(&now, 0));
    CHECK(now == own);
    OK(cudaMallocAsync(&block, MIB, 0));
    CHECK(cudaMemPoolDestroy(own) != cudaSuccess); /* it is in use */
    OK(cudaFreeAsync(block, 0));
    OK(cudaDeviceSetMemPool(0, usual));
    OK(cudaDeviceSynchronize());
    OK(cudaMemPoolDestroy(own));
    CHECK(cudaDeviceSetMemPool(0, own) == cudaErrorInvalidValue);
    OK(cudaMallocAsync(&block, 0, 0));
    CHECK(block == NULL);
}

/* One process exports, another opens. */
static void ipc(void) {
    int channel[2];
    CHECK(pipe(channel) == 0);
    pid_t child = fork();
    cudaIpcMemHandle_t handle;
    if (child != 0) {
        char *memory;
        void *pooled;
        OK(cudaMalloc((void **)&memory, 3 * MIB));
        OK(cudaIpcGetMemHandle(&handle, memory + 5));
        CHECK(cudaIpcOpenMemHandle(&pooled, handle, 1) != cudaSuccess); /* its own */
        CHECK(write(channel[1], &handle, sizeof handle) == sizeof handle);
        OK(cudaMallocAsync(&pooled, MIB, 0));
        CHECK(cudaIpcGetMemHandle(&handle, pooled) == cudaErrorInvalidValue);
        CUdeviceptr reserved;
        OK(cuMemAddressReserve(&reserved, 2 * MIB, 0, 0, 0));
        CHECK(cudaIpcGetMemHandle(&handle, (void *)(uintptr_t)reserved) == cudaErrorInvalidValue);
        CHECK(cudaGetLastError() == cudaErrorInvalidValue);
        int status;
        CHECK(waitpid(child, &status, 0) == child && status == 0);
        return;
    }
    void *first, *second;
    CHECK(read(channel[0], &handle, sizeof handle) == sizeof handle);
    OK(cudaIpcOpenMemHandle(&first, handle, 1));
    OK(cudaIpcOpenMemHandle(&second, handle, 1));
    CHECK(first == second && phantom_plain(0) == 4 * MIB);
    cudaIpcMemHandle_t again;
    CHECK(cudaIpcGetMemHandle(&again, first) == cudaErrorInvalidValue); /* only its owner may */
    OK(cudaIpcCloseMemHandle(first));
    OK(cudaIpcCloseMemHandle(first));
    CHECK(phantom_plain(0) == 0 && cudaIpcCloseMemHandle(first) == cudaErrorInvalidValue);
    exit(0);
}

static void reset(void) {
    void *plain, *pooled;
    cudaStream_t stream;
    OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    OK(cudaMalloc(&plain, MIB));
    OK(cudaMallocAsync(&pooled, MIB, stream));
    OK(cudaDeviceReset());
    CHECK(phantom_physical(0) == 0);
    CHECK(cudaStreamSynchronize(stream) != cudaSuccess);
    CHECK(cudaFree(plain) != cudaSuccess);
    OK(cudaMallocAsync(&pooled, MIB, 0));
    OK(cudaFree(pooled));
}

/* The driver's calls for mapped memory, as far as contents() needs them. */
struct physical {
    int kind, handle_types, location_kind, location;
    void *metadata;
    unsigned char flags[8];
};
struct access { int location_kind, location, flags; };
int cuMemAddressFree(CUdeviceptr address, size_t bytes);
int cuMemCreate(unsigned long long *handle, size_t bytes, const struct physical *properties,
                unsigned long long flags);
int cuMemRelease(unsigned long long handle);
int cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, unsigned long long handle,
             unsigned long long flags);
int cuMemUnmap(CUdeviceptr address, size_t bytes);
int cuMemSetAccess(CUdeviceptr address, size_t bytes, const struct access *to, size_t count);
int cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t bytes);
int cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes);
int cuMemsetD8_v2(CUdeviceptr address, unsigned char value, size_t bytes);

static int all_are(CUdeviceptr address, unsigned char value, size_t bytes) {
    unsigned char *host = malloc(bytes);
    OK(cuMemcpyDtoH_v2(host, address, bytes));
    size_t same = 0;
    while (same < bytes && host[same] == value) same++;
    free(host);
    return same == bytes;
}

/* What is in mapped memory belongs to its physical handle. */
static void contents(void) {
    enum { POISON = 0xdb, INVALID_VALUE = 1 };
    const size_t page = 2 * MIB, bytes = 3 * page;
    const struct physical pinned = {.kind = 1, .location_kind = 1};
    const struct access all = {.location_kind = 1, .flags = 3};
    char host[1] = {0};
    unsigned long long handle, next;
    CUdeviceptr range;
    OK(cudaFree(NULL));
    OK(cuMemAddressReserve(&range, 4 * bytes, page, 0, 0));
    CUdeviceptr a = range, b = range + bytes, c = range + 2 * bytes;
    OK(cuMemCreate(&handle, bytes, &pinned, 0));
    OK(cuMemMap(a, bytes, 0, handle, 0));
    OK(cuMemMap(b, bytes, 0, handle, 0));
    /* A mapping is nobody's until access is set. */
    CHECK(cuMemsetD8_v2(a, 1, 1) == INVALID_VALUE && cuMemcpyDtoH_v2(host, a, 1) == INVALID_VALUE);
    OK(cuMemSetAccess(a, 2 * bytes, &all, 1));
    CHECK(all_are(b, POISON, bytes));
    /* At any size, through every mapping. */
    OK(cuMemsetD8_v2(a, 0x5a, bytes));
    CHECK(all_are(b, 0x5a, bytes));
    /* Across mappings too, and where nothing is mapped it is an error. */
    CHECK(cuMemcpyDtoD_v2(c, b, 1) == INVALID_VALUE &&
          cuMemcpyDtoH_v2(host, c, 1) == INVALID_VALUE);
    /* Not gone with one mapping, nor with the handle. */
    OK(cuMemUnmap(a, bytes));
    CHECK(cuMemcpyDtoH_v2(host, a, 1) == INVALID_VALUE);
    OK(cuMemMap(c, bytes, 0, handle, 0));
    OK(cuMemSetAccess(c, bytes, &all, 1));
    OK(cuMemRelease(handle));
    OK(cuMemUnmap(b, bytes));
    CHECK(all_are(c, 0x5a, bytes));
    /* Another handle at the same address has its own. */
    OK(cuMemCreate(&next, bytes, &pinned, 0));
    OK(cuMemMap(b, bytes, 0, next, 0));
    OK(cuMemSetAccess(b, bytes, &all, 1));
    CHECK(all_are(b, POISON, bytes));
    OK(cuMemcpyDtoD_v2(b, c, bytes));
    CHECK(all_are(b, 0x5a, bytes));
    OK(cuMemUnmap(b, 2 * bytes));
    OK(cuMemMap(a, bytes, 0, next, 0));
    OK(cuMemSetAccess(a, bytes, &all, 1));
    CHECK(all_are(a, 0x5a, bytes));
    OK(cuMemUnmap(a, bytes));
    OK(cuMemRelease(next));
    OK(cuMemAddressFree(range, 4 * bytes));
    /* What was reserved is good for anything afterwards. */
    void *plain;
    OK(cudaMalloc(&plain, 4 * bytes));
    OK(cuMemsetD8_v2((CUdeviceptr)(uintptr_t)plain, 7, 4 * bytes));
    CHECK(all_are((CUdeviceptr)(uintptr_t)plain, 7, 4 * bytes));
    OK(cudaFree(plain));
}

static void graphs(void) {
    void *block, *other;
    cudaStream_t stream;
    cudaGraph_t graph, same;
    cudaGraphExec_t exec;
    OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    OK(cudaGraphCreate(&graph, 0));
    for (int i = 0; i < 2; i++) {
        OK(cudaStreamBeginCaptureToGraph(stream, graph, NULL, NULL, 0, 0));
        OK(cudaMallocAsync(&block, MIB, stream));
        OK(phantom_launch(stream, 2));
        OK(cudaFreeAsync(block, stream));
        OK(cudaStreamEndCapture(stream, &same));
        CHECK(same == graph);
    }
    CHECK(phantom_pools(0) == 0 && phantom_plain(0) == 4 * MIB);
    OK(cudaStreamBeginCapture(stream, 0));
    OK(cudaMallocAsync(&other, MIB, stream));
    OK(cudaStreamEndCapture(stream, &same));
    CHECK(same != graph);
    OK(cudaGraphInstantiate(&exec, graph, 0));
    OK(cudaGraphLaunch(exec, stream));
    OK(cudaDeviceSynchronize());
    OK(cudaGraphDestroy(graph));
    OK(cudaGraphExecDestroy(exec));
    CHECK(phantom_plain(0) == 2 * MIB);
    OK(cudaGraphDestroy(same));
    OK(cudaFree(other));
    CHECK(phantom_physical(0) == 0);
}

/* 0: the function is there; else what it answers. */
static int context_event(cudaStream_t stream) {
    cudaEvent_t event;
    OK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    OK(phantom_launch(stream, 1));
    int code = cuCtxRecordEvent(NULL, event);
    if (code == 0) {
        CHECK(cudaEventQuery(event) == cudaErrorNotReady);
        OK(cudaEventSynchronize(event));
        CHECK(phantom_host_now() == phantom_device_end());
    }
    return code;
}

static void context(void) {
    cudaStream_t stream;
    OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    OK(context_event(stream));
    cudaStream_t capturing;
    cudaGraph_t graph;
    OK(cudaStreamCreateWithFlags(&capturing, cudaStreamNonBlocking));
    OK(cudaStreamBeginCapture(capturing, 0));
    CHECK(context_event(stream) == 900);
    CHECK(cudaStreamEndCapture(capturing, &graph) == 901);
}

static void old_driver(void) {
    CHECK(context_event(0) == 801);
}

static void managed(void) {
    void *pointer;
    CUdeviceptr address;
    CHECK(cudaMallocManaged(&pointer, MIB, 1) != cudaSuccess);
    OK(cudaMalloc(&pointer, MIB)); /* the driver's side needs cuInit */
    CHECK(cuMemAllocManaged(&address, MIB, 1) != cudaSuccess);
}

/* What the oracle sees of a program; its last line is the number of hazards. */
static void oracle(void) {
    char *block;
    cudaStream_t a, b;
    OK(cudaStreamCreateWithFlags(&a, cudaStreamNonBlocking));
    OK(cudaStreamCreateWithFlags(&b, cudaStreamNonBlocking));
    OK(cudaMallocAsync((void **)&block, MIB, a));
    phantom_owns(block, MIB, a);
    OK(phantom_touch(a, block, MIB));
    CHECK(phantom_hazards() == 0 && phantom_owned() == MIB);
    OK(phantom_touch(b, block + 4096, 1)); /* the other one is not done */
    CHECK(phantom_hazards() == 1);
    OK(cudaDeviceSynchronize());
    OK(cudaMemset(block, 1, 4096));
    char byte = 0;
    OK(cudaMemcpy(&byte, block + 7, 1, cudaMemcpyDeviceToHost));
    CHECK(byte == 1 && phantom_hazards() == 1);
    phantom_disowns(block);
    OK(cudaMemcpy(&byte, block + 7, 1, cudaMemcpyDeviceToHost)); /* freed */
    CHECK(phantom_hazards() == 2);
    OK(cudaFreeAsync(block, a));
}

int main(int count, char **arguments) {
    const struct { const char *name; void (*run)(void);
    } parts[] = {
        {"pitch", pitch},     {"twins", twins},           {"pools", pools},
        {"ipc", ipc},         {"reset", reset},           {"graphs", graphs},
        {"context", context}, {"old_driver", old_driver}, {"managed", managed},
        {"oracle", oracle},   {"contents", contents},
    };
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        if (count == 2 && strcmp(arguments[1], parts[i].name) == 0) {
            parts[i].run();
            return 0;
        }
    }
    return 2;
}
