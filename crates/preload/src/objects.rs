//! The loaded object (executable or library) around an address.

use std::ffi::{CStr, c_int, c_void};
use std::mem::MaybeUninit;
use std::ops::Range;

/// A loaded object.
#[derive(Clone, Copy)]
pub struct Object {
    base: usize,
    name: Option<&'static CStr>,
}

impl PartialEq for Object {
    fn eq(&self, other: &Self) -> bool {
        self.base == other.base
    }
}

impl Object {
    /// The object at `address`; `None`: code that no object owns (made at run time).
    pub fn of(address: *const c_void) -> Option<Self> {
        let mut info = MaybeUninit::<libc::Dl_info>::zeroed();
        // SAFETY: dladdr takes any address and fills `info` where it returns anything but 0.
        let info = unsafe {
            if libc::dladdr(address, info.as_mut_ptr()) == 0 {
                return None;
            }
            info.assume_init()
        };
        let name = (!info.dli_fname.is_null())
            // SAFETY: the name of a loaded object, NUL-terminated; it lives as long as the object,
            // whose code is running or has just been found.
            .then(|| unsafe { CStr::from_ptr(info.dli_fname) });
        Some(Self { base: info.dli_fbase as usize, name })
    }

    /// This library.
    pub fn own() -> Option<Self> {
        Self::of(Self::own as *const c_void)
    }

    /// Its path in the dynamic linker.
    pub fn path(self) -> Option<&'static CStr> {
        self.name
    }

    /// Whether it is part of NVIDIA's driver. On WSL2, `libcuda.so.1` looks up the functions of a
    /// second one.
    pub fn is_driver(self) -> bool {
        self.name.is_some_and(|name| is_driver(name.to_bytes()))
    }
}

fn is_driver(path: &[u8]) -> bool {
    let file = path.rsplit(|&byte| byte == b'/').next().unwrap_or(path);
    [&b"libcuda.so"[..], b"libcudadebugger.so", b"libnvidia-"]
        .iter()
        .any(|start| file.starts_with(start))
}

/// The addresses from the first to the last loaded byte of the object at `address`.
pub fn range_of(address: usize) -> Option<Range<usize>> {
    struct Search {
        address: usize,
        found: Option<Range<usize>>,
    }
    unsafe extern "C" fn look(
        info: *mut libc::dl_phdr_info,
        _size: usize,
        data: *mut c_void,
    ) -> c_int {
        // SAFETY: dl_iterate_phdr gives a valid description of an object, with `dlpi_phnum` program
        // headers, and our own `data`.
        let (info, search) = unsafe { (&*info, &mut *data.cast::<Search>()) };
        if info.dlpi_phdr.is_null() {
            return 0;
        }
        // SAFETY: as above.
        let headers =
            unsafe { std::slice::from_raw_parts(info.dlpi_phdr, usize::from(info.dlpi_phnum)) };
        let base = info.dlpi_addr as usize;
        let loaded = headers.iter().filter(|header| header.p_type == libc::PT_LOAD).map(|header| {
            let start = base.wrapping_add(header.p_vaddr as usize);
            start..start.wrapping_add(header.p_memsz as usize)
        });
        let mut whole: Option<Range<usize>> = None;
        let mut holds = false;
        for part in loaded {
            holds |= part.contains(&search.address);
            whole = Some(match whole {
                None => part,
                Some(so_far) => so_far.start.min(part.start)..so_far.end.max(part.end),
            });
        }
        if holds {
            search.found = whole;
        }
        c_int::from(holds)
    }
    let mut search = Search { address, found: None };
    // SAFETY: `look` does not unwind, and `search` lives until the call returns.
    unsafe { libc::dl_iterate_phdr(Some(look), (&raw mut search).cast()) };
    search.found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_drivers_libraries_are_known_by_their_file_names() {
        for path in [
            "/usr/lib/libcuda.so.1",
            "libcuda.so.570.1",
            "/usr/lib/wsl/lib/libcuda.so.1.1",
            "libnvidia-ml.so.1",
        ] {
            assert!(is_driver(path.as_bytes()), "{path}");
        }
        for path in ["libcudart.so.12", "/opt/libcuda.so.1/program", "", "/usr/lib/libcudnn.so.9"] {
            assert!(!is_driver(path.as_bytes()), "{path}");
        }
    }

    #[test]
    fn a_function_lies_in_its_own_object() {
        let here = range_of as *const c_void;
        assert!(Object::of(here) == Object::own());
        assert!(range_of(here as usize).is_some_and(|range| range.contains(&(here as usize))));
        let libc = libc::dladdr as *const c_void;
        assert!(Object::of(libc) != Object::own());
        assert_eq!(range_of(8), None);
        assert!(Object::of(8 as *const c_void).is_none());
    }
}
