//! The terminal, taken whole: in raw mode and on its alternate screen, until it is given back.
//!
//! It is given back at the end, whatever ends us; when we are stopped (Ctrl-Z), and taken again
//! when we go on. While another job is in front nothing is drawn, and where that would change how
//! the terminal works the kernel stops us (SIGTTOU), as it should. A terminal that is gone ends us
//! as a hang-up does, also where SIGHUP is ignored: there is nobody to draw for.

use std::fs::File;
use std::io::{self, IsTerminal};
use std::os::fd::AsRawFd as _;
use std::sync::{Mutex, MutexGuard, PoisonError, mpsc};
use std::time::Duration;

use ratatui::backend::CrosstermBackend;
use ratatui::crossterm::cursor::{Hide, Show};
use ratatui::crossterm::execute;
use ratatui::crossterm::terminal::{
    Clear, ClearType, EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode,
};
use ratatui::{DefaultTerminal, Frame, Terminal};

use crate::output;
use crate::signals;

/// How it stands with the terminal. Held while something is written to it.
struct Taken {
    /// It is in raw mode, on its alternate screen.
    is_taken: bool,
    /// What is on it is not what was drawn last.
    is_stale: bool,
}

static TAKEN: Mutex<Taken> = Mutex::new(Taken { is_taken: false, is_stale: false });

/// A terminal that takes nothing any more (Ctrl-S, a dead connection) is left as it is after so
/// long.
const PATIENCE: Duration = Duration::from_millis(500);

fn taken() -> MutexGuard<'static, Taken> {
    TAKEN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The whole terminal; given back when this is dropped.
pub struct Screen(DefaultTerminal);

impl Screen {
    /// Takes the terminal. In a job behind others this waits until it is in front.
    ///
    /// # Errors
    /// The terminal's.
    pub fn take() -> io::Result<Screen> {
        let mut taken = taken();
        let terminal = ratatui::try_init().inspect_err(|_| ratatui::restore())?;
        *taken = Taken { is_taken: true, is_stale: false };
        drop(taken);
        let screen = Screen(terminal);
        watch_for_its_end()?;
        Ok(screen)
    }

    /// Draws, unless the terminal is another's now.
    ///
    /// # Errors
    /// The terminal's.
    pub fn draw(&mut self, draw: impl FnOnce(&mut Frame<'_>)) -> io::Result<()> {
        let mut taken = taken();
        if !taken.is_taken || !in_front() {
            return Ok(());
        }
        if std::mem::take(&mut taken.is_stale) {
            // One that knows of nothing drawn. `clear` would ask the terminal where its cursor is,
            // and wait for the answer.
            self.0 = Terminal::new(CrosstermBackend::new(io::stdout()))?;
        }
        self.0.draw(draw).map(drop)
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        leave(&mut taken());
    }
}

/// The user stops the job: as the terminal's own Ctrl-Z, which raw mode takes for a key.
pub fn stop() {
    // SAFETY: no memory is involved.
    unsafe { libc::kill(0, libc::SIGTSTP) };
}

/// Gives the terminal back, if it is taken, and stops; goes on when woken up.
pub fn give_back() {
    let mut taken = taken();
    let was_taken = taken.is_taken;
    leave(&mut taken);
    signals::stop_by(libc::SIGTSTP);
    if was_taken {
        enter(&mut taken);
    }
}

/// Woken up: after a stop that nobody could see coming (SIGSTOP) the terminal is as the shell wants
/// it.
pub fn take_again() {
    let mut taken = taken();
    if taken.is_taken {
        // Behind others this stops us.
        let _ = disable_raw_mode();
        enter(&mut taken);
    }
}

/// Gives the terminal back for good.
pub fn let_go() {
    // Most commands never took it: they end at once, before what the same Ctrl-C does to their
    // children is seen.
    if TAKEN.try_lock().is_ok_and(|taken| !taken.is_taken) {
        return;
    }
    let (done, wait) = mpsc::channel();
    let restore = move || {
        // Also while another job is in front: nothing stops us any more.
        block(libc::SIGTTOU);
        leave(&mut taken());
        let _ = done.send(());
    };
    if std::thread::Builder::new().spawn(restore).is_ok() {
        let _ = wait.recv_timeout(PATIENCE);
    }
}

fn leave(taken: &mut Taken) {
    if !std::mem::take(&mut taken.is_taken) {
        return;
    }
    let _ = execute!(io::stdout(), LeaveAlternateScreen, Show);
    // How it works while another job is in front, is that job's.
    if in_front() {
        let _ = disable_raw_mode();
    }
}

fn enter(taken: &mut Taken) {
    let _ = enable_raw_mode();
    let _ = execute!(io::stdout(), EnterAlternateScreen, Clear(ClearType::All), Hide);
    *taken = Taken { is_taken: true, is_stale: true };
}

/// Whether this job is the one in front; also where jobs are not told apart.
fn in_front() -> bool {
    // SAFETY: a descriptor that is a terminal, or was.
    let front = unsafe { libc::tcgetpgrp(libc::STDOUT_FILENO) };
    // SAFETY: no memory is involved.
    front < 0 || front == unsafe { libc::getpgrp() }
}

fn block(signal: libc::c_int) {
    // SAFETY: the set is emptied before it is used.
    unsafe {
        let mut only = std::mem::zeroed();
        libc::sigemptyset(&mut only);
        libc::sigaddset(&mut only, signal);
        libc::pthread_sigmask(libc::SIG_BLOCK, &only, std::ptr::null_mut());
    }
}

/// Ends us when the terminal is gone: that of the screen, or that of the keys.
fn watch_for_its_end() -> io::Result<()> {
    // Where keys are read from: as crossterm chooses it.
    let keys = if io::stdin().is_terminal() { None } else { Some(File::open("/dev/tty")?) };
    let watch = move || {
        let keys = keys.as_ref().map_or(libc::STDIN_FILENO, |file| file.as_raw_fd());
        output::wait_for_the_end(&[keys, libc::STDOUT_FILENO], None);
        signals::end(libc::SIGHUP);
    };
    std::thread::Builder::new().name("terminal".to_owned()).spawn(watch).map(drop)
}
