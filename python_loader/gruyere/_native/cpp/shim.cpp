// The native door's C++ side: an implementation of torch's own allocator interface, in which each
// function calls libgruyere through its table (gruyere.h).
//
// Built once on the user's machine against the headers of the installed torch (_native/shim.py),
// and never unloaded. It knows nothing of the heap and keeps only torch's own state (the history's
// recorder, observers, annotations). Errors of the library arrive as NULL or a code and are thrown
// here. Exceptions of torch's functions that the library calls are caught here and rethrown once
// the library has returned.

#include "portable.h"

#include <cstdio>

#include <c10/core/impl/GPUTrace.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/util/env.h>

#include "checkpoint.h"
#include "foreign.h"
#include "install.h"
#include "order.h"
#include "origin.h"
#include "rejected.h"
#include "shared.h"
#include "told.h"
#include "tracked.h"
#include "versions.h"

namespace gruyere {
namespace {

constexpr size_t kExabyte = size_t{1} << 60;

} // namespace

// The only exported class of the shim: its virtual table is looked up by this name.
class Gruyere final : public CUDAAllocator {
public:
    // Memory.

    c10::DataPtr allocate(size_t size) override {
        TORCH_CHECK_WITH(OutOfMemoryError, size < kExabyte,
                         "CUDA out of memory. Tried to allocate more than 1EB memory.");
        const DeviceIndex device = c10::cuda::current_device();
        void *block = nullptr;
        // Read once: another thread may change it, and the deleter must match the allocation.
        const bool is_plain = is_uncached();
        if (C10_UNLIKELY(is_plain)) {
            block = allocate_uncached(size);
        } else if (size != 0) {
            block = serve(size, device);
        }
        return {block, block, deleter(is_plain), c10::Device(c10::kCUDA, device)};
    }

    c10::DeleterFnPtr raw_deleter() const override {
        return deleter(is_uncached());
    }

    void *raw_alloc(size_t size) override {
        if (C10_UNLIKELY(is_uncached())) {
            return size == 0 ? nullptr : allocate_uncached(size);
        }
        return size == 0 ? nullptr : serve(size, c10::cuda::current_device());
    }

    void *raw_alloc_with_stream(size_t size, cudaStream_t stream) override {
        if (C10_UNLIKELY(is_uncached())) {
            return size == 0 ? nullptr : allocate_uncached(size);
        }
        return size == 0 ? nullptr : serve(size, c10::cuda::current_device(), stream);
    }

    // UntypedStorage._resize_with_addr_: allocates exactly at `address`, from free memory of the
    // current stream and pool.
    c10::DataPtr allocateWithAddress(size_t size, void *address) GRUYERE_SINCE_213 {
        const DeviceIndex device = c10::cuda::current_device();
        TORCH_CHECK(size != 0 && !is_uncached(),
                    "there is no memory at ", address, " that a block could be given back from");
        const CUDAStream stream = c10::cuda::getCurrentCUDAStream(device);
        tell(stream);
        void *block = nullptr;
        {
            const Noted noted(RecordContext::STATE);
            block = table->malloc_at(size, device, stream.stream(),
                                     reinterpret_cast<uint64_t>(address));
        }
        if (!block) {
            refuse();
        }
        made(block, device);
        return {block, block, &delete_block, c10::Device(c10::kCUDA, device)};
    }

    // torch goes by the current setting. Here a block is returned to where it came from, even if
    // caching was turned off or on since.
    void raw_delete(void *block) override {
        DeviceIndex device = 0;
        if (C10_UNLIKELY(has_uncached_) && block && bytes_of(block, device) == 0) {
            delete_uncached(block);
        } else {
            delete_block(block);
        }
    }

    void copy_data(void *to, const void *from, std::size_t size) const override {
        C10_CUDA_CHECK(cudaMemcpy(to, from, size, cudaMemcpyDeviceToDevice));
    }

    void recordStream(const c10::DataPtr &block, CUDAStream stream) override {
        // The tensor has no elements, or comes from another allocator.
        if (!block.get() || block.get_deleter() != &delete_block) {
            return;
        }
        tell(stream);
        table->record_stream(block.get(), stream.stream());
    }

    void *getBaseAllocation(void *block, size_t *size) override {
        size_t bytes = 0;
        void *base = table->base(block, &bytes);
        TORCH_CHECK(bytes != 0, "invalid device pointer: ", block);
        if (size) {
            *size = bytes;
        }
        return base;
    }

    // The allocator as a whole.

    void init(int device_count) override {
        int known = devices_.load();
        while (known < device_count && !devices_.compare_exchange_weak(known, device_count)) {
        }
    }

    bool initialized() override {
        return devices_.load() > 0;
    }

    void enable(bool value) override {
        enabled_ = value;
    }

    bool isEnabled() const override {
        return enabled_.load(std::memory_order_relaxed);
    }

    std::string name() override {
        return "gruyere";
    }

    void emptyCache(MempoolId_t id) override {
        const Noted noted(RecordContext::ALL);
        table->empty_cache(ours(id));
    }

    double getMemoryFraction(DeviceIndex device) override {
        const GruyereTorchStats stats = numbers(device);
        return static_cast<double>(stats.limit) / static_cast<double>(stats.total_memory);
    }

    void setMemoryFraction(double fraction, DeviceIndex device) override {
        TORCH_CHECK(0 <= fraction && fraction <= 1, "invalid fraction:", fraction,
                    ". Please set within [0, 1].");
        numbers(device);
        table->set_fraction(fraction, device);
    }

    void cacheInfo(DeviceIndex device, size_t *largest) override {
        GruyereStats stats{};
        stats.size = sizeof(stats);
        check_device(table->stats(device, &stats), device);
        if (*largest == 0) {
            *largest = std::min<size_t>(stats.largest_request_growing,
                                        stats.largest_request + getMemoryInfo(device).first);
        }
        *largest = std::max<size_t>(*largest, stats.largest_request);
    }

    // Statistics.

    c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
        const GruyereTorchStats from = numbers(device);
        c10::CachingDeviceAllocator::DeviceStats to;
        copy(from.allocation, to.allocation);
        copy(from.segment, to.segment);
        copy(from.active, to.active);
        copy(from.inactive_split, to.inactive_split);
        copy(from.allocated_bytes, to.allocated_bytes);
        copy(from.reserved_bytes, to.reserved_bytes);
        copy(from.active_bytes, to.active_bytes);
        copy(from.inactive_split_bytes, to.inactive_split_bytes);
        copy(from.requested_bytes, to.requested_bytes);
        to.num_alloc_retries = from.num_alloc_retries;
        to.num_ooms = from.num_ooms;
        to.num_sync_all_streams = from.num_sync_all_streams;
        to.num_device_alloc = from.num_device_alloc;
        to.num_device_free = from.num_device_free;
        // Blocks of any size may be split: torch reports that as the largest unsigned size, -1 in
        // this type.
        to.max_split_size = -1;
        note_rejections(to, rejections_.count(device));
        // Programs read this at every step: without pools, do not look for them.
        if (has_pools_.load(std::memory_order_relaxed)) {
            note_pools(to, device);
        }
        return to;
    }

    void resetAccumulatedStats(DeviceIndex device) override {
        check_device(table->reset_accumulated(device), device);
        rejections_.forget(device);
    }

    void resetPeakStats(DeviceIndex device) override {
        check_device(table->reset_peaks(device), device);
    }

    std::vector<StreamSegmentSize> getExpandableSegmentSizes(DeviceIndex device) override {
        std::vector<StreamSegmentSize> sizes;
        const Snapshot taken(device);
        for (const GruyereSegment &segment : taken.segments()) {
            if (segment.stitched) {
                sizes.emplace_back(nullptr, segment.small != 0, segment.bytes);
            }
        }
        return sizes;
    }

    SnapshotInfo snapshot(MempoolId_t id, bool include_traces) override {
        SnapshotInfo info;
        const int devices = devices_.load();
        info.device_traces.resize(devices);
        Origins origins;
        collect(info, origins, include_traces);
        if (include_traces) {
            add_annotations(info);
        }
        for (int device = 0; device < devices; ++device) {
            add_segments(info.segments, static_cast<DeviceIndex>(device), id, origins);
        }
        {
            std::lock_guard<std::mutex> guard(recording().mutex);
            const auto &noted = recording().annotations;
            info.external_annotations.assign(noted.begin(), noted.end());
        }
        add_settings(info.config_metadata);
        return info;
    }

    // Pools.

    void beginAllocateToPool(DeviceIndex device, MempoolId_t id, StreamFilter filter) override {
        has_pools_ = true;
        // A capture's filter matches no stream yet; any other matches the caller's current stream.
        const bool is_capture = !filter(c10::cuda::getCurrentCUDAStream(device).stream());
        GruyereBoxed boxed{nullptr, drop_filter};
        if (!is_capture) {
            boxed.object = new StreamFilter(std::move(filter));
        }
        check(table->pool_begin(device, ours(id), boxed, ask_filter));
    }

    // markCaptureBegin and markCaptureEnd, in torch since 2.13, are not overridden: the library
    // asks the driver which streams capture.

    void endAllocateToPool(DeviceIndex device, MempoolId_t id) override {
        const int code = table->pool_end(device, ours(id));
        check(code);
        TORCH_CHECK(code == GRUYERE_OK, "endAllocatePool: not currently recording to mempool_id");
    }

    // Called by destructors, so errors become warnings.
    void releasePool(DeviceIndex device, MempoolId_t id) override {
        // The last of those that share it. 0: a forked child, whose NCCL is its parent's.
        if (table->pool_uses(device, ours(id)) == 1) {
            tell_of_release(device, id);
        }
        // A forked child has no pools of its own, and releases its parent's silently.
        if (counted(table->pool_release(device, ours(id))) == 1) {
            TORCH_WARN_ONCE("Gruyère: releasePool: there is no such pool");
        }
    }

    int getPoolUseCount(DeviceIndex device, MempoolId_t id) override {
        return static_cast<int>(table->pool_uses(device, ours(id)));
    }

    void createOrIncrefPool(DeviceIndex device, MempoolId_t id,
                            std::shared_ptr<CUDAAllocator> allocator) override {
        has_pools_ = true;
        if (!allocator || allocator.get() == this) {
            check(table->pool_create(device, ours(id)));
            return;
        }
        const GruyereBoxed boxed{new Foreign{std::move(allocator)}, drop_foreign};
        check(table->pool_create_over(device, ours(id), boxed, give_foreign, take_foreign));
    }

    void setUseOnOOM(DeviceIndex device, MempoolId_t id, bool wanted) override {
        // As with releasePool: MemPool's destructor calls this with false.
        const int code = counted(table->pool_on_oom(device, ours(id), wanted));
        TORCH_CHECK(code == GRUYERE_OK || !wanted, "setUseOnOOM: there is no such pool");
    }

    void setNoSplit(DeviceIndex device, MempoolId_t id) override {
        const int code = table->pool_no_split(device, ours(id));
        check(code);
        TORCH_CHECK(code == GRUYERE_OK, "setNoSplit: there is no such pool");
    }

    bool checkPoolLiveAllocations(DeviceIndex device, MempoolId_t id,
                                  const std::unordered_set<void *> &expected) override {
        TORCH_CHECK(table->pool_uses(device, ours(id)) > 0, "Could not find pool of id");
        size_t live = 0;
        const Snapshot taken(device);
        for (const GruyereSegment &segment : taken.segments()) {
            if (segment.pool_first != id.first || segment.pool_second != id.second) {
                continue;
            }
            for (const GruyereBlock &block : taken.blocks(segment)) {
                if (block.state == kAllocated) {
                    if (!expected.count(reinterpret_cast<void *>(block.address))) {
                        return false;
                    }
                    ++live;
                }
            }
        }
        return live == expected.size();
    }

    std::shared_ptr<AllocatorState> getCheckpointState(DeviceIndex device,
                                                       MempoolId_t id) override {
        return take_state(device, id);
    }

    CheckpointDelta setCheckpointPoolState(DeviceIndex device,
                                           std::shared_ptr<AllocatorState> state) override {
        const Noted noted(RecordContext::STATE);
        return restore(device, state.get(), &delete_block);
    }

    // History.

    bool isHistoryEnabled() override {
        return recording().on.load();
    }

    void recordHistory(bool enabled, CreateContextFn recorder, size_t entries, RecordContext when,
                       bool clear, const std::vector<std::string> &skipped) override {
        TORCH_CHECK(when == RecordContext::NEVER || recorder,
                    "recordHistory: contexts are asked for, and nothing records them");
        std::vector<TraceEntry::Action> actions;
        for (const std::string &action : skipped) {
            actions.push_back(parseTraceEntryAction(action));
        }
        Recording &state = recording();
        std::lock_guard<std::mutex> guard(history_);
        if (enabled) {
            check_device(table->history_start(entries, clear), 0);
        }
        state.recorder = enabled ? recorder : nullptr;
        state.when = enabled ? when : RecordContext::NEVER;
        state.on = enabled;
        if (!enabled) {
            table->history_stop();
        }
        std::lock_guard<std::mutex> told(state.mutex);
        state.skipped = std::move(actions);
        if (!enabled || clear) {
            state.annotations.clear();
            state.said_of_blocks.clear();
        }
        state.most = std::max<size_t>(entries, 1);
        state.trim();
    }

    void recordAnnotation(const std::vector<std::pair<std::string, std::string>> &pairs) override {
        Recording &state = recording();
        if (!state.on) {
            return;
        }
        AnnotationEntry entry(c10::cuda::current_device(), 0);
        entry.time_.t_ = c10::getTime() / 1000;
        for (const auto &[key, value] : pairs) {
            entry.recordUserMetadata(key, value);
        }
        std::lock_guard<std::mutex> guard(state.mutex);
        state.annotations.push_back(std::move(entry));
        state.trim();
    }

    void pushCompileContext(std::string &context) override {
        said.compile.push_back(context);
    }

    void popCompileContext() override {
        if (!said.compile.empty()) {
            said.compile.pop_back();
        }
    }

    void setUserMetadata(const std::string &metadata) override {
        said.metadata = metadata;
    }

    std::string getUserMetadata() override {
        return said.metadata;
    }

    bool supportsUserMetadata() GRUYERE_SINCE_214 {
        return true;
    }

    void annotateMemory(const void *block, const std::string &metadata) GRUYERE_SINCE_214 {
        DeviceIndex device = 0;
        const size_t bytes = block ? bytes_of(const_cast<void *>(block), device) : 0;
        TORCH_CHECK(bytes != 0, "annotateMemory: no live allocation found at pointer ", block);
        annotate(device, block, bytes, metadata);
    }

    // The context of the live block that contains the pointer.
    std::shared_ptr<c10::GatheredContext>
    getContextForPointer(const void *pointer) GRUYERE_SINCE_212 {
        return recording().on ? origin_of(pointer, devices_.load()) : nullptr;
    }

    void attachOutOfMemoryObserver(OutOfMemoryObserver observer) override {
        std::lock_guard<std::mutex> guard(history_);
        observers_.push_back(std::move(observer));
    }

    void attachOomRejectionObserver(OomRejectionObserver observer) GRUYERE_SINCE_212 {
        rejections_.attach(std::move(observer));
    }

    void attachAllocatorTraceTracker(AllocatorTraceTracker tracker) override {
        attach(std::move(tracker), devices_.load());
    }

    // Other devices, other processes.

    void enablePeerAccess(DeviceIndex device, DeviceIndex peer) override {
        // Gruyère's pages are accessible to all peers from the start; memory from cudaMalloc by
        // others is not.
        c10::cuda::CUDAGuard guard(device);
        const cudaError_t error = cudaDeviceEnablePeerAccess(peer, 0);
        if (error == cudaErrorPeerAccessAlreadyEnabled) {
            (void)cudaGetLastError();
        } else {
            C10_CUDA_CHECK(error);
        }
    }

    cudaError_t memcpyAsync(void *to, int to_device, const void *from, int from_device, size_t size,
                            cudaStream_t stream, bool p2p_enabled) override {
        if (p2p_enabled || to_device == from_device) {
            return cudaMemcpyAsync(to, from, size, cudaMemcpyDeviceToDevice, stream);
        }
        return cudaMemcpyPeerAsync(to, to_device, from, from_device, size, stream);
    }

    // Other processes: the library names the memory of a block, and opens what another one named.

    ShareableHandle shareIpcHandle(void *block) override {
        GruyereShared shared{};
        check(table->share(block, &shared));
        end_well();
        return {static_cast<ptrdiff_t>(shared.offset),
                std::string(reinterpret_cast<const char *>(shared.name), shared.size)};
    }

    std::shared_ptr<void> getIpcDevPtr(std::string handle) override {
        const DeviceIndex device = c10::cuda::current_device();
        void *memory = nullptr;
        {
            const WithoutPython unlocked;
            memory = table->shared_open(reinterpret_cast<const uint8_t *>(handle.data()),
                                        handle.size(), device);
        }
        if (!memory) {
            refuse();
        }
        return {memory, [](void *opened) { table->shared_close(opened); }};
    }

private:
    bool is_uncached() const {
        static const bool forced = c10::utils::has_env("PYTORCH_NO_CUDA_MEMORY_CACHING");
        return forced || !isEnabled();
    }

    static c10::DeleterFnPtr deleter(bool is_plain) {
        return C10_UNLIKELY(is_plain) ? &delete_uncached : &delete_block;
    }

    static void trace_malloc(void *block) {
        const c10::impl::PyInterpreter *python = c10::impl::GPUTrace::get_trace();
        if (C10_UNLIKELY(python)) {
            (*python)->trace_gpu_memory_allocation(c10::kCUDA, reinterpret_cast<uintptr_t>(block));
        }
    }

    static void trace_free(void *block) {
        const c10::impl::PyInterpreter *python = c10::impl::GPUTrace::get_trace();
        if (C10_UNLIKELY(python)) {
            (*python)->trace_gpu_memory_deallocation(c10::kCUDA,
                                                     reinterpret_cast<uintptr_t>(block));
        }
    }

    void *serve(size_t size, DeviceIndex device) {
        const CUDAStream stream = c10::cuda::getCurrentCUDAStream(device);
        tell(stream);
        return serve(size, device, stream.stream());
    }

    void *serve(size_t size, DeviceIndex device, cudaStream_t stream) {
        const Noted noted(RecordContext::STATE);
        void *block = table->malloc(size, device, stream);
        if (C10_UNLIKELY(!block)) {
            block = serve_at_last(size, device, stream);
        }
        made(block, device);
        return block;
    }

    // Reports a new block to torch's profiler and GPU traces.
    static void made(void *block, DeviceIndex device) {
        if (C10_UNLIKELY(c10::memoryProfilingEnabled())) {
            report(block, static_cast<int64_t>(bytes_of(block, device)), device);
        }
        trace_malloc(block);
    }

    // The library has refused the request. Callbacks may free memory; otherwise proceed in torch's
    // own order: the profiler, the observers, the error.
    void *serve_at_last(size_t size, DeviceIndex device, cudaStream_t stream) {
        rethrow();
        if (!table->is_out_of_memory()) {
            refuse();
        }
        bool is_freed = false;
        const uint64_t before = ++failures;
        auto *callbacks = c10::FreeCudaMemoryCallbacksRegistry();
        for (const auto &name : callbacks->Keys()) {
            is_freed |= callbacks->Create(name)->Execute();
        }
        // If a request made by a callback failed, its failure has replaced that of this request,
        // even if it was caught. Only a retry restores it.
        if (is_freed || failures != before) {
            void *block = table->malloc(size, device, stream);
            if (block) {
                return block;
            }
            if (!table->is_out_of_memory()) {
                refuse();
            }
        }
        const GruyereNativeFailure why = failure();
        const std::string text = why.text;
        const Totals now = totals(device);
        if (throws_on_limit() && why.limit < numbers(device).total_memory) {
            rejections_.tell(device, size, now.reserved, numbers(device).total_memory);
        }
        c10::reportOutOfMemoryToProfiler(static_cast<int64_t>(size), now.allocated, now.reserved,
                                         c10::Device(c10::kCUDA, device));
        std::vector<OutOfMemoryObserver> observers;
        {
            std::lock_guard<std::mutex> guard(history_);
            observers = observers_;
        }
        for (const OutOfMemoryObserver &observer : observers) {
            observer(device, size, why.limit, why.free);
        }
        TORCH_CHECK_WITH(OutOfMemoryError, false, text);
    }

    static size_t bytes_of(void *block, DeviceIndex &device) {
        int on = device;
        const size_t bytes = table->block(block, &on);
        device = static_cast<DeviceIndex>(on);
        return bytes;
    }

    static void delete_block(void *block) {
        if (!block) {
            return;
        }
        trace_free(block);
        DeviceIndex device = 0;
        const bool is_watched = c10::memoryProfilingEnabled();
        const size_t bytes = C10_UNLIKELY(is_watched) ? bytes_of(block, device) : 0;
        {
            const Noted noted(RecordContext::ALL);
            table->free(block, 0, 0, nullptr);
        }
        if (C10_UNLIKELY(is_watched)) {
            report(block, -static_cast<int64_t>(bytes), device);
        }
    }

    void *allocate_uncached(size_t size) {
        void *block = nullptr;
        C10_CUDA_CHECK(cudaMalloc(&block, size));
        has_uncached_ = true;
        trace_malloc(block);
        return block;
    }

    static void delete_uncached(void *block) {
        trace_free(block);
        C10_CUDA_CHECK(cudaFree(block));
    }

    std::atomic<int> devices_{0};
    std::atomic<bool> enabled_{true};
    // Whether a block was ever allocated without the library.
    std::atomic<bool> has_uncached_{false};
    std::atomic<bool> has_pools_{false};
    // Guards changes of the history's recording, and the observers.
    std::mutex history_;
    std::vector<OutOfMemoryObserver> observers_;
    Rejections rejections_;
};

namespace {

Gruyere *installed = nullptr;

} // namespace
} // namespace gruyere

extern "C" {

// The key of what the shim was built from. A shim with another key is not used.
const char *gruyere_shim_build() {
    return GRUYERE_SHIM_BUILD;
}

// Makes Gruyère torch's allocator. Returns 0; otherwise nothing has changed, and the reason is in
// `message`, which has `room` bytes.
int gruyere_shim_install(const GruyereNativeTable *(*find)(uint32_t), char *message, size_t room) {
    try {
        gruyere::table = find(GRUYERE_NATIVE_VERSION);
        TORCH_CHECK(gruyere::table && gruyere::table->size >= sizeof(GruyereNativeTable),
                    "libgruyere has no native door of version ", GRUYERE_NATIVE_VERSION);
        TORCH_CHECK(!gruyere::installed, "the native door is installed already");
        auto *before = c10::cuda::CUDACachingAllocator::allocator.load();
        TORCH_CHECK(!before || !before->initialized(), "torch's allocator is in use already");
        TORCH_CHECK(!before || before->name() != "pluggable",
                    "something has put another allocator in place before");
        gruyere::check_order("_ZTVN7gruyere7GruyereE");
        gruyere::keep_expanding();
        // Never destroyed: memory is freed until the very end of the process.
        auto *chosen = new gruyere::Gruyere;
        gruyere::store(chosen);
        gruyere::installed = chosen;
        if (gruyere::autograd().is_whole()) {
            gruyere::table->origins(gruyere::ask_origin);
        }
        return 0;
    } catch (const c10::Error &error) {
        std::snprintf(message, room, "%s", error.what_without_backtrace());
    } catch (const std::exception &error) {
        std::snprintf(message, room, "%s", error.what());
    }
    return -1;
}

// Returns whether Gruyère still is torch's allocator.
int gruyere_shim_is_current() {
    return gruyere::installed &&
           c10::cuda::CUDACachingAllocator::allocator.load() == gruyere::installed;
}
}
