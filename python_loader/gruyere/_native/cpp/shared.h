// What a process needs around tensors that it shares with others.

#pragma once

#include <cstdlib>
#include <dlfcn.h>

#include <c10/cuda/CUDADeviceAssertionHost.h>

namespace gruyere {
namespace {

// Releases Python's lock, if this thread has it, while the library waits for another process.
class WithoutPython {
public:
    WithoutPython() {
        auto *check = find<int (*)()>("PyGILState_Check");
        auto *save = find<void *(*)()>("PyEval_SaveThread");
        restore_ = find<void (*)(void *)>("PyEval_RestoreThread");
        if (check && save && restore_ && check()) {
            thread_ = save();
        }
    }
    ~WithoutPython() {
        if (thread_) {
            restore_(thread_);
        }
    }
    WithoutPython(const WithoutPython &) = delete;
    WithoutPython &operator=(const WithoutPython &) = delete;

private:
    // The shim is not linked to Python.
    template <typename Function> static Function find(const char *name) {
        return reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name));
    }

    void (*restore_)(void *) = nullptr;
    void *thread_ = nullptr;
};

using Launches = c10::cuda::CUDAKernelLaunchRegistry;

void empty_assertions(Launches &launches);

template <typename List> void empty_if_unused(List &list) {
    for (const auto &entry : list) {
        if (entry) {
            return;
        }
    }
    list.clear();
}

// Access is not checked where a template is instantiated explicitly.
template <auto assertions> struct Private {
    friend void empty_assertions(Launches &launches) {
        empty_if_unused(launches.*assertions);
    }
};
template struct Private<&Launches::uvm_assertions>;

// At the end of a process torch drops the tensors that others still have, and by then has destroyed
// its registry of kernel launches, which each check of a CUDA call reads: the process may end by
// SIGSEGV (seen with torch 2.15, without Gruyère too where glibc scribbles over freed memory). An
// empty list is read as one after its end too. Registered with the first tensor that is shared,
// which is after the registry's own end, so it runs before that.
void end_well() {
    static const int registered =
        std::atexit([] { empty_assertions(Launches::get_singleton_ref()); });
    (void)registered;
}

} // namespace
} // namespace gruyere
