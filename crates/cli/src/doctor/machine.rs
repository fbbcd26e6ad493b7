//! Machine and container: shared memory, records, limits.

use std::ffi::CString;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use gruyere_record::record_dir::DEFAULT;
use gruyere_record::size::BinaryBytes;
use gruyere_record::sweep::{Found, State};

use super::finding::Findings;

/// Room for a few processes with busy heaps.
const ENOUGH: u64 = 256 << 20;
/// Approximate minimum of a process.
const LEAST: u64 = 8 << 20;

const MORE_ROOM: &str = "docker run --shm-size=1g or --ipc=host; in Kubernetes, mount an emptyDir \
                         with `medium: Memory` at /dev/shm";

/// A mounted file system.
struct Room {
    total: u64,
    free: u64,
    is_memory: bool,
}

fn room(folder: &Path) -> Option<Room> {
    let name = CString::new(folder.as_os_str().as_bytes()).ok()?;
    // SAFETY: all-zero is a valid value of both.
    let (mut vfs, mut fs): (libc::statvfs, libc::statfs) =
        unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
    // SAFETY: the name is NUL-terminated; each call writes one structure.
    let done = unsafe {
        libc::statvfs(name.as_ptr(), &mut vfs) == 0 && libc::statfs(name.as_ptr(), &mut fs) == 0
    };
    done.then(|| Room {
        total: vfs.f_blocks.saturating_mul(vfs.f_frsize),
        free: vfs.f_bavail.saturating_mul(vfs.f_frsize),
        // TMPFS_MAGIC, RAMFS_MAGIC, HUGETLBFS_MAGIC
        is_memory: [0x0102_1994, 0x8584_58f6, 0x9584_58f6]
            .contains(&(fs.f_type as u64 & 0xffff_ffff)),
    })
}

/// Why we may not create files in `folder`; `None` if we may.
fn unwritable(folder: &Path) -> Option<io::Error> {
    let Ok(name) = CString::new(folder.as_os_str().as_bytes()) else {
        return Some(io::ErrorKind::InvalidInput.into());
    };
    // SAFETY: the name is NUL-terminated.
    let is_writable = unsafe { libc::access(name.as_ptr(), libc::W_OK | libc::X_OK) == 0 };
    (!is_writable).then(io::Error::last_os_error)
}

/// Examines the records' folder.
pub fn shared_memory(findings: &mut Findings, folder: &Path) {
    const AREA: &str = "shared memory";
    let name = folder.display();
    let Some(Room { total, free, is_memory }) = room(folder) else {
        findings.warning(
            AREA,
            format!(
                "{name}: {}; processes keep their record where `gruyere ps` does not see it",
                io::Error::last_os_error()
            ),
            match folder == Path::new(DEFAULT) {
                true => {
                    "mount a tmpfs there; for a container, --ipc=private or --shm-size adds one"
                }
                false => "make it, or name another folder in memory with GRUYERE_RECORD_DIR",
            },
        );
        return;
    };
    let size = format!("{name}: {} free of {}", BinaryBytes(free), BinaryBytes(total));
    if let Some(error) = unwritable(folder) {
        let (why, remedy) = match error.kind() {
            io::ErrorKind::ReadOnlyFilesystem => (
                "it is read-only",
                "mount it writable, or name a writable folder in memory with GRUYERE_RECORD_DIR"
                    .to_owned(),
            ),
            _ => (
                "this user cannot write there",
                format!("chmod 1777 {name}, or run as another user"),
            ),
        };
        findings.warning(
            AREA,
            format!(
                "{size}; {why}, so processes keep their record where `gruyere ps` does not see it"
            ),
            remedy,
        );
    } else if free < LEAST {
        findings.warning(
            AREA,
            format!(
                "{size}: too little for a record; `gruyere ps --sweep` removes those of dead \
                 processes"
            ),
            MORE_ROOM,
        );
    } else if free < ENOUGH {
        findings.warning(
            AREA,
            format!(
                "{size}: enough for small heaps; torch's DataLoader workers use it too, and \
                 Gruyère records less detail when it is full"
            ),
            MORE_ROOM,
        );
    } else {
        findings.ok(AREA, size);
    }
    if !is_memory {
        findings.note(
            AREA,
            format!("{name} is not an in-memory file system: writing a record costs disk traffic"),
        );
    }
}

/// Examines the existing records.
pub fn records(findings: &mut Findings, found: &[Found]) {
    let of = |state| found.iter().filter(|found| found.state == state).count();
    let stale = of(State::Stale);
    let unreadable: Vec<_> = found
        .iter()
        .filter(|found| found.state != State::Stale)
        .filter_map(|found| found.reader.as_ref().err())
        .collect();
    findings.ok("records", format!("{} of live processes", found.len() - stale - unreadable.len()));
    if stale > 0 {
        let held: u64 = found
            .iter()
            .filter(|found| found.state == State::Stale)
            .filter_map(|found| found.reader.as_ref().ok()?.bytes_held())
            .sum();
        findings.note(
            "records",
            format!(
                "{stale} of processes that ended without a clean exit ({} of shared memory): \
                 `gruyere post` shows the last, `gruyere ps --sweep` removes them",
                BinaryBytes(held)
            ),
        );
    }
    for error in unreadable.iter().take(4) {
        let error = error.to_string();
        let (text, remedy) =
            error.split_once("; ").unwrap_or((&error, "`gruyere ps` lists the records there are"));
        findings.warning("records", text, remedy);
    }
}

/// The first line of a file, if it exists.
fn line(path: &str) -> Option<String> {
    Some(std::fs::read_to_string(path).ok()?.lines().next()?.trim().to_owned())
}

fn number(path: &str) -> Option<u64> {
    line(path)?.parse().ok()
}

/// A limit of this process; `None`: unlimited.
fn limit(resource: libc::__rlimit_resource_t) -> Option<u64> {
    // SAFETY: all-zero is a valid rlimit.
    let mut limit: libc::rlimit = unsafe { std::mem::zeroed() };
    // SAFETY: writes one rlimit.
    let known = unsafe { libc::getrlimit(resource, &mut limit) } == 0;
    (known && limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
}

/// Examines the kernel and its limits.
pub fn limits(findings: &mut Findings) {
    let kernel = line("/proc/sys/kernel/osrelease").unwrap_or_default();
    let host = line("/proc/sys/kernel/hostname").unwrap_or_default();
    findings.ok("machine", format!("{host}, Linux {kernel}, {}", std::env::consts::ARCH));
    match limit(libc::RLIMIT_AS) {
        Some(bytes) => findings.problem(
            "limits",
            format!(
                "address space is limited to {} (ulimit -v): CUDA reserves more than the memory of \
                 all devices",
                BinaryBytes(bytes)
            ),
            "ulimit -v unlimited; in Slurm, unset VSizeFactor",
        ),
        None => findings.ok("limits", "address space is not limited"),
    }
    if number("/proc/sys/vm/overcommit_memory") == Some(2) {
        findings.warning(
            "limits",
            "vm.overcommit_memory is 2: address space counts as memory, and CUDA reserves a lot of \
             it",
            "sysctl vm.overcommit_memory=0, or a higher vm.overcommit_ratio",
        );
    }
    let cgroup = number("/sys/fs/cgroup/memory.max")
        .zip(number("/sys/fs/cgroup/memory.current"))
        .or_else(|| {
            number("/sys/fs/cgroup/memory/memory.limit_in_bytes")
                .zip(number("/sys/fs/cgroup/memory/memory.usage_in_bytes"))
        })
        // cgroup v1 expresses "no limit" as the largest number of pages.
        .filter(|(most, _)| *most < 1 << 60);
    match cgroup {
        Some((most, used)) if used > most / 10 * 9 => findings.warning(
            "limits",
            format!(
                "the container uses {} of {} of host memory, which includes records and pinned \
                 memory",
                BinaryBytes(used),
                BinaryBytes(most)
            ),
            "give the container more memory: it is killed without a message when it runs out",
        ),
        Some((most, used)) => {
            findings.ok(
                "limits",
                format!(
                    "the container may use {} of host memory, and uses {}",
                    BinaryBytes(most),
                    BinaryBytes(used)
                ),
            );
        }
        None => {}
    }
}
