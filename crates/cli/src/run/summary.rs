//! Summary of a finished run: the device memory of its processes.
#![deny(unsafe_code)]

use std::cell::RefCell;
use std::fmt::Write as _;

use gruyere::config::{Config, PreloadMode};
use gruyere_record::plain;
use gruyere_record::run::{Run, RunDevice};
use gruyere_record::sweep::{Opened, State};

use super::environment::Environment;
use crate::amounts::bytes;
use crate::driver_calls;
use crate::failure::say;
use crate::report;
use crate::target::Folder;
use crate::wrap;

/// How a process of the run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// The process kept its run, and removed its record.
    Clean,
    /// Its record is left.
    Killed,
    /// It holds the lock of its record.
    Runs,
}

/// A process that used device memory through the library.
struct Process {
    run: Run,
    end: End,
}

/// Reasons why a summary may be incomplete.
#[derive(Clone, Debug, Default)]
struct Doubts {
    /// No run is kept, so processes that ended well have left nothing.
    no_history: bool,
    /// Nor can one be written: the folder, and the reason.
    unwritable: Option<String>,
    /// Records that could not be read.
    unreadable: usize,
    /// The settings make torch map its memory itself.
    maps_by_itself: bool,
    /// A warning before the start has said that the program does not load the library.
    is_told: bool,
}

/// Message: why memory that torch maps itself is not seen.
const MAPS_BY_ITSELF: &str = "torch's expandable segments (PYTORCH_ALLOC_CONF) map memory \
                              directly, past every allocation call";

/// The longest command line shown.
const COMMAND: usize = 100;

/// Prints the summary.
/// `is_told`: a warning before the start has said that the program does not load the library.
pub fn print(environment: &mut Environment, folder: &Folder, is_told: bool) {
    let mut doubts = Doubts {
        no_history: environment.history().is_none(),
        maps_by_itself: uses_expandable_segments(),
        is_told,
        ..Doubts::default()
    };
    let processes = collect(environment, folder, &mut doubts);
    if processes.is_empty() {
        let fault = environment.history_fault();
        doubts.unwritable = fault.map(|(folder, error)| format!("{}: {error}", folder.display()));
    }
    let text = text(&processes, environment.config(), &doubts);
    wrap::eprint_lines(&text);
    if processes.iter().any(|process| process.end == End::Runs)
        && let Some(kept) = environment.leave_history()
    {
        say(
            "run",
            format_args!(
                "processes that still run will save their runs in {}; read them with `gruyere \
                 report`, then remove the folder",
                kept.display()
            ),
        );
    }
}

/// The run's processes: an existing record says more than the kept run.
fn collect(environment: &Environment, folder: &Folder, doubts: &mut Doubts) -> Vec<Process> {
    let is_ours = |run: &Run| run.gruyere_run == Some(environment.run());
    let mut processes: Vec<Process> = Vec::new();
    let is_of_run = |opened: &Opened| {
        opened.process().is_none_or(|process| process.run == Some(environment.run()))
    };
    match folder.read(is_of_run) {
        Ok(listing) => {
            for record in listing.found {
                let Ok(reader) = record.reader else {
                    doubts.unreadable += 1;
                    continue;
                };
                if reader.process().run != Some(environment.run()) {
                    continue;
                }
                let run = Run::of(&reader, None);
                if reader.expect_sound().is_err() || record.claim.is_false() {
                    doubts.unreadable += 1;
                    continue;
                }
                // After setuid or chroot a process cannot remove its record, but marks it.
                let end = match record.state {
                    _ if reader.health().closed => End::Clean,
                    State::Stale => End::Killed,
                    _ => End::Runs,
                };
                enter(&mut processes, Process { run, end });
            }
        }
        Err(failure) => say("run", failure),
    }
    if let Some(history) = environment.history() {
        for run in report::runs(history, "run").into_iter().filter(is_ours) {
            if !processes.iter().any(|other| is_same(&other.run, &run)) {
                processes.push(Process { run, end: End::Clean });
            }
        }
    }
    processes.retain(|process| !process.run.devices.is_empty());
    processes.sort_by_key(|process| {
        (process.run.rank, process.run.started_nanoseconds, process.run.pid)
    });
    processes
}

fn is_same(one: &Run, other: &Run) -> bool {
    (one.pid, one.started_nanoseconds) == (other.pid, other.started_nanoseconds)
}

/// Adds a process by its record. A process that an out-of-memory ended may have left a copy beside
/// its own record: the one with more calls is later, and has the whole run.
fn enter(processes: &mut Vec<Process>, one: Process) {
    let calls = |process: &Process| -> (bool, u64) {
        let of = |device: &RunDevice| device.mallocs.saturating_add(device.frees);
        let all = process.run.devices.iter().map(of).fold(0, u64::saturating_add);
        (process.end == End::Runs, all)
    };
    match processes.iter_mut().find(|other| is_same(&other.run, &one.run)) {
        Some(other) if calls(other) > calls(&one) => {}
        Some(other) => *other = one,
        None => processes.push(one),
    }
}

/// A process's mode, by its settings.
fn mode(run: &Run) -> &'static str {
    match Config::parse(&run.configuration).map(|config| config.preload.mode) {
        Ok(PreloadMode::Observe) => "observed",
        Ok(PreloadMode::Off) => "off",
        Ok(PreloadMode::Auto | PreloadMode::Manage) => "managed",
        // Cut to the space in the record.
        Err(_) => "?",
    }
}

fn text(processes: &[Process], config: &Config, doubts: &Doubts) -> String {
    let out = RefCell::new(String::new());
    // Writing to a String cannot fail.
    let mut line = |arguments: std::fmt::Arguments<'_>| {
        let _ = writeln!(out.borrow_mut(), "gruyere run: {arguments}");
    };
    if processes.is_empty() {
        nothing_was_seen(&mut line, config, doubts);
        return out.into_inner();
    }
    for Process { run, end } in processes {
        let command: String = plain(&run.command).chars().take(COMMAND).collect();
        let rank = run.rank.map_or(String::new(), |rank| format!(", rank {rank}"));
        let how = match end {
            End::Clean => String::new(),
            End::Killed => {
                format!(
                    "; it ended without a clean exit: `gruyere post {}` shows its last state",
                    run.pid
                )
            }
            End::Runs => "; it still runs".to_owned(),
        };
        line(format_args!("{command} (process {}{rank}), {}{how}", run.pid, mode(run)));
        out.borrow_mut().push_str(&table(&run.devices));
        if let Some(told) = driver_calls::line(&run.driver_call_times) {
            line(format_args!("{told}"));
        }
    }
    if processes.iter().any(|process| mode(&process.run) == "observed") {
        line(format_args!(
            "observed: held is the memory that the program had allocated; memory that its own \
             allocators cache counts as live"
        ));
    }
    if doubts.maps_by_itself && !config.preload.driver {
        line(format_args!(
            "{MAPS_BY_ITSELF}: while torch's own allocator serves, this memory is not in the table"
        ));
    }
    out.into_inner()
}

/// The table of a process's devices. Without the command's name before its rows, it fits 80
/// columns.
fn table(devices: &[RunDevice]) -> String {
    let row = |[device, live, held, ratio, largest, mallocs, frees, calls, refusals]: [&str; 9]| {
        format!(
            "  {device:>3} {live:>11} {held:>11} {ratio:>6} {largest:>11} {mallocs:>9} \
             {frees:>9} {calls:>7} {refusals:>3}\n"
        )
    };
    let mut table = row([
        "GPU",
        "PEAK LIVE",
        "PEAK HELD",
        "RATIO",
        "LARGEST",
        "MALLOCS",
        "FREES",
        "CALLS",
        "OOM",
    ]);
    for device in devices {
        let cells = [
            device.device.to_string(),
            bytes(device.live_peak_bytes),
            bytes(device.reserved_peak_bytes),
            device.peak_ratio().map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.3}")),
            bytes(device.largest_block_bytes),
            device.mallocs.to_string(),
            device.frees.to_string(),
            device.driver_calls.to_string(),
            device.out_of_memories.to_string(),
        ];
        table += &row(cells.each_ref().map(String::as_str));
    }
    table
}

/// Why there is nothing to report.
fn nothing_was_seen(
    line: &mut impl FnMut(std::fmt::Arguments<'_>),
    config: &Config,
    doubts: &Doubts,
) {
    if config.preload.mode == PreloadMode::Off {
        line(format_args!(
            "nothing was seen: GRUYERE_CONF has preload:off; --manage or --observe turns it on"
        ));
    } else if !config.heap.record {
        line(format_args!("no summary: GRUYERE_CONF has record:off"));
    } else if doubts.no_history {
        line(format_args!(
            "no summary of processes that exited cleanly: there was no folder for their runs; set \
             TMPDIR, or name a folder with --conf history:FOLDER"
        ));
    } else if let Some(reason) = &doubts.unwritable {
        line(format_args!(
            "no summary: a process that ends cleanly leaves its figures in a file, and none could \
             be written: {reason}; free space there, or set TMPDIR, or name a folder with --conf \
             history:FOLDER"
        ));
    } else if doubts.unreadable > 0 {
        line(format_args!(
            "no device memory is known of, but {} records could not be read; `gruyere ps` says why",
            doubts.unreadable
        ));
    } else if doubts.is_told {
        line(format_args!("no device memory was served or recorded (the warning above)"));
    } else if config.preload.driver {
        line(format_args!(
            "no device memory was served or recorded: the program asked for none, ended before \
             it, had no GPU (`gruyere doctor` checks this machine), was refused (the log says \
             why), bypasses the libraries (linked statically as a whole, RTLD_DEEPBIND), or, \
             managed, has only memory that stays with the driver (contexts and pools of its own)"
        ));
    } else {
        if doubts.maps_by_itself {
            line(format_args!(
                "no allocation was seen. {MAPS_BY_ITSELF}: --observe --conf preload:driver shows \
                 their mappings; to let Gruyère serve them, remove the setting, or use python -m \
                 gruyere"
            ));
            return;
        }
        line(format_args!(
            "no device memory was served or recorded. If the program used any, its calls bypass \
             the library: it links the CUDA runtime statically (nvcc's default, JAX, TensorFlow; \
             or link it with nvcc -cudart shared), looks it up (ctypes, dlsym), or calls the \
             driver: --conf preload:driver sees those calls too. Else it asked for none, ended \
             before it, had no GPU (`gruyere doctor` checks this machine), or was refused (the log \
             says why)"
        ));
    }
}

/// Whether the settings make torch map its memory itself.
fn uses_expandable_segments() -> bool {
    ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"].iter().any(|name| {
        let conf = std::env::var(name).unwrap_or_default().to_lowercase().replace(' ', "");
        conf.contains("expandable_segments:true")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use gruyere_record::calls::CallTime;

    fn process(configuration: &str, end: End) -> Process {
        let device = RunDevice {
            device: 1,
            live_peak_bytes: 96 << 20,
            reserved_peak_bytes: 128 << 20,
            mallocs: 12,
            frees: 11,
            largest_block_bytes: 64 << 20,
            driver_calls: 7,
            out_of_memories: 3,
            ..RunDevice::default()
        };
        let call = CallTime {
            call: "cuMemCreate".to_owned(),
            count: 4,
            total_nanoseconds: 116_000,
            ..CallTime::default()
        };
        let run = Run {
            driver_call_times: vec![call],
            pid: 42,
            rank: Some(5),
            command: "./solve \u{1b}[31m".to_owned(),
            configuration: configuration.to_owned(),
            devices: vec![device],
            ..Run::default()
        };
        Process { run, end }
    }

    #[test]
    fn a_process_has_its_mode_and_its_devices() {
        let told = text(
            &[process("preload:observe", End::Killed)],
            &Config::default(),
            &Doubts::default(),
        );
        assert!(
            told.contains("(process 42, rank 5), observed; it ended without a clean exit"),
            "{told}"
        );
        assert!(!told.contains('\u{1b}'), "{told}");
        let row: Vec<&str> = told.lines().nth(2).unwrap().split_whitespace().collect();
        let expected =
            ["1", "96.00", "MiB", "128.00", "MiB", "1.333", "64.00", "MiB", "12", "11", "7", "3"];
        assert_eq!(row, expected, "{told}");
        let table: Vec<&str> = told.lines().skip(1).take(2).collect();
        assert_eq!(table[0].len(), table[1].len(), "{told}");
        assert!(table.iter().all(|line| line.len() <= 80), "{told}");
        assert!(told.contains("counts as live"));
        assert!(
            told.contains("driver calls took 116 us (cuMemCreate 116 us in 4 calls)\n"),
            "{told}"
        );
        let told =
            text(&[process("limit:1GiB", End::Runs)], &Config::default(), &Doubts::default());
        assert!(
            told.contains("managed; it still runs") && !told.contains("counts as live"),
            "{told}"
        );
    }

    #[test]
    fn a_process_that_left_a_copy_beside_its_record_is_told_once_with_all_its_calls() {
        let of = |mallocs: u64, end: End| {
            let mut one = process("", end);
            one.run.devices[0].mallocs = mallocs;
            one
        };
        for [first, second] in [[12, 90], [90, 12]] {
            let mut processes = Vec::new();
            enter(&mut processes, of(first, End::Killed));
            enter(&mut processes, of(second, End::Killed));
            assert_eq!(processes.len(), 1);
            assert_eq!(processes[0].run.devices[0].mallocs, 90);
            enter(&mut processes, of(90, End::Runs));
            enter(&mut processes, of(12, End::Killed));
            assert_eq!((processes.len(), processes[0].end), (1, End::Runs));
        }
        let mut processes = vec![of(1, End::Killed)];
        let mut other = of(1, End::Killed);
        other.run.pid += 1;
        enter(&mut processes, other);
        assert_eq!(processes.len(), 2, "another process");
    }

    #[test]
    fn nothing_seen_names_the_remedy_that_fits() {
        let of = |conf: &str| text(&[], &Config::parse(conf).unwrap(), &Doubts::default());
        assert!(of("").contains("--conf preload:driver"));
        assert!(
            of("preload:observe+driver").contains("linked statically")
                && !of("preload:driver").contains("--conf")
        );
        // What is not known is not claimed.
        for conf in ["", "preload:driver"] {
            let told = of(conf);
            for reason in ["asked for none", "ended before", "no GPU", "refused"] {
                assert!(told.contains(reason), "{told}");
            }
            let told = Doubts { is_told: true, ..Doubts::default() };
            let told = text(&[], &Config::parse(conf).unwrap(), &told);
            assert!(told.contains("warning above") && !told.contains("statically"), "{told}");
        }
        assert!(of("preload:driver").contains("contexts and pools of its own"));
        assert!(of("preload:off").contains("preload:off"));
        assert!(of("record:off").contains("record:off"));
        let doubtful = |doubts: Doubts| text(&[], &Config::default(), &doubts);
        let no_history = Doubts { no_history: true, ..Doubts::default() };
        assert!(doubtful(no_history).contains("TMPDIR"));
        let unreadable = Doubts { unreadable: 2, ..Doubts::default() };
        assert!(doubtful(unreadable).contains("2 records"));
        let reason = Some("/tmp/x: No space left on device".to_owned());
        let told = doubtful(Doubts { unwritable: reason, unreadable: 2, ..Doubts::default() });
        assert!(told.contains("No space left") && !told.contains("is known of"), "{told}");
    }

    #[test]
    fn that_torch_maps_its_memory_itself_is_told_where_that_is_not_seen() {
        let doubts = Doubts { maps_by_itself: true, ..Doubts::default() };
        let of =
            |conf: &str| text(&[process(conf, End::Clean)], &Config::parse(conf).unwrap(), &doubts);
        assert!(of("preload:manage").contains("is not in the table"));
        assert!(!of("preload:observe+driver").contains("is not in the table"));
        assert!(text(&[], &Config::default(), &doubts).contains("expandable segments"));
    }
}
