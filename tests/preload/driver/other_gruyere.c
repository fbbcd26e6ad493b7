/* A libgruyere.so of another version, whose table is not the one that is understood. TABLE: what it
 * answers. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

static void *replacement(const char *name, void *real, const void *caller) {
    (void)name, (void)real, (void)caller;
    abort();
}

struct door {
    uint32_t version, size;
    void *(*replacement)(const char *, void *, const void *);
};

const struct door *gruyere_driver_door(uint32_t version) {
    static const struct door version_0 = {0, sizeof version_0, replacement};
    static const struct door newer = {2, 4096, replacement};
    static const struct door too_short = {1, 8, replacement};
    static const struct door empty = {1, sizeof empty, NULL};
    const struct door *const tables[] = {NULL, &version_0, &newer, &too_short, &empty};
    (void)version;
    return tables[TABLE];
}
