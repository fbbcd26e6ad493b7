// Takes blocks of 64 MiB through the library that is preloaded, and frees some: device_memory TAKE FREE [again|kill].
#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

int main(int count, char **words) {
    void *(*take)(ssize_t, int, void *);
    void (*give)(void *, ssize_t, int, void *);
    *(void **)&take = dlsym(RTLD_DEFAULT, "gruyere_malloc");
    *(void **)&give = dlsym(RTLD_DEFAULT, "gruyere_free");
    if (count < 3 || !take || !give) {
        fprintf(stderr, "the library is not here\n");
        return 1;
    }
    if (count > 3 && strcmp(words[3], "again") == 0) {
        pid_t child = fork();
        if (child == 0) {
            execl(words[0], words[0], words[1], words[2], (char *)NULL);
            _exit(1);
        }
        int status = 1;
        if (waitpid(child, &status, 0) != child || status != 0) {
            return 1;
        }
    }
    void *blocks[16];
    int taken = atoi(words[1]), given = atoi(words[2]);
    for (int i = 0; i < taken; i++) {
        blocks[i] = take(64 << 20, 0, NULL);
        if (!blocks[i]) {
            return 2;
        }
    }
    for (int i = 0; i < given; i++) {
        give(blocks[i], 64 << 20, 0, NULL);
    }
    if (count > 3 && strcmp(words[3], "kill") == 0) {
        raise(SIGKILL);
    }
    return 0;
}
