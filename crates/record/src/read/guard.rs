//! Readers outlive a file that is cut while they read it.
//!
//! A load from a page that the file no longer has raises SIGBUS, which ends the process. Nothing
//! stops a record's owner from cutting it, and seals against that exist only for files without a
//! name (fcntl(2), `F_ADD_SEALS`). So a mapping of another process's file is *guarded*: the handler
//! replaces the whole mapping by zeros and notes the cut; the load runs again and reads zero, a
//! valid value of everything in a record. libwayland-server guards its clients' buffers in this way
//! (`wl_shm_buffer_begin_access`).
//!
//! The first mapping of a file that another process writes installs the handler. A program that
//! uses the library never has it: the program reads only its own record, and a sweep maps nothing.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};

/// Mappings guarded at once, at most.
const MOST: usize = 1 << 14;

/// A guarded range.
struct Place {
    /// ```text
    /// 0        free                    a new mapping (compare-exchange): taken
    /// 1        taken, no address yet   its mapping: address
    /// address  guarded                 its mapping, before it is unmapped: free
    /// ```
    base: AtomicUsize,
    /// Written while the place is taken, before the address.
    length: AtomicUsize,
    /// Whether zeros lie there. Only the handler sets it; a new mapping clears it.
    cut: AtomicBool,
}

static PLACES: [Place; MOST] = [const {
    Place { base: AtomicUsize::new(0), length: AtomicUsize::new(0), cut: AtomicBool::new(false) }
}; MOST];

static INSTALL: Once = Once::new();
/// The previous action at SIGBUS; null until the handler is installed. Leaked: a handler may read
/// it at any time.
static BEFORE: AtomicPtr<libc::sigaction> = AtomicPtr::new(std::ptr::null_mut());

/// A guarded read-only shared mapping of a file.
#[derive(Debug)]
pub struct Guarded {
    base: NonNull<u8>,
    length: usize,
    place: &'static Place,
}

impl std::fmt::Debug for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "cut: {}", self.cut.load(Ordering::Relaxed))
    }
}

// SAFETY: the memory consists of atomics; this side never writes it.
unsafe impl Send for Guarded {}
// SAFETY: as above.
unsafe impl Sync for Guarded {}

impl Guarded {
    /// Maps the first `length` bytes of `file`.
    ///
    /// # Errors
    /// The system's error from installing the handler or from mapping; too many mappings at once.
    pub fn new(file: &File, length: usize) -> io::Result<Guarded> {
        install()?;
        let free = |place: &&Place| {
            place.base.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed).is_ok()
        };
        let Some(place) = PLACES.iter().find(free) else {
            return Err(io::Error::other(format!("{MOST} records are open; close some")));
        };
        let (protection, flags) = (libc::PROT_READ, libc::MAP_SHARED | libc::MAP_NORESERVE);
        // SAFETY: a new mapping at an address of the kernel's choice touches no other memory.
        let base = unsafe {
            libc::mmap(std::ptr::null_mut(), length, protection, flags, file.as_raw_fd(), 0)
        };
        let base = if base == libc::MAP_FAILED {
            Err(io::Error::last_os_error())
        } else {
            NonNull::new(base.cast()).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))
        };
        let base = base.inspect_err(|_| place.base.store(0, Ordering::Release))?;
        place.cut.store(false, Ordering::Relaxed);
        place.length.store(length, Ordering::Relaxed);
        place.base.store(base.as_ptr() as usize, Ordering::Release);
        Ok(Guarded { base, length, place })
    }

    /// The first byte.
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Length in bytes.
    pub fn length(&self) -> usize {
        self.length
    }

    /// Whether the file was cut: anything read since this was last false may be zeros.
    pub fn is_cut(&self) -> bool {
        self.place.cut.load(Ordering::Acquire)
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        // First, so that the handler never touches a range that another mapping may have taken.
        self.place.base.store(0, Ordering::Release);
        // SAFETY: our mapping, or the zeros in its place; references into it borrow the mapping.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.length) };
    }
}

/// Installs the handler, once.
fn install() -> io::Result<()> {
    INSTALL.call_once(|| {
        // SAFETY: all-zero is a valid value of this C struct: no flags, the default action.
        let (mut ours, mut before): (libc::sigaction, libc::sigaction) =
            unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
        ours.sa_sigaction = at_fault as *const () as usize;
        ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
        // SAFETY: reads the action and changes nothing; the place is valid. Done before our handler
        // is installed, so that the handler always finds it.
        if unsafe { libc::sigaction(libc::SIGBUS, std::ptr::null(), &mut before) } == 0 {
            BEFORE.store(Box::leak(Box::new(before)), Ordering::Release);
            // SAFETY: `at_fault` only makes system calls and reads atomics; both are allowed in a
            // handler.
            if unsafe { libc::sigaction(libc::SIGBUS, &ours, std::ptr::null_mut()) } != 0 {
                BEFORE.store(std::ptr::null_mut(), Ordering::Release);
            }
        }
    });
    if BEFORE.load(Ordering::Acquire).is_null() {
        return Err(io::Error::other("no handler of SIGBUS can be installed"));
    }
    Ok(())
}

unsafe extern "C" fn at_fault(
    signal: libc::c_int,
    information: *mut libc::siginfo_t,
    _context: *mut libc::c_void,
) {
    // SAFETY: the kernel passes a valid pointer to a handler with SA_SIGINFO; for a missing page it
    // has an address.
    let (code, address) = unsafe { ((*information).si_code, (*information).si_addr() as usize) };
    let places = if code == libc::BUS_ADRERR { &PLACES[..] } else { &[] };
    for place in places {
        let base = place.base.load(Ordering::Acquire);
        let length = place.length.load(Ordering::Acquire);
        // Read again: the length may belong to the next mapping in this place.
        let is_one = base > 1 && place.base.load(Ordering::Relaxed) == base;
        if is_one && (base..base.saturating_add(length)).contains(&address) {
            // Before the zeros, so that a reader of a zero never finds the mapping whole.
            place.cut.store(true, Ordering::Release);
            let flags =
                libc::MAP_FIXED | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
            // SAFETY: exactly a guarded range, mapped while a load from it runs: the loading code
            // borrows its owner. Zero is a valid value of everything there.
            let zeros =
                unsafe { libc::mmap(base as *mut _, length, libc::PROT_READ, flags, -1, 0) };
            if zeros != libc::MAP_FAILED {
                return;
            }
        }
    }
    // Not ours: the previous action comes back. The faulting access runs again, or a sent signal is
    // sent again.
    // SAFETY: not null once our handler is installed, and leaked; a handler may call both.
    unsafe {
        libc::sigaction(signal, BEFORE.load(Ordering::Acquire), std::ptr::null_mut());
        if code <= 0 {
            libc::raise(signal);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt as _;

    #[test]
    fn a_file_that_is_cut_while_it_is_read_reads_as_zeros_and_others_are_left_alone() {
        let (cut, whole) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
        for file in [&cut, &whole] {
            file.write_all_at(&[7; 8192], 0).unwrap();
        }
        let (first, second) =
            (Guarded::new(&cut, 8192).unwrap(), Guarded::new(&whole, 8192).unwrap());
        // SAFETY: inside the mapping.
        let at = |mapping: &Guarded, offset| unsafe {
            mapping.base().add(offset).as_ptr().read_volatile()
        };
        assert_eq!((at(&first, 5000), first.is_cut()), (7, false));
        cut.set_len(0).unwrap();
        assert_eq!((at(&first, 5000), at(&first, 0)), (0, 0));
        assert!(first.is_cut());
        assert_eq!((at(&second, 5000), second.is_cut()), (7, false));
        drop(first);
        // The place is used again, and starts whole.
        let third = Guarded::new(&whole, 8192).unwrap();
        assert_eq!((at(&third, 8191), third.is_cut()), (7, false));
    }
}
