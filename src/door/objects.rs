//! The objects that the loader has loaded into this process.

use std::ffi::{CStr, c_int, c_void};

/// Calls `is_it` with the file name of each loaded object until one is it; whether one was.
pub(super) fn any(mut is_it: &mut dyn FnMut(&CStr) -> bool) -> bool {
    unsafe extern "C" fn visit(
        info: *mut libc::dl_phdr_info,
        _: usize,
        data: *mut c_void,
    ) -> c_int {
        // SAFETY: the loader's own structure, and the closure passed below, which nothing else
        // refers to meanwhile.
        let (name, is_it) =
            unsafe { ((*info).dlpi_name, &mut *data.cast::<&mut dyn FnMut(&CStr) -> bool>()) };
        // SAFETY: where it is not null, the loader's string.
        c_int::from(!name.is_null() && is_it(unsafe { CStr::from_ptr(name) }))
    }
    // SAFETY: `visit` is called back with the pointer passed here, before this returns. It returns
    // what the last call of it did.
    unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut is_it).cast()) != 0 }
}
