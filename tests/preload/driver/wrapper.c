/* A library that stands in for dlsym too, as tracers and virtual GPUs do: counts, and hands on to
 * the one behind it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <stdio.h>

static atomic_int calls;

void *dlsym(void *handle, const char *name) {
    static void *(*_Atomic next)(void *, const char *);
    atomic_fetch_add(&calls, 1);
    void *(*real)(void *, const char *) = next;
    if (!real) {
        static const char *const versions[] = {"GLIBC_2.34", "GLIBC_2.17", "GLIBC_2.2.5"};
        for (unsigned i = 0; !real && i < sizeof versions / sizeof *versions; i++)
            real = (void *(*)(void *, const char *))dlvsym(RTLD_NEXT, "dlsym", versions[i]);
#ifdef CHAINED
        /* By name, so that another stand-in behind this one is met. */
        real = (void *(*)(void *, const char *))real(RTLD_NEXT, "dlsym");
#endif
        next = real;
    }
    return real(handle, name);
}

__attribute__((destructor)) static void tell(void) {
    fprintf(stderr, "wrapped %s\n", calls > 0 ? "some" : "none");
}
