//! The exported `dlsym`: a cheap test of the name, then a jump.

use std::arch::naked_asm;
use std::ffi::{CStr, c_char, c_void};

use crate::{lookup, names, real};

/// Whether we answer `name`: one of our names, looked up in any way but RTLD_NEXT. Reads its
/// arguments and nothing else.
///
/// # Safety
/// `name` is NUL-terminated.
unsafe extern "C" fn is_ours(handle: *mut c_void, name: *const c_char) -> u32 {
    if handle == libc::RTLD_NEXT {
        return 0;
    }
    // SAFETY: the caller's promise.
    let name = unsafe { CStr::from_ptr(name) };
    u32::from(names::of_symbol(name).is_some())
}

/// `dlsym(3)`. A name that is not ours leaves by a jump to the next `dlsym`, with arguments, stack
/// and return address unchanged.
///
/// # Safety
/// As `dlsym`: `handle` is one of `dlopen`'s or a special one, `name` NUL-terminated. (NULL for a
/// name is the real one's business.)
#[cfg(target_arch = "x86_64")]
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    naked_asm!(
        ".cfi_startproc",
        "endbr64",
        "test rsi, rsi",
        "je 2f",
        // "cu" and a capital: the driver's. The runtime's, cuBLAS's and the like go on in small
        // letters.
        "cmp byte ptr [rsi], 99",
        "jne 2f",
        "cmp byte ptr [rsi + 1], 117",
        "jne 2f",
        "movzx eax, byte ptr [rsi + 2]",
        "sub eax, 65",
        "cmp eax, 25",
        "ja 2f",
        "push rdi",
        "push rsi",
        "sub rsp, 8",
        ".cfi_adjust_cfa_offset 24",
        "call {is_ours}",
        "add rsp, 8",
        "pop rsi",
        "pop rdi",
        ".cfi_adjust_cfa_offset -24",
        "test eax, eax",
        "je 2f",
        "mov rdx, qword ptr [rsp]",
        "jmp {answer}",
        // Not ours.
        "2:",
        "mov rax, qword ptr [rip + {next}]",
        "test rax, rax",
        "je 5f",
        "3:",
        "mov rcx, qword ptr [rsp]",
        "sub rcx, qword ptr [rip + {start}]",
        "cmp rcx, qword ptr [rip + {length}]",
        "jae 4f",
        "mov rax, qword ptr [rip + {libc}]",
        "4:",
        "jmp rax",
        // The first call.
        "5:",
        "push rdi",
        "push rsi",
        "sub rsp, 8",
        ".cfi_adjust_cfa_offset 24",
        "call {prepare}",
        "add rsp, 8",
        "pop rsi",
        "pop rdi",
        ".cfi_adjust_cfa_offset -24",
        "test rax, rax",
        "jne 3b",
        "ret",
        ".cfi_endproc",
        is_ours = sym is_ours,
        answer = sym lookup::answer,
        prepare = sym real::prepare,
        next = sym real::NEXT,
        libc = sym real::LIBC,
        start = sym real::NEXT_START,
        length = sym real::NEXT_LENGTH,
    )
}

/// As on x86-64.
///
/// # Safety
/// As `dlsym`.
#[cfg(target_arch = "aarch64")]
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    naked_asm!(
        ".cfi_startproc",
        // bti c
        "hint #34",
        "cbz x1, 2f",
        "ldrb w9, [x1]",
        "cmp w9, #99",
        "b.ne 2f",
        "ldrb w9, [x1, #1]",
        "cmp w9, #117",
        "b.ne 2f",
        "ldrb w9, [x1, #2]",
        "sub w9, w9, #65",
        "cmp w9, #25",
        "b.hi 2f",
        "stp x29, x30, [sp, #-32]!",
        ".cfi_adjust_cfa_offset 32",
        ".cfi_offset x30, -24",
        "mov x29, sp",
        "stp x0, x1, [sp, #16]",
        "bl {is_ours}",
        "mov w9, w0",
        "ldp x0, x1, [sp, #16]",
        "ldp x29, x30, [sp], #32",
        ".cfi_adjust_cfa_offset -32",
        ".cfi_restore x30",
        "cbz w9, 2f",
        "mov x2, x30",
        "b {answer}",
        "2:",
        "adrp x16, {next}",
        "add x16, x16, :lo12:{next}",
        "ldar x16, [x16]",
        "cbz x16, 5f",
        "3:",
        "adrp x9, {start}",
        "ldr x9, [x9, :lo12:{start}]",
        "sub x9, x30, x9",
        "adrp x10, {length}",
        "ldr x10, [x10, :lo12:{length}]",
        "cmp x9, x10",
        "b.hs 4f",
        "adrp x16, {libc}",
        "ldr x16, [x16, :lo12:{libc}]",
        "4:",
        "br x16",
        "5:",
        "stp x29, x30, [sp, #-32]!",
        ".cfi_adjust_cfa_offset 32",
        ".cfi_offset x30, -24",
        "mov x29, sp",
        "stp x0, x1, [sp, #16]",
        "bl {prepare}",
        "mov x16, x0",
        "ldp x0, x1, [sp, #16]",
        "ldp x29, x30, [sp], #32",
        ".cfi_adjust_cfa_offset -32",
        ".cfi_restore x30",
        "cbnz x16, 3b",
        "mov x0, #0",
        "ret",
        ".cfi_endproc",
        is_ours = sym is_ours,
        answer = sym lookup::answer,
        prepare = sym real::prepare,
        next = sym real::NEXT,
        libc = sym real::LIBC,
        start = sym real::NEXT_START,
        length = sym real::NEXT_LENGTH,
    )
}
