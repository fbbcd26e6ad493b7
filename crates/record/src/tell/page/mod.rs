//! A page to share: the conclusion about a process's memory, its course by line of the program, and
//! a map, as one HTML file that opens offline.
//!
//! It is made from a [`State`] alone, so an out-of-memory writes the same page that
//! `gruyere post --html` writes from the record. All of the program's text goes through JSON, with
//! `<` escaped, and the page sets it as text only. The size is bounded: tables by their rows, the
//! source by excerpts, the map by its cells, the time by a deadline.
#![deny(unsafe_code)]

mod course;
mod latest;
mod lines;
mod map;
mod source;

use std::io::{self, Write};
use std::time::Instant;

use serde_json::{Value, json};

use crate::conclusion::device_of;
use crate::dump::state::{DeviceState, State};
use crate::run::shown_command;
use crate::{cut, plain};
use course::Course;
use lines::Lines;
use map::Map;

/// The style of all pages, Python's too (`gruyere/_page`).
pub const STYLE: &str = include_str!("../../../../../python_loader/gruyere/_page/style.css");
/// The drawing functions of the pages.
pub const SHARED: &str = include_str!("../../../../../python_loader/gruyere/_page/shared.js");
const PAGE: &str = include_str!("page.html");
const OWN_STYLE: &str = include_str!("page.css");
const SCRIPT: &str = concat!(include_str!("map.js"), include_str!("page.js"));

/// The longest page written, bytes. The fullest state has some 400 KiB.
pub const MOST_BYTES: u64 = 4 << 20;

/// Characters of the program's name.
const MOST_NAME: usize = 80;

/// Facts beside the state.
#[derive(Clone, Debug, Default)]
pub struct About {
    /// How the process ended, or the reason for the page, in a sentence or two.
    pub said: String,
    /// Whether the process ran out of memory, even if the state has no refusal.
    pub ran_out: bool,
    /// The device of the page; if unset, that of the refused request, or the one with most held.
    pub device: Option<u32>,
    /// The time to give up.
    pub deadline: Option<Instant>,
}

/// Writes the page.
///
/// # Errors
/// The error of `out`; [`io::ErrorKind::TimedOut`] at the deadline; a state without a device.
pub fn write(out: &mut dyn Write, state: &State, about: &About) -> io::Result<()> {
    let in_time = || match about.deadline {
        Some(deadline) if Instant::now() >= deadline => {
            Err(io::Error::from(io::ErrorKind::TimedOut))
        }
        _ => Ok(()),
    };
    let device = device_of(state, about.device)
        .ok_or_else(|| io::Error::other("no device memory is known of it"))?;
    let lines = Lines::of(state, device);
    in_time()?;
    let course = Course::of(state, device, &lines);
    in_time()?;
    let latest = latest::course(state, device, &lines);
    in_time()?;
    let map = Map::of(device, &lines);
    in_time()?;
    let told = lines.told(state, device, &in_time)?;
    let process = &state.process;
    let refused = state.out_of_memory.as_ref();
    let facts = json!({
        "command": process.command,
        "program": program(&process.command),
        "ran_out": about.ran_out || refused.is_some(),
        "conclusion": state.conclusion,
        "said": about.said,
        "process": {
            "pid": process.pid, "rank": process.rank, "host": process.host,
            "gruyere": state.gruyere, "configuration": process.configuration,
        },
        "device": facts_of(device),
        "others": others(state, device),
        "refused": refused.map(|refused| json!({
            "asked": refused.asked_bytes, "free": refused.cause.free_bytes,
            "others": refused.cause.others_bytes, "count": refused.count,
            "thread": refused.thread,
        })),
        "lines": told,
        "other_lines": lines.others(),
        "knows_lines": !state.sites.is_empty(),
        "has_lines": process.uses.is_none_or(|uses| uses.python),
        "course": course,
        "latest": latest,
        "map": map,
    });
    // The one character that could end the script element.
    let facts = facts.to_string().replace('<', "\\u003c");
    in_time()?;
    let filled = fill(
        PAGE,
        &[
            ("/*STYLE*/", STYLE),
            ("/*OWN*/", OWN_STYLE),
            ("/*FACTS*/", &facts),
            ("/*SHARED*/", SHARED),
            ("/*SCRIPT*/", SCRIPT),
        ],
    );
    out.write_all(filled.as_bytes())
}

/// Inserts the parts into the page, each at its mark, in order; inserted text is not searched for
/// marks.
pub fn fill(page: &str, parts: &[(&str, &str)]) -> String {
    let mut out =
        String::with_capacity(page.len() + parts.iter().map(|part| part.1.len()).sum::<usize>());
    let mut rest = page;
    for (mark, text) in parts {
        let Some((before, after)) = rest.split_once(mark) else { continue };
        out.push_str(before);
        out.push_str(text);
        rest = after;
    }
    out.push_str(rest);
    out
}

/// The program's name: its script without the interpreter, its options and the path; else the first
/// words of the command.
fn program(command: &str) -> String {
    let command = shown_command(&plain(command));
    let mut words = command.split(' ');
    let first = words.next().unwrap_or_default();
    let script = match first.starts_with("python") {
        true => words.find(|word| word.ends_with(".py")),
        false => None,
    };
    let name = script.and_then(|script| script.rsplit('/').next());
    cut(name.unwrap_or(&command), MOST_NAME)
}

fn facts_of(device: &DeviceState) -> Value {
    let parts = device.held.parts();
    let parts: Vec<Value> = parts
        .iter()
        .filter(|part| part.1 > 0)
        .map(|(name, bytes)| json!({ "name": name, "bytes": bytes }))
        .collect();
    json!({
        "number": device.device, "name": device.name, "step": device.step,
        "total": device.total_bytes, "limit": device.limit_bytes,
        "held": device.held.reserved_bytes, "held_peak": device.reserved_peak_bytes,
        "live": device.live.all.bytes, "live_peak": device.live_peak_bytes,
        "blocks": device.live.all.blocks, "lost": device.shares.lost_bytes,
        "idle": device.shares.idle_bytes, "parts": parts,
    })
}

/// The other devices, a line each.
fn others(state: &State, device: &DeviceState) -> Vec<Value> {
    let others = state.devices.iter().filter(|other| other.device != device.device);
    let told = |other: &DeviceState| {
        json!({
            "number": other.device, "name": other.name, "held": other.held.reserved_bytes,
            "live": other.live.all.bytes,
        })
    };
    others.take(16).map(told).collect()
}

#[cfg(test)]
mod tests;
