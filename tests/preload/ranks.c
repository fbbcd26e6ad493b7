/* Makes communicators of argv[2] ranks by the function of NCCL's that argv[1] names. */
#include "cuda.h"
#include "nccl.h"
#include <string.h>

int main(int count, char **arguments) {
    ncclUniqueId id;
    ncclComm_t made = NULL;
    void *block;
    int ranks, list[1] = {RANK};
    CHECK(count == 3);
    ranks = atoi(arguments[2]);
    for (int i = 0; i < 128; i++) id.internal[i] = ID_BYTE(i);
    OK(cudaMalloc(&block, 1000));
    if (strcmp(arguments[1], "ncclCommInitRank") == 0)
        OK(ncclCommInitRank(&made, ranks, id, RANK));
    else if (strcmp(arguments[1], "ncclCommInitRankConfig") == 0)
        OK(ncclCommInitRankConfig(&made, ranks, id, RANK, CONFIG));
    else if (strcmp(arguments[1], "ncclCommInitRankScalable") == 0)
        OK(ncclCommInitRankScalable(&made, ranks, RANK, IDS, &id, CONFIG));
    else
        OK(ncclCommInitAll(&made, ranks, list));
    CHECK(made == (void *)&made);
    OK(cudaFree(block));
    puts("kept");
    return 0;
}
