//! Piles within a step, and a device full of what a step needs.

use super::*;
use crate::EventKind;

/// Layers called from line 20 of `function`, with so many blocks of each in step 10.
fn piled(function: &str, counts: &[u32]) -> Made {
    let mut made = with_weights(10);
    for (number, &count) in counts.iter().enumerate() {
        let layer = made.module(&format!("model.{number}"), number as u32, function);
        (0..count).for_each(|_| made.block(layer, 10, 32 * MIB));
    }
    made.lows(|_| GIB);
    made
}

#[test]
fn forwards_that_pile_up_are_a_forgotten_no_grad_where_nothing_trains_on_them() {
    let mut made = piled("evaluate", &[20, 20]);
    let unusual = made.device.timeline.clone();
    made.trains(&[("train", 12)]);
    let (cause, first) = made.first();
    assert_eq!(cause, Cause::NoGrad);
    assert!(
        first.starts_with(
            "train.py:20 in evaluate keeps the graphs of 20 forwards (no torch.no_grad()?): 1.2 GiB"
        ),
        "{first}"
    );
    // A backward has run through the same line: they wait for the next one.
    let mut trained = piled("train", &[20, 20]);
    trained.trains(&[("train", 20)]);
    assert_eq!(trained.concludes().cause, Cause::Nothing);
    // There is an optimiser, but no step yet: three encoders of a first batch.
    let mut first_step = piled("train", &[3, 3]);
    first_step.trains(&[]);
    assert_eq!(first_step.concludes().cause, Cause::Nothing);
    // A model that runs one layer twenty times in each step has as much at each step's peak.
    let mut usual = piled("evaluate", &[20, 20]);
    usual.trains(&[("train", 12)]);
    usual.device.timeline = unusual;
    usual.device.timeline.iter_mut().for_each(|stretch| stretch.live_high_bytes = 2400 * MIB);
    assert_eq!(usual.concludes().cause, Cause::Nothing);
    // The training's last scores are live too.
    let mut remnant = piled("evaluate", &[20, 20]);
    let scores = remnant.module("head", 7, "train");
    remnant.block(scores, 10, MIB);
    remnant.trains(&[("train", 12), ("train", 20)]);
    assert_eq!(remnant.concludes().cause, Cause::NoGrad);
    // Gradients were off: no graph keeps them.
    let mut outputs = piled("evaluate", &[20, 20]);
    outputs.trains(&[("train", 12)]);
    outputs.sites.iter_mut().for_each(|site| site.no_grad = true);
    assert_eq!(outputs.concludes().cause, Cause::Collected);
}

#[test]
fn forwards_pile_up_also_where_the_last_of_them_is_refused_a_block_and_has_its_input() {
    let validates = |counts: &[u32], refused: &str| {
        let mut made = piled("evaluate", counts);
        made.trains(&[("train", 12)]);
        let site = made.module("model.9", 9, refused);
        made.refused(32 * MIB, 0, site);
        made.concludes().cause
    };
    assert_eq!(validates(&[1, 18, 19], "evaluate"), Cause::NoGrad);
    // Refused elsewhere, or a layer that is called twelve times.
    assert_eq!(validates(&[1, 18, 19], "train"), Cause::Full);
    assert_eq!(validates(&[1, 12, 12], "evaluate"), Cause::Full);
}

#[test]
fn what_one_line_buffers_is_told_to_be_fewer_at_once_and_what_was_trained_is_not() {
    let buffered = |line: u32, no_grad: bool, trained: &[(&str, u32)]| {
        let mut made = Made::at(9);
        let fetched = made.line(line, "fetch");
        made.sites[0].no_grad = no_grad;
        (0..28).for_each(|_| made.block(fetched, 9, 500 * MIB));
        made.trains(trained);
        made.lows(|_| 13 * GIB);
        made.refused(GIB, 0, fetched);
        made.concludes().lines.join("\n")
    };
    let (before, after): (&[_], &[_]) = (&[], &[("step", 37)]);
    for (said, is_buffer) in [
        (buffered(24, false, after), true),
        (buffered(24, true, before), true),
        // An activation of a model without modules.
        (buffered(37, false, &[("fetch", 37)]), false),
        (buffered(24, false, before), false),
    ] {
        assert_eq!(said.contains("keep fewer of that line's blocks at once"), is_buffer, "{said}");
        assert!(!said.contains("Of what is live"), "too little of it has a purpose: {said}");
    }
}

#[test]
fn results_of_a_line_in_many_modules_are_counted_together_and_weights_are_none() {
    let mut made = Made::at(0);
    let weights = made.line(63, "main");
    made.sites[0].no_grad = true;
    (0..50).for_each(|_| made.block(weights, 0, 80 * MIB));
    made.blocks.iter_mut().for_each(|block| block.3 = 3);
    for layer in 0..8 {
        let site = made.module(&format!("attention.{layer}"), layer, "ask");
        made.sites[site.0 as usize - 1].no_grad = true;
        (0..10).for_each(|_| made.block(site, 0, 100 * MIB));
    }
    made.refused(GIB, 0, weights);
    let (cause, first) = made.first();
    assert_eq!(cause, Cause::Leak);
    assert!(first.starts_with("train.py:20 in ask keeps 80 blocks (no step is marked): 7.8 GiB"));
}

#[test]
fn many_blocks_of_one_forward_are_no_pile_of_forwards() {
    // Four operations on one line of attention, and a layer called twelve times, beside code that
    // runs once.
    for counts in [[1, 4, 4, 4], [1, 12, 12, 12]] {
        let mut made = piled("evaluate", &counts);
        made.trains(&[("train", 12)]);
        assert_eq!(made.concludes().cause, Cause::Nothing, "{counts:?}");
    }
}

#[test]
fn graphs_of_past_steps_are_of_an_evaluation_only_where_no_backward_ran_through_the_line() {
    let mut evaluated = forwards(true, 4);
    evaluated.trains(&[("train", 12)]);
    assert_eq!(evaluated.concludes().cause, Cause::NoGrad);
    // Attention leaves four blocks a step of each line.
    let mut trained = forwards(true, 4);
    trained.trains(&[("train", 20)]);
    assert_eq!(trained.concludes().cause, Cause::AutogradGraphs);
}

#[test]
fn a_step_that_is_larger_than_the_others_is_told_with_what_it_needs_and_who_called_the_model() {
    let full = |highs: &[u64]| {
        let mut made = with_weights(9);
        let own = |line, name| frame("/home/me/train.py", line, name);
        let called = [own(20, "Net.forward"), own(37, "train"), own(49, "<module>")];
        // Code that runs once.
        let head =
            made.site(&[&[own(21, "Net.forward")], &called[1..]].concat(), "", Phase::Forward);
        made.block(head, 9, GIB);
        let layer = made.site(&called, "model.0", Phase::Forward);
        (0..13).for_each(|_| made.block(layer, 9, GIB));
        made.sites[head.0 as usize - 1].module = "model".into();
        made.trains(&[("train", 37)]);
        made.lows(|_| GIB);
        let highs = highs.iter().cycle();
        let stretches = made.device.timeline.iter_mut().zip(highs);
        stretches.for_each(|(stretch, &high)| stretch.live_high_bytes = high);
        made.refused(GIB, 0, layer);
        let conclusion = made.concludes();
        assert_eq!(conclusion.cause, Cause::Full);
        unfolded(&conclusion)
    };
    let of_live = "Of what is live: 93% activations of the forward (14 GiB), called from \
                   train.py:37 in train, train.py:49";
    let larger = full(&[6 * GIB]);
    assert!(
        larger.starts_with(&format!(
            "Step 9 of the run is larger than those before: 15 GiB of 16 GiB live, 1 GiB more \
             asked for by train.py:20 in Net.forward; typical peak 6 GiB. {of_live}"
        )),
        "{larger}"
    );
    assert!(larger.contains("those before fitted") && !larger.contains("lengths,"), "{larger}");
    // Some past steps had nearly as much, and one had more than now.
    let vary = full(&[6 * GIB, 6 * GIB, 11 * GIB]);
    assert!(vary.contains("steps differ") && vary.contains("bucket the lengths"), "{vary}");
    let most = full(&[6 * GIB, 6 * GIB, 17 * GIB]);
    assert!(most.starts_with("Step 9 of the run is larger than most before"), "{most}");
    let alike = full(&[15 * GIB]);
    assert!(alike.starts_with(
        "The device is full of live blocks, and nothing grows: 15 GiB of 16 GiB live"
    ));
    assert!(alike.contains(of_live) && alike.contains("a smaller batch"), "{alike}");
}

#[test]
fn forwards_that_may_wait_for_one_backward_are_told_in_the_advice_and_accused_of_nothing() {
    let full = |counts: &[u32]| {
        let mut made = piled("train", counts);
        made.trains(&[("train", 20)]);
        made.lows(|_| GIB);
        let live = made.device.live.all.bytes;
        made.device.total_bytes = live + MIB;
        made.refused(64 * MIB, 0, SiteId::NONE);
        made.concludes()
    };
    let several = full(&[40, 40]);
    assert_eq!(several.cause, Cause::Full);
    assert!(several.lines.iter().any(|line| line.contains("for one backward")), "{several:?}");
    // A layer that runs twenty times beside code that runs once is one forward.
    let one = full(&[1, 20, 20]);
    assert!(!one.lines.iter().any(|line| line.contains("for one backward")), "{one:?}");
}

#[test]
fn where_no_step_is_marked_blocks_of_one_line_are_kept_with_gradients_off_and_not_accused_with_them_on()
 {
    let server = |no_grad| {
        let mut made = Made::at(0);
        let bias = made.line(29, "forward");
        (0..60).for_each(|_| made.block(bias, 0, 64 * MIB));
        made.sites[0].module = "alibi".into();
        made.sites[0].no_grad = no_grad;
        made.refused(64 * MIB, 0, bias);
        made.first()
    };
    let (cause, first) = server(true);
    assert_eq!(cause, Cause::Leak);
    assert!(
        first.starts_with("train.py:29 in forward keeps 60 blocks (no step is marked)"),
        "{first}"
    );
    assert_eq!(server(false).0, Cause::Full);
}

/// A model of functions, called so often from line 20 of `evaluate`: all it keeps is of one module
/// and one line. `inputs` were made in line `from` of `function`, which has the same caller.
fn functions(passes: u32, a_pass: u32, (inputs, from, function): (u32, u32, &str)) -> Made {
    let mut made = with_weights(10);
    let main = frame("/home/me/train.py", 50, "<module>");
    let called = frame("/home/me/train.py", 20, "evaluate");
    let forward = frame("/home/me/train.py", 6, "Net.forward");
    let layer = made.site(&[forward, called, main.clone()], "net", Phase::Forward);
    let input = [frame("/home/me/train.py", from, function), main];
    let input = made.site(&input, "", Phase::Unknown);
    (0..passes * a_pass).for_each(|_| made.block(layer, 10, 32 * MIB));
    // The same line makes their targets.
    (0..inputs).for_each(|_| made.block(input, 10, MIB));
    (0..inputs).for_each(|_| made.block(input, 10, 512));
    made.lows(|_| GIB);
    made.trains(&[("train", 12)]);
    made
}

#[test]
fn forwards_of_a_model_of_functions_pile_up_with_their_inputs() {
    let (cause, first) = functions(20, 2, (20, 19, "evaluate")).first();
    assert_eq!(cause, Cause::NoGrad);
    assert!(
        first.starts_with(
            "train.py:20 in evaluate keeps the graphs of 20 forwards (no torch.no_grad()?)"
        ),
        "{first}"
    );
    // The latest has its input alone.
    assert_eq!(functions(20, 2, (22, 19, "evaluate")).first().0, Cause::NoGrad);
    let others = [
        // A cache in a module keeps no inputs.
        functions(40, 1, (0, 19, "evaluate")),
        functions(40, 1, (1, 19, "evaluate")),
        // Outputs without their graphs, and their inputs.
        functions(40, 1, (40, 19, "evaluate")),
        // What another function has made is no input of these.
        functions(20, 2, (20, 19, "load")),
    ];
    for made in others {
        assert_ne!(made.first().0, Cause::NoGrad);
    }
}

#[test]
fn losses_of_a_model_of_functions_that_no_backward_has_run_through_are_kept_graphs() {
    let kept = |a_step: u32, inputs: u32, trained: u32| {
        let mut made = with_weights(40);
        let main = frame("/home/me/train.py", 50, "<module>");
        let forward = frame("/home/me/train.py", 6, "Net.forward");
        let layer = made.site(&[forward, main], "net", Phase::Forward);
        let input = made.line(49, "<module>");
        for step in 3..=40 {
            (0..a_step).for_each(|_| made.block(layer, step, 16 * MIB));
            (0..inputs).for_each(|_| made.block(input, step, MIB));
            (0..inputs).for_each(|_| made.block(input, step, 512));
        }
        let a_step = u64::from(16 * a_step + inputs) * MIB;
        made.lows(|step| GIB + a_step * step.saturating_sub(2));
        made.trains(&[("<module>", trained)]);
        made.first()
    };
    let (cause, first) = kept(2, 1, 60);
    assert_eq!(cause, Cause::NoGrad, "{first}");
    assert!(
        first.starts_with("train.py:50 keeps graphs (no torch.no_grad()?), 33 MiB a step"),
        "{first}"
    );
    // Without inputs; outputs without their graphs, and their inputs; a training.
    for (a_step, inputs, trained) in [(2, 0, 60), (1, 1, 60), (2, 1, 50)] {
        assert_eq!(kept(a_step, inputs, trained).0, Cause::Leak);
    }
}

#[test]
fn a_full_device_with_much_of_a_line_that_no_backward_has_run_through_is_advised_of_no_grad() {
    let full = |trained: &[(&str, u32)], is_under_way: bool| {
        let mut made = with_weights(10);
        let evaluated = made.module("net", 1, "evaluate");
        let trains = frame("/home/me/train.py", 30, "train");
        let trained_on = made.site(&[trains], "net", Phase::Forward);
        (0..2).for_each(|_| made.block(evaluated, 10, 3 * GIB));
        (0..2).for_each(|_| made.block(trained_on, 10, 4 * GIB));
        made.lows(|_| GIB);
        made.trains(trained);
        let refused = if is_under_way { evaluated } else { trained_on };
        made.refused(2 * GIB, 0, refused);
        made.concludes()
    };
    let conclusion = full(&[("train", 30)], false);
    let words = |lines: &[String]| lines.join(" ").split_whitespace().collect::<Vec<_>>().join(" ");
    let text = words(&conclusion.lines);
    assert_eq!(conclusion.cause, Cause::Full);
    assert!(
        text.contains("No backward has run through train.py:20 in evaluate, which keeps 6 GiB")
            && text.contains(
                "if the line without a backward only evaluates, run it in torch.no_grad()"
            ),
        "{text}"
    );
    // Both are trained, or nothing was trained so far; or the forward still runs, and its graph may
    // be dropped then.
    let both = &[("train", 30), ("evaluate", 20)][..];
    for (trained, is_under_way) in [(both, false), (&[], false), (&both[..1], true)] {
        let text = words(&full(trained, is_under_way).lines);
        assert!(!text.contains("No backward") && !text.contains("no_grad"), "{text}");
    }
}

/// A training whose `validate`, in step 9, has made a score of 32 MiB from each of forty outputs
/// outside of `no_grad`; `with_graph`: another forward of it has run with gradients.
fn validated(trained: &[(&str, u32)], with_graph: bool) -> Made {
    let mut made = with_weights(9);
    let output = made.module("head", 7, "validate");
    made.sites[output.0 as usize - 1].no_grad = true;
    made.block(output, 9, 32 * MIB);
    let scores = made.line(22, "validate");
    (0..40).for_each(|_| made.block(scores, 9, 32 * MIB));
    if with_graph {
        let layer = made.module("layers.0", 8, "validate");
        made.block(layer, 9, 32 * MIB);
    }
    made.trains(trained);
    made.lows(|_| GIB);
    made
}

#[test]
fn what_an_evaluation_makes_of_its_outputs_after_no_grad_is_collected() {
    let (cause, first) = validated(&[("train", 12)], false).first();
    assert_eq!(cause, Cause::Collected, "{first}");
    assert!(first.starts_with("train.py:22 in validate collects 40 blocks within step 9"));
    // A backward has run through the line, the function trains, or there was no backward yet.
    for made in [
        validated(&[("validate", 22)], false),
        validated(&[("train", 12)], true),
        validated(&[], false),
    ] {
        assert_eq!(made.concludes().cause, Cause::Nothing);
    }
}

#[test]
fn a_training_that_needs_as_much_in_each_step_does_not_hide_what_an_evaluation_collects() {
    let collects = |has_events: bool, before: u64| {
        let mut made = validated(&[("train", 12)], false);
        made.device.timeline.iter_mut().for_each(|one| one.live_high_bytes = 2 * GIB);
        let event = |kind: EventKind, address, size| Event {
            kind: kind.name().into(),
            address,
            size,
            ..Event::default()
        };
        let mut events = Vec::new();
        for kind in [EventKind::Malloc, EventKind::Free] {
            events.extend((0..40).map(|at| event(kind, (1 << 50) + at, before)));
        }
        let mut at = 0;
        for block in &made.blocks {
            events.push(event(EventKind::Malloc, at, block.0));
            at += block.0;
        }
        if has_events {
            made.state.events.entries = events;
        }
        made.concludes().cause
    };
    assert_eq!(collects(true, 16 * MIB), Cause::Collected);
    // Each step had as many blocks of this size, or the events do not know.
    assert_eq!(collects(true, 32 * MIB), Cause::Nothing);
    assert_eq!(collects(false, 0), Cause::Nothing);
}

#[test]
fn an_evaluation_of_a_few_batches_with_graphs_has_both_remedies() {
    let full = |forwards: u32| {
        let mut made = piled("validate", &[forwards; 12]);
        made.trains(&[("train", 12)]);
        made.device.total_bytes = made.device.live.all.bytes + MIB;
        let layer = made.module("model.0", 0, "validate");
        made.refused(32 * MIB, 0, layer);
        unfolded(&made.concludes())
    };
    let few = full(5);
    assert!(few.contains("No backward has run through train.py:20 in validate"), "{few}");
    assert!(few.contains("if the line without a backward only evaluates"), "{few}");
    // It may be the first forward of another loss.
    let one = full(2);
    assert!(!one.contains("No backward"), "{one}");
}
