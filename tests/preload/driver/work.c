/* A program's day: every allocating call of the driver, and the calls that say when memory is free
 * again. argv[1]: what is expected, "managed", "observed" or "alone"; argv[2]: "threads" for many
 * of them. */
#include "driver.h"
#include <pthread.h>

enum { MIB = 1 << 20, THREADS = 8, ROUNDS = 200 };

static int managed, seen;

/* Writes to both ends of a block and reads them back. */
static void use(CUdeviceptr address, size_t bytes, unsigned char value) {
    unsigned char out[2] = {value, (unsigned char)~value}, in[2] = {0, 0};
    OK(cuMemcpyHtoD(address, &out[0], 1));
    OK(cuMemcpyHtoD(address + bytes - 1, &out[1], 1));
    OK(cuMemcpyDtoH(&in[0], address, 1));
    OK(cuMemcpyDtoH(&in[1], address + bytes - 1, 1));
    CHECK(bytes == 1 || memcmp(in, out, 2) == 0);
}

static void *worker(void *number) {
    CUcontext context;
    CUstream stream;
    OK(cuDevicePrimaryCtxRetain(&context, 0));
    OK(cuCtxSetCurrent(context));
    OK(cuStreamCreate(&stream, 1));
    CUdeviceptr kept[8] = {0};
    int async[8] = {0};
    for (unsigned round = 0; round < ROUNDS; round++) {
        unsigned slot = round % 8;
        size_t bytes = 512 + (size_t)((round * 7919u + (unsigned)(uintptr_t)number * 104729u) %
                                      (3u * MIB));
        if (kept[slot])
            OK(async[slot] && round % 3 ? cuMemFreeAsync(kept[slot], stream)
                                        : cuMemFree(kept[slot]));
        async[slot] = (round + round / 8) % 2;
        OK(async[slot] ? cuMemAllocAsync(&kept[slot], bytes, stream)
                       : cuMemAlloc(&kept[slot], bytes));
        use(kept[slot], bytes, (unsigned char)round);
    }
    for (unsigned slot = 0; slot < 8; slot++) OK(cuMemFree(kept[slot]));
    OK(cuStreamDestroy(stream));
    return NULL;
}

static void plain(void) {
    CUdeviceptr blocks[32], wide;
    size_t pitch = 0, free = 0, less = 0, total = 0;
    OK(cuMemGetInfo(&free, &total));
    CHECK(free <= total && total > 0);
    for (int i = 0; i < 32; i++) {
        size_t bytes = (size_t)1 << (i % 26);
        OK(cuMemAlloc(&blocks[i], bytes));
        use(blocks[i], bytes, (unsigned char)i);
    }
    OK(cuMemAllocPitch(&wide, &pitch, 1000, 70, 4));
    CHECK(pitch >= 1000);
    use(wide, pitch * 69 + 1000, 9);
    if (seen) CHECK(live() >= 32 * 512 && live() != UINT64_MAX);
    OK(cuMemGetInfo(&less, NULL));
    CHECK(less < free);
    for (int i = 0; i < 32; i++) OK(cuMemFree(blocks[i]));
    OK(cuMemFree(wide));
    OK(cuCtxSynchronize());
    if (seen) CHECK(live() == 0);
    /* What is held for later use counts as free. */
    OK(cuMemGetInfo(&less, &total));
    CHECK(less + 4 * MIB >= free);
}

static void wrong(void) {
    CUdeviceptr block = 77;
    CHECK(cuMemAlloc(&block, 0) == 1 && block == 77);
    CHECK(cuMemAlloc(NULL, 4096) == 1);
    CHECK(cuMemAlloc(&block, (size_t)1 << 50) == 2);
    OK(cuMemAlloc(&block, 4096));
    OK(cuMemFree(block));
    /* Freed twice. */
    CHECK(cuMemFree(block) != 0);
    CHECK(cuMemFree(12345) != 0);
}

static void on_streams(void) {
    CUstream one, other;
    CUdeviceptr a, b;
    CUmemoryPool pool;
    OK(cuStreamCreate(&one, 1));
    OK(cuStreamCreate(&other, 0));
    OK(cuMemAllocAsync(&a, 5 * MIB, one));
    use(a, 5 * MIB, 1);
    OK(cuMemFreeAsync(a, one));
    OK(cuMemAllocAsync(&b, 5 * MIB, one));
    use(b, 5 * MIB, 2);
    OK(cuMemFreeAsync(b, other));
    OK(cuMemAllocAsync(&a, 300, NULL));
    OK(cuMemFreeAsync(a, NULL));
    OK(cuDeviceGetDefaultMemPool(&pool, 0));
    OK(cuMemAllocFromPoolAsync(&a, MIB, pool, one));
    use(a, MIB, 3);
    OK(cuMemFreeAsync(a, one));
    OK(cuStreamDestroy(one));
    OK(cuStreamDestroy(other));
    if (seen) CHECK(live() == 0);
}

/* A pool of the program's own is its own business. */
static void own_pool(void) {
    struct {
        int kind, handle_types, location_kind, location;
        void *security;
        size_t most;
        unsigned char reserved[56];
    } properties;
    CUmemoryPool pool;
    CUstream stream;
    CUdeviceptr block;
    memset(&properties, 0, sizeof properties);
    properties.kind = properties.location_kind = 1;
    OK(cuMemPoolCreate(&pool, &properties));
    OK(cuStreamCreate(&stream, 1));
    OK(cuMemAllocFromPoolAsync(&block, 3 * MIB, pool, stream));
    if (managed) CHECK(live() == 0);
    use(block, 3 * MIB, 4);
    OK(cuMemFreeAsync(block, stream));
    OK(cuStreamDestroy(stream));
}

/* What a capture allocates is the graph's. */
static void captured(void) {
    CUstream stream;
    CUdeviceptr block, outside;
    CUgraph graph = NULL;
    OK(cuMemAlloc(&outside, 4096));
    OK(cuStreamCreate(&stream, 1));
    OK(cuStreamBeginCapture(stream, 2));
    OK(cuMemAllocAsync(&block, MIB, stream));
    if (managed) CHECK(live() == 4096);
    OK(cuMemFreeAsync(block, stream));
    if (managed) CHECK(cuMemFreeAsync(outside, stream) == 1);
    OK(cuStreamEndCapture(stream, &graph));
    OK(cuMemFree(outside));
    OK(cuStreamDestroy(stream));
}

/* Memory of a context of the program's own is not ours to serve. */
static void own_context(void) {
    CUcontext mine, primary;
    CUdeviceptr block;
    OK(cuCtxCreate(&mine, 0, 0));
    OK(cuMemAlloc(&block, MIB));
    if (managed) CHECK(live() == 0);
    OK(cuMemFree(block));
    OK(cuDevicePrimaryCtxRetain(&primary, 0));
    OK(cuCtxSetCurrent(primary));
}

/* Pages that the program maps itself. */
static void own_pages(void) {
    CUmemAllocationProp properties;
    CUdeviceptr range;
    uint64_t pages[3];
    memset(&properties, 0, sizeof properties);
    properties.kind = properties.location_kind = 1;
    OK(cuMemAddressReserve(&range, 6 * MIB, 0, 0, 0));
    for (int i = 0; i < 3; i++) {
        OK(cuMemCreate(&pages[i], 2 * MIB, &properties, 0));
        OK(cuMemMap(range + (size_t)i * 2 * MIB, 2 * MIB, 0, pages[i], 0));
        OK(cuMemRelease(pages[i]));
    }
    if (seen) CHECK(live() == (managed ? 0 : 6 * MIB));
    OK(cuMemUnmap(range, 2 * MIB));
    if (seen) CHECK(live() == (managed ? 0 : 4 * MIB));
    OK(cuMemUnmap(range + 2 * MIB, 4 * MIB));
    if (seen) CHECK(live() == 0);
    OK(cuMemAddressFree(range, 6 * MIB));
}

/* What was freed is there for a pool of the program's own, for its pages, and in its context. */
static void room_for_all(void) {
    enum { POOL, PAGES, CONTEXT, WAYS };
    size_t free, total;
    OK(cuMemGetInfo(&free, &total));
    size_t bytes = free / 4 * 3 / (2 * MIB) * (2 * MIB);
    for (int way = 0; way < WAYS; way++) {
        struct {
            int kind, handle_types, location_kind, location;
            void *security;
            size_t most;
            unsigned char reserved[56];
        } of_pool;
        CUmemAllocationProp of_pages;
        CUmemoryPool pool;
        CUcontext mine, primary;
        CUdeviceptr block;
        uint64_t pages;
        OK(cuMemAlloc(&block, bytes));
        OK(cuMemFree(block));
        switch (way) {
        case POOL:
            memset(&of_pool, 0, sizeof of_pool);
            of_pool.kind = of_pool.location_kind = 1;
            OK(cuMemPoolCreate(&pool, &of_pool));
            OK(cuMemAllocFromPoolAsync(&block, bytes, pool, NULL));
            OK(cuMemFreeAsync(block, NULL));
            OK(cuCtxSynchronize());
            break;
        case PAGES:
            memset(&of_pages, 0, sizeof of_pages);
            of_pages.kind = of_pages.location_kind = 1;
            OK(cuMemCreate(&pages, bytes, &of_pages, 0));
            /* There is no room for it twice. */
            CHECK(cuMemCreate(&pages, bytes, &of_pages, 0) == 2);
            OK(cuMemRelease(pages));
            break;
        default:
            OK(cuCtxCreate(&mine, 0, 0));
            OK(cuMemAlloc(&block, bytes));
            OK(cuMemFree(block));
            OK(cuDevicePrimaryCtxRetain(&primary, 0));
            OK(cuCtxSetCurrent(primary));
        }
    }
}

static void shared(void) {
    char handle[64];
    CUdeviceptr block;
    OK(cuMemAlloc(&block, 3 * MIB));
    CHECK(cuIpcGetMemHandle(handle, block) == (managed ? 1 : 0));
    OK(cuMemFree(block));
}

int main(int argc, char **argv) {
    CHECK(argc >= 2);
    managed = strcmp(argv[1], "managed") == 0;
    seen = managed || strcmp(argv[1], "observed") == 0;
    driver_start();
    plain();
    wrong();
    on_streams();
    own_pool();
    own_context();
    own_pages();
    room_for_all();
    shared();
    int wanted = argc > 2 ? THREADS : 1;
    pthread_t threads[THREADS];
    for (int i = 0; i < wanted; i++)
        OK(pthread_create(&threads[i], NULL, worker, (void *)(uintptr_t)i));
    for (int i = 0; i < wanted; i++) OK(pthread_join(threads[i], NULL));
    if (seen) CHECK(live() == 0);
    if (managed) {
        int (*validate)(void) = (int (*)(void))of_gruyere("gruyere_validate");
        CHECK(validate && validate() == 0);
    }
    captured();
    CUdeviceptr left;
    OK(cuMemAlloc(&left, MIB));
    OK(cuDevicePrimaryCtxReset(0));
    if (seen) CHECK(live() == 0);
    /* As new: a context, and memory in it. */
    driver_start();
    OK(cuMemAlloc(&left, 5 * MIB));
    use(left, 5 * MIB, 5);
    if (seen) CHECK(live() == 5 * MIB);
    OK(cuMemFree(left));
    if (seen) CHECK(live() == 0);
    puts("kept");
    return 0;
}
