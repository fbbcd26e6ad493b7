//! States of an optimiser.

use super::*;

/// Weights that the package knows.
fn with_tagged_weights(now: u64) -> Made {
    let mut made = with_weights(now);
    made.blocks.iter_mut().for_each(|block| block.3 = 3);
    made
}

#[test]
fn states_of_an_optimiser_that_were_made_twice_are_found() {
    let adam = "/venv/lib/python3.12/site-packages/torch/optim/adam.py";
    let states = |steps: &[u32]| {
        let mut made = with_tagged_weights(20);
        for (line, &step) in steps.iter().enumerate() {
            for moment in [1, 2] {
                let frames =
                    [frame(adam, moment, "_init_group"), frame("t.py", 50 + line as u32, "train")];
                let site = made.site(&frames, "", Phase::Optimizer);
                (0..16).for_each(|_| made.block(site, step, 64 * MIB));
            }
        }
        made.lows(|_| GIB);
        made.first()
    };
    assert_eq!(states(&[1]).0, Cause::Nothing);
    let (cause, first) = states(&[1, 9]);
    assert_eq!(cause, Cause::OptimizerTwice);
    assert!(
        first.starts_with("The states of an optimiser are there twice, made in steps 1 and 9"),
        "{first}"
    );
}

#[test]
fn a_second_optimiser_of_more_weights_makes_more_states_than_there_are_weights() {
    let adam = "/venv/lib/python3.12/site-packages/torch/optim/adam.py";
    // 16 weights; in step 1 an optimiser made the states of 4, in step 9 one those of `later`.
    let states = |later: u32| {
        let mut made = with_tagged_weights(20);
        for (step, count) in [(1, 4), (9, later)] {
            let frames = [frame(adam, 1, "_init_group"), frame("t.py", 50, "train")];
            let site = made.site(&frames, "", Phase::Optimizer);
            (0..count).for_each(|_| made.block(site, step, 64 * MIB));
        }
        made.lows(|_| GIB);
        made.first()
    };
    // add_param_group: the other twelve.
    assert_eq!(states(12).0, Cause::Nothing);
    let (cause, first) = states(16);
    assert_eq!(cause, Cause::OptimizerTwice);
    assert!(first.contains("made in steps 1 and 9 (t.py:50 in train): 256 MiB of"), "{first}");
}

#[test]
fn an_optimiser_that_keeps_many_states_of_a_weight_is_none_that_exists_twice() {
    // A history of LBFGS; states of another author's optimiser, of another type than the weights,
    // or of weights that came later.
    for (file, size) in [
        ("/venv/lib/python3.12/site-packages/torch/optim/lbfgs.py", 64 * MIB),
        ("/home/me/master_adam.py", 64 * MIB),
        ("/venv/lib/python3.12/site-packages/torch/optim/adam.py", 128 * MIB),
    ] {
        let mut made = with_tagged_weights(20);
        for step in 1..=5 {
            let site = made.site(
                &[frame(file, 1, "step"), frame("/home/me/train.py", 50, "train")],
                "",
                Phase::Optimizer,
            );
            (0..16).for_each(|_| made.block(site, step, size));
        }
        made.refused(64 * MIB, 0, SiteId::NONE);
        assert_ne!(made.first().0, Cause::OptimizerTwice, "{file}");
    }
}
