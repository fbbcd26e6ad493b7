//! `gruyere map`: the layout of a device's memory, byte by byte.

mod cells;
mod gaps;
mod html;
mod json;
mod strokes;
mod terminal;

use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::ValueEnum;
use gruyere_record::conclusion::Conclusion;
use gruyere_record::dump::from_record;
use gruyere_record::file;
use gruyere_record::picture::Picture;
use gruyere_record::plain;
use gruyere_record::{DeviceGauge, Reader};
use jiff::Timestamp;
use serde_json::json;

use crate::failure::{Ended, Exit, Failure};
use crate::output::{self, Audience};
use crate::target::Target;
use crate::wrap;
use gaps::Missing;
use strokes::By;
use terminal::Style;

/// Draws the layout of a device's memory: blocks, idle memory, lost memory.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  gruyere map 4242                    the address space, coloured by lifetime
  gruyere map 4242 --by age --watch   by age, redrawn every second
  gruyere map 4242 --by site          by the line of the program; --by module,
                                      --by phase
  gruyere map 4242 --physical         in the order of physical pages
  gruyere map 4242 --html heap.html   a zoomable page that works offline
  gruyere map /dev/shm/gruyere-4026531836-4242-99-0.record --json | jq .sums
                                      the last state of a killed process

Each cell is filled from below, as far as blocks take it up. The rest has no colour if it is idle: \
whole free pages, which can serve any request or go back to the driver. It is red if it is lost: \
free between live blocks, until they are freed. docs/map.md has the details.

Exit codes: 0 success; 1 no such process, record or device, or it can't be read or written; 2 \
wrong usage; 3 drawn, but some entries could not be read in full (the process was killed while it \
wrote them), or the record had no room for some live blocks.")]
pub struct Arguments {
    #[command(flatten)]
    target: Target,
    /// Device, by its number in the process. Default: the first that holds memory.
    #[arg(long, value_name = "NUMBER")]
    device: Option<u32>,
    /// Property that colours live blocks. Default: the lifetime; in a page, the line of the
    /// program, if lines are known.
    #[arg(long, value_enum)]
    by: Option<By>,
    /// Draw in the order of physical pages, not of addresses.
    #[arg(long)]
    physical: bool,
    /// Draw with ASCII letters only.
    #[arg(long)]
    ascii: bool,
    /// When to use colours; `auto`: if the output is a terminal and NO_COLOR is not set.
    #[arg(long, value_enum, default_value_t)]
    color: Colour,
    /// Columns of text. Default: the terminal's, or $COLUMNS, or 100.
    #[arg(long, value_name = "COLUMNS", value_parser = clap::value_parser!(u16).range(40..))]
    width: Option<u16>,
    /// Rows of cells. Default: as many as fit the terminal, or 32.
    #[arg(long, value_name = "ROWS", value_parser = clap::value_parser!(u16).range(1..))]
    rows: Option<u16>,
    /// Redraw at this interval, in seconds, until interrupted or until the process is gone.
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "1",
        require_equals = true,
          value_parser = clap::value_parser!(u32).range(1..=86_400),
          conflicts_with_all = ["json", "html"])]
    watch: Option<u32>,
    /// Print the sums and ranges as JSON. Sizes are in bytes.
    #[arg(long, conflicts_with = "html")]
    json: bool,
    /// Write a self-contained page to FILE; `-`: standard output.
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

/// When to use colours.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum Colour {
    #[default]
    Auto,
    Always,
    Never,
}

/// The last events that a conclusion reads.
const EVENTS: usize = 64;
/// Lines around the rows of cells, roughly.
const AROUND: usize = 12;
/// Columns where the output is no terminal and $COLUMNS is not set.
const WITHOUT_TERMINAL: usize = 100;
/// The fewest rows of cells that make a picture.
const LEAST_ROWS: usize = 6;

pub fn run(arguments: &Arguments) -> Ended {
    let reader = arguments.target.open()?;
    let device = device(&reader, arguments.device)?;
    if let Some(seconds) = arguments.watch {
        return watch(&reader, device, arguments, Duration::from_secs(seconds.into()));
    }
    let picture = look(&reader, device)?;
    if let Some(path) = &arguments.html {
        write_page(&reader, &picture, arguments.by, path)?;
    } else {
        let text = match arguments.json {
            true => format!("{:#}\n", json::value(&reader, &picture)),
            false => drawn(&picture, &reader, arguments),
        };
        output::print(text)?;
    }
    Ok(exit(&reader, &picture))
}

/// A picture that lacks something is not a whole success.
fn exit(reader: &Reader<'_>, picture: &Picture) -> Exit {
    match picture.misfits.torn > 0 || Missing::of(reader, picture).is_any() {
        true => Exit::Torn,
        false => Exit::Fine,
    }
}

/// Number of the device to draw.
fn device(reader: &Reader<'_>, asked: Option<u32>) -> Result<u32, Failure> {
    let devices = reader.devices();
    match asked {
        Some(device) if device < devices => Ok(device),
        Some(device) => Err(Failure::new(format_args!(
            "there is no device {device}: the process has {devices}, counted from 0"
        ))),
        None if devices == 0 => Err(Failure::new(format_args!(
            "{}: its process has no device, so there is no memory to draw",
            reader.path().display()
        ))),
        None => {
            let holds = |device: &u32| {
                reader.device(*device).is_some_and(|device| {
                    device.gauge(DeviceGauge::Reserved) > 0 || device.live > 0
                })
            };
            Ok((0..devices).find(holds).unwrap_or(0))
        }
    }
}

fn look(reader: &Reader<'_>, device: u32) -> Result<Picture, Failure> {
    reader.look_again();
    let picture = Picture::read(reader, device).ok_or_else(|| {
        Failure::new(format_args!(
            "{}: it has no data about device {device}",
            reader.path().display()
        ))
    })?;
    reader.expect_sound()?;
    Ok(picture)
}

fn title(reader: &Reader<'_>, device: u32) -> String {
    let process = reader.process();
    let rank = process.rank.map_or(String::new(), |rank| format!(", rank {rank}"));
    let life = match reader.is_live() {
        Some(false) => " (ended)",
        _ => "",
    };
    let snapshot = reader.device(device);
    let name = snapshot.as_ref().map_or(String::new(), |snapshot| plain(&snapshot.facts.name));
    let step = snapshot.map_or(0, |snapshot| snapshot.gauge(DeviceGauge::Step));
    format!("process {}{life}{rank}, device {device} {name}, step {step}", process.pid)
}

/// The picture as text, in as many rows as fit the terminal.
fn drawn(picture: &Picture, reader: &Reader<'_>, arguments: &Arguments) -> String {
    let title = title(reader, picture.device);
    let missing = Missing::of(reader, picture);
    let notes = gaps::notes(picture, missing);
    let head: Vec<String> = [title].into_iter().chain(missing.note(picture.sums.live)).collect();
    let (mut style, lines) = style(arguments);
    let sites = reader.sites();
    let mut text = terminal::draw(picture, &sites, &head, &notes, style);
    // The legend's height is known only after it is written. One line is the prompt's.
    for _ in 0..3 {
        let excess = lines.map_or(0, |lines| (text.lines().count() + 1).saturating_sub(lines));
        if excess == 0 || arguments.rows.is_some() || style.rows <= LEAST_ROWS {
            break;
        }
        style.rows = style.rows.saturating_sub(excess).max(LEAST_ROWS);
        text = terminal::draw(picture, &sites, &head, &notes, style);
    }
    text
}

/// Drawing style, and the terminal's height if there is a terminal.
fn style(arguments: &Arguments) -> (Style, Option<usize>) {
    let terminal = io::stdout().is_terminal();
    let size = terminal.then(terminal_size::terminal_size).flatten();
    let lines = size.map(|(_, height)| usize::from(height.0));
    let columns = arguments.width.map(usize::from).or_else(wrap::width).unwrap_or(WITHOUT_TERMINAL);
    let fitting = lines.map_or(32, |lines| lines.saturating_sub(AROUND).max(LEAST_ROWS));
    let colour = match arguments.color {
        Colour::Always => true,
        Colour::Never => false,
        // https://no-color.org: any value but an empty one.
        Colour::Auto => {
            terminal && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
        }
    };
    let style = Style {
        columns: columns.clamp(40, usize::from(u16::MAX)),
        rows: arguments.rows.map_or(fitting, usize::from),
        ascii: arguments.ascii,
        colour,
        physical: arguments.physical,
        by: arguments.by.unwrap_or_default(),
    };
    (style, lines)
}

/// Draws repeatedly. Ends with success when the process ends or the reader closes the output.
fn watch(reader: &Reader<'_>, device: u32, arguments: &Arguments, pause: Duration) -> Ended {
    loop {
        let picture = look(reader, device)?;
        let text = drawn(&picture, reader, arguments);
        // Overwrites each line and clears its rest, to avoid flicker.
        let text = match io::stdout().is_terminal() {
            true => format!("\x1b[H{}\x1b[J", text.replace('\n', "\x1b[K\n")),
            false => text,
        };
        if output::print(text)? == Audience::Gone {
            return Ok(Exit::Fine);
        }
        if reader.is_live() != Some(true) {
            return Ok(exit(reader, &picture));
        }
        if output::pause(pause) == Audience::Gone {
            return Ok(Exit::Fine);
        }
    }
}

fn write_page(
    reader: &Reader<'_>,
    picture: &Picture,
    by: Option<By>,
    path: &Path,
) -> Result<(), Failure> {
    let sites = reader.sites();
    let by = by.unwrap_or(if sites.is_empty() { By::Lifetime } else { By::Site });
    let by = by.to_possible_value().map(|value| value.get_name().to_owned());
    let timeline = reader.timeline(picture.device);
    let snapshot = reader.device(picture.device);
    let gauge = |gauge| snapshot.as_ref().map_or(0, |snapshot| snapshot.gauge(gauge));
    let missing = Missing::of(reader, picture);
    let mut notes: Vec<String> = missing.note(picture.sums.live).into_iter().collect();
    notes.extend(gaps::notes(picture, missing));
    let facts = json!({
        "process": json::process(reader),
        "device": picture.device,
        "name": snapshot.as_ref().map(|snapshot| snapshot.facts.name.clone()),
        "step": picture.step,
        "taken": Timestamp::now().to_string(),
        "limit": gauge(DeviceGauge::Limit),
        "sums": json::sums(picture),
        "notes": notes,
        "by": by,
        "conclusion": Conclusion::of(&from_record::state(reader, EVENTS), &[]),
    });
    let failed = |error: io::Error| {
        Failure::new(format_args!(
            "{}: {error}; name a file in a writable folder with free space",
            path.display()
        ))
    };
    let page = html::html(picture, &sites, &timeline.entries, facts).map_err(failed)?;
    if output::is_stdout(path) {
        return output::print(page).map(drop);
    }
    // A command line may hold secrets, so the file is for its owner only, as records are.
    file::replace(path, u64::MAX, file::PRIVATE, |out| out.write_all(page.as_bytes()))
        .map_err(failed)
}
