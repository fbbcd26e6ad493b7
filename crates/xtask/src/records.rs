//! Records made during a test run: in a folder of the run's own, with none left at the end.
//!
//! Test programs have folders of their own within it (.cargo/test-runner,
//! tests/pytorch/conftest.py). A process that lost the run's environment keeps its record in
//! /dev/shm, as other programs do: such a record counts if its process descends from this run. For
//! the rest, the run only warns: another program of the same user may have been killed meanwhile.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use crate::arrivals::Arrivals;
use crate::deadline;
use crate::processes::Process;
use crate::runner::{Counts, Outcome};

/// As in crates/record/src/record_dir.rs.
const VARIABLE: &str = "GRUYERE_RECORD_DIR";
const DEFAULT: &str = "/dev/shm";
const RECORDS: &str = "gruyere-";
/// Where .cargo/test-runner and conftest.py make their folders.
const MEMORY: &str = "GRUYERE_TEST_MEMORY";
/// Prefix of their names.
const FOLDERS: &str = "gruyere-test-records.";

/// A test run's records.
pub struct Records {
    folder: TempDir,
    place: Place,
}

/// The folder that must stay free of this run's records.
struct Place {
    folder: PathBuf,
    before: BTreeSet<OsString>,
    /// `None`: the kernel does not report new files.
    arrivals: Option<Arrivals>,
}

/// New records that stayed.
#[derive(Debug, Default, PartialEq, Eq)]
struct Left {
    /// Of processes of this run.
    ours: Vec<PathBuf>,
    /// Of others, as far as is known.
    others: Vec<PathBuf>,
}

impl Records {
    /// Makes the folder, and notes existing records. Children find it through the environment:
    /// [`Records::variables`].
    ///
    /// # Errors
    /// The folder can't be made.
    pub fn begin() -> Result<Records, String> {
        // In memory, as records are, if possible.
        let folder = TempDir::with_prefix_in(FOLDERS, DEFAULT)
            .or_else(|_| TempDir::with_prefix(FOLDERS))
            .map_err(|error| format!("{}: {error}; set TMPDIR", std::env::temp_dir().display()))?;
        Ok(Records { folder, place: Place::new(DEFAULT.into()) })
    }

    /// The variables' names, and their common value.
    pub fn variables(&self) -> ([&'static str; 2], &Path) {
        ([VARIABLE, MEMORY], self.folder.path())
    }

    /// Removes the folder; fails if records of the run are left.
    pub fn end(self) -> Outcome {
        let path = self.folder.path().display().to_string();
        // The processes' own records go with the folder; the maker of a folder in it removes that.
        let mut left = self.place.left();
        let folders = names(self.folder.path(), FOLDERS);
        left.ours.extend(folders.into_iter().map(|name| self.folder.path().join(name)));
        if !left.others.is_empty() {
            println!(
                "records that others have left meanwhile, as far as is known (`gruyere ps --sweep` \
                 takes away what is dead): {}",
                listed(&left.others)
            );
        }
        match self.folder.close() {
            Err(error) => Outcome::Failed(Counts::default(), format!("{path}: {error}")),
            Ok(()) if left.ours.is_empty() => Outcome::Passed(Counts::default()),
            Ok(()) => {
                let reason = format!("left behind by a test: {}", listed(&left.ours));
                Outcome::Failed(Counts::default(), reason)
            }
        }
    }
}

fn listed(paths: &[PathBuf]) -> String {
    paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(" ")
}

impl Place {
    fn new(folder: PathBuf) -> Place {
        let namespace = pid_namespace();
        let arrivals = Arrivals::watch(&folder, move |name| {
            let name = name.to_string_lossy();
            maker(&name, namespace.as_deref())
                .is_some_and(|process| deadline::is_of_this_run(&process))
        });
        let arrivals = arrivals
            .inspect_err(|error| {
                println!(
                    "{}: {error}: nobody will know which records there are of this test run",
                    folder.display()
                );
            })
            .ok();
        let before = names(&folder, RECORDS);
        Place { folder, before, arrivals }
    }

    /// New records of processes that no longer run.
    fn left(&self) -> Left {
        let namespace = pid_namespace();
        let mut left = Left::default();
        for name in names(&self.folder, RECORDS).difference(&self.before) {
            let text = name.to_string_lossy();
            if !text.ends_with(".record") || maker(&text, namespace.as_deref()).is_some() {
                continue;
            }
            let is_ours = self.arrivals.as_ref().is_some_and(|arrivals| arrivals.has(name));
            let side = if is_ours { &mut left.ours } else { &mut left.others };
            side.push(self.folder.join(name));
        }
        left
    }
}

fn names(folder: &Path, prefix: &str) -> BTreeSet<OsString> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .map(|entry| entry.file_name())
        .filter(|name| name.to_string_lossy().starts_with(prefix))
        .collect()
}

/// The number of this process's pid namespace, as in names of records.
fn pid_namespace() -> Option<String> {
    let link = std::fs::read_link("/proc/self/ns/pid").ok()?;
    let number = link.to_str()?.strip_prefix("pid:[")?.strip_suffix(']')?;
    Some(number.to_owned())
}

/// The process that made a record of this name (`gruyere-NAMESPACE-PID-START-COUNT.record`), if it
/// still exists. Pids of another namespace mean nothing here.
fn maker(name: &str, namespace: Option<&str>) -> Option<Process> {
    let mut parts = name.strip_prefix(RECORDS)?.split('-');
    let (its, pid, start) = (parts.next()?, parts.next()?, parts.next()?);
    if namespace != Some(its) {
        return None;
    }
    Process::read(pid.parse().ok()?).filter(|process| process.started_at(start))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::CommandExt as _;
    use std::process::{Command, Stdio};
    use std::time::{Duration, Instant};

    /// Makes a record in the name of the running shell.
    const MAKES: &str = "set -- $(cat /proc/$$/stat); shift 21; \
                         name=gruyere-$NAMESPACE-$$-$1-0.record; : > \"$name\"; ";

    /// A shell with the file `makes` in its folder: it runs [`MAKES`], and waits a while to be
    /// seen.
    fn shell(script: &str, folder: &Path) -> Command {
        std::fs::write(folder.join("makes"), format!("{MAKES} sleep \"${{WHILE:-300}}\"")).unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", script]).current_dir(folder).stdin(Stdio::null());
        command.env("NAMESPACE", pid_namespace().unwrap());
        command
    }

    #[track_caller]
    fn until(what: &str, mut done: impl FnMut() -> bool) {
        let end = Instant::now() + Duration::from_secs(20);
        while !done() {
            assert!(Instant::now() < end, "{what}: not within 20 s");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn a_record_of_a_process_of_this_run_counts_and_one_of_another_s_is_told_of() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str| {
            std::fs::write(folder.path().join(name), "").unwrap();
            folder.path().join(name)
        };
        let namespace = pid_namespace().unwrap();
        write(&format!("gruyere-{namespace}-4194305-7-0.record"));
        let place = Place::new(folder.path().to_path_buf());
        assert_eq!(place.left(), Left::default());
        // Of a running process; not a record; the folder of another run.
        let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
        let start = stat.rsplit_once(") ").unwrap().1.split(' ').nth(19).unwrap().to_owned();
        write(&format!("gruyere-{namespace}-{}-{start}-0.record", std::process::id()));
        write("others-1-4194305-7-0.record");
        std::fs::create_dir(folder.path().join("gruyere-test-records.abc")).unwrap();
        assert_eq!(place.left(), Left::default());
        // Of no known process: dead before, and of another namespace.
        let others = [
            write(&format!("gruyere-{namespace}-4194306-7-0.record")),
            write("gruyere-1-1-1-0.record"),
        ];
        // A grandchild, which is killed.
        let mut child = shell("sh makes & wait", folder.path());
        let mut child = child.process_group(0).spawn().unwrap();
        let arrivals = place.arrivals.as_ref().expect("inotify");
        let mut ours = BTreeSet::new();
        until("its record comes", || {
            ours = names(folder.path(), RECORDS);
            ours.retain(|name| arrivals.has(name));
            !ours.is_empty()
        });
        // SAFETY: no memory is involved; the group's leader has not been reaped.
        unsafe { libc::kill(-(child.id() as libc::pid_t), libc::SIGKILL) };
        child.wait().unwrap();
        until("it ends", || !place.left().ours.is_empty());
        let left = place.left();
        let ours: Vec<_> = ours.iter().map(|name| folder.path().join(name)).collect();
        assert_eq!(left.ours, ours);
        assert_eq!(left.others.iter().collect::<BTreeSet<_>>(), others.iter().collect());
    }

    #[test]
    fn a_record_of_a_process_whose_parent_is_another_is_not_ours() {
        let folder = tempfile::tempdir().unwrap();
        let place = Place::new(folder.path().to_path_buf());
        // Its parent has ended, and it is in a session of its own: as if from another shell.
        let waits = "while [ -e /proc/$OUTER ]; do sleep 0.05; done; WHILE=0.5; . ./makes";
        std::fs::write(folder.path().join("waits"), waits).unwrap();
        let script = "OUTER=$$ setsid sh waits > said 2>&1 &";
        assert!(shell(script, folder.path()).status().unwrap().success());
        until("it leaves a record", || place.left() != Left::default());
        let left = place.left();
        assert_eq!((left.ours, left.others.len()), (Vec::new(), 1));
    }

    #[test]
    fn the_run_s_folder_goes_with_it_and_what_a_test_program_left_in_it_is_a_failure() {
        for left in [false, true] {
            let records = Records::begin().unwrap();
            let folder = records.variables().1.to_path_buf();
            std::fs::write(folder.join("gruyere-1-2-3-0.record"), "").unwrap();
            if left {
                std::fs::create_dir(folder.join("gruyere-test-records.abc")).unwrap();
            }
            match records.end() {
                Outcome::Failed(_, reason) => {
                    assert!(left && reason.contains("gruyere-test-records.abc"), "{reason}");
                }
                _ => assert!(!left),
            }
            assert!(!folder.exists());
        }
    }
}
