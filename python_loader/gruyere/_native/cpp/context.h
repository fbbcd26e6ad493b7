// The contexts of requests and frees, while the history is on.

#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "calls.h"

namespace gruyere {
namespace {

// The context of a request or a free, from torch's recorder.
struct Context {
    std::shared_ptr<c10::GatheredContext> gathered;
    std::string compile;
    std::string metadata;
};

void drop_context(void *context) {
    delete static_cast<Context *>(context);
}

// The state of torch's recording. Kept until the process ends: programs free memory until the very
// end.
struct Recording {
    std::atomic<bool> on{false};
    std::atomic<CreateContextFn> recorder{nullptr};
    std::atomic<RecordContext> when{RecordContext::NEVER};
    std::mutex mutex;
    std::vector<TraceEntry::Action> skipped;
    // The latest `most` annotations: a training loop annotates each of its steps.
    std::deque<AnnotationEntry> annotations;
    // The latest `most` annotations of live blocks.
    std::deque<TraceEntry> said_of_blocks;
    size_t most = 1;

    // Call with the mutex held.
    void trim() {
        while (annotations.size() > most) {
            annotations.pop_front();
        }
        while (said_of_blocks.size() > most) {
            said_of_blocks.pop_front();
        }
    }
};

Recording &recording() {
    static Recording &kept = *new Recording;
    return kept;
}

// The calling thread's compile contexts and metadata. Frees may come after they are destroyed: from
// other thread-local destructors, and after those of the main thread.
thread_local bool is_ended = false;

struct Said {
    std::vector<std::string> compile;
    std::string metadata;
    ~Said() {
        is_ended = true;
    }
};

thread_local Said said;

// While the history is on, passes the context of the thread's current action to the library. The
// context is gathered before the library takes any lock.
class Noted {
public:
    explicit Noted(RecordContext level) : on_(recording().on.load(std::memory_order_relaxed)) {
        if (C10_UNLIKELY(on_)) {
            before_ = enter(level);
        }
    }
    ~Noted() {
        if (C10_UNLIKELY(on_)) {
            table->context_leave(before_);
        }
    }
    Noted(const Noted &) = delete;
    Noted &operator=(const Noted &) = delete;

private:
    static uint64_t enter(RecordContext level) {
        auto context = std::make_unique<Context>();
        CreateContextFn recorder = recording().recorder.load();
        if (recorder && recording().when.load() >= level) {
            context->gathered = recorder();
        }
        context->compile = "N/A";
        if (!is_ended) {
            if (!said.compile.empty()) {
                context->compile = said.compile.back();
            }
            context->metadata = said.metadata;
        }
        return table->context_enter({context.release(), drop_context});
    }

    bool on_;
    // Contexts nest: a free in the middle of a request has a context of its own.
    uint64_t before_ = 0;
};

} // namespace
} // namespace gruyere
