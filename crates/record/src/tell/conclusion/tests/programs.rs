//! Idle memory out of reach, and programs without torch or Python.

use super::*;
use crate::EventKind;
use crate::facts::Uses;

/// A device of 16 GiB held whole, half of it idle, in the chunks of live blocks; 512 MiB are
/// refused.
fn split() -> Made {
    let mut made = Made::at(0);
    (0..8).for_each(|_| made.block(SiteId::NONE, 0, GIB));
    made.device.held.whole_pages_bytes = 8 * GIB;
    made.device.held.reserved_bytes = 16 * GIB;
    made.refused(512 * MIB, 0, SiteId::NONE);
    made.stitched = true;
    made
}

#[test]
fn a_device_with_idle_memory_in_pieces_is_not_called_full_and_the_setting_that_helps_is_named() {
    let conclusion = split().concludes();
    assert_eq!(conclusion.cause, Cause::Pieces);
    let said = unfolded(&conclusion);
    assert!(said.starts_with("8 GiB of the 16 GiB held is idle, in pieces"), "{said}");
    assert!(said.contains("To do: `slack:0` in GRUYERE_CONF"), "{said}");
    // Tight already, or of a backing whose pages do not move.
    let mut tight = split();
    tight.state.process.configuration = "limit:90%, slack:0".to_owned();
    let spans = Made { stitched: false, ..split() };
    for made in [tight, spans] {
        let said = unfolded(&made.concludes());
        assert!(said.contains("in pieces") && !said.contains("slack:0"), "{said}");
        assert!(said.contains("torch.cat"), "{said}");
    }
}

#[test]
fn memory_that_was_freed_after_the_refusal_was_not_idle_at_it() {
    let mut made = Made::at(0);
    (0..8).for_each(|_| made.block(SiteId::NONE, 0, GIB));
    made.device.held.whole_pages_bytes = 8 * GIB;
    made.device.held.reserved_bytes = 16 * GIB;
    let event =
        |kind: EventKind, size| Event { kind: kind.name().to_owned(), size, ..Event::default() };
    made.state.events.entries =
        vec![event(EventKind::OutOfMemory, 512 * MIB), event(EventKind::Free, 8 * GIB)];
    let (cause, said) = made.first();
    assert_eq!(cause, Cause::Full, "{said}");
}

#[test]
fn a_program_without_torch_is_told_of_none_of_its_functions_and_of_no_setting_for_python() {
    let without_lines = |mut made: Made, torch, python| {
        made.state.process.uses = Some(Uses { torch, python });
        unfolded(&made.concludes())
    };
    let mut grows = Made::at(40);
    (0..16).for_each(|_| grows.block(SiteId::NONE, 0, 64 * MIB));
    (3..=40).for_each(|step| grows.block(SiteId::NONE, step, 16 * MIB));
    grows.lows(|step| GIB + 16 * MIB * step.saturating_sub(2));
    let mut large = Made::at(0);
    large.block(SiteId::NONE, 0, GIB);
    large.refused(20 * GIB, 0, SiteId::NONE);
    let mut full = Made::at(0);
    (0..64).for_each(|_| full.block(SiteId::NONE, 0, 250 * MIB));
    full.refused(GIB, 0, SiteId::NONE);
    let mut tight = split();
    tight.state.process.configuration = "slack:0".to_owned();
    for made in [grows, large, full, split(), tight] {
        let said = without_lines(made, false, false);
        for word in ["torch", "blame", "python", "tensor", ".item()", ".cpu()", "these lines"] {
            assert!(!said.contains(word), "{word}: {said}");
        }
        assert!(said.contains("To do:"), "{said}");
    }
    let said = without_lines(split(), false, true);
    assert!(said.contains("blame:large") && !said.contains("python -m gruyere"), "{said}");
    let said = without_lines(split(), true, true);
    assert!(said.contains("python -m gruyere"), "{said}");
}
