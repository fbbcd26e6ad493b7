/* What calls cost the host, by what they cover. Nothing else runs meanwhile. */
#include "cases.h"
#include "driver.h"
#include "kernels.h"
#include "report.h"

#include <stdlib.h>
#include <string.h>

enum { SAMPLES = 4096 };

/* Times of one call at one size. */
struct series {
    const char *call;
    size_t bytes;
    unsigned mappings, count;
    double times[SAMPLES];
};

#define TIMED(series, expression)                                                               \
    do {                                                                                        \
        double before_ = now();                                                                 \
        CUresult code_ = (expression);                                                          \
        double took_ = now() - before_;                                                         \
        must(code_, #expression, __FILE__, __LINE__);                                           \
        if ((series)->count < SAMPLES) (series)->times[(series)->count++] = took_;              \
    } while (0)

static void begin(struct series *series, const char *call, size_t bytes, unsigned mappings) {
    series->call = call;
    series->bytes = bytes;
    series->mappings = mappings;
    series->count = 0;
}

static void tell(struct series *series) {
    price(series->call, series->bytes, series->mappings, series->times, series->count);
}

/* Lives of `count` handles of `size` side by side: access and unmap in one call over all of them.
 * */
static void life(size_t size, unsigned count, int rounds) {
    static struct series make, mapping, access, unmap, release;
    static CUmemGenericAllocationHandle handles[512];
    CUmemAllocationProp prop = ordinary();
    CUdeviceptr at = reserve(size * count);
    begin(&make, "cuMemCreate", size, 1);
    begin(&mapping, "cuMemMap", size, 1);
    begin(&access, "cuMemSetAccess", size * count, count);
    begin(&unmap, "cuMemUnmap", size * count, count);
    begin(&release, "cuMemRelease", size, 1);
    for (int round = 0; round < rounds; round++) {
        for (unsigned i = 0; i < count; i++)
            TIMED(&make, cuda.cuMemCreate(&handles[i], size, &prop, 0));
        for (unsigned i = 0; i < count; i++)
            TIMED(&mapping, cuda.cuMemMap(at + i * size, size, 0, handles[i], 0));
        TIMED(&access, cuda.cuMemSetAccess(at, size * count, &own_access, 1));
        TIMED(&unmap, cuda.cuMemUnmap(at, size * count));
        for (unsigned i = 0; i < count; i++) TIMED(&release, cuda.cuMemRelease(handles[i]));
    }
    /* Handles are priced one by one, whatever lies beside them. */
    if (count == 1) tell(&make), tell(&mapping), tell(&release);
    tell(&access);
    tell(&unmap);
    MUST(cuda.cuMemAddressFree(at, size * count));
}

void case_prices_mappings(int unused) {
    (void)unused;
    static const struct {
        unsigned mib, count, rounds;
    } lives[] = {{2, 1, 100},  {4, 1, 50},   {8, 1, 50},   {16, 1, 50}, {32, 1, 30}, {64, 1, 30},
                 {128, 1, 20}, {256, 1, 10}, {1024, 1, 6}, {2, 8, 30},  {2, 64, 10}, {2, 256, 5},
                 {16, 8, 20},  {16, 64, 5},  {64, 16, 5},  {128, 8, 5}};
    size_t room = free_memory() / 2;
    for (unsigned i = 0; i < sizeof lives / sizeof *lives; i++)
        if (lives[i].mib * MIB * lives[i].count <= room)
            life(lives[i].mib * MIB, lives[i].count, (int)lives[i].rounds);
    static struct series take, give;
    for (size_t bytes = PAGE; bytes <= 2 * total_memory(); bytes *= 64) {
        CUdeviceptr at = 0;
        begin(&take, "cuMemAddressReserve", bytes, 1);
        begin(&give, "cuMemAddressFree", bytes, 1);
        for (int i = 0; i < 50; i++) {
            TIMED(&take, cuda.cuMemAddressReserve(&at, bytes, PAGE, 0, 0));
            TIMED(&give, cuda.cuMemAddressFree(at, bytes));
        }
        tell(&take);
        tell(&give);
    }
}

static CUmemoryPool new_pool(uint64_t keep) {
    CUmemPoolProps props;
    CUmemoryPool pool = NULL;
    memset(&props, 0, sizeof props);
    props.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
    props.location = own_access.location;
    if (cuda.cuMemPoolCreate(&pool, &props) != CUDA_SUCCESS) return NULL;
    MUST(cuda.cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &keep));
    return pool;
}

void case_prices_memory(int unused) {
    (void)unused;
    static struct series alloc, release, miss, hit, give, trim;
    static const unsigned sizes[] = {2, 8, 32, 128, 512};
    CUstream stream = new_stream();
    CUdeviceptr at = 0;
    for (unsigned i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        size_t bytes = sizes[i] * MIB;
        if (bytes > free_memory() / 4) break;
        int rounds = sizes[i] < 128 ? 40 : 10;
        begin(&alloc, "cuMemAlloc", bytes, 1);
        begin(&release, "cuMemFree", bytes, 1);
        for (int round = 0; round < rounds; round++) {
            TIMED(&alloc, cuda.cuMemAlloc_v2(&at, bytes));
            TIMED(&release, cuda.cuMemFree_v2(at));
        }
        tell(&alloc);
        tell(&release);
        CUmemoryPool pool = new_pool(UINT64_MAX);
        if (!pool) continue;
        begin(&miss, "cuMemAllocFromPoolAsync, new memory", bytes, 1);
        begin(&hit, "cuMemAllocFromPoolAsync, kept memory", bytes, 1);
        begin(&give, "cuMemFreeAsync", bytes, 1);
        begin(&trim, "cuMemPoolTrimTo", bytes, 1);
        for (int round = 0; round < rounds; round++) {
            TIMED(&miss, cuda.cuMemAllocFromPoolAsync(&at, bytes, pool, stream));
            TIMED(&give, cuda.cuMemFreeAsync(at, stream));
            for (int again = 0; again < 4; again++) {
                TIMED(&hit, cuda.cuMemAllocFromPoolAsync(&at, bytes, pool, stream));
                TIMED(&give, cuda.cuMemFreeAsync(at, stream));
            }
            MUST(cuda.cuStreamSynchronize(stream));
            TIMED(&trim, cuda.cuMemPoolTrimTo(pool, 0));
        }
        tell(&miss), tell(&hit), tell(&give), tell(&trim);
        MUST(cuda.cuMemPoolDestroy(pool));
    }
    begin(&alloc, "cuMemPoolCreate", 0, 1);
    begin(&release, "cuMemPoolDestroy", 0, 1);
    begin(&give, "cuMemPoolSetAccess", 0, 1);
    for (int round = 0; round < 20; round++) {
        CUmemoryPool pool = NULL;
        CUmemPoolProps props;
        memset(&props, 0, sizeof props);
        props.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
        props.location = own_access.location;
        double before = now();
        if (cuda.cuMemPoolCreate(&pool, &props) != CUDA_SUCCESS) return;
        alloc.times[alloc.count++] = now() - before;
        TIMED(&give, cuda.cuMemPoolSetAccess(pool, &own_access, 1));
        TIMED(&release, cuda.cuMemPoolDestroy(pool));
    }
    tell(&alloc), tell(&give), tell(&release);
}

/* Calls that a driver may lack are left out there. */
#define EACH(name, times_, expression)                                  \
    do {                                                                \
        static struct series series_;                                   \
        begin(&series_, name, 0, 1);                                    \
        CUresult first_ = (expression);                                 \
        for (int i_ = 0; i_ < (times_) && first_ == CUDA_SUCCESS; i_++) \
            TIMED(&series_, expression);                                \
        tell(&series_);                                                 \
    } while (0)

void case_prices_small(int unused) {
    (void)unused;
    unsigned long long id;
    uint64_t capture;
    int status, relaxed = CU_STREAM_CAPTURE_MODE_RELAXED;
    size_t available, total;
    CUcontext current;
    CUdeviceptr at = 0;
    CUgraph graph = NULL;
    CUgraphExec exec = NULL;
    CUstream stream = new_stream();
    CUevent event = new_event();
    MUST(cuda.cuMemAlloc_v2(&at, PAGE));
    MUST(cuda.cuEventRecord(event, stream));
    MUST(cuda.cuStreamSynchronize(stream));
    EACH("cuCtxGetCurrent", 4000, cuda.cuCtxGetCurrent(&current));
    EACH("cuStreamGetId", 4000, cuda.cuStreamGetId(stream, &id));
    EACH("cuStreamGetCaptureInfo", 4000,
         cuda.cuStreamGetCaptureInfo_v2(stream, &status, &capture, NULL, NULL, NULL));
    EACH("cuStreamIsCapturing", 4000, cuda.cuStreamIsCapturing(stream, &status));
    EACH("cuThreadExchangeStreamCaptureMode", 4000,
         cuda.cuThreadExchangeStreamCaptureMode(&relaxed));
    EACH("cuMemGetInfo", 200, cuda.cuMemGetInfo_v2(&available, &total));
    EACH("cuEventQuery", 4000, cuda.cuEventQuery(event));
    EACH("cuEventRecord", 2000, cuda.cuEventRecord(event, stream));
    EACH("cuStreamWaitEvent", 1000, cuda.cuStreamWaitEvent(stream, event, 0));
    MUST(cuda.cuStreamSynchronize(stream));
    EACH("cuStreamSynchronize", 1000, cuda.cuStreamSynchronize(stream));
    EACH("cuCtxSynchronize", 1000, cuda.cuCtxSynchronize());
    EACH("cuCtxRecordEvent", 200, cuda.cuCtxRecordEvent(context, event));
    EACH("cuMemsetD32Async", 1000, cuda.cuMemsetD32Async(at, 1, 1024, stream));
    MUST(cuda.cuStreamSynchronize(stream));
    CUresult code;
    CUfunction write = kernel(BASIC, "fill", &code);
    if (write) EACH("cuLaunchKernelEx", 1000, fill(write, at, 1, 1, 0, stream));
    MUST(cuda.cuStreamSynchronize(stream));
    static struct series make, destroy;
    begin(&make, "cuEventCreate", 0, 1);
    begin(&destroy, "cuEventDestroy", 0, 1);
    for (int i = 0; i < 500; i++) {
        CUevent other;
        TIMED(&make, cuda.cuEventCreate(&other, CU_EVENT_DISABLE_TIMING));
        TIMED(&destroy, cuda.cuEventDestroy_v2(other));
    }
    tell(&make), tell(&destroy);
    begin(&make, "cuStreamCreate", 0, 1);
    begin(&destroy, "cuStreamDestroy", 0, 1);
    for (int i = 0; i < 100; i++) {
        CUstream other;
        TIMED(&make, cuda.cuStreamCreate(&other, CU_STREAM_NON_BLOCKING));
        TIMED(&destroy, cuda.cuStreamDestroy_v2(other));
    }
    tell(&make), tell(&destroy);
    MUST(cuda.cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    MUST(cuda.cuMemsetD32Async(at, 2, 1024, stream));
    MUST(cuda.cuStreamEndCapture(stream, &graph));
    MUST(cuda.cuGraphInstantiateWithFlags(&exec, graph, 0));
    EACH("cuGraphLaunch", 500, cuda.cuGraphLaunch(exec, stream));
    MUST(cuda.cuStreamSynchronize(stream));
}
