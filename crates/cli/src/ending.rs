//! How a followed process ended, and the files it left.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use gruyere_record::reader::DeviceSnapshot;
use gruyere_record::sweep;
use gruyere_record::{DeviceGauge, Owners, Reader};

use crate::candidates::Candidate;

/// The end of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ending {
    /// Its last sign of life.
    pub since: SystemTime,
    /// Whether it ran out of device memory, and no request succeeded after that.
    pub ran_out: bool,
    /// The first line of its conclusion; empty: unknown.
    pub says: String,
    /// The remedy.
    pub remedy: Option<String>,
    /// The record for `gruyere post`; `None`: it left none.
    pub record: Option<PathBuf>,
    /// The page of its last out-of-memory.
    pub page: Option<PathBuf>,
}

impl Ending {
    /// The end of the process that left this record.
    pub fn of(reader: &Reader<'_>) -> Ending {
        let candidate = Candidate::of(reader, reader.last_sign());
        Ending {
            since: candidate.since,
            ran_out: candidate.exit.ran_out(),
            says: candidate.says,
            remedy: candidate.remedy,
            record: Some(candidate.path),
            page: page(reader),
        }
    }

    /// The end of a process that removed its record, as last seen: by then the program may have
    /// freed the memory in question, so no conclusion is possible.
    pub fn without_record(reader: &Reader<'_>) -> Ending {
        let devices = reader.device_snapshots();
        let refused = |gauge| devices.iter().any(|device| device.gauge(gauge) > 0);
        Ending {
            since: reader.last_sign(),
            ran_out: refused(DeviceGauge::OutOfMemories),
            says: String::new(),
            remedy: None,
            record: None,
            page: page(reader),
        }
    }
}

/// The record that a process left beside its own, at `path`: a copy from the moment it ended by an
/// out-of-memory. Only the last number of its name differs.
pub fn left_beside(path: &Path, owners: Owners) -> Option<Reader<'static>> {
    let ours = sweep::stem(path)?;
    let mut copies = sweep::names(path.parent()?).ok()?;
    copies.retain(|copy| copy != path && sweep::stem(copy) == Some(ours));
    let latest = copies.into_iter().max_by_key(|copy| sweep::number(copy))?;
    Reader::open_of(&latest, owners).ok()
}

/// Which of two records of a process that is gone stands for it: whether it is the copy that it
/// left when an out-of-memory ended its program, rather than its own, which is left too if it was
/// killed later. The copy has what was live then; but if the process went on, its own record tells
/// how it really ended.
pub fn is_told_by_copy(own: &Reader<'_>, copy: &Reader<'_>) -> bool {
    !has_gone_on(&copy.device_snapshots(), &own.device_snapshots())
}

/// Whether a process has gone on since an out-of-memory: to another step, or it has been served
/// more than was live then. What is served while it shuts down is little.
pub fn has_gone_on(then: &[DeviceSnapshot], now: &[DeviceSnapshot]) -> bool {
    let served = |device: &DeviceSnapshot| device.total().malloc_bytes;
    then.iter().zip(now).any(|(then, now)| {
        now.gauge(DeviceGauge::Step) > then.gauge(DeviceGauge::Step)
            || served(now).saturating_sub(served(then)) > then.live
    })
}

/// Of several records of the same process that is gone, the one that stands for it
/// ([`is_told_by_copy`]): the place in `records` of its own or of the copy that it left last.
pub fn telling(records: &[&Reader<'_>]) -> usize {
    let of = |record: &&Reader<'_>| (record.last_sign(), sweep::number(record.path()));
    match sweep::own_and_copy(&records.iter().map(of).collect::<Vec<_>>()) {
        [Some(own), Some(copy)] if is_told_by_copy(records[own], records[copy]) => copy,
        [own, _] => own.unwrap_or(0),
    }
}

/// The folder of the dumps of a process with this configuration.
pub fn dump_folder(configuration: &str) -> Option<PathBuf> {
    gruyere::config::Config::parse(configuration).ok()?.dump_dir
}

/// The newest out-of-memory page of the process, as far as it is visible from here.
fn page(reader: &Reader<'_>) -> Option<PathBuf> {
    let process = reader.process();
    let folder = dump_folder(&process.configuration)?;
    let begins = format!("gruyere-oom-{}-gpu", process.pid);
    let is_page = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with(&begins) && name.ends_with(".html")
    };
    let pages = std::fs::read_dir(folder).ok()?.flatten().map(|entry| entry.path());
    let dated = |path: PathBuf| Some((path.metadata().ok()?.modified().ok()?, path));
    // Pids are reused.
    let begun = process.created_at();
    let of_this_run = pages.filter(is_page).filter_map(dated).filter(|(time, _)| *time >= begun);
    of_this_run.max().map(|(_, path)| path)
}
