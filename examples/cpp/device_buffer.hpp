// Device memory for C++: memory resources in the manner of std::pmr, and a buffer in stream order
// that frees itself.
#pragma once

#include "gruyere.h"

#include <cstddef>
#include <cstdint>
#include <new>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

#include <cuda_runtime.h>

namespace device {

// As std::bad_alloc; the library's log has the cause in bytes.
struct out_of_memory : std::bad_alloc {
    const char *what() const noexcept override { return "out of device memory"; }
};

// Where device memory comes from. As std::pmr::memory_resource, but in the order of a stream: what
// allocate() gives may be used by work that is put on `stream` from then on, and after deallocate()
// it may serve others that come later on its stream.
class memory_resource {
  public:
    virtual ~memory_resource() = default;
    void *allocate(std::size_t bytes, cudaStream_t stream) {
        return bytes == 0 ? nullptr : do_allocate(bytes, stream);
    }
    void deallocate(void *block, std::size_t bytes, cudaStream_t stream) noexcept {
        do_deallocate(block, bytes, stream);
    }
    bool is_equal(const memory_resource &other) const noexcept {
        return this == &other || do_is_equal(other);
    }

  private:
    virtual void *do_allocate(std::size_t bytes, cudaStream_t stream) = 0;
    virtual void do_deallocate(void *block, std::size_t bytes, cudaStream_t stream) noexcept = 0;
    // Whether what one gave may be given back to the other.
    virtual bool do_is_equal(const memory_resource &other) const noexcept = 0;
};

enum class lifetime : std::uint8_t { automatic = 0, transient = 1, step = 2, persistent = 3 };

// Gruyère's memory of one device, of one lifetime: blocks of unlike lifetimes do not share pages.
class gruyere_resource : public memory_resource {
  public:
    explicit gruyere_resource(int device, lifetime tag = lifetime::automatic)
        : device_(device), tag_(tag) {}

  protected:
    void *do_allocate(std::size_t bytes, cudaStream_t stream) override {
        gruyere_lifetime_push(static_cast<std::uint8_t>(tag_));
        void *block = gruyere_malloc(static_cast<std::ptrdiff_t>(bytes), device_, stream);
        gruyere_lifetime_pop();
        if (block == nullptr) {
            throw out_of_memory();
        }
        return block;
    }
    void do_deallocate(void *block, std::size_t bytes, cudaStream_t stream) noexcept override {
        gruyere_free(block, static_cast<std::ptrdiff_t>(bytes), device_, stream);
    }
    // A free finds its block by the address: any of ours will do.
    bool do_is_equal(const memory_resource &other) const noexcept override {
        return dynamic_cast<const gruyere_resource *>(&other) != nullptr;
    }
    int device() const noexcept { return device_; }

  private:
    int device_;
    lifetime tag_;
};

// A named pool: all of its memory goes back to the device at once. It must outlive its blocks.
class pool_resource final : public gruyere_resource {
  public:
    pool_resource(const std::string &name, int device, std::uint64_t reserve = 0,
                  std::uint64_t limit = 0)
        : gruyere_resource(device) {
        check(gruyere_pool_create(name.c_str(), device, reserve, limit, &pool_));
    }
    pool_resource(const pool_resource &) = delete;
    pool_resource &operator=(const pool_resource &) = delete;
    ~pool_resource() override { gruyere_pool_destroy(pool_, nullptr); }

    // The bytes that go back. Throws where blocks are live in it.
    std::uint64_t release() {
        std::uint64_t given = 0;
        check(gruyere_pool_release(pool_, &given));
        return given;
    }

  private:
    void *do_allocate(std::size_t bytes, cudaStream_t stream) override {
        check(gruyere_pool_enter(pool_));
        struct leave {
            std::uint64_t pool;
            ~leave() { gruyere_pool_leave(pool); }
        } at_the_end{pool_};
        return gruyere_resource::do_allocate(bytes, stream);
    }
    static void check(int code) {
        if (code != GRUYERE_OK) {
            char why[256] = "";
            gruyere_last_error(why, sizeof why);
            throw std::runtime_error(why);
        }
    }

    std::uint64_t pool_ = 0;
};

// Elements on the device, owned by one. They live in the order of `stream`: the destructor does not
// wait for the work that uses them.
template <class T> class buffer {
    static_assert(std::is_trivially_copyable<T>::value, "nothing is constructed on the device");

  public:
    buffer() = default;
    buffer(std::size_t count, cudaStream_t stream, memory_resource &resource)
        : count_(count), stream_(stream), resource_(&resource) {
        if (count > static_cast<std::size_t>(PTRDIFF_MAX) / sizeof(T)) {
            throw std::bad_array_new_length();
        }
        data_ = static_cast<T *>(resource.allocate(count * sizeof(T), stream));
    }
    buffer(buffer &&other) noexcept { swap(other); }
    buffer &operator=(buffer &&other) noexcept {
        buffer(std::move(other)).swap(*this);
        return *this;
    }
    ~buffer() {
        if (data_ != nullptr) {
            resource_->deallocate(data_, count_ * sizeof(T), stream_);
        }
    }

    // Work on `stream` uses it too: its memory serves nobody else until that is done. Say so after
    // the work has been put there.
    void used_on(cudaStream_t stream) const { gruyere_record_stream(data_, stream); }

    T *data() const noexcept { return data_; }
    std::size_t size() const noexcept { return count_; }
    std::size_t bytes() const noexcept { return count_ * sizeof(T); }
    cudaStream_t stream() const noexcept { return stream_; }
    void swap(buffer &other) noexcept {
        std::swap(data_, other.data_);
        std::swap(count_, other.count_);
        std::swap(stream_, other.stream_);
        std::swap(resource_, other.resource_);
    }

  private:
    T *data_ = nullptr;
    std::size_t count_ = 0;
    cudaStream_t stream_ = nullptr;
    memory_resource *resource_ = nullptr;
};

} // namespace device
