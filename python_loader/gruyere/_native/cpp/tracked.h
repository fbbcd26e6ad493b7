// Trackers of segments: NCCL registers segments by one.

#pragma once

#include <algorithm>
#include <iterator>
#include <memory>
#include <mutex>
#include <vector>

#include "told.h"

namespace gruyere {
namespace {

// A segment that a tracker knows from a snapshot: the library reports those of MemPools alone.
struct Seen {
    AllocatorTraceTracker tracker;
    DeviceIndex device;
    MempoolId_t pool;
    uint64_t address;
    uint64_t bytes;
};

// The trackers attached by torch, kept until the process ends.
struct Tracking {
    std::mutex mutex;
    // Of the pools that captures had when a tracker was attached: torch 2.15 takes a snapshot just
    // before, and registers them with NCCL.
    std::vector<Seen> of_captures;
    // Replaced when a tracker is added, since trackers are called without the mutex.
    std::shared_ptr<const std::vector<AllocatorTraceTracker>> trackers =
        std::make_shared<const std::vector<AllocatorTraceTracker>>();
};

Tracking &tracking() {
    static Tracking &kept = *new Tracking;
    return kept;
}

void tell_one(const AllocatorTraceTracker &tracker, TraceEntry::Action action, DeviceIndex device,
              MempoolId_t pool, uint64_t address, uint64_t bytes) {
    try {
        TraceEntry entry(action, device, address, bytes, nullptr, pool, 0);
        entry.time_.t_ = c10::getTime() / 1000;
        tracker(entry);
    } catch (const std::exception &error) {
        // The segment is usable without the tracker: what is missing is a registration, or its end.
        TORCH_WARN("Gruyère: a tracker of segments failed: ", error.what());
    } catch (...) {
        TORCH_WARN("Gruyère: a tracker of segments failed");
    }
}

void tell_trackers(const GruyereSegmentEvent *event) {
    std::shared_ptr<const std::vector<AllocatorTraceTracker>> trackers;
    {
        std::lock_guard<std::mutex> guard(tracking().mutex);
        trackers = tracking().trackers;
    }
    const auto action = event->is_freed ? TraceEntry::SEGMENT_FREE : TraceEntry::SEGMENT_ALLOC;
    for (const AllocatorTraceTracker &tracker : *trackers) {
        tell_one(tracker, action, static_cast<DeviceIndex>(event->device),
                 MempoolId_t{event->pool.first, event->pool.second}, event->address, event->bytes);
    }
}

// The last graph of a pool goes: its memory may go to others, and must not stay registered.
void tell_of_release(DeviceIndex device, MempoolId_t pool) {
    std::vector<Seen> gone;
    {
        std::lock_guard<std::mutex> guard(tracking().mutex);
        std::vector<Seen> &all = tracking().of_captures;
        const auto first = std::stable_partition(all.begin(), all.end(), [&](const Seen &seen) {
            return seen.device != device || seen.pool != pool;
        });
        gone.assign(std::make_move_iterator(first), std::make_move_iterator(all.end()));
        all.erase(first, all.end());
    }
    for (const Seen &seen : gone) {
        tell_one(seen.tracker, TraceEntry::SEGMENT_FREE, device, pool, seen.address, seen.bytes);
    }
}

void attach(AllocatorTraceTracker tracker, int devices) {
    std::lock_guard<std::mutex> guard(tracking().mutex);
    for (int index = 0; index < devices; ++index) {
        const auto device = static_cast<DeviceIndex>(index);
        const Snapshot taken(device);
        for (const GruyereSegment &segment : taken.segments()) {
            const MempoolId_t pool{segment.pool_first, segment.pool_second};
            // The library numbers the segments that it reports.
            if (pool != MempoolId_t{0, 0} && table->segment_number(device, segment.address) < 0) {
                tracking().of_captures.push_back(
                    {tracker, device, pool, segment.address, segment.bytes});
            }
        }
    }
    auto more = std::make_shared<std::vector<AllocatorTraceTracker>>(*tracking().trackers);
    more->push_back(std::move(tracker));
    tracking().trackers = std::move(more);
    table->track(tell_trackers);
}

} // namespace
} // namespace gruyere
