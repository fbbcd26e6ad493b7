/* The allocator of the recorded programs, a pluggable one of torch's: each request is served by the
   stand-in's cudaMalloc and noted in the stand-in's call log, whose lines are whole whoever writes
   them. ../record reads it. Not in Python: torch frees while an exception is on its way. */

#define _GNU_SOURCE
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
    note(line, snprintf(line, sizeof line, "@r %zu %zu\n", (size_t)block, (size_t)stream));
}

/* What a program says of itself. */
void recorder_mark(const char *text)
{
    char line[128];
    note(line, snprintf(line, sizeof line, "@m %.100s\n", text));
}
