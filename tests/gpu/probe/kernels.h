/* The probe's kernels, as text that the driver compiles (kernels.c). */
#ifndef PROBE_KERNELS_H
#define PROBE_KERNELS_H

#include "driver.h"

/* For every device with mappings (PTX 6.4, sm_60). Numbers are 32 bits wide.
 *   fill(p, value, n, ns): waits for ns nanoseconds, then writes
 *   differ(p, value, n, counter): adds to the counter how many are another value; differ_nc reads
 *     past the cache that writes keep true
 *   product(a, b, c, n): c = a times b, square, n a multiple of 16; reads as differ_nc
 *   write_read(a, b, value, counter): each thread writes through a and reads its own through b */
static const char BASIC[] =
    ".version 6.4\n.target sm_60\n.address_size 64\n"
    ".visible .entry fill(.param .u64 pp, .param .u32 pv, .param .u32 pn, .param .u64 pns) {\n"
    "  .reg .pred %p<3>; .reg .b32 %r<8>; .reg .b64 %d<8>;\n"
    "  ld.param.u64 %d1, [pp]; cvta.to.global.u64 %d1, %d1; ld.param.u32 %r1, [pv]; ld.param.u32 "
    "%r2, [pn]; ld.param.u64 %d2, [pns];\n"
    "  mov.u64 %d3, %globaltimer; add.u64 %d3, %d3, %d2; setp.eq.u64 %p1, %d2, 0; @%p1 bra write;\n"
    "wait: mov.u64 %d4, %globaltimer; setp.lt.u64 %p1, %d4, %d3; @%p1 bra wait;\n"
    "write: mov.u32 %r3, %ctaid.x; mov.u32 %r4, %ntid.x; mov.u32 %r5, %tid.x; mad.lo.u32 %r5, %r3, "
    "%r4, %r5;\n"
    "  mov.u32 %r6, %nctaid.x; mul.lo.u32 %r6, %r6, %r4;\n"
    "next: setp.ge.u32 %p1, %r5, %r2; @%p1 bra done;\n"
    "  mul.wide.u32 %d5, %r5, 4; add.u64 %d5, %d1, %d5; st.global.u32 [%d5], %r1; add.u32 %r5, "
    "%r5, %r6; bra next;\n"
    "done: ret;\n}\n"
#define DIFFER(name, load)                                                                         \
    ".visible .entry " name "(.param .u64 pp, .param .u32 pv, .param .u32 pn, .param .u64 pc) {\n" \
    "  .reg .pred %p<3>; .reg .b32 %r<9>; .reg .b64 %d<8>;\n"                                      \
    "  ld.param.u64 %d1, [pp]; cvta.to.global.u64 %d1, %d1; ld.param.u32 %r1, [pv]; ld.param.u32 " \
    "%r2, [pn];\n"                                                                                 \
    "  ld.param.u64 %d2, [pc]; cvta.to.global.u64 %d2, %d2;\n"                                     \
    "  mov.u32 %r3, %ctaid.x; mov.u32 %r4, %ntid.x; mov.u32 %r5, %tid.x; mad.lo.u32 %r5, %r3, "    \
    "%r4, %r5;\n"                                                                                  \
    "  mov.u32 %r6, %nctaid.x; mul.lo.u32 %r6, %r6, %r4;\n"                                        \
    "next: setp.ge.u32 %p1, %r5, %r2; @%p1 bra done;\n"                                            \
    "  mul.wide.u32 %d5, %r5, 4; add.u64 %d5, %d1, %d5; " load                                     \
    " %r7, [%d5]; setp.eq.u32 %p2, %r7, %r1; @%p2 bra same;\n"                                     \
    "  red.global.add.u32 [%d2], 1;\n"                                                             \
    "same: add.u32 %r5, %r5, %r6; bra next;\n"                                                     \
    "done: ret;\n}\n"
    DIFFER("differ", "ld.global.u32") DIFFER(
        "differ_nc",
        "ld.global.nc.u32") ".visible .entry product(.param .u64 pa, .param .u64 pb, .param .u64 "
                            "pc, .param .u32 pn) {\n"
                            "  .reg .pred %p<2>; .reg .b32 %r<12>; .reg .b64 %d<12>;\n"
                            "  ld.param.u64 %d1, [pa]; cvta.to.global.u64 %d1, %d1; ld.param.u64 "
                            "%d2, [pb]; cvta.to.global.u64 %d2, %d2;\n"
                            "  ld.param.u64 %d3, [pc]; cvta.to.global.u64 %d3, %d3; ld.param.u32 "
                            "%r1, [pn];\n"
                            "  mov.u32 %r2, %ctaid.y; mov.u32 %r3, %ntid.y; mov.u32 %r4, %tid.y; "
                            "mad.lo.u32 %r2, %r2, %r3, %r4;\n"
                            "  mov.u32 %r5, %ctaid.x; mov.u32 %r6, %ntid.x; mov.u32 %r7, %tid.x; "
                            "mad.lo.u32 %r5, %r5, %r6, %r7;\n"
                            "  mul.lo.u32 %r8, %r2, %r1; mul.wide.u32 %d4, %r8, 4; add.u64 %d4, "
                            "%d1, %d4; mul.wide.u32 %d5, %r5, 4; add.u64 %d5, %d2, %d5;\n"
                            "  mul.wide.u32 %d6, %r1, 4; mov.u32 %r9, 0; mov.u32 %r4, 0;\n"
                            "next: ld.global.nc.u32 %r10, [%d4]; ld.global.nc.u32 %r11, [%d5]; "
                            "mad.lo.u32 %r9, %r10, %r11, %r9;\n"
                            "  add.u64 %d4, %d4, 4; add.u64 %d5, %d5, %d6; add.u32 %r4, %r4, 1; "
                            "setp.lt.u32 %p1, %r4, %r1; @%p1 bra next;\n"
                            "  add.u32 %r8, %r8, %r5; mul.wide.u32 %d7, %r8, 4; add.u64 %d7, %d3, "
                            "%d7; st.global.u32 [%d7], %r9; ret;\n}\n"
#define WRITE_READ(fence)                                                                         \
    ".visible .entry write_read(.param .u64 pa, .param .u64 pb, .param .u32 pv, .param .u64 pc) " \
    "{\n"                                                                                         \
    "  .reg .pred %p<2>; .reg .b32 %r<7>; .reg .b64 %d<8>;\n"                                     \
    "  ld.param.u64 %d1, [pa]; cvta.to.global.u64 %d1, %d1; ld.param.u64 %d2, [pb]; "             \
    "cvta.to.global.u64 %d2, %d2;\n"                                                              \
    "  ld.param.u32 %r1, [pv]; ld.param.u64 %d3, [pc]; cvta.to.global.u64 %d3, %d3;\n"            \
    "  mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x; mov.u32 %r4, %tid.x; mad.lo.u32 %r2, %r2, "   \
    "%r3, %r4;\n"                                                                                 \
    "  mul.wide.u32 %d4, %r2, 4; add.u64 %d5, %d1, %d4; add.u64 %d6, %d2, %d4;\n"                 \
    "  ld.global.u32 %r5, [%d6]; st.global.u32 [%d5], %r1; " fence " ld.global.u32 %r5, [%d6];\n" \
    "  setp.eq.u32 %p1, %r5, %r1; @%p1 bra same; red.global.add.u32 [%d3], 1;\n"                  \
    "same: ret;\n}\n"
    WRITE_READ("membar.gl;");

/* The fence that the PTX manual asks for between two names of one memory (PTX 7.5, sm_70). */
static const char FENCED[] = ".version 7.5\n.target sm_70\n.address_size 64\n" WRITE_READ(
    "fence.proxy.alias; membar.gl;");

/* For devices with TMA and programmatic dependent launches (PTX 8.0, sm_90).
 *   differ_bulk: as differ, a tile of 4 KiB for each block of 256 threads, through the copy engine
 *   fill_early: as fill, and lets dependents start at once
 *   differ_late: as differ, and waits for what it depends on */
static const char HOPPER[] =
    ".version 8.0\n.target sm_90\n.address_size 64\n"
    ".visible .entry differ_bulk(.param .u64 pp, .param .u32 pv, .param .u32 pn, .param .u64 pc) "
    "{\n"
    "  .reg .pred %p<4>; .reg .b32 %r<12>; .reg .b64 %d<8>; .shared .align 128 .b8 tile[4096]; "
    ".shared .align 8 .b64 done;\n"
    "  ld.param.u64 %d1, [pp]; cvta.to.global.u64 %d1, %d1; ld.param.u32 %r1, [pv]; ld.param.u64 "
    "%d2, [pc];\n"
    "  cvta.to.global.u64 %d2, %d2; mov.u32 %r2, %ctaid.x; mul.wide.u32 %d3, %r2, 4096; add.u64 "
    "%d3, %d1, %d3;\n"
    "  mov.u32 %r3, tile; mov.u32 %r4, done; mov.u32 %r5, %tid.x; setp.ne.u32 %p1, %r5, 0; @%p1 "
    "bra ready;\n"
    "  mbarrier.init.shared.b64 [%r4], 1; fence.proxy.async;\n"
    "  mbarrier.arrive.expect_tx.shared.b64 %d4, [%r4], 4096;\n"
    "  cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r3], [%d3], 4096, "
    "[%r4];\n"
    "ready: bar.sync 0;\n"
    "wait: mbarrier.try_wait.parity.shared.b64 %p2, [%r4], 0; @!%p2 bra wait;\n"
    "  mov.u32 %r6, %r5;\n"
    "next: setp.ge.u32 %p3, %r6, 1024; @%p3 bra end; shl.b32 %r7, %r6, 2; add.u32 %r7, %r3, %r7; "
    "ld.shared.u32 %r8, [%r7];\n"
    "  setp.eq.u32 %p2, %r8, %r1; @%p2 bra same; red.global.add.u32 [%d2], 1;\n"
    "same: add.u32 %r6, %r6, 256; bra next;\n"
    "end: ret;\n}\n"
    ".visible .entry fill_early(.param .u64 pp, .param .u32 pv, .param .u32 pn, .param .u64 pns) "
    "{\n"
    "  .reg .pred %p<3>; .reg .b32 %r<8>; .reg .b64 %d<8>;\n"
    "  griddepcontrol.launch_dependents;\n"
    "  ld.param.u64 %d1, [pp]; cvta.to.global.u64 %d1, %d1; ld.param.u32 %r1, [pv]; ld.param.u32 "
    "%r2, [pn]; ld.param.u64 %d2, [pns];\n"
    "  mov.u64 %d3, %globaltimer; add.u64 %d3, %d3, %d2;\n"
    "wait: mov.u64 %d4, %globaltimer; setp.lt.u64 %p1, %d4, %d3; @%p1 bra wait;\n"
    "  mov.u32 %r3, %ctaid.x; mov.u32 %r4, %ntid.x; mov.u32 %r5, %tid.x; mad.lo.u32 %r5, %r3, %r4, "
    "%r5;\n"
    "  mov.u32 %r6, %nctaid.x; mul.lo.u32 %r6, %r6, %r4;\n"
    "next: setp.ge.u32 %p1, %r5, %r2; @%p1 bra done;\n"
    "  mul.wide.u32 %d5, %r5, 4; add.u64 %d5, %d1, %d5; st.global.u32 [%d5], %r1; add.u32 %r5, "
    "%r5, %r6; bra next;\n"
    "done: ret;\n}\n" DIFFER("differ_late", "griddepcontrol.wait; ld.global.u32");

/* A kernel of one of the texts above; NULL, with the driver's code, where the driver does not take
 * it. */
CUfunction kernel(const char *text, const char *name, CUresult *code);
/* Launches on `stream`, in its order; with `dependent` it may begin before what is in front of it
 * ends. Arguments are as the kernel's. */
CUresult launch(CUfunction function, unsigned blocks, unsigned threads, CUstream stream,
                int dependent, void **arguments);
/* As `launch` of fill: after so many nanoseconds. */
CUresult fill(CUfunction function, CUdeviceptr at, unsigned value, unsigned words,
              uint64_t nanoseconds, CUstream stream);
/* As `launch` of one of the kernels that count differences. */
CUresult differ(CUfunction function, CUdeviceptr at, unsigned value, unsigned words,
                CUdeviceptr counter, CUstream stream, int dependent);
/* Whether kernels do anything here: a stand-in keeps books alone. */
int kernels_run(void);

#endif
