//! Calls of a program from time to time: the end of a step, a phase, a sample of the record, the
//! end of the heap.

use crate::heap::Heap;
use crate::profiler::{self, What};
use crate::sync::lock;
use crate::upkeep::phase::{Occasion, Phase};
use gruyere_record::{DeviceGauge, EventKind};
use std::sync::atomic::Ordering;

impl Heap {
    /// Notes the end of a training step (or of a server's request).
    pub fn mark_step(&self) {
        self.give_back_imports();
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

    /// Brings the record's timeline up to now, as looks and growth do in between.
    pub fn sample(&self) {
        for device in self.devices() {
            let central = &mut *lock(&device.central);
            central.gauges.sample(central.arenas.sample_busy_peak());
        }
    }

    /// Writes the trace's buffered entries to its file, if there is one.
    pub fn flush_trace(&self) {
        if let Some(trace) = &self.trace {
            trace.flush();
        }
    }

    /// Notes the program's phase from now on; memory that it does not need for that goes back to
    /// the devices (`phase`).
    pub fn mark_phase(&self, phase: Phase) {
        for device in self.devices() {
            device.watch(&self.shared, Occasion::Mark(phase));
        }
    }

    /// Returns the driver's objects and closes the record. No other thread may use the heap any
    /// more, and no stream any block of it.
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
