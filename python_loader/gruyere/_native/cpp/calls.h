// Calls through the library's table, and their errors. Only shim.cpp is compiled, and it must share
// nothing with another shim in the process, so all names have internal linkage.

#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <utility>

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>

#include "gruyere.h"

namespace gruyere {
namespace {

using namespace c10::cuda::CUDACachingAllocator;
using c10::DeviceIndex;
using c10::MempoolId_t;
using c10::CachingDeviceAllocator::AnnotationEntry;
using c10::CachingDeviceAllocator::parseTraceEntryAction;
using c10::cuda::CUDAStream;

using StreamFilter = std::function<bool(cudaStream_t)>;

const GruyereNativeTable *table = nullptr;

// The exception that a function of torch threw while the library called it. It is rethrown once the
// library has returned.
thread_local std::exception_ptr thrown;

void rethrow() {
    if (thrown) {
        std::rethrow_exception(std::exchange(thrown, nullptr));
    }
}

// The number of failures of this thread; the library keeps only the latest.
thread_local uint64_t failures = 0;

GruyereNativeFailure failure() {
    GruyereNativeFailure why{};
    why.text = "";
    table->failure(&why);
    return why;
}

[[noreturn]] void refuse() {
    rethrow();
    TORCH_CHECK(false, failure().text);
}

// Counts a failed call.
int counted(int code) {
    failures += code < 0;
    return code;
}

void check(int code) {
    counted(code);
    if (code < 0) {
        refuse();
    }
}

// Checks the code of functions that keep no failure text.
void check_device(int code, DeviceIndex device) {
    TORCH_CHECK(code != GRUYERE_INVALID, "Invalid device argument ", static_cast<int>(device),
                ": this process has no such device");
    TORCH_CHECK(code == GRUYERE_OK, "Gruyère cannot work in this process (it was forked from one "
                                    "that uses CUDA, or the log says why)");
}

GruyereMempoolId ours(MempoolId_t id) {
    return {id.first, id.second};
}

void drop_filter(void *filter) {
    delete static_cast<StreamFilter *>(filter);
}

int32_t ask_filter(void *filter, GruyereStream stream) {
    try {
        return (*static_cast<StreamFilter *>(filter))(static_cast<cudaStream_t>(stream)) ? 1 : 0;
    } catch (...) {
        thrown = std::current_exception();
        return -1;
    }
}

struct Totals {
    size_t allocated = 0;
    size_t reserved = 0;
};

Totals totals(DeviceIndex device) {
    GruyereTorchStats stats{};
    stats.size = sizeof(stats);
    if (table->torch_stats(device, &stats) != GRUYERE_OK) {
        return {};
    }
    return {stats.allocated_bytes[0].current, stats.reserved_bytes[0].current};
}

void report(void *block, int64_t bytes, DeviceIndex device) {
    Totals now = totals(device);
    c10::reportMemoryUsageToProfiler(block, bytes, now.allocated, now.reserved,
                                     c10::Device(c10::kCUDA, device));
}

// Announces a lasting stream to the library, which may then query it at any time. torch's own
// streams last; external ones do not (an even id other than 0 is the address of such a stream).
void tell(const CUDAStream &stream) {
    constexpr size_t kDevices = 64;
    constexpr size_t kWords = 8;
    static std::atomic<uint64_t> told[kDevices][kWords];
    const auto id = static_cast<uint64_t>(stream.id());
    const auto device = static_cast<size_t>(stream.device_index());
    const uint64_t number = id >> 1;
    if (!(id & 1) || number >= kWords * 64 || device >= kDevices) {
        return;
    }
    auto &word = told[device][number / 64];
    const uint64_t bit = uint64_t{1} << number % 64;
    if (C10_UNLIKELY(!(word.load(std::memory_order_relaxed) & bit))) {
        table->stream_lasts(stream.device_index(), stream.stream());
        word.fetch_or(bit, std::memory_order_relaxed);
    }
}

} // namespace
} // namespace gruyere
