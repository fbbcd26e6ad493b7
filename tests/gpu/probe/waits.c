/* Whether a call waits for what the device is doing, and whether kernels are slower beside it. */
#include "cases.h"
#include "driver.h"
#include "kernels.h"
#include "report.h"

#include <stdio.h>
#include <string.h>

enum { CALLS = 18 };
static const char *const names[CALLS] = {
    "create",
    "map",
    "set_access",
    "second_map",
    "second_set_access",
    "unmap",
    "release",
    "address_reserve",
    "address_free",
    "mem_alloc",
    "mem_free",
    "pool_create",
    "pool_alloc_new",
    "pool_trim",
    "event_create",
    "stream_create",
    "stream_destroy",
    "memory_info",
};

/* What the calls are made on: all of it is idle, and none of it is used by what the device is busy
 * with. */
static struct {
    CUdeviceptr space, mapped, plain, block;
    CUmemGenericAllocationHandle made, idle, twice;
    CUmemoryPool pool, new_pool;
    CUstream stream, destroyed;
    CUevent event;
} it;

static CUmemPoolProps pool_props(void) {
    CUmemPoolProps props;
    memset(&props, 0, sizeof props);
    props.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
    props.location = own_access.location;
    return props;
}

static void prepare(void) {
    CUmemPoolProps props = pool_props();
    uint64_t keep = UINT64_MAX;
    memset(&it, 0, sizeof it);
    it.space = reserve(16 * PAGE);
    it.idle = create(PAGE);
    it.twice = create(PAGE);
    it.mapped = it.space + 8 * PAGE;
    map(it.mapped, PAGE, it.twice);
    MUST(cuda.cuMemAlloc_v2(&it.plain, PAGE));
    it.stream = new_stream();
    it.destroyed = new_stream();
    if (cuda.cuMemPoolCreate(&it.pool, &props) == CUDA_SUCCESS) {
        MUST(cuda.cuMemPoolSetAttribute(it.pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &keep));
        MUST(cuda.cuMemAllocFromPoolAsync(&it.block, PAGE, it.pool, it.stream));
        MUST(cuda.cuMemFreeAsync(it.block, it.stream));
        MUST(cuda.cuStreamSynchronize(it.stream));
    }
}

static CUresult call(int which) {
    CUmemAllocationProp prop = ordinary();
    CUmemPoolProps props = pool_props();
    size_t available, total;
    switch (which) {
    case 0: return cuda.cuMemCreate(&it.made, PAGE, &prop, 0);
    case 1: return cuda.cuMemMap(it.space, PAGE, 0, it.idle, 0);
    case 2: return cuda.cuMemSetAccess(it.space, PAGE, &own_access, 1);
    case 3: return cuda.cuMemMap(it.space + PAGE, PAGE, 0, it.twice, 0);
    case 4: return cuda.cuMemSetAccess(it.space + PAGE, PAGE, &own_access, 1);
    case 5: return cuda.cuMemUnmap(it.space, PAGE);
    case 6: return cuda.cuMemRelease(it.idle);
    case 7: return cuda.cuMemAddressReserve(&it.block, GIB, PAGE, 0, 0);
    case 8: return cuda.cuMemAddressFree(it.block, GIB);
    case 9: return cuda.cuMemAlloc_v2(&it.block, PAGE);
    case 10: return cuda.cuMemFree_v2(it.block);
    case 11: return cuda.cuMemPoolCreate(&it.new_pool, &props);
    case 12:
        return it.new_pool ? cuda.cuMemAllocFromPoolAsync(&it.block, PAGE, it.new_pool, it.stream)
                           : ABSENT;
    case 13: return it.pool ? cuda.cuMemPoolTrimTo(it.pool, 0) : ABSENT;
    case 14: return cuda.cuEventCreate(&it.event, CU_EVENT_DISABLE_TIMING);
    case 15: return cuda.cuStreamCreate(&it.stream, CU_STREAM_NON_BLOCKING);
    case 16: return cuda.cuStreamDestroy_v2(it.destroyed);
    default: return cuda.cuMemGetInfo_v2(&available, &total);
    }
}

static CUdeviceptr data;
static void *host;
static size_t data_bytes;
#define BUSY_NS 30000000.0

static void make_busy(int copies, CUfunction write, CUstream stream) {
    if (copies)
        for (int i = 0; i < 8; i++) MUST(cuda.cuMemcpyDtoHAsync_v2(host, data, data_bytes, stream));
    else
        MUST(fill(write, data, 1, 1024, (uint64_t)BUSY_NS, stream));
}

void case_waits(int copies) {
    const char *what = copies ? "copies" : "kernels";
    CUresult code;
    CUfunction write = kernel(BASIC, "fill", &code);
    CUstream stream = new_stream();
    /* Eight copies over PCIe take some 100 ms. */
    data_bytes = 512 * MIB;
    if (free_memory() < 8 * data_bytes) data_bytes = free_memory() / 8 / PAGE * PAGE;
    MUST(cuda.cuMemAlloc_v2(&data, data_bytes));
    if (copies) MUST(cuda.cuMemHostAlloc(&host, data_bytes, 0));
    int run = write && kernels_run();
    prepare();
    if (write) make_busy(copies, write, stream);
    MUST(cuda.cuStreamSynchronize(stream));
    for (int which = 0; which < CALLS; which++) {
        char name[96];
        snprintf(name, sizeof name, "waits.%s_does_not_wait_for_%s", names[which], what);
        if (!run) {
            /* The call is made all the same: it must be one that succeeds. */
            code = call(which);
            rule(name, UNKNOWN, "%s take no time here; the call answered %u", what, code);
            continue;
        }
        make_busy(copies, write, stream);
        double before = now();
        pending(name);
        code = call(which);
        double took = now() - before;
        int running = cuda.cuStreamQuery(stream) == CUDA_ERROR_NOT_READY;
        MUST(cuda.cuStreamSynchronize(stream));
        enum answer answer = running ? TRUE : took > BUSY_NS / 2 ? FALSE : UNKNOWN;
        rule(name, code ? UNKNOWN : answer, "code %u after %.0f us, the device was %s", code,
             took / 1e3, running ? "still busy" : "done");
    }
}

/* Kernels that stream through memory, alone and with calls beside them that concern other memory.
 * */
void case_slower(int unused) {
    (void)unused;
    enum { PAGES = 64, PASSES = 60 };
    static CUmemGenericAllocationHandle handles[PAGES];
    CUdeviceptr at = reserve(PAGES * PAGE);
    CUstream stream = new_stream();
    CUevent begin = NULL, end = NULL;
    data_bytes = 2048 * MIB;
    if (free_memory() < 4 * data_bytes) data_bytes = free_memory() / 4 / PAGE * PAGE;
    MUST(cuda.cuMemAlloc_v2(&data, data_bytes));
    MUST(cuda.cuEventCreate(&begin, CU_EVENT_DEFAULT));
    MUST(cuda.cuEventCreate(&end, CU_EVENT_DEFAULT));
    for (int i = 0; i < PAGES; i++) handles[i] = create(PAGE);
    float alone = 0, beside = 0;
    static const char *const calls[] = {"", "map", "set_access", "unmap"};
    for (int round = -1; round < 4; round++) {
        MUST(cuda.cuEventRecord(begin, stream));
        for (int i = 0; i < PASSES; i++)
            MUST(cuda.cuMemsetD32Async(data, (unsigned)i, data_bytes / 4, stream));
        MUST(cuda.cuEventRecord(end, stream));
        for (int i = 0; i < PAGES && round > 0; i++) {
            CUdeviceptr page = at + i * PAGE;
            if (round == 1) MUST(cuda.cuMemMap(page, PAGE, 0, handles[i], 0));
            if (round == 2) MUST(cuda.cuMemSetAccess(page, PAGE, &own_access, 1));
            if (round == 3) MUST(cuda.cuMemUnmap(page, PAGE));
        }
        MUST(cuda.cuEventSynchronize(end));
        MUST(cuda.cuEventElapsedTime(round <= 0 ? &alone : &beside, begin, end));
        if (round > 0 && alone > 0) {
            char name[64];
            snprintf(name, sizeof name, "kernels_beside_%s_times_as_long", calls[round]);
            fact_number(name, beside / alone);
        }
    }
    fact_number("kernels_alone_ms", alone);
}
