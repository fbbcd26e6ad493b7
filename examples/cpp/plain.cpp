// A program that knows nothing of Gruyère:
//
//     gruyere run -- plain                 its memory comes from Gruyère
//     gruyere run --observe -- plain       it is only watched
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

static void check(cudaError_t code, const char *what) {
    if (code != cudaSuccess) {
        std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(code));
        std::exit(1);
    }
}
#define CHECK(call) check(call, #call)

int main() {
    constexpr std::size_t mib = 1 << 20;
    std::vector<cudaStream_t> streams(4);
    for (cudaStream_t &stream : streams) {
        CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    }

    void *table = nullptr;
    CHECK(cudaMalloc(&table, 256 * mib));
    CHECK(cudaMemsetAsync(table, 0, 256 * mib, streams[0]));

    for (std::size_t round = 0; round < 100; round++) {
        // In stream order: freed on the stream that used it.
        for (cudaStream_t stream : streams) {
            void *scratch = nullptr;
            const std::size_t bytes = (1 + round % 7) * mib;
            CHECK(cudaMallocAsync(&scratch, bytes, stream));
            CHECK(cudaMemsetAsync(scratch, 1, bytes, stream));
            CHECK(cudaFreeAsync(scratch, stream));
        }
        // By hand: freed when its work is done.
        void *grid = nullptr;
        CHECK(cudaMalloc(&grid, 32 * mib));
        CHECK(cudaMemsetAsync(grid, 2, 32 * mib, streams[round % streams.size()]));
        CHECK(cudaFree(grid));
    }

    std::size_t free_bytes = 0, total_bytes = 0;
    CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
    std::printf("%zu of %zu MiB are free\n", free_bytes / mib, total_bytes / mib);

    CHECK(cudaFree(table));
    for (cudaStream_t stream : streams) {
        CHECK(cudaStreamDestroy(stream));
    }
    std::printf("done\n");
    return 0;
}
