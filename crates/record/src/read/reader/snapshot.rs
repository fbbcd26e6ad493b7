//! A device at a moment, from the record.

use crate::gauges::{BlockCounts, DeviceFactsRead};
use crate::held::{Held, peak_ratio};
use crate::histogram::Counts;
use crate::picture::Picture;
use crate::{DeviceGauge, LIFETIMES, Reader, missing_share};

/// A device at a moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceSnapshot {
    /// Its number in the process.
    pub device: u32,
    /// Name, uuid, memory.
    pub facts: DeviceFactsRead,
    /// Live bytes.
    pub live: u64,
    /// Their peak.
    pub live_peak: u64,
    /// By pool (small, large), then lifetime; sums over shards.
    pub blocks: [[BlockCounts; LIFETIMES]; 2],
    /// Shards whose counters are not of one moment: the writer was killed half-way, or never
    /// paused.
    pub torn_shards: u32,
    /// Sizes of all requests so far, rounded as the blocks were.
    pub malloc_sizes: Counts,
    /// The device's gauges, by [`DeviceGauge`].
    pub gauges: Vec<u64>,
    /// Whether the gauges are not of one moment: the writer was killed half-way, or never paused.
    pub torn_gauges: bool,
}

impl DeviceSnapshot {
    /// One gauge.
    pub fn gauge(&self, gauge: DeviceGauge) -> u64 {
        self.gauges.get(gauge as usize).copied().unwrap_or(0)
    }

    /// Sums over pools and lifetimes.
    pub fn total(&self) -> BlockCounts {
        self.sum(|_, _| true)
    }

    /// Sums over the pools and lifetimes for which `chosen` returns true.
    pub fn sum(&self, chosen: impl Fn(usize, usize) -> bool) -> BlockCounts {
        let mut sum = BlockCounts::default();
        for (pool, lifetimes) in self.blocks.iter().enumerate() {
            for (lifetime, counts) in lifetimes.iter().enumerate() {
                if chosen(pool, lifetime) {
                    sum.add(*counts);
                }
            }
        }
        sum
    }

    /// Held memory by use. Lost is as of the last write of the gauges.
    pub fn held(&self) -> Held {
        Held {
            held: self.gauge(DeviceGauge::Reserved),
            live: self.live,
            waiting: self.total().pending_bytes(),
            found_lost: self.gauge(DeviceGauge::Lost),
            typical_request: self.gauge(DeviceGauge::TypicalRequest),
        }
    }

    /// Computes lost from the device's map in `reader`. The gauge is written at steps, alerts and
    /// every so many frees, so that of a process at rest may be old. A map that does not fit
    /// together (the process was at work) is no better, and changes nothing.
    pub fn read_lost(&mut self, reader: &Reader<'_>) {
        let Some(picture) = Picture::read(reader, self.device) else { return };
        let held = picture.held();
        let is_whole =
            picture.misfits.total() == 0 && held.held == self.gauge(DeviceGauge::Reserved);
        if let Some(lost) = self.gauges.get_mut(DeviceGauge::Lost as usize).filter(|_| is_whole) {
            *lost = held.found_lost;
        }
    }

    /// Peak held / peak live; `None` if nothing was live.
    pub fn peak_ratio(&self) -> Option<f64> {
        peak_ratio(self.gauge(DeviceGauge::ReservedPeak), self.live_peak)
    }

    /// 1 - largest satisfiable request / free bytes held, both as of the last write of the gauges:
    /// what is free now may be a step's memory more. 0 before the first write: a process at rest
    /// that has loaded its weights is not in pieces.
    pub fn external_fragmentation(&self) -> f64 {
        missing_share(self.gauge(DeviceGauge::LargestRequest), self.gauge(DeviceGauge::FreeHeld))
    }

    /// 1 - requested / live.
    pub fn internal_fragmentation(&self) -> f64 {
        let total = self.total();
        missing_share(total.live_requested(), total.live_bytes())
    }

    /// The size of the 99th-percentile request so far, within 7%. 0 before the first.
    pub fn request_p99(&self) -> u64 {
        if self.malloc_sizes.total() == 0 {
            return 0;
        }
        self.malloc_sizes.to_hdr(1.0).value_at_quantile(0.99)
    }

    /// Half of all bytes are asked for in requests of at most this size; within an eighth, 0 before
    /// the first.
    pub fn typical_request(&self) -> u64 {
        self.malloc_sizes.middle_of_bytes()
    }

    /// Largest satisfiable request, growth to the ceiling included, / 99th-percentile request;
    /// `None` before the first.
    pub fn p99_fits(&self) -> Option<f64> {
        let request = self.request_p99();
        let largest = self.gauge(DeviceGauge::LargestGrowing);
        (request > 0).then(|| largest as f64 / request as f64)
    }
}
