/* The interposed calls, each with what CUDA promises of it. The first argument names the promise.
 * */
#include "cuda.h"
#include <string.h>

/* Every kind of malloc and free, in every combination that CUDA allows. */
static void all_kinds(void) {
    void *block[6];
    size_t pitch = 0;
    struct cudaPitchedPtr cube = {0};
    struct cudaExtent extent = {1000, 20, 3};
    cudaMemPool_t pool;
    cudaStream_t stream;
    OK(cudaStreamCreate(&stream));
    OK(cudaDeviceGetDefaultMemPool(&pool, 0));
    for (int round = 0; round < 50; round++) {
        OK(cudaMalloc(&block[0], 1000));
        OK(cudaMalloc(&block[1], 3 * MIB));
        OK(cudaMallocAsync(&block[2], 5 * MIB, stream));
        OK(cudaMallocAsync(&block[3], 700, 0));
        OK(cudaMallocFromPoolAsync(&block[4], 2 * MIB, pool, stream));
        OK(cudaMallocPitch(&block[5], &pitch, 1000, 50));
        OK(cudaMalloc3D(&cube, extent));
        CHECK(pitch == 1024 && cube.pitch == 1024 && cube.xsize == 1000 && cube.ysize == 20);
        for (int i = 0; i < 6; i++)
            for (int j = 0; j < i; j++)
                CHECK(block[i] != block[j] && block[i] != NULL);
        OK(cudaFree(block[0]));
        OK(cudaFreeAsync(block[2], stream));
        OK(cudaFree(block[3]));
        OK(cudaFreeAsync(block[4], stream));
        OK(cudaFree(block[5]));
        OK(cudaFree(cube.ptr));
        OK(cudaFree(block[1]));
        if (round % 10 == 9)
            OK(cudaDeviceSynchronize());
    }
    OK(cudaStreamDestroy(stream));
    CHECK(live() == 0);
}

static void served(void) {
    all_kinds();
    CHECK(real_mallocs() == 0 && real_frees() == 0 && phantom_calls("cuMemCreate") > 0);
    CHECK(gruyere_validate() == 0);
}

static void passed_on(void) {
    all_kinds();
    CHECK(real_mallocs() == 350 && real_frees() == 350 && phantom_calls("cuMemCreate") == 0);
}

/* cudaFree(NULL) and requests of nothing are what they are without us. */
static void nothing(void) {
    void *block = (void *)1;
    OK(cudaFree(NULL));
    OK(cudaMalloc(&block, 0));
    CHECK(block == NULL);
    CHECK(cudaMalloc(NULL, 100) == 1);
    CHECK(cudaGetLastError() == 1);
    OK(cudaGetLastError());
}

/* Neither a block that was freed before nor the inside of one reaches the runtime, and both are
 * errors. */
static void wrong_frees(void) {
    char *block;
    OK(cudaMalloc((void **)&block, 40 * MIB));
    uint64_t frees = real_frees();
    CHECK(cudaFree(block + 4096) == 1);
    CHECK(cudaGetLastError() == 1);
    CHECK(cudaFreeAsync(block + 512, 0) == 1);
    OK(cudaFree(block));
    CHECK(cudaFree(block) == 1);
    CHECK(cudaFreeAsync(block, 0) == 1);
    CHECK(real_frees() == frees && live() == 0);
    CHECK(gruyere_validate() == 0);
}

/* Pools that the program made serve what it asks of them, and get back what is theirs. */
static void own_pools(void) {
    struct cudaMemPoolProps properties = {.allocType = 1, .location = {.type = 1, .id = 0}};
    cudaMemPool_t own;
    void *block, *other, *ours;
    OK(cudaMemPoolCreate(&own, &properties));
    OK(cudaMallocFromPoolAsync(&block, MIB, own, 0));
    CHECK(real_mallocs() == 1 && live() == 0);
    OK(cudaDeviceSetMemPool(0, own));
    OK(cudaMallocAsync(&other, MIB, 0));
    CHECK(real_mallocs() == 2 && live() == 0);
    OK(cudaMalloc(&ours, MIB));
    CHECK(real_mallocs() == 2 && live() == MIB);
    OK(cudaFreeAsync(block, 0));
    OK(cudaFree(other));
    OK(cudaFree(ours));
    CHECK(real_frees() == 2 && live() == 0);
}

/* What a capture allocates belongs to its graph; what is ours is never freed by one. */
static void captures(void) {
    cudaStream_t stream;
    cudaGraph_t graph;
    void *ours, *node;
    int status;
    OK(cudaStreamCreate(&stream));
    OK(cudaMallocAsync(&ours, MIB, stream));
    CHECK(live() == MIB);
    OK(cudaStreamBeginCapture(stream, 2));
    uint64_t before = real_mallocs();
    int error = cudaMallocAsync(&node, MIB, stream);
    CHECK(real_mallocs() == before + 1 && live() == MIB);
    (void)error; /* the stand-in may not know graph memory nodes */
    CHECK(cudaFreeAsync(ours, stream) == 1);
    CHECK(live() == MIB);
    OK(cudaStreamIsCapturing(stream, &status));
    cudaStreamEndCapture(stream, &graph);
    cudaGetLastError();
    OK(cudaFreeAsync(ours, stream));
    CHECK(live() == 0);
    OK(cudaMallocAsync(&ours, MIB, stream));
    CHECK(live() == MIB);
    OK(cudaFree(ours));
    /* A capture that is refused leaves no bracket open. */
    CHECK(cudaStreamBeginCapture(stream, 99) != 0 || cudaStreamEndCapture(stream, &graph) == 0);
    OK(cudaDeviceSynchronize());
    CHECK(gruyere_validate() == 0);
}

/* Out of memory is the runtime's error, and its last one. */
static void out_of_memory(void) {
    void *block, *more;
    OK(cudaMalloc(&block, 600 * MIB));
    CHECK(cudaMalloc(&more, 600 * MIB) == 2);
    CHECK(cudaGetLastError() == 2);
    CHECK(cudaMallocAsync(&more, 600 * MIB, 0) == 2);
    CHECK(cudaGetLastError() == 2);
    OK(cudaGetLastError());
    OK(cudaFree(block));
    OK(cudaMalloc(&more, 600 * MIB));
    OK(cudaFree(more));
}

/* Memory that lies idle here counts as free. */
static void memory_info(void) {
    size_t before, held, after, total;
    void *block;
    OK(cudaMemGetInfo(&before, &total));
    OK(cudaMalloc(&block, 256 * MIB));
    OK(cudaMemGetInfo(&held, &total));
    CHECK(held <= before - 256 * MIB);
    OK(cudaFree(block));
    OK(cudaDeviceSynchronize());
    OK(cudaMemGetInfo(&after, NULL));
    CHECK(after >= before - 8 * MIB && after <= total);
}

/* The first call gives the thread its context, as the runtime does; blocks of other contexts are
 * not ours. */
static void contexts(void) {
    void *context = NULL, *block;
    OK(cudaMalloc(&block, MIB));
    OK(cuCtxGetCurrent(&context));
    CHECK(context != NULL && live() == MIB);
    OK(cuCtxCreate_v2(&context, 0, 0));
    void *other;
    OK(cudaMalloc(&other, MIB));
    CHECK(real_mallocs() == 1 && live() == MIB);
    OK(cudaFree(other));
    CHECK(real_frees() == 1);
    OK(cuCtxPopCurrent_v2(&context));
    OK(cudaFree(block));
    CHECK(real_frees() == 1 && live() == 0);
}

/* After a reset the device is as new, and so is its heap. */
static void reset(void) {
    void *block;
    for (int i = 0; i < 3; i++) {
        OK(cudaMalloc(&block, 64 * MIB));
        OK(cudaMalloc(&block, 100));
        CHECK(live() > 64 * MIB);
        OK(cudaDeviceReset());
        CHECK(live() == 0);
        CHECK(cudaMalloc(&block, MIB) == 0 && live() == MIB);
        OK(cudaFree(block));
    }
    OK(cudaMalloc(&block, 64 * MIB));
    OK(cudaFree(block));
    CHECK(gruyere_validate() == 0);
}

/* Each device has its memory, and a stream's is its device's. */
static void devices(void) {
    cudaStream_t stream;
    void *block, *other;
    GruyereStats stats = {.size = sizeof stats};
    OK(cudaSetDevice(1));
    OK(cudaStreamCreate(&stream));
    OK(cudaMalloc(&block, MIB));
    CHECK(live() == 0);
    OK(cudaSetDevice(0));
    OK(cudaMallocAsync(&other, 3 * MIB, stream));
    CHECK(live() == 0);
    OK(gruyere_stats(1, &stats));
    CHECK(stats.live == 4 * MIB);
    OK(cudaFreeAsync(other, stream));
    OK(cudaFree(block));
    OK(cudaStreamDestroy(stream));
    OK(gruyere_stats(1, &stats));
    CHECK(stats.live == 0);

    /* Freed in the order of another device's stream, whose work the heap cannot ask for: it is
     * waited for, the default stream's too. */
    OK(cudaMalloc(&block, MIB));
    OK(cudaSetDevice(1));
    unsigned long long waits = phantom_calls("cuStreamSynchronize");
    OK(cudaFreeAsync(block, NULL));
    CHECK(phantom_calls("cuStreamSynchronize") == waits + 1);
    OK(cudaMalloc(&block, MIB));
    OK(cudaFreeAsync(block, NULL));
    CHECK(phantom_calls("cuStreamSynchronize") == waits + 1);
    CHECK(live() == 0);
}

/* A device that is allowed to reach another's memory does, though nothing was ever allocated on it.
 * */
static void peers(void) {
    struct {
        int type, id;
    } one = {1, 1};
    unsigned long long access = 0;
    void *before, *after;
    OK(cudaMalloc(&before, MIB));
    OK(cuMemGetAccess(&access, &one, (uint64_t)before));
    CHECK(access == 0);
    OK(cudaSetDevice(1));
    OK(cudaDeviceEnablePeerAccess(0, 0));
    OK(cudaSetDevice(0));
    OK(cudaMalloc(&after, 30 * MIB));
    OK(cuMemGetAccess(&access, &one, (uint64_t)before));
    CHECK(access == 3);
    OK(cuMemGetAccess(&access, &one, (uint64_t)after));
    CHECK(access == 3);
    OK(cudaFree(before));
    OK(cudaFree(after));
}

/* Access granted on the default pool is granted to what is served in its place: before and after,
 * and before the first allocation. */
static void pool_access(void) {
    struct cudaMemAccessDesc zero = {{1, 0}, 3}, one = {{1, 1}, 3};
    unsigned long long access = 0;
    cudaMemPool_t pool;
    void *block, *after;
    OK(cudaDeviceGetDefaultMemPool(&pool, 1));
    OK(cudaMemPoolSetAccess(pool, &zero, 1));
    OK(cudaSetDevice(1));
    OK(cudaMallocAsync(&block, MIB, NULL));
    OK(cuMemGetAccess(&access, &zero.location, (uint64_t)block));
    CHECK(access == 3);
    OK(cudaFreeAsync(block, NULL));
    OK(cudaSetDevice(0));
    OK(cudaDeviceGetDefaultMemPool(&pool, 0));
    OK(cudaMallocAsync(&block, MIB, NULL));
    OK(cudaMemPoolSetAccess(pool, &one, 1));
    OK(cudaMallocAsync(&after, 30 * MIB, NULL));
    OK(cuMemGetAccess(&access, &one.location, (uint64_t)block));
    CHECK(access == 3);
    OK(cuMemGetAccess(&access, &one.location, (uint64_t)after));
    CHECK(access == 3);
    OK(cudaFreeAsync(block, NULL));
    OK(cudaFreeAsync(after, NULL));
    CHECK(cudaMemPoolSetAccess(pool, NULL, 1) != 0);
}

/* Access to a pool of the program's own opens nothing of the heap's. */
static void own_pool_access(void) {
    struct cudaMemAccessDesc one = {{1, 1}, 3};
    struct cudaMemPoolProps props = {.allocType = 1, .location = {1, 0}};
    unsigned long long access = 0;
    cudaMemPool_t own;
    void *block;
    OK(cudaMemPoolCreate(&own, &props));
    OK(cudaMallocAsync(&block, MIB, NULL));
    OK(cudaMemPoolSetAccess(own, &one, 1));
    OK(cuMemGetAccess(&access, &one.location, (uint64_t)block));
    CHECK(access == 0);
    OK(cudaFreeAsync(block, NULL));
}

/* Runs out of memory, as a program does that checks each call and exits. */
static void *fill(void) {
    void *block, *last = NULL;
    while (cudaMalloc(&block, 64 * MIB) == 0) last = block;
    return last;
}
static void dies_of_it(void) {
    OK(cudaFree(fill()));
    puts("kept");
    exit(1);
}
static void goes_on(void) {
    void *block = fill();
    for (int i = 0; i < 64; i++) {
        OK(cudaFree(block));
        OK(cudaMalloc(&block, 64 * MIB));
    }
    puts("kept");
    exit(1);
}
static void ends_well(void) {
    OK(cudaFree(fill()));
}

/* Programs for per-thread default streams. */
static void per_thread(void) {
    void *block;
    for (int i = 0; i < 10; i++) {
        OK(cudaMallocAsync_ptsz(&block, MIB, 0));
        OK(cudaFreeAsync_ptsz(block, 0));
    }
    CHECK(live() == 0);
    int is_served = phantom_calls("cuMemCreate") > 0;
    CHECK(real_mallocs() == (is_served ? 0 : 10) && real_frees() == real_mallocs());
}

/* Handles open where the block is, or are refused. */
static void ipc_fixed(void) {
    cudaIpcMemHandle_t handle;
    void *block[20], *first, *second;
    OK(cudaMalloc(&first, 1000));
    OK(cudaMalloc(&second, 1000));
    CHECK(cudaIpcGetMemHandle(&handle, second) == 1);
    CHECK(cudaGetLastError() == 1);
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < 20; i++) {
            OK(cudaMalloc(&block[i], MIB + (size_t)i * 300000));
            memset(&handle, 0, sizeof handle);
            OK(cudaIpcGetMemHandle(&handle, block[i]));
            /* What the stand-in's handles say: mark, process, device, address. */
            CHECK(*(void **)(handle.reserved + 32) == block[i]);
        }
        for (int i = round; i < 20; i++)
            OK(cudaFree(block[i]));
        for (int i = 0; i < round; i++)
            OK(cudaFree(block[i]));
        OK(cudaDeviceSynchronize());
    }
    CHECK(gruyere_validate() == 0);
}

static void ipc_refused(void) {
    cudaIpcMemHandle_t handle;
    void *block;
    OK(cudaMalloc(&block, 64 * MIB));
    CHECK(cudaIpcGetMemHandle(&handle, block) == 1);
    CHECK(cudaGetLastError() == 1);
    OK(cudaFree(block));
}

static void said(void *what) { fputs(what, stderr); }

static void said_too(cudaStream_t stream, cudaError_t error, void *what) {
    CHECK(stream == NULL && error == 0);
    said(what);
}

/* What a host function allocates is served, and it runs as without us. */
static void host_functions(void) {
    void *block;
    OK(cudaMalloc(&block, MIB));
    OK(cudaLaunchHostFunc(NULL, said, "first\n"));
    OK(cudaLaunchHostFunc(NULL, said, "second\n"));
    OK(cudaFree(block));
}

static void callbacks(void) {
    void *block;
    OK(cudaMalloc(&block, MIB));
    OK(cudaStreamAddCallback(NULL, said_too, "first\n", 0));
    OK(cudaFree(block));
}

int main(int count, char **arguments) {
    static const struct {
        const char *name;
        void (*run)(void);
    } promises[] = {
        {"all_kinds", all_kinds},
        {"served", served},
        {"passed_on", passed_on},
        {"nothing", nothing},
        {"wrong_frees", wrong_frees},
        {"own_pools", own_pools},
        {"captures", captures},
        {"out_of_memory", out_of_memory},
        {"memory_info", memory_info},
        {"contexts", contexts},
        {"reset", reset},
        {"devices", devices},
        {"peers", peers},
        {"pool_access", pool_access},
        {"own_pool_access", own_pool_access},
        {"dies_of_it", dies_of_it},
        {"goes_on", goes_on},
        {"ends_well", ends_well},
        {"per_thread", per_thread},
        {"ipc_fixed", ipc_fixed},
        {"ipc_refused", ipc_refused},
        {"host_functions", host_functions},
        {"callbacks", callbacks},
    };
    for (size_t i = 0; i < sizeof promises / sizeof *promises; i++)
        if (count > 1 && strcmp(arguments[1], promises[i].name) == 0) {
            promises[i].run();
            puts("kept");
            return 0;
        }
    fputs("name a promise\n", stderr);
    return 2;
}
