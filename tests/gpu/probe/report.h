/* What a case tells, from its process to the program that started it. */
#ifndef PROBE_REPORT_H
#define PROBE_REPORT_H

#include <stddef.h>

enum answer { UNKNOWN, FALSE, TRUE };

/* Where this process's lines go: set once in each case's process. */
void report_to(int file);

/* A rule, and whether this driver has it. The detail says what was seen; no tabs or newlines. */
void rule(const char *name, enum answer answer, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* The next call may be the process's last: if so, that is the answer to this rule (false, with how
 * it ended). */
void pending(const char *name);
/* Something of this machine: a text, a number. */
void fact(const char *name, const char *format, ...) __attribute__((format(printf, 2, 3)));
void fact_number(const char *name, double value);
/* What a call costs: `count` times in nanoseconds, which are sorted here; the bytes that a call
 * covers and the handles mapped there. */
void price(const char *call, size_t bytes, unsigned mappings, double *times, unsigned count);

/* Whether a call was refused, as a rule's answer. */
static inline enum answer is(int so) { return so ? TRUE : FALSE; }

#endif
