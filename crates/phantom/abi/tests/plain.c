/* What a plain program may expect of the stand-in's runtime. One part a run: the first argument
 * names it. */
#include "../../../../tests/preload/cudart.h"
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
    CHECK(cudaMemPoolDestroy(usual) == cudaErrorInvalidValue); /* the device's own stays */
    CHECK(cudaDeviceSetMemPool(0, own) == cudaErrorInvalidValue);
    OK(cudaMallocAsync(&block, 0, 0));
    CHECK(block == NULL);
}

/* The last reference to a primary context ends it, and its memory with it. */
int cuInit(unsigned flags);
int cuDevicePrimaryCtxRetain(void **context, int device);
int cuDevicePrimaryCtxRelease_v2(int device);
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active);
int cuCtxSetCurrent(void *context);
int cuMemAlloc_v2(CUdeviceptr *address, size_t bytes);
static void primary(void) {
    void *context;
    CUdeviceptr address;
    unsigned flags;
    int active;
    OK(cuInit(0));
    for (int i = 0; i < 2; i++) OK(cuDevicePrimaryCtxRetain(&context, 0));
    OK(cuCtxSetCurrent(context));
    OK(cuMemAlloc_v2(&address, 3 * MIB));
    OK(cuDevicePrimaryCtxRelease_v2(0));
    CHECK(phantom_plain(0) == 4 * MIB);
    OK(cuDevicePrimaryCtxRelease_v2(0));
    OK(cuDevicePrimaryCtxGetState(0, &flags, &active));
    CHECK(active == 0 && phantom_plain(0) == 0);
    CHECK(cuDevicePrimaryCtxRelease_v2(0) != 0);
}

/* The runtime has names of its own for errors. */
static void names(void) {
    CHECK(strcmp(cudaGetErrorName(cudaSuccess), "cudaSuccess") == 0);
    CHECK(strcmp(cudaGetErrorName(cudaErrorMemoryAllocation), "cudaErrorMemoryAllocation") == 0);
    CHECK(strcmp(cudaGetErrorName(cudaErrorNotReady), "cudaErrorNotReady") == 0);
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
    unsigned char *pointer, *plain;
    CUdeviceptr address;
    struct cudaPointerAttributes facts;
    size_t free_before, free_now, total;
    int is_managed;
    OK(cudaMalloc((void **)&plain, MIB));
    OK(cudaMemGetInfo(&free_before, &total));
    /* More than the device has: it is the host's. */
    OK(cudaMallocManaged((void **)&pointer, total + MIB, 1));
    CHECK(cudaMallocManaged((void **)&address, 0, 1) == cudaErrorInvalidValue);
    OK(cudaMemGetInfo(&free_now, &total));
    CHECK(free_now == free_before && phantom_plain(0) == 2 * MIB);
    OK(cudaPointerGetAttributes(&facts, pointer + total));
    CHECK(facts.type == cudaMemoryTypeManaged && facts.device == 0);
    CHECK(facts.devicePointer == facts.hostPointer);
    OK(cudaMemPrefetchAsync(pointer, MIB, (struct cudaMemLocation){1, 0}, 0, 0));
    CHECK(cudaMemPrefetchAsync(plain, MIB, (struct cudaMemLocation){1, 0}, 0, 0) != cudaSuccess);
    /* The host and copies reach it. */
    pointer[MIB - 1] = 7;
    OK(cudaMemcpy(pointer, pointer + MIB - 1, 1, cudaMemcpyDefault));
    CHECK(pointer[0] == 7);
    OK(cudaMemset(pointer, 9, 2));
    CHECK(pointer[1] == 9);
    CHECK(cudaFreeHost(pointer) != cudaSuccess);
    OK(cudaFree(pointer));
    CHECK(cudaFree(pointer) != cudaSuccess);
    OK(cuMemAllocManaged(&address, MIB, 1));
    OK(cuPointerGetAttribute(&is_managed, 8, address));
    CHECK(is_managed == 1);
    OK(cuPointerGetAttribute(&is_managed, 8, (CUdeviceptr)plain));
    CHECK(is_managed == 0);
    OK(cuMemFree_v2(address));
    OK(cudaFree(plain));
}

/* The devices look as the environment says (an RTX 4090 here). */
static void looks(void) {
    enum { COUNT = 16, L2 = 38, THREADS = 39, MAJOR = 75, MINOR = 76, SHARED = 81, BLOCK = 97,
           BLOCKS = 106, CLUSTERS = 120 };
    char name[256];
    int value;
    OK(cudaFree(NULL));
    OK(cuDeviceGetName(name, sizeof name, 0));
    CHECK(strcmp(name, "NVIDIA GeForce RTX 4090 (stand-in)") == 0);
    const int wanted[][2] = {{COUNT, 128}, {L2, 72 << 20}, {THREADS, 1536}, {MAJOR, 8}, {MINOR, 9},
                             {SHARED, 100 << 10}, {BLOCK, 99 << 10}, {BLOCKS, 24}, {CLUSTERS, 0}};
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        OK(cuDeviceGetAttribute(&value, wanted[i][0], 0));
        CHECK(value == wanted[i][1]);
        OK(cudaDeviceGetAttribute(&value, wanted[i][0], 0));
        CHECK(value == wanted[i][1]);
    }
    char properties[1008]; /* cudaDeviceProp of CUDA 13: the name is its first member */
    OK(cudaGetDeviceProperties(properties, 0));
    CHECK(strcmp(properties, name) == 0);
}

/* Nothing but the parts of host memory that the program wrote itself is in `resident` bytes. */
static size_t resident(void) {
    size_t pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    CHECK(file != NULL && fscanf(file, "%*s %zu", &pages) == 1);
    fclose(file);
    return pages * 4096;
}

/* What the host reads of memory that a kernel would have written. */
static void values(int random) {
    const size_t limit = 64 << 10, big = 256 * MIB;
    unsigned char *memory, *seen = malloc(big), *again = malloc(limit);
    int64_t *words = (int64_t *)seen;
    OK(cudaMalloc((void **)&memory, big));
    memset(seen, 0xee, limit);
    OK(cudaMemcpy(seen, memory, limit, cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < limit / 8; i++) {
        CHECK(random ? words[i] >= 1 && words[i] <= 7 : words[i] == 0);
    }
    OK(cudaMemcpyAsync(again, memory, limit, cudaMemcpyDeviceToHost, 0));
    CHECK(memcmp(seen, again, limit) == 0);
    /* One byte may be a bool. */
    int ones = 0;
    for (int i = 0; i < 64; i++) {
        OK(cudaMemcpy(seen, memory + i, 1, cudaMemcpyDeviceToHost));
        CHECK(seen[0] <= 1);
        ones += seen[0];
    }
    CHECK(random ? ones > 0 && ones < 64 : ones == 0);
    /* What was copied in, within the device, and filled reads back. */
    memset(again, 0x5a, 100);
    OK(cudaMemcpy(memory + 100, again, 100, cudaMemcpyHostToDevice));
    OK(cudaMemcpy(memory + 300, memory + 100, 100, cudaMemcpyDeviceToDevice));
    OK(cudaMemset(memory + 400, 0x33, 100));
    OK(cudaMemcpy(seen, memory, 600, cudaMemcpyDeviceToHost));
    for (int i = 100; i < 500; i++) {
        int made = i >= 200 && i < 300;
        CHECK(made ? seen[i] <= 7 : seen[i] == (i < 400 ? 0x5a : 0x33));
    }
    /* A copy that was skipped tells nobody anything. */
    OK(cudaMemcpy(memory, again, limit, cudaMemcpyHostToDevice));
    OK(cudaMemcpy(seen, memory, 600, cudaMemcpyDeviceToHost));
    CHECK(seen[50] == 0x5a);
    OK(cudaMemcpy(memory, seen, 2 * limit, cudaMemcpyHostToDevice));
    OK(cudaMemcpy(seen, memory, 600, cudaMemcpyDeviceToHost));
    CHECK(seen[50] <= 7 && seen[450] <= 7);
    /* However large, all of it is written, and untouched memory of the host's stays untouched. */
    memset(seen, 0xee, MIB);
    size_t before = resident();
    OK(cudaMemcpy(seen, memory, big, cudaMemcpyDeviceToHost));
    CHECK(resident() - before < 16 * MIB);
    for (size_t i = 0; i < big / 8; i++) {
        CHECK(random && i < limit / 8 ? words[i] >= 1 && words[i] <= 7 : words[i] == 0);
    }
    /* Nor is it known any more once the driver had it back. */
    OK(cudaMemcpy(memory, again, 100, cudaMemcpyHostToDevice));
    OK(cudaFree(memory));
    OK(cudaMalloc((void **)&memory, big));
    OK(cudaMemcpy(seen, memory, 100, cudaMemcpyDeviceToHost));
    CHECK(seen[50] <= 7);
    OK(cudaFree(memory));
}

static void zeros(void) { values(0); }
static void small_numbers(void) { values(1); }

/* Two copies to the host, one of them of rows; those in other directions, and those that a graph
 * remembers, are none. */
/* To ask for a device makes no context; its use does. */
static void contexts(void) {
    const char *file = getenv("PHANTOM_CONTEXTS");
    char properties[1008];
    OK(cudaGetDeviceProperties(properties, 0));
    CHECK(access(file, F_OK) != 0);
    OK(cudaSetDevice(0));
    CHECK(access(file, F_OK) == 0);
}

static void host_reads(void) {
    char *memory, here[1000];
    cudaStream_t stream;
    cudaGraph_t graph;
    OK(cudaMalloc((void **)&memory, MIB));
    OK(cudaMemcpy(memory, here, 1000, cudaMemcpyHostToDevice));
    OK(cudaMemcpy(memory + 4096, memory, 1000, cudaMemcpyDeviceToDevice));
    OK(cudaMemcpy(here, memory, 1000, cudaMemcpyDeviceToHost));
    OK(cudaMemcpy2D(here, 100, memory, 512, 100, 7, cudaMemcpyDeviceToHost));
    OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    OK(cudaStreamBeginCapture(stream, 0));
    OK(cudaMemcpyAsync(here, memory, 1000, cudaMemcpyDeviceToHost, stream));
    OK(cudaStreamEndCapture(stream, &graph));
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

/* NVML, as its header has it. */
typedef void *nvmlDevice_t;
struct nvmlMemory { unsigned long long total, free, used; };
struct nvmlProcess { unsigned pid; unsigned long long used; };
struct nvmlFabric {
    unsigned version;
    unsigned char cluster[16];
    unsigned status, clique;
    unsigned char state;
    unsigned health_mask;
};
extern int nvmlInit_v2(void), nvmlShutdown(void), nvmlDeviceGetCount_v2(unsigned *),
    nvmlDeviceGetHandleByIndex_v2(unsigned, nvmlDevice_t *),
    nvmlDeviceGetHandleByPciBusId_v2(const char *, nvmlDevice_t *),
    nvmlDeviceGetHandleByUUID(const char *, nvmlDevice_t *),
    nvmlDeviceGetName(nvmlDevice_t, char *, unsigned),
    nvmlDeviceGetUUID(nvmlDevice_t, char *, unsigned),
    nvmlDeviceGetMemoryInfo(nvmlDevice_t, struct nvmlMemory *),
    nvmlDeviceGetComputeRunningProcesses(nvmlDevice_t, unsigned *, struct nvmlProcess *),
    nvmlDeviceGetNvLinkRemoteDeviceType(nvmlDevice_t, unsigned, unsigned *),
    nvmlDeviceGetNvLinkRemotePciInfo_v2(nvmlDevice_t, unsigned, void *),
    nvmlDeviceGetGpuFabricInfoV(nvmlDevice_t, struct nvmlFabric *),
    nvmlSystemGetCudaDriverVersion_v2(int *);
extern int cuDeviceGetUuid(unsigned char *, int), cuDeviceGetPCIBusId(char *, int, int),
    cuDriverGetVersion(int *);
enum { UNINITIALIZED = 1, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7,
       VERSION_MISMATCH = 25, UNKNOWN = 999 };

/* It agrees with the driver and the books, and makes no context. */
static void nvml(void) {
    nvmlDevice_t device, other;
    unsigned count, room = 4, type;
    int version, driver;
    CHECK(nvmlDeviceGetCount_v2(&count) == UNINITIALIZED);
    OK(nvmlInit_v2());
    OK(nvmlDeviceGetCount_v2(&count));
    CHECK(count == 2);
    CHECK(nvmlDeviceGetHandleByIndex_v2(2, &device) == INVALID);
    OK(nvmlDeviceGetHandleByIndex_v2(1, &device));
    struct nvmlProcess all[4];
    OK(nvmlDeviceGetComputeRunningProcesses(device, &room, all));
    CHECK(room == 0);
    pid_t child = fork(); /* so CUDA still works in one that is forked now */
    if (child == 0) {
        OK(cudaFree(NULL));
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);

    OK(cudaSetDevice(1));
    void *block;
    OK(cudaMalloc(&block, 6 * MIB));
    char name[256], said[256], place[32];
    OK(nvmlDeviceGetName(device, said, sizeof said));
    OK(cuDeviceGetName(name, sizeof name, 1));
    CHECK(strcmp(name, said) == 0);
    CHECK(nvmlDeviceGetName(device, said, 4) == TOO_SMALL);
    unsigned char uuid[16];
    OK(cuDeviceGetUuid(uuid, 1));
    int at = sprintf(name, "GPU-");
    for (int i = 0; i < 16; i++) {
        at += sprintf(name + at, i == 4 || i == 6 || i == 8 || i == 10 ? "-%02x" : "%02x", uuid[i]);
    }
    OK(nvmlDeviceGetUUID(device, said, sizeof said));
    CHECK(strcmp(name, said) == 0);
    OK(nvmlDeviceGetHandleByUUID(said, &other));
    CHECK(other == device);
    CHECK(nvmlDeviceGetHandleByUUID("GPU-0", &other) == NOT_FOUND);
    OK(cuDeviceGetPCIBusId(place, sizeof place, 1));
    OK(nvmlDeviceGetHandleByPciBusId_v2(place, &other));
    CHECK(other == device);
    sprintf(said, "0000%s", place); /* as torch writes it */
    OK(nvmlDeviceGetHandleByPciBusId_v2(said, &other));
    CHECK(other == device);
    CHECK(nvmlDeviceGetHandleByPciBusId_v2("0000:99:00.0", &other) == NOT_FOUND);
    OK(nvmlSystemGetCudaDriverVersion_v2(&version));
    OK(cuDriverGetVersion(&driver));
    CHECK(version == driver);

    struct nvmlMemory memory;
    size_t available, total;
    OK(nvmlDeviceGetMemoryInfo(device, &memory));
    OK(cudaMemGetInfo(&available, &total));
    CHECK(memory.free == available && memory.total == total &&
          memory.used == 6 * MIB + 500 * MIB);
    room = 0;
    CHECK(nvmlDeviceGetComputeRunningProcesses(device, &room, NULL) == TOO_SMALL && room == 1);
    room = 4;
    OK(nvmlDeviceGetComputeRunningProcesses(device, &room, all));
    CHECK(room == 1 && all[0].pid == (unsigned)getpid() && all[0].used == 6 * MIB);
    OK(nvmlDeviceGetHandleByIndex_v2(0, &other));
    room = 4;
    OK(nvmlDeviceGetComputeRunningProcesses(other, &room, all));
    CHECK(room == 0);

    char pci[68];
    CHECK(nvmlDeviceGetNvLinkRemoteDeviceType(device, 0, &type) == NOT_SUPPORTED);
    CHECK(nvmlDeviceGetNvLinkRemotePciInfo_v2(device, 0, pci) == NOT_SUPPORTED);
    struct nvmlFabric fabric = {.version = 1};
    CHECK(nvmlDeviceGetGpuFabricInfoV(device, &fabric) == VERSION_MISMATCH);
    fabric.version = sizeof fabric | 2 << 24;
    OK(nvmlDeviceGetGpuFabricInfoV(device, &fabric));
    CHECK(fabric.state == 3 && fabric.status == 0); /* complete, since fabric handles are offered */

    child = fork();
    if (child == 0) {
        OK(nvmlDeviceGetCount_v2(&count));
        OK(nvmlDeviceGetUUID(device, said, sizeof said));
        CHECK(nvmlDeviceGetMemoryInfo(device, &memory) == UNKNOWN);
        _exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    OK(nvmlShutdown());
    CHECK(nvmlShutdown() == UNINITIALIZED);
}

int main(int count, char **arguments) {
    const struct { const char *name; void (*run)(void);
    } parts[] = {
        {"pitch", pitch},     {"twins", twins},           {"pools", pools},
        {"ipc", ipc},         {"reset", reset},           {"graphs", graphs},
        {"context", context}, {"old_driver", old_driver}, {"managed", managed},
        {"oracle", oracle},   {"contents", contents},     {"looks", looks},
        {"zeros", zeros},     {"small_numbers", small_numbers}, {"host_reads", host_reads},
        {"contexts", contexts}, {"nvml", nvml},           {"primary", primary},
        {"names", names},
    };
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        if (count == 2 && strcmp(arguments[1], parts[i].name) == 0) {
            parts[i].run();
            return 0;
        }
    }
    return 2;
}
