/* dlsym and glibc's own beside each other, with names by chance from several threads: the same
 * answer, whatever is asked. To be run with the door shut, where nothing is stood in for. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { THREADS = 8, ROUNDS = 20000 };

static void *(*real)(void *, const char *);
static void *handles[5];

static const char *const parts[] = {
    "cu",
    "Cu",
    "cuM",
    "cuMem",
    "Alloc",
    "Free",
    "Async",
    "_v2",
    "_ptsz",
    "_v3",
    "GetProcAddress",
    "Ctx",
    "Synchronize",
    "Stream",
    "Begin",
    "Capture",
    "End",
    "ToGraph",
    "\xff\x80",
    " ",
    "dlsym",
    "malloc",
    "cuda",
    "Pitch",
    "Map",
    "Unmap",
    "Create",
    "Release",
    "Ipc",
    "MemHandle",
    "Device",
    "PrimaryCtxReset",
    "Info",
    "",
    "A",
    "Z",
    "[",
    "@",
};

static void *worker(void *seed) {
    uint64_t state = (uint64_t)(uintptr_t)seed * 0x9e3779b97f4a7c15u + 1;
    for (int round = 0; round < ROUNDS; round++) {
        char name[128] = "";
        state = state * 6364136223846793005u + 1442695040888963407u;
        for (unsigned i = 0, n = (state >> 33) % 5; i < n; i++)
            strcat(name, parts[(state >> (35 + 5 * i)) % (sizeof parts / sizeof *parts)]);
        void *handle = handles[(state >> 20) % 5];
        dlerror();
        void *found = dlsym(handle, name);
        int failed = dlerror() != NULL;
        void *expected = real(handle, name);
        int should_fail = dlerror() != NULL;
        /* In the global scope a library that is preloaded has exports of its own, which nobody is
         * to see. */
        Dl_info info;
        if (expected && strcmp(name, "dlsym") != 0 && handle != RTLD_NEXT &&
            dladdr(expected, &info) && strstr(info.dli_fname, "libgruyere_driver")) {
            expected = NULL;
            should_fail = 1;
        }
        if (found != expected || failed != should_fail) {
            fprintf(stderr, "'%s': %p, not %p; dlerror %d, not %d\n", name, found, expected, failed,
                    should_fail);
            exit(1);
        }
    }
    return NULL;
}

int main(void) {
    static const char *const versions[] = {"GLIBC_2.34", "GLIBC_2.17", "GLIBC_2.2.5"};
    void *libc = dlopen("libc.so.6", RTLD_NOW);
    for (unsigned i = 0; !real && i < 3; i++)
        real = (void *(*)(void *, const char *))dlvsym(libc, "dlsym", versions[i]);
    handles[0] = RTLD_DEFAULT;
    handles[1] = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    handles[2] = libc;
    handles[3] = dlopen(NULL, RTLD_NOW);
    handles[4] = RTLD_NEXT;
    if (!real || !handles[1] || !libc || !handles[3]) return 1;
    pthread_t threads[THREADS];
    for (uintptr_t i = 0; i < THREADS; i++)
        if (pthread_create(&threads[i], NULL, worker, (void *)(i + 1)) != 0) return 1;
    for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
    puts("kept");
    return 0;
}
