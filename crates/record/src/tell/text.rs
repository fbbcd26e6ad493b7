//! The whole state as human-readable text.
#![deny(unsafe_code)]

use crate::dump::state::{Class, DeviceState, ProcessState, Segment, State, Sum};
use crate::held::{IDLE, LOST};
use crate::size::Bytes;
use crate::stream::{NO_STREAM, StreamNumber};
use crate::{brief, counted, plain};
use std::fmt::{self, Write};

/// Segments drawn, the longest first; events listed; characters of a drawing.
const MOST_SEGMENTS: usize = 64;
const MOST_EVENTS: usize = 64;
/// Rows of a table by steps: all of a timeline.
const MOST_STEPS: usize = 512;
/// Rows of the table by lines.
const MOST_LINES: usize = 256;
const MOST_WIDTH: usize = 64;
const LEAST_WIDTH: usize = 16;
/// Columns before a drawing, and the fewest of a line's name.
const BESIDE: usize = 41;
const LEAST_NAME: usize = 32;
/// Columns of the name of a part of the held bytes.
pub(super) const PART: usize = LOST.len();

/// The whole state as text, as a dump has it.
pub fn text(state: &State) -> String {
    fitting(state, usize::MAX)
}

/// The same, with drawings for a terminal of so many columns.
pub fn fitting(state: &State, columns: usize) -> String {
    let mut out = String::new();
    let cells = columns.saturating_sub(BESIDE).clamp(LEAST_WIDTH, MOST_WIDTH);
    // Writing to a String cannot fail.
    let _ = write(&mut out, state, cells as u64);
    out
}

fn write(out: &mut String, state: &State, cells: u64) -> fmt::Result {
    // As the exception prints it: torch's sentence, the conclusion, the rest.
    let concluded = state.conclusion.iter().flat_map(|conclusion| &conclusion.lines);
    let concluded: Vec<&str> = concluded.map(String::as_str).collect();
    let mut said = state.out_of_memory.iter().flat_map(|oom| oom.message.lines());
    let head = said.next();
    let rest = said.filter(|line| !concluded.contains(line));
    let mut lines = head.into_iter().chain(concluded.iter().copied()).chain(rest);
    lines.try_for_each(|line| writeln!(out, "{}", plain(line)))?;
    writeln!(out)?;
    let process = &state.process;
    about(out, process, &state.gruyere)?;
    if !process.configuration.is_empty() {
        writeln!(out, "GRUYERE_CONF={}", plain(&process.configuration))?;
    }
    if let Some(oom) = &state.out_of_memory {
        writeln!(
            out,
            "\nThe request: {} on device {}, stream {} (handle {:#x}), lifetime {}, step {}, \
             thread {:?}, context {}",
            Bytes(oom.asked_bytes),
            oom.device,
            StreamNumber(oom.stream),
            oom.stream_handle,
            oom.lifetime,
            oom.step,
            oom.thread,
            oom.context
        )?;
        writeln!(
            out,
            "\nThe reclaim ladder{:>21} {:>12} {:>10}   in total",
            "this time", "gained", "us"
        )?;
        for rung in &oom.ladder {
            let this = rung.this_time.unwrap_or_default();
            writeln!(
                out,
                "  {:<18} {:>18} {:>12} {:>10}   {}, {}, {} us",
                rung.name,
                if rung.this_time.is_some() {
                    counted(this.calls, "time")
                } else {
                    "not climbed".to_owned()
                },
                Bytes(this.bytes).to_string(),
                this.nanoseconds / 1000,
                counted(rung.all.calls, "time"),
                Bytes(rung.all.bytes),
                rung.all.nanoseconds / 1000
            )?;
        }
    }
    for device in &state.devices {
        of_device(out, state, device, cells)?;
    }
    events(out, state, MOST_EVENTS)
}

/// The heading: the process and its program.
pub(super) fn about(out: &mut String, process: &ProcessState, version: &str) -> fmt::Result {
    write!(out, "gruyere {}, pid {}", plain(version), process.pid)?;
    if let Some(rank) = process.rank {
        write!(out, ", rank {rank}")?;
    }
    writeln!(out, ", {}: {}", plain(&process.host), plain(&process.command))
}

pub(super) fn share(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { 100.0 * part as f64 / whole as f64 }
}

fn of_device(out: &mut String, state: &State, device: &DeviceState, cells: u64) -> fmt::Result {
    let held = &device.held;
    writeln!(out, "\ndevice {} ({}), step {}", device.device, plain(&device.name), device.step)?;
    for (name, bytes) in [
        ("total memory", device.total_bytes),
        ("limit", device.limit_bytes),
        ("held", held.reserved_bytes),
        ("held, peak", device.reserved_peak_bytes),
        ("live, peak", device.live_peak_bytes),
    ] {
        writeln!(out, "  {name:<PART$} {bytes:>14} B  {:>12}", Bytes(bytes).to_string())?;
    }
    let shares = &device.shares;
    let by = match shares.typical_request_bytes {
        0 => "of what is held".to_owned(),
        request => format!("what a request of {} does not fit into", Bytes(request)),
    };
    writeln!(
        out,
        "  {LOST:<PART$} {:>16} {:>14}  ({by})",
        format!("{:.2}%", shares.fragmentation * 100.0),
        Bytes(shares.lost_bytes).to_string()
    )?;
    writeln!(out, "  {IDLE:<PART$} {:>16} {:>14}", "", Bytes(shares.idle_bytes).to_string())?;
    if let Some(ratio) = shares.peak_ratio {
        writeln!(out, "  {:<PART$} {ratio:>16.4}", "peak ratio (held / live)")?;
    }
    writeln!(out, "\n  Where the held bytes are")?;
    for (name, bytes) in held.parts().into_iter().filter(|part| part.1 > 0) {
        let percent = share(bytes, held.reserved_bytes);
        writeln!(
            out,
            "  {name:<PART$} {bytes:>14} B  {:>12} {percent:>5.1}%",
            Bytes(bytes).to_string()
        )?;
    }
    let live = &device.live;
    writeln!(out, "\n  Live blocks{:>24} {:>14} {:>14}", "blocks", "bytes", "requested")?;
    let line = |out: &mut String, name: &str, sum: &Sum| {
        writeln!(
            out,
            "  {name:<26} {:>8} {:>14} {:>14} {:>5.1}%",
            sum.blocks,
            Bytes(sum.bytes).to_string(),
            Bytes(sum.requested_bytes).to_string(),
            share(sum.bytes, live.all.bytes)
        )
    };
    line(out, "all", &live.all)?;
    let sent = device.sent();
    if sent.blocks > 0 {
        line(out, "sent to other processes", &sent)?;
    }
    for (name, sum) in &live.lifetimes {
        line(out, &format!("lifetime {}", plain(name)), sum)?;
    }
    for Class { class, sum } in &live.sizes {
        line(out, &format!("up to {}", Bytes(*class)), sum)?;
    }
    for Class { class, sum } in live.steps.iter().take(16) {
        line(out, &format!("of step {class}"), sum)?;
    }
    let mut others = live.other_steps;
    live.steps.iter().skip(16).for_each(|class| others.add(class.sum));
    if others.blocks > 0 {
        line(out, "of other or unknown steps", &others)?;
    }
    for Class { class, sum } in &live.ages {
        line(out, &format!("up to {class} steps old"), sum)?;
    }
    for Class { class, sum } in &live.streams {
        let number = StreamNumber(u32::try_from(*class).unwrap_or(NO_STREAM));
        line(out, &format!("of stream {number}"), sum)?;
    }
    brief::lines(out, state, device, (cells as usize).max(LEAST_NAME), MOST_LINES)?;
    if !live.largest.is_empty() {
        writeln!(out, "\n  The largest live blocks")?;
    }
    for block in live.largest.iter().take(16) {
        let step = block.step.map_or("?".to_owned(), |step| step.to_string());
        writeln!(
            out,
            "  {:#014x} {:>14}  lifetime {}, step {step}, stream {}",
            block.address,
            Bytes(block.requested_bytes).to_string(),
            plain(&block.lifetime),
            StreamNumber(block.stream)
        )?;
    }
    brief::steps(out, device, MOST_STEPS)?;
    brief::peaks(out, device, MOST_STEPS)?;
    map(out, device, cells)
}

fn map(out: &mut String, device: &DeviceState, cells: u64) -> fmt::Result {
    writeln!(out, "\n  The map: # live, + partly, w waiting for streams, . free")?;
    let mut chosen: Vec<&Segment> = device.segments.iter().collect();
    chosen.sort_by_key(|segment| std::cmp::Reverse(segment.bytes));
    let left_out = chosen.len().saturating_sub(MOST_SEGMENTS);
    chosen.truncate(MOST_SEGMENTS);
    chosen.sort_by_key(|segment| segment.address);
    for segment in chosen {
        let holder = plain(&segment.holder);
        writeln!(
            out,
            "  {:#014x} {:>12} {holder:<10} {}",
            segment.address,
            Bytes(segment.bytes).to_string(),
            strip(segment, cells)
        )?;
    }
    if left_out > 0 {
        writeln!(out, "  and {}", counted(left_out as u64, "shorter segment"))?;
    }
    if device.merged_blocks > 0 {
        let are = if device.merged_blocks == 1 { "is" } else { "are" };
        let blocks = counted(device.merged_blocks, "small block");
        writeln!(out, "  {blocks} {are} merged with others of the same slab")?;
    }
    Ok(())
}

/// A segment in so many characters.
fn strip(segment: &Segment, cells: u64) -> String {
    let cells = cells.min(segment.bytes.div_ceil(512)).max(1);
    let mut filled = vec![[0u128; 3]; cells as usize];
    let bytes = u128::from(segment.bytes.max(1));
    let cell_at = |offset: u128| (offset * u128::from(cells) / bytes).min(u128::from(cells) - 1);
    let mut at = 0u128;
    for block in &segment.blocks {
        let end = at + u128::from(block.0);
        let mut from = at;
        for cell in cell_at(at)..=cell_at(end.saturating_sub(1)) {
            // The start of the next cell.
            let to = ((cell + 1) * bytes).div_ceil(u128::from(cells)).min(end);
            filled[cell as usize][block.1 as usize] += to.saturating_sub(from);
            from = to;
        }
        at = end;
    }
    let letter = |[free, live, pending]: [u128; 3]| match (free, live, pending) {
        (0, 0, 0) => ' ',
        (_, 0, 0) => '.',
        (0, _, 0) => '#',
        (_, live, pending) if pending > live => 'w',
        _ => '+',
    };
    filled.into_iter().map(letter).collect()
}

/// The latest `most` events; the device where there are several.
pub(super) fn events(out: &mut String, state: &State, most: usize) -> fmt::Result {
    let entries = &state.events.entries;
    // A call that waited for its lock is among the later ones, though it began before.
    let Some(last) = entries.iter().map(|event| event.time_nanoseconds).max() else {
        return Ok(());
    };
    writeln!(out, "\nThe last events, in ms before the last")?;
    for event in &entries[entries.len().saturating_sub(most)..] {
        let before = last.saturating_sub(event.time_nanoseconds) as f64 / 1e6;
        let device = match state.devices.len() {
            0 | 1 => String::new(),
            _ => format!(" device {}", event.device),
        };
        let size = match event.kind.as_str() {
            "step" => event.size.to_string(),
            "wait" => format!("{} us", event.size / 1000),
            _ => Bytes(event.size).to_string(),
        };
        writeln!(
            out,
            "  -{before:<10.3} {:<13} {:#014x} {size:>11} stream {} {}{device}",
            plain(&event.kind),
            event.address,
            StreamNumber(event.stream),
            plain(&event.lifetime)
        )?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SiteId;
    use crate::dump::state::{Block, BlockKind};

    #[test]
    fn a_strip_shows_what_lies_where() {
        let block = |bytes, kind| Block(bytes, kind, 0, 0, 0, None, SiteId::NONE);
        let mut segment = Segment { bytes: 64 << 20, ..Segment::default() };
        segment.blocks = vec![
            block(16 << 20, BlockKind::Live),
            block(16 << 20, BlockKind::Free),
            block(16 << 20, BlockKind::Pending),
            block(15 << 20, BlockKind::Live),
            block(1 << 19, BlockKind::Free),
            block(1 << 19, BlockKind::Live),
        ];
        let expected =
            format!("{}{}{}{}+", "#".repeat(16), ".".repeat(16), "w".repeat(16), "#".repeat(15));
        assert_eq!(strip(&segment, 64), expected);
        assert_eq!(strip(&Segment::default(), 64), " ");
        assert_eq!(strip(&segment, 4), "#.w+");
    }
}
