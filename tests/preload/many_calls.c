/* Mallocs and frees as many as the argument says, with some hundred blocks live, of all sizes and
 * both kinds: to be counted. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

int cudaMalloc(void **, size_t);
int cudaFree(void *);
int cudaMallocAsync(void **, size_t, void *);
int cudaFreeAsync(void *, void *);

#define LIVE 512

int main(int count, char **arguments) {
    static void *blocks[LIVE];
    long calls = count > 1 ? atol(arguments[1]) : 0;
    uint64_t state = 42;
    for (long call = 0; call < calls; call++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        void **block = &blocks[state >> 33 & (LIVE - 1)];
        /* From some bytes to 16 MiB, by doublings. */
        size_t bytes = (state >> 20 & 1023) + ((size_t)1 << (state >> 50 & 15) << 9);
        int is_async = state >> 60 & 1;
        int error;
        if (*block != NULL) {
            error = is_async ? cudaFreeAsync(*block, NULL) : cudaFree(*block);
            *block = NULL;
        } else {
            error = is_async ? cudaMallocAsync(block, bytes, NULL) : cudaMalloc(block, bytes);
        }
        if (error != 0)
            return 1;
    }
    printf("%ld calls\n", calls);
    return 0;
}
