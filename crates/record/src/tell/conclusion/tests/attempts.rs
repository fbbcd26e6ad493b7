//! What attempts left that ran out of memory: forwards without gradients, and code without modules.

use super::*;
use crate::EventKind;

/// What a program did, in order.
enum Did {
    /// Made a block of so many GiB at a site, which is live still.
    Keeps(SiteId, u64),
    /// Made one at this address, which has been freed since.
    Makes(u64),
    Frees(u64),
    /// Was refused a request of a site.
    Refused(SiteId),
}
use Did::*;

/// An inference: its input, two layers without gradients, and a line elsewhere.
fn inference() -> (Made, [SiteId; 4]) {
    let mut made = Made::at(0);
    let layers = [made.module("net.0", 9, "serve"), made.module("net.1", 9, "serve")];
    made.sites.iter_mut().for_each(|site| site.no_grad = true);
    let (input, other) = (made.line(19, "serve"), made.line(40, "fill"));
    (made, [input, layers[0], layers[1], other])
}

/// The conclusion where the last request asks for `asked` bytes at the site of the last refusal.
fn after(mut made: Made, did: &[Did], asked: u64) -> Conclusion {
    let mut last = SiteId::NONE;
    for one in did {
        let (kind, address, site) = match *one {
            Keeps(site, size) => {
                let address = made.blocks.iter().map(|block| block.0).sum();
                made.block(site, 0, size * GIB);
                (EventKind::Malloc, address, SiteId::NONE)
            }
            Makes(address) => (EventKind::Malloc, (1 << 50) + address, SiteId::NONE),
            Frees(address) => (EventKind::Free, (1 << 50) + address, SiteId::NONE),
            Refused(site) => {
                last = site;
                (EventKind::OutOfMemory, 0, site)
            }
        };
        let kind = kind.name().into();
        made.state.events.entries.push(Event { kind, address, site, ..Event::default() });
    }
    made.refused(asked, 0, last);
    made.concludes()
}

const LEFT: &str = "is left of an attempt that ran out of memory before";

#[test]
fn an_inference_that_ran_out_of_memory_and_begins_anew_has_left_what_it_made() {
    let (made, [input, first, second, _]) = inference();
    let attempt = [Keeps(input, 2), Keeps(first, 2), Refused(second), Keeps(input, 1)];
    let did = attempt.into_iter().chain([Refused(first)]).collect::<Vec<_>>();
    let said = unfolded(&after(made, &did, GIB));
    assert!(said.contains(&format!("4 GiB {LEFT}")), "{said}");
    assert!(said.contains("let go of the exception"), "{said}");
    // Temporaries of the expression that was refused go at once; what was made since stays.
    let (made, [input, first, second, _]) = inference();
    let attempt = [Keeps(input, 2), Makes(1), Keeps(first, 2), Refused(second), Frees(1)];
    let did = attempt.into_iter().chain([Keeps(input, 1), Refused(first)]).collect::<Vec<_>>();
    let said = unfolded(&after(made, &did, GIB));
    assert!(said.contains(&format!("4 GiB {LEFT}")), "{said}");
}

#[test]
fn results_and_caches_of_requests_that_succeeded_are_none_of_an_attempts() {
    // The exception of the attempt was let go of.
    let (made, [_, first, second, _]) = inference();
    let requests = [Keeps(first, 2), Keeps(second, 2), Keeps(first, 2), Keeps(second, 2)];
    let attempt = [Makes(1), Refused(second), Frees(1), Keeps(first, 2), Refused(second)];
    let did = requests.into_iter().chain(attempt).collect::<Vec<_>>();
    let said = unfolded(&after(made, &did, GIB));
    assert!(!said.contains(LEFT), "{said}");
    // A workspace was refused, and the forward went on.
    let (made, [_, first, second, _]) = inference();
    let did = [Keeps(first, 2), Makes(1), Refused(first), Keeps(second, 2), Frees(1)];
    let did = did.into_iter().chain([Keeps(first, 2), Refused(second)]).collect::<Vec<_>>();
    let said = unfolded(&after(made, &did, GIB));
    assert!(!said.contains(LEFT), "{said}");
    // The attempt was refused its first input, so that it had nothing.
    let (made, [input, first, second, _]) = inference();
    let did = [Keeps(first, 2), Keeps(second, 2), Refused(input), Keeps(first, 2)];
    let did = did.into_iter().chain([Refused(second)]).collect::<Vec<_>>();
    let said = unfolded(&after(made, &did, GIB));
    assert!(!said.contains(LEFT), "{said}");
}

#[test]
fn what_a_line_made_until_it_was_refused_is_left_before_any_other_request() {
    let filled = |more: &[Did], asked| {
        let (made, [input, .., other]) = inference();
        let fills = (0..5).map(|_| Keeps(other, 3)).chain([Refused(other)]);
        let more = more.iter().map(|one| match *one {
            Keeps(site, size) => Keeps(site, size),
            _ => Refused(other),
        });
        let did = fills.chain(more).chain([Refused(input)]).collect::<Vec<_>>();
        after(made, &did, asked)
    };
    // Also a large request, which would fit.
    for asked in [2 * GIB, 14 * GIB] {
        let conclusion = filled(&[], asked);
        let said = unfolded(&conclusion);
        assert_eq!(conclusion.cause, Cause::Full, "{said}");
        assert!(said.contains(&format!("15 GiB {LEFT}")), "{said}");
        assert!(!said.contains("dataset") && !said.contains("Besides"), "{said}");
    }
    // It would not fit; or the line goes on, as a queue does where it waits for room.
    let conclusion = filled(&[], 17 * GIB);
    assert_eq!(conclusion.cause, Cause::LargeRequest, "{conclusion:?}");
    let (_, [.., other]) = inference();
    let said = unfolded(&filled(&[Keeps(other, 1)], 2 * GIB));
    assert!(!said.contains(LEFT), "{said}");
}
