//! The program as a child: in our process group and on our terminal, so that it lives as if a shell
//! had started it.
//!
//! The terminal's signals (Ctrl-C, Ctrl-\, Ctrl-Z) reach the whole process group, the program
//! included, so we do not forward them: it would get them twice. We forward signals from a process,
//! except from the program itself (`kill(0, ...)`): these have reached it as well. A signal to the
//! whole group from outside (`kill %1`) reaches the program twice: a process cannot tell whether it
//! was the only target.
//!
//! When the program stops, we stop in the same way, so that the shell gets its terminal back; `fg`
//! wakes both.
//!
//! All of this is a single loop over `sigwaitinfo`, with every signal blocked: no handler runs, and
//! no signal is missed.

use std::ffi::{OsStr, OsString};
use std::io;
use std::mem::zeroed;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{Command, ExitStatus};
use std::ptr::null_mut;

use gruyere_record::facts;
use libc::c_int;

use crate::signals::{self, deliver, die_of, disposition};

/// How the program ended.
#[derive(Debug)]
pub struct Ended(ExitStatus);

impl Ended {
    /// Returns the exit code; does not return if a signal ended the program and can end us too.
    pub fn pass_on(self) -> u8 {
        let Some(signal) = self.0.signal() else {
            return u8::try_from(self.0.code().unwrap_or(1)).unwrap_or(u8::MAX);
        };
        die_of(signal);
        // Process 1 of a container does not die of signals.
        u8::try_from(128 + signal).unwrap_or(u8::MAX)
    }
}

/// Runs `program` to its end.
///
/// # Errors
/// The program cannot be executed.
pub fn run(
    program: &OsStr,
    words: &[OsString],
    variables: &[(OsString, OsString)],
) -> io::Result<Ended> {
    let signals = Signals::block();
    let ours = std::process::id();
    let mut command = Command::new(program);
    command.args(words).envs(variables.iter().map(|(name, value)| (name, value)));
    // SAFETY: the closure makes system calls only, which a child may before it executes.
    unsafe {
        command.pre_exec(move || signals.as_the_program_expects(ours));
    }
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(error) => {
            signals.restore();
            return Err(error);
        }
    };
    let pid = child.id() as c_int;
    loop {
        match signals.wait() {
            Some(signal) if signal.number == libc::SIGCHLD => {
                reap_orphans(pid);
                while let Some(status) = news_of(pid) {
                    if status.signal().is_some() || status.code().is_some() {
                        return Ok(Ended(status));
                    }
                    if let Some(stop) = status.stopped_signal() {
                        stop_as(stop);
                    }
                }
            }
            Some(signal) if signal.number == libc::SIGCONT => {
                // The waker may have meant both; a program that is already awake needs no second
                // signal, and one that has stopped since stays so.
                if is_stopped(pid) && !has_stopped_since(pid) {
                    send(pid, libc::SIGCONT);
                }
            }
            Some(signal) => {
                if signal.is_for_the_program() {
                    send(pid, signal.number);
                }
            }
            // Interrupted; or the kernel refuses, and the loop waits only for the child's end.
            None => {
                if io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
                    return child.wait().map(Ended);
                }
            }
        }
    }
}

/// A received signal, and its sender.
struct Signal {
    number: c_int,
    /// The process that sent it; `None`: the kernel, as for the terminal's signals.
    sender: Option<libc::pid_t>,
}

impl Signal {
    /// Whether to forward it: a process sent it, other than the program or its descendants, whose
    /// signals mean their process group. If a terminal closes, the kernel signals only the leader
    /// of the session, and leaves the leader's jobs to the leader.
    fn is_for_the_program(&self) -> bool {
        match self.sender {
            Some(sender) => !is_below(sender, std::process::id() as c_int),
            None => self.number == libc::SIGHUP && leads_its_session(),
        }
    }
}

/// Whether this process leads its session: `ssh -t HOST gruyere run ...`, a container's, a terminal
/// window's own command.
fn leads_its_session() -> bool {
    // SAFETY: no memory is involved.
    unsafe { libc::getsid(0) == libc::getpid() }
}

/// Whether `process` descends from `ancestor`, as far as /proc shows.
fn is_below(mut process: libc::pid_t, ancestor: libc::pid_t) -> bool {
    // No tree is deeper; and reused numbers must not make a circle.
    for _ in 0..64 {
        if process <= 1 {
            return false;
        }
        let parent = facts::stat_field(&format!("/proc/{process}/stat"), 4);
        match parent.and_then(|parent| parent.parse().ok()) {
            Some(parent) if parent == ancestor => return true,
            Some(parent) => process = parent,
            None => return false,
        }
    }
    false
}

/// The signals blocked for the loop, and the previous mask.
#[derive(Clone, Copy)]
struct Signals {
    taken: libc::sigset_t,
    before: libc::sigset_t,
    child_ignored: bool,
    pipe_ignored: bool,
}

impl Signals {
    /// Blocks all signals to forward, and those about the child.
    fn block() -> Signals {
        // SAFETY: sets are written before they are read; handlers are not involved. One thread.
        unsafe {
            let (mut taken, mut before) = (zeroed(), zeroed());
            libc::sigemptyset(&mut taken);
            for signal in (1..=libc::SIGRTMAX()).filter(|&signal| is_taken(signal)) {
                libc::sigaddset(&mut taken, signal);
            }
            let child_ignored = disposition::was_ignored(libc::SIGCHLD);
            if child_ignored {
                // Else the kernel would reap the child, and its status would be lost.
                libc::signal(libc::SIGCHLD, libc::SIG_DFL);
            }
            libc::pthread_sigmask(libc::SIG_BLOCK, &taken, &mut before);
            let pipe_ignored = disposition::was_ignored(libc::SIGPIPE);
            Signals { taken, before, child_ignored, pipe_ignored }
        }
    }

    /// Restores the mask from before [`Signals::block`].
    fn restore(&self) {
        // SAFETY: a set that the kernel wrote.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &self.before, null_mut()) };
    }

    /// In the child, before it executes: restores this process's original signals, and ties its end
    /// to ours.
    fn as_the_program_expects(&self, parent: u32) -> io::Result<()> {
        // SAFETY: system calls that a forked child may make; a set that the kernel wrote.
        unsafe {
            let action = |ignored| if ignored { libc::SIG_IGN } else { libc::SIG_DFL };
            libc::signal(libc::SIGCHLD, action(self.child_ignored));
            libc::signal(libc::SIGPIPE, action(self.pipe_ignored));
            // A launcher that kills us with SIGKILL means the program; only the kernel can pass
            // that on.
            signals::end_with(parent)?;
            libc::pthread_sigmask(libc::SIG_SETMASK, &self.before, null_mut());
        }
        Ok(())
    }

    /// The next signal.
    fn wait(&self) -> Option<Signal> {
        // SAFETY: a set of ours; the kernel writes `info`, whose sender is set if a process sent
        // the signal.
        unsafe {
            let mut info: libc::siginfo_t = zeroed();
            let number = libc::sigwaitinfo(&self.taken, &mut info);
            let by_a_process =
                [libc::SI_USER, libc::SI_QUEUE, libc::SI_TKILL].contains(&info.si_code);
            (number > 0).then(|| Signal { number, sender: by_a_process.then(|| info.si_pid()) })
        }
    }
}

/// Whether the loop waits for a signal. Excluded: signals that cannot be blocked, our own faults,
/// glibc's signals, and ignored signals, which stay ignored.
fn is_taken(signal: c_int) -> bool {
    const NEVER: [c_int; 8] = [
        libc::SIGKILL,
        libc::SIGSTOP,
        libc::SIGSEGV,
        libc::SIGBUS,
        libc::SIGFPE,
        libc::SIGILL,
        libc::SIGTRAP,
        libc::SIGSYS,
    ];
    if signal == libc::SIGCHLD {
        return true;
    }
    let glibcs = 32..libc::SIGRTMIN();
    !NEVER.contains(&signal)
        && !glibcs.contains(&signal)
        && signal != libc::SIGPIPE
        && !disposition::was_ignored(signal)
}

fn send(pid: c_int, signal: c_int) {
    // SAFETY: no memory is involved. The child has not been waited for, so the number is still its
    // own.
    unsafe { libc::kill(pid, signal) };
}

/// Change of the child's state since the last call.
fn news_of(pid: c_int) -> Option<ExitStatus> {
    let mut status = 0;
    // SAFETY: `status` may be written.
    let answer = unsafe { libc::waitpid(pid, &mut status, libc::WNOHANG | libc::WUNTRACED) };
    (answer == pid).then(|| ExitStatus::from_raw(status))
}

/// Whether the child has stopped since [`news_of`] told of its last stop.
fn has_stopped_since(pid: c_int) -> bool {
    let flags = libc::WSTOPPED | libc::WNOHANG | libc::WNOWAIT;
    // SAFETY: the kernel writes `info`, zeroed if there is no news.
    unsafe {
        let mut info: libc::siginfo_t = zeroed();
        libc::waitid(libc::P_PID, pid as libc::id_t, &mut info, flags) == 0 && info.si_pid() == pid
    }
}

/// As the first process of a container, this one inherits the orphans, and must reap them.
fn reap_orphans(child: c_int) {
    if std::process::id() != 1 {
        return;
    }
    loop {
        // SAFETY: the kernel writes `info`, zeroed if no child has ended; `news_of` collects the
        // child's own end.
        unsafe {
            let mut info: libc::siginfo_t = zeroed();
            let flags = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
            if libc::waitid(libc::P_ALL, 0, &mut info, flags) != 0
                || info.si_pid() == 0
                || info.si_pid() == child
            {
                return;
            }
            libc::waitpid(info.si_pid(), null_mut(), 0);
        }
    }
}

/// Whether the process is stopped, by its state in /proc.
fn is_stopped(pid: c_int) -> bool {
    let state = facts::stat_field(&format!("/proc/{pid}/stat"), 3);
    state.is_some_and(|state| state.starts_with('T'))
}

/// `signal` stopped the program: stops this process too, until a signal wakes it.
fn stop_as(signal: c_int) {
    // Stopping us would give back no terminal, and a sender of SIGSTOP to a single process wakes
    // only that process.
    if signal == libc::SIGSTOP && !in_front() {
        return;
    }
    if signal == libc::SIGSTOP {
        // SAFETY: no memory is involved.
        unsafe { libc::raise(signal) };
        return;
    }
    deliver(signal);
}

/// Whether we are the terminal's foreground group.
fn in_front() -> bool {
    // SAFETY: a NUL-terminated path; the descriptor is closed again.
    unsafe {
        let terminal =
            libc::open(c"/dev/tty".as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC | libc::O_NOCTTY);
        if terminal < 0 {
            return false;
        }
        let front = libc::tcgetpgrp(terminal);
        libc::close(terminal);
        front == libc::getpgrp()
    }
}
