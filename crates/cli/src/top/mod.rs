//! `gruyere top`: all processes on one screen, until the user quits.
//!
//! [`app`] holds the state and handles keys, without a terminal; [`draw`] puts it into a buffer;
//! [`details`] reads more of the chosen process than would be affordable for all; [`sick`] finds
//! the process that runs out of memory soonest; [`sample`] prints the same for programs.

mod app;
mod columns;
mod details;
mod draw;
#[cfg(test)]
mod ended;
mod fit;
mod panels;
#[cfg(test)]
mod picture;
mod process;
mod sample;
mod sick;
#[cfg(test)]
mod tests;
mod theme;
mod verdict;

use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::buffer::Buffer;

use crate::failure::{Ended, Exit, Failure};
use crate::follow::{self, Follower, Which};
use crate::output::{self, Audience};
use crate::signals;
use crate::sites::SeldomRead;
use crate::target::{Folder, Target};
use crate::terminal::{self, Screen};
use app::{App, Flow};
use columns::Sort;
use theme::Theme;

/// Watches all processes that use gruyere on one screen, or one of them.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  gruyere top                    all processes, soonest out of memory first
  gruyere top 4242               one process
  gruyere top --sort peak        the highest peak first
  gruyere top --once             the screen as text, once
  gruyere top --json | jq '.processes[].devices[0].oom_in_seconds'
  gruyere top --json --count 60 --interval 1s
                                 a line a second for a minute

Keys: arrows choose, Enter shows the details of a process, s sorts by the next column, Space \
pauses, t changes the graph's time span, ? shows help, q quits. NO_COLOR is honoured.

Reading never disturbs a process: `top` takes no lock, sends no signal, and reads the tables of \
blocks only for the chosen process, and seldom.

Exit codes: 0 success (also if the named process has ended); 1 no such process or record, it can't \
be read, or there is no terminal; 2 wrong usage.")]
pub struct Arguments {
    /// The process (its pid) or its record file. Default, or `all`: all processes.
    #[arg(value_name = "PID|FILE|all", default_value = "all")]
    target: String,
    /// Time between two samples, at least 100ms.
    #[arg(long, value_name = "DURATION", default_value = "500ms", value_parser = follow::interval)]
    interval: Duration,
    /// Sort by this column.
    #[arg(long, value_enum, default_value_t = Sort::Sick)]
    sort: Sort,
    /// Print a sample as JSON.
    #[arg(long, conflicts_with = "once")]
    json: bool,
    /// With --json: print this many samples, one per line, an interval apart.
    #[arg(
        long, value_name = "N", requires = "json",
        value_parser = clap::value_parser!(u64).range(1..)
    )]
    count: Option<u64>,
    /// Print the screen as text, once.
    #[arg(long)]
    once: bool,
    #[command(flatten)]
    folder: Folder,
}

/// The first sample's rates need two reads, further apart than [`gruyere_record::watch::Rate`]
/// requires.
const RATE: Duration = Duration::from_millis(450);
/// Size of the screen if there is no terminal to ask.
const SCREEN: (u16, u16) = (120, 40);

pub fn run(arguments: &Arguments) -> Ended {
    let which = match arguments.target.as_str() {
        "all" => Which::All(arguments.folder.clone()),
        target => {
            Which::One(Target { target: Some(target.to_owned()), folder: arguments.folder.clone() })
        }
    };
    let mut follower = Follower::new(which)?;
    let interval = arguments.interval;
    if arguments.json {
        return print_samples(&mut follower, arguments.count, interval);
    }
    let theme = Theme::new(std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty()));
    let mut app = App::new(arguments.sort, interval, theme);
    if arguments.once || (io::stdout().is_terminal() && is_dumb()) {
        follower.look(Instant::now());
        app.update(&follower, Instant::now());
        std::thread::sleep(RATE);
        follower.look(Instant::now());
        app.update(&follower, Instant::now());
        output::print(text(&mut app, size())?)?;
        return Ok(Exit::Fine);
    }
    if !io::stdout().is_terminal() {
        return Err(Failure::new(
            "stdout is not a terminal; --once prints the screen, --json a sample",
        ));
    }
    watch(&mut follower, &mut app)
}

/// Whether the terminal says that it has no cursor to move: a screen is printed, once.
fn is_dumb() -> bool {
    std::env::var_os("TERM").is_some_and(|term| term.is_empty() || term == "dumb")
}

/// Size of the terminal; else COLUMNS and LINES; else a medium size.
fn size() -> (u16, u16) {
    let variable = |name| std::env::var(name).ok().and_then(|value| value.parse::<u16>().ok());
    let asked = ratatui::crossterm::terminal::size()
        .ok()
        .filter(|size| io::stdout().is_terminal() && size.0 > 0);
    let (width, height) = asked.unwrap_or(SCREEN);
    let sized =
        |name, other: u16| variable(name).filter(|&cells| cells > 0).unwrap_or(other).min(500);
    (sized("COLUMNS", width), sized("LINES", height))
}

/// The screen as text, without trailing blanks.
fn text(app: &mut App, (width, height): (u16, u16)) -> Result<String, Failure> {
    let cannot = |error| Failure::new(format_args!("the screen could not be drawn: {error}"));
    let mut terminal = Terminal::new(TestBackend::new(width, height)).map_err(cannot)?;
    terminal.draw(|frame| draw::draw(frame, app)).map_err(cannot)?;
    Ok(lines(terminal.backend().buffer()))
}

fn lines(buffer: &Buffer) -> String {
    let mut text = String::new();
    for row in buffer.content().chunks(usize::from(buffer.area.width)) {
        let mut line = String::new();
        let mut skip = 0;
        for cell in row {
            if skip == 0 {
                line.push_str(cell.symbol());
                skip = unicode_width(cell.symbol());
            }
            skip = skip.saturating_sub(1);
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

/// Cells that a symbol takes.
fn unicode_width(symbol: &str) -> usize {
    ratatui::text::Span::raw(symbol).width().max(1)
}

fn print_samples(follower: &mut Follower, count: Option<u64>, interval: Duration) -> Ended {
    follower.look(Instant::now());
    let mut lines = SeldomRead::default();
    for n in 0..count.unwrap_or(1) {
        if output::pause(if n == 0 { interval.max(RATE) } else { interval }) == Audience::Gone {
            break;
        }
        follower.look(Instant::now());
        let sample = sample::sample(follower, &mut lines, Instant::now());
        let line = if count.is_none() { format!("{sample:#}") } else { sample.to_string() };
        if follower.is_over() && follower.followed().is_empty() {
            let trouble: Vec<&str> = follower.trouble().collect();
            return Err(Failure::new(trouble.join("; ")));
        }
        if output::print(format_args!("{line}\n"))? == Audience::Gone || follower.is_over() {
            break;
        }
    }
    Ok(Exit::Fine)
}

/// Watches until the user quits.
fn watch(follower: &mut Follower, app: &mut App) -> Ended {
    let ended = Screen::take().and_then(|mut screen| turn(&mut screen, follower, app));
    match ended {
        Ok(()) => Ok(Exit::Fine),
        // The closed terminal shows here before its signal arrives.
        Err(_) if output::pause(Duration::ZERO) == Audience::Gone => signals::end(libc::SIGHUP),
        Err(error) => Err(Failure::new(format_args!("the terminal: {error}"))),
    }
}

/// The longest time between two drawings: after a stopped job continues, the user soon sees the
/// screen.
const REDRAW: Duration = Duration::from_millis(250);
/// The longest time between two samples.
const LONGEST: Duration = Duration::from_secs(86_400);

fn turn(screen: &mut Screen, follower: &mut Follower, app: &mut App) -> io::Result<()> {
    let mut next = Instant::now();
    loop {
        let now = Instant::now();
        if now >= next {
            follower.look(now);
            app.update(follower, now);
            // Counts from now: missed samples of a suspended terminal are not made up for.
            next = now.checked_add(app.interval).unwrap_or(now + LONGEST);
        }
        screen.draw(|frame| draw::draw(frame, app))?;
        for key in screen.keys(next.saturating_duration_since(Instant::now()).min(REDRAW))? {
            match app.key(key) {
                Flow::Quit => return Ok(()),
                Flow::Stop => terminal::stop(),
                Flow::ForgetDead => {
                    follower.forget_dead();
                    next = now;
                }
                // Reads the chosen row at once.
                Flow::Look => next = now,
                Flow::Stay => {}
            }
        }
    }
}
