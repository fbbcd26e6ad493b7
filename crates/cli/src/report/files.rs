//! Input of `gruyere report`: files made by `history:` and `gruyere dryrun`, and records.

use std::fs;
use std::path::{Path, PathBuf};

use gruyere_record::dump::state;
use gruyere_record::run::{self, Run};
use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::dry::{self, DryRun};
use crate::failure::{Failure, say};
use crate::target::{Folder, Target};

/// Larger files are refused; ours are some dozen KiB.
const MOST_BYTES: u64 = 64 << 20;
const REMEDY: &str =
    "name a file from `history:`, or from `gruyere dryrun` with --history or --json";

const NO_RUN: &str = "not the history of a run";

/// A kept run.
pub enum Kept {
    /// A run on a GPU.
    Run(Run),
    /// A result of `gruyere dryrun`.
    Dry(DryRun),
}

/// Selects runs.
#[derive(Clone, Copy)]
pub struct Wanted<'a> {
    /// `None`: any name.
    pub name: Option<&'a str>,
    pub rank: u64,
}

impl Kept {
    /// Loads `name`: a JSON file, a process, or the file of its record.
    ///
    /// # Errors
    /// Not found, or unreadable.
    pub fn load(name: &str, folder: &Folder) -> Result<Kept, Failure> {
        if name.ends_with(".json") {
            return Kept::read(Path::new(name)).map_err(|misfit| misfit.named());
        }
        // A number is a process, whatever folder has that name.
        let path = Path::new(name);
        if path.is_dir() && name.parse::<u64>().is_err() {
            let remedy = "`--history FOLDER` takes the latest run in it, or name one of its files";
            return Err(Misfit::new(path, "a folder").with_remedy(remedy).named());
        }
        let target = Target { target: Some(name.to_owned()), folder: folder.clone() };
        let reader = target.open()?;
        let run = Run::of(&reader, None).with_lines(&reader);
        reader.expect_sound()?;
        Ok(Kept::Run(run))
    }

    fn read(path: &Path) -> Result<Kept, Misfit> {
        /// The first words of all our files; each kind has some of them.
        #[derive(Deserialize)]
        struct Head {
            schema: Option<String>,
            format: Option<String>,
            #[serde(default)]
            version: u32,
        }
        let text = text(path)?;
        let Head { schema, format, version: found } = parsed(path, &text)?;
        if format.as_deref() == Some(state::FORMAT) {
            return Err(Misfit::new(
                path,
                "the state of a process's memory, not the history of a run",
            )
            .with_remedy("`gruyere diff` compares it with another state"));
        }
        let schema = schema.unwrap_or_default();
        let expect = |version| match found == version {
            true => Ok(()),
            false => Err(Misfit::new(
                path,
                format_args!(
                    "{schema} of version {found}, but this command reads version {version}"
                ),
            )
            .with_remedy("use the command of the version that wrote it")),
        };
        match schema.as_str() {
            run::SCHEMA => expect(run::VERSION).and_then(|()| parsed(path, &text).map(Kept::Run)),
            dry::SCHEMA => expect(dry::VERSION).and_then(|()| parsed(path, &text).map(Kept::Dry)),
            "" => Err(Misfit::new(path, NO_RUN)),
            other => Err(Misfit::new(path, format_args!("{other:?} is {NO_RUN}"))),
        }
    }

    /// Kind of the run, for people.
    pub fn kind(&self) -> &'static str {
        match self {
            Kept::Run(_) => "run",
            Kept::Dry(_) => "dry run",
        }
    }

    /// Name for comparisons.
    pub fn name(&self) -> &str {
        match self {
            Kept::Run(run) => &run.name,
            Kept::Dry(dry) => &dry.run.name,
        }
    }

    /// The rank; a dry run has a single process.
    fn rank(&self) -> u64 {
        match self {
            Kept::Run(run) => run.rank.unwrap_or(0),
            Kept::Dry(_) => 0,
        }
    }

    /// Sort key: time.
    fn moment(&self) -> (u64, u64) {
        match self {
            Kept::Run(run) => (run.started_nanoseconds, run.pid),
            Kept::Dry(dry) => (dry.run.started_nanoseconds, dry.run.pid),
        }
    }
}

/// Why a file is no kept run.
struct Misfit {
    /// The file and the reason.
    said: String,
    /// What to do, where it does not depend on who named the file.
    remedy: Option<&'static str>,
}

impl Misfit {
    fn new(path: &Path, reason: impl std::fmt::Display) -> Misfit {
        Misfit { said: format!("{}: {reason}", path.display()), remedy: None }
    }

    fn with_remedy(self, remedy: &'static str) -> Misfit {
        Misfit { remedy: Some(remedy), ..self }
    }

    /// Of a file that the user named, which may be anything and of use.
    fn named(self) -> Failure {
        Failure::new(format_args!("{}; {}", self.said, self.remedy.unwrap_or(REMEDY)))
    }

    /// Of a file that lies in the folder of the runs.
    fn in_folder(self) -> Failure {
        let remedy = self.remedy.unwrap_or("move it out of the folder");
        Failure::new(format_args!("{}; {remedy}", self.said))
    }
}

fn text(path: &Path) -> Result<String, Misfit> {
    let fail = |error: std::io::Error| Misfit::new(path, error);
    let file = fs::metadata(path).map_err(fail)?;
    if !file.is_file() || file.len() > MOST_BYTES {
        return Err(Misfit::new(path, NO_RUN));
    }
    fs::read_to_string(path).map_err(fail)
}

fn parsed<T: DeserializeOwned>(path: &Path, text: &str) -> Result<T, Misfit> {
    serde_json::from_str(text)
        .map_err(|error| Misfit::new(path, format_args!("{NO_RUN} ({error})")))
}

/// The latest selected run of the folder.
///
/// # Errors
/// The folder can't be read.
pub fn latest(history: &Path, wanted: Wanted) -> Result<Option<Kept>, Failure> {
    newest(history, wanted, |_| true)
}

/// The latest of the same kind, name and rank before `now`.
///
/// # Errors
/// The folder can't be read.
pub fn before(history: &Path, now: &Kept) -> Result<Option<Kept>, Failure> {
    let wanted = Wanted { name: Some(now.name()), rank: now.rank() };
    newest(history, wanted, |kept| kept.kind() == now.kind() && kept.moment() < now.moment())
}

fn newest(
    history: &Path,
    wanted: Wanted,
    is_meant: impl Fn(&Kept) -> bool,
) -> Result<Option<Kept>, Failure> {
    let folder = history.display();
    let entries = fs::read_dir(history).map_err(|error| {
        Failure::new(format_args!(
            "{folder}: {error}; name the folder of `history:` with --history"
        ))
    })?;
    let files = entries.flatten().map(|entry| entry.path()).filter(|file| {
        let file = file.file_name().unwrap_or_default().to_string_lossy();
        wanted.name.is_none_or(|name| file.starts_with(&format!("{name}.")))
    });
    let suffixes = [run::FILE_SUFFIX, dry::FILE_SUFFIX];
    let found = readable(files, &suffixes, "report").filter(|kept| {
        let is_named = wanted.name.is_none_or(|name| kept.name() == name);
        is_named && kept.rank() == wanted.rank && is_meant(kept)
    });
    Ok(found.max_by_key(Kept::moment))
}

/// The runs on GPUs of a folder, unordered, for the command `command`; empty if the folder does not
/// exist.
pub fn runs(history: &Path, command: &'static str) -> Vec<Run> {
    let entries = fs::read_dir(history).into_iter().flatten().flatten();
    let found = readable(entries.map(|entry| entry.path()), &[run::FILE_SUFFIX], command);
    let runs = found.filter_map(|kept| match kept {
        Kept::Run(run) => Some(run),
        Kept::Dry(_) => None,
    });
    runs.collect()
}

/// The `files` that end with one of `suffixes`. Skips damaged files.
fn readable(
    files: impl Iterator<Item = PathBuf>,
    suffixes: &[&str],
    command: &'static str,
) -> impl Iterator<Item = Kept> {
    let is_kept = |file: &PathBuf| {
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        !name.starts_with('.') && suffixes.iter().any(|suffix| name.ends_with(suffix))
    };
    files.filter(is_kept).filter_map(move |file| match Kept::read(&file) {
        Ok(kept) => Some(kept),
        Err(misfit) => {
            say(command, format_args!("skipped: {}", misfit.in_folder()));
            None
        }
    })
}
