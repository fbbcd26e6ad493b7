//! Conclusions on made-up states: each cause, and healthy programs.

use super::*;
use crate::DeviceGauge;
use crate::dump::state::{
    Block, BlockKind, DeviceState, Event, OutOfMemory, Segment, Stretch, Sum, Training, timeline,
};
use crate::sites::{Frame, Phase, Site, SiteId, Sites};
use crate::timeline::{Sample, TimelineEntry};

mod attempts;
mod cells;
mod kept;
mod larger;
mod parts;
mod pile;
mod programs;
mod timelines;
mod twice;
mod unmarked;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// A made-up state.
struct Made {
    state: State,
    sites: Vec<Site>,
    device: DeviceState,
    blocks: Vec<Block>,
    /// Whether its pages can move.
    stitched: bool,
}

fn frame(file: &str, line: u32, function: &str) -> Frame {
    Frame { file: file.into(), line, function: function.into() }
}

impl Made {
    /// A device of 16 GiB at the start of step `now`.
    fn at(now: u64) -> Self {
        let device = DeviceState { step: now, total_bytes: 16 * GIB, ..DeviceState::default() };
        let state = State::default();
        Self { state, sites: Vec::new(), device, blocks: Vec::new(), stitched: false }
    }

    fn site(&mut self, frames: &[Frame], module: &str, phase: Phase) -> SiteId {
        let frames = frames.to_vec();
        let site = Site { frames, module: module.into(), phase, ..Site::default() };
        self.sites.push(site);
        SiteId(self.sites.len() as u32)
    }

    /// A site with one own line of the program.
    fn line(&mut self, line: u32, function: &str) -> SiteId {
        self.site(&[frame("/home/me/train.py", line, function)], "", Phase::Unknown)
    }

    /// A site inside a module, called from line 20 of `function`.
    fn module(&mut self, module: &str, torchs: u32, function: &str) -> SiteId {
        let torch = "/venv/lib/python3.12/site-packages/torch/nn/functional.py";
        let frames = [frame(torch, torchs, "op"), frame("/home/me/train.py", 20, function)];
        self.site(&frames, module, Phase::Forward)
    }

    fn block(&mut self, site: SiteId, step: u32, bytes: u64) {
        self.blocks.push(Block(bytes, BlockKind::Live, bytes, 0, 0, Some(step), site));
        let all = &mut self.device.live.all;
        all.add(Sum { blocks: 1, bytes, requested_bytes: bytes });
        self.device.held.live_bytes = all.bytes;
        self.device.held.reserved_bytes += bytes;
    }

    /// Lows of live memory by step, each with a peak above it.
    fn lows(&mut self, low: impl Fn(u64) -> u64) {
        let stretch = |step| Stretch {
            step,
            live_low_bytes: low(step),
            live_high_bytes: low(step) + 100 * MIB,
            ..Stretch::default()
        };
        self.device.timeline = (0..=self.device.step).map(stretch).collect();
    }

    /// A refused request, with `others` bytes of the device held by others.
    fn refused(&mut self, asked_bytes: u64, others: u64, site: SiteId) {
        let mut refused = OutOfMemory { asked_bytes, site, ..OutOfMemory::default() };
        refused.cause.others_bytes = Some(others);
        refused.cause.free_bytes = Some(0);
        self.state.out_of_memory = Some(refused);
    }

    /// The program has an optimiser, and backwards ran through these lines.
    fn trains(&mut self, lines: &[(&str, u32)]) {
        let own = |&(function, line): &(&str, u32)| frame("/home/me/train.py", line, function);
        let backward_lines = lines.iter().map(own).collect();
        self.state.training = Training { has_optimizer: true, backward_lines };
    }

    fn state(self) -> State {
        let Made { mut state, sites, mut device, blocks, stitched } = self;
        let bytes = blocks.iter().map(|block| block.0).sum();
        device.segments.push(Segment { bytes, blocks, stitched, ..Segment::default() });
        state.devices = vec![device];
        state.sites = Sites::new(sites);
        state
    }

    fn concludes(self) -> Conclusion {
        let conclusion = Conclusion::of(&self.state(), &[]);
        assert!(conclusion.lines.len() <= MOST_LINES, "{conclusion:#?}");
        for line in &conclusion.lines {
            assert!(line.chars().count() <= MOST_COLUMNS && !line.ends_with('…'), "{line}");
        }
        conclusion
    }

    /// The cause and the first sentence.
    fn first(self) -> (Cause, String) {
        let conclusion = self.concludes();
        let (first, rest) = conclusion.lines.split_first().expect("a first line");
        let more = rest.iter().take_while(|line| line.starts_with("  "));
        (conclusion.cause, more.fold(first.clone(), |said, line| format!("{said}{}", &line[1..])))
    }
}

/// The sentences of a conclusion, each in one line.
fn unfolded(conclusion: &Conclusion) -> String {
    conclusion.lines.join("\n").replace("\n  ", " ")
}

/// Weights of 1 GiB, which were made before the first step.
fn with_weights(now: u64) -> Made {
    let mut made = Made::at(now);
    let weights = made.line(5, "<module>");
    (0..16).for_each(|_| made.block(weights, 0, 64 * MIB));
    made
}

/// The same, and line 42 leaves 64 MiB a step since step 3.
fn leaking() -> Made {
    let mut made = with_weights(40);
    let leak = made.line(42, "main.<locals>.step");
    (3..=40).for_each(|step| made.block(leak, step, 64 * MIB));
    made.lows(|step| GIB + 64 * MIB * step.saturating_sub(2));
    made
}

#[test]
fn a_leak_is_named_with_its_line_its_rate_and_its_beginning() {
    let conclusion = leaking().concludes();
    assert_eq!(conclusion.cause, Cause::Leak);
    assert_eq!(
        conclusion.lines[0],
        "train.py:42 in step keeps 64 MiB a step since step 3: 2.2 GiB of the 3.4 GiB live (67%)"
    );
    // The first sentence is not repeated.
    assert_eq!(
        conclusion.lines[1],
        "Next most is from train.py:5: 1 GiB (30% of the 3.4 GiB live), 16 blocks"
    );
    assert!(conclusion.lines[2].starts_with("To do: "), "{conclusion:?}");
}

#[test]
fn a_queue_that_is_full_is_no_leak_while_live_memory_is_level() {
    let queue = |low: fn(u64) -> u64| {
        let mut made = with_weights(100);
        let put = made.line(12, "put");
        (69..=100).for_each(|step| made.block(put, step, 64 * MIB));
        made.lows(low);
        made.concludes()
    };
    let level = queue(|step| GIB + 64 * MIB * step.min(32));
    assert_eq!(level.cause, Cause::Nothing, "{level:?}");
    assert_eq!(level.lines[0], "Nothing grows (100 steps): 3 GiB live, 3 GiB at the peak");
    assert!(level.lines[1].starts_with("train.py:12 in put holds 1.9 GiB of the last 31 steps"));
    // The same survivors while the lows rise.
    assert_eq!(queue(|step| GIB + 64 * MIB * step.saturating_sub(68)).cause, Cause::Leak);
}

#[test]
fn a_leak_beside_a_full_queue_is_named_alone() {
    let mut made = with_weights(100);
    let (leak, put) = (made.line(42, "step"), made.line(12, "put"));
    (1..=100).for_each(|step| made.block(leak, step, 10 * MIB));
    (69..=100).for_each(|step| made.block(put, step, 64 * MIB));
    made.lows(|step| GIB + 64 * MIB * step.min(32) + 10 * MIB * step);
    let conclusion = made.concludes();
    assert_eq!(conclusion.cause, Cause::Leak);
    assert!(
        conclusion.lines[0].starts_with("train.py:42 in step keeps 10 MiB a step since step 1")
    );
    assert!(conclusion.lines[1].contains("put holds"), "{conclusion:?}");
}

#[test]
fn a_healthy_program_is_accused_of_nothing() {
    let mut made = with_weights(40);
    let activations = made.module("layers.0", 1, "step");
    (0..4).for_each(|_| made.block(activations, 40, 100 * MIB));
    made.block(activations, 39, 100 * MIB);
    made.lows(|_| GIB);
    let conclusion = made.concludes();
    assert_eq!(conclusion.cause, Cause::Nothing);
    assert!(conclusion.lines[0].starts_with("Nothing grows (40 steps)"), "{conclusion:?}");
    assert_eq!(
        conclusion.lines[1],
        "Most is from train.py:5: 1 GiB (67% of the 1.5 GiB live), 16 blocks"
    );
    assert!(
        conclusion.lines[2].starts_with("then from train.py:20 in step (module layers.0)"),
        "{conclusion:?}"
    );
    assert!(!conclusion.lines.iter().any(|line| line.contains("To do")), "{conclusion:?}");
}

#[test]
fn what_no_line_is_known_of_is_told_by_its_size_and_the_remedy_is_said() {
    let mut made = Made::at(40);
    (0..16).for_each(|_| made.block(SiteId::NONE, 0, 64 * MIB));
    (3..=40).for_each(|step| made.block(SiteId::NONE, step, 16 * MIB));
    made.lows(|step| GIB + 16 * MIB * step.saturating_sub(2));
    let conclusion = made.concludes();
    assert!(
        conclusion.lines[0].starts_with("What makes blocks of 16 MiB keeps 16 MiB a step"),
        "{conclusion:?}"
    );
    assert!(conclusion.lines.iter().any(|line| line.contains("blame:large")), "{conclusion:?}");
}

/// Two layers whose forward leaves blocks in every step, kept by autograd or by hooks.
fn forwards(outside: bool, a_step: usize) -> Made {
    let mut made = with_weights(20);
    let input = made.line(19, "train");
    let layers = [made.module("model.0", 1, "train"), made.module("model.1", 2, "train")];
    for step in 2..=20 {
        for _ in 0..a_step {
            layers.iter().for_each(|&layer| made.block(layer, step, 32 * MIB));
            if outside {
                made.block(input, step, 16 * MIB);
            }
        }
    }
    let rate = a_step as u64 * (64 + if outside { 16 } else { 0 }) * MIB;
    made.lows(|step| GIB + rate * step.saturating_sub(1));
    made
}

#[test]
fn graphs_of_past_steps_are_told_from_outputs_that_hooks_keep_and_both_are_named() {
    let (cause, first) = forwards(true, 1).first();
    assert_eq!(cause, Cause::AutogradGraphs);
    assert_eq!(
        first,
        "train.py:20 in train keeps graphs of past steps, 80 MiB a step since step 2: 1.3 GiB of \
         the 2.5 GiB live (53%)"
    );
    let conclusion = forwards(false, 1).concludes();
    assert_eq!(conclusion.cause, Cause::Hooks);
    let said = "train.py:20 in train keeps outputs of 2 modules (hooks, a cache, a sum with its \
                graph?)";
    assert!(conclusion.lines[0].starts_with(said), "{conclusion:?}");
    let rest = conclusion.lines[1..].iter();
    assert!(!rest.clone().any(|line| line.contains("train.py:20")), "it is named: {conclusion:?}");
}

#[test]
fn one_output_kept_with_remnants_of_other_modules_is_not_blamed_on_hooks() {
    let mut made = with_weights(20);
    let head = made.module("head", 1, "train");
    let others = [made.module("model.0", 2, "train"), made.module("model.1", 3, "train")];
    for step in 2..=20 {
        made.block(head, step, 64 * MIB);
        others.iter().for_each(|&other| made.block(other, step, 8 << 10));
    }
    made.lows(|step| GIB + 64 * MIB * step.saturating_sub(1));
    let (cause, first) = made.first();
    assert_eq!(cause, Cause::Leak);
    assert!(first.starts_with("train.py:20 in train keeps 64"), "{first}");
}

#[test]
fn blocks_of_ever_new_sizes_are_a_cache_without_bound() {
    let mut made = with_weights(40);
    let lookup = made.line(30, "lookup");
    (1..=40).for_each(|step| made.block(lookup, step, (20 + u64::from(step)) * MIB));
    made.lows(|step| GIB + 40 * MIB * step);
    let (cause, first) = made.first();
    assert_eq!(cause, Cause::Cache);
    assert!(
        first.starts_with("train.py:30 in lookup fills a cache without bound, 39.0 MiB a step")
            || first.starts_with("train.py:30 in lookup fills a cache without bound, 39"),
        "{first}"
    );
}

#[test]
fn the_refused_request_is_the_cause_where_it_is_large_and_others_where_they_hold_more() {
    let mut made = with_weights(5);
    let scores = made.line(77, "attention");
    made.refused(12 * GIB, GIB, scores);
    let (cause, first) = made.first();
    assert_eq!(cause, Cause::LargeRequest);
    assert_eq!(
        first,
        "train.py:77 in attention asks for 12 GiB at once, with 1 GiB live of 16 GiB"
    );
    let mut made = with_weights(5);
    made.refused(20 * MIB, 15 * GIB, SiteId::NONE);
    let (cause, first) = made.first();
    assert_eq!(cause, Cause::Others);
    assert_eq!(first, "Others hold 15 GiB of the 16 GiB of device 0; this process holds 1 GiB");
    // A large request that would have fitted without them; one that would not.
    for (asked, cause) in [(12 * GIB, Cause::Others), (15 * GIB + MIB, Cause::LargeRequest)] {
        let mut made = with_weights(5);
        let scores = made.line(77, "attention");
        made.refused(asked, 8 * GIB, scores);
        assert_eq!(made.first().0, cause);
    }
    let mut made = with_weights(5);
    made.refused(20 * MIB, 0, SiteId::NONE);
    assert_eq!(made.first().0, Cause::Full);
    let mut leaks = leaking();
    leaks.refused(64 * MIB, GIB, SiteId::NONE);
    assert_eq!(leaks.first().0, Cause::Leak);
    let mut capped = with_weights(5);
    let sets = capped.line(15, "<module>");
    capped.refused(64 * MIB, 0, SiteId::NONE);
    capped.device.limit_bytes = GIB;
    let refused = capped.state.out_of_memory.as_mut().expect("set");
    (refused.cause.free_bytes, refused.limit_site) = (Some(15 * GIB), sets);
    let (cause, first) = capped.first();
    assert_eq!(cause, Cause::Ceiling);
    assert_eq!(
        first,
        "The ceiling of 1 GiB is reached, while the device of 16 GiB has room: train.py:15 has set \
         it"
    );
}

#[test]
fn a_request_larger_than_the_ceiling_is_told_with_it_unless_the_device_has_no_room_either() {
    let said = |free: u64| {
        let mut made = Made::at(0);
        let (sets, asks) = (made.line(15, "<module>"), made.line(16, "load"));
        made.refused(12 * GIB, 0, asks);
        made.device.limit_bytes = 2 * GIB;
        let refused = made.state.out_of_memory.as_mut().expect("set");
        (refused.cause.free_bytes, refused.limit_site) = (Some(free), sets);
        unfolded(&made.concludes())
    };
    let with_room = said(15 * GIB);
    let told = "train.py:16 in load asks for 12 GiB at once: more than the ceiling of 2 GiB: \
                train.py:15 has set it";
    assert!(with_room.starts_with(told), "{with_room}");
    assert!(with_room.contains("raise `limit`") && !with_room.contains("dataset"), "{with_room}");
    assert_eq!(with_room.matches("ceiling").count(), 1, "{with_room}");
    let without = said(GIB);
    assert!(without.contains("more than the 2 GiB that it may have"), "{without}");
    assert!(!without.contains("raise"), "{without}");
}

#[test]
fn a_request_that_was_the_last_before_the_death_is_known_from_outside_too() {
    let event = |kind: &str, size| Event { kind: kind.into(), size, ..Event::default() };
    let first = |events: Vec<Event>| {
        let mut made = with_weights(5);
        made.state.events.entries = events;
        made.first().0
    };
    let died = vec![event("malloc", 1), event("out_of_memory", 12 * GIB), event("free", 1)];
    assert_eq!(first(died.clone()), Cause::LargeRequest);
    assert_eq!(first([died.clone(), vec![event("malloc", 1)]].concat()), Cause::Nothing);
    // With its line, if the event has it.
    let mut made = with_weights(5);
    let scores = made.line(16, "scores");
    made.state.events.entries = died;
    made.state.events.entries[1].site = scores;
    let (_, said) = made.first();
    assert!(said.starts_with("train.py:16 in scores asks for 12 GiB at once"), "{said}");
}

#[test]
fn a_step_that_alone_was_large_is_told_when_it_is_past() {
    let mut made = with_weights(40);
    made.lows(|_| GIB);
    made.device.timeline[7].live_high_bytes = 9 * GIB;
    let (cause, first) = made.first();
    assert_eq!(cause, Cause::LargeRequest);
    assert_eq!(first, "Step 7 alone had 9 GiB live at its peak, other steps 1.1 GiB");
    // An evaluation now and then is not alone.
    let mut made = with_weights(40);
    made.lows(|_| GIB);
    for step in [7, 17, 27] {
        made.device.timeline[step].live_high_bytes = 9 * GIB;
    }
    assert_eq!(made.first().0, Cause::Nothing);
}

#[test]
fn what_waits_for_a_stream_is_told_with_the_stream_who_made_it_and_how_far_the_host_is_ahead() {
    let told = |ahead: u64| {
        let mut made = with_weights(20);
        let batch = made.line(33, "prefetch");
        for _ in 0..40 {
            made.blocks.push(Block(64 * MIB, BlockKind::Pending, 64 * MIB, 0, 0, Some(19), batch));
        }
        made.device.held.pending_bytes = 40 * 64 * MIB;
        made.device.held.reserved_bytes += 40 * 64 * MIB;
        made.device.gauges.insert(DeviceGauge::HostAhead.name().to_owned(), ahead);
        let event = Event { kind: "record_stream".into(), stream: 7, ..Event::default() };
        made.state.events.entries = vec![event];
        made.lows(|_| GIB);
        let (cause, first) = made.first();
        assert_eq!(cause, Cause::Streams);
        first
    };
    let said = "2.5 GiB of the 3.5 GiB held is freed and waits for stream 7, most from train.py:33 \
                in prefetch";
    assert_eq!(told(0), said);
    let ahead = "; the host was 140 ms or more ahead of the device";
    assert_eq!(told(140_700_000), format!("{said}{ahead}"));
}

#[test]
fn many_cuda_graphs_are_told_with_their_pools() {
    let mut made = with_weights(20);
    for pool in 1..=24 {
        made.device.segments.push(Segment {
            address: pool << 40,
            bytes: 64 * MIB,
            holder: "captured".into(),
            pool_id: (0, pool),
            ..Segment::default()
        });
    }
    made.device.held.reserved_bytes += 24 * 64 * MIB;
    made.device.held.captured_free_bytes = 24 * 64 * MIB;
    let (cause, first) = made.first();
    assert_eq!(cause, Cause::CudaGraphs);
    assert_eq!(
        first,
        "Many CUDA graphs have 1.5 GiB of the 2.5 GiB held, in 24 pools of their own, 1.5 GiB of \
         it free"
    );
}

/// Twelve hundred small blocks made by `Net.forward`, called from line 27, in pages otherwise free.
fn in_pieces() -> Made {
    let mut made = with_weights(0);
    let frames = [("Net.forward", 15), ("add", 27)]
        .map(|(name, line)| frame("/home/me/train.py", line, name));
    let small = made.site(&frames, "net", Phase::Forward);
    (0..1200).for_each(|_| made.block(small, 0, MIB / 8));
    made.device.held.slab_free_bytes = 4 * GIB;
    made.device.held.reserved_bytes += 4 * GIB;
    made
}

#[test]
fn pieces_are_told_with_the_request_that_found_no_room_and_the_line_between_them_has_one_name() {
    let mut made = in_pieces();
    let asks = made.line(34, "similarity");
    made.refused(3 * GIB, 0, asks);
    made.state.out_of_memory.as_mut().expect("set").cause.largest_request_bytes = 2 * MIB;
    let conclusion = made.concludes();
    assert_eq!(conclusion.cause, Cause::Pieces);
    let said = unfolded(&conclusion);
    let (first, rest) = said.split_once('\n').expect("more");
    assert_eq!(
        first,
        "4 GiB of the 5.1 GiB held is lost: free between live blocks (most are from train.py:15 in \
         Net.forward, called from train.py:27 in add), in pieces of at most 2 MiB: no room for the \
         3 GiB asked for by train.py:34 in similarity"
    );
    assert!(!rest.contains("train.py:15") && !rest.contains("train.py:34"), "{said}");
    assert_eq!(said.matches("train.py:27").count(), 1, "{said}");
    assert!(rest.starts_with("Next most is from train.py:5: 1 GiB (87% of"), "{said}");
    // More than is lost, but with it and the rest of the device there would be room.
    let mut made = in_pieces();
    made.refused(12 * GIB, 0, SiteId::NONE);
    let (cause, first) = made.first();
    assert_eq!(cause, Cause::Pieces);
    assert!(first.ends_with("in pieces: no room for the 12 GiB asked for"), "{first}");
    // It would not fit beside live memory: the pieces are not the cause.
    let mut made = in_pieces();
    made.refused(15 * GIB, 0, SiteId::NONE);
    assert_eq!(made.first().0, Cause::LargeRequest);
}

#[test]
fn who_called_a_line_of_a_forward_is_told_once() {
    let mut made = with_weights(9);
    let forward = |line| {
        [("Net.forward", line), ("train", 37)]
            .map(|(name, line)| frame("/home/me/a.py", line, name))
    };
    for line in [20, 21] {
        let site = made.site(&forward(line), "net", Phase::Forward);
        (0..4).for_each(|_| made.block(site, 9, GIB));
    }
    made.lows(|_| GIB);
    let conclusion = made.concludes();
    let told = conclusion.lines.iter().filter(|line| line.contains("called from a.py:37 in train"));
    assert_eq!(told.count(), 1, "{conclusion:?}");
    assert!(conclusion.lines[1].contains("in Net.forward, called from"), "{conclusion:?}");
    assert!(conclusion.lines[3].contains("in Net.forward (module net)"), "{conclusion:?}");
}

#[test]
fn a_rank_that_holds_more_than_the_others_is_named() {
    let rank = |rank, live_peak_bytes| Rank { rank, live_peak_bytes };
    let first = |ranks: &[Rank]| {
        let mut made = with_weights(20);
        made.lows(|_| GIB);
        made.state.process.rank = Some(3);
        Conclusion::of(&made.state(), ranks)
    };
    let even = [rank(0, GIB), rank(1, GIB), rank(2, GIB), rank(3, GIB + 100 * MIB)];
    assert_eq!(first(&even).cause, Cause::Nothing);
    let uneven = [rank(0, GIB), rank(1, GIB), rank(2, GIB), rank(3, 2 * GIB)];
    let conclusion = first(&uneven);
    assert_eq!(conclusion.cause, Cause::UnevenRanks);
    assert_eq!(
        conclusion.lines[0],
        "Rank 3 (this one) had 2 GiB live at its peak, the other 3 ranks 1 GiB: work is spread \
         unevenly"
    );
}

#[test]
fn a_leak_that_makes_this_rank_the_larger_one_is_the_cause_and_the_ranks_stand_beside_it() {
    let concludes = |this| {
        let mut made = with_weights(40);
        let site = made.site(&[frame("/src/train.py", 29, "main")], "", Phase::Unknown);
        (3..=40).for_each(|step| made.block(site, step, 64 * MIB));
        made.state.process.rank = Some(this);
        let live_peak_bytes = [GIB, 4 * GIB];
        let ranks =
            [0, 1].map(|rank| Rank { rank, live_peak_bytes: live_peak_bytes[rank as usize] });
        Conclusion::of(&made.state(), &ranks)
    };
    let leaks = concludes(1);
    assert_eq!(leaks.cause, Cause::Leak);
    assert!(
        leaks.lines.iter().any(|line| line.starts_with("Besides: Rank 1 (this one)")),
        "{leaks:?}"
    );
    // Of another rank's memory, the causes found here explain nothing.
    let other = concludes(0);
    assert_eq!(other.cause, Cause::UnevenRanks);
    assert!(other.lines.iter().any(|line| line.contains("look at that rank")), "{other:?}");
}

#[test]
fn lines_have_room_on_a_screen_whatever_names_a_program_has() {
    let mut made = with_weights(40);
    let long = "a_function_whose_name_says_everything_that_it_does_and_a_little_more".repeat(4);
    let file = format!("/{}/train.py", "folder".repeat(40));
    let site = made.site(&[frame(&file, 123_456, &long)], &"module.".repeat(50), Phase::Forward);
    (3..=40).for_each(|step| made.block(site, step, 64 * MIB));
    let state = made.state();
    for line in Conclusion::of(&state, &[]).lines {
        assert!(line.chars().count() <= MOST_COLUMNS, "{line}");
    }
}

#[test]
fn files_of_one_name_are_told_apart() {
    let mut made = with_weights(40);
    for file in ["/src/a/model.py", "/src/b/model.py"] {
        let site = made.site(&[frame(file, 1, "forward")], "", Phase::Unknown);
        (3..=40).for_each(|step| made.block(site, step, 64 * MIB));
    }
    let (_, first) = made.first();
    assert!(first.contains("a/model.py:1") || first.contains("b/model.py:1"), "{first}");
}

#[test]
fn nothing_is_said_of_a_process_without_devices() {
    assert_eq!(Conclusion::of(&State::default(), &[]).lines.len(), 1);
}
