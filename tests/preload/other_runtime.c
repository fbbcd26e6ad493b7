/* Another CUDA runtime, of another version, that answers what only it would. */
#include <stddef.h>

int cudaMalloc(void **out, size_t bytes) {
    *out = bytes ? (void *)0x1111000 : NULL;
    return 0;
}
int cudaFree(void *pointer) { return pointer == (void *)0x1111000 ? 0 : 17; }
int cudaGetDevice(int *device) {
    *device = 5;
    return 0;
}
