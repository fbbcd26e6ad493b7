use super::*;
use crate::EventKind;
use crate::conclusion::{Cause, Conclusion};
use crate::dump::state::{Block, BlockKind, Event, Segment, Stretch};
use crate::sites::{Frame, Site, SiteId, Sites};

const MIB: u64 = 1 << 20;
const SECOND: u64 = 1_000_000_000;

/// Three steps of a second each, of which line 10 has left 100 MiB and line 20 nothing, and a
/// fourth in which line 20 has 200 MiB. Each step peaks 300 MiB higher, and falls back to what is
/// left.
fn state() -> State {
    let site = |line| Site {
        frames: vec![Frame { file: "/no/train.py".into(), function: "f".into(), line }],
        ..Site::default()
    };
    let block = |bytes, step, site| {
        Block(bytes * MIB, BlockKind::Live, bytes * MIB, 0, 0, Some(step), SiteId(site))
    };
    let blocks = vec![block(100, 1, 1), block(100, 2, 1), block(100, 3, 1), block(200, 4, 2)];
    let stretch = |step: u64, half: u64, low: u64, high: u64| Stretch {
        time_nanoseconds: (10 + step) * SECOND + half * SECOND / 2,
        step,
        live_low_bytes: low * MIB,
        live_high_bytes: high * MIB,
        reserved_high_bytes: 900 * MIB,
        ..Stretch::default()
    };
    let timeline = (1..=4)
        .flat_map(|step| {
            [
                stretch(step, 0, 100 * (step - 1), 100 * (step - 1) + 300),
                stretch(step, 1, 100 * step.min(3), 100 * (step - 1) + 300),
            ]
        })
        .collect();
    let segment = Segment { address: 1 << 40, bytes: 512 * MIB, blocks, ..Segment::default() };
    let mut device = DeviceState {
        step: 4,
        timeline,
        segments: vec![segment],
        total_bytes: 1 << 30,
        live_peak_bytes: 600 * MIB,
        ..DeviceState::default()
    };
    device.held.reserved_bytes = 512 * MIB;
    device.held.live_bytes = 500 * MIB;
    device.live.all.bytes = 500 * MIB;
    State {
        conclusion: Some(Conclusion {
            cause: Cause::Leak,
            lines: vec!["train.py:10".into()],
            ..Conclusion::default()
        }),
        sites: Sites::new([site(10), site(20)]),
        devices: vec![device],
        ..State::default()
    }
}

fn page(state: &State) -> String {
    let mut out = Vec::new();
    write(&mut out, state, &About::default()).unwrap();
    String::from_utf8(out).unwrap()
}

#[test]
fn what_is_live_at_the_end_is_stacked_from_the_step_of_its_allocation_on() {
    let state = state();
    let device = &state.devices[0];
    let lines = Lines::of(&state, device);
    let course = Course::of(&state, device, &lines).unwrap();
    let kept: Vec<u64> = course.layers[0].iter().map(|bytes| bytes / MIB).collect();
    let last: Vec<u64> = course.layers[1].iter().map(|bytes| bytes / MIB).collect();
    // The largest line is the leak's. Within a step it is there as soon as the lows allow.
    assert_eq!(kept, [100, 100, 200, 200, 300, 300, 300, 300]);
    assert_eq!(last, [0, 0, 0, 0, 0, 0, 0, 200]);
    assert_eq!(course.edges.len(), 9);
    assert_eq!((course.edges[8], course.edges[7]), (0.0, -0.5));
}

#[test]
fn what_a_step_made_after_the_last_part_that_ends_in_it_is_in_the_part_that_began_in_it() {
    let mut state = state();
    // Step 3 has one part, in which no more than 250 MiB were ever live.
    let timeline = &mut state.devices[0].timeline;
    timeline.remove(5);
    timeline[4].live_high_bytes = 250 * MIB;
    let device = &state.devices[0];
    let lines = Lines::of(&state, device);
    let course = Course::of(&state, device, &lines).unwrap();
    let kept: Vec<u64> = course.layers[0].iter().map(|bytes| bytes / MIB).collect();
    assert_eq!(kept, [100, 100, 200, 200, 250, 300, 300]);
}

#[test]
fn a_block_whose_malloc_is_among_the_events_is_there_from_that_moment_on() {
    let mut state = state();
    let malloc = Event {
        kind: EventKind::Malloc.name().into(),
        address: (1 << 40) + 300 * MIB,
        size: 200 * MIB,
        time_nanoseconds: 14 * SECOND - 1,
        ..Event::default()
    };
    state.events.entries = vec![malloc];
    let device = &state.devices[0];
    let lines = Lines::of(&state, device);
    let course = Course::of(&state, device, &lines).unwrap();
    assert_eq!(course.layers[1], [0, 0, 0, 0, 0, 0, 200 * MIB, 200 * MIB]);
}

#[test]
fn no_layer_is_higher_than_the_highest_live_and_all_end_with_what_is_live() {
    let state = state();
    let device = &state.devices[0];
    let lines = Lines::of(&state, device);
    let course = Course::of(&state, device, &lines).unwrap();
    for part in 0..8 {
        let sum: u64 = course.layers.iter().map(|line| line[part]).sum();
        assert!(sum <= course.high[part], "{part}: {sum}");
    }
    let end: u64 = course.layers.iter().map(|line| line[7]).sum();
    assert_eq!(end, device.live.all.bytes);
}

#[test]
fn the_last_events_are_drawn_as_far_back_as_they_are_whole() {
    let mut state = state();
    let base = 1 << 40;
    let event = |kind: EventKind, address: u64, mib: u64, n: u64| Event {
        kind: kind.name().into(),
        address,
        size: mib * MIB,
        time_nanoseconds: 14 * SECOND + SECOND / 4 + n * SECOND / 100,
        ..Event::default()
    };
    // Eight whole events, and before them a free of 1 GiB, more than was ever live.
    let mut events = vec![
        event(EventKind::Malloc, 3, 10, 0),
        event(EventKind::Free, 1, 1024, 0),
        event(EventKind::Free, 2, 50, 1),
    ];
    for n in 0..4 {
        events.push(event(EventKind::Malloc, 100 + n, 50, 2 + 2 * n));
        events.push(event(EventKind::Free, 100 + n, 50, 3 + 2 * n));
    }
    events.push(event(EventKind::Malloc, base + 300 * MIB, 200, 20));
    state.events.entries = events;
    let device = &state.devices[0];
    let lines = Lines::of(&state, device);
    let course = latest::course(&state, device, &lines).unwrap();
    let high: Vec<u64> = course.high.iter().map(|bytes| bytes / MIB).collect();
    assert_eq!(high, [350, 300, 350, 300, 350, 300, 350, 300, 350, 300, 500]);
    assert_eq!(course.layers[1].last(), Some(&(200 * MIB)));
}

#[test]
fn the_map_has_every_byte_in_a_bounded_number_of_cells() {
    let mut state = state();
    state.devices[0].segments[0].blocks.push(Block(
        12 * MIB,
        BlockKind::Free,
        0,
        0,
        0,
        None,
        SiteId::NONE,
    ));
    let device = &state.devices[0];
    let map = Map::of(device, &Lines::of(&state, device)).unwrap();
    let told = serde_json::to_value(&map).unwrap();
    let rows = told["rows"].as_array().unwrap();
    assert_eq!((rows.len(), told["row_bytes"].as_u64()), (64, Some(8 * MIB)));
    assert_eq!(told["addresses"][1], format!("{:#x}", (1u64 << 40) + 8 * MIB));
    let first = rows[0].as_str().unwrap();
    assert_eq!(first, "080".repeat(128), "all of line A");
    assert!(rows[63].as_str().unwrap().starts_with("000"), "whole pages that are free");
}

#[test]
fn a_line_of_a_forward_has_the_line_that_called_it_beside_it() {
    let mut state = state();
    let frame = |line, function: &str| Frame {
        file: "/no/train.py".into(),
        function: function.into(),
        line,
    };
    let inside =
        Site { frames: vec![frame(10, "Net.forward"), frame(37, "train")], ..Site::default() };
    state.sites =
        Sites::new([inside, Site { frames: vec![frame(20, "train")], ..Site::default() }]);
    let page = page(&state);
    assert!(page.contains("\"called\":{\"name\":\"train.py:37 in train\""));
    assert_eq!(page.matches("\"called\":null").count(), 1, "the other line is of no forward");
}

#[test]
fn what_the_program_is_called_cannot_end_the_element_that_it_is_in() {
    let mut state = state();
    state.process.command = "</script><script>alert(1)</script><!--".into();
    let page = page(&state);
    assert_eq!(page.matches("</script>").count(), PAGE.matches("</script>").count());
    assert!(!page.contains("<script>alert"));
    for mark in ["/*STYLE*/", "/*OWN*/", "/*FACTS*/", "/*SHARED*/", "/*SCRIPT*/"] {
        assert!(PAGE.contains(mark) && !page.contains(mark), "{mark} is filled");
    }
}

#[test]
fn nothing_of_the_page_comes_from_outside() {
    for part in [PAGE, STYLE, OWN_STYLE, SHARED, SCRIPT] {
        for word in ["http://", "https://", "import ", "@import", "url(", "src=", "fetch("] {
            assert!(!part.contains(word), "{word}");
        }
    }
    assert!(PAGE.contains("default-src 'none'"));
    assert!(!SCRIPT.contains("innerHTML") && !SHARED.contains("innerHTML"), "text is set as text");
}

#[test]
fn a_page_is_given_up_at_its_deadline_and_where_there_is_no_device() {
    let late = About { deadline: Some(Instant::now()), ..About::default() };
    let failed = write(&mut Vec::new(), &state(), &late).unwrap_err();
    assert_eq!(failed.kind(), io::ErrorKind::TimedOut);
    assert!(write(&mut Vec::new(), &State::default(), &About::default()).is_err());
}

#[test]
fn a_million_blocks_of_ten_thousand_lines_are_a_page_of_bounded_size_within_its_deadline() {
    let mut state = state();
    let frame = |line| Frame { file: "/no/train.py".into(), function: "f".into(), line };
    let sites = (1..=10_000).map(|line| Site { frames: vec![frame(line); 8], ..Site::default() });
    state.sites = Sites::new(sites);
    let block =
        |n: u32| Block(512, BlockKind::Live, 512, 0, 0, Some(n % 50_000), SiteId(1 + n % 10_000));
    let segment = &mut state.devices[0].segments[0];
    segment.blocks = (0..1_000_000).map(block).collect();
    segment.bytes = 512_000_000;
    assert!((page(&state).len() as u64) < MOST_BYTES / 4);
}

#[test]
fn the_course_begins_with_the_first_step_and_not_with_the_loading_before_it() {
    let mut state = state();
    // A minute of loading, in step 1 too.
    let early = Stretch {
        time_nanoseconds: 0,
        step: 1,
        live_high_bytes: MIB,
        ..state.devices[0].timeline[0]
    };
    let loading = (0..60).map(|n| Stretch { time_nanoseconds: n * SECOND / 6, ..early });
    state.devices[0].timeline.splice(0..0, loading);
    let device = &state.devices[0];
    let lines = Lines::of(&state, device);
    let course = Course::of(&state, device, &lines).unwrap();
    assert!(course.edges[0] >= -5.5, "{:?}", course.edges);
    assert!(course.left_out > 9.0, "{}", course.left_out);
    // Without steps: where live memory begins to rise.
    state.devices[0].timeline.iter_mut().for_each(|part| part.step = 0);
    let device = &state.devices[0];
    let course = Course::of(&state, device, &Lines::of(&state, device)).unwrap();
    assert!(course.edges[0] >= -5.5 && course.left_out > 9.0, "{:?}", course.edges);
    // In which nothing was noted for long.
    state.devices[0].timeline.drain(1..60);
    for steps in [0, 1] {
        let parts = state.devices[0].timeline.iter_mut().enumerate();
        parts.for_each(|(n, part)| part.step = steps * (n as u64 / 2));
        let device = &state.devices[0];
        let course = Course::of(&state, device, &Lines::of(&state, device)).unwrap();
        assert!(course.edges[0] >= -5.5 && course.left_out > 9.0, "{:?}", course.edges);
    }
}

#[test]
fn without_steps_nothing_is_coloured_by_line_before_the_first_event_of_the_ring() {
    let mut state = state();
    state.devices[0].timeline.iter_mut().for_each(|part| part.step = 0);
    let device = &state.devices[0];
    let lines = Lines::of(&state, device);
    let course = Course::of(&state, device, &lines).unwrap();
    assert_eq!((course.known_from, course.high.len()), (7, 8));
    for part in 0..8 {
        let sum: u64 = course.layers.iter().map(|line| line[part]).sum();
        assert_eq!(sum, if part < 7 { 0 } else { 500 * MIB }, "{part}");
    }
    // The ring has the allocation of the last 200 MiB.
    let malloc = Event {
        kind: EventKind::Malloc.name().into(),
        address: (1 << 40) + 300 * MIB,
        size: 200 * MIB,
        time_nanoseconds: 13 * SECOND - 1,
        ..Event::default()
    };
    state.events.entries = vec![malloc];
    let device = &state.devices[0];
    let course = Course::of(&state, device, &Lines::of(&state, device)).unwrap();
    assert_eq!(course.known_from, 5);
    assert_eq!(course.layers[0][4..], [0, 300 * MIB, 300 * MIB, 300 * MIB]);
}

#[test]
fn a_line_below_half_a_percent_has_no_box_of_its_own() {
    let mut state = state();
    let small = Block(MIB, BlockKind::Live, MIB, 0, 0, Some(4), SiteId::NONE);
    state.devices[0].segments[0].blocks.push(small);
    let device = &state.devices[0];
    let lines = Lines::of(&state, device);
    let told = lines.told(&state, device, &|| Ok(())).unwrap();
    assert_eq!((told.len(), lines.others()["count"].as_u64()), (2, Some(1)));
}

#[test]
fn the_heading_is_the_name_of_the_script() {
    for (command, name) in [
        ("/tmp/venv/bin/python -m gruyere /work/a1_losses.py --lr 1", "a1_losses.py"),
        ("python3 -u train.py other.py", "train.py"),
        ("/opt/bin/simulation --fast", "simulation --fast"),
        ("", ""),
    ] {
        assert_eq!(program(command), name);
    }
}
