// Requests that are refused as by torch's setting `throw_on_cudamalloc_oom`.

#pragma once

#include <array>
#include <atomic>
#include <mutex>
#include <utility>
#include <vector>

#include "calls.h"
#include "versions.h"

namespace gruyere {
namespace {

// Under Gruyère a request above the limit is always refused without calling the driver. If the
// setting is on, such a request also counts as rejected, and the observers are notified.
class Rejections {
public:
    void attach(OomRejectionObserver observer) {
        std::lock_guard<std::mutex> guard(mutex_);
        observers_.push_back(std::move(observer));
    }

    void tell(DeviceIndex device, size_t size, size_t allocated, size_t total) {
        std::vector<OomRejectionObserver> observers;
        {
            std::lock_guard<std::mutex> guard(mutex_);
            observers = observers_;
        }
        counts_[slot(device)].fetch_add(1, std::memory_order_relaxed);
        for (const OomRejectionObserver &observer : observers) {
            // As in torch, an exception in an observer must not replace the out-of-memory error.
            try {
                observer(device, size, allocated, total);
            } catch (const std::exception &error) {
                TORCH_WARN("Exception in OOM rejection observer: ", error.what());
            } catch (...) {
                TORCH_WARN("Unknown exception in OOM rejection observer");
            }
        }
    }

    int64_t count(DeviceIndex device) const {
        return counts_[slot(device)].load(std::memory_order_relaxed);
    }

    void forget(DeviceIndex device) {
        counts_[slot(device)].store(0, std::memory_order_relaxed);
    }

private:
    static size_t slot(DeviceIndex device) {
        return static_cast<uint8_t>(device) % 128;
    }

    std::array<std::atomic<int64_t>, 128> counts_{};
    std::mutex mutex_;
    std::vector<OomRejectionObserver> observers_;
};

} // namespace
} // namespace gruyere
