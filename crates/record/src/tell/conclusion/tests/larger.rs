//! A step that is too large, whatever else is kept; and remedies for it.

use super::*;
use crate::EventKind;

/// A training whose step 40 has `size` of activations, with 8 MiB left behind by each step.
fn larger(size: u64) -> Made {
    let mut made = with_weights(40);
    let leak = made.line(42, "train");
    (1..=40).for_each(|step| made.block(leak, step, 8 * MIB));
    let activations = made.module("net.0", 9, "train");
    (0..8).for_each(|_| made.block(activations, 40, size / 8));
    made.trains(&[("train", 20)]);
    made.lows(|step| GIB + 8 * MIB * step);
    made.refused(64 * MIB, 0, activations);
    made
}

#[test]
fn a_step_that_is_larger_by_more_than_what_is_kept_comes_first() {
    let conclusion = larger(4 * GIB).concludes();
    let said = unfolded(&conclusion);
    assert_eq!(conclusion.cause, Cause::Full, "{said}");
    assert!(said.starts_with("Step 40 of the run is larger than those before"), "{said}");
    assert!(said.contains("\nBesides: train.py:42 in train keeps 8 MiB a step"), "{said}");
    // No larger than the others: what is kept has filled the device.
    assert_eq!(larger(64 * MIB).concludes().cause, Cause::Leak);
    // Nor where the steps are so short that the timeline has only a few of them.
    let mut short = leaking();
    short.device.timeline.retain(|stretch| [0, 5, 20].contains(&stretch.step));
    short.refused(64 * MIB, 0, SiteId::NONE);
    assert_eq!(short.concludes().cause, Cause::Leak);
}

#[test]
fn several_views_in_the_first_step_of_a_stage_are_no_forgotten_no_grad() {
    let views = |count: u32| {
        let mut made = with_weights(10);
        for layer in 0..2 {
            let site = made.module(&format!("net.{layer}"), layer, "contrastive");
            (0..count).for_each(|_| made.block(site, 10, 256 * MIB));
        }
        made.trains(&[("train", 12)]);
        made.lows(|_| GIB);
        let loss = made.line(30, "contrastive");
        made.refused(64 * MIB, 0, loss);
        made.concludes()
    };
    let conclusion = views(4);
    let said = unfolded(&conclusion);
    assert_eq!(conclusion.cause, Cause::Full, "{said}");
    assert!(said.contains("No backward has run through train.py:20 in contrastive"), "{said}");
    assert!(said.contains("if it trains, give it less"), "{said}");
    assert_eq!(views(12).cause, Cause::NoGrad);
}

/// An evaluation whose forward makes 16 blocks on one line, in one call or in as many.
fn evaluated(in_one_call: bool) -> Conclusion {
    let mut made = with_weights(10);
    let own = |line, name| frame("/home/me/train.py", line, name);
    let hidden = [own(10, "Net.forward"), own(30, "evaluate")];
    let hidden = made.site(&hidden, "net", Phase::Forward);
    let input = made.line(29, "evaluate");
    made.sites.iter_mut().for_each(|site| site.no_grad = true);
    let mut events = Vec::new();
    for number in 0..16 {
        if number == 0 || !in_one_call {
            events.push(Event { address: 1 << 50, site: input, ..Event::default() });
        }
        let address = made.blocks.iter().map(|block| block.0).sum();
        events.push(Event { address, site: hidden, ..Event::default() });
        made.block(hidden, 10, 128 * MIB);
    }
    events.iter_mut().for_each(|event| event.kind = EventKind::Malloc.name().into());
    made.state.events.entries = events;
    made.trains(&[("train", 12)]);
    made.lows(|_| GIB);
    made.refused(128 * MIB, 0, hidden);
    made.concludes()
}

#[test]
fn what_a_forward_keeps_until_it_returns_is_not_collected() {
    assert_eq!(evaluated(false).cause, Cause::Collected);
    let conclusion = evaluated(true);
    assert_eq!(conclusion.cause, Cause::Full, "{conclusion:?}");
    assert!(unfolded(&conclusion).contains("give it a smaller batch"), "{conclusion:?}");
}

#[test]
fn the_remedy_is_for_what_the_steps_have_done() {
    // Each third of the steps needs more than the one before.
    let mut rising = Made::at(40);
    let line = rising.line(9, "train");
    (0..3).for_each(|_| rising.block(line, 40, 4 * GIB));
    rising.lows(|step| GIB + 200 * MIB * step);
    rising.refused(4 * GIB, 0, line);
    let said = unfolded(&rising.concludes());
    assert!(said.contains("steps need more and more"), "{said}");
    // Gradients of several backwards.
    let mut gradients = with_weights(2);
    gradients.blocks.iter_mut().for_each(|block| block.3 = 3);
    let made = gradients.module("net.0", 9, "train");
    gradients.sites.last_mut().expect("a site").phase = Phase::Backward;
    (0..12).for_each(|_| gradients.block(made, 2, GIB));
    gradients.trains(&[("train", 20)]);
    gradients.refused(GIB, 0, made);
    let said = unfolded(&gradients.concludes());
    assert!(said.contains("add them up as they come"), "{said}");
    // An inference with gradients on.
    let mut inference = with_weights(0);
    let made = inference.module("net.0", 9, "main");
    (0..2).for_each(|_| inference.block(made, 0, 7 * GIB));
    inference.refused(GIB, 0, made);
    let said = unfolded(&inference.concludes());
    assert!(said.contains("if no backward follows, run it in torch.no_grad()"), "{said}");
}

#[test]
fn a_large_block_that_was_there_before_the_model_ran_may_be_a_dataset_in_a_training_too() {
    let said = |early: bool| {
        let mut made = Made::at(0);
        let data = made.line(6, "main");
        made.block(data, 0, 12 * GIB);
        let forward = made.module("net.0", 9, "main");
        made.block(forward, 0, GIB);
        let malloc = |address, site| Event {
            kind: EventKind::Malloc.name().into(),
            address,
            site,
            ..Event::default()
        };
        let mut events = vec![malloc(0, data), malloc(12 * GIB, forward)];
        if !early {
            events.reverse();
        }
        made.state.events.entries = events;
        made.trains(&[]);
        made.refused(4 * GIB, 0, forward);
        unfolded(&made.concludes())
    };
    assert!(said(true).contains("if that is a dataset"), "{}", said(true));
    assert!(!said(false).contains("if that is a dataset"), "{}", said(false));
}

#[test]
fn one_cuda_graph_is_told_if_its_pool_is_the_most() {
    let first = |bytes: u64| {
        let mut made = with_weights(20);
        made.device.segments.push(Segment {
            address: 1 << 40,
            bytes,
            holder: "captured".into(),
            pool_id: (0, 1),
            ..Segment::default()
        });
        made.device.held.reserved_bytes += bytes;
        made.lows(|_| GIB);
        made.first()
    };
    let (cause, said) = first(3 * GIB);
    assert_eq!(cause, Cause::CudaGraphs);
    assert!(said.starts_with("A CUDA graph has 3 GiB of the 4 GiB held, in a pool of its own"));
    assert_eq!(first(512 * MIB).0, Cause::Nothing);
}

#[test]
fn buckets_of_ddp_are_told_apart_and_weights_that_no_module_has_are_weights() {
    let mut made = with_weights(2);
    made.blocks.iter_mut().for_each(|block| block.3 = 3);
    let ddp = "/venv/lib/python3.12/site-packages/torch/nn/parallel/distributed.py";
    let buckets = [frame(ddp, 1, "_pre_forward"), frame("/home/me/train.py", 13, "main")];
    let buckets = made.site(&buckets, "", Phase::Forward);
    (0..8).for_each(|_| made.block(buckets, 2, GIB / 8));
    made.trains(&[("main", 13)]);
    made.refused(15 * GIB, 0, buckets);
    made.device.total_bytes = 2 * GIB + 64 * MIB;
    made.state.out_of_memory.as_mut().expect("set").asked_bytes = 128 * MIB;
    let said = unfolded(&made.concludes());
    assert!(said.contains("50% buckets of DistributedDataParallel"), "{said}");
    let mut made = Made::at(0);
    let loads = "/venv/lib/python3.12/site-packages/torch/serialization.py";
    let loads = [frame(loads, 1606, "load"), frame("/home/me/serve.py", 10, "main")];
    let loads = made.site(&loads, "", Phase::Unknown);
    (0..3).for_each(|_| made.block(loads, 0, 5 * GIB));
    made.refused(2 * GIB, 0, loads);
    let said = unfolded(&made.concludes());
    assert!(said.contains("100% weights (15 GiB)"), "{said}");
    assert!(!said.contains("drop a checkpoint"), "{said}");
}

#[test]
fn where_the_record_had_no_room_for_blocks_nothing_is_said_not_to_grow() {
    let mut made = with_weights(20);
    made.lows(|_| GIB);
    made.device.unrecorded = Sum { blocks: 100, bytes: GIB, requested_bytes: GIB };
    let (_, first) = made.first();
    assert!(first.starts_with("Growth of a line is not known (20 steps): 2 GiB live"), "{first}");
}

/// A training in which `count` forwards wait that line 20 has called; backwards have run through
/// `lines`.
fn waiting(count: u32, lines: &[(&str, u32)]) -> String {
    let mut made = with_weights(0);
    for layer in 0..2 {
        let site = made.module(&format!("net.{layer}"), layer, "train");
        (0..count).for_each(|_| made.block(site, 0, 7 * GIB / u64::from(count)));
    }
    made.trains(lines);
    made.lows(|_| GIB);
    let loss = made.line(30, "train");
    made.refused(GIB, 0, loss);
    unfolded(&made.concludes())
}

#[test]
fn graphs_that_live_on_after_backwards_of_their_line_may_hang_on_a_state() {
    let carried = "if a state is carried from one backward to the next, detach() it";
    let said = waiting(40, &[("train", 20)]);
    assert!(said.contains(carried) && said.contains("activation checkpointing"), "{said}");
    // One forward, or none that has had its backward.
    for said in [waiting(1, &[("train", 20)]), waiting(40, &[])] {
        assert!(!said.contains(carried) && said.contains("activation checkpointing"), "{said}");
    }
}
