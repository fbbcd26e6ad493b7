//! The smallest device on which a trace completes.

#![deny(unsafe_code)]
#![deny(clippy::unwrap_used)]

/// Steps between the peak of live and twice that: the result is within a thousandth of the peak.
const STEPS: u64 = 1024;

/// The smallest capacity that `completes`, by bisection: a multiple of `peak_live / 1024`, rounded
/// down to bytes, between `peak_live` and 16 times that. `None`: not even that completes.
///
/// Completion need not be monotonic (a little more room can change the caching). The result does
/// complete, and the bisection begins with the same steps for every allocator.
///
/// # Errors
/// The first error of `completes`.
pub fn smallest<E>(
    peak_live: u64,
    mut completes: impl FnMut(u64) -> Result<bool, E>,
) -> Result<Option<u64>, E> {
    let capacity =
        |steps: u64| (u128::from(peak_live) * u128::from(STEPS + steps) / u128::from(STEPS)) as u64;
    let (mut low, mut high) = (0, STEPS);
    while !completes(capacity(high))? {
        (low, high) = (high, 2 * high + STEPS);
        if high > 15 * STEPS {
            return Ok(None);
        }
    }
    while high - low > 1 {
        let middle = (low + high) / 2;
        if completes(capacity(middle))? {
            high = middle;
        } else {
            low = middle;
        }
    }
    if low == 0 && completes(capacity(0))? {
        return Ok(Some(capacity(0)));
    }
    Ok(Some(capacity(high)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fit(peak_live: u64, threshold: u64) -> Option<u64> {
        smallest::<()>(peak_live, |capacity| Ok(capacity >= threshold)).expect("no errors")
    }

    #[test]
    fn the_threshold_is_met_within_a_thousandth() {
        let live = 10_000;
        for threshold in [10_000, 10_001, 10_017, 12_345, 19_999, 25_000, 60_000, 159_999] {
            let found = fit(live, threshold).expect("found");
            assert!(found >= threshold && found - threshold <= live / 1000, "{threshold}: {found}");
        }
    }

    #[test]
    fn a_trace_that_never_completes_has_no_fit() {
        assert_eq!(fit(1 << 30, u64::MAX), None);
    }
}
