//! A lower bound for every allocator that takes its memory while the program runs: the cost of the
//! peak of live.
//!
//! Every page of the peak must be created and made accessible, at the simulator's price
//! (`crates/phantom/prices`), before the launch of the first kernel that needs it. Two minimal
//! allocators bound the end of the device:
//!
//! - *at once*: one handle of the whole peak, one map and one access call, before anything else. A
//!   feasible plan;
//! - *floor*: only each page's own share of the cost, paid when live first needs the page, less the
//!   host's earlier idle time (in a full queue or in a wait of the program). Paying earlier in busy
//!   time delays more launches, paying later is too late, and idle time is free: so no allocator
//!   can be faster.

#![deny(unsafe_code)]
#![deny(clippy::unwrap_used)]

use crate::allocator::{AllocError, Allocator};
use crate::bench::{BenchError, ample};
use crate::engine::{Blind, Perfect, replay};
use crate::stage::{Charge, PhantomStage, Setup};
use crate::trace::{Op, Trace, rounded};
use gruyere::driver::{DeviceId, DevicePtr, StreamHandle};
use gruyere_phantom::{Costs, GRANULARITY, Gpu};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Best ends of the device. Virtual nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ends {
    /// With an allocator that costs nothing and never waits; the program's own events and waits
    /// cost nothing either, as in [`crate::bench::Timeline::perfect_end_ns`].
    pub perfect_ns: u64,
    /// The same, the program's own events and waits charged.
    pub program_ns: u64,
    /// With only each page's own share of the cost, at first need, with idle time used.
    pub floor_ns: u64,
    /// With the whole peak taken first.
    pub at_once_ns: u64,
    /// The cost of that: create, map and make accessible, one call each.
    pub taking_ns: u64,
}

/// The best ends of the device on `trace`, with driver calls at `prices`.
///
/// # Errors
/// If a replay breaks off.
pub fn ends(trace: &Trace, prices: &Costs) -> Result<Ends, BenchError> {
    let end = |charge, plan: Option<Plan>| {
        let setup =
            Setup { oracle: false, prices: *prices, ..Setup::timeline(ample(trace), charge) };
        let mut stage = PhantomStage::new(trace, setup);
        match plan {
            None => replay(trace, &mut stage, &mut Perfect::default(), &mut Blind)?,
            Some(plan) => {
                let mut least = Least::new(stage.gpu(), trace.devices.into(), plan, *prices);
                replay(trace, &mut stage, &mut least, &mut Blind)?
            }
        };
        Ok::<_, BenchError>(stage.time().device_end)
    };
    let peaks = peak_pages(trace);
    Ok(Ends {
        perfect_ns: end(Charge::Program, None)?,
        program_ns: end(Charge::DriverCalls, None)?,
        floor_ns: end(Charge::DriverCalls, Some(Plan::WhenNeeded))?,
        taking_ns: peaks.iter().map(|&pages| taking(prices, pages)).sum(),
        at_once_ns: end(Charge::DriverCalls, Some(Plan::AtOnce(peaks)))?,
    })
}

/// Pages of the peak of live of each device.
fn peak_pages(trace: &Trace) -> Vec<u64> {
    let mut blocks = vec![(0, 0); trace.blocks()];
    let mut live = vec![0; trace.devices.into()];
    let mut peaks = live.clone();
    for op in &trace.ops {
        match *op {
            Op::Alloc { size, block, device, .. } => {
                let device = usize::from(device);
                blocks[block as usize] = (rounded(size), device);
                live[device] += rounded(size);
                peaks[device] = peaks[device].max(live[device]);
            }
            Op::Free { block } => {
                let (bytes, device) = blocks[block as usize];
                live[device] -= bytes;
            }
            _ => {}
        }
    }
    peaks.into_iter().map(|bytes: u64| bytes.div_ceil(GRANULARITY)).collect()
}

/// Cost to create, map and make accessible `pages` pages, one call each.
fn taking(prices: &Costs, pages: u64) -> u64 {
    let bytes = pages * GRANULARITY;
    if pages == 0 {
        0
    } else {
        prices.create_of(bytes) + prices.map + prices.set_access_of(bytes, 1, 1)
    }
}

/// The time at which pages are taken.
enum Plan {
    /// When live first needs them.
    WhenNeeded,
    /// This many per device, at its first malloc.
    AtOnce(Vec<u64>),
}

/// An allocator that only pays for pages.
struct Least {
    gpu: Arc<Gpu>,
    plan: Plan,
    prices: Costs,
    /// Live bytes and pages taken, by device.
    devices: Vec<(u64, u64)>,
    /// Idle time used so far.
    used: u64,
    addresses: Perfect,
}

impl Least {
    fn new(gpu: Arc<Gpu>, devices: usize, plan: Plan, prices: Costs) -> Self {
        Self {
            gpu,
            plan,
            prices,
            devices: vec![(0, 0); devices],
            used: 0,
            addresses: Perfect::default(),
        }
    }

    fn pay(&mut self, ns: u64) {
        let time = self.gpu.host_time();
        let idle = match self.plan {
            Plan::WhenNeeded => {
                (time.throttled + time.blocked_by_program).saturating_sub(self.used).min(ns)
            }
            Plan::AtOnce(_) => 0,
        };
        self.used += idle;
        self.gpu.host_spend(ns - idle);
    }
}

impl Allocator for Least {
    fn name(&self) -> &str {
        "least"
    }

    fn malloc(
        &mut self,
        size: u64,
        device: DeviceId,
        stream: StreamHandle,
    ) -> Result<DevicePtr, AllocError> {
        let (live, taken) = &mut self.devices[device as usize];
        *live += rounded(size);
        let before = *taken;
        *taken = match &self.plan {
            Plan::WhenNeeded => before.max(live.div_ceil(GRANULARITY)),
            Plan::AtOnce(peaks) => peaks[device as usize],
        };
        // As if the earlier calls had covered more pages.
        let cost = taking(&self.prices, *taken) - taking(&self.prices, before);
        if cost > 0 {
            self.pay(cost);
        }
        self.addresses.malloc(size, device, stream)
    }

    fn free(
        &mut self,
        _: DevicePtr,
        size: u64,
        device: DeviceId,
        _: StreamHandle,
    ) -> Result<(), AllocError> {
        self.devices[device as usize].0 -= rounded(size);
        Ok(())
    }

    fn record_stream(&mut self, _: DevicePtr, _: StreamHandle) -> Result<(), AllocError> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ends_of(text: &str) -> Ends {
        ends(&Trace::read("tiny", text.as_bytes()).expect("a trace"), &Costs::default())
            .expect("ends")
    }

    /// Figures by hand: 0.15 us per malloc, 8 us of host per launch, 20 us per kernel.
    #[test]
    fn the_peak_is_paid_for_at_once_or_as_it_grows() {
        // 8 MiB: 29 + 3 x 1 to create, 2 to map, 38 + 3 x 0.5 to make accessible.
        let ends = ends_of("a 1 8388608 0 0\nk 0 1\nf 1\n");
        assert_eq!((ends.taking_ns, ends.perfect_ns), (73_500, 28_150));
        assert_eq!((ends.floor_ns, ends.at_once_ns), (101_650, 101_650));
        // A page, a hundred kernels (1.2 ms ahead of the host at their end), three more pages,
        // hidden behind the kernels.
        let ends = ends_of("a 1 2097152 0 0\nk 0 100\na 2 6291456 0 0\nk 0 1\nf 1\nf 2\n");
        assert_eq!(ends.perfect_ns, 150 + 8_000 + 101 * 20_000);
        assert_eq!(ends.floor_ns, ends.perfect_ns + 69_000);
        assert_eq!(ends.at_once_ns, ends.perfect_ns + 73_500);
    }

    #[test]
    fn idle_time_pays_for_pages() {
        // The host waits for the device, then needs a page that it could have taken during the
        // wait.
        let waits = ends_of("k 0 100\nh d\na 1 2097152 0 0\nk 0 1\nf 1\n");
        assert_eq!(waits.floor_ns, waits.program_ns);
        assert_eq!(waits.at_once_ns, waits.program_ns + 69_000);
    }

    #[test]
    fn events_of_the_program_are_told_from_the_allocators_cost() {
        let ends = ends_of("a 1 2097152 0 0\ne 1 0\nk 0 1\nf 1\n");
        // Creation and record of the event: 1 us each.
        assert_eq!(ends.program_ns, ends.perfect_ns + 2_000);
    }
}
