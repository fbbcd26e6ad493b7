#include "output.h"

#include <stdlib.h>
#include <string.h>

enum { MOST = 1024, GRANULE = 2 << 20 };

struct rule {
    char name[96], answer[8], detail[512];
};
struct fact {
    char name[96], text[512];
    int is_number;
};
struct sample {
    char call[64];
    double bytes, mappings, count, median, p99, max;
};
struct ended {
    char name[64], how[128];
};

static struct rule rules[MOST];
static struct fact facts[MOST];
static struct sample samples[MOST];
static struct ended ended[MOST];
static int rule_count, fact_count, sample_count, ended_count;
static char pending_rule[96];

static char *word(char **rest) {
    char *start = *rest ? *rest : "", *end = *rest ? strchr(*rest, '\t') : NULL;
    if (end) *end = 0;
    *rest = end ? end + 1 : NULL;
    return start;
}

#define COPY(to, from) snprintf(to, sizeof to, "%s", from)

static void add_rule(const char *name, const char *answer, const char *detail) {
    if (rule_count == MOST) return;
    COPY(rules[rule_count].name, name);
    COPY(rules[rule_count].answer, answer);
    COPY(rules[rule_count++].detail, detail);
}

void take_line(char *line) {
    char *rest = line, *kind = word(&rest);
    if (!strcmp(kind, "pending")) {
        COPY(pending_rule, word(&rest));
    } else if (!strcmp(kind, "rule")) {
        char *name = word(&rest), *answer = word(&rest);
        if (!strcmp(pending_rule, name)) pending_rule[0] = 0;
        add_rule(name, answer, word(&rest));
    } else if ((!strcmp(kind, "fact") || !strcmp(kind, "number")) && fact_count < MOST) {
        struct fact *fact = &facts[fact_count++];
        fact->is_number = *kind == 'n';
        COPY(fact->name, word(&rest));
        COPY(fact->text, word(&rest));
    } else if (!strcmp(kind, "price") && sample_count < MOST) {
        struct sample *sample = &samples[sample_count++];
        COPY(sample->call, word(&rest));
        double *numbers[] = {&sample->bytes,  &sample->mappings, &sample->count,
                             &sample->median, &sample->p99,      &sample->max};
        for (int i = 0; i < 6; i++) *numbers[i] = atof(word(&rest));
    }
}

void end_of_case(const char *name, const char *how, int died) {
    if (how && pending_rule[0]) add_rule(pending_rule, died ? "false" : "unknown", how);
    /* Dying of a rule is an answer; anything else is a case that did not get to its end. */
    if (how && !(died && pending_rule[0]) && ended_count < MOST) {
        COPY(ended[ended_count].name, name);
        COPY(ended[ended_count++].how, how);
    }
    pending_rule[0] = 0;
}

int broken_cases(void) { return ended_count; }

static void string(FILE *to, const char *text) {
    fputc('"', to);
    for (; *text; text++) {
        unsigned char letter = (unsigned char)*text;
        if (letter == '"' || letter == '\\') fputc('\\', to);
        if (letter < 32 || letter > 126) fprintf(to, "\\u%04x", letter);
        else fputc(letter, to);
    }
    fputc('"', to);
}

/* median = by_call + by_mapping * mappings + by_page * pages, fitted so that each sample's error
 * counts by its share; nothing negative. */
struct fit {
    double by_call, by_mapping, by_page;
};

static int solve(double matrix[3][4], const int *used, double *found) {
    for (int column = 0; column < 3; column++) {
        if (!used[column]) continue;
        int pivot = -1;
        for (int row = column; row < 3; row++)
            if (used[row] && (pivot < 0 || matrix[row][column] * matrix[row][column] >
                                               matrix[pivot][column] * matrix[pivot][column]))
                pivot = row;
        double *a = matrix[column], *b = matrix[pivot];
        for (int i = 0; i < 4; i++) {
            double swapped = a[i];
            a[i] = b[i];
            b[i] = swapped;
        }
        if (a[column] * a[column] < 1e-18) return 0;
        for (int row = 0; row < 3; row++) {
            if (row == column || !used[row]) continue;
            double factor = matrix[row][column] / a[column];
            for (int i = 0; i < 4; i++) matrix[row][i] -= factor * a[i];
        }
    }
    for (int i = 0; i < 3; i++) found[i] = used[i] ? matrix[i][3] / matrix[i][i] : 0;
    return 1;
}

static struct fit fitted(const char *call) {
    int used[3] = {1, 0, 0};
    double found[3] = {0, 0, 0}, first_pages = -1, first_mappings = -1;
    /* What never varies is part of the call. */
    for (int i = 0; i < sample_count; i++) {
        if (strcmp(samples[i].call, call)) continue;
        double pages = samples[i].bytes / GRANULE, mappings = samples[i].mappings;
        if (first_pages < 0) first_pages = pages, first_mappings = mappings;
        if (mappings != first_mappings) used[1] = 1;
        if (pages != first_pages) used[2] = 1;
    }
    for (int tries = 0; tries < 3; tries++) {
        double matrix[3][4] = {{0}};
        for (int i = 0; i < sample_count; i++) {
            if (strcmp(samples[i].call, call) || samples[i].median <= 0) continue;
            double row[] = {1, samples[i].mappings, samples[i].bytes / GRANULE, samples[i].median};
            for (int a = 0; a < 3; a++)
                for (int b = 0; b < 4; b++)
                    matrix[a][b] += row[a] * row[b] / (samples[i].median * samples[i].median);
        }
        if (!solve(matrix, used, found)) return (struct fit){0, 0, 0};
        int least = 0;
        for (int i = 1; i < 3; i++)
            if (found[i] < found[least]) least = i;
        if (found[least] >= 0) break;
        used[least] = 0;
        found[least] = 0;
    }
    return (struct fit){found[0], found[1], found[2]};
}

static void write_prices(FILE *to) {
    fprintf(to, "  \"prices\": {\n    \"unit\": \"ns\",\n    \"page_bytes\": %d,\n    \"calls\": {",
            GRANULE);
    for (int i = 0, any = 0; i < sample_count; i++) {
        int seen = 0;
        for (int before = 0; before < i; before++)
            seen |= !strcmp(samples[before].call, samples[i].call);
        if (seen) continue;
        struct fit fit = fitted(samples[i].call);
        fprintf(to, "%s\n      ", any++ ? "," : "");
        string(to, samples[i].call);
        fprintf(to, ": {\"by_call\": %.0f, \"by_mapping\": %.0f, \"by_page\": %.1f, \"samples\": [",
                fit.by_call, fit.by_mapping, fit.by_page);
        for (int j = i, first = 1; j < sample_count; j++) {
            struct sample *it = &samples[j];
            if (strcmp(it->call, samples[i].call)) continue;
            fprintf(to,
                    "%s\n        {\"bytes\": %.0f, \"mappings\": %.0f, \"count\": %.0f, "
                    "\"median\": %.0f, \"p99\": %.0f, \"max\": %.0f}",
                    first ? "" : ",", it->bytes, it->mappings, it->count, it->median, it->p99,
                    it->max);
            first = 0;
        }
        fprintf(to, "]}");
    }
    /* The stand-in's own names (crates/phantom/src/costs.rs): for the first page and mapping that a
     * call covers, each further page, each further mapping. */
    static const struct {
        const char *cost, *call, *more, *mapping;
    } costs[] = {
        {"query", "cuStreamGetId", NULL, NULL},
        {"memory_info", "cuMemGetInfo", NULL, NULL},
        {"pool_create", "cuMemPoolCreate", NULL, NULL},
        {"pool_access", "cuMemPoolSetAccess", NULL, NULL},
        {"pool_hit", "cuMemAllocFromPoolAsync, kept memory", NULL, NULL},
        {"address", "cuMemAddressReserve", NULL, NULL},
        {"create", "cuMemCreate", "create_more", NULL},
        {"map", "cuMemMap", NULL, NULL},
        {"set_access", "cuMemSetAccess", "set_access_more", "set_access_mapping"},
        {"unmap", "cuMemUnmap", "unmap_more", "unmap_mapping"},
        {"release", "cuMemRelease", "release_more", NULL},
        {"alloc", "cuMemAlloc", "alloc_more", NULL},
        {"free", "cuMemFree", "free_more", NULL},
        {"event", "cuEventRecord", NULL, NULL},
        {"synchronize", "cuStreamSynchronize", NULL, NULL},
        {"stream_create", "cuStreamCreate", NULL, NULL},
        {"launch", "cuLaunchKernelEx", NULL, NULL},
        {"graph_launch", "cuGraphLaunch", NULL, NULL},
    };
    fprintf(to, "},\n    \"costs\": {");
    for (unsigned i = 0, any = 0; i < sizeof costs / sizeof *costs; i++) {
        int there = 0;
        for (int j = 0; j < sample_count; j++) there |= !strcmp(samples[j].call, costs[i].call);
        if (!there) continue;
        struct fit fit = fitted(costs[i].call);
        fprintf(to, "%s\n      \"%s\": %.0f", any++ ? "," : "", costs[i].cost,
                fit.by_call + fit.by_mapping + fit.by_page);
        if (costs[i].more) fprintf(to, ",\n      \"%s\": %.0f", costs[i].more, fit.by_page);
        if (costs[i].mapping)
            fprintf(to, ",\n      \"%s\": %.0f", costs[i].mapping, fit.by_mapping);
    }
    fprintf(to, "\n    }\n  }");
}

void write_json(FILE *to, const char *date, double seconds) {
    fprintf(to, "{\n  \"version\": 1,\n  \"facts\": {\n    \"date\": ");
    string(to, date);
    fprintf(to, ",\n    \"seconds\": %.1f", seconds);
    for (int i = 0; i < fact_count; i++) {
        fprintf(to, ",\n    ");
        string(to, facts[i].name);
        fputs(": ", to);
        if (facts[i].is_number) fputs(facts[i].text, to);
        else string(to, facts[i].text);
    }
    fprintf(to, "\n  },\n  \"rules\": [");
    for (int i = 0; i < rule_count; i++) {
        fprintf(to, "%s\n    {\"name\": ", i ? "," : "");
        string(to, rules[i].name);
        fprintf(to, ", \"answer\": \"%s\", \"detail\": ", rules[i].answer);
        string(to, rules[i].detail);
        fputc('}', to);
    }
    fprintf(to, "\n  ],\n");
    write_prices(to);
    fprintf(to, ",\n  \"broken_cases\": [");
    for (int i = 0; i < ended_count; i++) {
        fprintf(to, "%s\n    {\"name\": ", i ? "," : "");
        string(to, ended[i].name);
        fputs(", \"how\": ", to);
        string(to, ended[i].how);
        fputc('}', to);
    }
    fprintf(to, "]\n}\n");
}

void write_summary(FILE *to, double seconds) {
    for (int i = 0; i < fact_count; i++)
        fprintf(to, "          %-52s %s\n", facts[i].name, facts[i].text);
    for (int i = 0; i < rule_count; i++)
        fprintf(to, "%-8s  %-52s %s\n", rules[i].answer, rules[i].name, rules[i].detail);
    fprintf(to, "\n%-40s %8s %6s %12s %12s %12s\n", "microseconds a call", "MiB", "maps", "median",
            "99%", "max");
    for (int i = 0; i < sample_count; i++)
        fprintf(to, "%-40s %8.0f %6.0f %12.2f %12.2f %12.2f\n", samples[i].call,
                samples[i].bytes / (1 << 20), samples[i].mappings, samples[i].median / 1e3,
                samples[i].p99 / 1e3, samples[i].max / 1e3);
    int counts[3] = {0, 0, 0};
    for (int i = 0; i < rule_count; i++)
        counts[rules[i].answer[0] == 't' ? 0 : rules[i].answer[0] == 'f' ? 1 : 2]++;
    fprintf(to, "\n%d rules: %d true, %d false, %d unknown; %d prices; %.1f s\n", rule_count,
            counts[0], counts[1], counts[2], sample_count, seconds);
    for (int i = 0; i < ended_count; i++)
        fprintf(to, "BROKEN: %s: %s\n", ended[i].name, ended[i].how);
}
