/* Canaries without torch: what a program of many threads and streams writes into blocks of
 * libgruyere.so is what it reads (README.md).
 *
 *     cc -O2 -o canaries tests/gpu/canaries/main.c tests/gpu/probe/driver.c \
 *         tests/gpu/probe/kernels.c -Iinclude -ldl -lpthread
 *
 * Each block is filled with a number of its own and checked by kernels before it goes. Kernels that
 * only last keep the device behind the host, so that a block is freed, and its memory asked for
 * again, while kernels still use it. Blocks pass from stream to stream; streams are created and,
 * where that is asked for, destroyed with their work under way. Where no kernel runs, a copy of
 * each block's beginning is compared, and addresses are. */
#include "../probe/driver.h"
#include "../probe/kernels.h"
#include "gruyere.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OK, FAILED, USAGE, CORRUPTION = LOST };
enum { LASTING = 4, OWN = 4, MOST_BLOCKS = 4096, MOST_THREADS = 16, WORDS_WITHOUT_KERNELS = 16384 };

static struct {
    const char *library, *driver, *json;
    double seconds, fill;
    unsigned threads, seed, rounds;
    int destroy_streams, leave_out_record_stream, overwrite;
} options = {.seconds = 10, .fill = 0.25, .threads = 2, .seed = 1};

#define HOOKS(F)                                                                  \
    F(void *, gruyere_malloc, (ptrdiff_t, int, GruyereStream))                    \
    F(void, gruyere_free, (void *, ptrdiff_t, int, GruyereStream))                \
    F(void, gruyere_record_stream, (void *, GruyereStream))                       \
    F(void, gruyere_announce_hooks, (uint32_t))                                   \
    F(uint64_t, gruyere_trim, (void))                                             \
    F(int, gruyere_validate, (void))                                              \
    F(int, gruyere_stats, (int, struct GruyereStats *))
/* Of the types that gruyere.h gives them. */
#define HOOK(result, name, arguments) static __typeof__(&name) hook_##name;
HOOKS(HOOK)

static CUfunction write_kernel, count_kernel;
static atomic_uint_fast64_t overlaps;
static atomic_int failed;

struct block {
    CUdeviceptr at;
    size_t bytes;
    unsigned pattern;
    CUevent written;
    /* Streams of its thread that the library was told of, a bit each. */
    unsigned used_by;
};

struct worker {
    uint64_t dice;
    CUstream streams[LASTING + OWN];
    struct block blocks[MOST_BLOCKS];
    unsigned block_count, pattern;
    size_t bytes, budget;
    CUdeviceptr counter;
    unsigned *host;
    uint64_t wrong, allocated, refused, handed_over, created, destroyed;
};

static uint64_t roll(struct worker *it, uint64_t below) {
    it->dice ^= it->dice << 13;
    it->dice ^= it->dice >> 7;
    it->dice ^= it->dice << 17;
    return it->dice % below;
}

/* Live blocks of all threads, sorted by address: two may never share a byte. */
static struct {
    pthread_mutex_t lock;
    struct {
        CUdeviceptr start, end;
    } spans[MOST_BLOCKS * MOST_THREADS];
    unsigned count;
} live = {.lock = PTHREAD_MUTEX_INITIALIZER};

static unsigned place_of(CUdeviceptr start) {
    unsigned low = 0, high = live.count;
    while (low < high) {
        unsigned middle = (low + high) / 2;
        if (live.spans[middle].start < start) low = middle + 1;
        else high = middle;
    }
    return low;
}

static void enter_live(CUdeviceptr start, size_t bytes) {
    pthread_mutex_lock(&live.lock);
    unsigned at = place_of(start);
    int over = (at < live.count && live.spans[at].start < start + bytes) ||
               (at && live.spans[at - 1].end > start);
    if (over && overlaps++ < 5)
        fprintf(stderr, "canaries: [%#llx, +%zu) was handed out over a live block\n", start, bytes);
    memmove(&live.spans[at + 1], &live.spans[at], (live.count - at) * sizeof *live.spans);
    live.spans[at].start = start;
    live.spans[at].end = start + bytes;
    live.count++;
    pthread_mutex_unlock(&live.lock);
}

static void leave_live(CUdeviceptr start) {
    pthread_mutex_lock(&live.lock);
    unsigned at = place_of(start);
    if (at < live.count && live.spans[at].start == start) {
        memmove(&live.spans[at], &live.spans[at + 1], (live.count - at - 1) * sizeof *live.spans);
        live.count--;
    }
    pthread_mutex_unlock(&live.lock);
}

static unsigned any_stream(struct worker *it) {
    unsigned stream;
    do stream = (unsigned)roll(it, LASTING + OWN);
    while (!it->streams[stream]);
    return stream;
}

/* Nanoseconds that a stream is kept busy: half of the time some, up to a hundred microseconds. */
static uint64_t linger(struct worker *it) {
    static const uint64_t times[] = {0, 0, 0, 5000, 20000, 100000};
    return times[roll(it, 6)];
}

static void write_block(struct worker *it, struct block *block, CUstream stream) {
    unsigned words = (unsigned)(block->bytes / 4);
    block->pattern = ++it->pattern;
    if (count_kernel)
        MUST(fill(write_kernel, block->at, block->pattern, words, linger(it), stream));
    else
        MUST(cuda.cuMemsetD32Async(block->at, block->pattern,
                                   words < WORDS_WITHOUT_KERNELS ? words : WORDS_WITHOUT_KERNELS,
                                   stream));
    MUST(cuda.cuEventRecord(block->written, stream));
}

/* Enqueues the check on a stream, behind the last write, and says so to the library. */
static void check(struct worker *it, struct block *block, unsigned which) {
    CUstream stream = it->streams[which];
    unsigned words = (unsigned)(block->bytes / 4);
    MUST(cuda.cuStreamWaitEvent(stream, block->written, 0));
    if (count_kernel) {
        MUST(fill(write_kernel, it->counter, 0, 0, linger(it), stream));
        MUST(launch(count_kernel, words / 4096 + 1, 256, stream, 0,
                    (void *[]){&block->at, &block->pattern, &words, &it->counter}));
    } else {
        if (words > WORDS_WITHOUT_KERNELS) words = WORDS_WITHOUT_KERNELS;
        MUST(cuda.cuMemcpyDtoH_v2(it->host, block->at, words * 4));
        for (unsigned i = 0; i < words; i++) it->wrong += it->host[i] != block->pattern;
    }
    if (!options.leave_out_record_stream)
        hook_gruyere_record_stream((void *)block->at, it->streams[which]);
    block->used_by |= 1u << which;
}

static void allocate(struct worker *it) {
    static const unsigned char bits[] = {9, 11, 12, 14, 15, 17, 20, 22, 23, 24};
    size_t bytes = (size_t)1 << bits[roll(it, sizeof bits)];
    bytes = (bytes + roll(it, bytes)) / 4 * 4;
    if (it->block_count == MOST_BLOCKS || it->bytes + bytes > it->budget) return;
    unsigned stream = any_stream(it);
    CUdeviceptr at = (CUdeviceptr)hook_gruyere_malloc((ptrdiff_t)bytes, 0, it->streams[stream]);
    if (!at) {
        /* Out of memory: near the device's end that is an answer like others. */
        it->refused++;
        return;
    }
    enter_live(at, bytes);
    struct block *block = &it->blocks[it->block_count++];
    *block = (struct block){.at = at, .bytes = bytes, .written = new_event()};
    it->bytes += bytes;
    it->allocated++;
    write_block(it, block, it->streams[stream]);
}

/* Checked on a stream, and freed before the check has run. */
static void drop(struct worker *it, unsigned index, unsigned stream) {
    struct block block = it->blocks[index];
    check(it, &block, stream);
    it->blocks[index] = it->blocks[--it->block_count];
    it->bytes -= block.bytes;
    leave_live(block.at);
    hook_gruyere_free((void *)block.at, (ptrdiff_t)block.bytes, 0, it->streams[any_stream(it)]);
    MUST(cuda.cuEventDestroy_v2(block.written));
}

/* Another stream checks a block and writes a new number. */
static void hand_over(struct worker *it) {
    if (!it->block_count) return;
    struct block *block = &it->blocks[roll(it, it->block_count)];
    unsigned stream = any_stream(it);
    check(it, block, stream);
    write_block(it, block, it->streams[stream]);
    it->handed_over++;
}

static void create_stream(struct worker *it) {
    for (unsigned i = LASTING; i < LASTING + OWN; i++)
        if (!it->streams[i]) {
            it->streams[i] = new_stream();
            it->created++;
            return;
        }
}

/* With its work under way, and live blocks that were allocated on it. Those that it was recorded
 * for go first: to free them later would use it. */
static void destroy_stream(struct worker *it) {
    unsigned which = LASTING + (unsigned)roll(it, OWN);
    if (!it->streams[which]) return;
    for (unsigned i = it->block_count; i-- > 0;)
        if (it->blocks[i].used_by & 1u << which) drop(it, i, 0);
    MUST(cuda.cuStreamDestroy_v2(it->streams[which]));
    it->streams[which] = NULL;
    it->destroyed++;
}

static void start(struct worker *it, unsigned seed, size_t budget) {
    MUST(cuda.cuCtxSetCurrent(context));
    it->dice = 0x9e3779b97f4a7c15ull * (seed + 1);
    it->pattern = seed << 22;
    it->budget = budget;
    for (unsigned i = 0; i < LASTING; i++) it->streams[i] = new_stream();
    it->host = malloc(WORDS_WITHOUT_KERNELS * sizeof *it->host);
    /* Not of the library's: what counts its faults is none of its blocks. */
    MUST(cuda.cuMemAlloc_v2(&it->counter, PAGE));
    MUST(cuda.cuMemsetD32Async(it->counter, 0, 16, NULL));
    MUST(cuda.cuCtxSynchronize());
}

static void finish(struct worker *it) {
    unsigned counted = 0;
    while (it->block_count) drop(it, it->block_count - 1, 0);
    MUST(cuda.cuCtxSynchronize());
    MUST(cuda.cuMemcpyDtoH_v2(&counted, it->counter, sizeof counted));
    it->wrong += counted;
    for (unsigned i = 0; i < LASTING + OWN; i++)
        if (it->streams[i]) MUST(cuda.cuStreamDestroy_v2(it->streams[i]));
    MUST(cuda.cuMemFree_v2(it->counter));
    free(it->host);
}

/* The check itself, on a block with one wrong word. */
static int check_sees_a_fault(void) {
    static struct worker it;
    memset(&it, 0, sizeof it);
    start(&it, 1000, 64 * MIB);
    while (!it.block_count) allocate(&it);
    MUST(cuda.cuCtxSynchronize());
    MUST(cuda.cuMemsetD32Async(it.blocks[0].at + 4, 1, 1, NULL));
    MUST(cuda.cuCtxSynchronize());
    finish(&it);
    return it.wrong == 1;
}

static double until;

static void *work(void *argument) {
    struct worker *it = argument;
    MUST(cuda.cuCtxSetCurrent(context));
    for (unsigned round = 0; (now() < until || round < options.rounds) && !failed && !overlaps;
         round++) {
        for (int i = 0; i < 50; i++) {
            uint64_t move = roll(it, 425);
            if (move < 200) allocate(it);
            else if (move < 360 && it->block_count)
                drop(it, (unsigned)roll(it, it->block_count), any_stream(it));
            else if (move < 420) hand_over(it);
            else if (move < 424) create_stream(it);
            else if (options.destroy_streams) destroy_stream(it);
        }
        if (options.overwrite && it->block_count)
            MUST(cuda.cuMemsetD32Async(it->blocks[0].at, 0, 1, it->streams[0]));
        /* The device may be behind, but not by minutes. Out of room: half of it goes. */
        MUST(cuda.cuStreamSynchronize(it->streams[roll(it, LASTING)]));
        if (it->bytes > it->budget * 9 / 10 || (it->refused && it->block_count > 16))
            for (unsigned i = it->block_count / 2; i-- > 0;) drop(it, i, any_stream(it));
    }
    return NULL;
}

static int usage(FILE *to, int code) {
    fprintf(
        to,
        "usage: canaries --library LIBGRUYERE [--seconds N] [--rounds N] [--threads N] [--seed N] "
        "[--fill SHARE] [--destroy-streams] [--json FILE]\n"
        "                [--driver LIBCUDA] [--leave-out-record-stream] [--overwrite]\n\n"
        "--driver: another libcuda than the loader finds; the library is to find the same one "
        "(LD_PRELOAD). "
        "--rounds: each thread makes at least so many rounds of 50 moves, whatever time they take. "
        "--fill: the share of free memory that blocks take together (0.25). "
        "--leave-out-record-stream: a program that breaks the rule; a fault is then\n"
        "the program's, and shows that the canaries see one. --overwrite: the program writes over "
        "its own blocks, to try the alarm.\n"
        "Exit: 0 nothing was found; 1 something failed; 2 usage, or no driver; 3 corruption.\n");
    return code;
}

static int read_options(int count, char **words) {
    for (int i = 1; i < count; i++) {
        const char *word = words[i], *value = i + 1 < count ? words[i + 1] : NULL;
        if (!strcmp(word, "--destroy-streams")) options.destroy_streams = 1;
        else if (!strcmp(word, "--leave-out-record-stream")) options.leave_out_record_stream = 1;
        else if (!strcmp(word, "--overwrite")) options.overwrite = 1;
        else if (!value) return 0;
        else {
            if (!strcmp(word, "--library")) options.library = value;
            else if (!strcmp(word, "--driver")) options.driver = value;
            else if (!strcmp(word, "--json")) options.json = value;
            else if (!strcmp(word, "--seconds")) options.seconds = atof(value);
            else if (!strcmp(word, "--rounds")) options.rounds = (unsigned)atoi(value);
            else if (!strcmp(word, "--threads")) options.threads = (unsigned)atoi(value);
            else if (!strcmp(word, "--seed")) options.seed = (unsigned)atoi(value);
            else if (!strcmp(word, "--fill")) options.fill = atof(value);
            else return 0;
            i++;
        }
    }
    return options.library && options.seconds > 0 && options.threads >= 1 &&
           options.threads <= MOST_THREADS && options.fill > 0 && options.fill < 1;
}

static const char *open_library(void) {
    void *library = dlopen(options.library, RTLD_NOW);
    if (!library) return dlerror();
#define FIND_HOOK(result, name, arguments) \
    if (!(*(void **)&hook_##name = dlsym(library, #name))) return #name " is not in the library";
    HOOKS(FIND_HOOK)
    return NULL;
}

int main(int count, char **words) {
    if (count == 2 && !strcmp(words[1], "--help")) return usage(stdout, OK);
    if (!read_options(count, words)) return usage(stderr, USAGE);
    const char *reason = driver_open(options.driver);
    if (!reason) reason = open_library();
    if (reason) {
        fprintf(stderr, "canaries: %s\n", reason);
        return USAGE;
    }
    driver_enter();
    int run = kernels_run();
    CUresult code;
    if (run) {
        write_kernel = kernel(BASIC, "fill", &code);
        count_kernel = kernel(BASIC, "differ", &code);
    }
    /* record_stream and captures: all hooks, as the package wires them. */
    hook_gruyere_announce_hooks(3);
    int sees = check_sees_a_fault();
    static struct worker workers[MOST_THREADS];
    pthread_t threads[MOST_THREADS];
    size_t budget = (size_t)(options.fill * (double)free_memory()) / options.threads;
    for (unsigned i = 0; i < options.threads; i++) start(&workers[i], options.seed + i, budget);
    until = now() + options.seconds * 1e9;
    for (unsigned i = 0; i < options.threads; i++)
        if (pthread_create(&threads[i], NULL, work, &workers[i]))
            return perror("canaries: pthread_create"), FAILED;
    struct worker sum = {0};
    for (unsigned i = 0; i < options.threads; i++) pthread_join(threads[i], NULL);
    for (unsigned i = 0; i < options.threads; i++) {
        finish(&workers[i]);
        sum.wrong += workers[i].wrong, sum.allocated += workers[i].allocated,
            sum.refused += workers[i].refused;
        sum.handed_over += workers[i].handed_over, sum.created += workers[i].created,
            sum.destroyed += workers[i].destroyed;
    }
    struct GruyereStats stats = {.size = sizeof stats};
    hook_gruyere_trim();
    int valid = hook_gruyere_validate() == GRUYERE_OK,
        told = hook_gruyere_stats(0, &stats) == GRUYERE_OK, clean = told && stats.live == 0;
    int found = overlaps || (sum.wrong && !options.leave_out_record_stream);
    int result = found ? CORRUPTION : sees && valid && clean ? OK : FAILED;
    printf("%s: %llu wrong words, %llu overlaps; %llu blocks, %llu refused, %llu handed over, %llu "
           "streams created, %llu destroyed; %s; the check %s a planted fault; "
           "books %s, %llu bytes left\n",
           result == OK           ? "ok"
           : result == CORRUPTION ? "CORRUPTION"
                                  : "FAILED",
           (unsigned long long)sum.wrong, (unsigned long long)overlaps,
           (unsigned long long)sum.allocated, (unsigned long long)sum.refused,
           (unsigned long long)sum.handed_over, (unsigned long long)sum.created,
           (unsigned long long)sum.destroyed,
           run ? "by kernels" : "no kernel runs here: the beginning of each block, by copies",
           sees ? "sees" : "DOES NOT SEE", valid ? "sound" : "BROKEN",
           told ? (unsigned long long)stats.live : 0ull);
    FILE *json = options.json ? fopen(options.json, "w") : NULL;
    if (options.json && !json) return perror(options.json), FAILED;
    if (json) {
        fprintf(json,
                "{\"wrong\": %llu, \"overlaps\": %llu, \"kernels\": %d, \"sees_a_fault\": %d, "
                "\"valid\": %d, \"left_bytes\": %llu, \"blocks\": %llu, \"refused\": %llu,\n"
                " \"handed_over\": %llu, \"streams_created\": %llu, \"streams_destroyed\": %llu, "
                "\"seconds\": %g, \"seed\": %u, \"fill\": %g, \"result\": %d}\n",
                (unsigned long long)sum.wrong, (unsigned long long)overlaps, run, sees, valid,
                told ? (unsigned long long)stats.live : 0ull, (unsigned long long)sum.allocated,
                (unsigned long long)sum.refused, (unsigned long long)sum.handed_over,
                (unsigned long long)sum.created, (unsigned long long)sum.destroyed, options.seconds,
                options.seed, options.fill, result);
        if (fclose(json)) return perror(options.json), FAILED;
    }
    return result;
}
