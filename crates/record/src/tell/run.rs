//! The remains of a finished run: its process, its peaks, and its timeline, in some dozen KiB of
//! JSON.
//!
//! The process writes it itself if `history:` asks for it (`door::run_file`), and `gruyere report`
//! makes one from any record.
#![deny(unsafe_code)]

use std::ffi::OsStr;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::calls::CallTime;
use crate::held::peak_ratio;
use crate::histogram::bucket_floor;
use crate::plain::quoted;
use crate::sites::{LISTED, Line, read_lines};
use crate::timeline::Sample;
use crate::{DeviceGauge, Reader};

/// Value of [`Run::schema`].
pub const SCHEMA: &str = "gruyere.run";
/// Value of [`Run::version`].
pub const VERSION: u32 = 1;
/// Cells kept of the timeline: four of a full record's become one.
pub const CELLS: usize = 512;
/// Longest name of a run.
pub const MAX_NAME: usize = 64;
/// Suffix of run files.
pub const FILE_SUFFIX: &str = ".run.json";

/// A run. Times are in nanoseconds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// [`SCHEMA`].
    pub schema: String,
    /// [`VERSION`].
    pub version: u32,
    /// Name; `gruyere report` compares runs of one name.
    pub name: String,
    /// Its process.
    pub pid: u64,
    /// Host name.
    pub host: String,
    /// RANK, or what stands for it, if known.
    pub rank: Option<u64>,
    /// WORLD_SIZE, or what stands for it, if known.
    pub world_size: Option<u64>,
    /// The command line.
    pub command: String,
    /// GRUYERE_CONF.
    pub configuration: String,
    /// Version of gruyere.
    pub gruyere: String,
    /// Start, since 1970.
    pub started_nanoseconds: u64,
    /// The `gruyere run` it belongs to.
    #[serde(default)]
    pub gruyere_run: Option<u64>,
    /// Where the process wrote this before its end: when, since its start. What it did later is
    /// missing.
    #[serde(default)]
    pub unfinished_at_nanoseconds: Option<u64>,
    /// The devices that it used.
    pub devices: Vec<RunDevice>,
    /// Host times of the driver's calls, all devices together.
    #[serde(default)]
    pub driver_call_times: Vec<CallTime>,
}

/// A device of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RunDevice {
    /// Its number in the process.
    pub device: u32,
    /// The driver's name for it.
    pub name: String,
    /// Its memory.
    pub total_memory_bytes: u64,
    /// The highest live bytes: exact.
    pub live_peak_bytes: u64,
    /// The highest held bytes.
    pub reserved_peak_bytes: u64,
    /// Blocks handed out.
    pub mallocs: u64,
    /// Blocks freed.
    #[serde(default)]
    pub frees: u64,
    /// The largest block, within an eighth: the lower bound of its bucket ([`crate::histogram`]).
    #[serde(default)]
    pub largest_block_bytes: u64,
    /// Calls of the driver.
    pub driver_calls: u64,
    /// Requests met only after reclaiming memory.
    pub retries: u64,
    /// Requests not met.
    pub out_of_memories: u64,
    /// Marked training steps.
    pub steps: u64,
    /// The course of the run.
    pub timeline: Vec<Cell>,
    /// Memory of lines of the program at the end; empty without sites, or if the run did not end.
    #[serde(default)]
    pub lines: Vec<Line>,
}

/// A cell of a run's timeline, as an array of eight numbers: nanoseconds since the start of the
/// run, then the fields of [`Sample`] after `ticks`, in their order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(from = "[u64; 8]", into = "[u64; 8]")]
pub struct Cell {
    /// End of the cell, in nanoseconds since the start of the run.
    pub nanoseconds: u64,
    /// The sample; its `ticks` are 0.
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

/// Several steps of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Steps {
    /// The first of them.
    pub first: u64,
    /// The last of them.
    pub last: u64,
    /// Highest bytes of blocks above 16 KiB and slabs.
    pub in_use: u64,
    /// Highest held bytes.
    pub reserved: u64,
}

impl Steps {
    /// Held / in use, both at their highest in these steps; `None` if nothing was in use.
    pub fn ratio(&self) -> Option<f64> {
        peak_ratio(self.reserved, self.in_use)
    }
}

impl Run {
    /// The run of `reader`'s process so far, under `name` (or its program's name).
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
            unfinished_at_nanoseconds: None,
        }
    }

    /// Adds the present memory of lines of the program: only at the end, since it reads all blocks.
    pub fn with_lines(mut self, reader: &Reader<'_>) -> Run {
        for device in &mut self.devices {
            device.lines = read_lines(reader, device.device, LISTED).unwrap_or_default();
        }
        self
    }

    /// The name of its file: the run's name, the rank, the start (in seconds since 1970), and the
    /// process.
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
    /// Peak held / peak live; `None` if nothing was live.
    pub fn peak_ratio(&self) -> Option<f64> {
        peak_ratio(self.reserved_peak_bytes, self.live_peak_bytes)
    }

    /// Steps `first` to `last` in at most `parts` parts of equally many steps. A cell of the
    /// timeline in several parts counts for each. Empty without step marks.
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

/// Whether `name` can name a run: it becomes part of a file name.
pub fn is_name(name: &str) -> bool {
    (1..=MAX_NAME).contains(&name.len())
        && !name.starts_with('.')
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
}

/// A command line as users know it: without `-m gruyere` and its options, and without the
/// interpreter's path. As in `python -m gruyere`, every option except `--stand-in` takes a value.
pub fn shown_command(command: &str) -> String {
    shown_words(command.split(' ').filter(|word| !word.is_empty()).collect()).join(" ")
}

/// A command line to type again in a shell for its program: [`shown_command`] of these words, which
/// a record does not have (it joins them by blanks), each quoted. `None`: what python runs has no
/// name that could be typed (`-c`, standard input, no program at all).
pub fn typed_command(words: &[String]) -> Option<String> {
    let words = shown_words(words.iter().map(String::as_str).collect());
    if words.first()?.starts_with("python") {
        program_at(&words)?;
    }
    Some(words.into_iter().map(quoted).collect::<Vec<_>>().join(" "))
}

/// The place, in python's words, of its program: of a script, or of the option `-m`. `None`: what
/// it runs has no name that could be typed (`-c`, standard input, no program at all).
pub fn program_at(words: &[&str]) -> Option<usize> {
    let mut at = 1;
    loop {
        let word = *words.get(at)?;
        let Some(letters) = word.strip_prefix('-') else { return Some(at) };
        if letters.is_empty() {
            return None;
        }
        // Letters may share a dash, and a value may be joined on.
        let special = letters.find(['c', 'm', 'W', 'X']).filter(|_| !letters.starts_with('-'));
        match special.map(|place| (&letters[place..=place], &letters[place + 1..])) {
            Some(("c", _)) => return None,
            Some(("m", "")) => return words.get(at + 1).map(|_| at),
            Some(("m", _)) => return Some(at),
            Some((_, "")) => at += 2,
            _ => at += 1,
        }
    }
}

fn shown_words(mut words: Vec<&str>) -> Vec<&str> {
    if let Some(program) = words.first_mut() {
        *program = Path::new(*program).file_name().and_then(OsStr::to_str).unwrap_or(*program);
    }
    let launcher = words.windows(2).position(|pair| pair == ["-m", "gruyere"]);
    // A script's own arguments may be anything.
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
    words
}

/// The name of a run with this command line: its script's or module's, else its program's.
pub fn name_of(command: &str) -> String {
    let mut words = command.split(' ').filter(|word| !word.is_empty());
    let program = words.next().unwrap_or("run");
    let is_python = stem(program).starts_with("python");
    let mut script = None;
    while let Some(word) = words.next().filter(|_| is_python) {
        match word {
            // `-m gruyere [options] script.py`: the script was run.
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

    #[test]
    fn a_command_to_type_again_keeps_its_words_apart() {
        let typed = |words: &[&str]| {
            typed_command(&words.iter().map(|&word| word.to_owned()).collect::<Vec<_>>())
        };
        let python = ["/usr/bin/python3", "-m", "gruyere", "--limit", "90%"];
        let of = |words: &[&str]| typed(&[&python[..], words].concat());
        assert_eq!(
            of(&["tiny.py", "a b", "$x;ls", "", "it's"]).as_deref(),
            Some("python3 tiny.py 'a b' '$x;ls' '' 'it'\\''s'")
        );
        assert_eq!(of(&["-m", "my.train", "-c", "x"]).as_deref(), Some("python3 -m my.train -c x"));
        assert_eq!(typed(&["./solve", "a b"]).as_deref(), Some("solve 'a b'"));
        let plain = ["python", "-u", "-X", "dev", "train.py"];
        assert_eq!(typed(&plain).as_deref(), Some("python -u -X dev train.py"));
        // Nothing that could be named.
        for words in [&["python", "-c", "import x"][..], &["python", "-uc", "x"], &["python", "-"]]
        {
            assert_eq!(typed(words), None, "{words:?}");
        }
        assert_eq!((of(&["-c", "x"]), typed(&["python", "-i"]), typed(&[])), (None, None, None));
        assert_eq!(program_at(&["python", "-uX", "dev", "-Werror", "a.py", "-c"]), Some(4));
        assert_eq!(program_at(&["python", "-um", "a"]), Some(1));
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
