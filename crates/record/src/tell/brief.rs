//! A short, human-readable form of a state: where the bytes are, the lines that hold them, similar
//! steps in one row. [`super::text`] has the whole state.
#![deny(unsafe_code)]

use crate::dump::alike::{self, Run};
use crate::dump::state::{DeviceState, State};
use crate::sites::{By, Usage};
use crate::size::Bytes;
use crate::text::{PART, about, events};
use crate::{conclusion, counted, cut, plain};
use std::fmt::{self, Write};

/// Rows of each table.
const MOST_LINES: usize = 6;
const MOST_RUNS: usize = 5;
const MOST_EVENTS: usize = 4;
/// Columns of a line's name, and of the numbers beside it.
const NAME: usize = 48;
const NUMBERS: usize = 32;

/// The state in brief, with tables for a terminal of so many columns.
pub fn brief(state: &State, columns: usize) -> String {
    let mut out = String::new();
    // Writing to a String cannot fail.
    let _ = write(&mut out, state, columns.saturating_sub(NUMBERS).max(NUMBERS));
    out
}

/// `most`: the most columns of a line's name.
fn write(out: &mut String, state: &State, most: usize) -> fmt::Result {
    about(out, &state.process, &state.gruyere)?;
    // Each rank of a job sees the GPUs of all ranks of its host.
    let is_any_used = state.devices.iter().any(DeviceState::is_used);
    for device in state.devices.iter().filter(|device| device.is_used() || !is_any_used) {
        of_device(out, state, device, most)?;
    }
    Ok(())
}

/// The few last events.
pub fn last_events(state: &State) -> String {
    let mut out = String::new();
    let _ = events(&mut out, state, MOST_EVENTS);
    out
}

fn of_device(out: &mut String, state: &State, device: &DeviceState, most: usize) -> fmt::Result {
    let held = &device.held;
    writeln!(
        out,
        "\ndevice {} ({}, {}), step {}: {} held ({} at the peak)",
        device.device,
        plain(&device.name),
        Bytes(device.total_bytes),
        device.step,
        Bytes(held.reserved_bytes),
        Bytes(device.reserved_peak_bytes)
    )?;
    for (name, bytes) in held.parts().into_iter().filter(|part| part.1 > 0) {
        let percent = crate::text::share(bytes, held.reserved_bytes);
        writeln!(out, "  {name:<PART$} {:>12} {percent:>5.1}%", Bytes(bytes).to_string())?;
    }
    lines(out, state, device, most, MOST_LINES)?;
    steps(out, device, MOST_RUNS)?;
    peaks(out, device, MOST_RUNS)
}

/// The lines that hold most of the live bytes, in at most `rows` rows; `most`: columns of a name.
pub(super) fn lines(
    out: &mut String,
    state: &State,
    device: &DeviceState,
    most: usize,
    rows: usize,
) -> fmt::Result {
    let found = conclusion::holders(state, device, By::Line);
    if state.sites.is_empty() || found.is_empty() {
        return Ok(());
    }
    let shown = found.iter().take(rows);
    let longest = shown.map(|holder| holder.name.chars().count()).max().unwrap_or(0);
    let (head, name) = ("Live blocks by line", longest.max(NAME).min(most));
    writeln!(out, "\n  {head:<name$} {:>8} {:>12}", "blocks", "bytes")?;
    let row = |out: &mut String, said: &str, blocks: u64, bytes: u64| {
        writeln!(
            out,
            "  {:<name$} {blocks:>8} {:>12} {:>5.1}%",
            cut(said, name),
            Bytes(bytes).to_string(),
            crate::text::share(bytes, device.live.all.bytes)
        )
    };
    for holder in found.iter().take(rows) {
        row(out, &holder.name, holder.usage.blocks, holder.usage.bytes)?;
    }
    let others = found.get(rows..).unwrap_or_default();
    if !others.is_empty() {
        let sum = |of: fn(&Usage) -> u64| others.iter().map(|other| of(&other.usage)).sum();
        let name = counted(others.len() as u64, "other line");
        row(out, &name, sum(|usage| usage.blocks), sum(|usage| usage.bytes))?;
    }
    Ok(())
}

/// The live blocks by the steps of their allocation, in at most `most` rows.
pub(super) fn steps(out: &mut String, device: &DeviceState, most: usize) -> fmt::Result {
    let rows: Vec<(u64, u64)> =
        device.live_by_step().into_iter().map(|(step, sum)| (step, sum.bytes)).collect();
    let runs = alike::runs(&rows);
    if !runs.is_empty() {
        writeln!(out, "\n  Live blocks by the step that allocated them")?;
    }
    let told = |run: &Run| {
        let of_run = rows.iter().filter(|row| (run.first..=run.last).contains(&row.0));
        let sum: u64 = of_run.map(|row| row.1).sum();
        match (run.rows, run.is_level()) {
            (1, _) => Bytes(sum).to_string(),
            (rows, true) => format!("alike, {} each, {} in all", Bytes(sum / rows), Bytes(sum)),
            _ => format!("from {} to {}, {} in all", Bytes(run.from), Bytes(run.to), Bytes(sum)),
        }
    };
    table(out, &runs, most, told)
}

/// The peaks of the run, in at most `most` rows.
pub(super) fn peaks(out: &mut String, device: &DeviceState, most: usize) -> fmt::Result {
    let rows: Vec<(u64, u64)> = device.peaks_by_step().into_iter().collect();
    let runs = alike::runs(&rows);
    if !runs.is_empty() {
        writeln!(out, "\n  Live bytes at the peak of each step")?;
    }
    let told = |run: &Run| match (run.rows, run.is_level()) {
        (1, _) => Bytes(run.from).to_string(),
        (_, true) => format!("alike, {} at the peak of each", Bytes(run.from.max(run.to))),
        _ => format!("from {} to {}", Bytes(run.from), Bytes(run.to)),
    };
    table(out, &runs, most, told)
}

/// The first run and the last ones, `most` in all: those in between are seldom of interest.
fn table(
    out: &mut String,
    runs: &[Run],
    most: usize,
    told: impl Fn(&Run) -> String,
) -> fmt::Result {
    let left_out = runs.len().saturating_sub(most);
    let more = if most == MOST_RUNS { ": --full" } else { "" };
    for (number, run) in runs.iter().enumerate() {
        if left_out > 1 && number == 1 {
            let steps = (runs[1].first, runs[left_out].last);
            writeln!(
                out,
                "  {:<29} {left_out} more rows{more}",
                format!("{} to {}", steps.0, steps.1)
            )?;
        }
        if number == 0 || number > left_out || left_out == 1 {
            writeln!(out, "  {:<29} {}", run.steps(), told(run))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SiteId;
    use crate::dump::state::{Block, BlockKind, Segment, Stretch};
    use crate::sites::{Frame, Site, Sites};

    #[test]
    fn eight_hundred_steps_are_a_few_rows() {
        let mib = 1 << 20;
        let block = |step| Block(mib, BlockKind::Live, mib, 0, 0, Some(step), SiteId::NONE);
        let blocks: Vec<Block> = (4..=846).map(block).collect();
        let stretch = |step| Stretch { step, live_high_bytes: 1200 * mib, ..Stretch::default() };
        let device = DeviceState {
            step: 846,
            segments: vec![Segment { blocks, ..Segment::default() }],
            timeline: (4..=846).map(stretch).collect(),
            ..DeviceState::default()
        };
        let page = brief(&State { devices: vec![device], ..State::default() }, 80);
        assert!(
            page.contains("steps 4 to 846                alike, 1.00 MiB each, 843.00 MiB in all")
        );
        assert!(page.contains("steps 4 to 846                alike, 1.17 GiB at the peak of each"));
        assert!(page.lines().count() < 12, "{page}");
    }

    #[test]
    fn the_peak_of_a_step_is_that_between_its_looks_too() {
        let mib = 1 << 20;
        // Steps that grow by 14 MiB. In each second one nothing is taken from the driver, so that
        // its one look is at its end, where 130 MiB less are live.
        let stretch = |step: u64| Stretch {
            step,
            live_high_bytes: (600 + 14 * step - if step.is_multiple_of(2) { 130 } else { 0 }) * mib,
            in_use_high_bytes: (602 + 14 * step) * mib,
            ..Stretch::default()
        };
        let timeline = (1..=20).map(stretch).collect();
        let device = DeviceState { timeline, live_peak_bytes: 880 * mib, ..DeviceState::default() };
        let page = brief(&State { devices: vec![device.clone()], ..State::default() }, 80);
        assert!(page.contains("steps 1 to 20                 from 616.00 MiB to 880.00 MiB"));
        assert_eq!(device.peaks_by_step()[&4], 658 * mib);
    }

    #[test]
    fn a_device_that_a_rank_only_sees_is_left_out() {
        let seen = DeviceState { name: "of rank 0".into(), ..DeviceState::default() };
        let used = DeviceState { device: 1, live_peak_bytes: 1 << 20, ..DeviceState::default() };
        let page = |devices: &[&DeviceState]| {
            let devices = devices.iter().map(|&device| device.clone()).collect();
            brief(&State { devices, ..State::default() }, 80)
        };
        let both = page(&[&seen, &used]);
        assert!(both.contains("device 1") && !both.contains("of rank 0"), "{both}");
        assert!(page(&[&seen]).contains("of rank 0"), "where none is used, all are told");
    }

    /// 100 steps whose peaks go up and down.
    fn up_and_down() -> State {
        let high = |step: u64| if step.is_multiple_of(2) { 1 << 30 } else { 1 << 20 };
        let stretch = |step| Stretch { step, live_high_bytes: high(step), ..Stretch::default() };
        let timeline = (0..100).map(stretch).collect();
        let device = DeviceState { timeline, ..DeviceState::default() };
        State { devices: vec![device], ..State::default() }
    }

    #[test]
    fn all_rows_that_a_table_leaves_out_are_in_the_whole_text() {
        let state = up_and_down();
        assert!(brief(&state, 80).contains("95 more rows: --full"));
        let whole = crate::text::fitting(&state, 80);
        for step in 0..100 {
            assert!(whole.contains(&format!("\n  step {step:<3} ")), "{step}: {whole}");
        }
    }

    #[test]
    fn the_whole_text_has_every_line_that_holds_memory() {
        let mib = 1 << 20;
        let site = |line| Site {
            frames: vec![Frame { file: "/w/train.py".into(), line, ..Frame::default() }],
            ..Site::default()
        };
        let block = |n: u32| Block(mib, BlockKind::Live, mib, 0, 0, Some(0), SiteId(n));
        let blocks = (1..=20).map(block).collect();
        let segments = vec![Segment { bytes: 20 * mib, blocks, ..Segment::default() }];
        let device = DeviceState { segments, ..DeviceState::default() };
        let sites = Sites::new((1..=20).map(site));
        let state = State { devices: vec![device], sites, ..State::default() };
        assert!(brief(&state, 80).contains("\n  14 other lines "));
        let whole = crate::text::fitting(&state, 80);
        for line in 1..=20 {
            let row = format!("\n  train.py:{line} ");
            assert!(whole.contains(&row), "{line}: {whole}");
        }
    }

    #[test]
    fn a_run_that_goes_up_and_down_is_cut_and_says_where_all_of_it_is() {
        let page = brief(&up_and_down(), 80);
        assert!(page.contains("95 more rows: --full") && page.contains("step 99 "), "{page}");
        assert!(page.lines().count() < 14, "{page}");
    }
}
