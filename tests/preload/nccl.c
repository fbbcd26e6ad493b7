/* Plays NCCL: says on stderr that it was called, and answers 0 where every argument has come as
 * ranks.c passed it. */
#include "nccl.h"
#include <stdio.h>

static int answer(ncclComm_t *out, int ranks, const ncclUniqueId *id, int fine) {
    for (int i = 0; i < 128; i++) fine = fine && id->internal[i] == ID_BYTE(i);
    fprintf(stderr, "NCCL makes %d\n", ranks);
    *out = out;
    return !fine;
}

int ncclCommInitRank(ncclComm_t *out, int ranks, ncclUniqueId id, int rank) {
    return answer(out, ranks, &id, rank == RANK);
}

int ncclCommInitRankConfig(ncclComm_t *out, int ranks, ncclUniqueId id, int rank, void *config) {
    return answer(out, ranks, &id, rank == RANK && config == CONFIG);
}

int ncclCommInitRankScalable(ncclComm_t *out, int ranks, int rank, int count, ncclUniqueId *ids,
                             void *config) {
    return answer(out, ranks, ids, rank == RANK && count == IDS && config == CONFIG);
}

int ncclCommInitAll(ncclComm_t *out, int devices, const int *list) {
    fprintf(stderr, "NCCL makes %d\n", devices);
    *out = out;
    return list[0] != RANK;
}
