//! Which record a command is about: a process, or a file.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use gruyere::record::sweep::{self, Found, State};
use gruyere::record::{Reader, facts};

use crate::failure::Failure;

/// Where the records are.
#[derive(clap::Args, Clone, Debug)]
pub struct Folder {
    /// The folder of the records.
    #[arg(long, default_value = "/dev/shm", value_name = "FOLDER")]
    pub directory: PathBuf,
}

impl Folder {
    /// All records in it.
    ///
    /// # Errors
    /// The folder can't be read.
    pub fn list(&self) -> Result<Vec<Found>, Failure> {
        sweep::list(&self.directory).map_err(|error| self.failure(&error))
    }

    /// Those of living processes, and how many there are of dead ones: for who looks again and again.
    ///
    /// # Errors
    /// The folder can't be read.
    pub fn living(&self) -> Result<(Vec<Found>, usize), Failure> {
        sweep::living(&self.directory).map_err(|error| self.failure(&error))
    }

    fn failure(&self, error: &std::io::Error) -> Failure {
        let folder = self.directory.display();
        Failure::new(format_args!("{folder}: {error}; name the folder of the records with --directory"))
    }
}

/// One record, named on the command line.
#[derive(clap::Args, Clone, Debug)]
pub struct Target {
    /// The process (its pid in its own pid namespace) or the file of its record.
    #[arg(value_name = "PID|FILE")]
    pub target: String,
    #[command(flatten)]
    pub folder: Folder,
}

impl Target {
    /// Opens it. Of a process, the living before the dead, and our own pid namespace before the others.
    ///
    /// # Errors
    /// There is none, more than one, or it can't be read.
    pub fn open(&self) -> Result<Reader<'static>, Failure> {
        match self.target.parse::<u64>() {
            Ok(pid) => of_process(pid, &self.folder),
            Err(_) => Reader::open(Path::new(&self.target)).map_err(Failure::new),
        }
    }
}

fn of_process(pid: u64, folder: &Folder) -> Result<Reader<'static>, Failure> {
    let mut trouble = String::new();
    let mut readers: Vec<(State, Reader<'static>)> = Vec::new();
    for found in folder.list()? {
        match found.reader {
            Ok(reader) if reader.process().pid == pid => readers.push((found.state, reader)),
            Ok(_) => {}
            // Its name has the pid between the namespace and the start time.
            Err(error) if error.path().to_string_lossy().contains(&format!("-{pid}-")) => {
                let _ = write!(trouble, "; {error}");
            }
            Err(_) => {}
        }
    }
    let ours = facts::pid_namespace();
    let order =
        |(state, reader): &(State, Reader)| (*state != State::Live, reader.process().pid_namespace != ours);
    readers.sort_by_key(order);
    let best = readers.first().map(order);
    let same = readers.iter().filter(|reader| Some(order(reader)) == best).count();
    if same > 1 {
        let paths: Vec<String> =
            readers.iter().take(same).map(|(_, reader)| reader.path().display().to_string()).collect();
        let paths = paths.join(" ");
        return Err(Failure::new(format_args!(
            "{same} records of a process {pid}; name one of the files: {paths}"
        )));
    }
    if let Some((_, reader)) = readers.into_iter().next() {
        return Ok(reader);
    }
    descriptor(pid).ok_or_else(|| {
        let directory = folder.directory.display();
        Failure::new(format_args!(
            "process {pid} has no record in {directory}{trouble}; `gruyere ps` lists those there are, and a record is \
             readable by its owner only"
        ))
    })
}

/// The record of a process that found no room in /dev/shm: a memfd among its descriptors.
fn descriptor(pid: u64) -> Option<Reader<'static>> {
    let entries = std::fs::read_dir(format!("/proc/{pid}/fd")).ok()?;
    entries.flatten().find_map(|entry| {
        let target = std::fs::read_link(entry.path()).ok()?;
        if !target.to_string_lossy().starts_with("/memfd:gruyere") {
            return None;
        }
        Reader::open_descriptor(&entry.path()).ok()
    })
}
