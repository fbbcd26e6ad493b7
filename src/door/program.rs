//! What the program in this process is made of, by the libraries that it has loaded.

use super::python;
use crate::heap::Heap;
use crate::record::facts::Uses;
use std::ffi::{CStr, c_int, c_void};

/// Tells the record what the program is made of by now, and returns it.
pub(super) fn tell(heap: &Heap) -> Uses {
    let uses = Uses { torch: is_loaded("libc10.so"), python: python::is_there() };
    heap.record().tell_uses(uses);
    uses
}

/// Whether the process has loaded a library, in any version.
pub(super) fn is_loaded(library: &str) -> bool {
    struct Search<'a> {
        library: &'a str,
        found: bool,
    }
    unsafe extern "C" fn visit(
        info: *mut libc::dl_phdr_info,
        _: usize,
        data: *mut c_void,
    ) -> c_int {
        // SAFETY: the loader's own structure, and the search passed below, which nothing else
        // refers to meanwhile.
        let (name, search) = unsafe { ((*info).dlpi_name, &mut *data.cast::<Search<'_>>()) };
        // SAFETY: where it is not null, the loader's string.
        search.found |=
            !name.is_null() && is_file_of(search.library, unsafe { CStr::from_ptr(name) });
        c_int::from(search.found)
    }
    let mut search = Search { library, found: false };
    // SAFETY: `visit` is called back with the pointer passed here, before this returns.
    unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut search).cast()) };
    search.found
}

fn is_file_of(library: &str, path: &CStr) -> bool {
    let name = path.to_bytes().rsplit(|&byte| byte == b'/').next().unwrap_or_default();
    name.strip_prefix(library.as_bytes())
        .is_some_and(|rest| rest.is_empty() || rest.starts_with(b"."))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_driver_is_known_by_its_file_name() {
        for name in [c"libcuda.so.1", c"/usr/lib/libcuda.so.535.104.05", c"/x/libcuda.so"] {
            assert!(is_file_of("libcuda.so", name), "{name:?}");
        }
        for name in [c"libcudart.so.12", c"/libcuda.so.1/other.so", c"", c"libcuda.sort"] {
            assert!(!is_file_of("libcuda.so", name), "{name:?}");
        }
    }
}
