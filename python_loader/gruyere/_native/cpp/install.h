// Makes the object torch's allocator, and tells torch what kind of allocator it is.

#pragma once

#include <dlfcn.h>

#include <memory>
#include <string>

#include <c10/core/AllocatorConfig.h>
#include <c10/cuda/CUDAAllocatorConfig.h>

#include "calls.h"

namespace gruyere {
namespace {

// Keeps torch's setting `expandable_segments` on, whatever the environment and the program say:
// Gruyère's memory moves under its addresses, and where segments expand torch registers no ordinary
// memory with NCCL (torch 2.15's process groups do by default, earlier ones on request).
void keep_expanding() {
    using Config = c10::CachingAllocator::AcceleratorAllocatorConfig;
    // Has torch read CUDA's settings while its own allocator is in place, with which it compares
    // `backend`.
    (void)c10::cuda::CUDACachingAllocator::CUDAAllocatorConfig::pinned_num_register_threads();
    const auto expand = [](const std::string &text) {
        Config::instance().parseArgs(text + (text.empty() ? "" : ",") +
                                     "expandable_segments:True");
    };
    expand(Config::last_allocator_settings());
    // Called after each change of the settings.
    auto &hook = Config::getConfigParserHook();
    hook = [expand, own = hook](const std::string &text) {
        if (own) {
            own(text);
        }
        expand(text);
    };
}

// Calls torch's own function if it is available, so that
// `torch.cuda.memory._get_current_allocator` knows of the change. The shim is not linked to it.
void store(CUDAAllocator *chosen) {
    // torch's statics own the pointer and are destroyed at exit; the object must not be.
    const std::shared_ptr<CUDAAllocator> shared(chosen, [](CUDAAllocator *) {});
    void *library = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY);
    void *function =
        library
            ? dlsym(library, "_ZN5torch4cuda22CUDAPluggableAllocator22changeCurrentAllocatorERKSt"
                             "10shared_ptrIN3c104cuda20CUDACachingAllocator13CUDAAllocatorEE")
            : nullptr;
    if (function) {
        reinterpret_cast<void (*)(const std::shared_ptr<CUDAAllocator> &)>(function)(shared);
    }
    allocator.store(chosen);
    // The allocator of a device type (torch.accelerator) is registered separately. It is replaced
    // only at the same or a higher priority, and torch 2.15's own has one above the default.
    for (int priority = 0; priority < 256 && c10::GetAllocator(c10::kCUDA) != chosen; ++priority) {
        c10::SetAllocator(c10::kCUDA, chosen, static_cast<uint8_t>(priority));
    }
}

} // namespace
} // namespace gruyere
