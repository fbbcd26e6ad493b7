//! Every figure of one trace through one allocator on one simulated GPU.

#![deny(unsafe_code)]
#![deny(clippy::unwrap_used)]

use crate::bench::{BenchError, Contender, audit};
use crate::engine::{Blocks, End, replay_into};
use crate::measure::Curve;
use crate::stage::{PhantomStage, Setup, Stage};
use crate::trace::Trace;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Faults kept; further ones are only counted.
const KEPT_FAULTS: usize = 10;

/// Results of a run. Bytes and virtual nanoseconds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Observed {
    /// The operation of the trace at which memory ran out; `None`: completed.
    pub out_of_memory_at: Option<usize>,
    /// The most physical memory held.
    pub peak_reserved: u64,
    /// Peak reserved / peak live.
    pub hold_ratio: f64,
    /// Reserved / live, both summed over the operations.
    pub area_ratio: f64,
    /// The most address space reserved.
    pub peak_address: u64,
    /// End of the last kernel.
    pub device_end_ns: u64,
    /// Host time in waits of the allocator.
    pub host_blocked_ns: u64,
    /// Host cost of the allocator's driver calls, without waits.
    pub host_charged_ns: u64,
    /// Driver calls of the allocator in the trace, by the driver's name.
    pub calls: BTreeMap<String, u64>,
    /// Violations of stream order, misuses of the driver, broken invariants and leaks; the first
    /// few.
    pub faults: Vec<String>,
    /// Number of faults.
    pub fault_count: usize,
}

impl Observed {
    /// Driver calls of all kinds.
    pub fn driver_calls(&self) -> u64 {
        self.calls.values().sum()
    }

    /// Whether the run completed.
    pub fn completed(&self) -> bool {
        self.out_of_memory_at.is_none()
    }
}

/// Runs `contender` over `trace` on a simulated GPU with `setup`. Out of memory is a result, and
/// the allocator does not log it.
///
/// # Errors
/// If the allocator's setup fails or a replay breaks off.
pub fn observe(trace: &Trace, contender: &Contender, setup: Setup) -> Result<Observed, BenchError> {
    let mut stage = PhantomStage::new(trace, setup);
    let mut allocator = contender.set_up_quietly(&stage.driver())?;
    let (calls_before, charged_before) =
        (stage.allocator_calls_by_kind(), stage.time().charged_to_allocator);
    let (mut curve, mut blocks) = (Curve::new(trace.operations), Blocks::new(trace));
    let end = replay_into(trace, &mut stage, &mut *allocator, &mut curve, &mut blocks)?;
    let mut calls = stage.allocator_calls_by_kind();
    for (kind, before) in calls_before {
        if let Some(count) = calls.get_mut(&kind) {
            *count -= before;
        }
    }
    calls.retain(|_, count| *count > 0);
    let time = stage.time();
    let mut observed = Observed {
        out_of_memory_at: match end {
            End::Completed => None,
            End::OutOfMemory { op } => Some(op),
        },
        peak_reserved: stage.held_peak(),
        hold_ratio: stage.held_peak() as f64 / trace.peak_live.max(1) as f64,
        area_ratio: curve.area_ratio(),
        peak_address: stage.peak_address(),
        device_end_ns: time.device_end,
        host_blocked_ns: time.blocked_by_allocator,
        host_charged_ns: time.charged_to_allocator - charged_before,
        calls,
        faults: audit(trace, &mut stage, &mut *allocator, blocks)?,
        fault_count: 0,
    };
    observed.fault_count = observed.faults.len();
    observed.faults.truncate(KEPT_FAULTS);
    Ok(observed)
}
