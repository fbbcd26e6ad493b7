// Where requests and frees come from, while the history is on.

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

// Where a request or a free came from, as torch's recorder saw it.
struct Context {
    std::shared_ptr<c10::GatheredContext> gathered;
    std::string compile;
    std::string metadata;
};

void drop_context(void *context) {
    delete static_cast<Context *>(context);
}

// torch's own, kept as long as the process: programs free memory after everything else is gone.
struct Recording {
    std::atomic<bool> on{false};
    std::atomic<CreateContextFn> recorder{nullptr};
    std::atomic<RecordContext> when{RecordContext::NEVER};
    std::mutex mutex;
    std::vector<TraceEntry::Action> skipped;
    // The latest `most`: a training loop annotates each of its steps.
    std::deque<AnnotationEntry> annotations;
    // What was said of live blocks, as many.
    std::deque<TraceEntry> said_of_blocks;
    size_t most = 1;

    // With the mutex held.
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

// What the calling thread says of itself. Frees come after it is gone: from destructors of the
// thread's own, and after those of the main thread.
thread_local bool is_ended = false;

struct Said {
    std::vector<std::string> compile;
    std::string metadata;
    ~Said() {
        is_ended = true;
    }
};

thread_local Said said;

// While the history is on, tells the library where what the thread does comes from. Gathered before
// any lock of the library's is taken.
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
    // Calls nest: what frees memory in the middle of a request is a free of its own.
    uint64_t before_ = 0;
};

} // namespace
} // namespace gruyere
