//! Live memory by purpose, and what is the first to go.

use super::*;
use crate::EventKind;

/// A training of two weights of 1 GiB, with a gradient of each, that resumed from a checkpoint on
/// the device: what it loaded lies beside them, of which `persistent` blocks were tagged. `asked`
/// bytes are refused.
fn resumed(persistent: usize, asked: u64) -> Made {
    let mut made = Made::at(5);
    let loads = [
        frame("/venv/lib/python3.12/site-packages/torch/serialization.py", 1606, "load"),
        frame("/home/me/train.py", 10, "main"),
    ];
    let loaded = made.site(&loads, "", Phase::Unknown);
    let (weights, gradients) = (made.line(12, "main"), made.module("model", 9, "main"));
    made.sites.last_mut().expect("a site").phase = Phase::Backward;
    (0..6).for_each(|_| made.block(loaded, 0, GIB));
    (0..2).for_each(|_| made.block(weights, 0, GIB));
    (0..persistent).chain(6..8).for_each(|at| made.blocks[at].3 = 3);
    (0..2).for_each(|_| made.block(gradients, 5, GIB));
    made.trains(&[("main", 20)]);
    made.lows(|_| 10 * GIB);
    made.refused(asked, 0, gradients);
    made
}

#[test]
fn states_of_a_checkpoint_on_the_device_are_states_and_the_rest_of_it_is_no_weight() {
    let conclusion = resumed(4, GIB).concludes();
    let said = unfolded(&conclusion);
    assert_eq!(conclusion.cause, Cause::Full, "{said}");
    assert!(said.contains("40% states of the optimiser (4 GiB)"), "{said}");
    assert!(said.contains("20% weights (2 GiB)"), "{said}");
    assert!(said.contains("20% loaded from files, neither weights nor states (2 GiB)"), "{said}");
    assert!(said.contains("map_location=\"cpu\""), "{said}");
}

#[test]
fn a_loaded_checkpoint_is_not_blamed_where_the_request_would_not_fit_without_it() {
    for made in [resumed(6, GIB), resumed(4, 3 * GIB)] {
        let said = unfolded(&made.concludes());
        assert!(!said.contains("map_location"), "{said}");
    }
}

/// A training whose attempts `again` at a forward of two layers ran out of memory.
fn attempts(again: &[usize]) -> Conclusion {
    let mut made = Made::at(0);
    let layers = [made.module("model.0", 9, "main"), made.module("model.1", 9, "main")];
    let mut events = Vec::new();
    for &blocks in again {
        for &layer in &layers[..blocks] {
            let address = made.blocks.iter().map(|block| block.0).sum();
            made.block(layer, 0, GIB);
            events.push(event(EventKind::Malloc, address));
        }
        events.push(event(EventKind::OutOfMemory, 0));
    }
    made.trains(&[("main", 20)]);
    made.state.events.entries = events;
    made.refused(GIB, 0, layers[1]);
    made.concludes()
}

fn event(kind: EventKind, address: u64) -> Event {
    Event { kind: kind.name().into(), address, ..Event::default() }
}

#[test]
fn what_an_attempt_that_ran_out_of_memory_has_left_is_the_first_to_go() {
    let said = unfolded(&attempts(&[2, 1]));
    assert!(said.contains("2 GiB is left of an attempt that ran out of memory before"), "{said}");
    assert!(said.contains("let go of the exception"), "{said}");
    // One forward, in which cuDNN asked for a workspace that was refused; one attempt.
    for attempt in [&[1][..], &[0, 2], &[2]] {
        let said = unfolded(&attempts(attempt));
        assert!(!said.contains("ran out of memory before"), "{said}");
    }
}

#[test]
fn an_attempt_is_known_again_where_another_cell_began_it_and_after_whole_steps() {
    let attempts = |steps: bool| {
        let mut made = Made::at(1);
        let forward = |made: &mut Made, cell: &str, line: u32, module: &str, phase| {
            let inner = (!module.is_empty()).then(|| frame("/home/me/net.py", 9, "Net.forward"));
            let outer = [frame("/home/me/train.py", line, "train"), frame(cell, 1, "<module>")];
            let frames: Vec<Frame> = inner.into_iter().chain(outer).collect();
            made.site(&frames, module, phase)
        };
        let cells = ["/tmp/ipykernel_1/4.py/In[4]", "/tmp/ipykernel_1/5.py/In[5]"];
        let gradient = forward(&mut made, cells[0], 20, "net.0", Phase::Backward);
        let mut events = Vec::new();
        let malloc = |made: &mut Made, site, step| {
            let address = made.blocks.iter().map(|block| block.0).sum();
            made.block(site, step, GIB);
            event(EventKind::Malloc, address)
        };
        events.push(malloc(&mut made, gradient, 0));
        events.extend(steps.then(|| event(EventKind::Step, 0)));
        for cell in cells {
            for (line, module) in [(19, ""), (20, "net.0"), (20, "net.1")] {
                let phase = if module.is_empty() { Phase::Unknown } else { Phase::Forward };
                let site = forward(&mut made, cell, line, module, phase);
                events.push(malloc(&mut made, site, 1));
            }
            events.push(event(EventKind::OutOfMemory, 0));
        }
        made.trains(&[("train", 20)]);
        made.state.events.entries = events;
        made.refused(GIB, 0, gradient);
        unfolded(&made.concludes())
    };
    // The gradients of the last step that was complete are none of the attempt's.
    let said = attempts(true);
    assert!(said.contains("3 GiB is left of an attempt that ran out of memory before"), "{said}");
    let said = attempts(false);
    assert!(said.contains("4 GiB is left of an attempt that ran out of memory before"), "{said}");
}

#[test]
fn an_attempt_in_the_text_of_a_cell_is_known_again_by_its_modules_alone() {
    let said = |modules: [&str; 2]| {
        let mut made = Made::at(0);
        let mut events = Vec::new();
        for (number, module) in modules.into_iter().enumerate() {
            let cell = frame(&format!("/tmp/ipykernel_1/{number}.py/In[{number}]"), 3, "<module>");
            let site = made.site(&[cell], module, Phase::Forward);
            made.block(site, 0, GIB);
            events.push(event(EventKind::Malloc, number as u64 * GIB));
            events.push(event(EventKind::OutOfMemory, 0));
        }
        made.state.events.entries = events;
        made.refused(GIB, 0, SiteId::NONE);
        unfolded(&made.concludes())
    };
    let told = "1 GiB is left of an attempt that ran out of memory before";
    assert!(said(["net.0", "net.0"]).contains(told));
    assert!(!said(["net.0", "net.1"]).contains(told));
}

#[test]
fn an_attempt_that_had_room_for_its_inputs_only_has_begun_anew_too() {
    let mut made = Made::at(0);
    let layer = made.module("model.0", 9, "main");
    let input = made.line(19, "main");
    let made_at = [(input, 0), (layer, GIB), (input, 2 * GIB)];
    made_at.iter().for_each(|&(site, _)| made.block(site, 0, GIB));
    let refused = event(EventKind::OutOfMemory, 0);
    let [first, second, third] = made_at.map(|(_, address)| event(EventKind::Malloc, address));
    made.state.events.entries = vec![first, second, refused.clone(), third, refused];
    made.refused(GIB, 0, layer);
    let said = unfolded(&made.concludes());
    assert!(said.contains("2 GiB is left of an attempt that ran out of memory before"), "{said}");
}

#[test]
fn an_attempt_that_had_no_room_for_its_first_input_has_begun_anew_too() {
    let said = |asks_for_input: bool| {
        let mut made = Made::at(0);
        let (input, layer) = (made.line(19, "main"), made.module("model.0", 9, "main"));
        made.block(input, 0, GIB);
        made.block(layer, 0, GIB);
        let refused = event(EventKind::OutOfMemory, 0);
        let [first, second] = [0, GIB].map(|address| event(EventKind::Malloc, address));
        made.state.events.entries = vec![first, second, refused.clone(), refused];
        made.refused(GIB, 0, if asks_for_input { input } else { layer });
        unfolded(&made.concludes())
    };
    assert!(said(true).contains("2 GiB is left of an attempt that ran out of memory before"));
    assert!(!said(false).contains("ran out of memory before"));
}

#[test]
fn a_refused_workspace_within_a_forward_is_no_attempt() {
    let mut made = Made::at(0);
    let (first, second) = (made.module("model.0", 9, "main"), made.module("model.1", 9, "main"));
    made.block(first, 0, GIB);
    made.block(second, 0, GIB);
    let refused = event(EventKind::OutOfMemory, 0);
    made.state.events.entries =
        vec![event(EventKind::Malloc, 0), refused.clone(), event(EventKind::Malloc, GIB), refused];
    made.refused(GIB, 0, second);
    let said = unfolded(&made.concludes());
    assert!(!said.contains("ran out of memory before"), "{said}");
}

/// A training with two weights of 1 GiB, whose optimiser made two states of each in `states`, and
/// is refused in `steps` with 1 GiB of temporaries.
fn stepping(file: &str, states: &str, steps: &str) -> String {
    let file = format!("/venv/lib/python3.12/site-packages/torch/optim/{file}.py");
    let mut made = Made::at(5);
    let weights = made.line(12, "main");
    (0..2).for_each(|_| made.block(weights, 0, GIB));
    made.blocks.iter_mut().for_each(|block| block.3 = 3);
    let of = |line, name: &str| [frame(&file, line, name), frame("/home/me/train.py", 22, "main")];
    let state = made.site(&of(150, states), "", Phase::Optimizer);
    (0..4).for_each(|_| made.block(state, 0, GIB));
    let temporary = made.site(&of(700, steps), "", Phase::Optimizer);
    made.block(temporary, 5, GIB);
    made.trains(&[("main", 20)]);
    made.lows(|_| 7 * GIB);
    made.device.total_bytes = 7 * GIB + MIB;
    made.refused(64 * MIB, 0, temporary);
    unfolded(&made.concludes())
}

#[test]
fn temporaries_of_a_step_of_all_weights_at_once_are_no_states_and_have_a_remedy() {
    let adam = stepping("adam", "Adam._init_group", "_multi_tensor_adam");
    assert!(adam.contains("57% states of the optimiser (4 GiB)"), "{adam}");
    assert!(adam.contains("14% temporaries of the optimiser's step (1 GiB)"), "{adam}");
    assert!(adam.contains("`foreach=False`"), "{adam}");
    // SGD makes its momenta in the function that steps.
    let sgd = stepping("sgd", "_multi_tensor_sgd", "_multi_tensor_sgd");
    assert!(sgd.contains("71% states of the optimiser (5 GiB)"), "{sgd}");
    let one = stepping("adam", "Adam._init_group", "_single_tensor_adam");
    assert!(!one.contains("foreach") && !one.contains("temporaries"), "{one}");
}
