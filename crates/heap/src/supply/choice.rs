//! Choosing a device's supply, from the configuration and the device's abilities.

use super::pages::remapped::Remapped;
use super::spans::Spans;
use super::{Supply, Way};
use crate::driver::Capabilities;
use crate::settings::Backing;
use crate::small::size_class::PAGE;

/// Spans that are plain allocations. `dedicated`: each large block has one of its own.
fn plain_spans(dedicated: bool) -> &'static dyn Supply {
    if dedicated { &Spans::DEDICATED } else { &Spans::PLAIN }
}

/// The service of large blocks on every device, if the configuration alone decides it; `dedicated`
/// as in [`choose`].
pub(crate) fn configured_way(wish: Backing, dedicated: bool) -> Option<Way> {
    match wish {
        Backing::Passthrough => Some(Spans::DIRECT.way(u64::MAX)),
        Backing::Fixed => Some(plain_spans(dedicated).way(u64::MAX)),
        Backing::Auto | Backing::Stitch | Backing::Pool => None,
    }
}

/// The supply for a device. `dedicated`: where spans are plain, each large block has an allocation
/// of its own.
pub(crate) fn choose(wish: Backing, device: &Capabilities, dedicated: bool) -> &'static dyn Supply {
    let plain = plain_spans(dedicated);
    let is_movable = device.vmm && pages_fit(device.granularity);
    let best: &'static dyn Supply = match (is_movable, device.pools) {
        (true, _) => &Remapped,
        (false, true) => &Spans::POOLED,
        (false, false) => plain,
    };
    if device.vmm && !is_movable && matches!(wish, Backing::Auto | Backing::Stitch) {
        log::warn!(
            "this device maps memory in units of {} B, and a page of {PAGE} B is not a multiple of \
             that: memory cannot be moved; using backing:{}",
            device.granularity,
            best.name()
        );
    }
    let (wanted, is_there, instead): (&'static dyn Supply, _, _) = match wish {
        Backing::Auto => return best,
        Backing::Passthrough => return &Spans::DIRECT,
        Backing::Fixed => return plain,
        Backing::Stitch => (&Remapped, is_movable, best),
        Backing::Pool => (&Spans::POOLED, device.pools, plain),
    };
    if is_there {
        return wanted;
    }
    log::warn!(
        "backing:{} was requested, but the device does not support it; using backing:{}",
        wanted.name(),
        instead.name()
    );
    instead
}

/// Whether whole pages are whole units of the driver's, for physical memory and mappings. Both are
/// powers of two; all moves are by pages.
pub fn pages_fit(granularity: u64) -> bool {
    granularity.is_power_of_two() && PAGE.is_multiple_of(granularity)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::Driver;
    use crate::driver::absent::AbsentDriver;

    const WISHES: [Backing; 5] =
        [Backing::Auto, Backing::Stitch, Backing::Pool, Backing::Fixed, Backing::Passthrough];

    fn device(vmm: bool, pools: bool) -> Capabilities {
        let absent = AbsentDriver { devices: 1 }.capabilities(0).unwrap();
        Capabilities { vmm, pools, granularity: if vmm { PAGE } else { 0 }, ..absent }
    }

    #[test]
    fn what_was_asked_for_is_chosen_where_the_device_can_do_it_else_the_next_best() {
        let chosen =
            |vmm, pools| WISHES.map(|wish| choose(wish, &device(vmm, pools), false).name());
        assert_eq!(chosen(true, true), ["stitch", "stitch", "pool", "fixed", "passthrough"]);
        assert_eq!(chosen(true, false), ["stitch", "stitch", "fixed", "fixed", "passthrough"]);
        assert_eq!(chosen(false, true), ["pool", "pool", "pool", "fixed", "passthrough"]);
        assert_eq!(chosen(false, false), ["fixed", "fixed", "fixed", "fixed", "passthrough"]);
        let coarse = Capabilities { granularity: 512 << 20, ..device(true, true) };
        assert_eq!(choose(Backing::Stitch, &coarse, false).name(), "pool");
    }

    #[test]
    fn a_way_that_is_configured_is_that_of_every_device() {
        for wish in WISHES {
            for dedicated in [false, true] {
                let Some(way) = configured_way(wish, dedicated) else { continue };
                for (vmm, pools) in [(false, false), (false, true), (true, false), (true, true)] {
                    assert_eq!(choose(wish, &device(vmm, pools), dedicated).way(u64::MAX), way);
                }
            }
        }
        assert_eq!(configured_way(Backing::Passthrough, false), Some(Way::Driver));
        assert_eq!(configured_way(Backing::Fixed, true), Some(Way::Dedicated));
    }

    #[test]
    fn pages_are_made_of_any_power_of_two_that_divides_them() {
        for granularity in [4 << 10, 64 << 10, 512 << 10, PAGE] {
            assert!(pages_fit(granularity), "{granularity}");
        }
        for granularity in [0, 3 << 10, 2 * PAGE, 512 << 20] {
            assert!(!pages_fit(granularity), "{granularity}");
        }
    }
}
