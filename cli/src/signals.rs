//! What signals do to every command but `run`, which has signals of its own (`run/child.rs`).
//!
//! HUP, INT and TERM end it at once, by that very signal, so that a shell or a supervisor sees what
//! happened: as process 1 of a container too, where the kernel would let none of them through. What
//! was ignored when the command started (`nohup`, a script's `&`) stays ignored. TSTP and CONT give
//! a terminal back that was taken, and take it again ([`crate::terminal`]).
//!
//! They are heard on a thread of their own: what the command does meanwhile, or is stuck in, does
//! not matter.

pub mod disposition;

use std::io;
use std::mem::zeroed;
use std::process::Command;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU8, Ordering};

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
const AT_ONCE: u8 = 0;
const FINISH: u8 = 1;
const ASKED: u8 = 2;

/// Begins to listen. Where that can't be done, signals do what they do by themselves.
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
                    match ENDING.compare_exchange(
                        FINISH,
                        ASKED,
                        Ordering::Relaxed,
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

/// From here on the first signal does not end the command: it asks for the end, which
/// [`Asked::is_asked`] tells.
pub fn finish_first() -> Asked {
    ENDING.store(FINISH, Ordering::Relaxed);
    Asked(())
}

/// Whether the end is asked for.
#[derive(Debug)]
pub struct Asked(());

impl Asked {
    /// Whether a signal came.
    pub fn is_asked(&self) -> bool {
        ENDING.load(Ordering::Relaxed) == ASKED
    }
}

/// Ends this process by `signal`; a terminal that was taken is given back before.
pub fn end(signal: c_int) -> ! {
    terminal::let_go();
    die_of(signal);
    // Process 1 of a container does not die of signals.
    // SAFETY: no memory is involved. What runs at an exit may wait for a lock that another thread
    // holds.
    unsafe { libc::_exit(128 + signal) }
}

/// Stops this process as `signal` does by itself, until somebody wakes it.
pub fn stop_by(signal: c_int) {
    // SAFETY: structures of our own; the handler that was there is put back as it was.
    unsafe {
        let (mut default, mut before): (libc::sigaction, libc::sigaction) = (zeroed(), zeroed());
        default.sa_sigaction = libc::SIG_DFL;
        libc::sigaction(signal, &default, &mut before);
        deliver(signal);
        libc::sigaction(signal, &before, null_mut());
    }
}

/// Lets a signal do what it does by default, once, and leaves it blocked on this thread.
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

/// Ends this process by `signal`, without a core of its own. Returns where a signal cannot end it:
/// as process 1.
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

/// The child that `command` starts ends with this process, however that ends; for as long as the
/// thread that starts it lives.
pub fn ends_with_us(command: &mut Command) -> &mut Command {
    use std::os::unix::process::CommandExt as _;
    let ours = std::process::id();
    // SAFETY: the closure makes system calls only, which a child may before it executes.
    unsafe { command.pre_exec(move || end_with(ours)) }
}

/// In a child, before it executes: it ends when its parent does. Only makes system calls.
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
