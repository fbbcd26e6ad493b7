//! Before/after pairs, and the bounds that count as a regression.

use crate::amounts::bytes;
use std::str::FromStr;

/// A share of 1, written as percent.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Share(f64);

impl FromStr for Share {
    type Err = String;
    fn from_str(text: &str) -> Result<Share, String> {
        let number = text.strip_suffix('%').unwrap_or(text).trim().parse::<f64>().ok();
        let number = number.filter(|number| number.is_finite() && *number >= 0.0);
        number
            .map(|number| Share(number / 100.0))
            .ok_or_else(|| "expected a percentage, as in 2%".to_owned())
    }
}

/// Values before and now.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Pair<T> {
    pub before: Option<T>,
    pub now: T,
}

impl Pair<u64> {
    /// Growth as a share of the value before; `None` if there is nothing to compare.
    pub fn growth(self) -> Option<f64> {
        let before = self.before.filter(|&before| before > 0)?;
        Some(self.now as f64 / before as f64 - 1.0)
    }
}

impl Pair<f64> {
    /// Difference to the ratio before.
    pub fn rise(self) -> Option<f64> {
        Some(self.now - self.before?)
    }
}

/// Bounds of a regression: growth by more than a share of the value before, or a ratio that rose by
/// more than this.
#[derive(Clone, Copy, Debug, Default)]
pub struct Bounds {
    pub growth: Option<Share>,
    pub ratio: Option<Share>,
}

impl Bounds {
    pub fn is_any(&self) -> bool {
        self.growth.is_some() || self.ratio.is_some()
    }

    /// Message if `what` of `whose` grew past the bound.
    pub fn growth_of(&self, whose: &str, what: &str, pair: Pair<u64>) -> Option<String> {
        let (Share(bound), grew) = (self.growth?, pair.growth()?);
        let (before, now) = (bytes(pair.before.unwrap_or(0)), bytes(pair.now));
        (grew > bound).then(|| {
            format!(
                "{whose}: {what} grew by {:.2}% ({before} to {now}; bound {:.2}%)",
                grew * 100.0,
                bound * 100.0
            )
        })
    }

    /// Message if the ratio `what` of `whose` rose past the bound.
    pub fn rise_of(&self, whose: &str, what: &str, pair: Pair<f64>) -> Option<String> {
        let (Share(bound), rise) = (self.ratio?, pair.rise()?);
        let (before, now) = (pair.before.unwrap_or(0.0), pair.now);
        (rise > bound).then(|| {
            format!("{whose}: {what} rose from {before:.4} to {now:.4} (bound +{bound:.4})")
        })
    }
}

/// Change of a share, as in `+2.50%`.
pub fn percent(share: f64) -> String {
    format!("{:+.2}%", share * 100.0)
}
