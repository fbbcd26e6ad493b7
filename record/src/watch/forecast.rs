//! The time to out of memory.
//!
//! In every step of a program, what is live goes up and down by far more than a leak grows in it.
//! So the forecast goes by the *lows* and the *highs* of windows, each of whole steps where steps
//! are marked:
//!
//! 1. The run's latest half is cut into windows, then its latest quarter, and so on down to a
//!    thirty-second: the longest of these *spans* that grows is believed. So a leak from the start
//!    is measured over a long time, and one that has just begun is found soon.
//! 2. A span grows if its lows do, or its highs, steadily and by no accident ([`Trend`]); where
//!    only the lows do, the highs must not speak against it. The slope is that of the series whose
//!    slope is the surer.
//! 3. What is needed now is the line of that slope above all highs: out of memory comes with the
//!    hungriest step, not with the mean.
//! 4. The rest is the way from there to what can be used of the [`capacity`], divided by the slope.
//!    What can be used is the share of what was ever held that was ever needed: blocks that stay
//!    between blocks that go leave pages partly used, and a leak leaves ever more of them.
//!
//! **What is no growth.** Where steps are marked, what was before the second one is not looked at
//! (weights, optimizer state), and a span has ten steps at least. Where none are, a slow rhythm of
//! the program could look like growth, so more is asked for: each quarter of the span must have
//! gone beyond all that was needed before it, it must have gone up and down several times by much
//! more than it grew meanwhile, and the run's first half must have needed most of what is needed
//! now (or a model is just being loaded). Growth that would take far longer than it was seen for is
//! none either.

use super::trend::Trend;
use crate::reader::DeviceSnapshot;
use crate::timeline::TimelineEntry;

/// A part of the run, as the record's timeline tells it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Point {
    /// Its end, seconds on a clock that only goes on.
    pub seconds: f64,
    /// The training step at its end.
    pub step: u64,
    /// The least that was live, bytes.
    pub low: u64,
    /// The most that was needed, bytes.
    pub high: u64,
    /// The most that was held for it, bytes; 0 where that is not known.
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
    /// Until it will have run out, from the last point on; 0: now.
    pub seconds: f64,
    /// Bytes a second.
    pub bytes_per_second: f64,
    /// Steps until then, where steps are marked.
    pub steps: Option<f64>,
}

/// When memory will have run out.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Forecast {
    /// Too little was seen.
    #[default]
    Unknown,
    /// Not by what was seen: nothing grows steadily.
    NoGrowth,
    /// It grows, as the numbers say.
    Growing(Growth),
}

impl Forecast {
    /// Seconds until memory will have run out; `None` where nothing grows, or too little was seen.
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
/// Of what can be held, at least so much can be used: more was held only because it had been needed
/// for a moment between two looks.
const LEAST_USABLE: f64 = 0.9;
/// Growth is believed for so many times as long as it was seen.
const HORIZON: f64 = 50.0;
/// Steps that belong to the warm-up.
const WARM_UP_STEPS: u64 = 2;
/// Without marks: times that a span must have turned down, by so much of the way between its lowest
/// and its highest.
const TURNS: usize = 4;
const TURN: f64 = 0.3;
/// Without marks: what the run's first half must have needed of what is needed now.
const OLD: f64 = 0.6;

/// The ceiling on what a device may hold, bytes; 0 where it has not been used.
pub fn capacity(device: &DeviceSnapshot) -> u64 {
    super::metric::limit(device)
}

/// When memory will have run out, by a run's points in the order of time and what the device can
/// hold (bytes).
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
    let mut seen = false;
    let mut share = 0.5;
    while share >= SHORTEST {
        let since = last.seconds - age * share;
        let at = run.partition_point(|point| point.seconds < since);
        let (before, span) = run.split_at(at);
        let windows = windows(span, is_marked);
        if windows.len() >= LEAST_WINDOWS {
            seen = true;
            if (is_marked || is_new(before, span, begin + age / 2.0))
                && let Some(growth) =
                    growth(before, &windows, last.seconds, usable(points, capacity))
                && growth.seconds <= HORIZON * age * share
            {
                let steps = span.last().zip(span.first()).map(|(last, first)| {
                    last.step.saturating_sub(first.step) as f64 / (last.seconds - first.seconds)
                        * growth.seconds
                });
                return Forecast::Growing(Growth { steps: steps.filter(|_| is_marked), ..growth });
            }
        }
        share /= 2.0;
    }
    if seen { Forecast::NoGrowth } else { Forecast::Unknown }
}

/// What of `capacity` can be used: partly used pages are held too. Of the most that was ever held,
/// the most that was ever needed.
fn usable(points: &[Point], capacity: u64) -> f64 {
    let most = |value: fn(&Point) -> u64| points.iter().map(value).max().unwrap_or(0) as f64;
    let (needed, held) = (most(|point| point.high), most(|point| point.held));
    if held > needed {
        capacity as f64 * (needed / held).max(LEAST_USABLE)
    } else {
        capacity as f64
    }
}

/// Points put together: as many as make a whole step and a fair share of the span.
fn windows(span: &[Point], is_marked: bool) -> Vec<Point> {
    let (Some(first), Some(last)) = (span.first(), span.last()) else { return Vec::new() };
    let width = (last.seconds - first.seconds) / WINDOWS as f64;
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
    // What is left is no whole window, but its high is one all the same.
    if let (Some((_, rest)), Some(window)) = (open, windows.last_mut()) {
        window.high = window.high.max(rest.high);
    }
    windows
}

/// Without marks: whether the span's highs go beyond all before, it is no rhythm, and not the run's
/// beginning.
fn is_new(before: &[Point], span: &[Point], middle: f64) -> bool {
    let highest = |points: &[Point]| points.iter().map(|point| point.high).max().unwrap_or(0);
    let n = span.len();
    let quarters = [0, 1, 2, 3].map(|k| highest(&span[k * n / 4..(k + 1) * n / 4]));
    let is_rising = quarters.is_sorted_by(|a, b| a < b) && quarters[0] >= highest(before);
    let old = before.iter().chain(span).take_while(|point| point.seconds <= middle);
    let was_needed = old.map(|point| point.high).max().unwrap_or(0) as f64;
    let lowest = span.iter().map(|point| point.low).min().unwrap_or(0);
    let way = quarters[3].saturating_sub(lowest) as f64;
    is_rising && was_needed >= OLD * quarters[3] as f64 && turns(span, TURN * way) >= TURNS
}

/// Times that the lows fell by at least `depth` from a high, and rose again.
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
        // The highs may be too noisy to tell, but then they must leave room for it.
        (true, false) if highs.slope + 2.0 * highs.error >= lows.slope => lows.slope,
        _ => return None,
    };
    let first = windows.first()?.seconds;
    let above = |window: &Point| window.high as f64 + slope * (now - window.seconds);
    let needed = windows.iter().map(above).fold(0.0, f64::max);
    // As if it had only begun to grow with the span.
    let earlier =
        before.iter().map(|point| point.high).max().unwrap_or(0) as f64 + slope * (now - first);
    let needed = if before.is_empty() { needed } else { needed.max(earlier) };
    let seconds = ((usable - needed) / slope).max(0.0);
    Some(Growth { seconds, bytes_per_second: slope, steps: None })
}
