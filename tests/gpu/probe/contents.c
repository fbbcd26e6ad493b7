/* Contents: whose they are, and whether two mappings of one handle always show the same. */
#include "cases.h"
#include "driver.h"
#include "kernels.h"
#include "report.h"

#include <stdlib.h>

/* So little that a stand-in copies it too. */
enum { WORDS = 4096 };

static unsigned differences(CUdeviceptr at, unsigned value) {
    static unsigned words[WORDS];
    unsigned found = 0;
    MUST(cuda.cuMemcpyDtoH_v2(words, at, sizeof words));
    for (int i = 0; i < WORDS; i++) found += words[i] != value;
    return found;
}

static void write_words(CUdeviceptr at, unsigned value) {
    MUST(cuda.cuMemsetD32Async(at, value, WORDS, NULL));
    MUST(cuda.cuCtxSynchronize());
}

void case_contents(int unused) {
    (void)unused;
    CUdeviceptr first = reserve(PAGE), second = reserve(PAGE);
    CUmemGenericAllocationHandle handle = create(PAGE);
    map(first, PAGE, handle);
    write_words(first, 0x600d600d);
    MUST(cuda.cuMemUnmap(first, PAGE));
    map(first, PAGE, handle);
    unsigned wrong = differences(first, 0x600d600d);
    rule("contents.stay_when_mapped_again", is(!wrong), "%u of %d words differ", wrong, WORDS);
    MUST(cuda.cuMemUnmap(first, PAGE));
    map(second, PAGE, handle);
    wrong = differences(second, 0x600d600d);
    rule("contents.go_along_to_another_address", is(!wrong), "%u of %d words differ", wrong, WORDS);
    MUST(cuda.cuMemUnmap(second, PAGE));
    MUST(cuda.cuMemRelease(handle));
    /* What a new handle shows: other handles of this very process may have had the memory. */
    unsigned old = 0, zero = 0;
    for (int i = 0; i < 16; i++) {
        CUmemGenericAllocationHandle fresh = create(PAGE);
        map(second, PAGE, fresh);
        old += differences(second, 0x600d600d) < WORDS;
        zero += differences(second, 0) == 0;
        MUST(cuda.cuMemUnmap(second, PAGE));
        MUST(cuda.cuMemRelease(fresh));
    }
    rule("contents.of_a_new_handle_are_zero", is(zero == 16),
         "%u of 16 were zero, %u showed what a released handle held", zero, old);
    /* And plain memory that is mapped at an address where other memory was a moment ago. */
    CUmemGenericAllocationHandle one = create(PAGE), two = create(PAGE);
    CUdeviceptr third = reserve(PAGE);
    map(first, PAGE, one);
    map(third, PAGE, two);
    write_words(first, 1);
    write_words(third, 2);
    MUST(cuda.cuMemUnmap(first, PAGE));
    map(first, PAGE, two);
    wrong = differences(first, 2);
    rule("contents.of_an_address_are_those_of_its_new_handle", is(!wrong), "%u of %d words differ",
         wrong, WORDS);
}

static CUdeviceptr alias_a, alias_b;

/* One handle at two addresses. */
static void make_aliases(size_t bytes) {
    CUmemGenericAllocationHandle handle = create(bytes);
    alias_a = reserve(bytes);
    alias_b = reserve(bytes);
    map(alias_a, bytes, handle);
    map(alias_b, bytes, handle);
}

/* Copies and fills, in the order of one stream, without a wait of the host's in between. */
void case_alias_copies(int unused) {
    (void)unused;
    enum { ROUNDS = 2000 };
    unsigned *seen = NULL, stale = 0;
    CUstream stream = new_stream();
    make_aliases(PAGE);
    MUST(cuda.cuMemHostAlloc((void **)&seen, ROUNDS * sizeof *seen, 0));
    for (unsigned i = 0; i < ROUNDS; i++) {
        CUdeviceptr to = i % 2 ? alias_a : alias_b, from = i % 2 ? alias_b : alias_a;
        MUST(cuda.cuMemsetD32Async(to, i + 1, WORDS, stream));
        MUST(cuda.cuMemcpyDtoHAsync_v2(&seen[i], from + 4 * (i * 97 % WORDS), 4, stream));
    }
    MUST(cuda.cuStreamSynchronize(stream));
    for (unsigned i = 0; i < ROUNDS; i++) stale += seen[i] != i + 1;
    rule("alias.copies_see_fills_in_stream_order", is(!stale), "%u of %d reads were stale", stale,
         ROUNDS);
}

/* The counters of differences: zeroed, and read. */
static CUdeviceptr counter(void) {
    CUdeviceptr at = 0;
    MUST(cuda.cuMemAlloc_v2(&at, PAGE));
    MUST(cuda.cuMemsetD32Async(at, 0, 16, NULL));
    MUST(cuda.cuCtxSynchronize());
    return at;
}

static unsigned count(CUdeviceptr at) {
    unsigned found = 0;
    MUST(cuda.cuMemcpyDtoH_v2(&found, at, sizeof found));
    return found;
}

/* A kernel, or the rule is unknown. */
static CUfunction needed(const char *rule_name, const char *text, const char *name) {
    CUresult code;
    CUfunction found = kernel(text, name, &code);
    if (!found) rule(rule_name, UNKNOWN, "the driver does not take the kernel: code %u", code);
    if (found && !kernels_run()) {
        rule(rule_name, UNKNOWN, "no kernel runs here");
        return NULL;
    }
    return found;
}

/* Writes through one mapping and counts through the other, kernel after kernel on one stream. */
static void alternate(const char *name, CUfunction write, CUfunction read, int dependent) {
    enum { ROUNDS = 1000, MANY = 4 * MIB / 4 };
    CUdeviceptr wrong = counter();
    CUstream stream = new_stream();
    make_aliases(4 * MIB);
    pending(name);
    for (unsigned i = 0; i < ROUNDS; i++) {
        /* A moment's wait before the write: a reader that does not wait for it would be early. */
        MUST(fill(write, i % 2 ? alias_a : alias_b, i + 1, MANY, dependent ? 20000 : 0, stream));
        MUST(differ(read, i % 2 ? alias_b : alias_a, i + 1, MANY, wrong, stream, dependent));
    }
    CUresult code = cuda.cuStreamSynchronize(stream);
    if (code) {
        rule(name, FALSE, "the kernels ended with %u", code);
        return;
    }
    unsigned stale = count(wrong);
    rule(name, is(!stale), "%u stale words in %d rounds of %zu", stale, ROUNDS, (size_t)MANY);
}

void case_alias_kernels(int unused) {
    (void)unused;
    CUresult code;
    CUfunction write = needed("alias.kernels_see_writes_in_stream_order", BASIC, "fill");
    if (!write) return;
    alternate("alias.kernels_see_writes_in_stream_order", write, kernel(BASIC, "differ", &code), 0);
    alternate("alias.cached_reads_see_writes_in_stream_order", write,
              kernel(BASIC, "differ_nc", &code), 0);

    /* A product of matrices: each element is read many times, by many multiprocessors. */
    enum { SIDE = 512, ROUNDS = 50 };
    CUfunction product = kernel(BASIC, "product", &code), check = kernel(BASIC, "differ", &code);
    CUdeviceptr wrong = counter(), result = 0, ones = 0;
    CUstream stream = new_stream();
    unsigned side = SIDE, words = SIDE * SIDE;
    make_aliases(PAGE);
    MUST(cuda.cuMemAlloc_v2(&result, PAGE));
    MUST(cuda.cuMemAlloc_v2(&ones, PAGE));
    MUST(fill(write, ones, 1, words, 0, stream));
    for (unsigned i = 1; i <= ROUNDS; i++) {
        CUdeviceptr read_from = i % 2 ? alias_b : alias_a;
        void *arguments[] = {&read_from, &ones, &result, &side};
        CUlaunchConfig config = {SIDE / 16, SIDE / 16, 1, 16, 16, 1, 0, stream, NULL, 0};
        MUST(fill(write, i % 2 ? alias_a : alias_b, i, words, 0, stream));
        MUST(cuda.cuLaunchKernelEx(&config, product, arguments, NULL));
        MUST(differ(check, result, i * SIDE, words, wrong, stream, 0));
    }
    MUST(cuda.cuStreamSynchronize(stream));
    rule("alias.a_product_sees_writes_in_stream_order", is(!count(wrong)),
         "%u wrong elements in %d products", count(wrong), ROUNDS);

    /* The old name goes while work through the new one is still to run. */
    MUST(fill(write, alias_b, 7, words, 20000000, stream));
    MUST(cuda.cuMemUnmap(alias_a, PAGE));
    CUresult ended = cuda.cuStreamSynchronize(stream);
    unsigned word = 0;
    if (!ended) MUST(cuda.cuMemcpyDtoH_v2(&word, alias_b, sizeof word));
    rule("alias.unmapping_one_keeps_work_through_the_other", is(!ended && word == 7),
         "code %u, read %u for 7", ended, word);

    /* Within one kernel: promised by nobody without a fence. */
    make_aliases(PAGE);
    CUfunction own[] = {kernel(BASIC, "write_read", &code), kernel(FENCED, "write_read", &code)};
    for (int fenced = 0; fenced < 2; fenced++) {
        const char *name = fenced ? "alias.one_kernel_sees_its_writes_with_a_fence"
                                  : "alias.one_kernel_sees_its_writes";
        if (!own[fenced]) {
            rule(name, UNKNOWN, "the driver does not take the kernel");
            continue;
        }
        CUdeviceptr missed = counter();
        for (unsigned value = 1; value <= 200; value++) {
            void *arguments[] = {&alias_a, &alias_b, &value, &missed};
            MUST(launch(own[fenced], words / 256, 256, stream, 0, arguments));
        }
        MUST(cuda.cuStreamSynchronize(stream));
        rule(name, is(!count(missed)), "%u stale reads in 200 kernels", count(missed));
    }
}

void case_alias_tma(int unused) {
    (void)unused;
    const char *name = "alias.bulk_copies_see_writes_in_stream_order";
    CUfunction read = needed(name, HOPPER, "differ_bulk");
    CUresult code;
    if (read) alternate(name, kernel(BASIC, "fill", &code), read, 0);
}

void case_alias_dependent(int unused) {
    (void)unused;
    const char *name = "alias.dependent_launches_see_writes";
    CUfunction read = needed(name, HOPPER, "differ_late");
    CUresult code;
    if (read) alternate(name, kernel(HOPPER, "fill_early", &code), read, 1);
}
