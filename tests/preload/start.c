/* A small program that starts, allocates and ends, in the way that its argument says.
 *
 *     start WAY
 *
 * It allocates before main and frees after it, too. Ends with 0 where everything was as it should
 * be. */
#include "cudart.h"
#include <pthread.h>
#include <stdbool.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static void *early, *late;
static bool quiet;

/* Exit is not the place for exit(). */
static void must(cudaError_t code, const char *what) {
    if (code != 0 && !quiet) {
        fprintf(stderr, "start: %s = %d\n", what, code);
        _exit(1);
    }
}

__attribute__((constructor)) static void before_main(void) {
    must(cudaMalloc(&early, 4096), "cudaMalloc before main");
}

__attribute__((destructor)) static void after_main(void) {
    must(cudaFree(early), "cudaFree of what was allocated before main");
    must(cudaFree(late), "cudaFree after main");
    void *last = NULL;
    must(cudaMalloc(&last, 512), "cudaMalloc after main");
    must(cudaFree(last), "cudaFree of what was allocated after main");
}

static void *allocate_for_ever(void *unused) {
    (void)unused;
    for (;;) {
        void *block = NULL;
        /* The process may be gone at any moment; what is refused then is nobody's fault. */
        if (cudaMallocAsync(&block, 1 << 16, 0) == 0) cudaFreeAsync(block, 0);
        if (cudaMalloc(&block, 100) == 0) cudaFree(block);
    }
    return NULL;
}

static void *leave(void *unused) {
    (void)unused;
    exit(0);
}

static void *a_while(void *unused) {
    (void)unused;
    void *block;
    must(cudaMalloc(&block, 1 << 20), "cudaMalloc in a thread");
    must(cudaFree(block), "cudaFree in a thread");
    return NULL;
}

int main(int count, char **arguments) {
    CHECK(count == 2);
    void *block, *other;
    cudaStream_t stream;
    OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    OK(cudaMalloc(&block, 1 << 20));
    OK(cudaMemset(block, 7, 100));
    char byte = 0;
    OK(cudaMemcpy(&byte, block, 1, cudaMemcpyDeviceToHost));
    CHECK(byte == 7);
    OK(cudaMallocAsync(&other, 3 << 20, stream));
    OK(cudaFreeAsync(other, stream));
    OK(cudaFree(block));
    OK(cudaMalloc(&late, 1 << 21));
    pthread_t thread;
    switch (atoi(arguments[1])) {
    case 0: /* as most programs end */
        OK(cudaStreamDestroy(stream));
        return 0;
    case 1: /* by a thread */
        CHECK(pthread_create(&thread, NULL, leave, NULL) == 0);
        pause();
        return 1;
    case 2: /* at once */
        _exit(0);
    case 3: /* with much left over */
        for (int i = 0; i < 100; i++) OK(cudaMalloc(&block, 1 << (i % 24)));
        exit(0);
    case 4: /* while threads allocate */
        for (int i = 0; i < 3; i++)
            CHECK(pthread_create(&thread, NULL, allocate_for_ever, NULL) == 0);
        usleep(200);
        quiet = true;
        return 0;
    case 5: /* with threads that came and went */
        for (int i = 0; i < 8; i++) {
            CHECK(pthread_create(&thread, NULL, a_while, NULL) == 0);
            CHECK(pthread_join(thread, NULL) == 0);
        }
        return 0;
    case 6: { /* after a child, which has no CUDA */
        pid_t child = fork();
        if (child == 0) {
            CHECK(cudaMalloc(&block, 100) != 0);
            quiet = true;
            exit(0);
        }
        int status;
        CHECK(waitpid(child, &status, 0) == child && status == 0);
        return 0;
    }
    case 7: /* with the device reset */
        OK(cudaDeviceReset());
        early = late = NULL;
        return 0;
    case 8: /* without exit handlers */
        quick_exit(0);
    case 9: /* the main thread goes first */
        CHECK(pthread_create(&thread, NULL, a_while, NULL) == 0);
        pthread_exit(NULL);
    }
    return 2;
}
