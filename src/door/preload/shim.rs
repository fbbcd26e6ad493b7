//! The exported functions: shims that jump to their bodies with the caller's return address as an
//! extra argument.
//!
//! The caller determines the CUDA runtime where the process has several, or where none is in the
//! global scope ([`super::runtime`]). A Rust function cannot know its return address, so the shims
//! are two instructions of assembly: on entry it lies on top of the stack (x86-64) or in the link
//! register (AArch64). The caller's arguments stay in place.

/// Exports `$name`, a shim before `$body`. `after n`: the function has n arguments of one register
/// each, n at most 5.
macro_rules! export {
    ($($name:ident after $count:tt => $body:path;)*) => {$(
        $crate::door::preload::shim::export_one!($name, $count, $body);
    )*};
}

#[cfg(target_arch = "x86_64")]
macro_rules! export_one {
    ($name:ident, 0, $body:path) => { $crate::door::preload::shim::bare!($name, $body, "mov rdi, \
        [rsp]"); };
    ($name:ident, 1, $body:path) => { $crate::door::preload::shim::bare!($name, $body, "mov rsi, \
        [rsp]"); };
    ($name:ident, 2, $body:path) => { $crate::door::preload::shim::bare!($name, $body, "mov rdx, \
        [rsp]"); };
    ($name:ident, 3, $body:path) => { $crate::door::preload::shim::bare!($name, $body, "mov rcx, \
        [rsp]"); };
    ($name:ident, 4, $body:path) => { $crate::door::preload::shim::bare!($name, $body, "mov r8, \
        [rsp]"); };
    ($name:ident, 5, $body:path) => { $crate::door::preload::shim::bare!($name, $body, "mov r9, \
        [rsp]"); };
    // Three arguments, or four, and before the last of three a structure of 128 bytes by value: it
    // lies on the stack, where the body looks for it too.
    ($name:ident, unique_id, $body:path) => { $crate::door::preload::shim::export_one!(
        $name, 3, $body); };
    ($name:ident, unique_id_and_config, $body:path) => { $crate::door::preload::shim::export_one!(
        $name, 4, $body); };
    // One pointer, then a structure of 24 bytes by value: it lies on the stack, above the return
    // address.
    ($name:ident, extent, $body:path) => {
        $crate::door::preload::shim::bare!($name, $body, "mov rdx, [rsp]", "lea rsi, [rsp + 8]");
    };
    // Six arguments fill the registers: the seventh goes on the stack, which is then aligned as at
    // any call.
    ($name:ident, 6, $body:path) => {
        #[doc = concat!("`", stringify!($name), "` of the CUDA runtime.")]
        ///
        /// # Safety
        /// As the CUDA runtime's function of this name.
        #[unsafe(naked)]
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name() {
            core::arch::naked_asm!(
                ".cfi_startproc",
                "push qword ptr [rsp]",
                ".cfi_adjust_cfa_offset 8",
                "call {body}",
                "add rsp, 8",
                ".cfi_adjust_cfa_offset -8",
                "ret",
                ".cfi_endproc",
                body = sym $body,
            )
        }
    };
}

#[cfg(target_arch = "aarch64")]
macro_rules! export_one {
    ($name:ident, 0, $body:path) => {
        $crate::door::preload::shim::bare!($name, $body, "mov x0, x30");
    };
    ($name:ident, 1, $body:path) => {
        $crate::door::preload::shim::bare!($name, $body, "mov x1, x30");
    };
    ($name:ident, 2, $body:path) => {
        $crate::door::preload::shim::bare!($name, $body, "mov x2, x30");
    };
    ($name:ident, 3, $body:path) => {
        $crate::door::preload::shim::bare!($name, $body, "mov x3, x30");
    };
    ($name:ident, 4, $body:path) => {
        $crate::door::preload::shim::bare!($name, $body, "mov x4, x30");
    };
    ($name:ident, 5, $body:path) => {
        $crate::door::preload::shim::bare!($name, $body, "mov x5, x30");
    };
    // A structure of more than 16 bytes by value is a pointer to the caller's copy, in a register.
    ($name:ident, unique_id, $body:path) => {
        $crate::door::preload::shim::export_one!($name, 4, $body);
    };
    ($name:ident, unique_id_and_config, $body:path) => {
        $crate::door::preload::shim::export_one!($name, 5, $body);
    };
    // A structure of more than 16 bytes by value is a pointer to the caller's copy.
    ($name:ident, extent, $body:path) => {
        $crate::door::preload::shim::bare!($name, $body, "mov x2, x30");
    };
    ($name:ident, 6, $body:path) => {
        $crate::door::preload::shim::bare!($name, $body, "mov x6, x30");
    };
}

/// A shim of the given instructions and a jump.
macro_rules! bare {
    ($name:ident, $body:path, $($line:literal),*) => {
        #[doc = concat!("`", stringify!($name), "` of the CUDA runtime.")]
        ///
        /// # Safety
        /// As the CUDA runtime's function of this name.
        #[unsafe(naked)]
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name() {
            core::arch::naked_asm!(
                ".cfi_startproc",
                $($line,)*
                $crate::door::preload::shim::jump!(),
                ".cfi_endproc",
                body = sym $body,
            )
        }
    };
}

#[cfg(target_arch = "x86_64")]
macro_rules! jump {
    () => {
        "jmp {body}"
    };
}
#[cfg(target_arch = "aarch64")]
macro_rules! jump {
    () => {
        "b {body}"
    };
}

pub(crate) use {bare, export, export_one, jump};
