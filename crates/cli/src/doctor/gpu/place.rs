//! The folder in which the C programs run and write; no other user can write to it. Kept files move
//! from it to `--out`; without `--out`, the folder stays if a finding refers to it.
#![deny(unsafe_code, clippy::unwrap_used)]

use std::fs::File;
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use gruyere_record::file;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::Value;
use tempfile::TempDir;

use super::super::probe::{Silence, died, wait};
use super::program::Program;

/// A longer document is invalid.
const LONGEST: u64 = 4 << 20;
/// The length read from the end of a program's output.
const LAST_WORDS: u64 = 64 << 10;
const PAUSE: Duration = Duration::from_millis(100);

/// Result of a program's run.
pub struct Ran {
    /// The exit status, or why there is none.
    pub ended: Result<ExitStatus, Silence>,
    /// The end of its output.
    pub words: String,
    /// The document it wrote.
    pub document: Result<Value, String>,
}

impl Ran {
    /// The exit code, if there is one.
    pub fn code(&self) -> Option<i32> {
        self.ended.as_ref().ok()?.code()
    }

    /// Whether the probe ran to its end. Code 1 counts: it means that a case did not end, which the
    /// document reports.
    pub fn is_whole(&self) -> bool {
        matches!(self.code(), Some(0 | 1))
    }

    /// The last case that the probe began.
    pub fn case(&self) -> Option<&str> {
        case(&self.words)
    }

    /// The reason of a bad end.
    pub fn trouble(&self) -> Silence {
        match (&self.ended, &self.document) {
            (Err(silence), _) => silence.clone(),
            (Ok(status), Err(reason)) if status.success() => {
                Silence::Died(format!("its document: {reason}"))
            }
            (Ok(status), _) => died(*status, &self.words),
        }
    }
}

/// The programs' folder.
pub struct Place<'a> {
    folder: TempDir,
    out: Option<&'a Path>,
}

/// Error: a folder or a file that cannot be written.
pub struct Unwritten {
    /// Its path, and the reason.
    pub text: String,
    /// The remedy.
    pub remedy: &'static str,
}

impl Unwritten {
    fn new(path: &Path, error: &io::Error, remedy: &'static str) -> Unwritten {
        Unwritten { text: format!("{}: {error}", path.display()), remedy }
    }
}

const ANOTHER_OUT: &str = "name a writable folder with free space, with --out";

impl<'a> Place<'a> {
    /// Makes a folder whose files go to `out` at the end.
    ///
    /// # Errors
    /// The folder or `out` cannot be made.
    pub fn make(out: Option<&'a Path>) -> Result<Place<'a>, Unwritten> {
        // Fails before the minutes that fill the folder.
        if let Some(out) = out {
            std::fs::create_dir_all(out)
                .map_err(|error| Unwritten::new(out, &error, ANOTHER_OUT))?;
        }
        let made = tempfile::Builder::new().prefix("gruyere-gpu-").tempdir();
        let failed = |error| {
            Unwritten::new(
                &std::env::temp_dir(),
                &error,
                "set TMPDIR to a writable folder with free space",
            )
        };
        Ok(Place { folder: made.map_err(failed)?, out })
    }

    /// Where the kept files will be.
    pub fn name(&self) -> String {
        self.out.unwrap_or(self.folder.path()).display().to_string()
    }

    /// Runs a program for at most `limit`, and shows its progress on a terminal. Its files are
    /// called `name`.
    pub fn run(&self, program: Program, name: &str, words: &[String], limit: Duration) -> Ran {
        let document = self.folder.path().join(format!("{name}.json"));
        let said = self.folder.path().join(format!("{name}.txt"));
        let bar = ProgressBar::new_spinner();
        if let Ok(style) = ProgressStyle::with_template("{spinner:.yellow} {elapsed:>4} {msg}") {
            bar.set_style(style);
        }
        bar.set_message(name.to_owned());
        bar.enable_steady_tick(2 * PAUSE);
        let ended = File::create(&said)
            .and_then(|to| {
                let mut command = program.command();
                command.arg("--json").arg(&document).args(words);
                command.stdin(Stdio::null()).stdout(to.try_clone()?).stderr(to).spawn()
            })
            .map_err(|error| Silence::NotRun(error.to_string()))
            .and_then(|mut child| {
                wait(&mut child, limit, PAUSE, || {
                    if let Some(case) = case(&last_words(&said)) {
                        bar.set_message(format!("{name}: {case}"));
                    }
                })
            });
        bar.finish_and_clear();
        Ran { ended, words: last_words(&said), document: read(&document) }
    }

    /// Copies the files to `--out`; without `--out`, leaves them where they are if they
    /// `are_needed`. Returns their folder.
    ///
    /// # Errors
    /// `--out` cannot be written; the text says where the files are.
    pub fn keep(self, are_needed: bool) -> Result<Option<PathBuf>, Unwritten> {
        let Some(out) = self.out else {
            return Ok(are_needed.then(|| self.folder.keep()));
        };
        match self.copy_to(out) {
            Ok(()) => Ok(Some(out.to_owned())),
            Err(Unwritten { text, remedy }) => {
                let folder = self.folder.keep();
                let text =
                    format!("{text}; the probe and stress files stay in {}", folder.display());
                Err(Unwritten { text, remedy })
            }
        }
    }

    fn copy_to(&self, out: &Path) -> Result<(), Unwritten> {
        for name in ["probe.json", "probe.txt", "stress.json", "stress.txt"] {
            let to = out.join(name);
            let copied = match File::open(self.folder.path().join(name)) {
                Ok(mut file) => file::replace(&to, u64::MAX, file::PUBLIC, |to| {
                    io::copy(&mut file, to).map(drop)
                }),
                // The program wrote nothing; a file of an earlier run is not this run's.
                Err(_) => match std::fs::remove_file(&to) {
                    Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
                    _ => Ok(()),
                },
            };
            copied.map_err(|error| Unwritten::new(&to, &error, ANOTHER_OUT))?;
        }
        Ok(())
    }
}

/// The last case that a program of cases began, by its output.
fn case(words: &str) -> Option<&str> {
    words.lines().rev().find_map(|line| line.strip_prefix('[')?.strip_suffix(']'))
}

fn last_words(file: &Path) -> String {
    let mut bytes = Vec::new();
    if let Ok(mut file) = File::open(file) {
        let length = file.metadata().map_or(0, |metadata| metadata.len());
        let _ = file.seek(SeekFrom::Start(length.saturating_sub(LAST_WORDS)));
        let _ = file.take(LAST_WORDS).read_to_end(&mut bytes);
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn read(document: &Path) -> Result<Value, String> {
    let file = File::open(document).map_err(|error| error.to_string())?;
    serde_json::from_reader(io::BufReader::new(file.take(LONGEST)))
        .map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_document_that_is_missing_or_cut_is_none() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("probe.json");
        assert!(read(&file).is_err_and(|reason| reason.contains("No such file")));
        std::fs::write(&file, "{\"version\": 1, \"facts\"").expect("a file");
        assert!(read(&file).is_err_and(|reason| reason.contains("EOF")));
    }

    #[test]
    fn the_case_is_the_last_that_was_begun() {
        assert_eq!(case("[facts]\n[many.0]\nmain.c:7: cuInit answered 2\n[half"), Some("many.0"));
        assert_eq!(case("probe: no CUDA driver\n"), None);
    }
}
