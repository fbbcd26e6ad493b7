//! Explains an out-of-memory: the state of the process's memory as text, as JSON, and as a snapshot
//! for memory_viz.
//!
//! The files hold the model ([`state`]); [`gather`] fills it from the heap's books. The heap's
//! locks are held while its books are copied, one after the other, and none while files are
//! written. No dump fails the program: errors are logged.

pub mod gather;
pub mod limits;
pub mod page;

pub use gruyere_record::dump::{memory_viz, pickle, state, write_json, write_snapshot};

use crate::file;
use crate::heap::{Heap, Report};
use crate::record::{Reader, plain, text};
use state::State;
use std::io::{self, Write};
use std::path::Path;

/// Out-of-memories explained on each device: programs that halve their batch until it fits run out
/// of memory on purpose.
pub const MOST_DUMPS: u64 = 32;

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

/// Explains an out-of-memory; writes its dumps and its page to `folder` (`dump_dir:`), if given.
pub fn out_of_memory(heap: &Heap, report: &Report, folder: Option<&Path>) -> Explained {
    let knows_lines = Reader::own(heap.record()).is_some_and(|reader| reader.keeps_sites());
    if report.count > MOST_DUMPS || (folder.is_none() && !knows_lines) {
        return Explained::default();
    }
    let state = gather::state(heap, Some(report));
    let page = folder.and_then(|folder| {
        let name = write(&state, report, folder);
        page::of_out_of_memory(&state, report, folder, &name?)
    });
    let conclusion = match state.conclusion {
        Some(conclusion) if !state.sites.is_empty() => {
            conclusion.lines.iter().map(|line| plain(line)).collect()
        }
        _ => Vec::new(),
    };
    Explained { conclusion, page }
}

/// Writes the dump; returns its name without the extension. `None`: the folder can't be made.
fn write(state: &State, report: &Report, folder: &Path) -> Option<String> {
    if let Err(error) = file::make_folders(folder) {
        log::error!("out of memory: no dump could be written to {}: {error}", folder.display());
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
    let write = |extension: &str, write: &dyn Fn(&mut dyn Write) -> io::Result<()>| {
        let path = folder.join(format!("{name}.{extension}"));
        let written = file::replace(&path, MOST_BYTES, file::PRIVATE, |out| write(out));
        if let Err(error) = &written {
            log::error!(
                "out of memory: the dump could not be written to {}: {error}",
                path.display()
            );
        }
        written.is_ok()
    };
    // The shortest first: a full disk may still have room for it.
    let written = [
        ("txt", write("txt", &|out| out.write_all(text::text(state).as_bytes()))),
        ("json", write("json", &|out| write_json(out, state))),
        ("pickle", write("pickle", &|out| write_snapshot(out, state))),
    ];
    let names: Vec<&str> = written.into_iter().filter(|file| file.1).map(|file| file.0).collect();
    if !names.is_empty() {
        log::warn!(
            "out of memory: the dump is in {}.{{{}}}",
            folder.join(&name).display(),
            names.join(",")
        );
    }
    Some(name)
}
