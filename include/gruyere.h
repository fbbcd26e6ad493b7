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

// `cudaStream_t`: 0 and 1 are the legacy default stream, 2 the calling thread's.
typedef void *GruyereStream;

// torch's `c10::MempoolId_t`, a pair by value.
typedef struct GruyereMempoolId {
  // Set for pools that graphs make themselves.
  uint64_t first;
  // Set for pools that the user made.
  uint64_t second;
} GruyereMempoolId;

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

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* GRUYERE_H */
