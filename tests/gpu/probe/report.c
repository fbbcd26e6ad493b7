#include "report.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static int file = -1;

void report_to(int to) { file = to; }

/* One line is one write: what was told before a crash has been told. */
static void line(const char *format, ...) __attribute__((format(printf, 1, 2)));
static void line(const char *format, ...) {
    char text[1024];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(text, sizeof text - 1, format, arguments);
    va_end(arguments);
    if (length < 0) return;
    if ((size_t)length > sizeof text - 2) length = sizeof text - 2;
    text[length++] = '\n';
    if (write(file, text, (size_t)length) != length) _exit(4);
}

#define DETAIL(format)                                  \
    char detail[512];                                   \
    va_list arguments;                                  \
    va_start(arguments, format);                        \
    vsnprintf(detail, sizeof detail, format, arguments); \
    va_end(arguments)

void rule(const char *name, enum answer answer, const char *format, ...) {
    static const char *const words[] = {"unknown", "false", "true"};
    DETAIL(format);
    line("rule\t%s\t%s\t%s", name, words[answer], detail);
}

void pending(const char *name) { line("pending\t%s", name); }

void fact(const char *name, const char *format, ...) {
    DETAIL(format);
    line("fact\t%s\t%s", name, detail);
}

void fact_number(const char *name, double value) { line("number\t%s\t%.9g", name, value); }

static int by_size(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

void price(const char *call, size_t bytes, unsigned mappings, double *times, unsigned count) {
    if (count == 0) return;
    qsort(times, count, sizeof *times, by_size);
    unsigned p99 = (count * 99 + 99) / 100 - 1;
    line("price\t%s\t%zu\t%u\t%u\t%.0f\t%.0f\t%.0f", call, bytes, mappings, count, times[count / 2],
         times[p99], times[count - 1]);
}
