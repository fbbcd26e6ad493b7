//! What is held, and what of it serves nobody: one meaning a word, for all that tell of it.

use serde::{Deserialize, Serialize};

use super::missing_share;

/// What is held and free falls in two, told in these words everywhere. Whole pages, which serve any
/// request or go back to the driver:
pub const IDLE: &str = "idle (whole free pages)";
/// And what lies stranded on pages that live blocks share, of use only to what happens to fit in:
pub const LOST: &str = "lost (free between live blocks)";

/// What is held of a device at a moment, in bytes. `live + waiting + lost + idle` is all of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Physical memory held from the driver.
    pub held: u64,
    /// Blocks in the program's hands, each rounded up to 512.
    pub live: u64,
    /// Blocks that the program freed and that wait for streams.
    pub waiting: u64,
    /// Free and unable to serve. Where pages move: parts of pages between blocks. Where they do
    /// not: what a typical request does not fit into ([`Held::typical_request`]).
    pub found_lost: u64,
    /// 0: lost is what lies in partly used pages. Else the request by which it was told: half of
    /// all bytes are asked for in requests of at most this size.
    pub typical_request: u64,
}

impl Held {
    /// Neither live nor waiting.
    pub fn free(&self) -> u64 {
        self.held.saturating_sub(self.live.saturating_add(self.waiting))
    }

    /// Free and unable to serve. It may have been told at an earlier moment than the other numbers,
    /// and is no more than what is free now.
    pub fn lost(&self) -> u64 {
        self.found_lost.min(self.free())
    }

    /// Free, and whole pages (or able to serve a typical request).
    pub fn idle(&self) -> u64 {
        self.free() - self.lost()
    }

    /// Lost / held; 0 where nothing is held.
    pub fn fragmentation(&self) -> f64 {
        share(self.lost(), self.held)
    }

    /// Idle / held; 0 where nothing is held.
    pub fn idle_share(&self) -> f64 {
        share(self.idle(), self.held)
    }

    /// 1 - live / held, torch's 1 - allocated / reserved: lost, idle and waiting together.
    pub fn unused(&self) -> f64 {
        missing_share(self.live, self.held)
    }

    /// All of it as files and `--json` have it.
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

/// What [`Held`] comes to, as each `--json` and the dump say it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Shares {
    /// Lost / held.
    pub fragmentation: f64,
    /// By what lost is told: `pages`, or `typical request`.
    pub fragmentation_by: String,
    /// That request; 0 where it is by pages.
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

/// `part` / `whole`; 0 where there is nothing.
fn share(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

/// Peak held / peak live, as the bench's "hold"; `None` where nothing was live.
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
