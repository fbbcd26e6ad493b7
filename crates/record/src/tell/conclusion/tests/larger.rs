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

/// What there is beside 16 blocks of one line of a forward, the last of which is under way.
#[derive(Clone, Copy, PartialEq)]
enum Beside {
    /// An input that was made before all of them.
    Input,
    /// One of the evaluation's that was made after the first, as the next call's is.
    NextInput,
    /// One of another thread's.
    OfAThread,
    /// No input that any of them may have had.
    Nothing,
    /// An input as before, and a training whose steps made so many blocks of their size.
    Steps(usize),
    /// An input, and the request was refused outside of the forward.
    Over,
}

fn evaluated(beside: Beside) -> Conclusion {
    let mut made = with_weights(10);
    made.blocks.iter_mut().for_each(|block| block.3 = 3);
    let own = |line, name| frame("/home/me/train.py", line, name);
    let hidden = [own(10, "Net.forward"), own(30, "evaluate")];
    let hidden = made.site(&hidden, "net", Phase::Forward);
    let (input, fetched) = (made.line(29, "evaluate"), made.line(50, "fetch"));
    made.sites.iter_mut().for_each(|site| site.no_grad = true);
    let mut events = Vec::new();
    let malloc = |made: &mut Made, site, bytes: u64| {
        let address = made.blocks.iter().map(|block| block.0).sum();
        made.block(site, 10, bytes);
        let kind = EventKind::Malloc.name().into();
        Event { kind, address, size: bytes, ..Event::default() }
    };
    if let Beside::Steps(count) = beside {
        let one =
            |kind: EventKind, size| Event { kind: kind.name().into(), size, ..Event::default() };
        for step in 8..10 {
            events.push(one(EventKind::Step, step));
            events.extend((0..count).map(|_| one(EventKind::Malloc, 128 * MIB)));
        }
        events.push(one(EventKind::Step, 10));
    }
    if !matches!(beside, Beside::Nothing) {
        events.push(malloc(&mut made, input, 32 * MIB));
    }
    for number in 0..16 {
        events.push(malloc(&mut made, hidden, 128 * MIB));
        match beside {
            Beside::NextInput if number == 7 => events.push(malloc(&mut made, input, 32 * MIB)),
            Beside::OfAThread if number == 7 => events.push(malloc(&mut made, fetched, 32 * MIB)),
            _ => {}
        }
    }
    made.state.events.entries = events;
    made.trains(&[("train", 12)]);
    made.lows(|_| GIB);
    made.refused(128 * MIB, 0, if beside == Beside::Over { input } else { hidden });
    made.concludes()
}

#[test]
fn what_a_forward_keeps_until_it_returns_is_not_collected() {
    for beside in [Beside::Input, Beside::OfAThread, Beside::Steps(0), Beside::Steps(12)] {
        let conclusion = evaluated(beside);
        assert_eq!(conclusion.cause, Cause::Full, "{conclusion:?}");
        let said = unfolded(&conclusion);
        assert!(said.contains("give it a smaller batch"), "{said}");
        // The state may be alike where an evaluation keeps what the model returns.
        assert!(said.contains("move them to the host as they come"), "{said}");
    }
}

#[test]
fn what_several_forwards_returned_is_collected_by_the_line_that_called_them() {
    for beside in [Beside::NextInput, Beside::Nothing, Beside::Steps(2), Beside::Over] {
        let conclusion = evaluated(beside);
        assert_eq!(conclusion.cause, Cause::Collected, "{conclusion:?}");
        let said = unfolded(&conclusion);
        let first =
            "train.py:30 in evaluate collects 16 blocks of train.py:10 in Net.forward within";
        assert!(said.starts_with(first), "{said}");
    }
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

/// A training, in its first step, whose line 6 has made nine blocks of data and whose model six;
/// the data may have come last.
fn data_in_a_list(is_before: bool, has_forward: bool) -> String {
    let mut made = Made::at(0);
    let data = made.line(6, "main");
    let phase = if has_forward { Phase::Forward } else { Phase::Unknown };
    let net = made.site(&[frame("/home/me/train.py", 9, "main")], "net", phase);
    let order = if is_before { [data, net] } else { [net, data] };
    for site in order {
        let count = if site == data { 9 } else { 6 };
        (0..count).for_each(|_| made.block(site, 0, GIB));
    }
    let mut at = 0;
    for block in &made.blocks {
        let kind = EventKind::Malloc.name().into();
        made.state.events.entries.push(Event { kind, address: at, ..Event::default() });
        at += block.0;
    }
    made.trains(&[]);
    made.refused(2 * GIB, 0, net);
    unfolded(&made.concludes())
}

#[test]
fn a_dataset_in_a_list_that_was_there_before_the_model_ran_is_told_as_one_tensor_is() {
    let said = data_in_a_list(true, true);
    assert!(said.contains("train.py:6 in main has 9 GiB in 9 blocks"), "{said}");
    assert!(said.contains("are a dataset, leave it on the host"), "{said}");
    // It may be what a model of functions keeps for its backward.
    for said in [data_in_a_list(false, true), data_in_a_list(true, false)] {
        assert!(!said.contains("dataset"), "{said}");
    }
}

#[test]
fn checkpoints_are_not_advised_where_activations_of_modules_are_few() {
    let said = |activations: u64| {
        let mut made = with_weights(6);
        made.blocks.iter_mut().for_each(|block| block.3 = 3);
        let layer = made.module("net.0", 9, "train");
        let loss = made.line(16, "loss");
        let gradient = made.site(&[frame("NllLossBackward0", 0, "")], "", Phase::Backward);
        made.block(layer, 6, activations);
        made.block(loss, 6, 6 * GIB);
        made.block(gradient, 6, 6 * GIB);
        made.trains(&[("train", 20), ("loss", 16)]);
        made.lows(|_| 14 * GIB);
        made.device.total_bytes = made.device.live.all.bytes + MIB;
        made.refused(GIB, 0, loss);
        unfolded(&made.concludes())
    };
    let few = said(256 * MIB);
    assert!(few.contains("a loss over a large vocabulary can be computed in chunks"), "{few}");
    assert!(!few.contains("activation checkpointing"), "{few}");
    // A model of functions has activations, too, but outside of modules.
    for more in [said(3 * GIB), said(0)] {
        assert!(more.contains("activation checkpointing"), "{more}");
    }
}

#[test]
fn weights_that_a_step_has_copied_are_no_matter_of_its_batch() {
    let said = |step: u32| {
        let mut made = with_weights(4);
        let copied = made.line(7, "<module>");
        (0..32).for_each(|_| made.block(copied, step, 64 * MIB));
        made.blocks.iter_mut().for_each(|block| block.3 = 3);
        made.trains(&[("train", 20)]);
        made.lows(|_| GIB);
        made.refused(64 * MIB, 0, copied);
        made.device.total_bytes = made.device.live.all.bytes + MIB;
        unfolded(&made.concludes())
    };
    let now = said(4);
    assert!(now.contains("is larger than those before") && now.contains("100% weights"), "{now}");
    assert!(now.contains("keep copies on the host") && !now.contains("batch, length"), "{now}");
    let before = said(0);
    assert!(!before.contains("keep copies on the host"), "{before}");
}

#[test]
fn a_step_that_was_large_is_no_one_tensor_where_none_is_large() {
    let said = |size: u64| {
        let mut made = with_weights(40);
        made.lows(|_| GIB);
        made.device.timeline[7].live_high_bytes = 9 * GIB;
        let kind = EventKind::Malloc.name().into();
        made.state.events.entries = vec![Event { kind, size, ..Event::default() }];
        unfolded(&made.concludes())
    };
    let many = said(500 * MIB);
    assert!(many.contains("give such a step less") && !many.contains("one tensor"), "{many}");
    let one = said(6 * GIB);
    assert!(one.contains("one block of 6 GiB came and went"), "{one}");
    assert!(one.contains("look at the shape of that one tensor"), "{one}");
}

#[test]
fn blocks_without_gradients_are_no_matter_of_checkpoints() {
    let mut made = with_weights(0);
    let layer = made.module("net.0", 9, "embed");
    made.sites.last_mut().expect("a site").no_grad = true;
    (0..6).for_each(|_| made.block(layer, 0, 2 * GIB));
    made.trains(&[]);
    made.refused(4 * GIB, 0, layer);
    made.device.total_bytes = made.device.live.all.bytes + MIB;
    made.state.out_of_memory.as_mut().expect("set").asked_bytes = 64 * MIB;
    let said = unfolded(&made.concludes());
    assert!(said.contains("move them to the host") && !said.contains("checkpointing"), "{said}");
}

#[test]
fn a_first_evaluation_with_gradients_is_advised_of_no_grad_while_its_forward_runs() {
    let evaluation = |trained: &[(&str, u32)]| {
        let mut made = with_weights(10);
        let layers = (0..8).map(|layer| made.module(&format!("net.{layer}"), layer, "evaluate"));
        let layers: Vec<SiteId> = layers.collect();
        let forward = layers[7];
        layers.into_iter().for_each(|layer| made.block(layer, 10, 512 * MIB));
        made.trains(trained);
        made.lows(|_| GIB);
        made.refused(64 * MIB, 0, forward);
        unfolded(&made.concludes())
    };
    let said = evaluation(&[("train", 30)]);
    assert!(said.contains("if they only evaluate, run them in torch.no_grad()"), "{said}");
    let said = evaluation(&[("train", 30), ("evaluate", 20)]);
    assert!(!said.contains("no_grad"), "{said}");
}

#[test]
fn copies_that_a_healthy_training_makes_to_be_saved_belong_on_the_host() {
    let saving = |step: u32, asks_itself: bool| {
        let mut made = with_weights(40);
        let copies = made.line(7, "save");
        (0..8).for_each(|_| made.block(copies, step, 64 * MIB));
        let forward = made.module("net.0", 9, "train");
        (0..4).for_each(|_| made.block(forward, 40, 64 * MIB));
        made.trains(&[("train", 20)]);
        made.lows(|_| 600 * MIB);
        made.refused(64 * MIB, 0, if asks_itself { copies } else { forward });
        unfolded(&made.concludes())
    };
    let said = saving(40, true);
    assert!(said.contains("train.py:7 in save has 512 MiB in 8 blocks"), "{said}");
    assert!(said.contains("make each on the host (.cpu())"), "{said}");
    // They were there in the steps before, which fitted; or another line has no room.
    for (step, asks_itself) in [(20, true), (40, false)] {
        let said = saving(step, asks_itself);
        assert!(!said.contains("make each on the host"), "{said}");
    }
}

#[test]
fn losses_that_one_backward_is_to_take_together_are_told_in_the_first_step_too() {
    let first = |forwards: usize| {
        let mut made = with_weights(0);
        made.blocks.clear();
        let outer = made.module("net.0", 9, "train");
        (0..forwards).for_each(|_| made.block(outer, 0, GIB));
        made.trains(&[]);
        made.refused(64 * MIB, 0, outer);
        unfolded(&made.concludes())
    };
    let said = first(16);
    assert!(said.contains("if losses of several batches are summed for one backward"), "{said}");
    let said = first(1);
    assert!(!said.contains("losses of several batches"), "{said}");
}
