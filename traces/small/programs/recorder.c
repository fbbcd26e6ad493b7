/* The allocator of the recorded programs, a pluggable one of torch's: each request is served by the
   stand-in's cudaMalloc and noted in the stand-in's call log, whose lines are whole whoever writes
   them. ../record reads it. Not in Python: torch frees while an exception is on its way.

   It is preloaded, too, and stands before NCCL: a communicator has as many ranks as the program
   says, of which the stand-in sees one, and each collective is noted with its stream. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

extern int cudaMalloc(void **, size_t);
extern int cudaFree(void *);

static int log_file = -1;

__attribute__((constructor)) static void begin(void)
{
    const char *name = getenv("PHANTOM_CALL_LOG");
    log_file = name ? open(name, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644) : -1;
    if (log_file < 0) {
        perror("recorder: PHANTOM_CALL_LOG");
        exit(2);
    }
}

static void note(const char *line, int length)
{
    if (write(log_file, line, length) != length) {
        perror("recorder: the call log");
        _exit(2);
    }
}

void *recorder_malloc(ssize_t size, int device, void *stream)
{
    char line[128];
    void *block = NULL;
    if (cudaMalloc(&block, size ? size : 1) != 0)
        return NULL;
    note(line, snprintf(line, sizeof line, "@a %zu %zd %d %zu\n", (size_t)block, size, device,
                        (size_t)stream));
    return block;
}

/* The line is first: another thread may get the address as soon as it is free. */
void recorder_free(void *block, ssize_t size, int device, void *stream)
{
    char line[64];
    (void)size, (void)device, (void)stream;
    note(line, snprintf(line, sizeof line, "@f %zu\n", (size_t)block));
    cudaFree(block);
}

void recorder_record_stream(void *block, void *stream)
{
    char line[64];
    /* Of a tensor without memory, as FSDP1 does. */
    if (!block)
        return;
    note(line, snprintf(line, sizeof line, "@r %zu %zu\n", (size_t)block, (size_t)stream));
}

/* What a program says of itself. */
void recorder_mark(const char *text)
{
    char line[128];
    note(line, snprintf(line, sizeof line, "@m %.100s\n", text));
}

/* NCCL's types as its header has them: a result, a communicator, an identifier passed by value. */
typedef int result;
typedef void *communicator;
typedef struct {
    char bytes[128];
} unique_id;

/* The stand-in's function of this name: it is preloaded behind this library. */
#define NEXT(name, ...) ((result(*)(__VA_ARGS__))next(name))

static void *next(const char *name)
{
    void *function = dlsym(RTLD_NEXT, name);
    if (!function) {
        fprintf(stderr, "recorder: no %s\n", name);
        _exit(2);
    }
    return function;
}

result ncclCommInitRankConfig(communicator *out, int ranks, unique_id id, int rank, void *config)
{
    (void)ranks, (void)rank;
    return NEXT("ncclCommInitRankConfig", communicator *, int, unique_id, int, void *)(out, 1, id,
                                                                                      0, config);
}

result ncclCommInitRank(communicator *out, int ranks, unique_id id, int rank)
{
    (void)ranks, (void)rank;
    return NEXT("ncclCommInitRank", communicator *, int, unique_id, int)(out, 1, id, 0);
}

static result noted(result result, void *stream)
{
    char line[64];
    if (result == 0)
        note(line, snprintf(line, sizeof line, "@k %zu\n", (size_t)stream));
    return result;
}

result ncclAllReduce(const void *from, void *to, size_t count, int type, int operation,
                     communicator of, void *stream)
{
    return noted(NEXT("ncclAllReduce", const void *, void *, size_t, int, int, communicator,
                      void *)(from, to, count, type, operation, of, stream),
                 stream);
}

result ncclReduceScatter(const void *from, void *to, size_t count, int type, int operation,
                         communicator of, void *stream)
{
    return noted(NEXT("ncclReduceScatter", const void *, void *, size_t, int, int, communicator,
                      void *)(from, to, count, type, operation, of, stream),
                 stream);
}

result ncclAllGather(const void *from, void *to, size_t count, int type, communicator of,
                     void *stream)
{
    return noted(NEXT("ncclAllGather", const void *, void *, size_t, int, communicator,
                      void *)(from, to, count, type, of, stream),
                 stream);
}

result ncclBroadcast(const void *from, void *to, size_t count, int type, int root,
                     communicator of, void *stream)
{
    return noted(NEXT("ncclBroadcast", const void *, void *, size_t, int, int, communicator,
                      void *)(from, to, count, type, root, of, stream),
                 stream);
}
