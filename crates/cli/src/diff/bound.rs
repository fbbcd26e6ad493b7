//! Bounds on the result of a comparison.
#![deny(unsafe_code)]

use std::str::FromStr;

use gruyere::heap::Bytes;
use gruyere_record::size::Size;

use super::compare::{Change, DeviceChange};

/// A bounded quantity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Metric {
    Live,
    Reserved,
    Pending,
    Blocks,
}

const METRICS: [(&str, Metric); 5] = [
    ("live", Metric::Live),
    ("held", Metric::Reserved),
    // Its former name, still used in scripts.
    ("reserved", Metric::Reserved),
    ("pending", Metric::Pending),
    ("blocks", Metric::Blocks),
];

/// A bound, as in `live>+1GiB`.
#[derive(Clone, Debug, PartialEq)]
pub struct Bound {
    text: String,
    metric: Metric,
    /// Whether it bounds the growth, rather than the final value.
    growth: bool,
    most: Size,
}

impl FromStr for Bound {
    type Err = String;

    fn from_str(text: &str) -> Result<Bound, String> {
        let expected =
            "expected METRIC>BOUND, as in live>+1GiB, with live, held, pending or blocks";
        let (name, bound) = text.split_once('>').ok_or(expected)?;
        let metric = METRICS.iter().find(|(known, _)| *known == name.trim()).ok_or(expected)?.1;
        let bound = bound.trim();
        let (growth, bound) = match bound.strip_prefix('+') {
            Some(rest) => (true, rest),
            None => (false, bound),
        };
        let most: Size = bound.parse().map_err(|reason| format!("{bound:?}: {reason}"))?;
        if !growth && matches!(most, Size::Percent(_)) {
            return Err("a share is relative to A: write it with a plus, as in live>+5%".to_owned());
        }
        Ok(Bound { text: text.to_owned(), metric, growth, most })
    }
}

impl Bound {
    /// The message if the bound is passed.
    pub fn passed_by(&self, change: &DeviceChange) -> Option<String> {
        let Change { before, after } = match self.metric {
            Metric::Live => change.live,
            Metric::Reserved => change.reserved,
            Metric::Pending => change.pending,
            Metric::Blocks => change.blocks,
        };
        let value = if self.growth { after.saturating_sub(before) } else { after };
        (value > self.most.resolve(before)).then(|| {
            let (device, [before, after]) =
                (change.name(), [before, after].map(|of| self.told(of)));
            format!("{device}: {} is passed: {before} before, {after} after", self.text)
        })
    }

    fn told(&self, amount: u64) -> String {
        match self.metric {
            Metric::Blocks => amount.to_string(),
            Metric::Live | Metric::Reserved | Metric::Pending => Bytes(amount).to_string(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bound_is_of_the_growth_or_of_the_end() {
        let change = |before, after| DeviceChange {
            live: Change { before, after },
            ..DeviceChange::default()
        };
        let passed = |text: &str, before, after| {
            text.parse::<Bound>().unwrap().passed_by(&change(before, after)).is_some()
        };
        assert!(passed("live>+1KiB", 0, 1025) && !passed("live>+1KiB", 0, 1024));
        assert!(!passed("live>+1KiB", 9999, 0));
        assert!(passed("live > 1KiB", 2000, 1025) && !passed("live>1KiB", 2000, 10));
        assert!(passed("live>+5%", 100, 106) && !passed("live>+5%", 100, 105));
        assert!(!passed("held>+0", 0, 9) && !passed("reserved>+0", 0, 9));
    }

    #[test]
    fn a_passed_bound_is_told_in_units_and_blocks_in_numbers() {
        let change = DeviceChange {
            live: Change { before: 64 << 20, after: 80 << 30 },
            blocks: Change { before: 7, after: 1024 },
            ..DeviceChange::default()
        };
        let told = |text: &str| text.parse::<Bound>().unwrap().passed_by(&change).expect("passed");
        let live = told("live>+1GiB");
        assert!(live.ends_with("is passed: 64.00 MiB before, 80.00 GiB after"), "{live}");
        let blocks = told("blocks>9");
        assert!(blocks.ends_with("is passed: 7 before, 1024 after"), "{blocks}");
    }

    #[test]
    fn what_is_no_bound_says_what_would_be() {
        for (text, named) in [
            ("live", "METRIC>BOUND"),
            ("heat>1", "held"),
            ("live>lots", "lots"),
            ("live>5%", "plus"),
        ] {
            let error = text.parse::<Bound>().unwrap_err();
            assert!(error.contains(named), "{text}: {error}");
        }
    }
}
