// What torch's C++ code asks of its allocator and Python cannot: called by test_native_door_cpp.py,
// built against the same headers as the shim.

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/headeronly/version.h>

#include <map>
#include <mutex>
#include <stdexcept>
#include <utility>
#include <vector>

namespace {

using namespace c10::cuda::CUDACachingAllocator;

std::string said;
size_t callbacks = 0;
c10::DataPtr kept;

// What a callback asks for itself, in vain.
size_t in_vain = 0;

template <class Body> int tried(Body body);

struct GivesMemory : c10::FreeMemoryCallback {
    bool Execute() override {
        if (const size_t bytes = std::exchange(in_vain, 0)) {
            tried([&] { get()->allocate(bytes); });
            return false;
        }
        ++callbacks;
        const bool had = kept.get() != nullptr;
        kept.clear();
        return had;
    }
};

// 0; else the error's text is in `said`: 1 for torch's out of memory, 2 for its other errors, 3 for
// anybody's.
template <class Body> int tried(Body body) {
    try {
        body();
        return 0;
    } catch (const c10::OutOfMemoryError &error) {
        said = error.what_without_backtrace();
        return 1;
    } catch (const c10::Error &error) {
        said = error.what_without_backtrace();
        return 2;
    } catch (const std::exception &error) {
        said = error.what();
        return 3;
    }
}

// Another allocator, in the terms of torch.cuda.memory.CUDAPluggableAllocator.
struct Other {
    std::mutex mutex;
    // Addresses, and what the driver gave for them.
    std::map<void *, std::pair<void *, size_t>> held;
    size_t gave = 0, took = 0, wrong = 0;
    // 0: it gives; 1: NULL; 2: it throws.
    int mood = 0;
    // How far into its memory it hands it out.
    size_t skew = 0;
} other;

struct Told {
    int is_freed;
    uint64_t address, bytes, pool;
    // Whether the other allocator had it then.
    int is_held;
};
std::vector<Told> told;

} // namespace

namespace c10 {
REGISTER_FREE_MEMORY_CALLBACK("gruyere_probe", GivesMemory)
} // namespace c10

extern "C" {

const char *probe_said() {
    return said.c_str();
}

// A data pointer's traps. 0: as torch expects.
int probe_data_pointer() {
    auto *allocator = get();
    auto *base = static_cast<c10::Allocator *>(allocator);
    if (c10::GetAllocator(c10::kCUDA) != base || c10::getDeviceAllocator(c10::kCUDA) != allocator) {
        return 1;
    }
    c10::DataPtr block = base->allocate(1000);
    if (block.get() != block.get_context() || !block.get() ||
        block.get_deleter() != base->raw_deleter()) {
        return 2;
    }
    if (!base->is_simple_data_ptr(block) || block.device() != c10::Device(c10::kCUDA, 0)) {
        return 3;
    }
    if (!block.compare_exchange_deleter(base->raw_deleter(), base->raw_deleter())) {
        return 4;
    }
    c10::DataPtr nothing = base->allocate(0);
    if (nothing.get() || nothing.get_context() || nothing.get_deleter() != base->raw_deleter()) {
        return 5;
    }
    base->raw_deleter()(nullptr);
    base->raw_deallocate(base->raw_allocate(1000));
    size_t bytes = 0;
    void *start = allocator->getBaseAllocation(static_cast<char *>(block.get()), &bytes);
    if (start > block.get() ||
        static_cast<char *>(start) + bytes < static_cast<char *>(block.get()) + 1000) {
        return 6;
    }
    int on_the_host = 0;
    if (tried([&] { allocator->getBaseAllocation(&on_the_host, nullptr); }) != 2 ||
        said.find("invalid device pointer") == std::string::npos) {
        return 7;
    }
    // Neither is its own: skipped.
    allocator->recordStream(c10::DataPtr(), c10::cuda::getCurrentCUDAStream());
    allocator->recordStream(c10::DataPtr(&on_the_host, c10::Device(c10::kCUDA, 0)),
                            c10::cuda::getCurrentCUDAStream());
    return 0;
}

size_t probe_largest(size_t begin) {
    cacheInfo(0, &begin);
    return begin;
}

int probe_copies(int other_device) {
    auto *allocator = get();
    c10::DataPtr from = allocator->allocate(4096), to = allocator->allocate(4096);
    allocator->copy_data(to.get(), from.get(), 4096);
    auto stream = c10::cuda::getCurrentCUDAStream().stream();
    if (allocator->memcpyAsync(to.get(), 0, from.get(), 0, 4096, stream, false) != cudaSuccess) {
        return 1;
    }
    if (other_device > 0) {
        allocator->enablePeerAccess(0, static_cast<c10::DeviceIndex>(other_device));
        allocator->enablePeerAccess(0, static_cast<c10::DeviceIndex>(other_device));
        if (cudaGetLastError() != cudaSuccess) {
            return 2;
        }
    }
    return 0;
}

// A filter that throws: torch's exception comes out of the request as it is, and the pool can be
// ended.
int probe_throwing_filter() {
    auto *allocator = get();
    const c10::MempoolId_t id{0, 77};
    bool is_begun = false;
    allocator->beginAllocateToPool(0, id, [&is_begun](cudaStream_t) -> bool {
        if (is_begun) {
            throw std::out_of_range("a filter's own error");
        }
        return true;
    });
    is_begun = true;
    const int code = tried([&] { allocator->allocate(1000); });
    allocator->endAllocateToPool(0, id);
    allocator->releasePool(0, id);
    return code;
}

// Who registered a callback is asked before an out-of-memory; gives the number of calls.
size_t probe_callbacks(size_t held, size_t asked, int *code) {
    callbacks = 0;
    kept = get()->allocate(held);
    *code = tried([&] { get()->allocate(asked); });
    return callbacks;
}

// A callback's own failure, which it catches, is not taken for the request's.
int probe_vain_callback(size_t of_callback, size_t asked) {
    in_vain = of_callback;
    return tried([&] { get()->allocate(asked); });
}

int probe_checkpoint() {
    return tried([] { get()->getCheckpointState(0, {0, 1}); });
}

int probe_restore() {
    return tried([] { get()->setCheckpointPoolState(0, nullptr); });
}

void *probe_other_give(ssize_t size, int, cudaStream_t) {
    std::lock_guard<std::mutex> guard(other.mutex);
    if (other.mood == 2) {
        throw std::runtime_error("the other allocator's own error");
    }
    void *origin = nullptr;
    if (other.mood == 1 || cudaMalloc(&origin, size + other.skew) != cudaSuccess) {
        (void)cudaGetLastError();
        return nullptr;
    }
    void *block = static_cast<char *>(origin) + other.skew;
    other.held[block] = {origin, size};
    ++other.gave;
    return block;
}

void probe_other_take(void *block, ssize_t, int, cudaStream_t) {
    std::lock_guard<std::mutex> guard(other.mutex);
    const auto found = other.held.find(block);
    if (found == other.held.end()) {
        ++other.wrong;
        return;
    }
    cudaFree(found->second.first);
    other.held.erase(found);
    ++other.took;
}

void probe_other_set(int mood, size_t skew) {
    other.mood = mood;
    other.skew = skew;
}

size_t probe_other_count(int what) {
    return what == 0 ? other.gave : what == 1 ? other.took : other.wrong;
}

// Bytes of the segment at an address; 0: none of the other allocator's starts there.
size_t probe_other_bytes(void *block) {
    const auto found = other.held.find(block);
    return found == other.held.end() ? 0 : found->second.second;
}

int probe_tracker() {
    return tried([] {
        attachAllocatorTraceTracker([](const TraceEntry &entry) {
            const bool is_freed = entry.action_ == TraceEntry::SEGMENT_FREE;
            if (!is_freed && entry.action_ != TraceEntry::SEGMENT_ALLOC) {
                return;
            }
            // Asks the allocator itself: no lock of its is held.
            get()->getDeviceStats(entry.device_);
            auto *block = reinterpret_cast<void *>(entry.addr_);
            std::lock_guard<std::mutex> guard(other.mutex);
            told.push_back({is_freed, entry.addr_, entry.size_, entry.mempool_.second,
                            other.held.count(block) != 0});
        });
    });
}

size_t probe_told(size_t at, uint64_t *fields) {
    if (at < told.size()) {
        const Told &one = told[at];
        fields[0] = one.is_freed;
        fields[1] = one.address;
        fields[2] = one.bytes;
        fields[3] = one.pool;
        fields[4] = one.is_held;
    }
    return told.size();
}

// The registration counter of the segment at an address; -2: there is none.
int probe_registered(uint64_t pool, uint64_t address) {
    for (const SegmentInfo &segment : get()->snapshot({0, pool}, false).segments) {
        if (segment.address == address) {
            return segment.registration_counter;
        }
    }
    return -2;
}

// Initialisation again: with fewer devices, with as many, in a forked child too.
int probe_init() {
    return tried([] {
        get()->init(0);
        get()->init(1);
    }) + (get()->initialized() ? 0 : 10);
}

int probe_ipc() {
    return tried([] { get()->getIpcDevPtr("handle"); });
}

#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 12
uint64_t rejected[5];

// Two observers of rejected requests, the first of which throws.
void probe_observe_rejections() {
    get()->attachOomRejectionObserver(
        [](int64_t, size_t, size_t, size_t) { throw std::runtime_error("an observer's own"); });
    get()->attachOomRejectionObserver(
        [](int64_t device, size_t size, size_t allocated, size_t total) {
            rejected[0] += 1;
            rejected[1] = static_cast<uint64_t>(device);
            rejected[2] = size;
            rejected[3] = allocated;
            rejected[4] = total;
        });
}

// What the second one has heard: how often, and of the latest the device, the request, what was
// allocated, the device's memory.
uint64_t probe_rejected(int what) {
    return rejected[what];
}

// Whether the allocator knows where the block came from that the pointer is in.
int probe_has_context(const void *pointer) {
    return get()->getContextForPointer(pointer) != nullptr;
}
#endif
}
