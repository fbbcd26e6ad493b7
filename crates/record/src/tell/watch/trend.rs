//! Whether a series grows steadily, and how fast.
//!
//! The slope is Theil's and Sen's: the median of the slopes of all pairs of points, unmoved by up
//! to 29% of wild points (P. K. Sen, "Estimates of the regression coefficient based on Kendall's
//! tau", JASA 63, 1968). Mann's and Kendall's test decides whether there is a trend at all: it
//! counts rising pairs against falling ones (M. G. Kendall, "Rank Correlation Methods"; ties
//! corrected).

/// Standard deviations beyond which growth is no accident. So high because the test runs again and
/// again: 1 in 4,000 looks at pure noise passes.
const SIGNIFICANT: f64 = 3.5;
/// Each quarter of the series must grow by between this share of the mean growth per quarter and
/// the mean divided by it: a step up, or a warm-up that levels off, is no steady growth.
const EVEN: f64 = 0.3;
/// Median absolute deviation to standard deviation, for a normal distribution.
const MAD_TO_SIGMA: f64 = 1.4826;
/// Efficiency lost by the median slope against least squares, for a normal distribution.
const MEDIAN_LOSS: f64 = 1.05;

/// A line through a series.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Trend {
    /// Units per second.
    pub slope: f64,
    /// The standard error of the slope.
    pub error: f64,
    /// Mann's and Kendall's statistic, in standard deviations; above 0 the series rises.
    pub kendall: f64,
    /// Whether the quarters of the series grew alike.
    pub is_even: bool,
}

impl Trend {
    /// The trend of `(seconds, value)` in order of time; `None` for fewer than four points, or if
    /// no point is later than another.
    pub fn of(points: &[(f64, f64)]) -> Option<Trend> {
        let n = points.len();
        if n < 4 {
            return None;
        }
        let mut slopes = Vec::with_capacity(n * (n - 1) / 2);
        let mut rising = 0i64;
        for (at, &(t, y)) in points.iter().enumerate() {
            for &(u, z) in &points[at + 1..] {
                rising += i64::from(z > y) - i64::from(z < y);
                if u > t {
                    slopes.push((z - y) / (u - t));
                }
            }
        }
        let slope = median(&mut slopes)?;
        let mut residuals: Vec<f64> = points.iter().map(|&(t, y)| y - slope * t).collect();
        let level = median(&mut residuals)?;
        let mut deviations: Vec<f64> =
            residuals.iter().map(|residual| (residual - level).abs()).collect();
        let sigma = median(&mut deviations)? * MAD_TO_SIGMA;
        let mean = points.iter().map(|point| point.0).sum::<f64>() / n as f64;
        let spread = points.iter().map(|point| (point.0 - mean).powi(2)).sum::<f64>().sqrt();
        Some(Trend {
            slope,
            error: if spread > 0.0 { MEDIAN_LOSS * sigma / spread } else { f64::INFINITY },
            kendall: kendall(points, rising),
            is_even: is_even(points, slope),
        })
    }

    /// Whether it rises significantly and evenly.
    pub fn grows(&self) -> bool {
        self.slope > 0.0 && self.kendall >= SIGNIFICANT && self.is_even
    }
}

/// The median; for an even number the mean of the middle two. `None` if empty.
pub fn median(values: &mut [f64]) -> Option<f64> {
    if values.is_empty() {
        return None;
    }
    let (middle, is_odd) = (values.len() / 2, values.len() % 2 == 1);
    let (below, &mut upper, _) = values.select_nth_unstable_by(middle, f64::total_cmp);
    if is_odd {
        return Some(upper);
    }
    let lower = below.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    Some((lower + upper) / 2.0)
}

fn kendall(points: &[(f64, f64)], rising: i64) -> f64 {
    let n = points.len() as f64;
    let mut values: Vec<f64> = points.iter().map(|point| point.1).collect();
    values.sort_by(f64::total_cmp);
    let weight = |n: f64| n * (n - 1.0) * (2.0 * n + 5.0);
    let ties: f64 = values.chunk_by(|a, b| a == b).map(|tied| weight(tied.len() as f64)).sum();
    let variance = (weight(n) - ties) / 18.0;
    if variance <= 0.0 {
        return 0.0;
    }
    // One less: the statistic is a whole number, the normal distribution is not.
    let corrected = rising - rising.signum();
    corrected as f64 / variance.sqrt()
}

/// Compares the medians of the quarters.
fn is_even(points: &[(f64, f64)], slope: f64) -> bool {
    let n = points.len();
    let quarter = |k: usize| {
        let part = &points[k * n / 4..(k + 1) * n / 4];
        let mut values: Vec<f64> = part.iter().map(|point| point.1).collect();
        let mut times: Vec<f64> = part.iter().map(|point| point.0).collect();
        Some((median(&mut times)?, median(&mut values)?))
    };
    let quarters: Option<Vec<(f64, f64)>> = (0..4).map(quarter).collect();
    let Some(quarters) = quarters else { return false };
    quarters.windows(2).all(|pair| {
        let expected = slope * (pair[1].0 - pair[0].0);
        let grown = pair[1].1 - pair[0].1;
        grown >= EVEN * expected && grown <= expected / EVEN
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Repeatable noise, -1 to 1.
    fn noise(n: u64) -> f64 {
        let mixed = (n + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        (mixed ^ mixed >> 31).wrapping_mul(0xBF58_476D_1CE4_E5B9) as f64 / u64::MAX as f64 * 2.0
            - 1.0
    }

    fn series(n: u64, value: impl Fn(f64) -> f64) -> Vec<(f64, f64)> {
        (0..n).map(|at| (at as f64, value(at as f64))).collect()
    }

    #[test]
    fn a_slope_is_found_through_noise_and_wild_points() {
        let mut points = series(40, |t| 100.0 + 3.0 * t + 5.0 * noise(t as u64));
        points[7].1 = 1e9;
        points[20].1 = -1e9;
        points[33].1 = 0.0;
        let trend = Trend::of(&points).expect("enough points");
        assert!(trend.grows() && (trend.slope - 3.0).abs() < 0.15, "{trend:?}");
        assert!((trend.slope - 3.0).abs() < 3.0 * trend.error, "{trend:?}");
    }

    #[test]
    fn pure_noise_does_not_grow() {
        let wrong = (0..2000u64)
            .filter(|seed| {
                let points = series(24, |t| noise(seed * 1000 + t as u64));
                Trend::of(&points).is_some_and(|trend| trend.grows())
            })
            .count();
        assert!(wrong <= 1, "{wrong} of 2000");
    }

    #[test]
    fn neither_a_step_nor_a_warm_up_nor_a_fall_grows_steadily() {
        let grows = |value: fn(f64) -> f64| {
            Trend::of(&series(40, value)).is_some_and(|trend| trend.grows())
        };
        assert!(grows(|t| 2.0 * t));
        assert!(!grows(|_| 5.0));
        assert!(!grows(|t| if t < 20.0 { 1.0 } else { 2.0 }), "a step");
        assert!(!grows(|t| 1.0 - (-t / 4.0).exp()), "a warm-up");
        assert!(!grows(|t| t.min(20.0)), "it has stopped");
        assert!(!grows(|t| (t - 30.0).max(0.0)), "it has only begun");
        assert!(!grows(|t| -2.0 * t));
    }

    #[test]
    fn too_few_points_have_no_trend() {
        assert_eq!(Trend::of(&series(3, |t| t)), None);
        assert_eq!(Trend::of(&[(1.0, 2.0); 8]), None);
    }
}
