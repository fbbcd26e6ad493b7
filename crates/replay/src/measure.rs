//! Measurements along a replay: areas, and the curve for the chart.

#![deny(unsafe_code)]
#![deny(clippy::unwrap_used)]

use crate::engine::Watch;

/// Points of a curve.
pub const POINTS: usize = 480;

/// Live and held memory over the operations of a replay.
#[derive(Clone, Debug)]
pub struct Curve {
    /// Allocations and frees of the whole trace.
    operations: u64,
    seen: u64,
    live_area: u128,
    held_area: u128,
    held_peak: u64,
    live: Vec<u64>,
    held: Vec<u64>,
}

impl Curve {
    /// A curve over `operations` allocations and frees.
    pub fn new(operations: u64) -> Self {
        let points = POINTS.min(operations.max(1) as usize);
        Self {
            operations,
            seen: 0,
            live_area: 0,
            held_area: 0,
            held_peak: 0,
            live: vec![0; points],
            held: vec![0; points],
        }
    }

    /// Held bytes over live bytes, both summed over the operations. 0 if nothing was ever live.
    pub fn area_ratio(&self) -> f64 {
        if self.live_area == 0 { 0.0 } else { self.held_area as f64 / self.live_area as f64 }
    }

    /// The maximum of live bytes within each of at most [`POINTS`] equal parts of the trace.
    pub fn live(&self) -> &[u64] {
        &self.live
    }

    /// The maximum of held bytes after operations, within each of at most [`POINTS`] equal parts of
    /// the trace.
    pub fn held(&self) -> &[u64] {
        &self.held
    }
}

impl Watch for Curve {
    fn after(&mut self, live: u64, held: impl FnOnce() -> u64) {
        let held = held();
        self.live_area += u128::from(live);
        self.held_area += u128::from(held);
        self.held_peak = self.held_peak.max(held);
        let point = (self.seen * self.live.len() as u64 / self.operations.max(1)) as usize;
        let point = point.min(self.live.len() - 1);
        self.live[point] = self.live[point].max(live);
        self.held[point] = self.held[point].max(held);
        self.seen += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_point_keeps_the_highest_of_its_part() {
        let mut curve = Curve::new(960);
        for i in 0..960 {
            curve.after(i, || 2 * i);
        }
        assert_eq!(curve.live().len(), POINTS);
        assert_eq!((curve.live()[0], curve.live()[479]), (1, 959));
        assert_eq!((curve.held()[0], curve.held()[479]), (2, 1918));
        assert!((curve.area_ratio() - 2.0).abs() < 1e-12);
    }

    #[test]
    fn short_traces_have_a_point_an_operation() {
        let mut curve = Curve::new(2);
        curve.after(512, || 1024);
        curve.after(0, || 1024);
        assert_eq!(curve.held(), [1024, 1024]);
        assert_eq!(curve.live(), [512, 0]);
    }
}
