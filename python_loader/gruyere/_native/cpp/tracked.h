// Trackers of segments: NCCL registers segments by one.

#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "context.h"

namespace gruyere {
namespace {

// The trackers attached by torch, kept until the process ends.
struct Tracking {
    std::mutex mutex;
    // Replaced when a tracker is added, since trackers are called without the mutex.
    std::shared_ptr<const std::vector<AllocatorTraceTracker>> trackers =
        std::make_shared<const std::vector<AllocatorTraceTracker>>();
};

Tracking &tracking() {
    static Tracking &kept = *new Tracking;
    return kept;
}

void tell_trackers(const GruyereSegmentEvent *event) {
    std::shared_ptr<const std::vector<AllocatorTraceTracker>> trackers;
    {
        std::lock_guard<std::mutex> guard(tracking().mutex);
        trackers = tracking().trackers;
    }
    try {
        TraceEntry entry(event->is_freed ? TraceEntry::SEGMENT_FREE : TraceEntry::SEGMENT_ALLOC,
                         static_cast<DeviceIndex>(event->device), event->address, event->bytes,
                         nullptr, MempoolId_t{event->pool.first, event->pool.second}, 0);
        entry.time_.t_ = c10::getTime() / 1000;
        for (const AllocatorTraceTracker &tracker : *trackers) {
            tracker(entry);
        }
    } catch (const std::exception &error) {
        // The segment is usable without the tracker: only a registration is missing.
        TORCH_WARN("Gruyère: a tracker of segments failed: ", error.what());
    } catch (...) {
        TORCH_WARN("Gruyère: a tracker of segments failed");
    }
}

void attach(AllocatorTraceTracker tracker) {
    std::lock_guard<std::mutex> guard(tracking().mutex);
    auto more = std::make_shared<std::vector<AllocatorTraceTracker>>(*tracking().trackers);
    more->push_back(std::move(tracker));
    tracking().trackers = std::move(more);
    table->track(tell_trackers);
}

} // namespace
} // namespace gruyere
