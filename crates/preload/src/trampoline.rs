//! The driver's functions by symbol, for programs linked to libcuda: each jumps through a slot that
//! its first call fills.

use std::arch::naked_asm;
use std::ffi::{c_char, c_int, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::names::{COUNT, FUNCTIONS};
use crate::objects::Object;
use crate::{lookup, real};

/// Where each function's calls go.
///
/// ```text
/// null -> address   bind(), where libgruyere.so wants the call: the answer stands. Any number of
///                   threads, the same address
/// ```
///
/// Null stays while the answer is the real function: libgruyere.so may not be ready.
static SLOTS: [AtomicPtr<c_void>; COUNT] = [const { AtomicPtr::new(null_mut()) }; COUNT];

/// `CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND`: the process has no libcuda, or one without this
/// function.
const SYMBOL_NOT_FOUND: u32 = 302;

extern "C" fn not_found() -> u32 {
    SYMBOL_NOT_FOUND
}

/// The target of the call of function `index` by the code at `caller`. Never null.
extern "C" fn bind(index: usize, caller: *const c_void) -> *const c_void {
    let Some((function, slot)) = FUNCTIONS.get(index).zip(SLOTS.get(index)) else {
        return not_found as *const c_void;
    };
    let mut real = real::behind_us(function.symbol);
    if real.is_null() {
        // SAFETY: NUL-terminated; nothing is loaded. The handle stays open: libcuda is never
        // unloaded.
        let handle =
            unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
        if !handle.is_null() {
            // SAFETY: a handle of dlopen's.
            real = unsafe { real::look_up(handle, function.symbol, bind as *const c_void) };
        }
    }
    if real.is_null() || Object::of(real) == Object::own() {
        return not_found as *const c_void;
    }
    let target = lookup::in_place_of(index, real, caller);
    if target != real {
        slot.store(target, Ordering::Release);
    }
    target
}

/// Exports jumps. The arguments of a function are not looked at: all of them are integers and
/// pointers, in registers or on the stack, and are where they were when the jump is made.
macro_rules! exports {
    ($($index:literal $name:ident ($($argument:ty),*);)*) => {$(
        /// As the CUDA driver has it.
        ///
        /// # Safety
        /// As the CUDA driver has it.
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        pub unsafe extern "C" fn $name($(_: $argument),*) -> u32 {
            #[cfg(target_arch = "x86_64")]
            naked_asm!(
                ".cfi_startproc",
                "endbr64",
                "mov r11, qword ptr [rip + {slots} + {offset}]",
                "test r11, r11",
                "je 2f",
                "jmp r11",
                "2:",
                "push rdi",
                "push rsi",
                "push rdx",
                "push rcx",
                "push r8",
                "push r9",
                "sub rsp, 8",
                ".cfi_adjust_cfa_offset 56",
                "mov edi, {index}",
                "mov rsi, qword ptr [rsp + 56]",
                "call {bind}",
                "add rsp, 8",
                "pop r9",
                "pop r8",
                "pop rcx",
                "pop rdx",
                "pop rsi",
                "pop rdi",
                ".cfi_adjust_cfa_offset -56",
                "jmp rax",
                ".cfi_endproc",
                slots = sym SLOTS,
                offset = const 8 * $index,
                index = const $index,
                bind = sym bind,
            );
            #[cfg(target_arch = "aarch64")]
            naked_asm!(
                ".cfi_startproc",
                "hint #34",
                "adrp x16, {slots}",
                "add x16, x16, :lo12:{slots}",
                "add x16, x16, #{offset}",
                "ldar x16, [x16]",
                "cbz x16, 2f",
                "br x16",
                "2:",
                "stp x29, x30, [sp, #-80]!",
                ".cfi_adjust_cfa_offset 80",
                ".cfi_offset x30, -72",
                "mov x29, sp",
                "stp x0, x1, [sp, #16]",
                "stp x2, x3, [sp, #32]",
                "stp x4, x5, [sp, #48]",
                "stp x6, x7, [sp, #64]",
                "mov x0, #{index}",
                "mov x1, x30",
                "bl {bind}",
                "mov x16, x0",
                "ldp x0, x1, [sp, #16]",
                "ldp x2, x3, [sp, #32]",
                "ldp x4, x5, [sp, #48]",
                "ldp x6, x7, [sp, #64]",
                "ldp x29, x30, [sp], #80",
                ".cfi_adjust_cfa_offset -80",
                ".cfi_restore x30",
                "br x16",
                ".cfi_endproc",
                slots = sym SLOTS,
                offset = const 8 * $index,
                index = const $index,
                bind = sym bind,
            );
        }
    )*

    /// The names above, by number, for the test.
    #[cfg(test)]
    const EXPORTS: &[(usize, &str)] = &[$(($index, stringify!($name)),)*];
    };
}

type Pointer = *mut c_void;

exports! {
    0 cuGetProcAddress(*const c_char, Pointer, c_int, u64);
    1 cuGetProcAddress_v2(*const c_char, Pointer, c_int, u64, Pointer);
    2 cuMemAlloc_v2(Pointer, usize);
    3 cuMemFree_v2(u64);
    4 cuMemAllocPitch_v2(Pointer, Pointer, usize, usize, u32);
    5 cuMemGetInfo_v2(Pointer, Pointer);
    6 cuMemAllocAsync(Pointer, usize, Pointer);
    7 cuMemAllocAsync_ptsz(Pointer, usize, Pointer);
    8 cuMemFreeAsync(u64, Pointer);
    9 cuMemFreeAsync_ptsz(u64, Pointer);
    10 cuMemAllocFromPoolAsync(Pointer, usize, Pointer, Pointer);
    11 cuMemAllocFromPoolAsync_ptsz(Pointer, usize, Pointer, Pointer);
    12 cuCtxSynchronize();
    13 cuStreamDestroy_v2(Pointer);
    14 cuStreamBeginCapture_v2(Pointer, u32);
    15 cuStreamBeginCapture_v2_ptsz(Pointer, u32);
    16 cuStreamBeginCaptureToGraph(Pointer, Pointer, Pointer, Pointer, usize, u32);
    17 cuStreamBeginCaptureToGraph_ptsz(Pointer, Pointer, Pointer, Pointer, usize, u32);
    18 cuStreamEndCapture(Pointer, Pointer);
    19 cuStreamEndCapture_ptsz(Pointer, Pointer);
    20 cuIpcGetMemHandle(Pointer, u64);
    21 cuDevicePrimaryCtxReset_v2(c_int);
    22 cuMemPoolSetAccess(Pointer, Pointer, usize);
    23 cuMemCreate(Pointer, usize, Pointer, u64);
    24 cuMemRelease(u64);
    25 cuMemMap(u64, usize, usize, u64, u64);
    26 cuMemUnmap(u64, usize);
    27 cuLaunchHostFunc(Pointer, Pointer, Pointer);
    28 cuLaunchHostFunc_ptsz(Pointer, Pointer, Pointer);
    29 cuLaunchHostFunc_v2(Pointer, Pointer, Pointer, u32);
    30 cuLaunchHostFunc_v2_ptsz(Pointer, Pointer, Pointer, u32);
    31 cuStreamAddCallback(Pointer, Pointer, Pointer, u32);
    32 cuStreamAddCallback_ptsz(Pointer, Pointer, Pointer, u32);
    33 cuStreamWaitValue32(Pointer, u64, u32, u32);
    34 cuStreamWaitValue32_ptsz(Pointer, u64, u32, u32);
    35 cuStreamWaitValue32_v2(Pointer, u64, u32, u32);
    36 cuStreamWaitValue32_v2_ptsz(Pointer, u64, u32, u32);
    37 cuStreamWaitValue64(Pointer, u64, u64, u32);
    38 cuStreamWaitValue64_ptsz(Pointer, u64, u64, u32);
    39 cuStreamWaitValue64_v2(Pointer, u64, u64, u32);
    40 cuStreamWaitValue64_v2_ptsz(Pointer, u64, u64, u32);
    41 cuStreamBatchMemOp(Pointer, u32, Pointer, u32);
    42 cuStreamBatchMemOp_ptsz(Pointer, u32, Pointer, u32);
    43 cuStreamBatchMemOp_v2(Pointer, u32, Pointer, u32);
    44 cuStreamBatchMemOp_v2_ptsz(Pointer, u32, Pointer, u32);
    45 cuGraphAddHostNode(Pointer, Pointer, Pointer, usize, Pointer);
    46 cuGraphAddBatchMemOpNode(Pointer, Pointer, Pointer, usize, Pointer);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_function_is_exported_under_its_own_number() {
        assert_eq!(EXPORTS.len(), COUNT);
        for (position, (index, name)) in EXPORTS.iter().enumerate() {
            assert_eq!(*index, position);
            assert_eq!(FUNCTIONS[position].symbol.to_str(), Ok(*name));
        }
    }
}
