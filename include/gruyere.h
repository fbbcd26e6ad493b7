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

// The version of [`GruyereStats`] that this header describes.
#define GRUYERE_STATS_VERSION 1

// The version of [`GruyereHistory`] that this header describes.
#define GRUYERE_HISTORY_VERSION 1

// The version of [`GruyereTorchStats`] that this header describes.
#define GRUYERE_TORCH_STATS_VERSION 1

// The version of [`GruyereSnapshot`] that this header describes.
#define GRUYERE_SNAPSHOT_VERSION 1

// Numbers of one device, in bytes where not said otherwise. Later versions add fields at the end only.
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
} GruyereStats;

// Something that happened.
typedef struct GruyereHistoryEntry {
  // 0: alloc; 1: free requested; 2: free completed; 3: memory from the driver; 4: memory to the driver; 5: out of memory.
  uint32_t action;
  // The device.
  uint32_t device;
  // Where; of an out-of-memory, the bytes that the driver said are free.
  uint64_t address;
  // How much, rounded up to 512.
  uint64_t bytes;
  // The stream's handle.
  uint64_t stream;
  // Microseconds since 1970.
  uint64_t time;
  // See [`gruyere_history_context`].
  uint64_t context;
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

// What was noted. Later versions add fields at the end of each struct only: step through the arrays by the sizes given here.
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

// `cudaStream_t`: 0 and 1 are the legacy default stream, 2 the calling thread's.
typedef void *GruyereStream;

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

// What `torch.cuda.memory_stats` tells. The arrays are by pool: all, blocks of up to 1 MiB, larger ones. Later versions add fields at the
// end only.
typedef struct GruyereTorchStats {
  // In: the bytes that the caller has room for. Out: the bytes that were written.
  uint32_t size;
  // Out: the version that the library has.
  uint32_t version;
  // Blocks in the program's hands.
  struct GruyereStat allocation[3];
  // Pieces of memory that the driver gave: pages, spans, or blocks, by the backing. Pages of slabs are small; spans may serve both, and are
  // large.
  struct GruyereStat segment[3];
  // Blocks in the program's hands, or freed and waiting for streams.
  struct GruyereStat active[3];
  // Free pieces that cannot be given back, since a used one shares their page or span. Known when somebody looks: a peak is the highest
  // that was seen by a call of this function.
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

// A contiguous range of memory held: a span, a row of mapped pages, a block that the driver gave. [`GruyereBlock`]s tile it.
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
  // 1: it is cut into blocks of up to 1 MiB only.
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
  // Of these, in slabs: for blocks of up to 1 MiB.
  uint64_t small;
} GruyerePool;

// What lies where on a device. Later versions add fields at the end of each struct only: step through the arrays by the sizes given here.
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

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Announces which hooks the loader has wired: 1 is record_stream, 2 are the capture hooks (begin, end, release), 3 both. Until then memory
// never passes from stream to stream, and every request asks whether its stream captures.
//
// CUDA is not touched by this: announced early, it is remembered until the first request, and children may still be forked.
void gruyere_announce_hooks(uint32_t bits);

// Tags the calling thread's next requests: 0 auto, 1 transient, 2 step, 3 persistent. Tags nest, up to 31.
//
// 0, or -2: no such lifetime, or too many tags are open.
int gruyere_lifetime_push(uint8_t lifetime);

// Takes the calling thread's innermost tag away. 0, or -2: none is open.
int gruyere_lifetime_pop(void);

// A training step, or a request of a server, is over.
void gruyere_mark_step(void);

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
// 0; -1: the library has not allocated anything here; -2: `path` is NULL; -3: the file could not be written (the log says why).
//
// # Safety
// `path` is NULL or a NUL-terminated string.
int gruyere_dump(const char *path);

// Walks every page and block and holds the books against the driver's. For tests: no other thread may be allocating.
//
// 0; -1: the library has not allocated anything here; -4: something is broken (the log says what).
int gruyere_validate(void);

// The library's version, a static string.
const char *gruyere_version(void);

// Begins to note mallocs and frees: the latest `entries` of them, and where each live block came from (0 entries: only that). `clear` other
// than 0 forgets what was noted before.
//
// 0; -1: the library cannot work here.
int gruyere_history_start(uint64_t entries, int clear);

// Ends it, and forgets all of it.
void gruyere_history_stop(void);

// The calling thread's requests are noted with this number from now on; 0: with none. The number that it was before.
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

// Writes the latest out-of-memory to `*out`, of which `size` bytes may be written; as much as fits.
//
// The bytes written; 0: there was none.
//
// # Safety
// `out` may be written, `size` bytes.
size_t gruyere_latest_out_of_memory(struct GruyereOutOfMemory *out, size_t size);

// Checks `settings`, written as in `GRUYERE_CONF`. What is wrong is written to `message` as a NUL-terminated text, cut to `room` bytes. Does
// not touch CUDA, and changes nothing.
//
// 0; -2: something is wrong, or `settings` is NULL or not UTF-8.
//
// # Safety
// `settings` is NULL or a NUL-terminated string; `message` is NULL, or `room` bytes there may be written.
int gruyere_check_configuration(const char *settings, char *message, size_t room);

// As [`gruyere_malloc`](super::torch::gruyere_malloc), for torch's own caching allocator in front: it asks for whole segments, and NULL is the
// answer that makes it give back what it caches, ask again, and raise its own out-of-memory in the end. Never throws.
void *gruyere_segment_malloc(ptrdiff_t size, int device, GruyereStream stream);

// Allocates `size` bytes on `device`, for use in the order of `stream`. Size 0 answers NULL.
//
// Out of memory: throws `torch.OutOfMemoryError` (any other trouble: `RuntimeError`); in a process without torch, logs and answers NULL.
void *gruyere_malloc(ptrdiff_t size, int device, GruyereStream stream);

// Frees what [`gruyere_malloc`] gave. `size`, `device` and `stream` are not needed. NULL is fine; what is no live block is counted, logged and
// left alone.
void gruyere_free(void *pointer, ptrdiff_t _size, int _device, GruyereStream _stream);

// torch's initialisation, with the number of devices. Called with 0 when the allocator object is made.
void gruyere_init(int _device_count);

// `torch.cuda.empty_cache()`: gives back to the device what nobody uses.
void gruyere_reset(void);

// `torch.cuda.set_per_process_memory_fraction()`: caps what is held on `device` at `fraction` of its memory.
void gruyere_memory_fraction(double fraction, int device);

// The start of the piece of memory that `pointer` lies in, and its bytes in `*size` (where `size` is not NULL). A pointer that is not ours
// is answered with itself and 0.
//
// # Safety
// `size` is NULL or may be written.
void *gruyere_base_alloc(void *pointer, size_t *size);

// `Tensor.record_stream`: `stream` uses the block too, so after its free it waits for that stream.
void gruyere_record_stream(void *pointer, GruyereStream stream);

// A capture into pool `id` is about to begin on a stream of `device`. `filter`, a `std::function` of torch's that tells which stream, is not
// needed: the driver is asked.
void gruyere_begin_allocate_to_pool(int device, struct GruyereMempoolId id, void *_filter);

// The bracket that [`gruyere_begin_allocate_to_pool`] opened ends.
void gruyere_end_allocate_to_pool(int device, struct GruyereMempoolId id);

// The graph that used pool `id` is gone. Its blocks may be freed later.
void gruyere_release_pool(int device, struct GruyereMempoolId id);

// Writes what `torch.cuda.memory_stats` tells of `device` to `*stats`, whose `size` the caller has set; as much as fits.
//
// 0; -1: the library cannot work here; -2: no such device, or `size` is less than 8.
//
// # Safety
// `stats` is NULL, or `stats->size` bytes there may be written.
int gruyere_torch_stats(int device, struct GruyereTorchStats *stats);

// The peaks of [`gruyere_torch_stats`] begin again at what there is now; those of `gruyere_stats` are of the whole life of the process.
//
// 0; -1: the library cannot work here; -2: no such device.
int gruyere_reset_peaks(int device);

// What [`gruyere_torch_stats`] accumulates (`allocated`, `freed` and the `num_` fields) begins again at 0.
//
// 0; -1: the library cannot work here; -2: no such device.
int gruyere_reset_accumulated(int device);

// What lies where on `device` now, to be given to [`gruyere_snapshot_free`] once. Lanes are looked at one after the other, so beside
// threads that allocate meanwhile its parts are some microseconds apart.
//
// NULL: nothing has been allocated in this process, or there is no such device.
struct GruyereSnapshot *gruyere_snapshot(int device);

// Frees a snapshot and all that it points to. NULL is fine.
//
// # Safety
// `snapshot` is NULL, or from [`gruyere_snapshot`] and not freed yet.
void gruyere_snapshot_free(struct GruyereSnapshot *snapshot);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* GRUYERE_H */
