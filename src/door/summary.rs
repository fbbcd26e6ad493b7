//! One line at a program's end about its device memory, where `summary:` asks for it.
#![deny(unsafe_code)]

use std::fmt::Write as _;
use std::io::{self, IsTerminal as _, Write as _};

use super::process::config;
use super::run_file::is_temporary;
use crate::config::{Config, Summary};
use crate::heap::{Bytes, Heap};
use crate::record::Reader;
use crate::record::run::{Run, RunDevice, typed_command};
use crate::record::{plain, quoted};

/// Set by the Python package, for this process and its children.
const PACKAGE: &str = "GRUYERE_ENABLE";
/// Set for a process on the stand-in GPU.
const STAND_IN: &str = "PHANTOM_OWNER";

/// Prints the line at the end of the process.
pub(super) fn at_exit(heap: &Heap) {
    let Some(config) = config() else { return };
    let Some(reader) = Reader::own(heap.record()) else { return };
    if !is_wanted(config.summary, reader.process().rank) {
        return;
    }
    let run = Run::of(&reader, config.name.as_deref());
    // `gruyere compare` runs Python programs only.
    let words = words();
    let typed = runs_python(&words).then(|| typed_command(&words)).flatten();
    if let Some(line) = line(&run, config, typed, std::env::var_os(STAND_IN).is_some()) {
        let line = if io::stderr().is_terminal() { folded(&line) } else { line };
        // In one write, since ranks may share stderr. A closed stderr is not an error.
        let _ = io::stderr().write_all(format!("{line}\n").as_bytes());
    }
}

fn is_wanted(summary: Summary, rank: Option<u64>) -> bool {
    match summary {
        Summary::Off => false,
        Summary::On => true,
        Summary::Auto => {
            std::env::var_os(PACKAGE).is_some()
                && io::stderr().is_terminal()
                && rank.unwrap_or(0) == 0
        }
    }
}

/// The width of a usual terminal.
const COLUMNS: usize = 80;

/// A line that is too long for a usual terminal, broken behind its parts: the command at its end is
/// whole, to be copied.
fn folded(line: &str) -> String {
    let mut out = String::new();
    let mut used = 0;
    for part in line.split_inclusive("; ") {
        let wide = part.trim_end().chars().count();
        if used > 0 && used + wide > COLUMNS {
            out.truncate(out.trim_end().len());
            out.push_str("\n  ");
            used = 2;
        }
        out.push_str(part);
        used += part.chars().count();
    }
    out
}

/// The command line of this process, word by word; empty where a word is no UTF-8.
fn words() -> Vec<String> {
    let line = std::fs::read("/proc/self/cmdline").unwrap_or_default();
    let line = String::from_utf8(line).unwrap_or_default();
    line.split_terminator('\0').map(str::to_owned).collect()
}

/// Whether this command line is that of a Python interpreter.
fn runs_python(words: &[String]) -> bool {
    let program = words.first().and_then(|word| word.rsplit('/').next());
    program.is_some_and(|program| program.starts_with("python"))
}

/// `typed`: the command that starts the program again, if there is one to type. `None`: no device
/// was used.
fn line(run: &Run, config: &Config, typed: Option<String>, on_stand_in: bool) -> Option<String> {
    let mut said = String::from("gruyere:");
    let is_of_several = run.world_size.is_some_and(|size| size > 1);
    if let Some(rank) = run.rank.filter(|_| is_of_several) {
        // Writing to a String cannot fail.
        let _ = write!(said, " rank {rank}:");
    }
    let used: Vec<(&RunDevice, f64)> =
        run.devices.iter().filter_map(|device| Some((device, device.peak_ratio()?))).collect();
    if used.is_empty() {
        return None;
    }
    for (device, ratio) in &used {
        let place = match used.len() {
            1 => String::new(),
            _ => format!(" device {}", device.device),
        };
        let _ = write!(
            said,
            "{place} peak live {}, held {}",
            Bytes(device.live_peak_bytes),
            Bytes(device.reserved_peak_bytes),
        );
        // A program of some KiB still holds a page, which is thousands of per cent.
        if *ratio < 10.0 {
            let _ = write!(said, " ({:+.1}%)", 100.0 * (ratio - 1.0));
        }
        said.push(';');
        if device.out_of_memories > 0 {
            let _ = write!(said, " {} out of memory;", device.out_of_memories);
        }
    }
    let nanoseconds: u64 = run.driver_call_times.iter().map(|call| call.total_nanoseconds).sum();
    let _ = write!(said, " {:.2} s in driver calls", nanoseconds as f64 / 1e9);
    // A folder that `gruyere run` removes is nowhere to look.
    let kept = config.history.as_deref().filter(|folder| !is_temporary(folder));
    let _ = match (kept, typed) {
        (Some(folder), _) => write!(
            said,
            "; more: gruyere report --history {} --name {}{}",
            quoted(&folder.display().to_string()),
            quoted(&run.name),
            run.rank
                .filter(|&rank| rank > 0)
                .map_or_else(String::new, |it| format!(" --rank {it}"))
        ),
        // A rank does not start by itself.
        (None, Some(typed)) if !is_of_several => {
            let option = if on_stand_in { "--stand-in " } else { "" };
            write!(said, "; compare with torch's: gruyere compare {option}-- {typed}")
        }
        (None, _) => Ok(()),
    };
    // Names in it may be anybody's.
    Some(plain(&said))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run() -> Run {
        let device = RunDevice {
            live_peak_bytes: 100 << 20,
            reserved_peak_bytes: 102 << 20,
            ..RunDevice::default()
        };
        Run { devices: vec![device], ..Run::default() }
    }

    fn line_of(run: &Run, config: &Config, on_stand_in: bool) -> Option<String> {
        line(run, config, Some("python3 train.py --lr 3".to_owned()), on_stand_in)
    }

    #[test]
    fn one_line_has_the_peaks_how_much_more_is_held_and_the_command_for_more() {
        assert_eq!(
            line_of(&run(), &Config::default(), false).unwrap(),
            "gruyere: peak live 100.00 MiB, held 102.00 MiB (+2.0%); 0.00 s in driver calls; \
             compare with torch's: gruyere compare -- python3 train.py --lr 3"
        );
        // There, it says so.
        let said = line_of(&run(), &Config::default(), true).unwrap();
        assert!(said.ends_with("gruyere compare --stand-in -- python3 train.py --lr 3"), "{said}");
        let kept = Config::parse("history:my runs").unwrap();
        let said = line_of(&run(), &kept, false).unwrap();
        assert!(said.contains("gruyere report --history 'my runs'"), "{said}");
        // A program without a name that could be typed.
        let said = line(&run(), &Config::default(), None, false).unwrap();
        assert!(said.ends_with("; 0.00 s in driver calls"), "{said}");
    }

    #[test]
    fn on_a_terminal_the_line_fits_and_its_command_is_whole() {
        let said = folded(&line_of(&run(), &Config::default(), false).unwrap());
        let lines: Vec<&str> = said.lines().collect();
        assert!(lines.iter().all(|line| line.chars().count() <= COLUMNS), "{said}");
        assert_eq!(
            lines[1..],
            ["  compare with torch's: gruyere compare -- python3 train.py --lr 3"]
        );
        let short = "gruyere: peak live 1 MiB; more: gruyere report";
        assert_eq!(folded(short), short);
    }

    #[test]
    fn the_folder_of_gruyere_run_which_is_removed_is_not_named() {
        let config = Config::parse("history:/tmp/gruyere-run-Ab12").unwrap();
        assert_eq!(line_of(&run(), &config, false), line_of(&run(), &Config::default(), false));
    }

    #[test]
    fn a_rank_of_several_is_named_and_told_of_no_command_that_would_start_it_alone() {
        let rank = Run { rank: Some(1), world_size: Some(2), ..run() };
        assert_eq!(
            line_of(&rank, &Config::default(), true).unwrap(),
            "gruyere: rank 1: peak live 100.00 MiB, held 102.00 MiB (+2.0%); 0.00 s in driver calls"
        );
        let kept = Config::parse("history:runs").unwrap();
        let said = line_of(&rank, &kept, false).unwrap();
        assert!(
            said.contains("gruyere report --history runs --name ") && said.ends_with(" --rank 1")
        );
        // A launcher of one process.
        let single = Run { rank: Some(0), world_size: Some(1), ..run() };
        assert_eq!(
            line_of(&single, &Config::default(), false),
            line_of(&run(), &Config::default(), false)
        );
    }

    #[test]
    fn only_a_python_program_is_told_of_the_comparison_with_torch() {
        let runs =
            |line: &str| runs_python(&line.split(' ').map(str::to_owned).collect::<Vec<_>>());
        assert!(runs("/usr/bin/python3.11 train.py") && runs("python -m package.train"));
        assert!(!runs("./simulation --grid 512") && !runs("/opt/bin/plain train.py"));
    }

    #[test]
    fn the_line_is_one_line_without_commands_to_the_terminal() {
        let typed = Some("python3 'a\x1b[31m\nb.py'".to_owned());
        let line = line(&run(), &Config::default(), typed, false).expect("used");
        assert!(line.ends_with("-- python3 'a [31m b.py'"), "{line:?}");
    }

    #[test]
    fn a_device_that_was_opened_and_not_used_keeps_nobody_from_being_told() {
        let mut two = run();
        two.devices.insert(0, RunDevice::default());
        assert_eq!(
            line_of(&two, &Config::default(), false),
            line_of(&run(), &Config::default(), false)
        );
    }

    #[test]
    fn a_program_of_one_small_block_is_told_no_thousands_of_per_cent() {
        let mut small = run();
        small.devices[0].live_peak_bytes = 512;
        let said = line_of(&small, &Config::default(), false).unwrap();
        assert!(said.starts_with("gruyere: peak live 512 bytes, held 102.00 MiB;"), "{said}");
    }

    #[test]
    fn a_program_that_used_no_device_says_nothing() {
        assert_eq!(line_of(&Run::default(), &Config::default(), false), None);
    }
}
