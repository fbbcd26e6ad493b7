/* Two devices: memory is where its context or its stream is, and may be freed from anywhere. */
#define STATIC_RUNTIME
#include "driver.h"

enum { MIB = 1 << 20 };

static uint64_t live_on(int device) {
    int (*stats)(int, struct GruyereStats *) = (int (*)(int, struct GruyereStats *))of_gruyere(
        "gruyere_stats");
    struct GruyereStats now;
    memset(&now, 0, sizeof now);
    now.size = sizeof now;
    CHECK(stats && stats(device, &now) == 0);
    return now.live;
}

int main(void) {
    CUcontext contexts[2];
    CUstream streams[2];
    CUdeviceptr plain[2], ordered[2], crossed;
    size_t before[2], after, total;
    driver_open();
    OK(cuInit(0));
    /* Granted on device 1's default pool before anything is allocated: device 0 reaches it. */
    CUmemoryPool pool;
    CUmemAccessDesc zero = {1, 0, 3};
    unsigned long long access = 0;
    OK(cuDeviceGetDefaultMemPool(&pool, 1));
    OK(cuMemPoolSetAccess(pool, &zero, 1));
    OK(cuDevicePrimaryCtxRetain(&contexts[1], 1));
    OK(cuCtxSetCurrent(contexts[1]));
    OK(cuMemAlloc(&crossed, MIB));
    OK(cuMemGetAccess(&access, &zero, crossed));
    CHECK(access == 3);
    OK(cuMemFree(crossed));
    for (int i = 0; i < 2; i++) {
        OK(cuDevicePrimaryCtxRetain(&contexts[i], i));
        OK(cuCtxSetCurrent(contexts[i]));
        OK(cuMemGetInfo(&before[i], &total));
        OK(cuStreamCreate(&streams[i], 1));
        OK(cuMemAlloc(&plain[i], (size_t)(i + 1) * 8 * MIB));
        CHECK(live_on(i) == (uint64_t)(i + 1) * 8 * MIB);
    }
    /* By the other device's context: the stream says where. */
    for (int i = 0; i < 2; i++) {
        OK(cuCtxSetCurrent(contexts[1 - i]));
        OK(cuMemAllocAsync(&ordered[i], 3 * MIB, streams[i]));
        CHECK(live_on(i) == (uint64_t)(i + 1) * 8 * MIB + 3 * MIB);
        OK(cuMemGetInfo(&after, &total));
        CHECK(after < before[1 - i]);
    }
    /* On a stream of the other device, and on the other device's default stream. */
    OK(cuCtxSetCurrent(contexts[0]));
    OK(cuMemAlloc(&crossed, MIB));
    OK(cuMemFreeAsync(crossed, streams[1]));
    OK(cuMemFreeAsync(ordered[1], NULL));
    OK(cuMemFreeAsync(ordered[0], streams[0]));
    OK(cuMemFree(plain[1]));
    OK(cuMemFree(plain[0]));
    CHECK(live_on(0) == 0 && live_on(1) == 0);
    for (int i = 0; i < 2; i++) OK(cuStreamDestroy(streams[i]));
    /* A thread without a context is refused, as ever. */
    OK(cuCtxSetCurrent(NULL));
    CHECK(cuMemAlloc(&crossed, MIB) != 0);
    CHECK(live_on(0) == 0);
    puts("kept");
    return 0;
}
