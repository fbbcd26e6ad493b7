// Statistics, snapshots and history in torch's data structures.

#pragma once

#include <algorithm>
#include <iterator>
#include <unordered_map>

#include <c10/cuda/CUDAAllocatorConfig.h>

#include "context.h"
#include "versions.h"

namespace gruyere {
namespace {

constexpr uint32_t kAllocated = 1;

// The layout of a device's memory; empty if nothing was ever allocated.
class Snapshot {
public:
    template <class T> struct Range {
        const T *first;
        size_t count;
        const T *begin() const {
            return first;
        }
        const T *end() const {
            return first + count;
        }
    };

    explicit Snapshot(DeviceIndex device) : taken_(table->snapshot(device)) {
        TORCH_INTERNAL_ASSERT(!taken_ || (taken_->segment_size == sizeof(GruyereSegment) &&
                                          taken_->block_size == sizeof(GruyereBlock)),
                              "another version of libgruyere");
    }
    ~Snapshot() {
        table->snapshot_free(taken_);
    }
    Snapshot(const Snapshot &) = delete;
    Snapshot &operator=(const Snapshot &) = delete;

    Range<GruyereSegment> segments() const {
        return taken_ ? Range<GruyereSegment>{taken_->segments, taken_->segment_count}
                      : Range<GruyereSegment>{nullptr, 0};
    }
    Range<GruyereBlock> blocks(const GruyereSegment &segment) const {
        return {taken_->blocks + segment.first_block, segment.block_count};
    }

private:
    GruyereSnapshot *taken_;
};

using Origins = std::unordered_map<uint64_t, std::shared_ptr<c10::GatheredContext>>;

GruyereTorchStats numbers(DeviceIndex device) {
    GruyereTorchStats stats{};
    stats.size = sizeof(stats);
    check_device(table->torch_stats(device, &stats), device);
    return stats;
}

void copy(const GruyereStat (&from)[3], c10::CachingAllocator::StatArray &to) {
    for (size_t pool = 0; pool < to.size(); ++pool) {
        to[pool].current = from[pool].current;
        to[pool].peak = from[pool].peak;
        to[pool].allocated = from[pool].allocated;
        to[pool].freed = from[pool].freed;
    }
}

TraceEntry::Action action_of(uint32_t action) {
    // In the order of GruyereHistoryEntry.
    constexpr TraceEntry::Action kActions[] = {
        TraceEntry::ALLOC,         TraceEntry::FREE_REQUESTED, TraceEntry::FREE_COMPLETED,
        TraceEntry::SEGMENT_ALLOC, TraceEntry::SEGMENT_FREE,   TraceEntry::OOM,
        TraceEntry::SEGMENT_MAP,   TraceEntry::SEGMENT_UNMAP};
    TORCH_INTERNAL_ASSERT(action < std::size(kActions), "another version of libgruyere");
    return kActions[action];
}

void collect(SnapshotInfo &info, Origins &origins, bool include_traces) {
    GruyereNativeHistory *taken = table->history();
    if (!taken) {
        return;
    }
    const std::unique_ptr<GruyereNativeHistory, decltype(table->history_free)> owner(
        taken, table->history_free);
    const GruyereHistory &noted = *taken->noted;
    TORCH_INTERNAL_ASSERT(noted.entry_size == sizeof(GruyereHistoryEntry) &&
                              noted.origin_size == sizeof(GruyereOrigin),
                          "another version of libgruyere");
    for (size_t at = 0; at < noted.origin_count; ++at) {
        if (const auto *context = static_cast<const Context *>(taken->origin_contexts[at])) {
            origins.emplace(noted.origins[at].address, context->gathered);
        }
    }
    if (!include_traces) {
        return;
    }
    std::vector<TraceEntry::Action> skipped;
    {
        std::lock_guard<std::mutex> guard(recording().mutex);
        skipped = recording().skipped;
    }
    const bool has_contexts = recording().when.load() >= RecordContext::ALLOC;
    for (size_t at = 0; at < noted.entry_count; ++at) {
        const GruyereHistoryEntry &from = noted.entries[at];
        const TraceEntry::Action action = action_of(from.action);
        const auto *context = static_cast<const Context *>(taken->entry_contexts[at]);
        std::shared_ptr<c10::GatheredContext> gathered =
            context && has_contexts ? context->gathered : nullptr;
        // A free without a gathered context gets that of its block's allocation.
        const auto *origin = static_cast<const Context *>(taken->entry_origins[at]);
        if (!gathered && origin && has_contexts) {
            gathered = origin->gathered;
        }
        if (from.device >= info.device_traces.size() ||
            std::count(skipped.begin(), skipped.end(), action)) {
            continue;
        }
        TraceEntry to(action, static_cast<DeviceIndex>(from.device), from.address, from.bytes,
                      reinterpret_cast<void *>(from.stream), MempoolId_t{0, 0}, 0,
                      std::move(gathered), context ? context->compile : "N/A",
                      context ? context->metadata : "");
        to.time_.t_ = static_cast<c10::time_t>(from.time);
        info.device_traces[from.device].push_back(std::move(to));
    }
}

// Records the program's annotation of a live block.
void annotate(DeviceIndex device, const void *block, size_t bytes, const std::string &metadata) {
#if GRUYERE_TORCH >= 214
    Recording &state = recording();
    if (!state.on) {
        return;
    }
    std::shared_ptr<c10::GatheredContext> gathered;
    CreateContextFn recorder = state.recorder.load();
    if (recorder && state.when.load() >= RecordContext::STATE) {
        gathered = recorder();
    }
    TraceEntry entry(TraceEntry::ANNOTATE, device, reinterpret_cast<size_t>(block), bytes,
                     nullptr, MempoolId_t{0, 0}, 0, std::move(gathered), "N/A", metadata);
    entry.time_.t_ = c10::getTime() / 1000;
    std::lock_guard<std::mutex> guard(state.mutex);
    if (!std::count(state.skipped.begin(), state.skipped.end(), TraceEntry::ANNOTATE)) {
        state.said_of_blocks.push_back(std::move(entry));
        state.trim();
    }
#else
    (void)device;
    (void)block;
    (void)bytes;
    (void)metadata;
#endif
}

// Inserts the annotations of blocks into the traces, sorted by time.
void add_annotations(SnapshotInfo &info) {
    std::deque<TraceEntry> said;
    {
        std::lock_guard<std::mutex> guard(recording().mutex);
        said = recording().said_of_blocks;
    }
    for (const TraceEntry &entry : said) {
        const auto device = static_cast<size_t>(entry.device_);
        if (device < info.device_traces.size()) {
            std::vector<TraceEntry> &trace = info.device_traces[device];
            const auto later = [](const TraceEntry &one, const TraceEntry &other) {
                return one.time_.t_ < other.time_.t_;
            };
            trace.insert(std::upper_bound(trace.begin(), trace.end(), entry, later), entry);
        }
    }
}

std::shared_ptr<c10::GatheredContext> origin_of(const void *pointer, int devices) {
    const auto address = reinterpret_cast<uint64_t>(pointer);
    for (int device = 0; device < devices; ++device) {
        const Snapshot taken(static_cast<DeviceIndex>(device));
        for (const GruyereSegment &segment : taken.segments()) {
            if (address - segment.address >= segment.bytes) {
                continue;
            }
            for (const GruyereBlock &block : taken.blocks(segment)) {
                if (block.state == kAllocated && address - block.address < block.bytes) {
                    SnapshotInfo none;
                    Origins origins;
                    collect(none, origins, false);
                    const auto origin = origins.find(block.address);
                    return origin == origins.end() ? nullptr : origin->second;
                }
            }
        }
    }
    return nullptr;
}

// Fills in what each private pool holds now. Earlier values are not kept, so the peak is the same.
void note_pools(c10::CachingDeviceAllocator::DeviceStats &to, DeviceIndex device) {
#if GRUYERE_TORCH >= 213
    const Snapshot taken(device);
    for (const GruyereSegment &segment : taken.segments()) {
        const MempoolId_t pool{segment.pool_first, segment.pool_second};
        if (pool == MempoolId_t{0, 0}) {
            continue;
        }
        c10::CachingAllocator::StatArray &held = to.reserved_bytes_by_private_pools[pool];
        const size_t kind = static_cast<size_t>(
            segment.small ? c10::CachingAllocator::StatType::SMALL_POOL
                          : c10::CachingAllocator::StatType::LARGE_POOL);
        for (const size_t at : {size_t{0}, kind}) {
            held[at].current += static_cast<int64_t>(segment.bytes);
            held[at].allocated = held[at].peak = held[at].current;
        }
    }
#else
    (void)to;
    (void)device;
#endif
}

void add_segments(std::vector<SegmentInfo> &segments, DeviceIndex device, MempoolId_t only,
                  const Origins &origins) {
    const Snapshot taken(device);
    for (const GruyereSegment &from : taken.segments()) {
        MempoolId_t pool{from.pool_first, from.pool_second};
        const int number = table->segment_number(device, from.address);
        // Of a capture whose graph is gone: nobody will tell trackers of its end, so they must not
        // take it for a pool's.
        if (number < 0 && table->pool_uses(device, ours(pool)) == 0) {
            pool = {0, 0};
        }
        if (only != MempoolId_t{0, 0} && pool != only) {
            continue;
        }
        SegmentInfo to;
        to.device = device;
        to.address = from.address;
        to.total_size = from.bytes;
        to.is_large = !from.small;
        to.is_expandable = from.stitched != 0;
        to.owner_private_pool_id = pool;
        to.registration_counter = number;
        // Gruyère's memory belongs to no stream. A span whose blocks all belong to one stream is
        // reported with that stream; pages are reported without a stream, as in the history.
        bool is_of_one = !from.stitched;
        void *stream = nullptr;
        for (const GruyereBlock &block : taken.blocks(from)) {
            // Adjacent free blocks are merged, whichever streams they are kept for.
            if (block.state == 0 && !to.blocks.empty() && !to.blocks.back().active) {
                to.blocks.back().size += block.bytes;
                continue;
            }
            c10::CachingDeviceAllocator::BlockInfo info;
            info.size = block.bytes;
            info.requested_size = block.requested;
            info.allocated = block.state == kAllocated;
            info.active = block.state != 0;
            if (info.active) {
                to.active_size += block.bytes;
                to.requested_size += block.requested;
                to.allocated_size += info.allocated ? block.bytes : 0;
                auto *of = reinterpret_cast<void *>(block.stream);
                is_of_one = is_of_one && (to.active_size == block.bytes || of == stream);
                stream = of;
                const auto origin = origins.find(block.address);
                if (origin != origins.end()) {
                    info.context_when_allocated = origin->second;
                }
            }
            to.blocks.push_back(std::move(info));
        }
        to.stream = is_of_one ? stream : nullptr;
        segments.push_back(std::move(to));
    }
}

void add_settings(AllocatorConfigInfo &to) {
    note_host_settings(to);
    using General = c10::CachingAllocator::AcceleratorAllocatorConfig;
    to.garbage_collection_threshold = General::garbage_collection_threshold();
    to.max_split_size = General::max_split_size();
    to.pinned_num_register_threads = CUDAAllocatorConfig::pinned_num_register_threads();
    to.expandable_segments = General::use_expandable_segments();
    to.release_lock_on_malloc = CUDAAllocatorConfig::release_lock_on_cudamalloc();
    to.pinned_use_host_register = CUDAAllocatorConfig::pinned_use_cuda_host_register();
    to.graph_capture_record_stream_reuse = CUDAAllocatorConfig::graph_capture_record_stream_reuse();
    to.last_allocator_settings = General::last_allocator_settings();
    to.roundup_power2_divisions = General::roundup_power2_divisions();
}

} // namespace
} // namespace gruyere
