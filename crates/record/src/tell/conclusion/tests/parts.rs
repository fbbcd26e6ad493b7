//! Live memory by purpose.

use super::*;

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
    made.sites.last_mut().unwrap().phase = Phase::Backward;
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
    let said = conclusion.lines.join(" ");
    assert_eq!(conclusion.cause, Cause::Full, "{said}");
    assert!(said.contains("40% states of the optimiser (4 GiB)"), "{said}");
    assert!(said.contains("20% weights (2 GiB)"), "{said}");
    assert!(said.contains("20% loaded from files, neither weights nor states (2 GiB)"), "{said}");
    assert!(said.contains("map_location=\"cpu\""), "{said}");
}

#[test]
fn a_loaded_checkpoint_is_not_blamed_where_the_request_would_not_fit_without_it() {
    for made in [resumed(6, GIB), resumed(4, 3 * GIB)] {
        let said = made.concludes().lines.join(" ");
        assert!(!said.contains("map_location"), "{said}");
    }
}
