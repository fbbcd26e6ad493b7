/* What the cases told, as one JSON document and as lines to read. */
#ifndef PROBE_OUTPUT_H
#define PROBE_OUTPUT_H

#include <stdio.h>

/* One line of a case's process. */
void take_line(char *line);
/* How a case's process ended; NULL: as it should. A rule that it had begun to ask and not answered
 * is false where the process died of it (a crash, a hang), and unknown where the case gave up
 * because another call failed. */
void end_of_case(const char *name, const char *how, int died);
/* The whole; `seconds` is what it took, `date` when it was. */
void write_json(FILE *to, const char *date, double seconds);
void write_summary(FILE *to, double seconds);
/* How many cases ended other than they should. */
int broken_cases(void);

#endif
