//! Defines held, live, lost and idle, once for every report.

use serde::{Deserialize, Serialize};

use super::missing_share;

/// Name of free memory in whole pages, which serve any request or go back to the driver.
pub const IDLE: &str = "idle (whole free pages)";
/// Name of free memory stranded on pages shared with live blocks, of use only to requests that fit.
pub const LOST: &str = "lost (free between live blocks)";

/// A device's held memory at a moment, in bytes: `live + waiting + lost + idle`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Physical memory held from the driver.
    pub held: u64,
    /// Blocks held by the program, each rounded up to 512.
    pub live: u64,
    /// Blocks freed by the program, waiting for streams.
    pub waiting: u64,
    /// Free and unable to serve. If pages move: parts of pages between blocks. If not: free runs
    /// too short for a typical request ([`Held::typical_request`]).
    pub found_lost: u64,
    /// 0: lost counts by partly used pages. Else the request that lost is measured by: half of all
    /// bytes are asked for in requests of at most this size.
    pub typical_request: u64,
}

impl Held {
    /// Neither live nor waiting.
    pub fn free(&self) -> u64 {
        self.held.saturating_sub(self.live.saturating_add(self.waiting))
    }

    /// Free and unable to serve. May be older than the other numbers, so it is capped at what is
    /// free now.
    pub fn lost(&self) -> u64 {
        self.found_lost.min(self.free())
    }

    /// Free whole pages (or memory able to serve a typical request).
    pub fn idle(&self) -> u64 {
        self.free() - self.lost()
    }

    /// Lost / held; 0 if nothing is held.
    pub fn fragmentation(&self) -> f64 {
        share(self.lost(), self.held)
    }

    /// Idle / held; 0 if nothing is held.
    pub fn idle_share(&self) -> f64 {
        share(self.idle(), self.held)
    }

    /// 1 - live / held, torch's 1 - allocated / reserved: lost, idle and waiting together.
    pub fn unused(&self) -> f64 {
        missing_share(self.live, self.held)
    }

    /// The shares for files and `--json`.
    pub fn shares(&self, peak_ratio: Option<f64>) -> Shares {
        Shares {
            fragmentation: self.fragmentation(),
            fragmentation_by: self.basis().to_owned(),
            typical_request_bytes: self.typical_request,
            lost_bytes: self.lost(),
            idle_bytes: self.idle(),
            unused: self.unused(),
            peak_ratio,
        }
    }

    fn basis(&self) -> &'static str {
        if self.typical_request == 0 { "pages" } else { "typical request" }
    }
}

/// The shares of [`Held`], as in each `--json` and in dumps.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Shares {
    /// Lost / held.
    pub fragmentation: f64,
    /// The measure of lost: `pages`, or `typical request`.
    pub fragmentation_by: String,
    /// The typical request; 0 if the measure is pages.
    pub typical_request_bytes: u64,
    /// Free and unable to serve.
    pub lost_bytes: u64,
    /// Free and able to serve.
    pub idle_bytes: u64,
    /// 1 - live / held.
    pub unused: f64,
    /// Peak held / peak live.
    pub peak_ratio: Option<f64>,
}

/// `part` / `whole`; 0 if `whole` is 0.
fn share(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

/// Peak held / peak live, the bench's "hold"; `None` if nothing was live.
pub fn peak_ratio(held_peak: u64, live_peak: u64) -> Option<f64> {
    (live_peak > 0).then(|| held_peak as f64 / live_peak as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_are_all_of_it_however_old_what_was_lost_is() {
        for found_lost in [0, 10, 40, 1 << 40] {
            let held = Held { held: 100, live: 50, waiting: 10, found_lost, typical_request: 0 };
            assert_eq!(held.live + held.waiting + held.lost() + held.idle(), held.held);
            let shares = held.fragmentation() + held.idle_share() + 0.1;
            assert!((held.unused() - shares).abs() < 1e-12, "{held:?}");
        }
    }

    #[test]
    fn nothing_held_is_no_fragmentation() {
        let held = Held::default();
        assert_eq!((held.fragmentation(), held.idle_share(), held.unused()), (0.0, 0.0, 0.0));
        assert_eq!((peak_ratio(0, 0), peak_ratio(3, 2)), (None, Some(1.5)));
    }
}
