/* Lookups in every way that a program has, written down: which function of which file was found, or
 * that there was none. */
#ifndef PRELOAD_LOOKUPS_H
#define PRELOAD_LOOKUPS_H

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Adds a line a lookup to `out`. Included by each file that looks up: the caller counts. */
static void look(const char *who, const char *way, void *handle, char *out, size_t room) {
    static const char *const names[] = {
        "malloc",
        "printf",
        "own_function",
        "no_such_function",
        "",
        "c",
        "cu",
        "cuM",
        "cuMem",
        "cuda",
        "cudaMemset",
        "cuInit",
        "cuMemcpyHtoD_v2",
        "cuMemAlloc",
        "cuMemAlloc_v20",
        "cuMemAlloc_v2",
        "cuMemFree_v2",
        "cuMemAllocAsync_ptsz",
        "cuStreamEndCapture",
        "cuGetProcAddress",
        "cuGetProcAddress_v2",
    };
    size_t used = strlen(out);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        dlerror();
        void *found = dlsym(handle, names[i]);
        const char *error = dlerror();
        Dl_info info;
        memset(&info, 0, sizeof info);
        const char *file = "nothing", *symbol = "";
        if (found) {
            int known = dladdr(found, &info);
            file = known ? strrchr(info.dli_fname, '/') : "?";
            file = file ? file + 1 : info.dli_fname;
            symbol = info.dli_saddr == found && info.dli_sname ? info.dli_sname : "inside";
        }
        int n = snprintf(out + used, room - used, "%s %s '%s': %s %s%s\n", who, way, names[i], file,
                         symbol, error ? " error" : "");
        if (n < 0 || (size_t)n >= room - used) abort();
        used += (size_t)n;
    }
}

#endif
