//! Programs that mark no steps.

use super::*;
use crate::EventKind;

/// Requests between two loads.
const WORK: u64 = 10;

/// A server of `loads` requests, each of which works and loads weights of 64 MiB; work and loads
/// alternate, unless all is loaded first. The timeline rises by `rise` in all.
fn server(loads: u64, alternate: bool, rise: u64) -> Made {
    let mut made = Made::at(0);
    let site = made.line(35, "adapter_of");
    let (mut events, mut time) = (Vec::new(), 1000);
    let mut malloc = |address| {
        time += 1000;
        let kind = EventKind::Malloc.name().into();
        events.push(Event { time_nanoseconds: time, kind, address, ..Event::default() });
    };
    for load in 0..loads {
        made.block(site, 0, 64 * MIB);
        // As the blocks of a segment follow each other.
        malloc(load * 64 * MIB);
        if alternate {
            (0..WORK).for_each(|_| malloc(1 << 50));
        }
    }
    if !alternate {
        (0..loads * WORK).for_each(|_| malloc(1 << 50));
    }
    let end = time;
    made.state.events.entries = events;
    let stretch = |part: u64| Stretch {
        time_nanoseconds: end / 16 * part,
        live_low_bytes: GIB + rise / 16 * part,
        live_high_bytes: 2 * GIB + rise / 16 * part,
        ..Stretch::default()
    };
    made.device.timeline = (1..=16).map(stretch).collect();
    made
}

#[test]
fn a_server_that_goes_on_loading_is_told_its_line() {
    let (cause, first) = server(20, true, 20 * 64 * MIB).first();
    assert_eq!(cause, Cause::Leak);
    assert_eq!(
        first,
        "train.py:35 in adapter_of keeps 20 blocks, more as it goes (no step is marked): 1.2 GiB \
         of the 1.2 GiB live (100%)"
    );
}

#[test]
fn a_loop_that_ends_within_a_stretch_of_the_timeline_is_told_its_line_too() {
    let fast = |freed: bool| {
        let mut made = server(20, true, 0);
        made.device.timeline.drain(1..);
        let malloc = std::mem::take(&mut made.state.events.entries);
        let mut before = None;
        for event in malloc {
            // Each load takes the place of an earlier one, or none does.
            let is_load = event.address < 1 << 50;
            let size = if is_load { 64 * MIB } else { MIB };
            let goes = if is_load { before.filter(|_| freed) } else { Some(MIB) };
            let kind = EventKind::Free.name().into();
            let free = goes.map(|size| Event { kind, size, address: 1 << 50, ..event.clone() });
            made.state.events.entries.push(Event { size, ..event });
            made.state.events.entries.extend(free);
            before = Some(64 * MIB);
        }
        made.first()
    };
    assert_eq!(fast(false).0, Cause::Leak);
    assert_eq!(fast(true).0, Cause::Nothing);
}

#[test]
fn a_cache_that_has_grown_for_longer_than_the_events_know_is_told_its_line() {
    let serves = |rise: u64, are_weights: bool| {
        let mut made = server(400, true, rise);
        let entries = &mut made.state.events.entries;
        entries.drain(..entries.len() - 20 * (1 + WORK as usize));
        for event in entries.iter_mut().filter(|event| event.address < 1 << 50) {
            event.size = 64 * MIB;
        }
        if are_weights {
            made.blocks.iter_mut().for_each(|block| block.3 = 3);
        }
        made.first()
    };
    let (cause, first) = serves(400 * 64 * MIB, false);
    assert_eq!(cause, Cause::Leak, "{first}");
    assert!(first.contains("keeps 400 blocks, more as it goes"), "{first}");
    // It has risen long ago; or the line made weights, and the events have small results in their
    // slabs.
    assert_eq!(serves(20 * 64 * MIB, false).0, Cause::Nothing);
    assert_eq!(serves(400 * 64 * MIB, true).0, Cause::Nothing);
}

#[test]
fn weights_loaded_before_the_work_are_no_growth() {
    let (cause, first) = server(20, false, 20 * 64 * MIB).first();
    assert_eq!(cause, Cause::Nothing, "{first}");
    assert!(first.starts_with("No step is marked, so growth of a line is not known"), "{first}");
}

#[test]
fn a_full_cache_whose_memory_is_level_is_no_growth() {
    let (cause, first) = server(20, true, 0).first();
    assert_eq!(cause, Cause::Nothing, "{first}");
}

#[test]
fn a_training_that_marks_no_step_yet_is_none() {
    let mut made = server(20, true, 20 * 64 * MIB);
    made.trains(&[]);
    assert_eq!(made.first().0, Cause::Nothing);
}

#[test]
fn requests_under_way_are_no_growth_once_as_much_has_come_and_gone() {
    let bursts = |goes: bool| {
        let mut made = server(20, true, 20 * 64 * MIB);
        let stretches = &mut made.device.timeline;
        for stretch in stretches.iter_mut() {
            stretch.live_low_bytes -= GIB;
            stretch.live_high_bytes = stretch.live_low_bytes + MIB;
        }
        if goes {
            stretches[2].live_high_bytes = 20 * 64 * MIB;
        }
        made.first()
    };
    assert_eq!(bursts(false).0, Cause::Leak);
    assert_eq!(bursts(true).0, Cause::Nothing);
}

#[test]
fn what_loading_needed_for_a_moment_is_no_request_that_came_and_went() {
    let mut made = server(20, true, 20 * 64 * MIB);
    let weights = made.line(5, "load");
    made.block(weights, 0, GIB / 2);
    made.blocks.last_mut().expect("a block").3 = 3;
    let stretches = &mut made.device.timeline;
    stretches.iter_mut().for_each(|one| one.live_high_bytes = one.live_low_bytes + MIB);
    (stretches[0].live_low_bytes, stretches[0].live_high_bytes) = (0, 3 * GIB);
    stretches[1].live_high_bytes = 3 * GIB;
    let (cause, first) = made.first();
    assert_eq!(cause, Cause::Leak, "{first}");
}

#[test]
fn what_was_freed_since_a_request_was_refused_is_added_to_what_is_live_now() {
    let mut made = Made::at(0);
    let (weights, scores) = (made.line(3, "load"), made.line(21, "attention"));
    made.block(weights, 0, 128 * MIB);
    let event = |kind: EventKind, size| Event {
        kind: kind.name().into(),
        size,
        site: scores,
        ..Event::default()
    };
    made.device.total_bytes = 2 * GIB;
    made.state.events.entries =
        vec![event(EventKind::OutOfMemory, 971 * MIB), event(EventKind::Free, 1100 * MIB)];
    let (cause, first) = made.first();
    assert_eq!(cause, Cause::LargeRequest);
    assert!(
        first.ends_with("971 MiB at once, with 1.2 GiB (128 MiB now) live of 2 GiB"),
        "{first}"
    );
}

#[test]
fn a_server_that_ran_out_of_memory_and_went_on_says_so() {
    let mut made = Made::at(0);
    let weights = made.line(3, "load");
    made.block(weights, 0, 64 * MIB);
    made.device.gauges.insert("out_of_memories".to_owned(), 22);
    assert!(made.first().1.ends_with("; 22 times it ran out of memory, and went on"));
}

/// Thirty weights of 64 MiB; then forty batches, each of which works, leaves a block of 1 KiB in a
/// slab of the weights', and features of 32 MiB if there are any. `before`: sizes that came and
/// went before the batches; `temporary`: what does in each.
fn batches(has_features: bool, before: &[u64], temporary: u64) -> Conclusion {
    let mut made = Made::at(0);
    let (weights, features) = (made.line(4, "main"), made.line(9, "main"));
    made.sites[features.0 as usize - 1].no_grad = true;
    made.sites[features.0 as usize - 1].module = "model".into();
    let (mut at, mut events, mut lows) = (0, Vec::new(), Vec::new());
    let event = |kind: EventKind, address, size| Event {
        kind: kind.name().into(),
        address,
        size,
        ..Event::default()
    };
    let mut keep = |made: &mut Made, events: &mut Vec<Event>, site, bytes| {
        made.block(site, 0, bytes);
        events.push(event(EventKind::Malloc, at, bytes));
        at += bytes;
    };
    let free = 1 << 50;
    (0..30).for_each(|_| keep(&mut made, &mut events, weights, 64 * MIB));
    for kind in [EventKind::Malloc, EventKind::Free] {
        let sizes = (free..).zip(before);
        events.extend(sizes.map(|(address, &size)| event(kind, address, size)));
    }
    lows.push((made.device.live.all.bytes, temporary + before.iter().sum::<u64>()));
    for _ in 0..40 {
        for size in [vec![KIB; 10], vec![temporary]].concat() {
            events.push(event(EventKind::Malloc, free, size));
            events.push(event(EventKind::Free, free, size));
        }
        lows.push((made.device.live.all.bytes, temporary));
        keep(&mut made, &mut events, weights, KIB);
        if has_features {
            keep(&mut made, &mut events, features, 32 * MIB);
        }
    }
    for (number, event) in (1..).zip(&mut events) {
        event.time_nanoseconds = number;
    }
    let last = events.len() as u64;
    let stretches = lows.len() as u64;
    let stretch = |(number, (low, more)): (u64, (u64, u64))| Stretch {
        time_nanoseconds: 30 + (last - 30) * number / stretches,
        live_low_bytes: low,
        live_high_bytes: low + more,
        ..Stretch::default()
    };
    made.device.timeline = (1..).zip(lows).map(stretch).collect();
    made.state.events.entries = events;
    made.concludes()
}

const KIB: u64 = 1 << 10;

#[test]
fn small_results_in_the_slabs_of_weights_are_no_growth_of_the_line_that_made_the_weights() {
    let grows = batches(true, &[], MIB);
    assert_eq!(grows.cause, Cause::Leak, "{grows:?}");
    assert!(grows.lines[0].starts_with("train.py:9 in main keeps 40 blocks"), "{grows:?}");
    let level = batches(false, &[], MIB);
    assert_eq!(level.cause, Cause::Nothing, "{level:?}");
}

#[test]
fn temporaries_of_each_forward_are_no_earlier_pile_and_as_many_blocks_of_the_kept_size_are() {
    let grows = batches(true, &[], 1100 * MIB);
    assert_eq!(grows.cause, Cause::Leak, "{grows:?}");
    assert!(grows.lines[0].starts_with("train.py:9 in main keeps 40 blocks"), "{grows:?}");
    let again = batches(true, &[32 * MIB; 34], 0);
    assert_eq!(again.cause, Cause::Nothing, "{again:?}");
}

#[test]
fn a_model_that_is_made_again_while_the_first_lives_is_told() {
    let reloads = |work: usize, sizes: [u64; 5]| {
        let mut made = Made::at(0);
        let load = made.line(9, "load");
        let event = |kind: EventKind, address, size| Event {
            kind: kind.name().into(),
            address,
            size,
            site: load,
            ..Event::default()
        };
        let (mut events, mut address) = (Vec::new(), 0);
        let mut makes = |made: &mut Made, events: &mut Vec<Event>, sizes: &[u64]| {
            for &size in sizes {
                made.block(load, 0, size * MIB);
                made.blocks.last_mut().expect("a block").3 = 3;
                events.push(event(EventKind::Malloc, address, size * MIB));
                address += size * MIB;
            }
        };
        makes(&mut made, &mut events, &[100, 40, 60, 40, 60, 40, 60, 90]);
        (0..work).for_each(|_| events.push(event(EventKind::Malloc, 1 << 50, MIB)));
        makes(&mut made, &mut events, &sizes);
        made.device.total_bytes = 800 * MIB;
        events.push(event(EventKind::OutOfMemory, 0, 40 * MIB));
        made.state.events.entries = events;
        unfolded(&made.concludes())
    };
    let again = reloads(400, [100, 40, 60, 40, 60]);
    assert!(
        again.contains("300 MiB repeats weights that are live: a second copy of the model?"),
        "{again}"
    );
    assert!(again.contains("let go of the old one first"), "{again}");
    // The rest of the first, or other weights.
    let first = reloads(0, [100, 40, 60, 40, 60]);
    assert!(!first.contains("second copy"), "{first}");
    let other = reloads(400, [30, 50, 70, 30, 20]);
    assert!(!other.contains("second copy"), "{other}");
}
