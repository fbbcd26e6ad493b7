//! What the program in this process is made of, by the libraries that it has loaded.
#![deny(unsafe_code)]

use super::{objects, python};
use crate::heap::Heap;
use crate::record::facts::Uses;
use std::ffi::CStr;

/// Tells the record what the program is made of by now, and returns it.
pub(super) fn tell(heap: &Heap) -> Uses {
    let uses = Uses { torch: is_loaded("libc10.so"), python: python::is_there() };
    heap.record().tell_uses(uses);
    uses
}

/// Whether the process has loaded a library, in any version.
pub(super) fn is_loaded(library: &str) -> bool {
    objects::any(&mut |file| is_file_of(library, file))
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
