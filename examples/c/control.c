/* Device memory from Gruyère by hand, and its control interface: lifetimes, a named pool, steps and
 * phases, statistics.
 *
 *     cc -I include control.c -L target/release -lgruyere -o control
 */
#include "gruyere.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

enum { DEVICE = 0, TRAINING = 0, VALIDATION = 1, STEP = 2, PERSISTENT = 3 };
#define MIB ((size_t)1 << 20)

static void *take(size_t bytes) {
    void *block = gruyere_malloc((ptrdiff_t)bytes, DEVICE, NULL);
    if (block == NULL) {
        /* The log has the cause in bytes. */
        fprintf(stderr, "%zu bytes of device memory cannot be had\n", bytes);
        exit(1);
    }
    return block;
}

static void give(void *block) { gruyere_free(block, 0, DEVICE, NULL); }

static void tell(const char *when) {
    /* The library writes no more than `size` says, and says how much it wrote: programs and
     * libraries of unlike versions go together. */
    GruyereStats stats = {.size = sizeof stats};
    if (gruyere_stats(DEVICE, &stats) != GRUYERE_OK) {
        fprintf(stderr, "there are no statistics of device %d\n", DEVICE);
        exit(1);
    }
    printf("%-22s live %4" PRIu64 " MiB, held %4" PRIu64 " MiB, largest request that fits %6" PRIu64
           " MiB\n",
           when, stats.live / MIB, stats.reserved / MIB, stats.largest_request_growing / MIB);
}

static void pool_failed(const char *what) {
    char why[256];
    gruyere_last_error(why, sizeof why);
    fprintf(stderr, "%s: %s\n", what, why);
    exit(1);
}

int main(void) {
    printf("gruyere %s\n", gruyere_version());
    /* Every block here is freed on the stream that used it, and nothing is captured: memory may
     * pass from stream to stream. */
    gruyere_announce_hooks(3);

    /* Blocks of unlike lifetimes do not share pages: that is what keeps whole pages free. Tags
     * nest, and are the calling thread's. */
    gruyere_lifetime_push(PERSISTENT);
    void *weights = take(200 * MIB);
    gruyere_lifetime_pop();
    /* What was allocated elsewhere can be tagged afterwards. */
    void *state = take(100 * MIB);
    gruyere_tag(state, PERSISTENT);
    tell("weights are there");

    for (int step = 0; step < 3; step++) {
        gruyere_lifetime_push(STEP);
        void *activations = take(64 * MIB);
        void *gradients = take(200 * MIB);
        gruyere_lifetime_pop();
        give(activations);
        give(gradients);
        gruyere_mark_step();
    }
    tell("three steps later");

    /* A phase that needs less: what it has not needed before goes back to the device. */
    gruyere_mark_phase(VALIDATION);
    tell("validation");
    gruyere_mark_phase(TRAINING);

    /* All that a thread takes between enter and leave is the pool's, and goes back to the device at
     * once. */
    uint64_t cache = 0, given = 0;
    if (gruyere_pool_create("kv cache", DEVICE, 32 * MIB, 512 * MIB, &cache) != GRUYERE_OK) {
        pool_failed("the pool");
    }
    gruyere_pool_enter(cache);
    void *blocks[8];
    for (int i = 0; i < 8; i++) {
        blocks[i] = take(16 * MIB);
    }
    gruyere_pool_leave(cache);
    GruyerePoolStats pool = {.size = sizeof pool};
    gruyere_pool_stats(cache, &pool);
    printf("the pool has %" PRIu64 " blocks of %" PRIu64 " MiB\n", pool.live_blocks,
           pool.live / MIB);
    if (gruyere_pool_destroy(cache, &given) != GRUYERE_BUSY) {
        fprintf(stderr, "a pool with live blocks was destroyed\n");
        return 1;
    }
    for (int i = 0; i < 8; i++) {
        give(blocks[i]);
    }
    if (gruyere_pool_destroy(cache, &given) != GRUYERE_OK) {
        pool_failed("the end of the pool");
    }
    printf("the pool gave %" PRIu64 " MiB back\n", given / MIB);

    give(weights);
    give(state);
    printf("trimmed %" PRIu64 " MiB\n", gruyere_trim() / MIB);
    tell("at the end");
    return 0;
}
