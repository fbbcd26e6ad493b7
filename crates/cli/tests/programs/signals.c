// Tells which signals come, until SIGUSR2 ends it with code 5. With an argument it first sends
// SIGUSR1 to its process group.
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

int main(int count, char **words) {
    (void)words;
    sigset_t all;
    sigfillset(&all);
    sigdelset(&all, SIGTSTP);
    sigdelset(&all, SIGCONT);
    sigprocmask(SIG_SETMASK, &all, NULL);
    setvbuf(stdout, NULL, _IOLBF, 0);
    printf("ready %d\n", (int)getpid());
    if (count > 1) {
        kill(0, SIGUSR1);
    }
    for (;;) {
        int signal = 0;
        if (sigwait(&all, &signal) != 0) {
            return 1;
        }
        if (signal == SIGUSR2) {
            // What would be there twice is there by now.
            usleep(50000);
            sigset_t waiting;
            sigpending(&waiting);
            for (int other = 1; other < SIGRTMAX; other++) {
                if (sigismember(&waiting, other)) {
                    printf("twice %d\n", other);
                }
            }
            return 5;
        }
        printf("got %d\n", signal);
    }
}
