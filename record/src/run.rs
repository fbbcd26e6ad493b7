//! What is kept of a run once it is over: who it was, what it peaked at, and its timeline, in some
//! dozen KiB of JSON.
//!
//! The process writes it itself where `history:` says so (`door::run_file`), and `gruyere report`
//! makes one of any record.
#![deny(unsafe_code)]

use std::ffi::OsStr;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::calls::CallTime;
use super::held::peak_ratio;
use super::histogram::bucket_floor;
use super::sites::{LISTED, Line, read_lines};
use super::timeline::Sample;
use super::{DeviceGauge, Reader};

/// What [`Run::schema`] says.
pub const SCHEMA: &str = "gruyere.run";
/// What [`Run::version`] says.
pub const VERSION: u32 = 1;
/// Cells of the timeline that are kept: four of the record's become one where it is full.
pub const CELLS: usize = 512;
/// Longest name of a run.
pub const MAX_NAME: usize = 64;
/// How files of runs end.
pub const FILE_SUFFIX: &str = ".run.json";

/// A run. Bytes are bytes; times are nanoseconds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// [`SCHEMA`].
    pub schema: String,
    /// [`VERSION`].
    pub version: u32,
    /// Runs of one name are compared with each other.
    pub name: String,
    /// Its process.
    pub pid: u64,
    /// Where it ran.
    pub host: String,
    /// RANK, where it has one.
    pub rank: Option<u64>,
    /// WORLD_SIZE, where it has one.
    pub world_size: Option<u64>,
    /// The command line.
    pub command: String,
    /// GRUYERE_CONF.
    pub configuration: String,
    /// Version of gruyere.
    pub gruyere: String,
    /// When it began, since 1970.
    pub started_nanoseconds: u64,
    /// The `gruyere run` that it belongs to.
    #[serde(default)]
    pub gruyere_run: Option<u64>,
    /// The devices that it used.
    pub devices: Vec<RunDevice>,
    /// How long the driver's calls took on the host, all devices together.
    #[serde(default)]
    pub driver_call_times: Vec<CallTime>,
}

/// A device of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RunDevice {
    /// Its number in the process.
    pub device: u32,
    /// The driver's name of it.
    pub name: String,
    /// Its memory.
    pub total_memory_bytes: u64,
    /// The most that was live: exact.
    pub live_peak_bytes: u64,
    /// The most that was held.
    pub reserved_peak_bytes: u64,
    /// Blocks handed out.
    pub mallocs: u64,
    /// Blocks that came back.
    #[serde(default)]
    pub frees: u64,
    /// The largest block, within an eighth: the least that one of its bucket has
    /// ([`super::histogram`]).
    #[serde(default)]
    pub largest_block_bytes: u64,
    /// Calls of the driver.
    pub driver_calls: u64,
    /// Requests met only after memory had been reclaimed.
    pub retries: u64,
    /// Requests not met.
    pub out_of_memories: u64,
    /// Training steps that were marked.
    pub steps: u64,
    /// How it went.
    pub timeline: Vec<Cell>,
    /// What lines of the program held at the end; empty where no sites were kept, or it did not
    /// end.
    #[serde(default)]
    pub lines: Vec<Line>,
}

/// A piece of a run's timeline, as an array of eight numbers: nanoseconds since the run began, then
/// the fields of [`Sample`] behind `ticks` in their order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(from = "[u64; 8]", into = "[u64; 8]")]
pub struct Cell {
    /// When it ended, in nanoseconds since the run began.
    pub nanoseconds: u64,
    /// What it says; its `ticks` are 0.
    pub sample: Sample,
}

impl From<[u64; 8]> for Cell {
    fn from(words: [u64; 8]) -> Cell {
        Cell { nanoseconds: words[0], sample: Sample { ticks: 0, ..Sample::from_words(words) } }
    }
}

impl From<Cell> for [u64; 8] {
    fn from(Cell { nanoseconds, sample }: Cell) -> [u64; 8] {
        // In the place of the ticks.
        Sample { ticks: nanoseconds, ..sample }.words()
    }
}

/// Several steps of a run, taken together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Steps {
    /// The first of them.
    pub first: u64,
    /// The last of them.
    pub last: u64,
    /// The most that blocks above 16 KiB and slabs took.
    pub in_use: u64,
    /// The most that was held.
    pub reserved: u64,
}

impl Steps {
    /// Held / in use, both at their highest in these steps; `None` where nothing was in use.
    pub fn ratio(&self) -> Option<f64> {
        peak_ratio(self.reserved, self.in_use)
    }
}

impl Run {
    /// What `reader`'s process has done so far, under `name` (or that of its program).
    pub fn of(reader: &Reader<'_>, name: Option<&str>) -> Run {
        let process = reader.process();
        let devices = (0..reader.devices()).filter_map(|device| run_device(reader, device));
        Run {
            schema: SCHEMA.to_owned(),
            version: VERSION,
            name: name.map_or_else(|| name_of(&process.command), str::to_owned),
            devices: devices.collect(),
            driver_call_times: reader.driver_call_times(),
            pid: process.pid,
            host: process.host,
            rank: process.rank,
            world_size: process.world_size,
            command: process.command,
            configuration: process.configuration,
            gruyere: process.version,
            started_nanoseconds: process.created,
            gruyere_run: process.run,
        }
    }

    /// With what lines of the program hold now: to be said at the end, since it reads all blocks.
    pub fn with_lines(mut self, reader: &Reader<'_>) -> Run {
        for device in &mut self.devices {
            device.lines = read_lines(reader, device.device, LISTED).unwrap_or_default();
        }
        self
    }

    /// The name of its file: that of the run, the rank, when it began (in seconds since 1970), and
    /// the process.
    pub fn file_name(&self) -> String {
        let Run { name, pid, .. } = self;
        let (rank, started) = (self.rank.unwrap_or(0), self.started_nanoseconds / 1_000_000_000);
        format!("{name}.rank{rank}.{started}-{pid}{FILE_SUFFIX}")
    }
}

fn run_device(reader: &Reader<'_>, device: u32) -> Option<RunDevice> {
    let snapshot = reader.device(device)?;
    let created = reader.process().created;
    let mut timeline: Vec<Cell> = reader
        .timeline(device)
        .entries
        .into_iter()
        .map(|entry| Cell {
            nanoseconds: entry.realtime_nanoseconds.saturating_sub(created),
            sample: Sample { ticks: 0, ..entry.sample },
        })
        .collect();
    while timeline.len() > CELLS {
        timeline = timeline.chunks(2).map(join).collect();
    }
    let gauge = |gauge| snapshot.gauge(gauge);
    let largest = snapshot.malloc_sizes.0.iter().rposition(|&count| count > 0);
    let run = RunDevice {
        device,
        total_memory_bytes: snapshot.facts.total_memory,
        live_peak_bytes: snapshot.live_peak,
        reserved_peak_bytes: gauge(DeviceGauge::ReservedPeak),
        mallocs: snapshot.total().mallocs,
        frees: snapshot.total().frees,
        largest_block_bytes: largest.map_or(0, bucket_floor),
        driver_calls: gauge(DeviceGauge::DriverCalls),
        retries: gauge(DeviceGauge::Retries),
        out_of_memories: gauge(DeviceGauge::OutOfMemories),
        steps: gauge(DeviceGauge::Step),
        name: snapshot.facts.name,
        timeline,
        lines: Vec::new(),
    };
    (run.mallocs > 0 || run.reserved_peak_bytes > 0).then_some(run)
}

fn join(pair: &[Cell]) -> Cell {
    let mut cells = pair.iter().copied();
    let first = cells.next().unwrap_or_default();
    cells.fold(first, |all, cell| Cell {
        nanoseconds: cell.nanoseconds,
        sample: Sample { ticks: 0, ..all.sample.and(cell.sample) },
    })
}

impl RunDevice {
    /// Peak held / peak live; `None` where nothing was live.
    pub fn peak_ratio(&self) -> Option<f64> {
        peak_ratio(self.reserved_peak_bytes, self.live_peak_bytes)
    }

    /// How steps `first` to `last` went, in at most `parts` parts of as many steps each. A cell of
    /// the timeline that lies in several of them counts for each. Nothing where no step was marked.
    pub fn by_steps(&self, first: u64, last: u64, parts: u64) -> Vec<Steps> {
        let end = self.timeline.last().map_or(0, |cell| cell.sample.step);
        if end == 0 || last < first || parts == 0 {
            return Vec::new();
        }
        let steps = last.saturating_sub(first).saturating_add(1);
        let each = steps.div_ceil(parts);
        let mut answer: Vec<Steps> = (0..steps.div_ceil(each))
            .map(|part| {
                let first = first + part * each;
                Steps { first, last: last.min(first + (each - 1)), ..Steps::default() }
            })
            .collect();
        let mut before = 0;
        for Cell { sample, .. } in &self.timeline {
            for part in &mut answer {
                if before <= part.last && sample.step >= part.first {
                    part.in_use = part.in_use.max(sample.in_use_high);
                    part.reserved = part.reserved.max(sample.reserved_high);
                }
            }
            before = sample.step;
        }
        answer
    }
}

/// Whether `name` may be that of a run: it becomes a part of a file's name.
pub fn is_name(name: &str) -> bool {
    (1..=MAX_NAME).contains(&name.len())
        && !name.starts_with('.')
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
}

/// A command line as people know it: without `-m gruyere` and its options, and without the path of
/// the interpreter. Options take a value each, but for `--stand-in`, as `python -m gruyere` reads
/// them.
pub fn shown_command(command: &str) -> String {
    let mut words: Vec<&str> = command.split(' ').filter(|word| !word.is_empty()).collect();
    if let Some(program) = words.first_mut() {
        *program = Path::new(*program).file_name().and_then(OsStr::to_str).unwrap_or(*program);
    }
    let launcher = words.windows(2).position(|pair| pair == ["-m", "gruyere"]);
    // A script's own arguments may say anything.
    let scripts = words.iter().position(|word| word.ends_with(".py")).unwrap_or(words.len());
    let is_python = words.first().is_some_and(|program| program.starts_with("python"));
    if let Some(at) = launcher.filter(|&at| is_python && at < scripts) {
        let mut end = at + 2;
        while let Some(word) = words.get(end).filter(|word| word.starts_with("--")) {
            let has_value = !["--", "--stand-in"].contains(word) && !word.contains('=');
            end += 1 + usize::from(has_value);
        }
        words.drain(at..end.min(words.len()));
    }
    words.join(" ")
}

/// The name of a run with this command line: its script's or module's, else its program's.
pub fn name_of(command: &str) -> String {
    let mut words = command.split(' ').filter(|word| !word.is_empty());
    let program = words.next().unwrap_or("run");
    let is_python = stem(program).starts_with("python");
    let mut script = None;
    while let Some(word) = words.next().filter(|_| is_python) {
        match word {
            // `-m gruyere [options] script.py`: the script is what was run.
            "-m" => match words.next() {
                Some("gruyere") => {}
                module => {
                    script = script.or(module);
                    break;
                }
            },
            "-c" => break,
            _ if word.ends_with(".py") => {
                script = Some(word);
                break;
            }
            _ => {}
        }
    }
    let name = script.map_or_else(|| stem(program), stem);
    let safe: String = name
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '-' })
        .take(MAX_NAME)
        .collect();
    if is_name(&safe) { safe } else { "run".to_owned() }
}

fn stem(path: &str) -> &str {
    let name = Path::new(path).file_name().and_then(OsStr::to_str).unwrap_or(path);
    name.strip_suffix(".py").unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_called_what_the_user_calls_it() {
        let cases = [
            ("python train.py --lr 3", "train"),
            ("/usr/bin/python3.12 -u /home/me/train_llama.py", "train_llama"),
            ("python -m gruyere --limit 90% finetune.py", "finetune"),
            ("python -m gruyere -m my.package.train --x", "my.package.train"),
            ("python -m torch.distributed.run x.py", "torch.distributed.run"),
            ("python -c import torch", "python"),
            ("/opt/bin/server --port 80", "server"),
            ("", "run"),
            ("/x/\u{1b}[31mred", "--31mred"),
            ("..", "run"),
        ];
        for (command, name) in cases {
            assert_eq!(name_of(command), name, "{command:?}");
            assert!(is_name(&name_of(command)));
        }
    }

    #[test]
    fn the_launcher_is_left_out_of_what_is_shown() {
        let cases = [
            ("/usr/bin/python3 -m gruyere --limit 90% train.py --lr 3", "python3 train.py --lr 3"),
            ("python -u -m gruyere --share=off -m my.train --x", "python -u -m my.train --x"),
            ("python -m gruyere -- train.py", "python train.py"),
            ("python -m gruyere --stand-in train.py --x", "python train.py --x"),
            ("python -m gruyere --stand-in --steps 3 train.py", "python train.py"),
            ("python train.py -m gruyere", "python train.py -m gruyere"),
            ("/opt/bin/server -m gruyere", "server -m gruyere"),
            ("python -m gruyere", "python"),
            ("", ""),
        ];
        for (command, shown) in cases {
            assert_eq!(shown_command(command), shown, "{command:?}");
        }
    }

    fn device(cells: &[(u64, u64)]) -> RunDevice {
        let cell = |&(step, in_use_high)| Cell {
            nanoseconds: step,
            sample: Sample {
                step,
                in_use_high,
                reserved_high: 2 * in_use_high,
                ..Sample::default()
            },
        };
        RunDevice { timeline: cells.iter().map(cell).collect(), ..RunDevice::default() }
    }

    #[test]
    fn steps_are_told_by_the_cells_that_they_lie_in() {
        let run = device(&[(0, 10), (1, 30), (2, 20), (6, 50), (7, 5)]);
        let parts = run.by_steps(0, 7, 8);
        let peaks: Vec<u64> = parts.iter().map(|part| part.in_use).collect();
        // A cell that ends in step 2 may have begun in step 1; the one to step 6 began in step 2.
        assert_eq!(peaks, [30, 30, 50, 50, 50, 50, 50, 5]);
        assert_eq!(parts[7].reserved, 10);
        let halves = run.by_steps(0, 7, 2);
        assert_eq!(
            (halves[0].first, halves[0].last, halves[1].first, halves[1].last),
            (0, 3, 4, 7)
        );
        assert!(run.by_steps(3, 2, 4).is_empty());
        assert!(device(&[(0, 10)]).by_steps(0, 0, 4).is_empty(), "no step was marked");
        assert_eq!(run.by_steps(0, u64::MAX, 4).len(), 4);
    }

    #[test]
    fn a_run_is_the_same_after_json() {
        let run = Run {
            name: "train".into(),
            devices: vec![device(&[(1, 2), (3, 4)])],
            ..Run::default()
        };
        let text = serde_json::to_string(&run).unwrap();
        assert!(text.contains("[3,3,0,0,4,8,0,0]"), "{text}");
        assert_eq!(serde_json::from_str::<Run>(&text).unwrap(), run);
    }
}
