// `torch.empty` and the free of what it gives, as torch's C++ code does them: counted by
// `instructions`.

#include <ATen/ops/empty.h>
#include <c10/cuda/CUDACachingAllocator.h>

#include <valgrind/callgrind.h>

namespace {

void empties(int64_t bytes, int64_t count) {
    const auto options = at::TensorOptions().dtype(at::kByte).device(at::kCUDA);
    for (int64_t i = 0; i < count; ++i) {
        const at::Tensor tensor = at::empty({bytes}, options);
    }
}

} // namespace

// Counts `few` and `many` of them in turn, from a steady state: a dump of callgrind's each.
extern "C" void probe_empties(int64_t bytes, int64_t few, int64_t many) {
    empties(bytes, many);
    CALLGRIND_START_INSTRUMENTATION;
    empties(bytes, few);
    CALLGRIND_ZERO_STATS;
    empties(bytes, few);
    CALLGRIND_DUMP_STATS_AT("few");
    CALLGRIND_ZERO_STATS;
    empties(bytes, many);
    CALLGRIND_DUMP_STATS_AT("many");
    CALLGRIND_STOP_INSTRUMENTATION;
}
