//! Facts of the process that writes a record. Written before the record is published; only a rank
//! that torch's variables do not give may follow.

use super::launcher::Place;
use crate::layout::Shared;
use crate::plain;
use crate::sync::{AtomicU64, Ordering};
use serde::{Deserialize, Serialize};
use std::sync::atomic::AtomicU64 as PrivateAtomicU64;
use std::time::{Duration, SystemTime};

/// Writes `text`, cut to fit at a character.
pub(crate) fn store_text(bytes: &AtomicU64, words: &[AtomicU64], text: &str) {
    let mut length = text.len().min(words.len() * 8);
    while !text.is_char_boundary(length) {
        length -= 1;
    }
    for (word, chunk) in words.iter().zip(text.as_bytes()[..length].chunks(8)) {
        let mut eight = [0; 8];
        eight[..chunk.len()].copy_from_slice(chunk);
        word.store(u64::from_le_bytes(eight), Ordering::Relaxed);
    }
    bytes.store(length as u64, Ordering::Relaxed);
}

/// Reads a text back; replaces damaged bytes by replacement characters, control characters by
/// spaces (the text goes to terminals).
pub(crate) fn load_text(bytes: &AtomicU64, words: &[AtomicU64]) -> String {
    let length = (bytes.load(Ordering::Relaxed)).min(words.len() as u64 * 8) as usize;
    let mut raw: Vec<u8> =
        words.iter().flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes()).collect();
    raw.truncate(length);
    plain(&String::from_utf8_lossy(&raw))
}

/// The environment variable with a number by which `gruyere run` recognises its processes and their
/// descendants.
pub const RUN_VARIABLE: &str = "GRUYERE_RUN";

/// The process facts in the mapping, 4 KiB.
#[repr(C)]
pub struct ProcessFacts {
    /// Pid in its own namespace, start time (clock ticks since boot), inode of the pid namespace,
    /// creation (ns since 1970).
    numbers: [AtomicU64; 4],
    /// [`Process::rank`], `local_rank`, `world_size` plus one each; 0 where unknown.
    ranks: [AtomicU64; 3],
    /// 1: the processor guarantees that its counter never stops or changes speed.
    steady_counter: AtomicU64,
    host_bytes: AtomicU64,
    host: [AtomicU64; 31],
    version_bytes: AtomicU64,
    version: [AtomicU64; 7],
    boot_bytes: AtomicU64,
    boot: [AtomicU64; 7],
    command_bytes: AtomicU64,
    command: [AtomicU64; 255],
    configuration_bytes: AtomicU64,
    configuration: [AtomicU64; 127],
    job_bytes: AtomicU64,
    job: [AtomicU64; 15],
    /// GRUYERE_RUN plus one; 0 where unset.
    run: AtomicU64,
    /// [`Uses`], as bits; 0 where unknown.
    uses: AtomicU64,
    /// 1: the ranks are those of a launcher other than torch's.
    launcher: AtomicU64,
    _room: [AtomicU64; 53],
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<ProcessFacts>() == 4096);

// SAFETY: repr(C), atomics throughout.
unsafe impl Shared for ProcessFacts {}

/// The longest time, nanoseconds, between the starts of two ranks of the same job.
const TOGETHER: u64 = 600_000_000_000;

/// What a program is made of, as far as advice depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Uses {
    /// torch is in the process.
    pub torch: bool,
    /// A Python interpreter is.
    pub python: bool,
}

impl Uses {
    const KNOWN: u64 = 1;
    const TORCH: u64 = 2;
    const PYTHON: u64 = 4;

    fn to_bits(self) -> u64 {
        let bit = |is: bool, bit| if is { bit } else { 0 };
        Self::KNOWN | bit(self.torch, Self::TORCH) | bit(self.python, Self::PYTHON)
    }

    fn of_bits(bits: u64) -> Option<Self> {
        let (torch, python) = (bits & Self::TORCH != 0, bits & Self::PYTHON != 0);
        (bits & Self::KNOWN != 0).then_some(Self { torch, python })
    }
}

/// The identity of a process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Process {
    /// In its own pid namespace.
    pub pid: u64,
    /// In clock ticks since boot: with the pid and the namespace it identifies a process for good.
    pub start_time: u64,
    /// Inode of the pid namespace.
    pub pid_namespace: u64,
    /// When the record was made, in nanoseconds since 1970.
    pub created: u64,
    /// RANK, else that of the process group ([`tell_rank`]), else that of an MPI or Slurm launcher.
    pub rank: Option<u64>,
    /// LOCAL_RANK, else that of the launcher.
    pub local_rank: Option<u64>,
    /// WORLD_SIZE, else that of the process group, else that of the launcher.
    pub world_size: Option<u64>,
    /// Whether the ranks are those of a launcher other than torch's, which tells nothing of the
    /// ranks that the program starts itself: then the process group's take their place.
    pub is_rank_of_launcher: bool,
    /// Whether the processor guarantees a steady tick counter.
    pub steady_counter: bool,
    /// Host name.
    pub host: String,
    /// Version of gruyere.
    pub version: String,
    /// The kernel's boot id.
    pub boot: String,
    /// The command line, cut to 2 KiB; of a child of `multiprocessing`, its program's.
    pub command: String,
    /// GRUYERE_CONF, cut to 1 KiB.
    pub configuration: String,
    /// Its Slurm job or torchrun run, cut to 120 bytes; empty: none.
    pub job: String,
    /// GRUYERE_RUN: the `gruyere run` that started it or one of its ancestors.
    pub run: Option<u64>,
    /// What the program is made of; `None`: the library has not told.
    pub uses: Option<Uses>,
}

impl Process {
    /// Whether a record that says `self` and one that says `other` are the same process's: its own
    /// record, and the copies that it left at an out-of-memory. (A process that replaces its
    /// program by `exec` makes another record, at another time.)
    pub fn is_same(&self, other: &Process) -> bool {
        let of = |process: &Process| {
            (process.pid, process.start_time, process.pid_namespace, process.created)
        };
        of(self) == of(other) && self.boot == other.boot
    }

    /// Whether both are ranks of one run of a job, as far as they say: `torchrun` starts all of
    /// them again where one fails, and without a job's name only the time tells two runs apart.
    pub fn is_of_job(&self, other: &Process) -> bool {
        let of = |process: &Process| (process.world_size, process.run);
        self.world_size.is_some_and(|size| size > 1)
            && of(self) == of(other)
            && (&self.job, &self.boot) == (&other.job, &other.boot)
            && self.created.abs_diff(other.created) < TOGETHER
    }

    /// When the record was made.
    pub fn created_at(&self) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_nanos(self.created)
    }

    /// The facts of this process; unavailable ones stay empty.
    pub fn current() -> Process {
        let line = |path: &str| std::fs::read_to_string(path).unwrap_or_default().trim().to_owned();
        let told = |word: &PrivateAtomicU64| word.load(Ordering::Relaxed).checked_sub(1);
        let variable = |name: &str| std::env::var(name).ok();
        let torch = Place::of_torch(&variable);
        let group = Place {
            rank: torch.rank.or_else(|| told(&TOLD_RANK)),
            local_rank: torch.local_rank,
            world_size: torch.world_size.or_else(|| told(&TOLD_WORLD_SIZE)),
        };
        let launcher = Place::of_launcher(&variable);
        let is_rank_of_launcher = group.rank.is_none() && launcher.rank.is_some();
        let whole = |place: &Place| (place.rank, place.world_size);
        let is_same = launcher.rank.is_some() && whole(&launcher) == whole(&group);
        let place = if is_rank_of_launcher || is_same { launcher } else { group };
        Process {
            pid: u64::from(std::process::id()),
            start_time: start_time(),
            pid_namespace: pid_namespace(),
            created: crate::clock::Moment::take().realtime,
            rank: place.rank,
            local_rank: place.local_rank,
            world_size: place.world_size,
            is_rank_of_launcher,
            steady_counter: steady_counter(),
            host: line("/proc/sys/kernel/hostname"),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            boot: line("/proc/sys/kernel/random/boot_id"),
            command: command(),
            configuration: std::env::var("GRUYERE_CONF").unwrap_or_default(),
            job: job(variable),
            run: variable(RUN_VARIABLE).and_then(|text| text.trim().parse().ok()),
            uses: None,
        }
    }
}

/// What [`tell_rank`] was told last, plus one; 0: nothing.
static TOLD_RANK: PrivateAtomicU64 = PrivateAtomicU64::new(0);
static TOLD_WORLD_SIZE: PrivateAtomicU64 = PrivateAtomicU64::new(0);

/// Tells the records that this process makes from now on its rank and the number of ranks, for what
/// RANK and WORLD_SIZE do not give: a launcher may pass them to the process group alone. For the
/// record that exists there is [`crate::Record::tell_rank`].
pub fn tell_rank(rank: u64, world_size: u64) {
    TOLD_RANK.store(rank.saturating_add(1), Ordering::Relaxed);
    TOLD_WORLD_SIZE.store(world_size.saturating_add(1), Ordering::Relaxed);
}

/// The command line that started this process's program. The children of Python's `multiprocessing`
/// (spawn, forkserver) all have the same, of `python -c`: theirs is that of the nearest ancestor
/// that is none, as after a fork.
fn command() -> String {
    let interpreter_of = |process: &str| std::fs::read_link(format!("/proc/{process}/exe")).ok();
    let (own, interpreter) = (words_of("self"), interpreter_of("self"));
    let (mut process, mut words) = ("self".to_owned(), own.clone());
    // A few: children of children, and the server of forkserver.
    for _ in 0..8 {
        if !is_child_of_multiprocessing(&words) {
            return words.join(" ");
        }
        process = parent_of(&process);
        // An orphan's parent is another program, such as init.
        if interpreter_of(&process) != interpreter {
            break;
        }
        words = words_of(&process);
    }
    own.join(" ")
}

/// Whether these words start a child of `multiprocessing`, its server, or one of the package
/// `multiprocess`, which is made of it.
fn is_child_of_multiprocessing(words: &[String]) -> bool {
    let mut after = words.iter().skip_while(|word| *word != "-c");
    after.nth(1).is_some_and(|code| code.starts_with("from multiprocess"))
}

/// The command line of a process in /proc, word by word; none if there is no such process.
fn words_of(process: &str) -> Vec<String> {
    let line = std::fs::read(format!("/proc/{process}/cmdline")).unwrap_or_default();
    let line = String::from_utf8_lossy(&line);
    line.split_terminator('\0').map(str::to_owned).collect()
}

/// The pid of a process's parent, as /proc has it; empty if there is no such process.
fn parent_of(process: &str) -> String {
    stat_field(&format!("/proc/{process}/stat"), 4).unwrap_or_default()
}

/// The job in an environment: Slurm's, else torchrun's run, except its default id `none`.
fn job(variable: impl Fn(&str) -> Option<String>) -> String {
    let named = |name| variable(name).filter(|id| !id.is_empty() && id != "none");
    named("SLURM_JOB_ID").or_else(|| named("TORCHELASTIC_RUN_ID")).unwrap_or_default()
}

/// The kernel's id of this boot: ticks of two boots are not comparable.
pub fn boot_id() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}

/// This process's start, in clock ticks since boot; 0 without /proc.
pub fn start_time() -> u64 {
    start_time_of("/proc/self/stat")
}

/// As [`start_time`], of the process whose `stat` file this is; 0 if there is none.
pub(crate) fn start_time_of(stat: &str) -> u64 {
    stat_field(stat, 22).and_then(|field| field.parse().ok()).unwrap_or(0)
}

/// A field of a `stat` file, from the third on, numbered from 1 as in proc(5).
pub fn stat_field(stat: &str, number: usize) -> Option<String> {
    let stat = std::fs::read_to_string(stat).ok()?;
    // The second field is the command in brackets, with any content: count from the last bracket.
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_whitespace().nth(number - 3).map(str::to_owned)
}

/// Whether /proc shows our own pid namespace.
pub(crate) fn proc_is_ours() -> bool {
    let me = std::fs::read_link("/proc/self").ok();
    me.and_then(|me| me.to_str()?.parse().ok()) == Some(std::process::id())
}

/// Whether a process of this number exists in our pid namespace, including other users' and hidden
/// ones.
pub(crate) fn is_there(pid: u64) -> bool {
    // Numbers below 1 are groups of processes.
    let Some(pid) = libc::pid_t::try_from(pid).ok().filter(|&pid| pid > 0) else { return false };
    // SAFETY: signal 0 sends nothing: it only checks whether a signal could be sent.
    let asked = unsafe { libc::kill(pid, 0) };
    asked == 0 || std::io::Error::last_os_error().raw_os_error() == Some(libc::EPERM)
}

/// Inode of this process's pid namespace; 0 without /proc.
pub fn pid_namespace() -> u64 {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata("/proc/self/ns/pid").map_or(0, |metadata| metadata.ino())
}

fn steady_counter() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        use core::arch::x86_64::__cpuid;
        // Intel SDM vol. 3, 19.17.1; AMD APM vol. 3, appendix E: leaf 0x8000_0007, EDX bit 8.
        #[allow(unused_unsafe)] // safe or not, by the version of std
        // SAFETY: every x86-64 processor has CPUID.
        unsafe {
            __cpuid(0x8000_0000).eax >= 0x8000_0007 && __cpuid(0x8000_0007).edx & (1 << 8) != 0
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    true
}

impl ProcessFacts {
    /// Writes the facts, before the record is published.
    pub fn write(&self, process: &Process) {
        let numbers = [process.pid, process.start_time, process.pid_namespace, process.created];
        for (word, number) in self.numbers.iter().zip(numbers) {
            word.store(number, Ordering::Relaxed);
        }
        for (word, rank) in
            self.ranks.iter().zip([process.rank, process.local_rank, process.world_size])
        {
            word.store(rank.map_or(0, |rank: u64| rank.saturating_add(1)), Ordering::Relaxed);
        }
        self.launcher.store(u64::from(process.is_rank_of_launcher), Ordering::Relaxed);
        self.steady_counter.store(u64::from(process.steady_counter), Ordering::Relaxed);
        store_text(&self.host_bytes, &self.host, &process.host);
        store_text(&self.version_bytes, &self.version, &process.version);
        store_text(&self.boot_bytes, &self.boot, &process.boot);
        store_text(&self.command_bytes, &self.command, &process.command);
        store_text(&self.configuration_bytes, &self.configuration, &process.configuration);
        store_text(&self.job_bytes, &self.job, &process.job);
        self.run.store(process.run.map_or(0, |run| run.saturating_add(1)), Ordering::Relaxed);
    }

    /// Writes the rank and the number of ranks, each where none is known but a launcher's. For the
    /// writer, at any time.
    pub(crate) fn tell_rank(&self, rank: u64, world_size: u64) {
        let [known_rank, local_rank, known_size] = &self.ranks;
        if self.launcher.swap(0, Ordering::Relaxed) == 1 {
            let number = |word: &AtomicU64| word.load(Ordering::Relaxed).checked_sub(1);
            if (number(known_rank), number(known_size)) != (Some(rank), Some(world_size)) {
                // Of another rank, such as the parent of those that the program starts.
                for word in [known_rank, local_rank, known_size] {
                    word.store(0, Ordering::Relaxed);
                }
            }
        }
        // The number of ranks first: a reader may come in between, and compares no rank of one.
        for (word, number) in [(known_size, world_size), (known_rank, rank)] {
            if word.load(Ordering::Relaxed) == 0 {
                word.store(number.saturating_add(1), Ordering::Relaxed);
            }
        }
    }

    /// Writes what the program is made of by now. For the writer, at any time.
    pub(crate) fn tell_uses(&self, uses: Uses) {
        self.uses.store(uses.to_bits(), Ordering::Relaxed);
    }

    /// Reads them back.
    pub fn read(&self) -> Process {
        let number = |word: &AtomicU64| word.load(Ordering::Relaxed);
        let [pid, start_time, pid_namespace, created] =
            [0, 1, 2, 3].map(|i| number(&self.numbers[i]));
        let [rank, local_rank, world_size] =
            [0, 1, 2].map(|i| number(&self.ranks[i]).checked_sub(1));
        Process {
            pid,
            start_time,
            pid_namespace,
            created,
            rank,
            local_rank,
            world_size,
            is_rank_of_launcher: number(&self.launcher) == 1,
            steady_counter: number(&self.steady_counter) == 1,
            host: load_text(&self.host_bytes, &self.host),
            version: load_text(&self.version_bytes, &self.version),
            boot: load_text(&self.boot_bytes, &self.boot),
            command: load_text(&self.command_bytes, &self.command),
            configuration: load_text(&self.configuration_bytes, &self.configuration),
            job: load_text(&self.job_bytes, &self.job),
            run: number(&self.run).checked_sub(1),
            uses: Uses::of_bits(number(&self.uses)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Process, ProcessFacts, Uses, is_child_of_multiprocessing, job};

    #[test]
    fn a_record_of_a_library_that_did_not_tell_is_not_taken_for_a_program_without_torch() {
        assert_eq!(Uses::of_bits(0), None);
        for (torch, python) in [(false, false), (false, true), (true, false), (true, true)] {
            let uses = Uses { torch, python };
            assert_eq!(Uses::of_bits(uses.to_bits()), Some(uses));
        }
    }

    #[test]
    fn a_child_of_multiprocessing_is_told_by_the_code_that_python_gives_it() {
        let is_child = |line: &str| {
            let words: Vec<String> = line.split('|').map(str::to_owned).collect();
            is_child_of_multiprocessing(&words)
        };
        let spawned = "from multiprocessing.spawn import spawn_main; spawn_main(pipe_handle=6)";
        assert!(is_child(&format!("python|-X|dev|-c|{spawned}|--multiprocessing-fork")));
        assert!(is_child("python|-c|from multiprocessing.forkserver import main; main(9, 10)"));
        for other in ["python|-c|import torch", "python|train.py|-c", "python|-c", "solver", ""] {
            assert!(!is_child(other), "{other}");
        }
    }

    #[test]
    fn the_process_groups_rank_takes_the_place_of_a_launchers_and_of_no_other() {
        let told = |is_rank_of_launcher, rank, world_size| {
            // SAFETY: atomic integers throughout, for which zeros are a value.
            let facts: ProcessFacts = unsafe { std::mem::zeroed() };
            facts.write(&Process {
                rank: Some(0),
                local_rank: Some(0),
                world_size: Some(2),
                is_rank_of_launcher,
                ..Process::default()
            });
            facts.tell_rank(rank, world_size);
            // Only the first counts.
            facts.tell_rank(7, 9);
            let Process { rank, local_rank, world_size, .. } = facts.read();
            (rank, local_rank, world_size)
        };
        assert_eq!(told(false, 3, 4), (Some(0), Some(0), Some(2)));
        assert_eq!(told(true, 3, 4), (Some(3), None, Some(4)));
        assert_eq!(told(true, 0, 2), (Some(0), Some(0), Some(2)));
    }

    #[test]
    fn a_job_is_slurms_or_torchruns_and_the_default_run_is_none() {
        let of = |set: &[(&str, &str)]| {
            job(|name| {
                set.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
            })
        };
        assert_eq!(of(&[("SLURM_JOB_ID", "4711"), ("TORCHELASTIC_RUN_ID", "llama")]), "4711");
        assert_eq!(of(&[("SLURM_JOB_ID", ""), ("TORCHELASTIC_RUN_ID", "llama")]), "llama");
        assert_eq!(of(&[("TORCHELASTIC_RUN_ID", "none")]), "");
        assert_eq!(of(&[]), "");
    }
}
