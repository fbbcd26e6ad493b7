//! Processes under signals, independent of the signals that this process inherited.

use std::os::unix::process::CommandExt as _;
use std::process::Command;
use std::time::{Duration, Instant};

/// Time in which even a busy machine does something brief.
pub const SOON: Duration = Duration::from_secs(20);

/// Signals that launchers ignore: `nohup`, a script's `&`, a daemon's supervisor.
const OFTEN_IGNORED: [libc::c_int; 8] = [
    libc::SIGHUP,
    libc::SIGINT,
    libc::SIGQUIT,
    libc::SIGTERM,
    libc::SIGTSTP,
    libc::SIGTTIN,
    libc::SIGTTOU,
    libc::SIGUSR1,
];

/// Gives the command the signals of an interactive shell: none ignored, none blocked. The parent of
/// these tests may ignore some, and children inherit that.
pub fn as_from_a_shell(command: &mut Command) -> &mut Command {
    // SAFETY: the closure makes system calls only, which a forked child may.
    unsafe {
        command.pre_exec(|| {
            for signal in OFTEN_IGNORED {
                libc::signal(signal, libc::SIG_DFL);
            }
            let mut none = std::mem::zeroed();
            libc::sigemptyset(&mut none);
            libc::sigprocmask(libc::SIG_SETMASK, &none, std::ptr::null_mut());
            Ok(())
        })
    }
}

/// Makes the command ignore `signals`, as under `nohup`.
pub fn ignoring<'a>(command: &'a mut Command, signals: &[libc::c_int]) -> &'a mut Command {
    let signals = signals.to_vec();
    // SAFETY: the closure makes system calls only, which a forked child may.
    unsafe {
        command.pre_exec(move || {
            for &signal in &signals {
                libc::signal(signal, libc::SIG_IGN);
            }
            Ok(())
        })
    }
}

/// Sends `signal` to a process that has not been waited for.
pub fn send(pid: u32, signal: libc::c_int) {
    // SAFETY: no memory is involved.
    assert_eq!(unsafe { libc::kill(pid as libc::pid_t, signal) }, 0, "{signal} to {pid}");
}

/// Waits until `done`, or fails.
#[track_caller]
pub fn until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + SOON;
    while !done() {
        assert!(Instant::now() < deadline, "{what}: not within {SOON:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The letter of a process's state; `None` if it is gone.
pub fn state(pid: i32) -> Option<char> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.chars().next()
}
