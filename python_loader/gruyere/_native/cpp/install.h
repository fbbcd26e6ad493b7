// Makes the object torch's allocator.

#pragma once

#include <dlfcn.h>

#include <memory>

#include "calls.h"

namespace gruyere {
namespace {

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
