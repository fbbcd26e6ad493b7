/* Streams that have been destroyed: the driver calls any use of them undefined. Each call is its
 * process's last. */
#include "cases.h"
#include "driver.h"
#include "report.h"

#include <stdio.h>

void case_destroyed_stream(int call) {
    static const char *const names[DESTROYED_STREAM] = {
        "stream_id",    "capture_info",       "is_capturing", "stream_query",
        "event_record", "stream_synchronize", "wait_event",   "free_async"};
    unsigned long long id = 0;
    uint64_t capture = 0;
    int status = -1;
    CUevent event = new_event();
    CUmemoryPool pool = NULL;
    CUdeviceptr block = 0;
    CUmemPoolProps props = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                            .location = own_access.location};
    /* Some that came and went, as in a program that has run for a while. */
    CUstream stream = NULL;
    unsigned again = 0;
    for (int round = 0; round < 8; round++) {
        CUstream before = stream;
        stream = new_stream();
        again += stream == before;
        if (call == 7 && !pool) {
            if (cuda.cuMemPoolCreate(&pool, &props) != CUDA_SUCCESS) return;
        }
        if (call == 7 && round == 7) MUST(cuda.cuMemAllocFromPoolAsync(&block, PAGE, pool, stream));
        MUST(cuda.cuStreamSynchronize(stream));
        MUST(cuda.cuStreamDestroy_v2(stream));
    }
    if (call == 0)
        rule("destroyed_stream.its_handle_is_given_again", is(again > 0),
             "%u of 7 new streams had the handle of the last", again);
    char name[96];
    snprintf(name, sizeof name, "destroyed_stream.%s_is_refused", names[call]);
    pending(name);
    CUresult code = call == 0   ? cuda.cuStreamGetId(stream, &id)
                    : call == 1 ? cuda.cuStreamGetCaptureInfo_v2(stream, &status, &capture, NULL,
                                                                 NULL, NULL)
                    : call == 2 ? cuda.cuStreamIsCapturing(stream, &status)
                    : call == 3 ? cuda.cuStreamQuery(stream)
                    : call == 4 ? cuda.cuEventRecord(event, stream)
                    : call == 5 ? cuda.cuStreamSynchronize(stream)
                    : call == 6 ? cuda.cuStreamWaitEvent(stream, event, 0)
                                : cuda.cuMemFreeAsync(block, stream);
    if (code == ABSENT) {
        rule(name, UNKNOWN, "this driver has no such call");
        return;
    }
    /* What may be called after it tells whether the error is the context's. */
    rule(name, is(code != CUDA_SUCCESS), "code %u, then cuCtxSynchronize %u", code,
         cuda.cuCtxSynchronize());
}
