/* A library that looks functions up: linked to the program, or opened privately with libcuda as its
 * own dependency. */
#include "lookups.h"

void own_function(void) {}

void look_from_library(const char *who, char *out, size_t room) {
    look(who, "RTLD_DEFAULT", RTLD_DEFAULT, out, room);
    look(who, "RTLD_NEXT", RTLD_NEXT, out, room);
}

#ifdef AT_THE_EDGES
static char text[1 << 16];

__attribute__((constructor)) static void before_main(void) {
    look_from_library("constructor", text, sizeof text);
    fputs(text, stdout);
    fflush(stdout);
}

__attribute__((destructor)) static void after_main(void) {
    text[0] = 0;
    look_from_library("destructor", text, sizeof text);
    fputs(text, stdout);
    fflush(stdout);
}
#endif
