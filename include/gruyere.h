/* Gruyere: a CUDA memory allocator for PyTorch with almost no holes.
 * The C interface of libgruyere.so. */

#ifndef GRUYERE_H
#define GRUYERE_H

/* Written by `cargo xtask header` from src/door; do not edit. */

#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

// Alert kind: a request failed with out of memory.
#define GRUYERE_ALERT_OUT_OF_MEMORY 1

// Alert kind: a request fitted nowhere, and the allocator is reclaiming memory for it.
#define GRUYERE_ALERT_RECLAIM 2

// Alert kind: a threshold of `alert:` with the action `callback` is passed.
#define GRUYERE_ALERT_THRESHOLD 3

// The version of [`GruyereStats`] that this header describes.
#define GRUYERE_STATS_VERSION 3

// The version of [`GruyereHistory`] that this header describes.
#define GRUYERE_HISTORY_VERSION 1

// The version of [`GruyereNativeTable`] that this header describes.
#define GRUYERE_NATIVE_VERSION 1

// The pool has live blocks, or a thread is allocating from it.
#define GRUYERE_BUSY -5

// The memory could not be allocated, or the driver did not take it back.
#define GRUYERE_MEMORY -6

// Not possible now: a CUDA graph is being captured, or the device could not be synchronised.
#define GRUYERE_LATER -7

// Success.
#define GRUYERE_OK 0

// The library cannot work in this process; the log says why.
#define GRUYERE_UNAVAILABLE -1

// Invalid argument.
#define GRUYERE_INVALID -2

// A file could not be written.
#define GRUYERE_IO -3

// An invariant is broken.
#define GRUYERE_BROKEN -4

// The version of [`GruyereTorchStats`] that this header describes.
#define GRUYERE_TORCH_STATS_VERSION 1

// The version of [`GruyereSnapshot`] that this header describes.
#define GRUYERE_SNAPSHOT_VERSION 1

// The live blocks of a pool of CUDA graphs at one moment. It holds no device memory.
typedef struct GruyerePoolState GruyerePoolState;

// An alert to the program, in bytes unless noted.
typedef struct GruyereAlert {
  // The kind, `GRUYERE_ALERT_*`.
  uint32_t kind;
  // The device.
  uint32_t device;
  // Bytes requested; 0 for a threshold.
  uint64_t asked;
  // Bytes held at that time.
  uint64_t reserved;
  // Bytes live at that time.
  uint64_t live;
  // Peak of live bytes.
  uint64_t live_peak;
  // Alerts of this kind (for a threshold: of this threshold) on the device so far, this one
  // included.
  uint64_t count;
  // Alerts dropped from the full queue since the last one that `gruyere_next_alert` took.
  uint64_t lost;
  // For a threshold: the value of its metric, in bytes, bytes per second, seconds, a count, or a
  // share from 0 to 1.
  double value;
  // For a threshold: its index in `alert:`, from 0 (`gruyere_alert_threshold`).
  uint64_t threshold;
} GruyereAlert;

// A callback for alerts; `context` is the pointer given to [`gruyere_on_alert`].
typedef void (*GruyereAlertCallback)(const struct GruyereAlert *alert, void *context);

// `cudaStream_t`: 0 and 1 are the legacy default stream, 2 is the calling thread's own.
typedef void *GruyereStream;

// Statistics of a device, in bytes unless noted. Later versions append fields.
typedef struct GruyereStats {
  // In: size of the caller's struct in bytes. Out: number of bytes written.
  uint32_t size;
  // Out: version of the struct in the library.
  uint32_t version;
  // Physical memory of the device.
  uint64_t total_memory;
  // Ceiling on held memory.
  uint64_t limit;
  // Physical memory held.
  uint64_t reserved;
  // Peak of held memory.
  uint64_t reserved_peak;
  // Live blocks, each rounded up to 512 B.
  uint64_t live;
  // Peak of live blocks.
  uint64_t live_peak;
  // Freed by the program, waiting for streams.
  uint64_t pending;
  // Free runs between blocks, free spans included.
  uint64_t arena_free;
  // The largest free run.
  uint64_t largest_free;
  // Memory of slabs.
  uint64_t slab_bytes;
  // Free slots of slabs.
  uint64_t slab_free;
  // Held for CUDA graphs.
  uint64_t captured;
  // Times that requests climbed the reclaim ladder.
  uint64_t retries;
  // Requests that failed with out of memory.
  uint64_t out_of_memories;
  // Frees of addresses at which no live block starts, on all devices.
  uint64_t bad_frees;
  // Events recorded.
  uint64_t events_recorded;
  // Event queries.
  uint64_t events_queried;
  // Live blocks by their requested sizes. First field of version 2.
  uint64_t requested;
  // The largest request that held memory could satisfy once the work on freed memory is done.
  // Where pages can move, whole free pages count wherever they are.
  uint64_t largest_request;
  // The largest request that could be satisfied by growing to the ceiling (other users of the
  // device may have taken some of that memory).
  uint64_t largest_request_growing;
  // 99th percentile of all request sizes so far, within 7%; 0 if the record is off.
  uint64_t request_p99;
  // Times that a low-memory phase returned memory to the device.
  uint64_t low_phase_trims;
  // Bytes returned in low-memory phases.
  uint64_t low_phase_bytes;
  // lost / reserved: the share of held memory that is free and cannot serve.
  double fragmentation;
  // 1 - largest_request / (reserved - live - pending).
  double external_fragmentation;
  // 1 - requested / live.
  double internal_fragmentation;
  // Free memory between live blocks; if typical_request is not 0, free memory that a typical
  // request does not fit into. First field of version 3.
  uint64_t lost;
  // Whole free pages.
  uint64_t idle;
  // 0 if pages can move: lost is then counted by pages. Else the request size by which lost is
  // measured: requests of at most this size make up half of all requested bytes.
  uint64_t typical_request;
  // 1 - live / reserved.
  double unused;
} GruyereStats;

// An event in the history.
typedef struct GruyereHistoryEntry {
  // 0: alloc; 1: free requested; 2: free completed; 3: span allocated from the driver; 4: span
  // returned to the driver; 5: out of memory; 6: pages mapped at this address; 7: pages no
  // longer mapped at this address.
  uint32_t action;
  // The device.
  uint32_t device;
  // Start address; for an out-of-memory, the free bytes that the driver reported.
  uint64_t address;
  // Length in bytes: for a block, the requested size; for an out-of-memory, the requested size
  // rounded up to 512.
  uint64_t bytes;
  // The stream's handle.
  uint64_t stream;
  // Microseconds since 1970.
  uint64_t time;
  // See [`gruyere_history_context`].
  uint64_t context;
  // For a free: the context of the block's allocation, if recorded; else 0.
  uint64_t origin;
} GruyereHistoryEntry;

// The origin of a live block.
typedef struct GruyereOrigin {
  // Start address.
  uint64_t address;
  // See [`gruyere_history_context`].
  uint64_t context;
  // The device.
  uint32_t device;
  // Padding; always 0.
  uint32_t room;
} GruyereOrigin;

// The recorded history. Later versions append fields to each struct: step through the arrays by
// the sizes given here.
typedef struct GruyereHistory {
  // Size of this struct in bytes.
  uint32_t size;
  // Version of this struct.
  uint32_t version;
  // Size of an entry in bytes.
  uint32_t entry_size;
  // Size of an origin in bytes.
  uint32_t origin_size;
  // Entries, ordered by time.
  const struct GruyereHistoryEntry *entries;
  // Number of entries.
  uint64_t entry_count;
  // Origins of the live blocks that were allocated since the start, unordered.
  const struct GruyereOrigin *origins;
  // Number of origins.
  uint64_t origin_count;
  // Number of entries that later ones replaced.
  uint64_t lost;
} GruyereHistory;

// The latest out-of-memory of the process.
typedef struct GruyereOutOfMemory {
  // The device.
  uint32_t device;
  // Out-of-memories on the device so far, this one included.
  uint32_t count;
  // Bytes requested.
  uint64_t asked;
  // Bytes held at that time.
  uint64_t reserved;
  // The ceiling on held bytes.
  uint64_t limit;
  // Free bytes of the device, as the driver reported them; all bits set if it could not.
  uint64_t free;
} GruyereOutOfMemory;

// The calling thread's latest failure.
typedef struct GruyereNativeFailure {
  // The error message, valid until the thread's next failure.
  const char *text;
  // For an out-of-memory: bytes requested.
  uint64_t asked;
  // For an out-of-memory: the ceiling on held bytes.
  uint64_t limit;
  // For an out-of-memory: free bytes of the device, as the driver reported them; 0 if it could
  // not.
  uint64_t free;
} GruyereNativeFailure;

// torch's `c10::MempoolId_t`, a pair passed by value.
typedef struct GruyereMempoolId {
  // Not 0 for pools that graphs create.
  uint64_t first;
  // Not 0 for pools that the user creates.
  uint64_t second;
} GruyereMempoolId;

// A statistic over time.
typedef struct GruyereStat {
  // Current value.
  uint64_t current;
  // Highest value since the last `gruyere_reset_peaks`.
  uint64_t peak;
  // Sum of all increases since the last `gruyere_reset_accumulated`.
  uint64_t allocated;
  // Sum of all decreases since then.
  uint64_t freed;
} GruyereStat;

// The statistics of `torch.cuda.memory_stats`. The arrays are by pool: all, small (blocks of up to
// 1 MiB), large. Later versions append fields.
typedef struct GruyereTorchStats {
  // In: size of the caller's struct in bytes. Out: number of bytes written.
  uint32_t size;
  // Out: version of the struct in the library.
  uint32_t version;
  // Live blocks.
  struct GruyereStat allocation[3];
  // Pieces of memory allocated from the driver: pages, spans or blocks, depending on the
  // backing. Pages of slabs count as small; spans may serve both, and count as large.
  struct GruyereStat segment[3];
  // Live blocks, and freed blocks that wait for streams.
  struct GruyereStat active[3];
  // Free pieces that cannot go back to the driver, since a used piece shares their page or span.
  // Computed at each call of `gruyere_torch_stats`: a peak is the highest value that a call has
  // found.
  struct GruyereStat inactive_split[3];
  // Bytes of `allocation`, each block rounded up to 512.
  struct GruyereStat allocated_bytes[3];
  // Bytes of `segment`.
  struct GruyereStat reserved_bytes[3];
  // Bytes of `active`, each block rounded up to 512.
  struct GruyereStat active_bytes[3];
  // Bytes of `inactive_split`.
  struct GruyereStat inactive_split_bytes[3];
  // Bytes of `active`, as requested.
  struct GruyereStat requested_bytes[3];
  // Times that requests climbed the reclaim ladder, since the last `gruyere_reset_accumulated`.
  uint64_t num_alloc_retries;
  // Requests that failed with out of memory, since then.
  uint64_t num_ooms;
  // Synchronisations of the whole device to reclaim memory, since then.
  uint64_t num_sync_all_streams;
  // Pieces of memory allocated from the driver, since then.
  uint64_t num_device_alloc;
  // Pieces returned to the driver, since then.
  uint64_t num_device_free;
  // Ceiling on held memory, in bytes.
  uint64_t limit;
  // Physical memory of the device, in bytes.
  uint64_t total_memory;
} GruyereTorchStats;

// A contiguous range of held memory: a span, a row of mapped pages, or a block allocated from the
// driver. [`GruyereBlock`]s tile it.
typedef struct GruyereSegment {
  // Start address.
  uint64_t address;
  // Length in bytes.
  uint64_t bytes;
  // torch's id of the capture pool that the segment belongs to; 0 and 0 if none.
  uint64_t pool_first;
  // See `pool_first`.
  uint64_t pool_second;
  // Index of the first block in the snapshot's blocks.
  uint64_t first_block;
  // Number of blocks.
  uint64_t block_count;
  // 1 if the segment serves blocks of up to 1 MiB and none larger; free memory does not matter.
  uint32_t small;
  // 1 if the segment grows and shrinks page by page.
  uint32_t stitched;
} GruyereSegment;

// A piece of a segment.
typedef struct GruyereBlock {
  // Start address.
  uint64_t address;
  // Length in bytes, a multiple of 512.
  uint64_t bytes;
  // Bytes requested by the program; 0 if the block is free.
  uint64_t requested;
  // Handle of the block's stream; for free memory, of the stream that owns it, or 0.
  uint64_t stream;
  // 0: free; 1: live; 2: freed by the program, waiting for streams.
  uint32_t state;
  // Padding; always 0.
  uint32_t room;
} GruyereBlock;

// The memory of a capture pool.
typedef struct GruyerePool {
  // First number of torch's id.
  uint64_t first;
  // Second number of torch's id.
  uint64_t second;
  // Bytes held.
  uint64_t bytes;
  // Of these, bytes of slabs (for blocks of up to 16 KiB).
  uint64_t small;
} GruyerePool;

// The memory layout of a device. Later versions append fields to each struct: step through the
// arrays by the sizes given here.
typedef struct GruyereSnapshot {
  // Size of this struct in bytes.
  uint32_t size;
  // Version of this struct.
  uint32_t version;
  // Size of a segment in bytes.
  uint32_t segment_size;
  // Size of a block in bytes.
  uint32_t block_size;
  // Segments, ordered by address.
  const struct GruyereSegment *segments;
  // Number of segments.
  uint64_t segment_count;
  // Blocks, ordered by segment, then by address.
  const struct GruyereBlock *blocks;
  // Number of blocks.
  uint64_t block_count;
  // Capture pools.
  const struct GruyerePool *pools;
  // Number of capture pools.
  uint64_t pool_count;
  // Held bytes that are mapped nowhere, and so are in no segment.
  uint64_t unmapped;
} GruyereSnapshot;

// An object of torch's that the library keeps.
typedef struct GruyereBoxed {
  // The object; NULL for none.
  void *object;
  // Drops the object. Called once, on any thread, with no lock of the library held.
  void (*drop)(void*);
} GruyereBoxed;

// Decides whether a request of the calling thread on `stream` goes to the filter's pool. Returns 1
// if it does, 0 if not, -1 on failure. Must not unwind.
typedef int (*GruyereFilter)(void *filter, GruyereStream stream);

// [`GruyereHistory`], with the objects behind its context numbers.
typedef struct GruyereNativeHistory {
  // The history.
  struct GruyereHistory *noted;
  // Object of each entry's context; NULL if it has none.
  void *const *entry_contexts;
  // Object of each origin's context; NULL if it has none.
  void *const *origin_contexts;
  // For each entry that is a free: object of the context of the block's allocation; NULL if it
  // has none, and for other entries.
  void *const *entry_origins;
} GruyereNativeHistory;

// Allocates `bytes` on `device` with the allocator `object`, for a request of the calling thread
// on `stream`. Returns NULL if it cannot, and sets `*failed` to 1 if it threw. Must not unwind.
typedef void *(*GruyereGive)(void *object,
                             uint64_t bytes,
                             int device,
                             GruyereStream stream,
                             int *failed);

// Returns memory from [`GruyereGive`] to the allocator `object`, once. Must not unwind.
typedef void (*GruyereTake)(void *object, void *block);

// A segment of a MemPool is new, or about to be freed.
typedef struct GruyereSegmentEvent {
  // 0: the segment is new, and not used yet; 1: it is about to be freed, and still there.
  int is_freed;
  // Its device.
  int device;
  // Its pool.
  struct GruyereMempoolId pool;
  // First byte.
  uint64_t address;
  // Length.
  uint64_t bytes;
} GruyereSegmentEvent;

// Receives events of segments, on the thread that allocates or frees, with no lock of the library
// held. Must not unwind.
typedef void (*GruyereTracker)(const struct GruyereSegmentEvent *event);

// The blocks of a pool that were live before a restore and those that are live after it: their
// addresses, in ascending order. The restore has not touched blocks that are in both.
typedef struct GruyereRestored {
  // Addresses of the blocks that were live.
  const uint64_t *before;
  // Their number.
  size_t before_count;
  // Addresses of the blocks that are live.
  const uint64_t *after;
  // Their number.
  size_t after_count;
} GruyereRestored;

// A thread's place in autograd.
typedef struct GruyereAutograd {
  // torch's number of the thread.
  uint64_t thread;
  // Number of the thread's next node; 0 if the thread creates none.
  uint64_t next;
  // Kind of the node that runs on the thread, equal for all nodes of a kind; 0 if none runs.
  uint64_t kind;
  // Of that node: the thread that created it.
  uint64_t node_thread;
  // Of that node: its number on that thread.
  uint64_t node;
  // Of that node: bytes of its operator's output in the forward, or of the first of several
  // outputs; 0 if unknown.
  uint64_t node_bytes;
  // Of that node: its NUL-terminated name, if requested.
  char name[128];
} GruyereAutograd;

// Fills `origin` for the calling thread, the name only if `is_name_wanted` is not 0. Must not
// unwind or wait.
typedef void (*GruyereAskAutograd)(struct GruyereAutograd *origin, int is_name_wanted);

// A block's memory, as another process opens it.
typedef struct GruyereShared {
  // The memory's name.
  uint8_t name[64];
  // Length of the name in bytes.
  uint32_t size;
  // Offset of the block in the memory, in bytes.
  uint64_t offset;
} GruyereShared;

// The functions of the native door. Codes are 0 or one of the negative ones above; after a
// negative code of a pool function, `failure` returns the reason.
typedef struct GruyereNativeTable {
  // Size of this struct in bytes.
  uint32_t size;
  // Version of this struct.
  uint32_t version;
  // Allocates `size` bytes on `device`, for use in the order of `stream`. Returns NULL for size
  // 0 and on failure. Never throws.
  void *(*malloc)(uint64_t size, int device, GruyereStream stream);
  // Returns 1 if the calling thread's latest failure is an out-of-memory, else 0. It is reported
  // only when `failure` is called.
  int (*is_out_of_memory)(void);
  // Takes the latest failure into `*failure`, and returns its code. An out-of-memory becomes the
  // program's with this call: it is counted, dumped and recorded, and alerts are raised.
  int (*failure)(struct GruyereNativeFailure *failure);
  // See `gruyere_free`.
  void (*free)(void *pointer, ptrdiff_t size, int device, GruyereStream stream);
  // Returns the length of the live block that starts at `pointer`, rounded up to 512 bytes, and
  // writes its device to `*device`. Returns 0 if there is none.
  uint64_t (*block)(void *pointer, int *device);
  // See `gruyere_base_alloc`.
  void *(*base)(void *pointer, size_t *size);
  // See `gruyere_record_stream`.
  void (*record_stream)(void *pointer, GruyereStream stream);
  // See `gruyere_stream_lasts`.
  int (*stream_lasts)(int device, GruyereStream stream);
  // Releases unused memory to the devices: all of it or, for an id other than 0 and 0, that of
  // the pool.
  void (*empty_cache)(struct GruyereMempoolId pool);
  // See `gruyere_memory_fraction`.
  void (*set_fraction)(double fraction, int device);
  // See `gruyere_torch_stats`.
  int (*torch_stats)(int device, struct GruyereTorchStats *stats);
  // See `gruyere_stats`.
  int (*stats)(int device, struct GruyereStats *stats);
  // See `gruyere_reset_peaks`.
  int (*reset_peaks)(int device);
  // See `gruyere_reset_accumulated`.
  int (*reset_accumulated)(int device);
  // As `gruyere_snapshot`; segments of MemPools have their pool's id.
  struct GruyereSnapshot *(*snapshot)(int device);
  // See `gruyere_snapshot_free`.
  void (*snapshot_free)(struct GruyereSnapshot *snapshot);
  // Adds a reference to a pool, and creates the pool if needed.
  int (*pool_create)(int device, struct GruyereMempoolId pool);
  // Routes requests to a pool until `pool_end`: those for which `ask` returns 1; without a
  // filter, those of a capture that begins now. Adds a reference to the pool.
  int (*pool_begin)(int device,
                    struct GruyereMempoolId pool,
                    struct GruyereBoxed filter,
                    GruyereFilter ask);
  // Ends the pool's latest `pool_begin`. Returns 1 if there is none.
  int (*pool_end)(int device, struct GruyereMempoolId pool);
  // Drops a reference to the pool. Returns 1 if there is none.
  int (*pool_release)(int device, struct GruyereMempoolId pool);
  // Returns the number of references to the pool.
  uint32_t (*pool_uses)(int device, struct GruyereMempoolId pool);
  // Sets whether the pool serves other requests before they are out of memory. Returns 1 if
  // there is no such pool.
  int (*pool_on_oom)(int device, struct GruyereMempoolId pool, int wanted);
  // As `gruyere_history_start`; `clear` also drops the boxes.
  int (*history_start)(uint64_t entries, int clear);
  // As `gruyere_history_stop`; also drops all boxes.
  void (*history_stop)(void);
  // Makes `context` the origin of the calling thread's requests and frees. The library keeps it
  // as long as the history refers to it. Returns the value for `context_leave`.
  uint64_t (*context_enter)(struct GruyereBoxed context);
  // Restores the origin from before that `context_enter`.
  void (*context_leave)(uint64_t before);
  // Returns a copy of the history so far, or NULL if there is none. Free it with `history_free`.
  struct GruyereNativeHistory *(*history)(void);
  // Frees a history from `history`.
  void (*history_free)(struct GruyereNativeHistory *history);
  // As `pool_create`, for a new pool whose segments come from `allocator`: `give` allocates a
  // segment and `take` returns it, each once, on any thread. The library drops `allocator` after
  // the last segment.
  int (*pool_create_over)(int device,
                          struct GruyereMempoolId pool,
                          struct GruyereBoxed allocator,
                          GruyereGive give,
                          GruyereTake take);
  // Gives each block of a pool a segment of its own. The pool must hold no memory yet. Returns 1
  // if there is no such pool.
  int (*pool_no_split)(int device, struct GruyereMempoolId pool);
  // Reports the segments of pools to `tracker` from now on. Only the first call counts.
  void (*track)(GruyereTracker tracker);
  // Returns the number of pool segments before the one at `address`; -1 if there is none at
  // `address`.
  int (*segment_number)(int device, uint64_t address);
  // Returns the state of a pool of graphs: which of its blocks are live. `pool_restore` may use
  // it any number of times; free it with `pool_state_free`. Returns NULL on failure.
  struct GruyerePoolState *(*pool_state)(int device, struct GruyereMempoolId pool);
  // Frees a state from `pool_state`, and touches no block.
  void (*pool_state_free)(struct GruyerePoolState *state);
  // Restores a pool to a state: its live blocks become those of the state, each at its old
  // address. Returns the changes, to be freed with `restored_free`. Returns NULL on failure,
  // with nothing changed.
  struct GruyereRestored *(*pool_restore)(const struct GruyerePoolState *state);
  // Frees the changes from `pool_restore`.
  void (*restored_free)(struct GruyereRestored *restored);
  // Sets the function that returns a request's place in autograd; the library calls it on the
  // thread of the request. Only the first call counts.
  void (*origins)(GruyereAskAutograd ask);
  // As `malloc`, at `address` and nowhere else. Returns NULL on failure, also if the stream and
  // its pool have no free memory there.
  void *(*malloc_at)(uint64_t size, int device, GruyereStream stream, uint64_t address);
  // Names the memory of the live block that starts at `pointer` for other processes. The block
  // must stay live while one of them has the memory open.
  int (*share)(void *pointer, struct GruyereShared *shared);
  // Opens memory that another process has named, by the `size` bytes at `name`, for `device`.
  // Opening the same memory again for the device returns the same address. Returns NULL on
  // failure.
  void *(*shared_open)(const uint8_t *name, size_t size, int device);
  // Closes the memory at `address` once; it must be closed as often as it was opened. The last
  // time waits for the device, and unmaps it; after a capture, if a stream captures.
  void (*shared_close)(void *address);
} GruyereNativeTable;

// Statistics of a pool, in bytes unless noted. Later versions append fields.
typedef struct GruyerePoolStats {
  // In: size of the caller's struct in bytes. Out: number of bytes written.
  uint32_t size;
  // Out: version of this struct, 1.
  uint32_t version;
  // Memory that stays mapped for the pool, even if idle.
  uint64_t reserve;
  // Ceiling on live bytes; 0 if the pool has none.
  uint64_t limit;
  // Memory held.
  uint64_t held;
  // Live blocks, each rounded up to 512 B.
  uint64_t live;
  // Number of live blocks.
  uint64_t live_blocks;
  // Freed by the program, waiting for streams.
  uint64_t pending;
} GruyerePoolStats;

// A live block of a pool.
typedef struct GruyerePoolBlock {
  // Start address.
  uint64_t address;
  // Bytes requested.
  uint64_t requested;
  // Step of the allocation; -1 if unknown (`record:off`).
  int64_t step;
} GruyerePoolBlock;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Calls `callback` with each alert and with `context` from now on; NULL ends the calls. A new
// callback replaces the former one, which may still be running on other threads when this function
// returns.
//
// The library calls it on the thread whose request caused the alert, inside `gruyere_malloc`,
// before that function throws or goes on (for a threshold: inside `gruyere_malloc` or
// `gruyere_mark_step`). So the calls come from any thread of the program that allocates, several
// at a time. The library holds no lock of its own during the call, and the callback may allocate
// and free. But the thread may hold locks of torch's or of Python's interpreter, or a thread that
// holds one may wait for it: the callback must not wait for any of these locks (in Python, take
// alerts with `gruyere_next_alert`). It must not throw.
//
// Returns 0, or -1 in a forked child.
int gruyere_on_alert(GruyereAlertCallback callback, void *context);

// Waits up to `milliseconds` for an alert, and takes the oldest one from the queue into `*alert`.
// The library queues alerts from the first call on, and keeps the latest 256.
//
// Returns 1 if there was an alert, 0 if not; -1 in a forked child; -2 if `alert` is NULL.
//
// # Safety
// `alert` is NULL or valid for writes.
int gruyere_next_alert(struct GruyereAlert *alert, uint32_t milliseconds);

// Writes the text of the threshold at index `threshold` (from 0) of `alert:` to `text`, as a
// NUL-terminated string truncated to `bytes` bytes.
//
// Returns the length of the whole text; -1 if the library has not allocated in this process; -2 if
// there is no such threshold, or `text` is NULL and `bytes` is not 0.
//
// # Safety
// `text` is valid for writes of `bytes` bytes.
int gruyere_alert_threshold(uint64_t threshold, char *text, size_t bytes);

// Counts the live block that starts at `pointer` under another lifetime: 0 auto, 1 transient, 2
// step, 3 persistent. The block does not move.
//
// Returns 0; -1 if the library has not allocated in this process; -2 if there is no such lifetime,
// or no live block of the library starts there.
int gruyere_tag(void *pointer, uint8_t lifetime);

// Announces that the program uses little memory now: a checkpoint, the end of an epoch. Releases
// the idle memory of each device whose live bytes are below three quarters of their peak, unless a
// call has done so within the last 30 seconds. Synchronises those devices. Returns the number of
// bytes released.
uint64_t gruyere_checkpoint(void);

// Announces the hooks that the loader has wired: 1 is record_stream, 2 the capture hooks (begin,
// end, release), 3 both. Until then, memory never passes from stream to stream, and every request
// asks whether its stream captures.
//
// A program that calls `gruyere_malloc` itself makes this call with 3 if it keeps the rules behind
// the hooks: it frees a block once the only work that may still use it is on the stream of its
// request, or names the other streams by `gruyere_record_stream` first; and requests made while a
// stream captures lie between `gruyere_begin_allocate_to_pool` and
// `gruyere_end_allocate_to_pool`. Without the call it works as well, with memory kept apart by
// stream and a warning in the log.
//
// Does not touch CUDA: an early announcement is kept until the first request, and the process may
// still fork children.
void gruyere_announce_hooks(uint32_t bits);

// Declares that no wait of one stream for another can close a cycle in this process: the process
// is alone (no collectives or point-to-point communication with other processes), and nothing that
// it enqueues waits for later actions of its host (host functions, waits on values in memory).
// From now on, `waits:auto` means `waits:budget`. Does not touch CUDA: an early call is kept until
// the first request.
void gruyere_allow_waits(void);

// Revokes [`gruyere_allow_waits`] for good: from now on, `waits:auto` means `waits:oom`. Call it
// before enqueuing work that may wait for a later action of the host or of another process. `why`,
// a NUL-terminated string, is for the log; NULL is allowed.
//
// # Safety
// `why` is NULL or a NUL-terminated string.
void gruyere_forbid_waits(const char *why);

// Tells the process's rank and the number of ranks, for `gruyere ps`, `top` and `post`, where the
// environment has no RANK or WORLD_SIZE: call it once the process group exists. A record keeps
// what it was told first. Does not touch CUDA: an early call is kept until the first request.
//
// Returns 0; -1 in a child made by fork of a process that uses CUDA; -2 if `rank` is not one of
// `world_size` ranks.
int gruyere_announce_rank(int64_t rank, int64_t world_size);

// Promises that `stream` of `device` is not destroyed before a call of [`gruyere_stream_ends`] for
// it. The library may then query it and record events on it at any time. It uses any other created
// stream only inside a call that names the stream, since a call on a destroyed stream is
// undefined. Memory freed on a stream that was not announced reaches other streams later: after an
// event that the stream's next call records, an event behind all work of the device, or a
// synchronisation. An announcement also saves a driver call at each request. Default streams
// always last, and need no announcement.
//
// Returns 0; -1 if the library cannot work in this process; -2 if there is no such device.
int gruyere_stream_lasts(int device, GruyereStream stream);

// Announces that `stream` of `device` is about to be destroyed: the library records an event
// behind the stream's frees now, and does not use the handle again. Call it before destroying the
// stream, while no thread allocates or records on it. The call is required for streams announced
// with [`gruyere_stream_lasts`], and optional for all others.
//
// Returns 0, also for an unknown stream; -1 if the library cannot work in this process; -2 if
// there is no such device.
int gruyere_stream_ends(int device, GruyereStream stream);

// Returns a mark of the work that `stream` of `device` has so far, for [`gruyere_stream_waits`].
// Call it just before the program records an event on the stream. Equal marks stand for the same
// stream at the same moment.
//
// Returns 0 where the event tells the library nothing: the stream captures, or is neither a
// default stream nor announced as lasting ([`gruyere_stream_lasts`]); nothing was allocated on the
// device yet; or memory does not pass between streams.
uint64_t gruyere_mark_work(int device, GruyereStream stream);

// Reports that the program has made `stream` of `device` wait for an event. `mark` is what
// [`gruyere_mark_work`] returned just before the event was recorded, for the stream on which it
// was; 0 is ignored. Call it after the wait was added, and only if the event was not recorded
// again in between. What the marked stream had freed by then may serve `stream` at once; where
// the library itself makes streams wait to hold less (`waits:budget`, and `waits:auto` in a
// process that is alone), it learns how far behind `stream` is.
void gruyere_stream_waits(int device, GruyereStream stream, uint64_t mark);

// Tags the calling thread's requests from now on: 0 auto, 1 transient, 2 step, 3 persistent. Tags
// nest, up to 31.
//
// Returns 0, or -2 if there is no such lifetime, or too many tags are open.
int gruyere_lifetime_push(uint8_t lifetime);

// Removes the calling thread's innermost tag. Returns 0, or -2 if none is open.
int gruyere_lifetime_pop(void);

// Keeps the record for `gruyere post`. Call it when an uncaught out-of-memory ends the program;
// the record is kept as it was when the request was refused.
//
// Returns 0; 1 if there is no room for a copy, so that the record is kept as it will be at the end
// of the program (the log says so); -1 if there is no record, or none is to be kept
// (`records_kept:0`).
int gruyere_keep_record(void);

// Marks the end of a training step, or of a request to a server.
void gruyere_mark_step(void);

// Sets the program's phase: 0 training or serving, 1 validation, 2 checkpoint. At the beginning of
// phase 1 or 2, memory that the phase has not needed before goes back to the device; 0 ends the
// phase. Cheap while no memory is idle, and never waits for the device.
//
// Returns 0; -1 if the library has not allocated in this process; -2 if there is no such phase.
int gruyere_mark_phase(uint8_t phase);

// Releases unused memory to the device, as `empty_cache` does. Returns the number of bytes
// released.
uint64_t gruyere_trim(void);

// Writes the statistics of `device` to `*stats`, at most `stats->size` bytes of them. Set `size`
// before the call.
//
// Returns 0; -1 if the library cannot work in this process; -2 if there is no such device, `stats`
// is NULL, or `size` is less than 8.
//
// # Safety
// `stats` is NULL or valid for writes of `stats->size` bytes.
int gruyere_stats(int device, struct GruyereStats *stats);

// Writes a human-readable dump to the file `path`.
//
// Returns 0; -1 if the library has not allocated in this process; -2 if `path` is NULL; -3 if the
// file could not be written (the log says why).
//
// # Safety
// `path` is NULL or a NUL-terminated string.
int gruyere_dump(const char *path);

// Walks every page and block, and compares the heap's counts with the driver's. For tests: no
// other thread may be allocating.
//
// Returns 0; -1 if the library has not allocated in this process; -4 if an invariant is broken
// (the log names it).
int gruyere_validate(void);

// Returns the library's version, a static string.
const char *gruyere_version(void);

// Removes the record's file, and writes what the end of a process writes (the summary, the run of
// `history:`, the trace). `exit` does the same; this is for a process that leaves by `_exit`, and
// would count as killed. Memory can still be allocated and freed afterwards. Does nothing the
// second time, in a child made by fork, or if the library has not allocated in this process.
void gruyere_close(void);

// Starts the history of mallocs and frees. It keeps the latest `entries` entries, and the origin
// of each live block; with 0 entries, only the origins. If `clear` is not 0, drops what was
// recorded before.
//
// Returns 0, or -1 if the library cannot work in this process.
int gruyere_history_start(uint64_t entries, int clear);

// Stops the history and drops its contents.
void gruyere_history_stop(void);

// Sets the number that the history records with the calling thread's requests from now on; 0:
// none. Returns the previous number.
uint64_t gruyere_history_context(uint64_t context);

// Returns a copy of the history so far, or NULL if there is none. Recording goes on. Free the copy
// with [`gruyere_history_free`].
struct GruyereHistory *gruyere_history(void);

// Frees a history from [`gruyere_history`]. NULL is allowed.
//
// # Safety
// `history` is NULL, or from [`gruyere_history`] and not freed yet.
void gruyere_history_free(struct GruyereHistory *history);

// Writes the latest out-of-memory of the process to `*out`, at most `size` bytes of it.
//
// Returns the number of bytes written; 0 if there was no out-of-memory.
//
// # Safety
// `out` is NULL or valid for writes of `size` bytes.
size_t gruyere_latest_out_of_memory(struct GruyereOutOfMemory *out, size_t size);

// Checks `settings`, in the syntax of `GRUYERE_CONF`. Writes the error, if any, to `message` as a
// NUL-terminated string, truncated to `room` bytes. Changes nothing, and does not touch CUDA.
//
// Returns 0 if the settings are valid; -2 if they are not, or `settings` is NULL or not UTF-8.
//
// # Safety
// `settings` is NULL or a NUL-terminated string; `message` is NULL or valid for writes of `room`
// bytes.
int gruyere_check_configuration(const char *settings, char *message, size_t room);

// Returns the functions of the native door for a shim that was built for `version`; NULL if the
// library does not have that version: the shim must not be used then.
const struct GruyereNativeTable *gruyere_native_table(uint32_t version);

// Copies the error message of the calling thread's latest failed pool function to `message`, as a
// NUL-terminated string truncated to `room` bytes.
//
// Returns the length of the whole message in bytes.
//
// # Safety
// `message` is NULL or valid for writes of `room` bytes.
size_t gruyere_last_error(char *message, size_t room);

// Creates the pool `name` (UTF-8, 1 to 128 bytes) on `device`, or finds the existing one, and
// writes its key to `*pool`. The library maps `reserve` bytes for the pool at once, and keeps them
// mapped; it raises the reserve of an existing pool to `reserve`. `limit` is a ceiling on the
// pool's live bytes; 0 sets none (and leaves that of an existing pool unchanged).
//
// Returns 0; -1 if the library cannot work in this process; -2 if an argument is invalid; -6 if
// the memory cannot be allocated. `gruyere_last_error` returns the reason.
//
// # Safety
// `name` is NULL or a NUL-terminated string; `pool` is NULL or valid for writes.
int gruyere_pool_create(const char *name,
                        int device,
                        uint64_t reserve,
                        uint64_t limit,
                        uint64_t *pool);

// Routes the calling thread's requests on the pool's device to the pool from now on. Pools nest,
// up to 16 on a thread; the innermost pool of a device serves its requests. Allocations in a CUDA
// graph's capture still come from the graph's own memory.
//
// Returns 0; -1 if the library cannot work in this process; -2 if there is no such pool, or the
// thread is in 16 pools already.
int gruyere_pool_enter(uint64_t pool);

// Ends the calling thread's latest `gruyere_pool_enter`, which must have named this pool. The pool
// may have been destroyed meanwhile.
//
// Returns 0; -1 if the library cannot work in this process; -2 if the thread entered another pool
// last, or is in no pool.
int gruyere_pool_leave(uint64_t pool);

// Returns all memory of the pool to the device at once, and writes the number of bytes to
// `*given`, if `given` is not NULL. Synchronises the device first, so that no work uses the
// memory. The pool can be used again; its reserve is gone.
//
// Returns 0; -1 if the library cannot work in this process; -2 if there is no such pool; -5 if
// blocks are live in it (`gruyere_pool_blocks` lists them) or a thread is allocating from it, and
// nothing is done; -6 if the driver did not take everything back: the next trim tries again; -7
// during a capture, or if the device could not be synchronised.
//
// # Safety
// `given` is NULL or valid for writes.
int gruyere_pool_release(uint64_t pool, uint64_t *given);

// As `gruyere_pool_release`, and destroys the pool: from then on, its key is valid for
// `gruyere_pool_leave` only.
//
// # Safety
// `given` is NULL or valid for writes.
int gruyere_pool_destroy(uint64_t pool, uint64_t *given);

// Writes the statistics of a pool to `*stats`, at most `stats->size` bytes of them. Set `size`
// before the call.
//
// Returns 0; -1 if the library cannot work in this process; -2 if there is no such pool, `stats`
// is NULL, or `size` is less than 8.
//
// # Safety
// `stats` is NULL or valid for writes of `stats->size` bytes.
int gruyere_pool_stats(uint64_t pool, struct GruyerePoolStats *stats);

// Writes the largest live blocks of a pool to `blocks`, at most `room` of them, and their number
// to `*count`.
//
// Returns 0; -1 if the library cannot work in this process; -2 if there is no such pool, or
// `blocks` or `count` is NULL.
//
// # Safety
// `blocks` is NULL or valid for writes of `room` blocks; `count` is NULL or valid for writes.
int gruyere_pool_blocks(uint64_t pool,
                        struct GruyerePoolBlock *blocks,
                        uint32_t room,
                        uint32_t *count);

// Turns reports to torch's profiler on (`wanted` is not 0) or off. While they are on, the library
// reports each malloc, free and out-of-memory, as torch's own allocator does, and each takes some
// microseconds: turn them on only while memory is profiled. Does not touch CUDA.
//
// Returns 0, or -1 if the process has no torch, or the library cannot work in it.
int gruyere_tell_profiler(int wanted);

// Announces that the Python package is about to make Gruyère torch's allocator: with `blame:auto`,
// large blocks then record their place in the program. `call` is the code object of
// `torch.nn.Module.__call__`, which must stay alive as long as the process, or NULL. Call this
// from Python, on a thread that holds the interpreter's lock.
//
// Returns 0, or -1 if the process has no interpreter whose frames can be read (the log says why).
int gruyere_blame_begin(const void *call);

// Announces the end of the interpreter: the library reads no frame from now on, nor when this
// returns.
void gruyere_blame_end(void);

// Notes that the program creates an optimiser, so that it trains.
void gruyere_blame_optimizer(void);

// Names the module object at `module`: it is the child `name` of the module at `outer`, or, if
// `outer` is NULL, an outermost module of class `name`. The name holds until
// `gruyere_blame_forget`, which must be called before the object's memory can be reused.
//
// Returns 0, or -2 if `name` is NULL or not UTF-8.
//
// # Safety
// `name` is NULL or a NUL-terminated string.
int gruyere_blame_module(const void *module, const void *outer, const char *name);

// Notes that a notebook runs a cell, whose code has the file name `file`, as `In[number]`: readers
// then name its lines so.
//
// Returns 0, or -2 if `file` is NULL or not UTF-8.
//
// # Safety
// `file` is NULL or a NUL-terminated string.
int gruyere_blame_cell(const char *file, uint32_t number);

// Forgets the module object at `module`.
void gruyere_blame_forget(const void *module);

// Allocates `size` bytes on `device`, for use in the order of `stream`. Returns NULL for size 0.
//
// Throws `torch.OutOfMemoryError` when out of memory, and `RuntimeError` on any other failure. In
// a process without torch, logs the failure and returns NULL.
void *gruyere_malloc(ptrdiff_t size, int device, GruyereStream stream);

// Frees a block from [`gruyere_malloc`]. Ignores `size`, `device` and `stream`. NULL is allowed; a
// pointer at which no live block starts is counted, logged and otherwise ignored.
void gruyere_free(void *pointer, ptrdiff_t _size, int _device, GruyereStream _stream);

// torch's initialisation hook, with the number of devices; 0 when the allocator object is created.
void gruyere_init(int _device_count);

// `torch.cuda.empty_cache()`: releases unused memory to the device.
void gruyere_reset(void);

// `torch.cuda.set_per_process_memory_fraction()`: caps the memory held on `device` at `fraction`
// of its total memory. A `fraction` outside of 0 to 1, or NaN, changes nothing (the log says so).
void gruyere_memory_fraction(double fraction, int device);

// Returns the start of the region (torch's segment) that contains `pointer`, and writes its length
// to `*size`, if `size` is not NULL. For a pointer that is not the library's, returns the pointer
// itself and a length of 0.
//
// # Safety
// `size` is NULL or valid for writes.
void *gruyere_base_alloc(void *pointer, size_t *size);

// `Tensor.record_stream`: notes that `stream` uses the block too. After its free, the block is not
// reused before that stream is past the free.
void gruyere_record_stream(void *pointer, GruyereStream stream);

// Announces a capture into pool `id` on a stream of `device`. Ignores `filter`, a `std::function`
// of torch's that identifies the stream: the library asks the driver instead.
void gruyere_begin_allocate_to_pool(int device, struct GruyereMempoolId id, void *_filter);

// Ends the pool scope that [`gruyere_begin_allocate_to_pool`] opened.
void gruyere_end_allocate_to_pool(int device, struct GruyereMempoolId id);

// Notes that the graph that used pool `id` is gone. Its blocks may be freed later.
void gruyere_release_pool(int device, struct GruyereMempoolId id);

// Writes the statistics of `torch.cuda.memory_stats` for `device` to `*stats`, at most
// `stats->size` bytes of them. Set `size` before the call.
//
// Returns 0; -1 if the library cannot work in this process; -2 if there is no such device, `stats`
// is NULL, or `size` is less than 8.
//
// # Safety
// `stats` is NULL or valid for writes of `stats->size` bytes.
int gruyere_torch_stats(int device, struct GruyereTorchStats *stats);

// Resets the peaks of [`gruyere_torch_stats`] to the current values. The peaks of `gruyere_stats`
// cover the whole life of the process.
//
// Returns 0; -1 if the library cannot work in this process; -2 if there is no such device.
int gruyere_reset_peaks(int device);

// Resets the accumulated values of [`gruyere_torch_stats`] (`allocated`, `freed` and the `num_`
// fields) to 0.
//
// Returns 0; -1 if the library cannot work in this process; -2 if there is no such device.
int gruyere_reset_accumulated(int device);

// Returns the current memory layout of `device`; free it with [`gruyere_snapshot_free`]. The
// library reads one shard after the other: if other threads allocate meanwhile, the parts are some
// microseconds apart.
//
// Returns NULL if the library has not allocated in this process, or there is no such device.
struct GruyereSnapshot *gruyere_snapshot(int device);

// Frees a snapshot and everything it points to. NULL is allowed.
//
// # Safety
// `snapshot` is NULL, or from [`gruyere_snapshot`] and not freed yet.
void gruyere_snapshot_free(struct GruyereSnapshot *snapshot);

// Writes the memory of each capture pool of `device` to `pools`, at most `room` of them, and the
// number of all capture pools to `*count`. Cheap, unlike [`gruyere_snapshot`], which walks every
// block.
//
// Returns 0; -1 if the library cannot work in this process; -2 if there is no such device, or
// `pools` or `count` is NULL.
//
// # Safety
// `pools` is NULL or valid for writes of `room` pools; `count` is NULL or valid for writes.
int gruyere_capture_pools(int device, struct GruyerePool *pools, uint32_t room, uint32_t *count);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* GRUYERE_H */
