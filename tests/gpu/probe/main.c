/* What Gruyère must know of a real driver, in about a minute, with nothing but libcuda (README.md):
 *
 *     cc -O2 -o probe tests/gpu/probe/[a-z]*.c -ldl && ./probe --json probe.json
 *
 * `gruyere doctor --gpu` has it inside (crates/cli/build.rs). Each case runs in a process of its
 * own and under a limit of time, so a crash or a hang is an answer. */
#include "cases.h"
#include "driver.h"
#include "output.h"
#include "report.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

struct group {
    const char *name;
    void (*run)(int);
    /* The case is run with each number below this. */
    int times;
    /* Seconds after which it is taken for hung. */
    int limit;
    /* Takes virtual memory management: left out on a device without. */
    int takes_mappings;
};

/* The rules that decide most come first. */
static const struct group groups[] = {
    {"facts", case_facts, 1, 30, 0},
    {"in_capture", case_in_capture, 3, 20, 0},
    {"beside_capture", case_beside_capture, BESIDE_CAPTURE, 20, 1},
    {"destroyed_stream", case_destroyed_stream, DESTROYED_STREAM, 20, 0},
    {"reservations", case_reservations, 1, 20, 1},
    {"mappings", case_mappings, 1, 20, 1},
    {"contents", case_contents, 1, 20, 1},
    {"alias_copies", case_alias_copies, 1, 20, 1},
    {"alias_kernels", case_alias_kernels, 1, 40, 1},
    {"alias_tma", case_alias_tma, 1, 20, 1},
    {"alias_dependent", case_alias_dependent, 1, 20, 1},
    {"handle_types", case_handle_types, 1, 20, 1},
    {"no_access", case_no_access, NO_ACCESS, 20, 1},
    {"waits", case_waits, 2, 40, 1},
    {"slower", case_slower, 1, 30, 1},
    {"prices_small", case_prices_small, 1, 30, 0},
    {"prices_memory", case_prices_memory, 1, 40, 0},
    {"prices_mappings", case_prices_mappings, 1, 60, 1},
    {"many", case_many, 1, 60, 1},
    {"address_space", case_address_space, 1, 30, 1},
};
enum { GROUPS = sizeof groups / sizeof *groups };

/* A case that does not stop when it is killed sits in the driver: it is left behind. */
#define GRACE_NS 5e9

/* Reads the case's lines until it ends; how it ended, NULL where all was well, and whether it died
 * of a crash or a hang. */
static const char *follow(pid_t child, int from, int limit, int *died) {
    static char how[128];
    static char text[65536];
    size_t length = 0;
    double deadline = now() + limit * 1e9;
    int killed = 0;
    for (;;) {
        double left = deadline - now();
        struct pollfd poll_of = {from, POLLIN, 0};
        int ready = left > 0 ? poll(&poll_of, 1, (int)(left / 1e6) + 1) : 0;
        if (ready < 0 && errno == EINTR) continue;
        if (ready > 0) {
            ssize_t got = read(from, text + length, sizeof text - 1 - length);
            if (got <= 0) break;
            length += (size_t)got;
            text[length] = 0;
            char *start = text, *end;
            for (; (end = strchr(start, '\n')); start = end + 1) {
                *end = 0;
                take_line(start);
            }
            length -= (size_t)(start - text);
            memmove(text, start, length);
        } else if (now() >= deadline) {
            if (killed) break;
            killed = 1;
            kill(child, SIGKILL);
            deadline = now() + GRACE_NS;
        }
    }
    int status = 0;
    *died = 1;
    double until = now() + GRACE_NS;
    while (waitpid(child, &status, WNOHANG) == 0) {
        if (now() > until) {
            snprintf(how, sizeof how, "hung for %d s, and cannot be killed", limit);
            return how;
        }
        usleep(1000);
    }
    if (killed) snprintf(how, sizeof how, "hung for %d s", limit);
    else if (WIFSIGNALED(status))
        snprintf(how, sizeof how, "killed by signal %d (%s)", WTERMSIG(status),
                 strsignal(WTERMSIG(status)));
    else *died = 0;
    if (*died) return how;
    if (!WEXITSTATUS(status)) return NULL;
    snprintf(how, sizeof how, "gave up with exit code %d: stderr says at which call",
             WEXITSTATUS(status));
    return how;
}

/* A process of its own, which ends with this one: nothing of the probe outlives who ended it. */
static pid_t fork_with_us(void) {
    pid_t parent = getpid(), child = fork();
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent) _exit(5);
    }
    return child;
}

static void run(const struct group *group, int number, int most) {
    int ends[2], died = 0;
    char name[64];
    snprintf(name, sizeof name, group->times > 1 ? "%s.%d" : "%s", group->name, number);
    if (pipe(ends)) {
        end_of_case(name, strerror(errno), 0);
        return;
    }
    fprintf(stderr, "[%s]\n", name);
    pid_t child = fork_with_us();
    if (child == 0) {
        close(ends[0]);
        report_to(ends[1]);
        /* One that cannot be killed must not keep the reader of the document waiting. */
        int nowhere = open("/dev/null", O_WRONLY);
        if (nowhere >= 0) dup2(nowhere, STDOUT_FILENO);
        driver_enter();
        group->run(number);
        /* What the driver does at exit is no case of ours. */
        _exit(0);
    }
    close(ends[1]);
    const char *how = child < 0 ? strerror(errno)
                                : follow(child, ends[0], most < group->limit ? most : group->limit,
                                         &died);
    end_of_case(name, how, died);
    close(ends[0]);
}

enum device { NONE, WITHOUT_MAPPINGS = 20, WHOLE };

/* Whether there is a device that can be used, asked in a process of its own: this one must not have
 * a context that others inherit. */
static enum device device(void) {
    pid_t child = fork_with_us();
    if (child == 0) {
        driver_enter();
        _exit(attribute(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)
                  ? WHOLE
                  : WITHOUT_MAPPINGS);
    }
    int status = 0;
    if (child < 0 || waitpid(child, &status, 0) != child || !WIFEXITED(status)) return NONE;
    /* What `must` ends with is neither. */
    return WEXITSTATUS(status) == WHOLE || WEXITSTATUS(status) == WITHOUT_MAPPINGS
               ? (enum device)WEXITSTATUS(status)
               : NONE;
}

static int usage(FILE *to, int code) {
    fprintf(
        to,
        "usage: probe [--json FILE] [--library FILE] [--only NAME] [--limit SECONDS] [--list]\n\n"
        "Asks the first CUDA device's driver what rules it has and what its calls cost. The "
        "summary goes to stderr, one JSON document to FILE\n"
        "(without --json: to stdout). Each case has a limit of time of its own; --limit lowers "
        "them all. Exits with 0 where every case ran to its end, 1 where one did not, 2 where "
        "there is no device.\n");
    return code;
}

int main(int count, char **words) {
    const char *json = NULL, *library = NULL, *only = NULL, *limit = NULL;
    for (int i = 1; i < count; i++) {
        if (!strcmp(words[i], "--help")) return usage(stdout, 0);
        if (!strcmp(words[i], "--list")) {
            for (int g = 0; g < GROUPS; g++) puts(groups[g].name);
            return 0;
        }
        const char **value = !strcmp(words[i], "--json")      ? &json
                             : !strcmp(words[i], "--library") ? &library
                             : !strcmp(words[i], "--only")    ? &only
                             : !strcmp(words[i], "--limit")   ? &limit
                                                              : NULL;
        if (!value || ++i == count) return usage(stderr, 2);
        *value = words[i];
    }
    int most = limit ? atoi(limit) : 1 << 20;
    if (most <= 0) {
        fprintf(stderr, "probe: --limit takes whole seconds, 1 or more, not %s\n", limit);
        return 2;
    }
    const char *failed = driver_open(library);
    if (failed) {
        fprintf(stderr, "probe: no CUDA driver: %s\n", failed);
        return 2;
    }
    enum device usable = device();
    if (usable == NONE) {
        fprintf(stderr, "probe: the CUDA driver is there and no device of it can be used: the line "
                        "above says what it answered\n");
        return 2;
    }
    int known = !only;
    for (int g = 0; g < GROUPS && only; g++) known |= !strcmp(groups[g].name, only);
    if (!known) {
        fprintf(stderr, "probe: no case is called %s; --list names them\n", only);
        return 2;
    }
    /* Opened before the minute that fills it. */
    FILE *to = json ? fopen(json, "w") : stdout;
    if (!to) {
        fprintf(stderr, "probe: %s: %s\n", json, strerror(errno));
        return 2;
    }
    char date[32];
    time_t today = time(NULL);
    strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%SZ", gmtime(&today));
    double began = now();
    for (int g = 0; g < GROUPS; g++) {
        if (only && strcmp(groups[g].name, only)) continue;
        if (groups[g].takes_mappings && usable == WITHOUT_MAPPINGS) {
            fprintf(stderr, "[%s] left out: the device has no virtual memory management\n",
                    groups[g].name);
            continue;
        }
        for (int number = 0; number < groups[g].times; number++) run(&groups[g], number, most);
    }
    double seconds = (now() - began) / 1e9;
    write_summary(stderr, seconds);
    write_json(to, date, seconds);
    if (fflush(to)) {
        fprintf(stderr, "probe: %s: %s\n", json ? json : "stdout", strerror(errno));
        return 2;
    }
    return broken_cases() ? 1 : 0;
}
