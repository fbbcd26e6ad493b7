/* The cases of the probe. Each runs in a process of its own, with the device's primary context
 * current. */
#ifndef PROBE_CASES_H
#define PROBE_CASES_H

void case_facts(int);
/* captures.c: the argument is the mode of the capture. */
void case_in_capture(int mode);
void case_beside_capture(int call);
#define BESIDE_CAPTURE 12
/* destroyed.c: the argument is the call. */
void case_destroyed_stream(int call);
#define DESTROYED_STREAM 8
/* mappings.c */
void case_reservations(int);
void case_mappings(int);
void case_handle_types(int);
void case_no_access(int what);
#define NO_ACCESS 3
/* contents.c */
void case_contents(int);
void case_alias_copies(int);
void case_alias_kernels(int);
void case_alias_tma(int);
void case_alias_dependent(int);
/* waits.c: the argument is what the device is busy with: 0 a kernel, 1 copies. */
void case_waits(int what);
void case_slower(int);
/* prices.c */
void case_prices_mappings(int);
void case_prices_memory(int);
void case_prices_small(int);
/* many.c */
void case_many(int);
void case_address_space(int);

#endif
