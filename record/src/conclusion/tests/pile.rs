//! What piles up within a step, and a device that is full of what a step needs.

use super::*;

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
    // There is an optimiser, and no step was made yet: three encoders of a first batch.
    let mut first_step = piled("train", &[3, 3]);
    first_step.trains(&[]);
    assert_eq!(first_step.concludes().cause, Cause::Nothing);
    // A model that runs one layer twenty times in each step has as much at each step's peak.
    let mut usual = piled("evaluate", &[20, 20]);
    usual.trains(&[("train", 12)]);
    usual.device.timeline = unusual;
    usual.device.timeline.iter_mut().for_each(|stretch| stretch.live_high_bytes = 2400 * MIB);
    assert_eq!(usual.concludes().cause, Cause::Nothing);
    // Gradients were off: no graph keeps them.
    let mut outputs = piled("evaluate", &[20, 20]);
    outputs.trains(&[("train", 12)]);
    outputs.sites.iter_mut().for_each(|site| site.no_grad = true);
    assert_eq!(outputs.concludes().cause, Cause::Collected);
}

#[test]
fn many_blocks_of_one_forward_are_no_pile_of_forwards() {
    // Four operations on one line of attention, and a layer that is called twelve times, beside
    // what runs once.
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
fn a_step_that_needs_more_than_the_others_is_told_to_be_one() {
    let full = |high: u64| {
        let mut made = with_weights(9);
        let layer = made.module("model.0", 1, "train");
        (0..14).for_each(|_| made.block(layer, 9, GIB));
        made.trains(&[("train", 20)]);
        made.lows(|_| GIB);
        made.device.timeline.iter_mut().for_each(|stretch| stretch.live_high_bytes = high);
        made.refused(GIB, 0, layer);
        made.concludes()
    };
    let longer = full(6 * GIB);
    assert_eq!(longer.cause, Cause::Full);
    assert!(
        longer.lines[0].starts_with("Step 9 needs more than the device has, and more than other")
    );
    assert!(longer.lines.iter().any(|line| line.contains("bound the largest batch")), "{longer:?}");
    let alike = full(15 * GIB);
    assert!(alike.lines[0].starts_with("The device is full of live blocks, and nothing grows"));
    assert!(alike.lines.iter().any(|line| line == "Of it: the forward 14 GiB (93%)"), "{alike:?}");
    assert!(alike.lines.iter().any(|line| line.contains("a smaller batch")), "{alike:?}");
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
