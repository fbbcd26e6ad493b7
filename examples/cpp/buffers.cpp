// Buffers in stream order, from resources with a lifetime, and from a pool. See device_buffer.hpp.
#include "device_buffer.hpp"

#include <cstdio>
#include <vector>

static void check(cudaError_t code, const char *what) {
    if (code != cudaSuccess) {
        throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(code));
    }
}
#define CHECK(call) check(call, #call)

static GruyereStats stats() {
    GruyereStats stats{};
    stats.size = sizeof stats;
    if (gruyere_stats(0, &stats) != GRUYERE_OK) {
        throw std::runtime_error("there are no statistics of device 0");
    }
    return stats;
}

static void run() {
    // This program tells which other streams use a block (buffer::used_on), so memory may pass from
    // stream to stream.
    gruyere_announce_hooks(1);
    cudaStream_t compute, copies;
    CHECK(cudaStreamCreateWithFlags(&compute, cudaStreamNonBlocking));
    CHECK(cudaStreamCreateWithFlags(&copies, cudaStreamNonBlocking));
    cudaEvent_t computed;
    CHECK(cudaEventCreateWithFlags(&computed, cudaEventDisableTiming));
    {
        device::gruyere_resource weights_of(0, device::lifetime::persistent),
            steps_of(0, device::lifetime::step);
        const device::buffer<float> weights(16 << 20, compute, weights_of);
        CHECK(cudaMemsetAsync(weights.data(), 0, weights.bytes(), compute));

        std::vector<float> result(1 << 20);
        for (int step = 0; step < 4; step++) {
            device::buffer<float> activations(1 << 20, compute, steps_of);
            CHECK(cudaMemsetAsync(activations.data(), step, activations.bytes(), compute));
            CHECK(cudaEventRecord(computed, compute));
            CHECK(cudaStreamWaitEvent(copies, computed, 0));
            CHECK(cudaMemcpyAsync(result.data(), activations.data(), activations.bytes(),
                                  cudaMemcpyDeviceToHost, copies));
            activations.used_on(copies);
            gruyere_mark_step();
            // The buffer goes here, though its copy may not be done: nobody gets the memory before
            // it is.
        }
        CHECK(cudaStreamSynchronize(copies));
        std::printf("after four steps: live %llu MiB, held %llu MiB\n",
                    static_cast<unsigned long long>(stats().live >> 20),
                    static_cast<unsigned long long>(stats().reserved >> 20));

        device::pool_resource cache("kv cache", 0);
        {
            std::vector<device::buffer<char>> blocks;
            for (int i = 0; i < 32; i++) {
                blocks.emplace_back(4 << 20, compute, cache);
            }
            try {
                cache.release();
            } catch (const std::runtime_error &error) {
                std::printf("not yet: %s\n", error.what());
            }
        }
        std::printf("the pool gave %llu MiB back\n",
                    static_cast<unsigned long long>(cache.release() >> 20));

        try {
            device::buffer<char> too_much(std::size_t{1} << 50, compute, steps_of);
        } catch (const std::bad_alloc &error) {
            std::printf("1 PiB: %s\n", error.what());
        }
    }
    CHECK(cudaStreamSynchronize(compute));
    CHECK(cudaEventDestroy(computed));
    CHECK(cudaStreamDestroy(compute));
    CHECK(cudaStreamDestroy(copies));
    std::printf("at the end: live %llu bytes\n", static_cast<unsigned long long>(stats().live));
}

int main() {
    try {
        run();
    } catch (const std::exception &error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
    return 0;
}
