/* NCCL as ranks.c uses it and nccl.c plays it. */
#ifndef PRELOAD_NCCL_H
#define PRELOAD_NCCL_H

typedef struct {
    unsigned char internal[128];
} ncclUniqueId;
typedef void *ncclComm_t;

int ncclCommInitRank(ncclComm_t *, int, ncclUniqueId, int);
int ncclCommInitRankConfig(ncclComm_t *, int, ncclUniqueId, int, void *);
int ncclCommInitRankScalable(ncclComm_t *, int, int, int, ncclUniqueId *, void *);
int ncclCommInitAll(ncclComm_t *, int, const int *);

/* Byte i of every id. */
#define ID_BYTE(i) ((unsigned char)(7 * (i) + 3))
#define CONFIG ((void *)0x1234)
#define RANK 5
#define IDS 3

#endif
