/* Forks, execs, threads, static constructors and destructors under preload. The first argument
 * names the scene. */
#include "cuda.h"
#include <pthread.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static int child_of(void (*body)(void)) {
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        body();
        exit(0);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child);
    return status;
}

static void *inherited;

static void child_after_use(void) {
    void *block;
    /* What CUDA answers in such a child, and no crash nor a hang. */
    CHECK(cudaMalloc(&block, 1000) != 0);
    CHECK(cudaFree(inherited) != 0);
    CHECK(cudaDeviceSynchronize() != 0);
}

static void fork_after_use(void) {
    OK(cudaMalloc(&inherited, MIB));
    CHECK(child_of(child_after_use) == 0);
    CHECK(live() == MIB);
    OK(cudaFree(inherited));
    CHECK(live() == 0 && gruyere_validate() == 0);
}

static void child_before_use(void) {
    void *block;
    OK(cudaMalloc(&block, MIB));
    CHECK(live() == MIB);
    OK(cudaFree(block));
}

static void fork_before_use(void) {
    CHECK(child_of(child_before_use) == 0);
    child_before_use();
}

static char **own_arguments;

static void exec_itself(void) {
    void *block;
    OK(cudaMalloc(&block, MIB));
    execl(own_arguments[0], own_arguments[0], "once", (char *)NULL);
    CHECK(!"execl returned");
}

static void once(void) { child_before_use(); }

/* A block is freed as its thread ends, after the thread's other clean-up. */
static pthread_key_t key;
static void free_at_the_end(void *block) {
    static _Thread_local int rounds;
    /* Some rounds later, so that thread-locals with destructors are gone. */
    if (rounds++ < 3)
        pthread_setspecific(key, block);
    else
        OK(cudaFree(block));
}
static void *short_life(void *unused) {
    (void)unused;
    void *block;
    OK(cudaMalloc(&block, 5000));
    pthread_setspecific(key, block);
    return NULL;
}
static void *restless(void *unused) {
    for (;;) {
        void *block;
        /* At the end of the process anything may be answered; nothing may crash. */
        if (cudaMalloc(&block, 3000) == 0)
            cudaFree(block);
    }
    return unused;
}

static void threads(void) {
    pthread_t thread[8];
    OK(pthread_key_create(&key, free_at_the_end));
    for (int round = 0; round < 5; round++) {
        for (int i = 0; i < 8; i++)
            OK(pthread_create(&thread[i], NULL, short_life, NULL));
        for (int i = 0; i < 8; i++)
            OK(pthread_join(thread[i], NULL));
    }
    CHECK(live() == 0 && gruyere_validate() == 0);
    /* Two that are still at it when the process ends. */
    for (int i = 0; i < 2; i++)
        OK(pthread_create(&thread[i], NULL, restless, NULL));
    usleep(20000);
}

/* Before main and after it, in the order of static objects of C++. */
static void *early, *late;
static int is_scene_of_constructors(void) {
    static int is = -1;
    if (is < 0) {
        const char *scene = getenv("SCENE");
        is = scene != NULL && strcmp(scene, "constructors") == 0;
    }
    return is;
}
__attribute__((constructor)) static void before_main(void) {
    if (is_scene_of_constructors()) {
        OK(cudaMalloc(&early, 4 * MIB));
        CHECK(early != NULL);
    }
}
__attribute__((destructor)) static void after_main(void) {
    if (is_scene_of_constructors()) {
        void *block;
        OK(cudaFree(early));
        OK(cudaFree(late));
        OK(cudaMalloc(&block, 1000));
        OK(cudaFree(block));
        puts("freed");
    }
}
static void free_in_exit_handler(void) {
    void *block;
    OK(cudaMalloc(&block, 1000));
    OK(cudaFree(block));
}
static void constructors(void) {
    OK(cudaMalloc(&late, 100));
    atexit(free_in_exit_handler);
}

static void no_cuda(void) {}

int main(int count, char **arguments) {
    static const struct {
        const char *name;
        void (*run)(void);
    } scenes[] = {
        {"fork_after_use", fork_after_use},
        {"fork_before_use", fork_before_use},
        {"exec_itself", exec_itself},
        {"once", once},
        {"threads", threads},
        {"constructors", constructors},
        {"no_cuda", no_cuda},
    };
    own_arguments = arguments;
    for (size_t i = 0; i < sizeof scenes / sizeof *scenes; i++)
        if (count > 1 && strcmp(arguments[1], scenes[i].name) == 0) {
            scenes[i].run();
            puts("kept");
            return 0;
        }
    fputs("name a scene\n", stderr);
    return 2;
}
