/* Libraries that bring their CUDA runtime themselves, privately; this program is not linked with
 * one. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gruyere.h"
#pragma weak gruyere_stats
#pragma weak gruyere_validate

#define CHECK(condition) \
    do { \
        if (!(condition)) { \
            fprintf(stderr, "line %d: %s does not hold\n", __LINE__, #condition); \
            _Exit(1); \
        } \
    } while (0)

struct plugin {
    int (*malloc)(void **, size_t);
    int (*free)(void *);
};

static struct plugin load(const char *file, int flags) {
    void *handle = dlopen(file, RTLD_NOW | flags);
    if (handle == NULL)
        fprintf(stderr, "%s\n", dlerror());
    CHECK(handle != NULL);
    struct plugin plugin;
    *(void **)&plugin.malloc = dlsym(handle, "plugin_malloc");
    *(void **)&plugin.free = dlsym(handle, "plugin_free");
    CHECK(plugin.malloc && plugin.free);
    return plugin;
}

static uint64_t live(void) {
    GruyereStats stats = {.size = sizeof stats};
    return gruyere_stats && gruyere_stats(0, &stats) == 0 ? stats.live : 0;
}

int main(int count, char **arguments) {
    CHECK(count == 4);
    const char *scene = arguments[1];
    void *block, *other;
    if (strcmp(scene, "local") == 0) {
        struct plugin plugin = load(arguments[2], RTLD_LOCAL);
        CHECK(plugin.malloc(&block, 1 << 20) == 0 && live() == 1 << 20);
        CHECK(plugin.free(block) == 0 && live() == 0);
        CHECK(plugin.free(NULL) == 0);
    } else if (strcmp(scene, "deep") == 0) {
        struct plugin plugin = load(arguments[2], RTLD_LOCAL);
        struct plugin deep = load(arguments[3], RTLD_LOCAL | RTLD_DEEPBIND);
        CHECK(plugin.malloc(&block, 1 << 20) == 0 && live() == 1 << 20);
        CHECK(deep.malloc(&other, 1 << 20) == 0 && live() == 1 << 20);
        /* Ours is refused by the runtime, theirs is passed on. */
        CHECK(deep.free(block) != 0 && live() == 1 << 20);
        CHECK(plugin.free(other) == 0 && plugin.free(block) == 0 && live() == 0);
        CHECK(gruyere_validate() == 0);
    } else if (strcmp(scene, "two") == 0) {
        struct plugin one = load(arguments[2], RTLD_LOCAL);
        struct plugin two = load(arguments[3], RTLD_LOCAL);
        for (int i = 0; i < 3; i++) {
            CHECK(one.malloc(&block, 4096) == 0 && block != (void *)0x1111000);
            CHECK(two.malloc(&other, 4096) == 0 && other == (void *)0x1111000);
            CHECK(two.free(other) == 0 && two.free((void *)1) == 17);
            CHECK(one.free(block) == 0);
        }
    } else if (strcmp(scene, "driver") == 0) {
        /* As a runtime that is linked in statically does it. */
        CHECK(dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL) != NULL);
    } else {
        return 2;
    }
    puts("kept");
    return 0;
}
