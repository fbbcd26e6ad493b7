// Pools over another allocator of torch's (torch.cuda.MemPool(allocator=...)): their segments are
// asked of it, and given back to it.

#pragma once

#include <memory>

#include "calls.h"

namespace gruyere {
namespace {

// Kept until the last segment of it has gone.
struct Foreign {
    std::shared_ptr<CUDAAllocator> allocator;
};

void drop_foreign(void *foreign) {
    try {
        delete static_cast<Foreign *>(foreign);
    } catch (...) {
        TORCH_WARN("Gruyère: the allocator of a memory pool threw when it was let go of");
    }
}

// For the calling thread's request: device and stream are the current ones, as torch's own
// allocator calls it.
void *give_foreign(void *foreign, uint64_t bytes, int32_t, GruyereStream, int32_t *failed) {
    try {
        return static_cast<Foreign *>(foreign)->allocator->raw_alloc(bytes);
    } catch (...) {
        thrown = std::current_exception();
        *failed = 1;
        return nullptr;
    }
}

// Never asked again: what the allocator did not take back is its own affair. Memory goes back in
// destructors too, where nothing may be thrown.
void take_foreign(void *foreign, void *block) {
    try {
        static_cast<Foreign *>(foreign)->allocator->raw_delete(block);
    } catch (const std::exception &error) {
        TORCH_WARN("Gruyère: the allocator of a memory pool did not take memory back: ",
                   error.what());
    } catch (...) {
        TORCH_WARN("Gruyère: the allocator of a memory pool did not take memory back");
    }
}

} // namespace
} // namespace gruyere
