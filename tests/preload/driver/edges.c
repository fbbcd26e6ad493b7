/* Allocations before main and after the exit handlers, a process that forks and one that executes
 * itself. */
#define STATIC_RUNTIME
#include "driver.h"
#include <sys/wait.h>
#include <unistd.h>

static CUdeviceptr early, late;

__attribute__((constructor)) static void before_main(void) {
    driver_start();
    OK(cuMemAlloc(&early, 3 << 20));
}

__attribute__((destructor)) static void after_main(void) {
    CUdeviceptr more;
    OK(cuMemFree(early));
    OK(cuMemFree(late));
    OK(cuMemAlloc(&more, 4096));
    OK(cuMemFree(more));
    puts("freed");
}

int main(int argc, char **argv) {
    CUdeviceptr of_child;
    OK(cuMemAlloc(&late, 100));
    pid_t child = fork();
    if (child == 0) {
        /* A forked child has no CUDA: the driver's own answer, and no crash. */
        CHECK(cuMemAlloc(&of_child, 4096) != 0);
        CHECK(cuMemFree(late) != 0);
        if (argc == 1) execv("/proc/self/exe", (char *[]){argv[0], "again", NULL});
        _exit(0);
    }
    int status = 1;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    puts("kept");
    return 0;
}
