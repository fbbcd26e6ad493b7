/* Allocates through the runtime, which is interposed itself, over a driver that is interposed too.
 * */
#include "driver.h"

int cudaMalloc(void **pointer, size_t bytes);
int cudaFree(void *pointer);

static uint64_t mallocs_so_far(void) {
    int (*read)(int, struct GruyereTorchStats *) =
        (int (*)(int, struct GruyereTorchStats *))of_gruyere("gruyere_torch_stats");
    struct GruyereTorchStats stats;
    memset(&stats, 0, sizeof stats);
    stats.size = sizeof stats;
    CHECK(read && read(0, &stats) == 0);
    return stats.allocation[0].allocated;
}

int main(void) {
    void *blocks[10];
    for (int i = 0; i < 10; i++) OK(cudaMalloc(&blocks[i], (size_t)1 << (10 + i)));
    CHECK(mallocs_so_far() == 10);
    CHECK(live() == ((uint64_t)1 << 20) - 1024);
    for (int i = 0; i < 10; i++) OK(cudaFree(blocks[i]));
    CHECK(live() == 0);
    puts("kept");
    return 0;
}
