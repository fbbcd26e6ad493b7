/* Many threads on many streams allocate, use and free memory in every way that the runtime has, by
 * CUDA's rules and no more than those.
 *
 *     crowd THREADS STREAMS STEPS SEED [WRONG]
 *
 * Each block is freed by whoever comes by: on another thread than it was allocated, on another
 * stream, by another function. What CUDA leaves to the program is done: uses on several streams are
 * ordered by an event of the block's, and so is a cudaFreeAsync. What CUDA promises is relied on:
 * cudaFree is called while kernels still use the block, and what cudaMalloc gave is used on any
 * stream at once. The stand-in's oracle is told of every block and every kernel and judges both;
 * the memory's contents are checked besides.
 *
 * WRONG makes one mistake, which the oracle must find: `unordered` frees in the order of a stream
 * that does not wait for the last use, `freed` uses a block after its free, `early` takes what is
 * in order on one stream only for what any stream may use.
 */
#include "cudart.h"
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>

#include "../../include/gruyere.h"

enum { BLOCKS = 256, MOST_STREAMS = 64, MARK = 256 };
static const uint64_t LARGEST = 64ull << 20;
/* What the program holds at most, bytes. */
static const uint64_t BUDGET = 1ull << 30;

enum way { PLAIN, PITCHED, VOLUME, ASYNC, FROM_POOL, WAYS };

struct block {
    pthread_mutex_t lock;
    unsigned char *at;
    uint64_t bytes;
    uint64_t mark;
    enum way way;
    /* Behind the last use, where there was one. */
    cudaEvent_t used;
    bool was_used;
};

struct slot {
    pthread_rwlock_t lock;
    cudaStream_t stream;
};

static struct block blocks[BLOCKS];
static struct slot slots[MOST_STREAMS];
static int streams;
static long steps;
static _Atomic uint64_t held;
static _Atomic long mallocs, frees, touches, checks, refused;
static enum { NOTHING, UNORDERED, FREED, EARLY } wrong;

static uint64_t next(uint64_t *state) {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

static uint64_t below(uint64_t *state, uint64_t n) {
    return next(state) % n;
}

/* From 1 byte to 64 MiB, each power of two as likely as the next. */
static uint64_t some_size(uint64_t *state) {
    uint64_t top = 1ull << below(state, 27);
    uint64_t size = top + below(state, top);
    return size > LARGEST ? LARGEST : size;
}

static struct slot *some_slot(uint64_t *state) {
    struct slot *slot = &slots[below(state, streams)];
    pthread_rwlock_rdlock(&slot->lock);
    return slot;
}

static void leave(struct slot *slot) {
    pthread_rwlock_unlock(&slot->lock);
}

/* Later work of the stream comes after the block's last use. */
static void order(struct block *block, cudaStream_t stream) {
    if (block->was_used) OK(cudaStreamWaitEvent(stream, block->used, 0));
}

static void use_ends(struct block *block, cudaStream_t stream) {
    OK(cudaEventRecord(block->used, stream));
    block->was_used = true;
}

/* The first and the last bytes hold the block's mark. Copies, as kernels, run in the order of a
 * stream. */
static void write_mark(struct block *block, cudaStream_t stream) {
    uint64_t pattern[MARK / 8];
    for (int i = 0; i < MARK / 8; i++) pattern[i] = block->mark + i;
    uint64_t n = block->bytes < MARK ? block->bytes : MARK;
    OK(cudaMemcpyAsync(block->at, pattern, n, cudaMemcpyHostToDevice, stream));
    if (block->bytes >= 2 * MARK) {
        OK(cudaMemcpyAsync(block->at + block->bytes - MARK, pattern, MARK, cudaMemcpyHostToDevice,
                           stream));
    }
}

static void read_mark(struct block *block, cudaStream_t stream) {
    uint64_t pattern[MARK / 8], found[2][MARK / 8];
    for (int i = 0; i < MARK / 8; i++) pattern[i] = block->mark + i;
    uint64_t n = block->bytes < MARK ? block->bytes : MARK;
    order(block, stream);
    OK(cudaMemcpyAsync(found[0], block->at, n, cudaMemcpyDeviceToHost, stream));
    bool both = block->bytes >= 2 * MARK;
    if (both)
        OK(cudaMemcpyAsync(found[1], block->at + block->bytes - MARK, MARK, cudaMemcpyDeviceToHost,
                           stream));
    OK(cudaStreamSynchronize(stream));
    use_ends(block, stream);
    if (memcmp(found[0], pattern, n) != 0 || (both && memcmp(found[1], pattern, MARK) != 0)) {
        fprintf(stderr, "crowd: %p+%llu: somebody else wrote to it\n", (void *)block->at,
                (unsigned long long)block->bytes);
        exit(1);
    }
    atomic_fetch_add(&checks, 1);
}

static void allocate(struct block *block, uint64_t *state) {
    uint64_t size = some_size(state);
    enum way way = below(state, WAYS);
    size_t pitch = 0;
    void *pointer = NULL;
    struct slot *slot = some_slot(state);
    cudaStream_t stream = slot->stream;
    int code;
    switch (way) {
    case PLAIN:
        code = cudaMalloc(&pointer, size);
        break;
    case PITCHED: {
        size_t rows = 1 + below(state, 16), width = size / rows + 1;
        code = cudaMallocPitch(&pointer, &pitch, width, rows);
        CHECK(code != 0 || pitch % 512 == 0);
        size = pitch * rows;
        break;
    }
    case VOLUME: {
        struct cudaPitchedPtr volume = {0};
        struct cudaExtent extent = {size / 12 + 1, 3, 4};
        code = cudaMalloc3D(&volume, extent);
        pointer = volume.ptr;
        size = volume.pitch * 12;
        CHECK(code != 0 || (volume.xsize == extent.width && volume.ysize == 3));
        break;
    }
    case ASYNC:
        code = cudaMallocAsync(&pointer, size, stream);
        break;
    default: {
        cudaMemPool_t pool;
        OK(cudaDeviceGetDefaultMemPool(&pool, 0));
        code = cudaMallocFromPoolAsync(&pointer, size, pool, stream);
        break;
    }
    }
    if (code != 0) {
        CHECK(code == cudaErrorMemoryAllocation && cudaGetLastError() == cudaErrorMemoryAllocation);
        atomic_fetch_add(&refused, 1);
        leave(slot);
        return;
    }
    bool in_order = way == ASYNC || way == FROM_POOL;
    CHECK(pointer != NULL && (uintptr_t)pointer % 256 == 0);
    phantom_owns(pointer, size, in_order && wrong != EARLY ? stream : EVERY_STREAM);
    block->at = pointer;
    block->bytes = size;
    block->way = way;
    block->mark = next(state);
    block->was_used = false;
    write_mark(block, stream);
    use_ends(block, stream);
    leave(slot);
    atomic_fetch_add(&held, size);
    atomic_fetch_add(&mallocs, 1);
}

static void touch(struct block *block, uint64_t *state) {
    struct slot *slot = some_slot(state);
    order(block, slot->stream);
    /* Not where the mark is: a kernel writes. */
    uint64_t from = below(state, block->bytes);
    OK(phantom_touch(slot->stream, block->at + from, 1 + below(state, block->bytes - from)));
    use_ends(block, slot->stream);
    leave(slot);
    atomic_fetch_add(&touches, 1);
}

static void give_back(struct block *block, uint64_t *state) {
    struct slot *slot = some_slot(state);
    bool in_order = block->way == ASYNC || block->way == FROM_POOL;
    unsigned char *at = block->at;
    if (in_order && below(state, 4) != 0) {
        if (wrong != UNORDERED) order(block, slot->stream);
        phantom_disowns(at);
        OK(cudaFreeAsync(at, slot->stream));
    } else {
        /* Kernels may still use it. */
        phantom_disowns(at);
        OK(cudaFree(at));
    }
    if (wrong == FREED) (void)phantom_touch(slot->stream, at, 1);
    leave(slot);
    atomic_fetch_sub(&held, block->bytes);
    atomic_fetch_add(&frees, 1);
    block->at = NULL;
}

/* Its work goes on; blocks that were used on it know it by their events. */
static void renew(uint64_t *state) {
    struct slot *slot = &slots[below(state, streams)];
    pthread_rwlock_wrlock(&slot->lock);
    OK(cudaStreamDestroy(slot->stream));
    OK(cudaStreamCreateWithFlags(&slot->stream, below(state, 8) == 0 ? 0 : cudaStreamNonBlocking));
    pthread_rwlock_unlock(&slot->lock);
}

static void step(uint64_t *state) {
    struct block *block = &blocks[below(state, BLOCKS)];
    if (pthread_mutex_trylock(&block->lock) != 0) return;
    if (block->at == NULL) {
        if (atomic_load(&held) < BUDGET) allocate(block, state);
    } else {
        uint64_t what = below(state, 64);
        if (what < 32) touch(block, state);
        else if (what < 33) {
            struct slot *slot = some_slot(state);
            struct cudaPointerAttributes facts;
            OK(cudaPointerGetAttributes(&facts, block->at + block->bytes / 2));
            CHECK(facts.type == cudaMemoryTypeDevice && facts.device == 0);
            /* What a kernel wrote is not the mark: it is written again, and read. */
            order(block, slot->stream);
            write_mark(block, slot->stream);
            use_ends(block, slot->stream);
            read_mark(block, slot->stream);
            leave(slot);
        } else give_back(block, state);
    }
    pthread_mutex_unlock(&block->lock);
    switch (below(state, 512)) {
    case 0: case 1: case 2:
        renew(state);
        break;
    case 3: {
        struct slot *slot = some_slot(state);
        OK(cudaStreamSynchronize(slot->stream));
        leave(slot);
        break;
    }
    case 4:
        if (below(state, 4) == 0) OK(cudaDeviceSynchronize());
        break;
    case 5: {
        size_t free, total;
        OK(cudaMemGetInfo(&free, &total));
        CHECK(free <= total);
        break;
    }
    }
}

static void *work(void *seed) {
    uint64_t state = (uint64_t)(uintptr_t)seed * 0x9E3779B97F4A7C15ull + 1;
    for (long i = 0; i < steps; i++) step(&state);
    return NULL;
}

/* Where the library manages: what the driver thinks it has given and what the heap thinks it holds
 * are the same. */
static void compare_books(const char *when) {
    int32_t (*read)(int32_t, GruyereStats *) = NULL;
    *(void **)&read = dlsym(RTLD_DEFAULT, "gruyere_stats");
    if (read == NULL) return;
    GruyereStats stats = {.size = sizeof stats};
    if (read(0, &stats) != 0) return; /* observed: there is no heap */
    printf("%s: reserved %llu phantom %llu live %llu requested %llu owned %llu\n", when,
           (unsigned long long)stats.reserved, (unsigned long long)phantom_physical(0),
           (unsigned long long)stats.live, (unsigned long long)stats.requested,
           (unsigned long long)phantom_owned());
    CHECK(stats.bad_frees == 0);
    if (getenv("CROWD_MANAGED") != NULL) {
        CHECK(stats.reserved == phantom_physical(0));
        CHECK(stats.live >= phantom_owned() && stats.requested == phantom_owned());
    }
}

int main(int count, char **arguments) {
    CHECK(count == 5 || count == 6);
    int threads = atoi(arguments[1]);
    streams = atoi(arguments[2]);
    steps = atol(arguments[3]) / threads;
    uint64_t seed = strtoull(arguments[4], NULL, 10);
    CHECK(threads > 0 && threads <= 64 && streams > 0 && streams <= MOST_STREAMS);
    if (count == 6) {
        wrong = strcmp(arguments[5], "unordered") == 0 ? UNORDERED
                : strcmp(arguments[5], "freed") == 0   ? FREED
                                                       : EARLY;
        CHECK(wrong != EARLY || strcmp(arguments[5], "early") == 0);
    }
    for (int i = 0; i < streams; i++) {
        pthread_rwlock_init(&slots[i].lock, NULL);
        OK(cudaStreamCreateWithFlags(&slots[i].stream, i % 8 == 0 ? 0 : cudaStreamNonBlocking));
    }
    for (int i = 0; i < BLOCKS; i++) {
        pthread_mutex_init(&blocks[i].lock, NULL);
        OK(cudaEventCreateWithFlags(&blocks[i].used, cudaEventDisableTiming));
    }
    pthread_t workers[64];
    for (int i = 0; i < threads; i++) {
        CHECK(pthread_create(&workers[i], NULL, work, (void *)(uintptr_t)(seed * 1000 + i + 1)) ==
              0);
    }
    for (int i = 0; i < threads; i++) pthread_join(workers[i], NULL);
    compare_books("running");
    uint64_t state = seed + 7;
    for (int i = 0; i < BLOCKS; i++) {
        if (blocks[i].at != NULL) give_back(&blocks[i], &state);
    }
    compare_books("freed");
    OK(cudaDeviceSynchronize());
    compare_books("synchronized");
    for (int i = 0; i < streams; i++) OK(cudaStreamDestroy(slots[i].stream));
    for (int i = 0; i < BLOCKS; i++) OK(cudaEventDestroy(blocks[i].used));
    CHECK(held == 0 && phantom_misuses() == 0);
    uint64_t (*trim)(void) = NULL;
    *(void **)&trim = dlsym(RTLD_DEFAULT, "gruyere_trim");
    if (trim != NULL && getenv("CROWD_MANAGED") != NULL) {
        trim();
        CHECK(phantom_physical(0) == 0);
    }
    printf(
        "mallocs %ld frees %ld touches %ld checks %ld refused %ld hazards %lld virtual ms %llu\n",
        mallocs, frees, touches, checks, refused, (long long)phantom_hazards(),
        (unsigned long long)(phantom_host_now() / 1000000));
    return 0;
}
