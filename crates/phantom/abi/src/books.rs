//! The books as JSON: memory of each device, calls by caller, and refusals.

use crate::abi::call_counts;
use crate::gpu::try_gpu;
use crate::process::{self, Phase};
use crate::reads;
use crate::registrations;
use crate::workspaces;
use gruyere_phantom::{CallCounts, Caller};
use serde::Serialize;
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Once;

/// A device's memory, bytes.
#[derive(Serialize)]
struct DeviceReport {
    capacity: u64,
    physical: u64,
    physical_peak: u64,
    plain: u64,
    pools: u64,
    handles: u64,
}

/// The host's reads of device memory.
#[derive(Serialize)]
struct HostReads {
    count: u64,
    bytes: u64,
}

#[derive(Serialize)]
struct Report {
    pid: u32,
    devices: Vec<DeviceReport>,
    /// Address space in use and its peak, bytes.
    address_space: u64,
    address_space_peak: u64,
    /// Unreleased physical handles, and unfreed address reservations.
    vmm_handles: usize,
    vmm_reservations: usize,
    /// Page-locked host memory, bytes.
    host_bytes: usize,
    /// The most managed memory at a time, bytes. It is the host's here.
    managed_peak: usize,
    /// Copies from the devices to the host.
    host_reads: HostReads,
    /// Calls that would have taken an unknown amount of memory, with their counts.
    unknown_workspaces: BTreeMap<&'static str, u64>,
    /// Exported functions and their counts of calls.
    calls: BTreeMap<&'static str, u64>,
    /// Simulated calls through libcuda (the allocator's) and through libcudart (torch's own).
    allocator: BTreeMap<&'static str, u64>,
    program: BTreeMap<&'static str, u64>,
    /// Calls of forked children, which have no CUDA.
    forked_calls: u64,
    /// Calls refused for breaking the driver's rules.
    misuse: Vec<String>,
    /// Registrations with NCCL so far, and those whose memory moved while they lasted.
    registrations: usize,
    stale_registrations: Vec<String>,
    /// The oracle's findings; `None`: it was off.
    hazards: Option<Vec<String>>,
}

fn counts(counts: &CallCounts) -> BTreeMap<&'static str, u64> {
    counts.iter().map(|(kind, n)| (kind.name(), n)).collect()
}

fn report() -> Option<Report> {
    let phantom = try_gpu()?;
    let sim = &phantom.sim;
    let devices = (0..phantom.device_count()).map(|device| {
        let books = sim.books(device);
        DeviceReport {
            capacity: books.capacity,
            physical: books.physical,
            physical_peak: books.physical_peak,
            plain: books.in_plain,
            pools: books.in_pools,
            handles: books.in_handles,
        }
    });
    let space = sim.address_books();
    let (vmm_handles, vmm_reservations) = sim.vmm_counts();
    let (count, bytes) = reads::all();
    let (registrations, stale_registrations) = registrations::all();
    Some(Report {
        pid: std::process::id(),
        devices: devices.collect(),
        address_space: space.reserved,
        address_space_peak: space.peak,
        vmm_handles,
        vmm_reservations,
        host_bytes: phantom.host.bytes(),
        managed_peak: phantom.host.managed_peak(),
        host_reads: HostReads { count, bytes },
        unknown_workspaces: workspaces::all(),
        calls: call_counts().into_iter().collect(),
        allocator: counts(&sim.counts(Caller::Allocator)),
        program: counts(&sim.counts(Caller::Program)),
        forked_calls: process::forked_calls(),
        misuse: sim.misuses().iter().map(ToString::to_string).collect(),
        registrations,
        stale_registrations,
        hazards: sim.has_oracle().then(|| sim.faults().iter().map(ToString::to_string).collect()),
    })
}

/// Writes the books to `path`.
pub fn write_to(path: &Path) -> io::Result<()> {
    let Some(report) = report() else { return Ok(()) };
    // Written aside and renamed: a reader may be waiting for the file.
    let part = path.with_extension("part");
    std::fs::write(&part, serde_json::to_vec_pretty(&report)?)?;
    std::fs::rename(part, path)
}

/// The file that `PHANTOM_BOOKS` names, if set.
pub fn file() -> Option<PathBuf> {
    named_by("PHANTOM_BOOKS")
}

/// The file that a variable names, if set; `%p` in it becomes the process id.
fn named_by(variable: &str) -> Option<PathBuf> {
    let name = std::env::var(variable).ok().filter(|name| !name.is_empty())?;
    Some(PathBuf::from(name.replace("%p", &std::process::id().to_string())))
}

/// Creates the file that `PHANTOM_CONTEXTS` names: this process has a context. (A killed process
/// writes no books, as those come at exit.)
pub fn note_context() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        if let Some(path) = named_by("PHANTOM_CONTEXTS")
            && let Err(error) = std::fs::write(&path, "")
        {
            eprintln!("phantom: {}: {error}", path.display());
        }
    });
}

/// Writes the books to the file of `PHANTOM_BOOKS`.
pub fn write() {
    if let Some(path) = file()
        && let Err(error) = write_to(&path)
    {
        eprintln!("phantom: {}: {error}", path.display());
    }
}

/// Runs last: the finalisers of libraries that need this one run first, so the books include frees
/// from static destructors.
extern "C" fn finalize() {
    if matches!(process::phase(), Phase::Running | Phase::Gone) {
        let _ = std::panic::catch_unwind(write);
    }
}

#[used]
#[unsafe(link_section = ".fini_array")]
static FINALIZE: extern "C" fn() = finalize;
