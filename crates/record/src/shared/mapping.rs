//! The memory of a record: a file in /dev/shm if possible, else a memfd, else private memory.
//!
//! A full tmpfs raises SIGBUS at a touch of a page that was promised but not allocated; so every
//! page is allocated (`fallocate`) before it is touched. On a disk that is not enough: the first
//! write to an allocated page may need a block for the file system's own books; so these writes'
//! faults are taken in advance (`MADV_POPULATE_WRITE`), where a lack of room is an error. A lock on
//! the open file shows liveness: the kernel drops it when the process ends in any way; a forked
//! child gives up its copy at once.

use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::Once;
use std::sync::atomic::{AtomicI32, AtomicU64, AtomicUsize, Ordering};

/// Prefix of all file names of records.
pub const FILE_PREFIX: &str = "gruyere-";
/// Suffix of all file names of records.
pub const FILE_SUFFIX: &str = ".record";

/// Prefix of all names of memfds.
pub const MEMFD_PREFIX: &[u8] = b"gruyere records of ";
/// The longest name of a memfd (bytes; `memfd_create(2)`).
const MEMFD_NAME: usize = 249;
/// Bytes copied at once.
const COPIED: u64 = 1 << 20;

/// Kind of the memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Backing {
    /// A named file.
    File(PathBuf),
    /// A memfd; readers find it through /proc/PID/fd.
    Memfd,
    /// Memory of this process only.
    Private,
}

/// Sign of liveness ([`crate::layout::Header::lock_kind`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum LockKind {
    /// None: the file system has no locks.
    None = 0,
    /// `F_OFD_SETLK` over the whole file; readers query it with `F_OFD_GETLK`, which takes no lock.
    OpenFile = 1,
    /// `flock(LOCK_EX)`; readers try `LOCK_SH`.
    Flock = 2,
}

/// A writer's memory.
#[derive(Debug)]
pub struct Mapping {
    base: NonNull<u8>,
    length: usize,
    fd: RawFd,
    backing: Backing,
    lock: LockKind,
    /// Whether the file lies on a disk, where allocated pages may still lack room.
    on_disk: bool,
    /// The process that made it: a forked child must neither unlink nor close.
    creator: u32,
    /// Bytes that may still be allocated; tests lower it to simulate a full file system.
    room: AtomicU64,
}

// SAFETY: plain memory and a descriptor; the memory holds atomics.
unsafe impl Send for Mapping {}
// SAFETY: as above; the methods only read the fields.
unsafe impl Sync for Mapping {}

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Refuses sizes past RLIMIT_FSIZE: beyond it, SIGXFSZ would end the training run.
fn within_file_limit(length: u64) -> io::Result<()> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is a valid place for the answer.
    check(unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &mut limit) })?;
    if limit.rlim_cur != libc::RLIM_INFINITY && length > limit.rlim_cur {
        return Err(io::Error::from_raw_os_error(libc::EFBIG));
    }
    Ok(())
}

/// Allocates the file's bytes from `offset` on, so that touching them can't fail.
fn allocate(fd: RawFd, offset: u64, length: u64) -> io::Result<()> {
    // A signal may interrupt every call (profilers send thousands a second).
    for _ in 0..100 {
        // SAFETY: plain call on a descriptor.
        let result =
            unsafe { libc::fallocate(fd, 0, offset as libc::off_t, length as libc::off_t) };
        if result == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::EINTR) => {}
            Some(libc::EOPNOTSUPP | libc::ENOSYS) => return write_zeros(fd, offset, length),
            _ => return Err(error),
        }
    }
    Err(io::Error::from_raw_os_error(libc::EINTR))
}

/// `fallocate` for file systems without it. The bytes are fresh: never written before.
fn write_zeros(fd: RawFd, mut offset: u64, mut length: u64) -> io::Result<()> {
    let zeros = [0u8; 4096];
    while length > 0 {
        let bytes = length.min(zeros.len() as u64) as usize;
        // SAFETY: `zeros` is readable for `bytes`.
        let written =
            unsafe { libc::pwrite(fd, zeros.as_ptr().cast(), bytes, offset as libc::off_t) };
        if written < 0 {
            let error = io::Error::last_os_error();
            if error.raw_os_error() == Some(libc::EINTR) {
                continue;
            }
            return Err(error);
        }
        offset += written as u64;
        length -= written as u64;
    }
    Ok(())
}

/// Whether the file lies on a disk rather than in memory; unknown counts as a disk.
fn is_on_disk(fd: RawFd) -> bool {
    // SAFETY: the caller's descriptor, which it keeps open meanwhile.
    let file = unsafe { BorrowedFd::borrow_raw(fd) };
    // libc has no name for that of ramfs.
    const RAMFS_MAGIC: i64 = 0x8584_58f6;
    let in_memory = [libc::TMPFS_MAGIC, libc::HUGETLBFS_MAGIC, RAMFS_MAGIC];
    !rustix::fs::fstatfs(file).is_ok_and(|system| in_memory.contains(&system.f_type))
}

/// Takes the write faults of allocated bytes of a mapping on a disk, so that later ones find all
/// blocks there; contents stay as they are. What is allocated is a promise that ext4 keeps by
/// splitting an extent at the first write: the split may need a block for the tree of extents, and
/// pages larger than blocks may reach into a hole beside the bytes; without room, both are SIGBUS.
fn populate(base: NonNull<u8>, fd: RawFd, offset: u64, length: u64) -> io::Result<()> {
    // SAFETY: plain call.
    let page = (unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as u64).max(1);
    let begin = offset - offset % page;
    let end = (offset + length).next_multiple_of(page);
    for _ in 0..100 {
        // SAFETY: whole pages that hold bytes of the mapping; their contents are not changed.
        let result = unsafe {
            let at = base.as_ptr().add(begin as usize).cast();
            libc::madvise(at, (end - begin) as usize, libc::MADV_POPULATE_WRITE)
        };
        if result == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::EINTR | libc::EAGAIN) => {}
            // A write would have raised SIGBUS.
            Some(libc::EFAULT) => return Err(io::Error::from_raw_os_error(libc::ENOSPC)),
            // Before Linux 5.14.
            Some(libc::EINVAL) => return write_zeros(fd, offset, length),
            _ => return Err(error),
        }
    }
    Err(io::Error::from_raw_os_error(libc::EINTR))
}

fn map(fd: RawFd, length: usize) -> io::Result<NonNull<u8>> {
    let flags = if fd < 0 { libc::MAP_PRIVATE | libc::MAP_ANONYMOUS } else { libc::MAP_SHARED }
        | libc::MAP_NORESERVE;
    // SAFETY: a new mapping at an address of the kernel's choice touches no other memory.
    let base = unsafe {
        libc::mmap(std::ptr::null_mut(), length, libc::PROT_READ | libc::PROT_WRITE, flags, fd, 0)
    };
    if base == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    NonNull::new(base.cast()).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))
}

/// The whole file, for an open-file-description lock.
fn whole_file(kind: libc::c_int) -> libc::flock {
    // SAFETY: a plain C struct of integers; all-zero is a valid value (l_pid must be 0 for these
    // locks).
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = kind as libc::c_short;
    lock.l_whence = libc::SEEK_SET as libc::c_short;
    lock
}

fn lock(fd: RawFd) -> LockKind {
    let mut whole = whole_file(libc::F_WRLCK);
    // SAFETY: `whole` is a valid lock description.
    if unsafe { libc::fcntl(fd, libc::F_OFD_SETLK, &mut whole) } == 0 {
        return LockKind::OpenFile;
    }
    // SAFETY: plain call on a descriptor.
    if unsafe { libc::flock(fd, libc::LOCK_EX | libc::LOCK_NB) } == 0 {
        return LockKind::Flock;
    }
    LockKind::None
}

/// Whether a process holds the lock of the record open on `fd`; `None` if unknown.
pub fn is_locked(fd: RawFd, kind: u32) -> Option<bool> {
    if kind == LockKind::OpenFile as u32 {
        let mut whole = whole_file(libc::F_RDLCK);
        // SAFETY: `whole` is a valid place for the answer. The query takes no lock, so it can't
        // disturb the writer.
        if unsafe { libc::fcntl(fd, libc::F_OFD_GETLK, &mut whole) } == 0 {
            return Some(whole.l_type != libc::F_UNLCK as libc::c_short);
        }
    } else if kind == LockKind::Flock as u32 {
        // SAFETY: plain calls on a descriptor.
        unsafe {
            if libc::flock(fd, libc::LOCK_SH | libc::LOCK_NB) == 0 {
                libc::flock(fd, libc::LOCK_UN);
                return Some(false);
            }
        }
        return (io::Error::last_os_error().raw_os_error() == Some(libc::EWOULDBLOCK))
            .then_some(true);
    }
    None
}

/// The name of a memfd that stands for a file in `directory`, by which readers find it in /proc.
pub fn memfd_name(directory: &Path) -> Vec<u8> {
    let directory = std::path::absolute(directory).unwrap_or_else(|_| directory.to_owned());
    let directory: PathBuf = directory.components().collect();
    let mut name = [MEMFD_PREFIX, directory.as_os_str().as_bytes()].concat();
    name.truncate(MEMFD_NAME);
    name
}

/// The name of this process's record; `number` distinguishes several in one process.
pub fn file_name(pid_namespace: u64, pid: u64, start_time: u64, number: u32) -> String {
    format!("{FILE_PREFIX}{pid_namespace}-{pid}-{start_time}-{number}{FILE_SUFFIX}")
}

/// Creates a file in `directory` under the first free name of this process's records.
fn create(directory: &Path) -> io::Result<(File, PathBuf)> {
    let (namespace, pid) = (crate::facts::pid_namespace(), u64::from(std::process::id()));
    let start = crate::facts::start_time();
    for number in 0..1024 {
        let path = directory.join(file_name(namespace, pid, start, number));
        // `create_new` refuses any existing file, dangling links included.
        let mut options = OpenOptions::new();
        options.read(true).write(true).create_new(true).mode(0o600);
        match options.custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC).open(&path) {
            Ok(file) => return Ok((file, path)),
            // Another record of this process, or a planted file: the next name.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
    Err(io::Error::from_raw_os_error(libc::EEXIST))
}

impl Mapping {
    /// A new file in `directory` of `length` bytes, locked by this process; the first `fixed` bytes
    /// are allocated.
    pub fn file(directory: &Path, length: u64, fixed: u64) -> io::Result<Mapping> {
        within_file_limit(length)?;
        let (file, path) = create(directory)?;
        let fd = file.into_raw_fd();
        let lock = lock(fd);
        Mapping::over(fd, length, fixed, Backing::File(path.clone()), lock).inspect_err(|_| {
            // We made this name a moment ago.
            let _ = std::fs::remove_file(&path);
        })
    }

    /// As [`Mapping::file`], but a memfd, where no file can be made in `directory`.
    pub fn memfd(directory: &Path, length: u64, fixed: u64) -> io::Result<Mapping> {
        within_file_limit(length)?;
        let name = CString::new(memfd_name(directory))?;
        // SAFETY: a C string.
        let fd = check(unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC) })?;
        let lock = lock(fd);
        Mapping::over(fd, length, fixed, Backing::Memfd, lock)
    }

    fn over(
        fd: RawFd,
        length: u64,
        fixed: u64,
        backing: Backing,
        lock: LockKind,
    ) -> io::Result<Mapping> {
        // SAFETY: plain call on a descriptor; sparse, so it takes no memory.
        let base = check(unsafe { libc::ftruncate(fd, length as libc::off_t) })
            .and_then(|_| allocate(fd, 0, fixed))
            .and_then(|()| map(fd, length as usize));
        let on_disk = is_on_disk(fd);
        let base = base.and_then(|base| {
            let room = if on_disk { populate(base, fd, 0, fixed) } else { Ok(()) };
            room.map(|()| base).inspect_err(|_| {
                // SAFETY: mapped a moment ago, and unknown to other code.
                unsafe { libc::munmap(base.as_ptr().cast(), length as usize) };
            })
        });
        match base {
            Ok(base) => {
                let length = length as usize;
                forked::register(fd, base, length);
                let creator = std::process::id();
                Ok(Mapping {
                    base,
                    length,
                    fd,
                    backing,
                    lock,
                    on_disk,
                    creator,
                    room: AtomicU64::new(u64::MAX),
                })
            }
            Err(error) => {
                // SAFETY: ours, and unknown to other code.
                unsafe { libc::close(fd) };
                Err(error)
            }
        }
    }

    /// Private zeroed memory of `length` bytes; only touched pages take memory.
    pub fn private(length: u64) -> io::Result<Mapping> {
        let base = map(-1, length as usize)?;
        Ok(Mapping {
            base,
            length: length as usize,
            fd: -1,
            backing: Backing::Private,
            lock: LockKind::None,
            on_disk: false,
            creator: std::process::id(),
            room: AtomicU64::new(u64::MAX),
        })
    }

    /// The first byte. Page-aligned; unwritten bytes are zero.
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Bytes of address space.
    pub fn length(&self) -> usize {
        self.length
    }

    /// The kind of the memory.
    pub fn backing(&self) -> &Backing {
        &self.backing
    }

    /// The sign of liveness.
    pub fn lock_kind(&self) -> LockKind {
        self.lock
    }

    /// Makes the bytes from `offset` on safe to touch. They must be untouched: on some file systems
    /// this writes zeros.
    pub fn ensure(&self, offset: u64, length: u64) -> io::Result<()> {
        let room = |room: u64| room.checked_sub(length);
        if self.room.fetch_update(Ordering::Relaxed, Ordering::Relaxed, room).is_err() {
            return Err(io::Error::from_raw_os_error(libc::ENOSPC));
        }
        if self.fd < 0 {
            return Ok(());
        }
        allocate(self.fd, offset, length)?;
        if self.on_disk { populate(self.base, self.fd, offset, length) } else { Ok(()) }
    }

    /// Lets [`Mapping::ensure`] allocate `bytes` more, then simulates a full file system. For
    /// tests.
    pub fn limit_room(&self, bytes: u64) {
        self.room.store(bytes, Ordering::Relaxed);
    }

    /// Whether this process made it (a forked child did not).
    pub fn is_creator(&self) -> bool {
        std::process::id() == self.creator
    }

    /// Copies the file's present contents to a file beside it that no process locks: to readers,
    /// the record of a process that died at this moment. Returns its path; `None`: there is no
    /// file, or this is a forked child.
    ///
    /// # Errors
    /// The file system's error; removes the unfinished copy.
    pub fn copy(&self) -> io::Result<Option<PathBuf>> {
        self.copy_of(self.fd)
    }

    /// As [`Mapping::copy`], with the file's contents at `moment`.
    ///
    /// # Errors
    /// The file system's error; removes the unfinished copy.
    pub fn copy_moment(&self, moment: &File) -> io::Result<Option<PathBuf>> {
        self.copy_of(moment.as_raw_fd())
    }

    /// Keeps the file's present contents in memory of this process; `None` where [`Mapping::copy`]
    /// would leave nothing.
    ///
    /// # Errors
    /// The system's error for lack of memory.
    pub fn moment(&self) -> io::Result<Option<File>> {
        let (true, Backing::File(_)) = (self.is_creator(), &self.backing) else {
            return Ok(None);
        };
        // SAFETY: plain call; the name is a static string.
        let fd = unsafe { libc::memfd_create(c"out of memory".as_ptr(), libc::MFD_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: just made, and unknown to other code.
        let file = unsafe { File::from_raw_fd(fd) };
        self.copy_to(self.fd, &file)?;
        Ok(Some(file))
    }

    fn copy_of(&self, fd: RawFd) -> io::Result<Option<PathBuf>> {
        let (true, Backing::File(path)) = (self.is_creator(), &self.backing) else {
            return Ok(None);
        };
        let (file, copy) = create(path.parent().unwrap_or(Path::new("/")))?;
        self.copy_to(fd, &file).map(|()| Some(copy.clone())).inspect_err(|_| {
            let _ = std::fs::remove_file(&copy);
        })
    }

    /// Copies the allocated parts of `fd`, as long as the record; holes stay holes.
    fn copy_to(&self, fd: RawFd, file: &File) -> io::Result<()> {
        file.set_len(self.length as u64)?;
        let seek = |offset: u64, whence| {
            // SAFETY: plain call on a descriptor whose position no code uses.
            let found = unsafe { libc::lseek(fd, offset as libc::off_t, whence) };
            if found < 0 { Err(io::Error::last_os_error()) } else { Ok(found as u64) }
        };
        let mut buffer = vec![0; COPIED as usize];
        let mut at = 0;
        while at < self.length as u64 {
            at = match seek(at, libc::SEEK_DATA) {
                Ok(data) => data,
                // Only a hole up to the end.
                Err(error) if error.raw_os_error() == Some(libc::ENXIO) => return Ok(()),
                Err(error) => return Err(error),
            };
            let end = seek(at, libc::SEEK_HOLE)?;
            while at < end {
                let bytes = COPIED.min(end - at) as usize;
                // SAFETY: `buffer` is writable for more than `bytes`. We read the file, not the
                // mapping, so concurrent writes are the kernel's business.
                let read = unsafe {
                    libc::pread(fd, buffer.as_mut_ptr().cast(), bytes, at as libc::off_t)
                };
                match usize::try_from(read) {
                    Err(_) => return Err(io::Error::last_os_error()),
                    Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                    Ok(read) => file.write_all_at(&buffer[..read], at)?,
                }
                at += read as u64;
            }
        }
        Ok(())
    }

    /// Removes the file's name; the memory stays. Does nothing in a forked child.
    pub fn unlink(&self) {
        if let (true, Backing::File(path)) = (self.is_creator(), &self.backing) {
            // An error means that a sweep removed it: nothing is left to do.
            let _ = std::fs::remove_file(path);
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        forked::forget(self.base);
        // SAFETY: ours; the dropping code has no pointer into it any more.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.length) };
        // A forked child's descriptor is already closed, and its number may be another file's.
        if self.fd >= 0 && self.is_creator() {
            // SAFETY: ours.
            unsafe { libc::close(self.fd) };
        }
    }
}

/// A forked child gives up the descriptors and mappings of inherited records: both would keep the
/// lock (and so the appearance of life) after the parent's death. It puts private zeros in the
/// mapping's place, so that a stray access does no harm.
mod forked {
    use super::*;

    struct Inherited {
        /// 0 free; 1 being filled or emptied; else the base address. Claimed by compare-exchange.
        base: AtomicUsize,
        length: AtomicUsize,
        fd: AtomicI32,
    }

    // A process has one record; tests have some dozens.
    static INHERITED: [Inherited; 256] = [const {
        Inherited { base: AtomicUsize::new(0), length: AtomicUsize::new(0), fd: AtomicI32::new(-1) }
    }; 256];
    static HANDLER: Once = Once::new();

    pub fn register(fd: RawFd, base: NonNull<u8>, length: usize) {
        HANDLER.call_once(|| {
            // SAFETY: the handler makes only system calls, as a forked child may; the library is
            // never unloaded. An error (no memory) only means that children keep the lock for a
            // while.
            unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
        });
        for entry in &INHERITED {
            if entry.base.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed).is_ok() {
                entry.length.store(length, Ordering::Relaxed);
                entry.fd.store(fd, Ordering::Relaxed);
                entry.base.store(base.as_ptr() as usize, Ordering::Release);
                return;
            }
        }
    }

    pub fn forget(base: NonNull<u8>) {
        let address = base.as_ptr() as usize;
        for entry in &INHERITED {
            if entry.base.compare_exchange(address, 0, Ordering::AcqRel, Ordering::Relaxed).is_ok()
            {
                return;
            }
        }
    }

    unsafe extern "C" fn in_child() {
        for entry in &INHERITED {
            let base = entry.base.load(Ordering::Acquire);
            if base <= 1 {
                continue;
            }
            let flags =
                libc::MAP_FIXED | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
            // SAFETY: exactly a range registered and not yet forgotten, so still a record's; it
            // holds atomics, for which zero is a value. The child has one thread.
            unsafe {
                let protection = libc::PROT_READ | libc::PROT_WRITE;
                libc::mmap(
                    base as *mut _,
                    entry.length.load(Ordering::Relaxed),
                    protection,
                    flags,
                    -1,
                    0,
                );
                libc::close(entry.fd.load(Ordering::Relaxed));
            }
            entry.base.store(0, Ordering::Release);
        }
    }
}
