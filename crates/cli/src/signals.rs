//! Signals in every command but `run`, which has its own handling (`run/child.rs`).
//!
//! HUP, INT and TERM end the command at once, by that very signal, so that a shell or a supervisor
//! sees the cause: also as process 1 of a container, where the kernel would deliver none of them. A
//! signal ignored at the start (`nohup`, a script's `&`) stays ignored. TSTP gives a taken terminal
//! back, and CONT takes it again ([`crate::terminal`]).
//!
//! A thread of its own receives them, so it does not matter whether the command is busy or stuck.

pub mod disposition;

use std::io;
use std::mem::zeroed;
use std::process::Command;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicI32, AtomicU8, Ordering};

use libc::c_int;
use signal_hook::consts::{SIGCONT, SIGHUP, SIGINT, SIGTERM, SIGTSTP};
use signal_hook::iterator::Signals;

use crate::terminal;

/// What a signal that ends does.
///
/// ```text
///   AT_ONCE -> FINISH    a command has something to finish first (`finish_first`)
///   FINISH  -> ASKED     the first signal came; the next one ends at once
/// ```
static ENDING: AtomicU8 = AtomicU8::new(AT_ONCE);
/// The signal that came first.
static FIRST: AtomicI32 = AtomicI32::new(0);
const AT_ONCE: u8 = 0;
const FINISH: u8 = 1;
const ASKED: u8 = 2;

/// Starts the thread. If that fails, signals keep their default action.
pub fn listen() {
    let wanted = [SIGHUP, SIGINT, SIGTERM, SIGTSTP, SIGCONT];
    let Ok(mut signals) =
        Signals::new(wanted.into_iter().filter(|&signal| !disposition::was_ignored(signal)))
    else {
        return;
    };
    let handle = signals.handle();
    let heard = move || {
        for signal in signals.forever() {
            match signal {
                SIGTSTP => terminal::give_back(),
                SIGCONT => terminal::take_again(),
                signal => {
                    let _ = FIRST.compare_exchange(0, signal, Ordering::Relaxed, Ordering::Relaxed);
                    match ENDING.compare_exchange(
                        FINISH,
                        ASKED,
                        Ordering::Release,
                        Ordering::Relaxed,
                    ) {
                        Ok(_) => {}
                        Err(_) => end(signal),
                    }
                }
            }
        }
    };
    if std::thread::Builder::new().name("signals".to_owned()).spawn(heard).is_err() {
        handle.close();
        for signal in wanted.into_iter().filter(|&signal| !disposition::was_ignored(signal)) {
            by_default(signal);
        }
    }
}

/// From here on, the first signal does not end the command: it asks for the end, and
/// [`Asked::is_asked`] returns true.
pub fn finish_first() -> Asked {
    ENDING.store(FINISH, Ordering::Relaxed);
    Asked(())
}

/// Handle to a requested end.
#[derive(Debug)]
pub struct Asked(());

impl Asked {
    /// Whether a signal came.
    pub fn is_asked(&self) -> bool {
        ENDING.load(Ordering::Acquire) == ASKED
    }

    /// Ends this process by the signal that came, which a supervisor then sees as the cause.
    pub fn end(&self) -> ! {
        end(FIRST.load(Ordering::Relaxed))
    }
}

/// Ends this process by `signal`; gives a taken terminal back before.
pub fn end(signal: c_int) -> ! {
    terminal::let_go();
    die_of(signal);
    // Process 1 of a container does not die of signals.
    // SAFETY: no memory is involved. Handlers at exit may wait for a lock that another thread
    // holds, so we skip them.
    unsafe { libc::_exit(128 + signal) }
}

/// Stops this process with `signal`'s default action, until a signal wakes it.
pub fn stop_by(signal: c_int) {
    // SAFETY: structures of our own; the previous handler is restored.
    unsafe {
        let (mut default, mut before): (libc::sigaction, libc::sigaction) = (zeroed(), zeroed());
        default.sa_sigaction = libc::SIG_DFL;
        libc::sigaction(signal, &default, &mut before);
        deliver(signal);
        libc::sigaction(signal, &before, null_mut());
    }
}

/// Runs a signal's default action once, and leaves the signal blocked on this thread.
pub fn deliver(signal: c_int) {
    // SAFETY: the set is emptied before it is used.
    unsafe {
        let mut only = zeroed();
        libc::sigemptyset(&mut only);
        libc::sigaddset(&mut only, signal);
        libc::raise(signal);
        libc::pthread_sigmask(libc::SIG_UNBLOCK, &only, null_mut());
        libc::pthread_sigmask(libc::SIG_BLOCK, &only, null_mut());
    }
}

/// Ends this process by `signal`, without a core dump. Returns if a signal cannot end it: as
/// process 1.
pub fn die_of(signal: c_int) {
    by_default(signal);
    // SAFETY: a structure of our own.
    unsafe {
        let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        libc::setrlimit(libc::RLIMIT_CORE, &none);
    }
    deliver(signal);
}

fn by_default(signal: c_int) {
    // SAFETY: a structure of our own; the default action has no handler.
    unsafe {
        let mut default: libc::sigaction = zeroed();
        default.sa_sigaction = libc::SIG_DFL;
        libc::sigaction(signal, &default, null_mut());
    }
}

/// Ties the child that `command` starts to this process: it ends when this process ends in any way,
/// or when the thread that started it does.
pub fn ends_with_us(command: &mut Command) -> &mut Command {
    use std::os::unix::process::CommandExt as _;
    let ours = std::process::id();
    // SAFETY: the closure makes system calls only, which a child may before it executes.
    unsafe { command.pre_exec(move || end_with(ours)) }
}

/// In a child, before it executes: ends it when its parent does. Only makes system calls.
pub fn end_with(parent: u32) -> io::Result<()> {
    // SAFETY: no memory is involved.
    unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        if libc::getppid() as u32 != parent {
            libc::raise(libc::SIGKILL);
        }
    }
    Ok(())
}
