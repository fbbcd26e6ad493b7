// torch's checkpoints: states of graph pools, which the library records and restores.

#pragma once

#include <memory>

#include "calls.h"

namespace gruyere {
namespace {

// A state recorded by the library. It holds no memory and may outlive its pool.
struct PoolState final : AllocatorState {
    PoolState(DeviceIndex device, GruyerePoolState *state) : device(device), state(state) {}
    ~PoolState() override {
        table->pool_state_free(state);
    }
    PoolState(const PoolState &) = delete;
    PoolState &operator=(const PoolState &) = delete;

    const DeviceIndex device;
    GruyerePoolState *const state;
};

std::shared_ptr<AllocatorState> take_state(DeviceIndex device, MempoolId_t id) {
    std::unique_ptr<GruyerePoolState, decltype(table->pool_state_free)> taken(
        table->pool_state(device, ours(id)), table->pool_state_free);
    check(taken ? GRUYERE_OK : GRUYERE_INVALID);
    auto state = std::make_shared<PoolState>(device, taken.get());
    taken.release();
    return state;
}

// torch expects every block of the pool to be freed and every block of the state to be allocated,
// so a block that stays is reported as both.
CheckpointDelta restore(DeviceIndex device, const AllocatorState *wanted,
                        c10::DeleterFnPtr deleter) {
    const auto *state = dynamic_cast<const PoolState *>(wanted);
    TORCH_CHECK(state, "setCheckpointPoolState: the state is of another allocator: take it with "
                       "getCheckpointState while Gruyère serves");
    TORCH_CHECK(state->device == device, "setCheckpointPoolState: the state is of device ",
                static_cast<int>(state->device), ", not of device ", static_cast<int>(device));
    const std::unique_ptr<GruyereRestored, decltype(table->restored_free)> done(
        table->pool_restore(state->state), table->restored_free);
    check(done ? GRUYERE_OK : GRUYERE_INVALID);
    CheckpointDelta delta;
    for (size_t at = 0; at < done->before_count; ++at) {
        delta.ptrs_freed.push_back(reinterpret_cast<void *>(done->before[at]));
    }
    for (size_t at = 0; at < done->after_count; ++at) {
        auto *block = reinterpret_cast<void *>(done->after[at]);
        delta.dataptrs_allocd.emplace_back(block, block, deleter, c10::Device(c10::kCUDA, device));
    }
    return delta;
}

} // namespace
} // namespace gruyere
