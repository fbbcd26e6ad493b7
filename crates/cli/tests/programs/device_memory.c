// Takes blocks of 64 MiB through the library that is preloaded, and frees some: device_memory TAKE
// FREE [again|kill]. With `driver` it asks the driver, as a runtime that is linked statically does:
// by address.
#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

static int (*driver_malloc)(unsigned long long *, size_t);
static int (*driver_free)(unsigned long long);

static void *take_from_driver(ssize_t bytes, int device, void *stream) {
    (void)device;
    (void)stream;
    unsigned long long address = 0;
    return driver_malloc(&address, bytes) == 0 ? (void *)address : NULL;
}

static void give_to_driver(void *block, ssize_t bytes, int device, void *stream) {
    (void)bytes;
    (void)device;
    (void)stream;
    driver_free((unsigned long long)block);
}

static int find_driver(void) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL), *context = NULL;
    int (*initialize)(unsigned), (*retain)(void **, int), (*set)(void *);
    *(void **)&initialize = dlsym(library, "cuInit");
    *(void **)&retain = dlsym(library, "cuDevicePrimaryCtxRetain");
    *(void **)&set = dlsym(library, "cuCtxSetCurrent");
    *(void **)&driver_malloc = dlsym(library, "cuMemAlloc_v2");
    *(void **)&driver_free = dlsym(library, "cuMemFree_v2");
    return library && driver_malloc && driver_free && initialize(0) == 0 &&
           retain(&context, 0) == 0 && set(context) == 0;
}

int main(int count, char **words) {
    void *(*take)(ssize_t, int, void *);
    void (*give)(void *, ssize_t, int, void *);
    *(void **)&take = dlsym(RTLD_DEFAULT, "gruyere_malloc");
    *(void **)&give = dlsym(RTLD_DEFAULT, "gruyere_free");
    if (count < 3 || !take || !give) {
        fprintf(stderr, "the library is not here\n");
        return 1;
    }
    if (count > 3 && strcmp(words[3], "again") == 0) {
        pid_t child = fork();
        if (child == 0) {
            execl(words[0], words[0], words[1], words[2], (char *)NULL);
            _exit(1);
        }
        int status = 1;
        if (waitpid(child, &status, 0) != child || status != 0) {
            return 1;
        }
    }
    if (count > 3 && strcmp(words[3], "driver") == 0) {
        if (!find_driver()) {
            return 3;
        }
        take = take_from_driver;
        give = give_to_driver;
    }
    void *blocks[16];
    int taken = atoi(words[1]), given = atoi(words[2]);
    for (int i = 0; i < taken; i++) {
        blocks[i] = take(64 << 20, 0, NULL);
        if (!blocks[i]) {
            return 2;
        }
    }
    for (int i = 0; i < given; i++) {
        give(blocks[i], 64 << 20, 0, NULL);
    }
    if (count > 3 && strcmp(words[3], "kill") == 0) {
        raise(SIGKILL);
    }
    return 0;
}
