// The autograd node that a request comes from.

#pragma once

#include <dlfcn.h>

#include <cstdio>
#include <string>
#include <type_traits>
#include <typeinfo>
#include <utility>

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <c10/util/Type.h>
#include <torch/csrc/autograd/function.h>

#include "calls.h"

namespace gruyere {
namespace {

// Functions of torch, looked up in the loaded library: the shim is linked only to its allocator.
struct Autograd {
    decltype(&torch::autograd::get_current_node) node = nullptr;
    decltype(&at::sequence_number::peek) next = nullptr;
    decltype(&at::RecordFunction::currentThreadId) thread = nullptr;
    // A method, called as a function that takes the object.
    decltype(std::declval<const torch::autograd::InputMetadata &>().shape_as_dim_vector()) (*shape)(
        const torch::autograd::InputMetadata *) = nullptr;

    Autograd() {
        void *library = dlopen("libtorch_cpu.so", RTLD_NOLOAD | RTLD_LAZY);
        const auto find = [library](auto &function, const char *name) {
            function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(
                library ? dlsym(library, name) : nullptr);
        };
        find(node, "_ZN5torch8autograd16get_current_nodeEv");
        find(next, "_ZN2at15sequence_number4peekEv");
        find(thread, "_ZN2at14RecordFunction15currentThreadIdEv");
        find(shape, "_ZNK5torch8autograd13InputMetadata19shape_as_dim_vectorEv");
    }

    bool is_whole() const {
        return node && next && thread && shape;
    }
};

const Autograd &autograd() {
    static const Autograd found;
    return found;
}

// The size in bytes of the tensor that the node's operator returned in the forward (of the first
// one, if it returned several); 0 if that is not known.
uint64_t given_bytes(const torch::autograd::Node &node) {
    if (node.num_inputs() == 0 || node.input_metadata(0).is_nested_tensor()) {
        return 0;
    }
    const torch::autograd::InputMetadata &given = node.input_metadata(0);
    uint64_t bytes = given.dtype().itemsize();
    for (const c10::SymInt &size : autograd().shape(&given)) {
        bytes *= static_cast<uint64_t>(size.maybe_as_int().value_or(0));
    }
    return bytes;
}

// Called by the library in the middle of a request. It must not wait: name() of a node implemented
// in Python would take the GIL.
void ask_origin(GruyereAutograd *origin, int32_t is_name_wanted) {
    try {
        origin->thread = autograd().thread();
        origin->next = c10::GradMode::is_enabled() ? autograd().next() : 0;
        const auto node = autograd().node();
        if (!node) {
            return;
        }
        const torch::autograd::Node &running = *node;
        const char *kind = typeid(running).name();
        origin->kind = reinterpret_cast<uintptr_t>(kind);
        origin->node_thread = running.thread_id();
        origin->node = running.sequence_nr();
        origin->node_bytes = given_bytes(running);
        if (is_name_wanted) {
            const std::string name = c10::demangle(kind);
            const size_t last = name.rfind(':');
            const size_t from = last == std::string::npos ? 0 : last + 1;
            std::snprintf(origin->name, sizeof(origin->name), "%s", name.c_str() + from);
        }
    } catch (...) {
        // The request goes on, and its block gets no site.
        origin->kind = origin->next = 0;
    }
}

} // namespace
} // namespace gruyere
