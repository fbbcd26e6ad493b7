//! Growth on timelines of any width.

use super::*;

#[test]
fn a_step_under_way_is_no_growth_where_only_its_own_stretch_is_left_of_the_last_steps() {
    let mut made = with_weights(120);
    let queue = made.line(24, "collect");
    (97..120).for_each(|step| made.block(queue, step, 16 * MIB));
    let level = GIB + 23 * 16 * MIB;
    made.lows(|_| level);
    made.device.timeline.retain(|stretch| stretch.step < 118);
    let (live_low_bytes, live_high_bytes) = (2 * GIB, 3 * GIB);
    let last = Stretch { step: 120, live_low_bytes, live_high_bytes, ..Stretch::default() };
    made.device.timeline.push(last);
    assert_eq!(made.concludes().cause, Cause::Nothing);
}

#[test]
fn a_larger_step_under_way_is_no_growth_where_each_stretch_is_of_several_steps() {
    [false, true].into_iter().for_each(a_larger_step_is_no_growth);
}

/// `without_the_last`: the running step shares its stretch with those just before.
fn a_larger_step_is_no_growth(without_the_last: bool) {
    let mut made = with_weights(120);
    let queue = made.line(33, "collect");
    (97..120).for_each(|step| made.block(queue, step, 16 * MIB));
    made.lows(|_| GIB);
    made.device
        .timeline
        .retain(|stretch| [97, 101, 105, 108, 111, 114, 118].contains(&stretch.step));
    let (live_low_bytes, live_high_bytes) = (GIB, 3 * GIB);
    let last = Stretch { step: 120, live_low_bytes, live_high_bytes, ..Stretch::default() };
    made.device.timeline.push(last);
    if without_the_last {
        made.device.timeline.retain(|stretch| stretch.step != 118);
    }
    assert_eq!(made.concludes().cause, Cause::Nothing);
}

/// A program of equal steps: `kept` live at the end of a step, and within it up to `activations`
/// more; `looks` per step. Cells of so many looks, the first of `first`. It ended so many looks
/// before the end of the last step.
fn seen_in_cells(
    steps: u64,
    kept: impl Fn(u64) -> u64,
    activations: u64,
    [looks, wide, first, missing]: [u64; 4],
) -> Vec<Stretch> {
    let look = |look: u64| {
        let (step, within) = (look / looks, look % looks);
        // Up through the forward, down through the backward; kept memory comes last.
        let live = kept(step) + activations * within.min(looks - 1 - within) * 2 / looks;
        Sample { step, live_low: live, live_high: live, ..Sample::default() }
    };
    let samples: Vec<Sample> = (0..steps * looks - missing).map(look).collect();
    let (head, rest) = samples.split_at(first as usize);
    let cells = std::iter::once(head).chain(rest.chunks(wide as usize)).filter_map(|cell| {
        let sample = cell.iter().copied().reduce(Sample::and)?;
        Some(TimelineEntry { sample, ..TimelineEntry::default() })
    });
    timeline(&cells.collect::<Vec<_>>())
}

/// Programs of so many steps, each with so many looks, in cells of so many looks: many steps in a
/// cell, or many cells in a step. At least three cells: the rest may be of earlier steps.
fn widths() -> impl Iterator<Item = (u64, u64, u64)> {
    let programs = [20, 40, 100, 1000]
        .into_iter()
        .flat_map(|steps| [1, 3, 10, 30].map(move |looks| (steps, looks)));
    programs.flat_map(|(steps, looks)| {
        let widths = [1, 2, 5, 7, 10, 23, 50, 100, 300, 1000].into_iter();
        let fits = move |wide: &u64| wide * 3 <= steps * looks;
        widths.filter(fits).map(move |wide| (steps, looks, wide))
    })
}

#[test]
fn leaks_and_full_queues_are_told_apart_on_timelines_of_any_width() {
    for (steps, looks, wide) in widths() {
        let mut made = Vec::new();
        for first in [1, wide.div_ceil(3), wide.div_ceil(2), wide] {
            for activations in [0, 300 * MIB, 4 * GIB] {
                made.extend([0, looks / 2, looks - 1].map(|missing| (first, activations, missing)));
            }
        }
        for (first, activations, missing) in made {
            let case = format!(
                "{steps} steps of {looks} looks, cells of {wide} looks, the first of {first}, \
                 {activations} B of activations, {missing} looks missing"
            );
            let concluded = |since: u64, kept: &dyn Fn(u64) -> u64| {
                let mut made = with_weights(steps - 1);
                let line = made.line(42, "step");
                (since..steps - 1).for_each(|step| made.block(line, step as u32, 10 * MIB));
                let cells = [looks, wide, first, missing];
                made.device.timeline = seen_in_cells(steps, kept, activations, cells);
                made.concludes().cause
            };
            let leak = concluded(1, &|step| GIB + 10 * MIB * step);
            assert_eq!(leak, Cause::Leak, "a leak: {case}");
            let most = steps / 3;
            let queue = concluded(steps - 1 - most, &|step| GIB + 10 * MIB * step.min(most));
            assert_eq!(queue, Cause::Nothing, "a queue: {case}");
        }
    }
}
