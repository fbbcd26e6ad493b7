//! Probes that may hang or crash, each in a process of its own with a time limit.
//!
//! A stuck driver keeps its caller in the kernel, where no signal reaches it; we abandon such a
//! process, and report it.
#![deny(unsafe_code, clippy::unwrap_used)]

use std::io::Read;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use crate::signals;

/// A longer answer is invalid.
const LONGEST: u64 = 4 << 20;

/// Why there is no answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Silence {
    /// The program is missing or cannot run.
    NotRun(String),
    /// No answer within the limit.
    TooLate(Duration),
    /// It ended badly: the status, and the end of its output.
    Died(String),
}

impl std::fmt::Display for Silence {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Silence::NotRun(reason) => write!(f, "cannot be run: {reason}"),
            Silence::TooLate(limit) => write!(f, "no answer within {} s", limit.as_secs()),
            Silence::Died(how) => f.write_str(how),
        }
    }
}

/// Runs `command` for at most `limit`, and returns its output.
///
/// # Errors
/// The command cannot run, prints nothing in time, or fails.
pub fn ask(command: &mut Command, limit: Duration) -> Result<String, Silence> {
    let deadline = Instant::now() + limit;
    let mut child = signals::ends_with_us(command)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| Silence::NotRun(error.to_string()))?;
    let (answer, words) = (listen(child.stdout.take()), listen(child.stderr.take()));
    let status = wait(&mut child, limit, Duration::from_millis(5), || {})?;
    // A grandchild may hold the pipes open.
    let left = |receiver: Receiver<String>| {
        let left =
            deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(500));
        receiver.recv_timeout(left).unwrap_or_default()
    };
    if status.success() {
        return Ok(left(answer));
    }
    Err(died(status, &left(words)))
}

/// Waits for `child` to end, and calls `look` every `pause`. Kills it after `limit`.
///
/// # Errors
/// The child took too long, or cannot be waited for.
pub fn wait(
    child: &mut Child,
    limit: Duration,
    pause: Duration,
    mut look: impl FnMut(),
) -> Result<ExitStatus, Silence> {
    let deadline = Instant::now() + limit;
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return Ok(status),
            Ok(None) if Instant::now() < deadline => std::thread::sleep(pause),
            Ok(None) => {
                give_up(child);
                return Err(Silence::TooLate(limit));
            }
            Err(error) => return Err(Silence::NotRun(error.to_string())),
        }
        look();
    }
}

/// Error for a process that ended badly with `status`, with the end of its `words`.
pub fn died(status: ExitStatus, words: &str) -> Silence {
    let last = words
        .lines()
        .rev()
        .find(|line| !line.trim().is_empty())
        .unwrap_or("it printed nothing")
        .trim();
    let how = match status.signal() {
        Some(signal) => format!("killed by signal {signal}"),
        None => format!("ended with {}", status.code().unwrap_or(-1)),
    };
    Silence::Died(format!("{how}: {last}"))
}

/// Reads to the end on a thread of its own.
fn listen(from: Option<impl Read + Send + 'static>) -> Receiver<String> {
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(from) = from {
            let _ = from.take(LONGEST).read_to_end(&mut bytes);
        }
        let _ = sender.send(String::from_utf8_lossy(&bytes).into_owned());
    });
    receiver
}

fn give_up(child: &mut Child) {
    let _ = child.kill();
    // A process stuck in the kernel does not even die.
    for _ in 0..20 {
        if !matches!(child.try_wait(), Ok(None)) {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, limit: u64) -> Result<String, Silence> {
        ask(Command::new("sh").args(["-c", script]), Duration::from_millis(limit))
    }

    #[test]
    fn an_answer_comes_a_failure_is_told_and_silence_ends() {
        assert_eq!(shell("echo yes", 10_000), Ok("yes\n".to_owned()));
        assert_eq!(
            shell("echo why >&2; exit 3", 10_000),
            Err(Silence::Died("ended with 3: why".to_owned()))
        );
        assert_eq!(
            shell("kill -9 $$", 10_000),
            Err(Silence::Died("killed by signal 9: it printed nothing".to_owned()))
        );
        let began = Instant::now();
        assert_eq!(shell("exec sleep 60", 100), Err(Silence::TooLate(Duration::from_millis(100))));
        assert!(began.elapsed() < Duration::from_secs(10));
        assert!(matches!(
            ask(&mut Command::new("/nowhere/x"), Duration::from_secs(1)),
            Err(Silence::NotRun(_))
        ));
    }

    #[test]
    fn a_grandchild_that_keeps_the_pipe_open_holds_nobody() {
        let began = Instant::now();
        assert!(shell("sleep 60 & echo yes", 1000).is_ok());
        assert!(began.elapsed() < Duration::from_secs(10));
    }
}
