//! Summary of a finished run: the device memory of its processes.
#![deny(unsafe_code)]

use std::fmt::Write as _;
use std::io::{self, Write as _};

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
#[derive(Clone, Copy, Debug, Default)]
struct Doubts {
    /// No run is kept, so processes that ended well have left nothing.
    no_history: bool,
    /// Records that could not be read.
    unreadable: usize,
    /// The settings make torch map its memory itself.
    maps_by_itself: bool,
}

/// Message: why memory that torch maps itself is not seen.
const MAPS_BY_ITSELF: &str = "torch's expandable segments (PYTORCH_ALLOC_CONF) map memory \
                              directly, past every allocation call";

/// The longest command line shown.
const COMMAND: usize = 100;

/// Prints the summary.
pub fn print(environment: &mut Environment, folder: &Folder) {
    let mut doubts = Doubts {
        no_history: environment.history().is_none(),
        maps_by_itself: uses_expandable_segments(),
        ..Doubts::default()
    };
    let processes = collect(environment, folder, &mut doubts);
    let text = text(&processes, environment.config(), doubts);
    // A missing reader is not an error.
    let _ = write!(io::stderr(), "{text}");
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
                let end = if record.state == State::Stale { End::Killed } else { End::Runs };
                processes.push(Process { run, end });
            }
        }
        Err(failure) => say("run", failure),
    }
    if let Some(history) = environment.history() {
        for run in report::runs(history, "run").into_iter().filter(is_ours) {
            let same = |other: &Process| {
                (other.run.pid, other.run.started_nanoseconds) == (run.pid, run.started_nanoseconds)
            };
            if !processes.iter().any(same) {
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

fn text(processes: &[Process], config: &Config, doubts: Doubts) -> String {
    let mut out = String::new();
    // Writing to a String cannot fail.
    let mut line = |arguments: std::fmt::Arguments<'_>| {
        let _ = writeln!(out, "gruyere run: {arguments}");
    };
    if processes.is_empty() {
        nothing_was_seen(&mut line, config, doubts);
        return out;
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
        let head = [
            "PEAK LIVE",
            "PEAK HELD",
            "RATIO",
            "LARGEST",
            "MALLOCS",
            "FREES",
            "DRIVER CALLS",
            "OUT OF MEMORY",
        ];
        let [a, b, c, d, e, f, g, h] = head;
        line(format_args!(
            "{:>6} {a:>11} {b:>11} {c:>6} {d:>11} {e:>10} {f:>10} {g:>12} {h:>13}",
            "DEVICE"
        ));
        for device in &run.devices {
            let RunDevice { live_peak_bytes: live, reserved_peak_bytes: held, .. } = *device;
            line(format_args!(
                "{:>6} {:>11} {:>11} {:>6} {:>11} {:>10} {:>10} {:>12} {:>13}",
                device.device,
                bytes(live),
                bytes(held),
                device.peak_ratio().map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.3}")),
                bytes(device.largest_block_bytes),
                device.mallocs,
                device.frees,
                device.driver_calls,
                device.out_of_memories
            ));
        }
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
    out
}

/// Why there is nothing to report.
fn nothing_was_seen(
    line: &mut impl FnMut(std::fmt::Arguments<'_>),
    config: &Config,
    doubts: Doubts,
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
    } else if doubts.unreadable > 0 {
        line(format_args!(
            "no CUDA call was seen, but {} records could not be read; `gruyere ps` says why",
            doubts.unreadable
        ));
    } else if config.preload.driver {
        line(format_args!(
            "no CUDA call was seen, of the runtime or the driver: the program asked for no device \
             memory, had no GPU, or is linked statically as a whole (`ldd` says so); `gruyere \
             doctor` checks this machine"
        ));
    } else {
        if doubts.maps_by_itself {
            line(format_args!(
                "no CUDA call was seen. {MAPS_BY_ITSELF}: --observe --conf preload:driver shows \
                 their mappings; to let Gruyère serve them, remove the setting, or use python -m \
                 gruyere"
            ));
            return;
        }
        line(format_args!(
            "no CUDA call was seen. If the program uses the GPU, it links the CUDA runtime \
             statically (nvcc's default, JAX, TensorFlow): --conf preload:driver sees it too; or \
             link it with nvcc -cudart shared"
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
        let told =
            text(&[process("preload:observe", End::Killed)], &Config::default(), Doubts::default());
        assert!(
            told.contains("(process 42, rank 5), observed; it ended without a clean exit"),
            "{told}"
        );
        assert!(!told.contains('\u{1b}'), "{told}");
        let row: Vec<&str> = told.lines().nth(2).unwrap().split_whitespace().collect();
        let expected = [
            "gruyere", "run:", "1", "96.00", "MiB", "128.00", "MiB", "1.333", "64.00", "MiB", "12",
            "11", "7", "3",
        ];
        assert_eq!(row, expected, "{told}");
        assert!(told.contains("counts as live"));
        assert!(
            told.contains("driver calls took 116 us (cuMemCreate 116 us in 4 calls)\n"),
            "{told}"
        );
        let told = text(&[process("limit:1GiB", End::Runs)], &Config::default(), Doubts::default());
        assert!(
            told.contains("managed; it still runs") && !told.contains("counts as live"),
            "{told}"
        );
    }

    #[test]
    fn nothing_seen_names_the_remedy_that_fits() {
        let of = |conf: &str| text(&[], &Config::parse(conf).unwrap(), Doubts::default());
        assert!(of("").contains("--conf preload:driver"));
        assert!(
            of("preload:observe+driver").contains("linked statically")
                && !of("preload:driver").contains("--conf")
        );
        assert!(of("preload:off").contains("preload:off"));
        assert!(of("record:off").contains("record:off"));
        let doubtful = |doubts| text(&[], &Config::default(), doubts);
        let no_history = Doubts { no_history: true, ..Doubts::default() };
        assert!(doubtful(no_history).contains("TMPDIR"));
        let unreadable = Doubts { unreadable: 2, ..Doubts::default() };
        assert!(doubtful(unreadable).contains("2 records"));
    }

    #[test]
    fn that_torch_maps_its_memory_itself_is_told_where_that_is_not_seen() {
        let doubts = Doubts { maps_by_itself: true, ..Doubts::default() };
        let of =
            |conf: &str| text(&[process(conf, End::Clean)], &Config::parse(conf).unwrap(), doubts);
        assert!(of("preload:manage").contains("is not in the table"));
        assert!(!of("preload:observe+driver").contains("is not in the table"));
        assert!(text(&[], &Config::default(), doubts).contains("expandable segments"));
    }
}
