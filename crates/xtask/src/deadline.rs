//! Commands with a time limit: each has its own process group; at the limit, we end the group and
//! all descendants of the command.
//!
//! A terminal's Ctrl-C reaches only the foreground group, so signals that end this process are
//! forwarded to the groups ([`hand_signals_on`]).

use std::collections::BTreeSet;
use std::io::{self, Read};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use signal_hook::consts::{SIGHUP, SIGINT, SIGKILL, SIGTERM};

use crate::processes::{Process, descendants};

/// Limit of a Rust test program. On two cores the longest takes about two minutes.
pub const PROGRAM: Duration = Duration::from_secs(10 * 60);
/// Limit of a part's command, an installation or a build included.
pub const COMMAND: Duration = Duration::from_secs(40 * 60);

/// A factor for all deadlines, for slow machines.
const PATIENCE: &str = "GRUYERE_TEST_PATIENCE";
/// Time between the request that a group end, and its end by force.
const GRACE: Duration = Duration::from_secs(5);
/// Time between two checks of a process that no longer writes.
const LOOK: Duration = Duration::from_millis(20);

/// Result of a command.
#[derive(Debug)]
pub struct Ended {
    pub status: ExitStatus,
    /// Whether it exceeded its limit.
    pub overdue: bool,
}

/// Source of a command's output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stream {
    Out,
    Err,
}

/// The factor of [`PATIENCE`].
///
/// # Errors
/// Not a number above zero.
pub fn patience() -> Result<f64, String> {
    let Ok(text) = std::env::var(PATIENCE) else { return Ok(1.0) };
    match text.parse() {
        Ok(factor) if factor > 0.0 && factor <= 1000.0 => Ok(factor),
        _ => Err(format!(
            "{PATIENCE}={text}: not a number above 0 and at most 1000; give a factor for the \
             deadlines, as in {PATIENCE}=3, or unset it"
        )),
    }
}

/// A deadline on this machine.
pub fn stretched(limit: Duration) -> Duration {
    limit.mul_f64(patience().unwrap_or(1.0))
}

/// Runs `command` without input, for at most `limit`; calls `hear` with its output as it comes:
/// stdout, and stderr if that is piped.
///
/// # Errors
/// The command can't be started or waited for.
pub fn run(
    command: &mut Command,
    limit: Duration,
    mut hear: impl FnMut(Stream, &[u8]),
) -> io::Result<Ended> {
    let end = Instant::now() + limit;
    command.stdin(Stdio::null()).stdout(Stdio::piped()).process_group(0);
    let mut child = command.spawn()?;
    let group = Group::of(&child);
    let (said, heard) = mpsc::channel();
    if let Some(out) = child.stdout.take() {
        read(Stream::Out, out, said.clone());
    }
    if let Some(err) = child.stderr.take() {
        read(Stream::Err, err, said.clone());
    }
    drop(said);
    // A program may close its output and continue; its children may hold its output and continue.
    let mut overdue = !drain(&heard, end, &mut hear);
    while !overdue && !has_ended(&child)? {
        std::thread::sleep(LOOK);
        overdue = Instant::now() >= end;
    }
    if overdue {
        let started = descendants(child.id());
        group.send(SIGTERM);
        let grace = Instant::now() + GRACE;
        while Instant::now() < grace && !has_ended(&child)? {
            drain(&heard, (Instant::now() + LOOK).min(grace), &mut hear);
        }
        group.send(SIGKILL);
        started.iter().for_each(Process::kill);
        // Does not wait for other holders of the pipe.
        drain(&heard, Instant::now() + GRACE, &mut hear);
    }
    Ok(Ended { status: child.wait()?, overdue })
}

/// Whether it has ended. Does not reap it: its pid, which is its group's number, stays reserved.
fn has_ended(child: &Child) -> io::Result<bool> {
    // SAFETY: all-zero is a valid value, which the call writes over.
    unsafe {
        let mut found: libc::siginfo_t = std::mem::zeroed();
        let how = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
        match libc::waitid(libc::P_PID, child.id(), &mut found, how) {
            0 => Ok(found.si_pid() != 0),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

/// Reads until all writers are gone, which returns `true`, or until `end`.
fn drain(
    heard: &mpsc::Receiver<(Stream, Vec<u8>)>,
    end: Instant,
    hear: &mut impl FnMut(Stream, &[u8]),
) -> bool {
    loop {
        let left = end.saturating_duration_since(Instant::now());
        match heard.recv_timeout(left) {
            Ok((stream, bytes)) => hear(stream, &bytes),
            Err(RecvTimeoutError::Disconnected) => return true,
            Err(RecvTimeoutError::Timeout) => return false,
        }
        if left.is_zero() {
            return false;
        }
    }
}

fn read(stream: Stream, mut from: impl Read + Send + 'static, to: mpsc::Sender<(Stream, Vec<u8>)>) {
    std::thread::spawn(move || {
        let mut bytes = [0; 1 << 16];
        loop {
            match from.read(&mut bytes) {
                Ok(0) => return,
                Ok(count) => {
                    if to.send((stream, bytes[..count].to_vec())).is_err() {
                        return;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return,
            }
        }
    });
}

/// The running groups.
static GROUPS: Mutex<BTreeSet<libc::pid_t>> = Mutex::new(BTreeSet::new());

fn groups() -> MutexGuard<'static, BTreeSet<libc::pid_t>> {
    GROUPS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A command's process group.
struct Group(libc::pid_t);

impl Group {
    fn of(child: &Child) -> Group {
        let leader = child.id() as libc::pid_t;
        groups().insert(leader);
        Group(leader)
    }

    fn send(&self, signal: i32) {
        // SAFETY: no memory is involved; the group's leader has not been reaped, so its number is
        // still its own.
        unsafe { libc::kill(-self.0, signal) };
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        groups().remove(&self.0);
    }
}

/// Whether a process descends from this one, or is in the group of a running command: its parents
/// may have ended.
pub fn is_of_this_run(process: &Process) -> bool {
    let is_below = |process: &Process| process.descends_from(std::process::id());
    // A part in a process of its own has groups that only it knows.
    groups().contains(&process.group)
        || is_below(process)
        || Process::read(process.group as u32).is_some_and(|leader| is_below(&leader))
}

/// From here on, forwards a signal that ends this process to the groups first. A signal ignored at
/// the start (`nohup`, a script's `&`) stays ignored.
///
/// # Errors
/// The signal handlers can't be installed.
pub fn hand_signals_on() -> Result<(), String> {
    let wanted = [SIGHUP, SIGINT, SIGTERM].into_iter().filter(|&signal| !is_ignored(signal));
    let mut signals = signal_hook::iterator::Signals::new(wanted)
        .map_err(|error| format!("listening to signals: {error}"))?;
    std::thread::spawn(move || {
        for signal in signals.forever() {
            for group in groups().iter() {
                // SAFETY: no memory is involved; a group is in the set until its leader is reaped,
                // or a moment longer.
                unsafe { libc::kill(-group, signal) };
            }
            // Ends this process by the default action.
            let _ = signal_hook::low_level::emulate_default_handler(signal);
        }
    });
    Ok(())
}

fn is_ignored(signal: i32) -> bool {
    // SAFETY: all-zero is a valid value; the call only writes it.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal, std::ptr::null(), &mut action) == 0
            && action.sa_sigaction == libc::SIG_IGN
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, limit: Duration) -> (Ended, String) {
        let mut said = Vec::new();
        let ended = run(
            Command::new("sh").args(["-c", script]).stderr(Stdio::piped()),
            limit,
            |_, bytes| said.extend_from_slice(bytes),
        );
        (ended.unwrap(), String::from_utf8(said).unwrap())
    }

    fn is_gone(pid: &str) -> bool {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with('Z'))
    }

    #[test]
    fn what_ends_in_time_ends_as_it_does() {
        let (ended, said) = shell("echo out; echo err >&2; exit 3", Duration::from_secs(60));
        assert_eq!((ended.status.code(), ended.overdue), (Some(3), false));
        assert!(said.contains("out\n") && said.contains("err\n"));
    }

    #[test]
    fn what_hangs_is_ended_with_all_that_it_started() {
        // One in the group, one in a session of its own, and one that ignores SIGTERM.
        let script = "sleep 300 & echo $!; setsid sleep 300 & echo $!; trap '' TERM; echo $$; \
                      while :; do sleep 300; done";
        let begun = Instant::now();
        let (ended, said) = shell(script, Duration::from_secs(1));
        assert!(ended.overdue && begun.elapsed() < Duration::from_secs(60));
        let pids: Vec<&str> = said.lines().collect();
        assert_eq!(pids.len(), 3, "{said}");
        for pid in pids {
            let end = Instant::now() + Duration::from_secs(20);
            while !is_gone(pid) {
                assert!(Instant::now() < end, "{pid} goes on");
                std::thread::sleep(LOOK);
            }
        }
    }

    #[test]
    fn what_writes_without_end_or_leaves_its_output_to_others_is_overdue_too() {
        let (ended, said) = shell("while :; do echo x; sleep 0.01; done", Duration::from_secs(1));
        assert!(ended.overdue && said.len() > 2);
        let (ended, _) = shell("sleep 300 & exit 0", Duration::from_secs(1));
        assert!(ended.overdue);
        let (ended, _) = shell("exec >&- 2>&-; exec sleep 300", Duration::from_secs(1));
        assert!(ended.overdue);
    }
}
