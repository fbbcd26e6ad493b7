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

// The kind of an alert: a request was answered with out of memory.
#define GRUYERE_ALERT_OUT_OF_MEMORY 1

// The kind of an alert: a request fitted nowhere, and memory is being reclaimed for it.
#define GRUYERE_ALERT_RECLAIM 2

// The kind of an alert: a threshold of `alert:` with the action `callback` is passed.
#define GRUYERE_ALERT_THRESHOLD 3

// The version of [`GruyereStats`] that this header describes.
#define GRUYERE_STATS_VERSION 3

// The version of [`GruyereHistory`] that this header describes.
#define GRUYERE_HISTORY_VERSION 1

// The version of [`GruyereNativeTable`] that this header describes.
#define GRUYERE_NATIVE_VERSION 1

// Blocks are live in the pool, or a thread is allocating from it.
#define GRUYERE_BUSY -5

// The memory could not be had, or the driver did not take it back.
#define GRUYERE_MEMORY -6

// Not now: a CUDA graph is being captured, or the device could not be synchronised.
#define GRUYERE_LATER -7

// All is well.
#define GRUYERE_OK 0

// The library cannot work in this process; the log says why.
#define GRUYERE_UNAVAILABLE -1

// An argument is wrong.
#define GRUYERE_INVALID -2

// A file could not be written.
#define GRUYERE_IO -3

// An invariant is broken.
#define GRUYERE_BROKEN -4

// The version of [`GruyereTorchStats`] that this header describes.
#define GRUYERE_TORCH_STATS_VERSION 1

// The version of [`GruyereSnapshot`] that this header describes.
#define GRUYERE_SNAPSHOT_VERSION 1

// Which blocks of a pool of CUDA graphs were live at one moment. It holds no memory.
typedef struct GruyerePoolState GruyerePoolState;

// Something that a program may want to hear of. Bytes where not said otherwise.
typedef struct GruyereAlert {
  // What happened.
  uint32_t kind;
  // The device.
  uint32_t device;
  // What was asked for; 0 of a threshold.
  uint64_t asked;
  // Held then.
  uint64_t reserved;
  // Live then.
  uint64_t live;
  // The most that was ever live.
  uint64_t live_peak;
  // How many of this kind (of a threshold: of this one) there were on the device, this one
  // included.
  uint64_t count;
  // Alerts that nobody took in time, since the last one that was taken (`gruyere_next_alert`).
  uint64_t lost;
  // Of a threshold: the value of its metric: bytes, bytes a second, seconds, a count, or a share
  // from 0 to 1.
  double value;
  // Of a threshold: its place in `alert:`, from 0 (`gruyere_alert_threshold`).
  uint64_t threshold;
} GruyereAlert;

// Who is called with an alert, and with what was given for it.
typedef void (*GruyereAlertCallback)(const struct GruyereAlert *alert, void *context);

// `cudaStream_t`: 0 and 1 are the legacy default stream, 2 the calling thread's.
typedef void *GruyereStream;

// Numbers of one device, in bytes where not said otherwise. Later versions add fields at the end
// only.
typedef struct GruyereStats {
  // In: the bytes that the caller has room for. Out: the bytes that were written.
  uint32_t size;
  // Out: the version that the library has.
  uint32_t version;
  // Physical memory of the device.
  uint64_t total_memory;
  // The ceiling on what may be reserved.
  uint64_t limit;
  // Physical memory held.
  uint64_t reserved;
  // Its peak.
  uint64_t reserved_peak;
  // Live blocks, each rounded up to 512 B.
  uint64_t live;
  // Their peak.
  uint64_t live_peak;
  // Freed by the program, waiting for streams.
  uint64_t pending;
  // Free runs between blocks, free spans included.
  uint64_t arena_free;
  // The largest free run.
  uint64_t largest_free;
  // Memory of slabs.
  uint64_t slab_bytes;
  // Free slots in them.
  uint64_t slab_free;
  // Held for CUDA graphs.
  uint64_t captured;
  // Times the reclaim ladder was climbed.
  uint64_t retries;
  // Out-of-memory answers.
  uint64_t out_of_memories;
  // Frees of what was no live block, on all devices.
  uint64_t bad_frees;
  // Events recorded.
  uint64_t events_recorded;
  // Events asked about.
  uint64_t events_queried;
  // Live blocks as they were asked for. Here begins what version 2 has added.
  uint64_t requested;
  // The largest request that what is held could satisfy, once the work on what was freed is
  // done. Whole free pages count wherever they lie, where they can move.
  uint64_t largest_request;
  // The largest request that could be satisfied if the ceiling is reached for it (others on the
  // device may have taken some of that).
  uint64_t largest_request_growing;
  // The size that 99 of 100 requests so far do not exceed, within 7%; 0 where the record is off.
  uint64_t request_p99;
  // Times that a low-memory phase gave memory back.
  uint64_t low_phase_trims;
  // The memory that went back so.
  uint64_t low_phase_bytes;
  // lost / reserved: the share of what is held that is free and cannot serve.
  double fragmentation;
  // 1 - largest_request / (reserved - live - pending).
  double external_fragmentation;
  // 1 - requested / live.
  double internal_fragmentation;
  // Free between live blocks, or, with typical_request, what a typical request does not fit
  // into. Here begins what version 3 has added.
  uint64_t lost;
  // Whole free pages.
  uint64_t idle;
  // 0 where pages move (lost is by pages). Else the request by which lost is told: half of all
  // bytes are asked for in requests of at most this size.
  uint64_t typical_request;
  // 1 - live / reserved.
  double unused;
} GruyereStats;

// Something that happened.
typedef struct GruyereHistoryEntry {
  // 0: alloc; 1: free requested; 2: free completed; 3: a span from the driver; 4: it goes back;
  // 5: out of memory; 6: pages are mapped here now; 7: they belong here no more.
  uint32_t action;
  // The device.
  uint32_t device;
  // Where; of an out-of-memory, the bytes that the driver said are free.
  uint64_t address;
  // How much: of a block, what was asked for; of an out-of-memory, that rounded up to 512.
  uint64_t bytes;
  // The stream's handle.
  uint64_t stream;
  // Microseconds since 1970.
  uint64_t time;
  // See [`gruyere_history_context`].
  uint64_t context;
  // Of a free: that of its block's allocation, where it was noted; else 0.
  uint64_t origin;
} GruyereHistoryEntry;

// Where a live block came from.
typedef struct GruyereOrigin {
  // Its first byte.
  uint64_t address;
  // See [`gruyere_history_context`].
  uint64_t context;
  // The device.
  uint32_t device;
  // Always 0.
  uint32_t room;
} GruyereOrigin;

// What was noted. Later versions add fields at the end of each struct only: step through the
// arrays by the sizes given here.
typedef struct GruyereHistory {
  // Bytes of this struct.
  uint32_t size;
  // Its version.
  uint32_t version;
  // Bytes of an entry.
  uint32_t entry_size;
  // Bytes of an origin.
  uint32_t origin_size;
  // By time.
  const struct GruyereHistoryEntry *entries;
  // How many.
  uint64_t entry_count;
  // Of the blocks that are live and were allocated since the start, in no order.
  const struct GruyereOrigin *origins;
  // How many.
  uint64_t origin_count;
  // Entries that made room for later ones.
  uint64_t lost;
} GruyereHistory;

// The latest out-of-memory of the process.
typedef struct GruyereOutOfMemory {
  // The device.
  uint32_t device;
  // How many there were on it, this one included.
  uint32_t count;
  // Bytes asked for.
  uint64_t asked;
  // Bytes held then.
  uint64_t reserved;
  // The ceiling on that, in bytes.
  uint64_t limit;
  // Bytes of the device that the driver said were free; all bits set: it could not say.
  uint64_t free;
} GruyereOutOfMemory;

// Why the calling thread's latest call failed.
typedef struct GruyereNativeFailure {
  // What to say; valid until the thread's next failure.
  const char *text;
  // Of an out-of-memory: bytes asked for.
  uint64_t asked;
  // Of an out-of-memory: the ceiling on what may be held, in bytes.
  uint64_t limit;
  // Of an out-of-memory: bytes of the device that the driver said were free; 0 where it could
  // not say.
  uint64_t free;
} GruyereNativeFailure;

// torch's `c10::MempoolId_t`, a pair by value.
typedef struct GruyereMempoolId {
  // Set for pools that graphs make themselves.
  uint64_t first;
  // Set for pools that the user made.
  uint64_t second;
} GruyereMempoolId;

// One number over time.
typedef struct GruyereStat {
  // Now.
  uint64_t current;
  // The highest since the last `gruyere_reset_peaks`.
  uint64_t peak;
  // All that came since the last `gruyere_reset_accumulated`.
  uint64_t allocated;
  // All that went since then.
  uint64_t freed;
} GruyereStat;

// What `torch.cuda.memory_stats` tells. The arrays are by pool: all, blocks of up to 1 MiB, larger
// ones. Later versions add fields at the end only.
typedef struct GruyereTorchStats {
  // In: the bytes that the caller has room for. Out: the bytes that were written.
  uint32_t size;
  // Out: the version that the library has.
  uint32_t version;
  // Blocks in the program's hands.
  struct GruyereStat allocation[3];
  // Pieces of memory that the driver gave: pages, spans, or blocks, by the backing. Pages of
  // slabs are small; spans may serve both, and are large.
  struct GruyereStat segment[3];
  // Blocks in the program's hands, or freed and waiting for streams.
  struct GruyereStat active[3];
  // Free pieces that cannot be given back, since a used one shares their page or span. Known
  // when somebody looks: a peak is the highest that was seen by a call of this function.
  struct GruyereStat inactive_split[3];
  // Bytes of `allocation`, each block rounded up to 512.
  struct GruyereStat allocated_bytes[3];
  // Bytes of `segment`.
  struct GruyereStat reserved_bytes[3];
  // Bytes of `active`, rounded.
  struct GruyereStat active_bytes[3];
  // Bytes of `inactive_split`.
  struct GruyereStat inactive_split_bytes[3];
  // Bytes of `active` as asked for.
  struct GruyereStat requested_bytes[3];
  // Times that the reclaim ladder was climbed, since the last `gruyere_reset_accumulated`.
  uint64_t num_alloc_retries;
  // Out-of-memory answers since then.
  uint64_t num_ooms;
  // Times since then that the whole device was synchronised to get memory back.
  uint64_t num_sync_all_streams;
  // Pieces of memory taken from the driver since then.
  uint64_t num_device_alloc;
  // Pieces given back since then.
  uint64_t num_device_free;
  // The ceiling on what may be reserved, in bytes.
  uint64_t limit;
  // Physical memory of the device, in bytes.
  uint64_t total_memory;
} GruyereTorchStats;

// A contiguous range of memory held: a span, a row of mapped pages, a block that the driver gave.
// [`GruyereBlock`]s tile it.
typedef struct GruyereSegment {
  // First byte.
  uint64_t address;
  // Length in bytes.
  uint64_t bytes;
  // torch's id of the capture pool that it belongs to, or 0 and 0.
  uint64_t pool_first;
  // See `pool_first`.
  uint64_t pool_second;
  // Its first block, an index into the snapshot's blocks.
  uint64_t first_block;
  // The number of its blocks.
  uint64_t block_count;
  // 1: it serves blocks of up to 1 MiB, and no larger one; what is free in it does not count.
  uint32_t small;
  // 1: it grows and shrinks page by page.
  uint32_t stitched;
} GruyereSegment;

// A piece of a segment.
typedef struct GruyereBlock {
  // First byte.
  uint64_t address;
  // Length in bytes, a multiple of 512.
  uint64_t bytes;
  // Bytes that the program asked for; 0 where it is nobody's.
  uint64_t requested;
  // The stream's handle; of free memory, that of the stream whose it is, or 0.
  uint64_t stream;
  // 0: free; 1: the program's; 2: freed by the program, and waiting for streams.
  uint32_t state;
  // Always 0.
  uint32_t room;
} GruyereBlock;

// What a capture pool holds.
typedef struct GruyerePool {
  // torch's id of it, the first number.
  uint64_t first;
  // The second.
  uint64_t second;
  // Bytes.
  uint64_t bytes;
  // Of these, in slabs: for small blocks, up to 16 KiB.
  uint64_t small;
} GruyerePool;

// What lies where on a device. Later versions add fields at the end of each struct only: step
// through the arrays by the sizes given here.
typedef struct GruyereSnapshot {
  // Bytes of this struct.
  uint32_t size;
  // Its version.
  uint32_t version;
  // Bytes of a segment.
  uint32_t segment_size;
  // Bytes of a block.
  uint32_t block_size;
  // By address.
  const struct GruyereSegment *segments;
  // How many.
  uint64_t segment_count;
  // By segment, then by address.
  const struct GruyereBlock *blocks;
  // How many.
  uint64_t block_count;
  // Capture pools.
  const struct GruyerePool *pools;
  // How many.
  uint64_t pool_count;
  // Bytes held that are mapped nowhere, so in no segment.
  uint64_t unmapped;
} GruyereSnapshot;

// Something of torch's, kept by the library.
typedef struct GruyereBoxed {
  // What it is; NULL: nothing.
  void *object;
  // Drops it. Called once, on any thread, with no lock of the library held.
  void (*drop)(void*);
} GruyereBoxed;

// Tells whether a request on this stream, made by the calling thread, goes to the filter's pool:
// 1, or 0; -1: it failed. It never unwinds.
typedef int (*GruyereFilter)(void *filter, GruyereStream stream);

// [`GruyereHistory`], and the boxes that its numbers stand for.
typedef struct GruyereNativeHistory {
  // What was noted.
  struct GruyereHistory *noted;
  // The object of each entry's context, NULL where it has none.
  void *const *entry_contexts;
  // The object of each origin's context, NULL where it has none.
  void *const *origin_contexts;
  // The object of the context of the allocation that an entry's free is of, NULL where it is
  // none or that has none.
  void *const *entry_origins;
} GruyereNativeHistory;

// Gives `bytes` on `device`, as the allocator `object` does for a request of the calling thread's
// on `stream`; NULL: it cannot. It never unwinds; `failed` says whether it threw.
typedef void *(*GruyereGive)(void *object,
                             uint64_t bytes,
                             int device,
                             GruyereStream stream,
                             int *failed);

// Takes back what [`GruyereGive`] gave, once. It never unwinds.
typedef void (*GruyereTake)(void *object, void *block);

// A segment of a MemPool comes or goes.
typedef struct GruyereSegmentEvent {
  // 0: it is there, and nobody has used it yet; 1: it is about to go, and still there.
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

// Hears of segments, with no lock of the library held, on the thread that asks or gives back. It
// never unwinds.
typedef void (*GruyereTracker)(const struct GruyereSegmentEvent *event);

// What was live in a pool before a restore, and what is live since: addresses, in order. What is
// in both has not been touched.
typedef struct GruyereRestored {
  // What was live.
  const uint64_t *before;
  // How many.
  size_t before_count;
  // What is live.
  const uint64_t *after;
  // How many.
  size_t after_count;
} GruyereRestored;

// Where in autograd a thread is.
typedef struct GruyereAutograd {
  // Torch's number of the thread.
  uint64_t thread;
  // The number that the next node of the thread gets; 0: the thread makes none.
  uint64_t next;
  // The kind of the node that runs on the thread, the same for all of a kind; 0: none runs.
  uint64_t kind;
  // Of that node: the thread that made it.
  uint64_t node_thread;
  // Of that node: its number there.
  uint64_t node;
  // Of that node: the bytes of what its operator gave in the forward, the first if it gave
  // several; 0: not known.
  uint64_t node_bytes;
  // Of that node, where it was asked for: its name, with a NUL at its end.
  char name[128];
} GruyereAutograd;

// Fills `origin` for the calling thread, the name only if that `is_wanted`. It never unwinds, and
// waits for nobody.
typedef void (*GruyereAskAutograd)(struct GruyereAutograd *origin, int is_name_wanted);

// What the native door calls. Codes are 0, or one of the negative ones above; where one of those
// is returned by a function about pools, `failure` tells why.
typedef struct GruyereNativeTable {
  // Bytes of this struct.
  uint32_t size;
  // Its version.
  uint32_t version;
  // `size` bytes on `device`, for use in the order of `stream`. NULL: size 0, or a failure.
  // Never throws.
  void *(*malloc)(uint64_t size, int device, GruyereStream stream);
  // Whether the calling thread's latest failure is an out-of-memory: 1, or 0. Nobody has been
  // told of it before `failure`.
  int (*is_out_of_memory)(void);
  // What it was; returns the code. An out-of-memory is the program's from now on: it is
  // counted, dumped and noted, and alerts are raised.
  int (*failure)(struct GruyereNativeFailure *failure);
  // See `gruyere_free`.
  void (*free)(void *pointer, ptrdiff_t size, int device, GruyereStream stream);
  // The live block that starts at `pointer`: its bytes, rounded up to 512, and its device. 0:
  // there is none.
  uint64_t (*block)(void *pointer, int *device);
  // See `gruyere_base_alloc`.
  void *(*base)(void *pointer, size_t *size);
  // See `gruyere_record_stream`.
  void (*record_stream)(void *pointer, GruyereStream stream);
  // See `gruyere_stream_lasts`.
  int (*stream_lasts)(int device, GruyereStream stream);
  // Gives back to the devices what nobody uses: all of it, or (an id other than 0 and 0) of that
  // pool.
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
  // See `gruyere_snapshot`; segments of MemPools tell their ids.
  struct GruyereSnapshot *(*snapshot)(int device);
  // See `gruyere_snapshot_free`.
  void (*snapshot_free)(struct GruyereSnapshot *snapshot);
  // A reference to a pool more, which is made if need be.
  int (*pool_create)(int device, struct GruyereMempoolId pool);
  // Requests go to a pool until `pool_end`, those that `filter` says; no filter: those of a
  // capture that begins now. It is a reference too.
  int (*pool_begin)(int device,
                    struct GruyereMempoolId pool,
                    struct GruyereBoxed filter,
                    GruyereFilter ask);
  // The pool's latest `pool_begin` is over; 1: there is none.
  int (*pool_end)(int device, struct GruyereMempoolId pool);
  // A reference less; 1: there is none.
  int (*pool_release)(int device, struct GruyereMempoolId pool);
  // How many references there are.
  uint32_t (*pool_uses)(int device, struct GruyereMempoolId pool);
  // Whether the pool serves other requests before they are out of memory; 1: there is no such
  // pool.
  int (*pool_on_oom)(int device, struct GruyereMempoolId pool, int wanted);
  // See `gruyere_history_start`. With `clear`, boxes are forgotten too.
  int (*history_start)(uint64_t entries, int clear);
  // See `gruyere_history_stop`. Forgets all boxes.
  void (*history_stop)(void);
  // The calling thread's requests and frees come from `context`, which the library keeps as long
  // as its history names it. What `context_leave` is to be given.
  uint64_t (*context_enter)(struct GruyereBoxed context);
  // They come from where they came from before that `context_enter`.
  void (*context_leave)(uint64_t before);
  // What was noted until now, to be given to `history_free` once. NULL: there is no history.
  struct GruyereNativeHistory *(*history)(void);
  // Frees what `history` gave.
  void (*history_free)(struct GruyereNativeHistory *history);
  // As `pool_create`, of a pool that there is not yet, whose segments `give` gets of `allocator`
  // and `take` gives back to it, each once and on any thread. It is dropped after the last.
  int (*pool_create_over)(int device,
                          struct GruyereMempoolId pool,
                          struct GruyereBoxed allocator,
                          GruyereGive give,
                          GruyereTake take);
  // Blocks of a pool that holds nothing yet have segments of their own; 1: there is no such
  // pool.
  int (*pool_no_split)(int device, struct GruyereMempoolId pool);
  // Tells `tracker` of the segments of pools from now on. Once.
  void (*track)(GruyereTracker tracker);
  // How many segments of pools came before the one at `address`; -1: there is none.
  int (*segment_number)(int device, uint64_t address);
  // Which blocks of a pool of graphs are live, to be given to `pool_restore` as often as wanted,
  // and to `pool_state_free` once. NULL: a failure.
  struct GruyerePoolState *(*pool_state)(int device, struct GruyereMempoolId pool);
  // Frees what `pool_state` gave; no block is touched.
  void (*pool_state_free)(struct GruyerePoolState *state);
  // Makes the live blocks of a pool those of the state, each at its old address; what was done,
  // to be given to `restored_free` once. NULL: a failure, and nothing is changed.
  struct GruyereRestored *(*pool_restore)(const struct GruyerePoolState *state);
  // Frees what `pool_restore` gave.
  void (*restored_free)(struct GruyereRestored *restored);
  // Lets the library ask `ask`, on the thread of a request, where in autograd that comes from.
  // Once.
  void (*origins)(GruyereAskAutograd ask);
  // As `malloc`, at `address` and nowhere else. NULL: a failure, of which one is that no free
  // memory of the stream and its pool is there.
  void *(*malloc_at)(uint64_t size, int device, GruyereStream stream, uint64_t address);
} GruyereNativeTable;

// Numbers of one pool, in bytes where not said otherwise. Later versions add fields at the end
// only.
typedef struct GruyerePoolStats {
  // In: the bytes that the caller has room for. Out: the bytes that were written.
  uint32_t size;
  // Out: 1.
  uint32_t version;
  // What it keeps whatever lies idle.
  uint64_t reserve;
  // Ceiling on its live bytes; 0: none of its own.
  uint64_t limit;
  // Memory that it holds.
  uint64_t held;
  // Live blocks, each rounded up to 512 B.
  uint64_t live;
  // How many.
  uint64_t live_blocks;
  // Freed by the program, waiting for streams.
  uint64_t pending;
} GruyerePoolStats;

// A live block of a pool.
typedef struct GruyerePoolBlock {
  // Where it starts.
  uint64_t address;
  // Bytes asked for.
  uint64_t requested;
  // The step in which it was allocated; -1: not known (`record:off`).
  int64_t step;
} GruyerePoolBlock;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Calls `callback` with each alert and with `context`; NULL: nobody. It takes the place of the one
// before, which may still be running on other threads when this returns.
//
// It is called on the thread whose request caused the alert, inside `gruyere_malloc`, before that
// throws or goes on (of a threshold: inside `gruyere_malloc` or `gruyere_mark_step`); so from any
// thread of the program that allocates, several at a time. No lock of the allocator is held, and
// it may allocate and free; but the thread may hold locks of torch's or of Python's interpreter,
// or be waited for by one that does: it must not wait for any of these (for Python, take alerts
// with `gruyere_next_alert`). It must not throw.
//
// 0; -1: this is a forked child.
int gruyere_on_alert(GruyereAlertCallback callback, void *context);

// Waits up to `milliseconds` for an alert, and writes the oldest that nobody has taken to
// `*alert`. Alerts are kept from the first call on, the latest 256.
//
// 1: there was one; 0: there was none; -1: this is a forked child; -2: `alert` is NULL.
//
// # Safety
// `alert` is NULL or may be written.
int gruyere_next_alert(struct GruyereAlert *alert, uint32_t milliseconds);

// Writes the text of a threshold of `alert:`, the one at place `threshold` from 0, to `text`, with
// a NUL: as much as fits in `bytes`.
//
// The length of the whole text; -1: nothing has been allocated here; -2: there is no such
// threshold, or `text` is NULL and `bytes` is not 0.
//
// # Safety
// `bytes` bytes at `text` may be written.
int gruyere_alert_threshold(uint64_t threshold, char *text, size_t bytes);

// Counts the live block that starts at `pointer` under another lifetime: 0 auto, 1 transient, 2
// step, 3 persistent. The block stays where it is.
//
// 0; -1: nothing has been allocated here; -2: no such lifetime, or no live block of ours starts
// there.
int gruyere_tag(void *pointer, uint8_t lifetime);

// The program says that memory is low: a checkpoint, the end of an epoch. Gives idle memory back
// on devices where less than three quarters of the peak is live and that this call has not trimmed
// within 30 seconds; the bytes given. Synchronises those devices.
uint64_t gruyere_checkpoint(void);

// Announces which hooks the loader has wired: 1 is record_stream, 2 are the capture hooks (begin,
// end, release), 3 both. Until then memory never passes from stream to stream, and every request
// asks whether its stream captures.
//
// CUDA is not touched by this: announced early, it is remembered until the first request, and
// children may still be forked.
void gruyere_announce_hooks(uint32_t bits);

// Says that no wait of one stream for another can close a cycle in this process: it is alone (no
// collectives or point-to-point communication with other processes), and nothing that it enqueues
// waits for what its host does later (host functions, waits on values in memory). From now on
// `waits:auto` is `waits:budget`. CUDA is not touched by this: said early, it is remembered until
// the first request.
void gruyere_allow_waits(void);

// Takes [`gruyere_allow_waits`] back, for good: from now on `waits:auto` is `waits:oom`. Call it
// before work is enqueued that may wait for what comes later. `why`, a string that ends in 0, is
// for the log; null is allowed.
//
// # Safety
// `why` is null, or points to a string that ends in 0.
void gruyere_forbid_waits(const char *why);

// Promises that `stream` of `device` is not destroyed before [`gruyere_stream_ends`] is told of
// it. The library may then ask about it and record events on it at any time; of any other created
// stream it does so only inside a call that names it, since a call on a destroyed stream is
// undefined. What a stream that was not announced has freed comes to other streams later: with an
// event that its next call records, with one behind all work of the device, or with a
// synchronisation. It also saves a driver call at each request. Default streams last anyway, and
// need not be announced.
//
// 0; -1: the library cannot work here; -2: there is no such device.
int gruyere_stream_lasts(int device, GruyereStream stream);

// `stream` of `device` is about to be destroyed: what it has freed gets its event now, and its
// handle is not used again. Call it before the stream is destroyed, while nothing is allocated or
// recorded on it; for streams that were announced ([`gruyere_stream_lasts`]) it must be called,
// for any other it may be.
//
// 0, also of a stream that is not known; -1: the library cannot work here; -2: there is no such
// device.
int gruyere_stream_ends(int device, GruyereStream stream);

// Tags the calling thread's next requests: 0 auto, 1 transient, 2 step, 3 persistent. Tags nest,
// up to 31.
//
// 0, or -2: no such lifetime, or too many tags are open.
int gruyere_lifetime_push(uint8_t lifetime);

// Takes the calling thread's innermost tag away. 0, or -2: none is open.
int gruyere_lifetime_pop(void);

// The program ends now by an out-of-memory that nobody has caught: leaves its record for `gruyere
// post`, as it was when the request was refused.
//
// 0; -1: there is no record, or none is to be left (`records_kept:0`); -3: it could not be written
// (the log says why).
int gruyere_keep_record(void);

// A training step, or a request of a server, is over.
void gruyere_mark_step(void);

// What the program does from now on: 0 training or serving, 1 validation, 2 a checkpoint. At the
// beginning of 1 and 2, memory that they have not needed before goes back to the device; 0 ends
// them. Cheap while nothing lies idle, and never waits for the device.
//
// 0; -1: the library has not allocated anything here; -2: no such phase.
int gruyere_mark_phase(uint8_t phase);

// Gives back to the device what nobody uses (as `empty_cache`); the bytes that it got.
uint64_t gruyere_trim(void);

// Writes the numbers of `device` to `*stats`, whose `size` the caller has set; as much as fits.
//
// 0; -1: the library cannot work here; -2: no such device, or `size` is less than 8.
//
// # Safety
// `stats` is NULL, or `stats->size` bytes there may be written.
int gruyere_stats(int device, struct GruyereStats *stats);

// Writes a dump for people to the file `path`.
//
// 0; -1: the library has not allocated anything here; -2: `path` is NULL; -3: the file could not
// be written (the log says why).
//
// # Safety
// `path` is NULL or a NUL-terminated string.
int gruyere_dump(const char *path);

// Walks every page and block and holds the books against the driver's. For tests: no other thread
// may be allocating.
//
// 0; -1: the library has not allocated anything here; -4: something is broken (the log says what).
int gruyere_validate(void);

// The library's version, a static string.
const char *gruyere_version(void);

// Begins to note mallocs and frees: the latest `entries` of them, and where each live block came
// from (0 entries: only that). `clear` other than 0 forgets what was noted before.
//
// 0; -1: the library cannot work here.
int gruyere_history_start(uint64_t entries, int clear);

// Ends it, and forgets all of it.
void gruyere_history_stop(void);

// The calling thread's requests are noted with this number from now on; 0: with none. The number
// that it was before.
uint64_t gruyere_history_context(uint64_t context);

// What was noted until now, to be given to [`gruyere_history_free`] once; the history goes on.
//
// NULL: there is no history.
struct GruyereHistory *gruyere_history(void);

// Frees what [`gruyere_history`] gave. NULL is fine.
//
// # Safety
// `history` is NULL, or from [`gruyere_history`] and not freed yet.
void gruyere_history_free(struct GruyereHistory *history);

// Writes the latest out-of-memory to `*out`, of which `size` bytes may be written; as much as
// fits.
//
// The bytes written; 0: there was none.
//
// # Safety
// `out` may be written, `size` bytes.
size_t gruyere_latest_out_of_memory(struct GruyereOutOfMemory *out, size_t size);

// Checks `settings`, written as in `GRUYERE_CONF`. What is wrong is written to `message` as a
// NUL-terminated text, cut to `room` bytes. Does not touch CUDA, and changes nothing.
//
// 0; -2: something is wrong, or `settings` is NULL or not UTF-8.
//
// # Safety
// `settings` is NULL or a NUL-terminated string; `message` is NULL, or `room` bytes there may be
// written.
int gruyere_check_configuration(const char *settings, char *message, size_t room);

// What the native door calls, for a shim that was built for `version`. NULL: the library has no
// such version, so that shim is not to be used.
const struct GruyereNativeTable *gruyere_native_table(uint32_t version);

// Copies what was wrong with this thread's latest failed call about pools to `message`, as a
// NUL-terminated text cut to `room` bytes. The bytes that the whole text has.
//
// # Safety
// `message` is NULL, or `room` bytes there may be written.
size_t gruyere_last_error(char *message, size_t room);

// Makes the pool called `name` (UTF-8, 1 to 128 bytes) on `device`, or finds the one that there
// is, and writes its key to `*pool`. `reserve` bytes are mapped for it at once and stay; of a pool
// that there is, the reserve is raised to that. `limit` is a ceiling on the bytes that may be live
// in it, 0 for none of its own (or no change).
//
// 0; -1: the library cannot work here; -2: an argument is wrong; -6: the memory cannot be had.
// `gruyere_last_error` says why.
//
// # Safety
// `name` is NULL or a NUL-terminated string; `pool` is NULL or may be written.
int gruyere_pool_create(const char *name,
                        int device,
                        uint64_t reserve,
                        uint64_t limit,
                        uint64_t *pool);

// Sends the calling thread's next requests on the pool's device to the pool. Pools nest, up to 16
// on a thread; the innermost of a device counts. What a captured CUDA graph allocates goes to the
// graph's own memory all the same.
//
// 0; -1; -2: no such pool, or too many.
int gruyere_pool_enter(uint64_t pool);

// Ends the calling thread's latest `gruyere_pool_enter`, which must have been of this pool; it may
// be destroyed since.
//
// 0; -1; -2: the thread has entered another last, or none.
int gruyere_pool_leave(uint64_t pool);

// Gives all memory of the pool back to the device at once, and writes the bytes to `*given` (where
// it is not NULL). The device is synchronised first, so that no work uses it. The pool can be used
// again; its reserve is gone.
//
// 0; -1; -2: no such pool; -5: blocks are live in it (`gruyere_pool_blocks` tells which), and
// nothing has been done; -6: the driver did not take everything back, and gets it at the next
// trim; -7: not during a capture.
//
// # Safety
// `given` is NULL or may be written.
int gruyere_pool_release(uint64_t pool, uint64_t *given);

// As `gruyere_pool_release`, and forgets the pool: its key is good for nothing but
// `gruyere_pool_leave` from then on.
//
// # Safety
// `given` is NULL or may be written.
int gruyere_pool_destroy(uint64_t pool, uint64_t *given);

// Writes the numbers of a pool to `*stats`, whose `size` the caller has set; as much as fits.
//
// 0; -1; -2: no such pool, or `size` is less than 8.
//
// # Safety
// `stats` is NULL, or `stats->size` bytes there may be written.
int gruyere_pool_stats(uint64_t pool, struct GruyerePoolStats *stats);

// Writes the largest live blocks of a pool to `blocks`, at most `room` of them, and their number
// to `*count`.
//
// 0; -1; -2: no such pool, or a NULL.
//
// # Safety
// `blocks` is NULL, or has room for `room` of them; `count` is NULL or may be written.
int gruyere_pool_blocks(uint64_t pool,
                        struct GruyerePoolBlock *blocks,
                        uint32_t room,
                        uint32_t *count);

// Begins (`wanted` is not 0) or ends to tell torch's profiler of each malloc, free and
// out-of-memory, as torch's own allocator does. Meant for the time in which memory is profiled:
// meanwhile each of them takes some microseconds. Does not touch CUDA.
//
// 0; -1: there is no torch in this process, or the library cannot work here.
int gruyere_tell_profiler(int wanted);

// The Python package is there, and Gruyère is about to be torch's allocator: with `blame:auto`,
// large blocks say where in the program they come from. `call` is the code object of
// `torch.nn.Module.__call__`, which is kept for as long as the process lives, or NULL. To be
// called by a thread that holds the interpreter's lock, from Python.
//
// 0; -1: there is no interpreter here whose frames can be read, and the log says why.
int gruyere_blame_begin(const void *call);

// The interpreter is about to end: no frame is read from now on, nor when this returns.
void gruyere_blame_end(void);

// The program makes an optimiser: it trains.
void gruyere_blame_optimizer(void);

// The module object at `module` is in the one at `outer`, which calls it `name` (NULL: it is in
// none, and has the name of its class), until `gruyere_blame_forget`, which is to be called before
// that object's memory can be another's.
//
// 0; -2: the name is NULL or no UTF-8.
//
// # Safety
// `name` is NULL, or a NUL-terminated string.
int gruyere_blame_module(const void *module, const void *outer, const char *name);

// The module object at `module` is no more.
void gruyere_blame_forget(const void *module);

// Allocates `size` bytes on `device`, for use in the order of `stream`. Size 0 answers NULL.
//
// Out of memory: throws `torch.OutOfMemoryError` (any other trouble: `RuntimeError`); in a process
// without torch, logs and answers NULL.
void *gruyere_malloc(ptrdiff_t size, int device, GruyereStream stream);

// Frees what [`gruyere_malloc`] gave. `size`, `device` and `stream` are not needed. NULL is fine;
// what is no live block is counted, logged and left alone.
void gruyere_free(void *pointer, ptrdiff_t _size, int _device, GruyereStream _stream);

// torch's initialisation, with the number of devices. Called with 0 when the allocator object is
// made.
void gruyere_init(int _device_count);

// `torch.cuda.empty_cache()`: gives back to the device what nobody uses.
void gruyere_reset(void);

// `torch.cuda.set_per_process_memory_fraction()`: caps what is held on `device` at `fraction` of
// its memory.
void gruyere_memory_fraction(double fraction, int device);

// The start of the piece of memory that `pointer` lies in, and its bytes in `*size` (where `size`
// is not NULL). A pointer that is not ours is answered with itself and 0.
//
// # Safety
// `size` is NULL or may be written.
void *gruyere_base_alloc(void *pointer, size_t *size);

// `Tensor.record_stream`: `stream` uses the block too, so after its free it waits for that stream.
void gruyere_record_stream(void *pointer, GruyereStream stream);

// A capture into pool `id` is about to begin on a stream of `device`. `filter`, a `std::function`
// of torch's that tells which stream, is not needed: the driver is asked.
void gruyere_begin_allocate_to_pool(int device, struct GruyereMempoolId id, void *_filter);

// The bracket that [`gruyere_begin_allocate_to_pool`] opened ends.
void gruyere_end_allocate_to_pool(int device, struct GruyereMempoolId id);

// The graph that used pool `id` is gone. Its blocks may be freed later.
void gruyere_release_pool(int device, struct GruyereMempoolId id);

// Writes what `torch.cuda.memory_stats` tells of `device` to `*stats`, whose `size` the caller has
// set; as much as fits.
//
// 0; -1: the library cannot work here; -2: no such device, or `size` is less than 8.
//
// # Safety
// `stats` is NULL, or `stats->size` bytes there may be written.
int gruyere_torch_stats(int device, struct GruyereTorchStats *stats);

// The peaks of [`gruyere_torch_stats`] begin again at what there is now; those of `gruyere_stats`
// are of the whole life of the process.
//
// 0; -1: the library cannot work here; -2: no such device.
int gruyere_reset_peaks(int device);

// What [`gruyere_torch_stats`] accumulates (`allocated`, `freed` and the `num_` fields) begins
// again at 0.
//
// 0; -1: the library cannot work here; -2: no such device.
int gruyere_reset_accumulated(int device);

// What lies where on `device` now, to be given to [`gruyere_snapshot_free`] once. Lanes are looked
// at one after the other, so beside threads that allocate meanwhile its parts are some
// microseconds apart.
//
// NULL: nothing has been allocated in this process, or there is no such device.
struct GruyereSnapshot *gruyere_snapshot(int device);

// Frees a snapshot and all that it points to. NULL is fine.
//
// # Safety
// `snapshot` is NULL, or from [`gruyere_snapshot`] and not freed yet.
void gruyere_snapshot_free(struct GruyereSnapshot *snapshot);

// Writes what each capture pool of `device` holds to `pools`, at most `room` of them, and how many
// there are to `*count`. Cheap, where [`gruyere_snapshot`] looks at every block.
//
// 0; -1: the library cannot work here; -2: no such device, or a NULL.
//
// # Safety
// `pools` is NULL, or has room for `room` of them; `count` is NULL or may be written.
int gruyere_capture_pools(int device, struct GruyerePool *pools, uint32_t room, uint32_t *count);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* GRUYERE_H */
