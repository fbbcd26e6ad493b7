/* Stream captures: what may be asked of a stream that captures, and what may be done beside one. */
#include "cases.h"
#include "driver.h"
#include "report.h"

#include <stdio.h>

static const char *const modes[] = {"global", "thread_local", "relaxed"};

/* Ends the capture; 0 where it was still valid. */
static CUresult end(CUstream stream) {
    CUgraph graph = NULL;
    CUresult code = cuda.cuStreamEndCapture(stream, &graph);
    if (code == CUDA_SUCCESS && graph) cuda.cuGraphDestroy(graph);
    return code;
}

/* One question about a capturing stream, in a capture of its own. */
static void ask(int mode, int relaxed_thread, int question) {
    static const char *const questions[] = {"stream_id", "capture_info", "is_capturing",
                                            "stream_query"};
    char answered[96], survives[96];
    snprintf(answered, sizeof answered, "capture.%s%s.%s_is_answered", modes[mode],
             relaxed_thread ? ".relaxed_thread" : "", questions[question]);
    snprintf(survives, sizeof survives, "capture.%s%s.survives_%s", modes[mode],
             relaxed_thread ? ".relaxed_thread" : "", questions[question]);
    CUstream stream = new_stream();
    unsigned long long before = 0, id = 0;
    uint64_t capture = 0;
    int status = -1, relaxed = CU_STREAM_CAPTURE_MODE_RELAXED;
    cuda.cuStreamGetId(stream, &before);
    MUST(cuda.cuStreamBeginCapture_v2(stream, mode));
    if (relaxed_thread) MUST(cuda.cuThreadExchangeStreamCaptureMode(&relaxed));
    pending(answered);
    CUresult code = question == 0   ? cuda.cuStreamGetId(stream, &id)
                    : question == 1 ? cuda.cuStreamGetCaptureInfo_v2(stream, &status, &capture,
                                                                     NULL, NULL, NULL)
                    : question == 2 ? cuda.cuStreamIsCapturing(stream, &status)
                                    : cuda.cuStreamQuery(stream);
    if (relaxed_thread) cuda.cuThreadExchangeStreamCaptureMode(&relaxed);
    if (code == ABSENT) {
        rule(answered, UNKNOWN, "this driver has no such call");
        end(stream);
        return;
    }
    enum answer good = is(code == CUDA_SUCCESS &&
                          (question == 0
                               ? id == before
                               : question == 3 || status == CU_STREAM_CAPTURE_STATUS_ACTIVE));
    rule(answered, good, "code %u%s", code,
         question == 0 && code == CUDA_SUCCESS && id != before ? ", another id than before" : "");
    CUresult ended = end(stream);
    rule(survives, is(ended == CUDA_SUCCESS), "the end of the capture answered %u", ended);
}

void case_in_capture(int mode) {
    for (int relaxed_thread = 0; relaxed_thread < 2; relaxed_thread++)
        for (int question = 0; question < 4; question++) ask(mode, relaxed_thread, question);
}

/* A call beside somebody's capture in the global mode, on other streams and memory, as the library
 * makes it: what touches no stream's order with the thread relaxed, the rest as it is. */
void case_beside_capture(int call) {
    static const char *const names[BESIDE_CAPTURE] = {
        "stream_id_of_another",      "event_record_on_another", "wait_on_another",
        "fill_on_another",           "capture_info_of_legacy",  "event_record_on_legacy",
        "ctx_record_event",          "event_query_relaxed",     "create_map_relaxed",
        "map_unmap_release_relaxed", "memory_info_relaxed",     "alloc_async_relaxed",
    };
    const char *name = names[call];
    int relaxed = CU_STREAM_CAPTURE_MODE_RELAXED, status = 0;
    unsigned long long id = 0;
    uint64_t capture = 0;
    size_t available, total;
    CUstream capturing = new_stream(), other = new_stream();
    CUevent event = new_event(), before = new_event();
    CUmemAllocationProp prop = ordinary();
    CUmemGenericAllocationHandle handle = 0, mapped = create(PAGE);
    CUdeviceptr at = reserve(2 * PAGE), block = 0;
    CUmemoryPool pool = NULL;
    CUmemPoolProps props = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                            .location = own_access.location};
    if (call == 11 && cuda.cuMemPoolCreate(&pool, &props) != CUDA_SUCCESS) return;
    map(at + PAGE, PAGE, mapped);
    MUST(cuda.cuEventRecord(event, other));
    MUST(cuda.cuEventRecord(before, other));
    MUST(cuda.cuStreamSynchronize(other));
    char made[96], survives[96];
    snprintf(made, sizeof made, "beside_capture.%s_is_permitted", name);
    snprintf(survives, sizeof survives, "beside_capture.survives_%s", name);

    MUST(cuda.cuStreamBeginCapture_v2(capturing, CU_STREAM_CAPTURE_MODE_GLOBAL));
    if (call >= 7) MUST(cuda.cuThreadExchangeStreamCaptureMode(&relaxed));
    pending(made);
    CUresult code = 0;
    switch (call) {
    case 0: code = cuda.cuStreamGetId(other, &id); break;
    case 1: code = cuda.cuEventRecord(event, other); break;
    case 2: code = cuda.cuStreamWaitEvent(other, before, 0); break;
    case 3: code = cuda.cuMemsetD32Async(at + PAGE, 1, 4, other); break;
    case 4: code = cuda.cuStreamGetCaptureInfo_v2(NULL, &status, &capture, NULL, NULL, NULL); break;
    case 5: code = cuda.cuEventRecord(event, NULL); break;
    case 6: code = cuda.cuCtxRecordEvent(context, event); break;
    case 7: code = cuda.cuEventQuery(before); break;
    case 8:
        code = cuda.cuMemCreate(&handle, PAGE, &prop, 0);
        if (!code) code = cuda.cuMemMap(at, PAGE, 0, handle, 0);
        if (!code) code = cuda.cuMemSetAccess(at, PAGE, &own_access, 1);
        break;
    case 9:
        code = cuda.cuMemUnmap(at + PAGE, PAGE);
        if (!code) code = cuda.cuMemRelease(mapped);
        break;
    case 10: code = cuda.cuMemGetInfo_v2(&available, &total); break;
    case 11: code = cuda.cuMemAllocFromPoolAsync(&block, PAGE, pool, other); break;
    }
    if (call >= 7) cuda.cuThreadExchangeStreamCaptureMode(&relaxed);
    if (code == ABSENT) {
        rule(made, UNKNOWN, "this driver has no such call");
        return;
    }
    rule(made, is(code == CUDA_SUCCESS), "code %u", code);
    CUresult ended = end(capturing);
    rule(survives, is(ended == CUDA_SUCCESS), "the end of the capture answered %u", ended);
}
