//! Growth on timelines of any width.

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;

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

#[test]
fn growth_since_the_first_step_is_no_full_queue_where_steps_are_shorter_than_looks() {
    let concludes = |first: u32, timeline: &[(u64, u64)]| {
        let mut made = Made::at(16);
        let kept = made.line(24, "remember");
        (first..16).for_each(|step| made.block(kept, step, 64 * MIB));
        let live = made.device.live.all.bytes;
        let stretch = |&(step, low): &(u64, u64)| Stretch {
            step,
            live_low_bytes: low,
            live_high_bytes: live,
            ..Stretch::default()
        };
        made.device.timeline = timeline.iter().map(stretch).collect();
        made.device.total_bytes = live;
        made.refused(64 * MIB, 0, kept);
        made.concludes().lines.join("\n")
    };
    for timeline in [&[(0, 0)][..], &[(0, 0), (15, 700 * MIB)]] {
        let said = concludes(0, timeline);
        assert!(said.contains("remember keeps 64 MiB a step since step 0"), "{said}");
    }
    // Those of the first steps have left it.
    let said = concludes(4, &[(0, 0), (15, 700 * MIB)]);
    assert!(said.contains("is level: a queue that is full"), "{said}");
}

/// The looks at a program of equal steps, `looks` per step: `kept` live at the end of a step, and
/// within it up to `activations` more.
fn looks_at(
    steps: u64,
    kept: impl Fn(u64) -> u64,
    activations: u64,
    looks: u64,
) -> impl Iterator<Item = Sample> {
    (0..steps * looks).map(move |look| {
        let (step, within) = (look / looks, look % looks);
        // Up through the forward, down through the backward; kept memory comes last.
        let live = kept(step) + activations * within.min(looks - 1 - within) * 2 / looks;
        Sample { step, live_low: live, live_high: live, ..Sample::default() }
    })
}

/// Looks in cells of so many each.
fn in_cells(
    mut looks: impl Iterator<Item = Sample>,
    widths: impl IntoIterator<Item = u64>,
) -> Vec<Stretch> {
    let cells = widths.into_iter().map_while(|wide| {
        let sample = looks.by_ref().take(wide as usize).reduce(Sample::and)?;
        Some(TimelineEntry { sample, ..TimelineEntry::default() })
    });
    timeline(&cells.collect::<Vec<_>>())
}

/// The same, in cells of so many looks, the first of `first`. The program ended so many looks
/// before the end of the last step.
fn seen_in_cells(
    steps: u64,
    kept: impl Fn(u64) -> u64,
    activations: u64,
    [looks, wide, first, missing]: [u64; 4],
) -> Vec<Stretch> {
    let seen = looks_at(steps, kept, activations, looks).take((steps * looks - missing) as usize);
    in_cells(seen, std::iter::once(first).chain(std::iter::repeat(wide)))
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

/// A program, and the cells in which it was seen.
#[derive(Clone, Debug)]
struct Uneven {
    steps: u64,
    looks: u64,
    activations: u64,
    /// Looks before the end of the last step at which it ended.
    missing: u64,
    /// Of cells, in looks.
    widths: Vec<u64>,
}

fn uneven() -> impl Strategy<Value = Uneven> {
    let steps = select(vec![16, 24, 40, 100]);
    let looks = select(vec![1, 3, 10, 30]);
    let activations = select(vec![0, 30 * MIB, 300 * MIB, 4 * GIB]);
    let program = (steps, looks, activations, 1..=u64::MAX);
    program.prop_flat_map(|(steps, looks, activations, widest)| {
        let total = steps * looks;
        let widest = 1 + widest % (total / 3);
        let widths = vec(1..=widest, total as usize);
        (0..looks, widths).prop_map(move |(missing, widths)| Uneven {
            steps,
            looks,
            activations,
            missing,
            widths,
        })
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    /// A machine that halts a program now and then leaves cells of a moment beside cells of many
    /// steps.
    #[test]
    fn leaks_and_full_queues_are_told_apart_on_timelines_of_uneven_cells(seen in uneven()) {
        let Uneven { steps, looks, activations, missing, ref widths } = seen;
        let concluded = |since: u64, kept: &dyn Fn(u64) -> u64| {
            let mut made = with_weights(steps - 1);
            let line = made.line(42, "step");
            (since..steps - 1).for_each(|step| made.block(line, step as u32, 10 * MIB));
            let seen = looks_at(steps, kept, activations, looks);
            let seen = seen.take((steps * looks - missing) as usize);
            made.device.timeline = in_cells(seen, widths.iter().copied());
            made.concludes().cause
        };
        let leak = concluded(1, &|step| GIB + 10 * MIB * step);
        prop_assert_eq!(leak, Cause::Leak);
        let most = steps / 3;
        let queue = concluded(steps - 1 - most, &|step| GIB + 10 * MIB * step.min(most));
        prop_assert_eq!(queue, Cause::Nothing, "a queue");
    }
}

/// What a run on a busy machine left: 64 MiB a step since the fourth, in five stretches.
#[test]
fn a_leak_is_told_where_the_last_stretch_but_one_began_many_steps_before() {
    let mut made = Made::at(24);
    let line = made.line(12, "remember");
    (3..24).for_each(|step| made.block(line, step, 64 * MIB));
    let kept = |step: u64| 48 * MIB + 64 * MIB * step.saturating_sub(2);
    let steps = [(0, 0), (0, 1), (1, 11), (11, 21), (21, 23)];
    let stretch = |(first, step)| Stretch {
        step,
        live_low_bytes: kept(first),
        live_high_bytes: kept(step) + 64 * MIB,
        ..Stretch::default()
    };
    made.device.timeline = steps.map(stretch).to_vec();
    assert_eq!(made.concludes().cause, Cause::Leak);
}
