//! `gruyere watch`: reports passed thresholds.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use clap::error::ErrorKind;
use gruyere_record::DeviceGauge;
use gruyere_record::watch::{self as thresholds, Alarm, Passed, Threshold, Unit};
use jiff::Timestamp;
use serde_json::{Value, json};

use crate::amounts::bytes;
use crate::failure::{Ended, Exit, Failure, say, wrong_usage};
use crate::follow::{self, Device, Followed, Follower, Life, Which};
use crate::output::{self, Audience};
use crate::target::{Folder, Target};

/// Watches one process, or all of them, and reports when a threshold is passed.
#[derive(clap::Args)]
#[command(
    allow_missing_positional = true,
    after_help = "\
Examples:
  gruyere watch 'fragmentation>30%' 'oom-in<10min'
                                        all processes, also later ones
  gruyere watch 4242 'largest<2GiB' --exit || echo trouble
                                        exits with 4 as soon as it is passed,
                                        with 0 when the process ends
  gruyere watch all 'held>95%' \\
      --command 'logger -t gruyere \"$GRUYERE_WATCH_MESSAGE\"'
  gruyere watch 4242 'retries>=1' --json --for 1h

Metrics: fragmentation, unused, external, internal (per cent); live, held, lost, idle, largest, \
pending (a size, or a share of the device's ceiling); rate (a size a second); oom-in (a duration); \
and every gauge that `gruyere stat` prints. \
The operators are `<`, `<=`, `>` and `>=`; quote them for the shell.

For each process and device, a threshold reports once when it is passed. It reports again only \
after the value has come back by a tenth of the bound, and no more often than --every.

--command runs in `sh -c`. The event is in its environment, never in its text: GRUYERE_WATCH_ \
followed by MESSAGE, THRESHOLD, METRIC, VALUE, VALUE_TEXT, UNIT, PID, RANK, LOCAL_RANK, HOST, \
COMMAND, RECORD, DEVICE, DEVICE_NAME, LIVE_BYTES, RESERVED_BYTES, LIMIT_BYTES. The watch continues \
meanwhile. At its end it waits for running commands for 2 seconds at most, and leaves them running.

Exit codes: 0 the process ended, or --for is over; 1 no such process or record, or it can't be \
read; 2 wrong usage; 4 with --exit: a threshold is passed."
)]
pub struct Arguments {
    /// The process (its pid) or its record file. Default, or `all`: all processes.
    #[arg(value_name = "PID|FILE|all")]
    target: Option<String>,
    /// Threshold to watch for, as in 'fragmentation>30%'.
    #[arg(value_name = "THRESHOLD", required = true)]
    thresholds: Vec<String>,
    /// Exit with 4 when the first threshold is passed.
    #[arg(long)]
    exit: bool,
    /// Run CMD with the shell whenever a threshold is passed.
    #[arg(long, value_name = "CMD")]
    command: Option<String>,
    /// Print one line of JSON for each passed threshold.
    #[arg(long)]
    json: bool,
    /// Shortest time between two reports of one threshold.
    #[arg(long, value_name = "DURATION", default_value = "1min")]
    every: thresholds::Duration,
    /// Exit after this time.
    #[arg(long = "for", value_name = "DURATION")]
    time: Option<thresholds::Duration>,
    /// Time between two samples, at least 100ms.
    #[arg(long, value_name = "DURATION", default_value = "1s", value_parser = follow::interval)]
    interval: Duration,
    #[command(flatten)]
    folder: Folder,
}

impl Arguments {
    /// Parses the processes and the thresholds.
    fn read(&self) -> Result<(Which, Vec<Threshold>), String> {
        let is_threshold = |word: &String| word.contains(['<', '>']);
        // Without a process, its argument is the first threshold; if an option follows the process,
        // the process is among the thresholds.
        let words: Vec<String> = self.target.iter().chain(&self.thresholds).cloned().collect();
        let (target, rest) = match words.split_first() {
            Some((first, rest)) if !is_threshold(first) => (first.as_str(), rest),
            _ => ("all", words.as_slice()),
        };
        if rest.is_empty() {
            return Err("no threshold is given: add one, such as 'fragmentation>30%'".to_owned());
        }
        let thresholds = rest.iter().map(|word| word.parse::<Threshold>());
        let thresholds = thresholds.collect::<Result<_, _>>().map_err(|error| error.to_string())?;
        let which = match target {
            "all" => Which::All(self.folder.clone()),
            target => {
                let target = Some(target.to_owned());
                Which::One(Target { target, folder: self.folder.clone() })
            }
        };
        Ok((which, thresholds))
    }

    /// The error of an invalid command line.
    #[cfg(test)]
    pub fn fault(&self) -> Option<String> {
        self.read().err()
    }
}

pub fn run(arguments: &Arguments) -> Ended {
    let (which, thresholds) = arguments
        .read()
        .unwrap_or_else(|reason| wrong_usage("watch", ErrorKind::ValueValidation, reason));
    let mut follower = Follower::new(which)?;
    let begin = Instant::now();
    let end = arguments.time.map(Duration::from);
    let interval = arguments.interval;
    let mut alarms: BTreeMap<(PathBuf, u32), Vec<Alarm>> = BTreeMap::new();
    let (mut runs, mut told) = (Runs::default(), BTreeSet::new());
    let mut passed_any = false;
    loop {
        let now = Instant::now();
        follower.look(now);
        for trouble in follower.trouble() {
            if told.insert(trouble.to_owned()) {
                say("watch", trouble);
            }
        }
        let seconds = now.duration_since(begin).as_secs_f64();
        for (path, followed) in follower.followed() {
            for device in followed.used() {
                let alarms =
                    alarms.entry((path.clone(), device.snapshot.device)).or_insert_with(|| {
                        let new = |threshold: &Threshold| {
                            Alarm::new(threshold.clone(), arguments.every.0)
                        };
                        thresholds.iter().map(new).collect()
                    });
                for alarm in alarms {
                    let Some(passed) = alarm.look(seconds, &device.facts()) else { continue };
                    passed_any = true;
                    let event = Event { followed, device, threshold: alarm.threshold(), passed };
                    let line = if arguments.json { event.json().to_string() } else { event.line() };
                    if output::print(format_args!("{line}\n"))? == Audience::Gone {
                        return Ok(if arguments.exit { Exit::Past } else { Exit::Fine });
                    }
                    if let Some(command) = &arguments.command {
                        runs.start(command, &event);
                    }
                }
            }
        }
        alarms.retain(|(path, _), _| follower.followed().contains_key(path));
        runs.reap();
        if arguments.exit && passed_any {
            runs.leave();
            return Ok(Exit::Past);
        }
        if follower.is_over() {
            if follower.followed().is_empty() {
                return Err(Failure::new(
                    "the process's record can no longer be read (see above), so it is not watched",
                ));
            }
            for followed in
                follower.followed().values().filter(|followed| followed.life == Life::Killed)
            {
                say(
                    "watch",
                    format_args!("process {} ended without a clean exit", followed.process.pid),
                );
            }
            break;
        }
        let rest = end.map(|end| end.saturating_sub(begin.elapsed()));
        if rest.is_some_and(|rest| rest.is_zero()) {
            break;
        }
        if output::pause(rest.map_or(interval, |rest| rest.min(interval))) == Audience::Gone {
            break;
        }
    }
    runs.leave();
    Ok(Exit::Fine)
}

/// A passed threshold.
struct Event<'a> {
    followed: &'a Followed,
    device: &'a Device,
    threshold: &'a Threshold,
    passed: Passed,
}

impl Event<'_> {
    fn unit(&self) -> Unit {
        self.threshold.metric.unit()
    }

    /// The text of the event, without the time.
    fn message(&self) -> String {
        let process = &self.followed.process;
        let rank = process.rank.map(|rank| format!(" rank {rank}")).unwrap_or_default();
        let rank = self.followed.whose.note() + &rank;
        let (live, limit) = (self.device.snapshot.live, self.device.facts().limit());
        let reserved = self.device.snapshot.gauge(DeviceGauge::Reserved);
        format!(
            "pid {}{rank} device {}: {} is passed: {} is {} (live {}, held {} of {})",
            process.pid,
            self.device.snapshot.device,
            self.threshold,
            self.threshold.metric.name(),
            self.unit().show(self.passed.value),
            bytes(live),
            bytes(reserved),
            bytes(limit)
        )
    }

    fn line(&self) -> String {
        format!("{} {}", time(), self.message())
    }

    fn json(&self) -> Value {
        let process = &self.followed.process;
        let snapshot = &self.device.snapshot;
        json!({
            "time": time(),
            "threshold": self.threshold.text(),
            "metric": self.threshold.metric.name(),
            "value": finite(self.passed.value),
            "bound": finite(self.threshold.bound(&self.device.facts())),
            "unit": self.unit().name(),
            "count": self.passed.count,
            "pid": process.pid,
            "rank": process.rank,
            "local_rank": process.local_rank,
            "host": process.host,
            "command": process.command,
            "record": self.followed.reader.path().display().to_string(),
            "device": snapshot.device,
            "device_name": snapshot.facts.name,
            "live_bytes": snapshot.live,
            "reserved_bytes": snapshot.gauge(DeviceGauge::Reserved),
            "limit_bytes": self.device.facts().limit(),
            "message": self.message(),
        })
    }

    /// Names and values for the command's environment.
    fn environment(&self) -> Vec<(&'static str, String)> {
        let process = &self.followed.process;
        let snapshot = &self.device.snapshot;
        let number = |value: Option<u64>| value.map(|value| value.to_string()).unwrap_or_default();
        vec![
            ("MESSAGE", self.message()),
            ("THRESHOLD", self.threshold.text().to_owned()),
            ("METRIC", self.threshold.metric.name().to_owned()),
            ("VALUE", self.passed.value.to_string()),
            ("VALUE_TEXT", self.unit().show(self.passed.value)),
            ("UNIT", self.unit().name().to_owned()),
            ("PID", process.pid.to_string()),
            ("RANK", number(process.rank)),
            ("LOCAL_RANK", number(process.local_rank)),
            ("HOST", process.host.clone()),
            ("COMMAND", process.command.clone()),
            ("RECORD", self.followed.reader.path().display().to_string()),
            ("DEVICE", snapshot.device.to_string()),
            ("DEVICE_NAME", snapshot.facts.name.clone()),
            ("LIVE_BYTES", snapshot.live.to_string()),
            ("RESERVED_BYTES", snapshot.gauge(DeviceGauge::Reserved).to_string()),
            ("LIMIT_BYTES", self.device.facts().limit().to_string()),
        ]
    }
}

fn time() -> String {
    Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

/// JSON has no infinity: "never" is null.
fn finite(value: f64) -> Value {
    if value.is_finite() { json!(value) } else { Value::Null }
}

/// Running commands. Their number is limited: a command that hangs must not fill the machine.
#[derive(Default)]
struct Runs(Vec<Child>);

const MOST_RUNS: usize = 16;
/// The longest time that the end of the watch waits for them.
const LEAVE: Duration = Duration::from_secs(2);

impl Runs {
    fn start(&mut self, command: &str, event: &Event<'_>) {
        self.reap();
        if self.0.len() >= MOST_RUNS {
            say("watch", format_args!("{MOST_RUNS} commands still run; this one is left out"));
            return;
        }
        let mut shell = Command::new("sh");
        shell.arg("-c").arg(command).stdin(Stdio::null());
        for (name, value) in event.environment() {
            shell.env(format!("GRUYERE_WATCH_{name}"), value);
        }
        match shell.spawn() {
            Ok(child) => self.0.push(child),
            Err(error) => say("watch", format_args!("--command could not be run: {error}")),
        }
    }

    fn reap(&mut self) {
        self.0.retain_mut(|child| match child.try_wait() {
            Ok(None) => true,
            Ok(Some(status)) => {
                report(status);
                false
            }
            Err(_) => false,
        });
    }

    /// At the end of the watch: waits a moment, so that the failure of a short command is still
    /// reported, then leaves the others running. A command that hangs must not hold up a script.
    fn leave(mut self) {
        let begin = Instant::now();
        self.reap();
        while !self.0.is_empty() && begin.elapsed() < LEAVE {
            std::thread::sleep(Duration::from_millis(20));
            self.reap();
        }
        if !self.0.is_empty() {
            let pids: Vec<String> = self.0.iter().map(|child| child.id().to_string()).collect();
            say(
                "watch",
                format_args!(
                    "--command still runs and is left running (pid {}); its end is not reported",
                    pids.join(", ")
                ),
            );
        }
    }
}

fn report(status: std::process::ExitStatus) {
    if !status.success() {
        say("watch", format_args!("--command failed: {status}"));
    }
}
