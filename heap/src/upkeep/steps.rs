//! What is told and asked from time to time: steps, phases, tags, limits, memory to be given back.

use crate::heap::Heap;
use crate::profiler::{self, What};
use crate::sync::lock;
use crate::upkeep::phase::{Occasion, Phase};
use gruyere_record::{DeviceGauge, EventKind};
use std::sync::atomic::Ordering;

impl Heap {
    /// A training step (or a request of a server) is over.
    pub fn mark_step(&self) {
        let step = self.shared.step.fetch_add(1, Ordering::Relaxed) + 1;
        profiler::mark(What::Step, u64::from(step));
        if let Some(trace) = &self.trace {
            trace.step();
        }
        for device in self.devices() {
            if let Some(_guard) = device.query_guard() {
                let driver = &*self.shared.driver;
                device.streams.poll(driver);
                device.streams.lag.end_step();
                if device.passes_memory(&self.shared) {
                    device.fence_all(&self.shared, None);
                }
            }
            {
                let central = &mut *lock(&device.central);
                central.gauges.end_step(central.arenas.sample_busy_peak());
                central.gauges.set(&[(DeviceGauge::Step, u64::from(step))]);
            }
            device.publish_gauges(&self.shared);
            device.event(&self.shared, EventKind::Step, 0, u64::from(step));
            device.watch(&self.shared, Occasion::Step);
        }
    }

    /// Brings the record's timeline up to now, as looks and growth do meanwhile.
    pub fn sample(&self) {
        for device in self.devices() {
            let central = &mut *lock(&device.central);
            central.gauges.sample(central.arenas.sample_busy_peak());
        }
    }

    /// Writes what waits to go to the trace's file, where there is one.
    pub fn flush_trace(&self) {
        if let Some(trace) = &self.trace {
            trace.flush();
        }
    }

    /// The program says what it does from now on; memory that it does not need for that goes back
    /// to the devices (`phase`).
    pub fn mark_phase(&self, phase: Phase) {
        for device in self.devices() {
            device.watch(&self.shared, Occasion::Mark(phase));
        }
    }

    /// Gives the driver's objects back and closes the record. The heap must not be used by anybody
    /// else any more, and no block of it by any stream.
    pub fn shut_down(&self) {
        for device in self.devices() {
            device.trim(&self.shared);
            device.streams.destroy_events(&*self.shared.driver);
            let mut central = lock(&device.central);
            if central.backing.held == 0 {
                device.supply.close(&mut central, &*self.shared.driver);
            }
        }
        self.shared.record.close();
        self.flush_trace();
    }
}
