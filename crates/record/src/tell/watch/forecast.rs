//! The time to out of memory.
//!
//! Within a step, live memory goes up and down by far more than a leak grows. So the forecast uses
//! the *lows* and the *highs* of windows, each of whole steps if steps are marked:
//!
//! 1. The run's latest half is cut into windows, then its latest quarter, and so on down to a
//!    thirty-second. The longest of these *spans* that grows decides: a leak from the start is
//!    measured over a long time, and a new one is found soon.
//! 2. A span grows if its lows or its highs grow steadily and significantly ([`Trend`]); if only
//!    the lows do, the highs must not contradict. The slope is that of the series whose slope is
//!    the surer. Growth within what was live before is a wave of load, and has no forecast.
//! 3. The need now is the line of that slope above all highs: the hungriest step runs out of
//!    memory, not the mean one.
//! 4. The time left is the usable part of the [`capacity`] less that need, divided by the slope.
//!    The usable share is the most ever needed of the most ever held: lasting blocks between
//!    passing ones leave pages partly used, and a leak leaves ever more of them.
//!
//! **What is no growth.** With step marks, the time before the second step is ignored (weights,
//! optimizer state), and a span has at least ten steps. Without, a slow rhythm of the program could
//! look like growth, so more is required: each quarter of the span must exceed all earlier need;
//! the span must have gone up and down several times by much more than it grew; and the run's first
//! half must have needed most of the need now (or a model is just being loaded). Growth that would
//! take far longer than it was seen for has no forecast: [`Forecast::Far`].
//!
//! **What is not known.** A leak that began with the program, without marks, looks like a model
//! that is being loaded, or like a rhythm: [`Forecast::Unsure`], if more is live than before it.

use super::trend::Trend;
use crate::reader::DeviceSnapshot;
use crate::timeline::TimelineEntry;

/// A part of the run, from the record's timeline.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Point {
    /// Its end, seconds on a monotonic clock.
    pub seconds: f64,
    /// The training step at its end.
    pub step: u64,
    /// Lowest live bytes.
    pub low: u64,
    /// Highest need, bytes.
    pub high: u64,
    /// Highest bytes held for it; 0 if unknown.
    pub held: u64,
}

impl From<&TimelineEntry> for Point {
    fn from(entry: &TimelineEntry) -> Self {
        Point {
            seconds: entry.realtime_nanoseconds as f64 / 1e9,
            step: entry.sample.step,
            low: entry.sample.live_low,
            high: super::recent::needed(&entry.sample),
            held: entry.sample.reserved_high,
        }
    }
}

/// How memory grows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Growth {
    /// Seconds from the last point until memory runs out; 0: now.
    pub seconds: f64,
    /// Bytes per second.
    pub bytes_per_second: f64,
    /// Steps until then, if steps are marked.
    pub steps: Option<f64>,
}

/// When memory runs out.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Forecast {
    /// Too few points.
    #[default]
    Unknown,
    /// No steady growth in the points beyond what was live before.
    NoGrowth,
    /// Steady growth, which would take far longer than it was seen for: no forecast.
    Far,
    /// Growth beyond what was live before, but no steps are marked, and it may be the program's
    /// beginning or a rhythm: no forecast.
    Unsure,
    /// Memory grows, by these numbers.
    Growing(Growth),
}

impl Forecast {
    /// Seconds until memory runs out; `None` where that is not forecast.
    pub fn seconds(&self) -> Option<f64> {
        match self {
            Self::Growing(growth) => Some(growth.seconds),
            _ => None,
        }
    }
}

/// Windows of a span, at most.
const WINDOWS: usize = 48;
/// Windows of a span, at least.
const LEAST_WINDOWS: usize = 10;
/// The shortest span is this part of the run.
const SHORTEST: f64 = 1.0 / 32.0;
/// At least this share of what can be held is usable: more was held only for a need between two
/// looks.
const LEAST_USABLE: f64 = 0.9;
/// Growth counts for so many times as long as it was seen.
const HORIZON: f64 = 50.0;
/// Steps that belong to the warm-up.
const WARM_UP_STEPS: u64 = 2;
/// The part of its growth (one part in so many) by which a span must exceed what was live before.
const NEW: u64 = 4;
/// Without marks: times that a span must have turned down, by this share of the way between its
/// lowest and its highest.
const TURNS: usize = 4;
const TURN: f64 = 0.3;
/// Without marks: the share of the need now that the run's first half must have reached.
const OLD: f64 = 0.6;

/// The ceiling on a device's held bytes; 0 for an unused device.
pub fn capacity(device: &DeviceSnapshot) -> u64 {
    super::metric::limit(device)
}

/// When memory runs out, from a run's points in order of time and the device's capacity (bytes).
pub fn forecast(points: &[Point], capacity: u64) -> Forecast {
    let (Some(first), Some(last)) = (points.first(), points.last()) else {
        return Forecast::Unknown;
    };
    if capacity == 0 {
        return Forecast::Unknown;
    }
    let is_marked = last.step > first.step;
    let run = if is_marked {
        let warm = first.step.saturating_add(WARM_UP_STEPS);
        &points[points.partition_point(|point| point.step < warm)..]
    } else {
        points
    };
    let begin = run.first().map_or(last.seconds, |point| point.seconds);
    let age = last.seconds - begin;
    let (mut seen, mut is_unsure, mut is_far) = (false, false, false);
    let mut share = 0.5;
    while share >= SHORTEST {
        let since = last.seconds - age * share;
        let at = run.partition_point(|point| point.seconds < since);
        let (before, span) = run.split_at(at);
        let width = span.last().zip(span.first());
        let width = width.map_or(0.0, |(last, first)| last.seconds - first.seconds);
        let width = width / WINDOWS as f64;
        let windows = windows(span, is_marked, width);
        if windows.len() >= LEAST_WINDOWS {
            seen = true;
            let growth = growth(before, &windows, last.seconds, usable(points, capacity));
            let is_beyond = || is_beyond(&self::windows(before, is_marked, width), &windows);
            let is_near = |growth: &Growth| growth.seconds <= HORIZON * age * share;
            let is_new = || {
                let middle = begin + age / 2.0;
                is_marked && is_beyond()
                    || !is_marked && exceeds(before, span) && is_no_beginning(before, span, middle)
            };
            match growth {
                Some(growth) if !is_near(&growth) => is_far |= is_beyond(),
                Some(growth) if is_new() => {
                    let steps = span.last().zip(span.first()).map(|(last, first)| {
                        last.step.saturating_sub(first.step) as f64 / (last.seconds - first.seconds)
                            * growth.seconds
                    });
                    return Forecast::Growing(Growth {
                        steps: steps.filter(|_| is_marked),
                        ..growth
                    });
                }
                // Within what was live before: a wave of load, or a leak after a larger phase.
                Some(_) => is_unsure |= is_marked || is_beyond(),
                None => {}
            }
        }
        share /= 2.0;
    }
    match (seen, is_unsure, is_far) {
        (false, ..) => Forecast::Unknown,
        (true, true, _) => Forecast::Unsure,
        (true, false, true) => Forecast::Far,
        (true, false, false) => Forecast::NoGrowth,
    }
}

/// The usable part of `capacity`: the most ever needed of the most ever held, since partly used
/// pages are held too.
fn usable(points: &[Point], capacity: u64) -> f64 {
    let most = |value: fn(&Point) -> u64| points.iter().map(value).max().unwrap_or(0) as f64;
    let (needed, held) = (most(|point| point.high), most(|point| point.held));
    if held > needed {
        capacity as f64 * (needed / held).max(LEAST_USABLE)
    } else {
        capacity as f64
    }
}

/// Joins points into windows: each a whole step, and `width` seconds.
fn windows(span: &[Point], is_marked: bool, width: f64) -> Vec<Point> {
    let mut windows: Vec<Point> = Vec::with_capacity(WINDOWS + 1);
    let mut open: Option<(Point, Point)> = None;
    for &point in span {
        let (begun, whole) = match open {
            None => (point, point),
            Some((begun, whole)) => {
                let (low, high) = (whole.low.min(point.low), whole.high.max(point.high));
                (begun, Point { low, high, held: whole.held.max(point.held), ..point })
            }
        };
        let is_full =
            point.seconds - begun.seconds >= width && (!is_marked || point.step > begun.step);
        open = if is_full { None } else { Some((begun, whole)) };
        if is_full {
            windows.push(Point { seconds: (begun.seconds + point.seconds) / 2.0, ..whole });
        }
    }
    // The rest is no whole window, but its high counts all the same.
    if let (Some((_, rest)), Some(window)) = (open, windows.last_mut()) {
        window.high = window.high.max(rest.high);
    }
    windows
}

/// Whether the end of a span is more than was live before it, lows or highs, by a part of what they
/// rose. Else it may be a wave of load, of which there was one before.
fn is_beyond(before: &[Point], span: &[Point]) -> bool {
    let is_more = |value: fn(&Point) -> u64, point: &Point| {
        let most = |part: &[Point]| part.iter().map(value).max().unwrap_or(0);
        let n = span.len();
        let (first, last) = (most(&span[..n / 4]), most(&span[n - n / 4..]));
        last > value(point).saturating_add(last.saturating_sub(first) / NEW)
    };
    before.iter().all(|point| is_more(|of| of.low, point) || is_more(|of| of.high, point))
}

fn highest(points: &[Point]) -> u64 {
    points.iter().map(|point| point.high).max().unwrap_or(0)
}

/// The highest need of each quarter of a span.
fn quarters(span: &[Point]) -> [u64; 4] {
    let n = span.len();
    [0, 1, 2, 3].map(|k| highest(&span[k * n / 4..(k + 1) * n / 4]))
}

/// Whether the highs of each quarter of the span exceed all before.
fn exceeds(before: &[Point], span: &[Point]) -> bool {
    let quarters = quarters(span);
    quarters.is_sorted_by(|a, b| a < b) && quarters[0] >= highest(before)
}

/// Without marks: whether what rises is neither the run's beginning nor a rhythm.
fn is_no_beginning(before: &[Point], span: &[Point], middle: f64) -> bool {
    let most = quarters(span)[3];
    let old = before.iter().chain(span).take_while(|point| point.seconds <= middle);
    let was_needed = old.map(|point| point.high).max().unwrap_or(0) as f64;
    let lowest = span.iter().map(|point| point.low).min().unwrap_or(0);
    let way = most.saturating_sub(lowest) as f64;
    was_needed >= OLD * most as f64 && turns(span, TURN * way) >= TURNS
}

/// Times that the lows fell by at least `depth` from a high and rose again.
fn turns(span: &[Point], depth: f64) -> usize {
    let (mut count, mut is_falling) = (0, false);
    let (mut top, mut bottom) = (f64::NEG_INFINITY, f64::INFINITY);
    for point in span {
        let (low, high) = (point.low as f64, point.high as f64);
        if is_falling {
            bottom = bottom.min(low);
            if high - bottom >= depth {
                (is_falling, top) = (false, high);
            }
        } else {
            top = top.max(high);
            if top - low >= depth {
                (is_falling, bottom) = (true, low);
                count += 1;
            }
        }
    }
    count
}

fn growth(before: &[Point], windows: &[Point], now: f64, usable: f64) -> Option<Growth> {
    let series = |value: fn(&Point) -> u64| -> Vec<(f64, f64)> {
        windows.iter().map(|window| (window.seconds, value(window) as f64)).collect()
    };
    let lows = Trend::of(&series(|window| window.low))?;
    let highs = Trend::of(&series(|window| window.high))?;
    let slope = match (lows.grows(), highs.grows()) {
        (true, true) => {
            if lows.error <= highs.error {
                lows.slope
            } else {
                highs.slope
            }
        }
        (false, true) => highs.slope,
        // The highs may be too noisy to decide, but then they must leave room for growth.
        (true, false) if highs.slope + 2.0 * highs.error >= lows.slope => lows.slope,
        _ => return None,
    };
    let first = windows.first()?.seconds;
    let above = |window: &Point| window.high as f64 + slope * (now - window.seconds);
    let needed = windows.iter().map(above).fold(0.0, f64::max);
    // As if growth had begun only with the span.
    let earlier =
        before.iter().map(|point| point.high).max().unwrap_or(0) as f64 + slope * (now - first);
    let needed = if before.is_empty() { needed } else { needed.max(earlier) };
    let seconds = ((usable - needed) / slope).max(0.0);
    Some(Growth { seconds, bytes_per_second: slope, steps: None })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// A server's run of `seconds`, ten looks a second, no step marked.
    fn server(seconds: u64, low: impl Fn(u64) -> u64) -> Vec<Point> {
        let point = |tenth: u64| {
            let low = low(tenth) * MIB;
            Point { seconds: tenth as f64 / 10.0, low, high: low + 20 * MIB, ..Point::default() }
        };
        (0..seconds * 10).map(point).collect()
    }

    #[test]
    fn a_leak_from_the_start_without_marks_is_not_called_no_growth() {
        // 4.6 GiB in 30 s: as of a model that is being loaded.
        let leak = server(30, |tenth| tenth * 15);
        assert_eq!(forecast(&leak, 20 << 30), Forecast::Unsure);
        // With marks, the same growth is a leak.
        let marked: Vec<Point> =
            leak.iter().enumerate().map(|(n, &at)| Point { step: n as u64, ..at }).collect();
        let Forecast::Growing(growth) = forecast(&marked, 20 << 30) else { panic!("no growth") };
        assert!((growth.seconds - (20_480.0 - 4_520.0) / 150.0).abs() < 3.0, "{growth:?}");
    }

    #[test]
    fn a_wave_of_load_is_no_growth_below_the_crest_of_the_one_before() {
        // Results are kept for eight seconds. The load comes and goes in 40; a request is a step.
        let wave = |tenth: u64| {
            let turn = tenth as f64 / 400.0 * std::f64::consts::TAU;
            380 + (160.0 * (1.0 - turn.cos())) as u64
        };
        let marked = |seconds, low: &dyn Fn(u64) -> u64| -> Vec<Point> {
            let points = server(seconds, low).into_iter();
            let n = (0..).step_by(3);
            n.zip(points).map(|(step, at)| Point { step, ..at }).collect()
        };
        // In the first wave nothing tells it from growth.
        for seconds in 42..200 {
            let said = forecast(&marked(seconds, &wave), 1 << 30);
            assert!(said.seconds().is_none(), "{seconds} s: {said:?}");
        }
        // A leak under such load is found, and one that follows a need long gone.
        let leak = |tenth: u64| wave(tenth) + tenth / 5;
        let said = forecast(&marked(400, &leak), 2 << 30);
        assert!(matches!(said, Forecast::Growing(_)), "{said:?}");
        let after = |tenth: u64| if tenth < 300 { 600 } else { 200 + (tenth - 300) / 2 };
        let said = forecast(&marked(150, &after), 1 << 30);
        assert!(matches!(said, Forecast::Growing(_)), "{said:?}");
    }

    #[test]
    fn a_leak_below_what_loading_needed_for_a_moment_is_not_called_no_growth() {
        // Weights are made in 32 bits, and halved.
        let mut leak = server(50, |tenth| 300 + tenth / 2);
        leak[3].high = 2000 * MIB;
        assert_eq!(forecast(&leak, 4 << 30), Forecast::Unsure);
        assert_eq!(forecast(&leak, 20 << 30), Forecast::Far);
    }

    #[test]
    fn what_stays_within_earlier_need_does_not_grow() {
        let steady = server(30, |tenth| 4000 + tenth % 7);
        assert_eq!(forecast(&steady, 20 << 30), Forecast::NoGrowth);
        // It is loaded, and then serves.
        let loaded = server(60, |tenth| (tenth * 30).min(4000));
        assert_eq!(forecast(&loaded, 20 << 30), Forecast::NoGrowth);
        // At the end it rises again, as it did before.
        let rhythm = server(60, |tenth| 4000 + 1000 * u64::from(tenth < 100) + tenth % 300);
        assert_eq!(forecast(&rhythm, 20 << 30), Forecast::NoGrowth);
        // Too short to tell.
        assert_eq!(forecast(&steady[..9], 20 << 30), Forecast::Unknown);
    }
}
