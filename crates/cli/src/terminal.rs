//! Takes the whole terminal: raw mode and alternate screen, until it is given back.
//!
//! We give it back at the end, whatever ends us; and when we are stopped (Ctrl-Z), to take it again
//! when we continue. While another job is in front, we draw nothing and read no key; if a call
//! would change the terminal's mode, the kernel stops us (SIGTTOU), as it should. A terminal that
//! is gone ends us as a hang-up does, even if SIGHUP is ignored: the screen has no viewer.

use std::fs::File;
use std::io::{self, IsTerminal};
use std::os::fd::{IntoRawFd as _, RawFd};
use std::sync::{Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant};

use ratatui::backend::CrosstermBackend;
use ratatui::crossterm::cursor::{Hide, Show};
use ratatui::crossterm::event::{self, Event, KeyEvent, KeyEventKind};
use ratatui::crossterm::execute;
use ratatui::crossterm::terminal::{
    Clear, ClearType, EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode,
};
use ratatui::{DefaultTerminal, Frame, Terminal};

use crate::output;
use crate::signals;

/// Terminal state; locked while we write to it.
struct Taken {
    /// Whether it is in raw mode, on its alternate screen.
    is_taken: bool,
    /// Whether the screen differs from our last drawing.
    is_stale: bool,
}

static TAKEN: Mutex<Taken> = Mutex::new(Taken { is_taken: false, is_stale: false });

/// Time after which a terminal that accepts no output (Ctrl-S, a dead connection) is left as it is.
const PATIENCE: Duration = Duration::from_millis(500);

fn taken() -> MutexGuard<'static, Taken> {
    TAKEN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The whole terminal; given back on drop.
pub struct Screen {
    terminal: DefaultTerminal,
    /// Where keys come from, as crossterm chooses it; open until the process ends.
    keys: RawFd,
}

impl Screen {
    /// Takes the terminal. A background job waits until it is in front.
    ///
    /// # Errors
    /// Reading or writing the terminal fails.
    pub fn take() -> io::Result<Screen> {
        let mut taken = taken();
        let terminal = ratatui::try_init().inspect_err(|_| ratatui::restore())?;
        *taken = Taken { is_taken: true, is_stale: false };
        drop(taken);
        let keys = match io::stdin().is_terminal() {
            true => libc::STDIN_FILENO,
            false => File::open("/dev/tty")?.into_raw_fd(),
        };
        let screen = Screen { terminal, keys };
        watch_for_its_end(keys)?;
        Ok(screen)
    }

    /// Draws, unless another job has the terminal.
    ///
    /// # Errors
    /// Writing to the terminal fails.
    pub fn draw(&mut self, draw: impl FnOnce(&mut Frame<'_>)) -> io::Result<()> {
        let mut taken = taken();
        if !taken.is_taken || !in_front() {
            return Ok(());
        }
        if std::mem::take(&mut taken.is_stale) {
            // A new one, without a previous drawing. `clear` would ask the terminal for the
            // cursor's position, and wait for the answer.
            self.terminal = Terminal::new(CrosstermBackend::new(io::stdout()))?;
        }
        self.terminal.draw(draw).map(drop)
    }

    /// The keys pressed within `wait`: returns at the first, with those that came along.
    ///
    /// crossterm reads once anything can be read, and that includes what is typed for the shell
    /// while we are behind it: such a read stops us (SIGTTIN), is repeated when we are in front
    /// again, and then waits for a key while nothing is drawn. So it is called only in front.
    ///
    /// # Errors
    /// Reading the terminal fails.
    pub fn keys(&self, wait: Duration) -> io::Result<Vec<KeyEvent>> {
        let until = Instant::now() + wait;
        if in_front() && !output::wait_for_input(self.keys, wait) {
            return Ok(Vec::new());
        }
        let mut events = Vec::new();
        while in_front() && event::poll(Duration::ZERO)? {
            events.push(event::read()?);
        }
        if events.is_empty() {
            // What can be read is not ours, or not yet a key.
            std::thread::sleep(until.saturating_duration_since(Instant::now()));
        }
        let keys = events.iter().filter_map(Event::as_key_event);
        Ok(keys.filter(|key| key.kind != KeyEventKind::Release).collect())
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        leave(&mut taken());
    }
}

/// The user stops the job: acts as the terminal's own Ctrl-Z, which raw mode delivers as a key.
pub fn stop() {
    // SAFETY: no memory is involved.
    unsafe { libc::kill(0, libc::SIGTSTP) };
}

/// Gives the terminal back, if it is taken, and stops; returns when woken up.
pub fn give_back() {
    let mut taken = taken();
    let was_taken = taken.is_taken;
    leave(&mut taken);
    signals::stop_by(libc::SIGTSTP);
    if was_taken {
        enter(&mut taken);
    }
}

/// After waking up: an unannounced stop (SIGSTOP) has left the terminal in the shell's mode.
pub fn take_again() {
    let mut taken = taken();
    if taken.is_taken {
        // In the background, this stops us.
        let _ = disable_raw_mode();
        enter(&mut taken);
    }
}

/// Gives the terminal back for good.
pub fn let_go() {
    // Most commands never took it: they end at once, before the effect of the same Ctrl-C on their
    // children shows.
    if TAKEN.try_lock().is_ok_and(|taken| !taken.is_taken) {
        return;
    }
    let (done, wait) = mpsc::channel();
    let restore = move || {
        // Also while another job is in front: from here on, SIGTTOU cannot stop us.
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
    // While another job is in front, the mode belongs to that job.
    if in_front() {
        let _ = disable_raw_mode();
    }
}

fn enter(taken: &mut Taken) {
    let _ = enable_raw_mode();
    let _ = execute!(io::stdout(), EnterAlternateScreen, Clear(ClearType::All), Hide);
    *taken = Taken { is_taken: true, is_stale: true };
}

/// Whether this job is in front; also true if there is no job control.
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

/// Ends us when a terminal is gone: the screen's, or that of the keys.
fn watch_for_its_end(keys: RawFd) -> io::Result<()> {
    let watch = move || {
        output::wait_for_the_end(&[keys, libc::STDOUT_FILENO], None);
        signals::end(libc::SIGHUP);
    };
    std::thread::Builder::new().name("terminal".to_owned()).spawn(watch).map(drop)
}
