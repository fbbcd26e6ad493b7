/* A library that uses the CUDA runtime that it is linked with. */
#include "cuda.h"

int plugin_malloc(void **out, size_t bytes) { return cudaMalloc(out, bytes); }
int plugin_free(void *pointer) { return cudaFree(pointer); }
int plugin_device(void) {
    int device = -1;
    return cudaGetDevice(&device) == 0 ? device : -1;
}
