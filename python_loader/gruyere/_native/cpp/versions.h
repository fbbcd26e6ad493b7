// The differences between versions of torch: the functions of its interface, and the layouts of
// their arguments and results. The rest of the shim is the same for all versions.

#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/cuda/CUDAAllocatorConfig.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <torch/headeronly/version.h>

#define GRUYERE_TORCH (TORCH_VERSION_MAJOR * 100 + TORCH_VERSION_MINOR)

#if GRUYERE_TORCH < 211 || GRUYERE_TORCH > 215
#error "this shim is written for torch 2.11 to 2.15"
#endif

// Marks a function that torch's interface has from that version on. With such a torch the compiler
// checks that it overrides torch's; with an older one the function is not called.
#if GRUYERE_TORCH >= 212
#define GRUYERE_SINCE_212 override
#else
#define GRUYERE_SINCE_212
#endif
#if GRUYERE_TORCH >= 213
#define GRUYERE_SINCE_213 override
#else
#define GRUYERE_SINCE_213
#endif
#if GRUYERE_TORCH >= 214
#define GRUYERE_SINCE_214 override
#else
#define GRUYERE_SINCE_214
#endif

namespace gruyere {
namespace {

#if GRUYERE_TORCH >= 212
using c10::cuda::CUDACachingAllocator::OomRejectionObserver;
#else
using OomRejectionObserver = std::function<void(int64_t, size_t, size_t, size_t)>;
#endif

// The known layouts. A type with another layout has a field that this shim neither fills nor reads,
// so the shim does not fit that torch: a newer patch release, or a modified torch.
namespace layouts {

namespace cuda = c10::cuda::CUDACachingAllocator;
namespace device = c10::CachingDeviceAllocator;

constexpr size_t since(int version, size_t then, size_t before) {
    return GRUYERE_TORCH >= version ? then : before;
}

#define GRUYERE_LAYOUT(type, bytes)                                                                \
    static_assert(sizeof(type) == (bytes), #type " of this torch is not the one that is known")

// With the C++ library's old ABI (before 2015) strings have another size.
#if _GLIBCXX_USE_CXX11_ABI
GRUYERE_LAYOUT(c10::CachingAllocator::Stat, 32);
GRUYERE_LAYOUT(c10::DataPtr, 32);
GRUYERE_LAYOUT(device::BlockInfo, 40);
GRUYERE_LAYOUT(device::SegmentInfo, 120);
GRUYERE_LAYOUT(device::AnnotationEntry, 72);
GRUYERE_LAYOUT(cuda::CheckpointDelta, 48);
GRUYERE_LAYOUT(cuda::StreamSegmentSize, 24);
GRUYERE_LAYOUT(cuda::ShareableHandle, 40);
GRUYERE_LAYOUT(device::DeviceStats, since(213, 1016, since(212, 984, 976)));
GRUYERE_LAYOUT(device::TraceEntry, since(215, 168, 136));
GRUYERE_LAYOUT(cuda::AllocatorConfigInfo, since(213, 104, 88));
GRUYERE_LAYOUT(cuda::SnapshotInfo, since(214, 224, since(213, 176, 160)));
#endif

#undef GRUYERE_LAYOUT

} // namespace layouts

bool throws_on_limit() {
#if GRUYERE_TORCH >= 212
    return c10::cuda::CUDACachingAllocator::CUDAAllocatorConfig::throw_on_cudamalloc_oom();
#else
    return false;
#endif
}

void note_rejections(c10::CachingDeviceAllocator::DeviceStats &to, int64_t count) {
#if GRUYERE_TORCH >= 212
    to.num_oom_rejections = count;
#else
    (void)to;
    (void)count;
#endif
}

// Fills in the settings for pinned memory.
void note_host_settings(c10::cuda::CUDACachingAllocator::AllocatorConfigInfo &to) {
#if GRUYERE_TORCH >= 213
    using General = c10::CachingAllocator::AcceleratorAllocatorConfig;
    to.max_round_threshold = General::pinned_max_round_threshold();
    to.max_cached_size = General::pinned_max_cached_size();
#else
    (void)to;
#endif
}

} // namespace
} // namespace gruyere
