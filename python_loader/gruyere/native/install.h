// How the object becomes torch's allocator.

#pragma once

#include <dlfcn.h>

#include <memory>

#include "calls.h"

namespace gruyere {
namespace {

// torch's own function where it is to be had: then `torch.cuda.memory._get_current_allocator` knows
// of the change. It is not linked to.
void store(CUDAAllocator *chosen) {
    // Its owners are torch's statics, which are destroyed at exit; the object is not.
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
    // What asks for the allocator of a type of device (torch.accelerator) does not look there. It
    // takes one of no lower priority than the one before, and torch 2.15's own has one above the
    // default.
    for (int priority = 0; priority < 256 && c10::GetAllocator(c10::kCUDA) != chosen; ++priority) {
        c10::SetAllocator(c10::kCUDA, chosen, static_cast<uint8_t>(priority));
    }
}

} // namespace
} // namespace gruyere
