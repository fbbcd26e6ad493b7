/* Loaded by LD_PRELOAD: a thread that has thrown c10::OutOfMemoryError computes for DELAY_MS after
 * each std::condition_variable::notify_one of its, as if the scheduler had taken its core away. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static __thread int has_thrown;

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1e3 + time.tv_nsec / 1e6;
}

void __cxa_throw(void *object, void *type, void *destructor) {
    void (*next)(void *, void *, void *) = dlsym(RTLD_NEXT, "__cxa_throw");
    if (strstr(((char **)type)[1], "OutOfMemory")) {
        has_thrown = 1;
    }
    next(object, type, destructor);
    __builtin_unreachable();
}

void _ZNSt18condition_variable10notify_oneEv(void *condition) {
    void (*next)(void *) = dlsym(RTLD_NEXT, "_ZNSt18condition_variable10notify_oneEv");
    next(condition);
    char *delay = getenv("DELAY_MS");
    if (has_thrown && delay) {
        double end = now() + atof(delay);
        while (now() < end) {
        }
    }
}
