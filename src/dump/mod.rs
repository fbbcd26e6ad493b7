//! Explains an out-of-memory: the state of the process's memory as text, as JSON, and as a snapshot
//! for memory_viz.
//!
//! The files hold the model ([`state`]); [`gather`] fills it from the heap's books. The heap's
//! locks are held while its books are copied, one after the other, and none while files are
//! written. No dump fails the program: errors are logged.

mod bounds;
pub mod gather;
pub mod limits;
pub mod page;

pub use bounds::MOST_DUMPS;
pub use gruyere_record::dump::{memory_viz, pickle, state, write_json, write_snapshot};

use crate::file;
use crate::heap::{Heap, Report};
use crate::record::{Reader, plain, text};
use bounds::Bounds;
use log::Level;
use state::State;
use std::io::{self, Write};
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// The files of a dump, the shortest first: a full disk may still have room for it.
const EXTENSIONS: [&str; 3] = ["txt", "json", "pickle"];

/// The longest file of a dump.
const MOST_BYTES: u64 = 256 << 20;

/// The exception's text about an out-of-memory, beside its causes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Explained {
    /// The conclusion, by the lines of the program; empty where they are not known.
    pub conclusion: Vec<String>,
    /// The path of the page.
    pub page: Option<String>,
}

/// Explains a process's out-of-memories, within [`bounds`].
#[derive(Debug, Default)]
pub struct Dumps {
    bounds: Mutex<Bounds>,
}

impl Dumps {
    /// No out-of-memory so far.
    pub const fn new() -> Self {
        Self { bounds: Mutex::new(Bounds::new()) }
    }

    fn bounds(&self) -> MutexGuard<'_, Bounds> {
        self.bounds.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Explains an out-of-memory; writes its dump and its page to `folder` (`dump_dir:`), if given.
    pub fn out_of_memory(&self, heap: &Heap, report: &Report, folder: Option<&Path>) -> Explained {
        let knows_lines = Reader::own(heap.record()).is_some_and(|reader| reader.keeps_sites());
        let began = Instant::now();
        if (folder.is_none() && !knows_lines) || !self.bounds().has_time(began) {
            return Explained::default();
        }
        let state = gather::state(heap, Some(report));
        let page = folder.and_then(|folder| {
            let is_told = self.bounds().tells(began);
            let name = write(&state, report, folder, is_told)?;
            let oldest = self.bounds().keep(folder, report.device, name.clone());
            if let Some(oldest) = oldest {
                remove(folder, &oldest);
            }
            page::of_out_of_memory(&state, report, folder, &name)
        });
        self.bounds().spend(began.elapsed());
        let conclusion = match state.conclusion {
            Some(conclusion) if !state.sites.is_empty() => {
                conclusion.lines.iter().map(|line| plain(line)).collect()
            }
            _ => Vec::new(),
        };
        Explained { conclusion, page }
    }
}

/// Writes the state in one of a dump's forms.
type Writer<'a> = dyn Fn(&mut dyn Write) -> io::Result<()> + 'a;

/// Removes the files of a dump.
fn remove(folder: &Path, name: &str) {
    for extension in EXTENSIONS {
        // The user may have moved it.
        let _ = std::fs::remove_file(folder.join(format!("{name}.{extension}")));
    }
}

/// Writes the dump; the log tells where, or why not, at a lower level unless `is_told`. Returns its
/// name without the extension. `None`: the folder can't be made.
fn write(state: &State, report: &Report, folder: &Path, is_told: bool) -> Option<String> {
    let at = |level| if is_told { level } else { Level::Info };
    if let Err(error) = file::make_folders(folder) {
        log::log!(
            at(Level::Error),
            "out of memory: no dump could be written to {}: {error}",
            folder.display()
        );
        return None;
    }
    // No other process may have taken the name: the folder may be writable for all.
    let name = format!(
        "gruyere-oom-{}-gpu{}-{}-{}",
        std::process::id(),
        report.device,
        report.count,
        file::random_name()
    );
    let write = |extension: &str, write: &Writer| {
        let path = folder.join(format!("{name}.{extension}"));
        let written = file::replace(&path, MOST_BYTES, file::PRIVATE, |out| write(out));
        if let Err(error) = &written {
            log::log!(
                at(Level::Error),
                "out of memory: the dump could not be written to {}: {error}",
                path.display()
            );
        }
        written.is_ok()
    };
    let writers: [&Writer; 3] = [
        &|out| out.write_all(text::text(state).as_bytes()),
        &|out| write_json(out, state),
        &|out| write_snapshot(out, state),
    ];
    let files = EXTENSIONS.into_iter().zip(writers);
    let names: Vec<&str> =
        files.filter(|(extension, writer)| write(extension, writer)).map(|file| file.0).collect();
    if !names.is_empty() {
        log::log!(
            at(Level::Warn),
            "out of memory: the dump is in {}.{{{}}}",
            folder.join(&name).display(),
            names.join(",")
        );
    }
    Some(name)
}
