/* Writes past the end of a block of the host's, and loses it. */
#include "cudart.h"

static void lose(void) {
    volatile char *block = malloc(10);
    block[10] = 1;
}

int main(void) {
    void *pointer;
    lose();
    OK(cudaMalloc(&pointer, 100));
    OK(cudaFree(pointer));
    return 0;
}
