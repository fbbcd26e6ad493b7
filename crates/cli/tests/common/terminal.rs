//! A terminal with a process behind it.

use std::ffi::CStr;
use std::fs::{File, OpenOptions};
use std::io::{Read as _, Write as _};
use std::os::fd::{AsRawFd as _, FromRawFd as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use crate::signals::{SOON, until};

/// The terminal, and its session's leader.
pub struct Terminal {
    child: Child,
    /// `None`: closed.
    master: Option<File>,
    seen: String,
}

impl Terminal {
    /// Runs `command` as the leader of a new session, with a terminal of 100 columns and 40 lines
    /// as its standard streams.
    pub fn with(command: Command) -> Terminal {
        Terminal::sized(command, 100, 40)
    }

    /// As [`Terminal::with`], with a terminal of this size.
    pub fn sized(mut command: Command, columns: u16, lines: u16) -> Terminal {
        let (master, slave) = open(columns, lines).unwrap();
        let terminal = slave.as_raw_fd();
        for stream in [Command::stdin, Command::stdout, Command::stderr] {
            stream(&mut command, Stdio::from(slave.try_clone().unwrap()));
        }
        // SAFETY: system calls that a forked child may make.
        unsafe {
            command.pre_exec(move || {
                if libc::setsid() < 0 || libc::ioctl(terminal, libc::TIOCSCTTY, 0) < 0 {
                    return Err(std::io::Error::last_os_error());
                }
                Ok(())
            });
        }
        let child = command.spawn().unwrap();
        Terminal { child, master: Some(master), seen: String::new() }
    }

    /// An interactive shell, `bash`, that prints `prompt> ` when it waits.
    pub fn with_shell(mut bash: Command) -> Terminal {
        bash.args(["--norc", "--noprofile", "--noediting", "-i"])
            .env("PS1", "prompt> ")
            .env_remove("HISTFILE");
        let mut terminal = Terminal::with(bash);
        terminal.expect("prompt> ");
        terminal
    }

    /// The session's leader.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Types `keys`.
    pub fn write(&mut self, keys: &str) {
        self.master.as_mut().expect("open").write_all(keys.as_bytes()).unwrap();
    }

    /// Waits for `words`, and drops the output up to their end.
    #[track_caller]
    pub fn expect(&mut self, words: &str) -> String {
        let deadline = Instant::now() + SOON;
        loop {
            if let Some(at) = self.seen.find(words) {
                let rest = self.seen.split_off(at + words.len());
                return std::mem::replace(&mut self.seen, rest);
            }
            assert!(Instant::now() < deadline, "no {words:?} in {:?}", last(&self.seen));
            if !self.read() {
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    }

    /// The output since then, without waiting for more.
    pub fn seen(&mut self) -> &str {
        while self.read() {}
        &self.seen
    }

    fn read(&mut self) -> bool {
        let mut bytes = [0; 4096];
        match self.master.as_mut().expect("open").read(&mut bytes) {
            Ok(count) => self.seen.push_str(&String::from_utf8_lossy(&bytes[..count])),
            Err(_) => return false,
        }
        true
    }

    /// Whether it is in a shell's mode: lines are edited, keys are echoed, Ctrl-C is a signal.
    pub fn is_cooked(&self) -> bool {
        let master = self.master.as_ref().expect("open").as_raw_fd();
        // SAFETY: all-zero is a valid value, which the call writes over.
        let modes = unsafe {
            let mut modes: libc::termios = std::mem::zeroed();
            assert_eq!(libc::tcgetattr(master, &mut modes), 0);
            modes.c_lflag
        };
        let cooked = libc::ICANON | libc::ECHO | libc::ISIG;
        modes & cooked == cooked
    }

    /// Waits until the shell has given the terminal to a job: before that, the shell reads the
    /// keys.
    pub fn wait_for_a_job(&self) {
        let (master, shell) = (self.master.as_ref().expect("open").as_raw_fd(), self.pid());
        // SAFETY: a descriptor of ours.
        until("a job is in front", || unsafe { libc::tcgetpgrp(master) } != shell as libc::pid_t);
    }

    /// Waits until the job in front continues: a shell first gives it the terminal, then continues
    /// it, and loses a stop that comes between.
    pub fn wait_until_the_job_goes_on(&self) {
        let master = self.master.as_ref().expect("open").as_raw_fd();
        let is_stopped = |group: libc::pid_t| {
            let processes = std::fs::read_dir("/proc").unwrap().flatten();
            processes
                .filter_map(|process| std::fs::read_to_string(process.path().join("stat")).ok())
                .any(|stat| {
                    // Behind the name, which may be any text: state, parent, group.
                    let fields: Vec<&str> =
                        stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
                    fields.first() == Some(&"T")
                        && fields.get(2).and_then(|text| text.parse().ok()) == Some(group)
                })
        };
        // SAFETY: a descriptor of ours.
        until("the job goes on", || !is_stopped(unsafe { libc::tcgetpgrp(master) }));
    }

    /// Closes it, as a lost connection does.
    pub fn close(&mut self) {
        self.master = None;
    }

    /// How the leader ended, which it soon does; reads its output meanwhile.
    #[track_caller]
    pub fn ended(&mut self) -> ExitStatus {
        let deadline = Instant::now() + SOON;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(Instant::now() < deadline, "it does not end; it wrote {:?}", last(&self.seen));
            if self.master.is_none() || !self.read() {
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    }
}

/// The end of the output.
fn last(seen: &str) -> &str {
    let from = seen.char_indices().rev().nth(1500).map_or(0, |(at, _)| at);
    &seen[from..]
}

/// Opens both ends. No child of a parallel test may inherit them, even for a moment: it would keep
/// the terminal open.
fn open(columns: u16, lines: u16) -> std::io::Result<(File, File)> {
    let failed = |answer: libc::c_int| {
        if answer == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
    };
    let flags = libc::O_RDWR | libc::O_NOCTTY | libc::O_CLOEXEC | libc::O_NONBLOCK;
    let size = libc::winsize { ws_row: lines, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
    let mut name = [0u8; 64];
    // SAFETY: a fresh descriptor, or none; the name is written within its room; the size is read.
    let master = unsafe {
        let master = libc::posix_openpt(flags);
        failed(if master < 0 { -1 } else { 0 })?;
        failed(libc::grantpt(master))?;
        failed(libc::unlockpt(master))?;
        failed(libc::ptsname_r(master, name.as_mut_ptr().cast(), name.len()))?;
        failed(libc::ioctl(master, libc::TIOCSWINSZ, &size))?;
        File::from_raw_fd(master)
    };
    let name = CStr::from_bytes_until_nul(&name).map_err(std::io::Error::other)?;
    let name = name.to_str().map_err(std::io::Error::other)?;
    Ok((master, OpenOptions::new().read(true).write(true).custom_flags(libc::O_NOCTTY).open(name)?))
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
