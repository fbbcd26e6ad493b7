// Pools over another allocator of torch (torch.cuda.MemPool(allocator=...)): their segments are
// requested from it and returned to it.

#pragma once

#include <memory>

#include "calls.h"

namespace gruyere {
namespace {

// Kept until the last segment from it has been returned.
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

// Called for a request of the calling thread. Device and stream are the current ones, as when
// torch's own allocator calls it.
void *give_foreign(void *foreign, uint64_t bytes, int32_t, GruyereStream, int32_t *failed) {
    try {
        return static_cast<Foreign *>(foreign)->allocator->raw_alloc(bytes);
    } catch (...) {
        thrown = std::current_exception();
        *failed = 1;
        return nullptr;
    }
}

// Called once for each block: memory that the allocator fails to take back is left to it. Also
// called from destructors, so it must not throw.
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
