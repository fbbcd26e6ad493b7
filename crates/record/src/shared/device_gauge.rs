//! The gauges of a device, a row each: `stat`, `top`, `watch`, `export`, `post`, the dump and the
//! tables of the documentation take them from here.
#![deny(unsafe_code)]

/// How a gauge's number moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Up and down.
    Gauge,
    /// Only up.
    Counter,
}

/// The unit of a gauge's number in the record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// A plain number.
    Count,
    /// Bytes.
    Bytes,
    /// Nanoseconds.
    Nanoseconds,
    /// Microseconds.
    Microseconds,
}

impl Unit {
    /// The base unit that metrics are given in; empty for a plain number.
    pub fn base(self) -> &'static str {
        match self {
            Self::Count => "",
            Self::Bytes => "bytes",
            Self::Nanoseconds | Self::Microseconds => "seconds",
        }
    }

    /// How many of this unit are one of [`Unit::base`].
    pub fn per_base(self) -> u64 {
        match self {
            Self::Count | Self::Bytes => 1,
            Self::Nanoseconds => 1_000_000_000,
            Self::Microseconds => 1_000_000,
        }
    }
}

/// Defines [`DeviceGauge`]. A row: help, variant, kind, unit, name in the record and in JSON, name
/// on the screen, metric (without `_total`, which counters get). Empty: not shown there by itself.
macro_rules! gauges {
    ($(
        $(#[doc = $help:literal])+
        $variant:ident $kind:ident $unit:ident $name:literal $screen:literal $metric:literal
    )*) => {
        /// Numbers of a device, written under the device's lock (one writer), published under a
        /// seqlock.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(usize)]
        pub enum DeviceGauge { $($(#[doc = $help])+ $variant,)* }

        impl DeviceGauge {
            /// All of them, in the order of the record.
            pub const ALL: &[DeviceGauge] = &[$(DeviceGauge::$variant,)*];
            /// Its name in reports.
            pub fn name(self) -> &'static str {
                match self { $(DeviceGauge::$variant => $name,)* }
            }
            /// How its number moves.
            pub fn kind(self) -> Kind {
                match self { $(DeviceGauge::$variant => Kind::$kind,)* }
            }
            /// The unit of its number.
            pub fn unit(self) -> Unit {
                match self { $(DeviceGauge::$variant => Unit::$unit,)* }
            }
            /// Its name on the screen; `None`: another part of the screen shows it.
            pub fn screen(self) -> Option<&'static str> {
                let name = match self { $(DeviceGauge::$variant => $screen,)* };
                (!name.is_empty()).then_some(name)
            }
            /// Its metric's name; `None`: another metric gives it.
            pub fn metric(self) -> Option<&'static str> {
                let name = match self { $(DeviceGauge::$variant => $metric,)* };
                (!name.is_empty()).then_some(name)
            }
            /// A sentence that says what it is.
            pub fn help(self) -> &'static str {
                match self { $(DeviceGauge::$variant => concat!($($help,)+).trim_ascii_start(),)* }
            }
        }
    };
}

/// Number of [`DeviceGauge`]s.
pub const DEVICE_GAUGES: usize = DeviceGauge::ALL.len();

gauges! {
    /// Physical memory held from the driver.
    Reserved Gauge Bytes "reserved_bytes" "held" "gruyere_reserved_bytes"
    /// The most that was ever held from the driver.
    ReservedPeak Gauge Bytes "reserved_peak_bytes" "held, at the peak" "gruyere_reserved_peak_bytes"
    /// Free memory of the arenas (large blocks).
    ArenaFree Gauge Bytes "arena_free_bytes" "free, but for slots of slabs"
        "gruyere_arena_free_bytes"
    /// The largest free run of the arenas.
    LargestFree Gauge Bytes "largest_free_bytes" "largest free piece" "gruyere_largest_free_bytes"
    /// Memory that CUDA graphs hold.
    CapturePinned Gauge Bytes "capture_pinned_bytes" "kept for CUDA graphs"
        "gruyere_capture_pinned_bytes"
    /// Memory that the program freed and streams may still use.
    Pending Gauge Bytes "pending_bytes" "freed, waiting for streams" ""
    /// Memory cut into slabs (small blocks).
    SlabBytes Gauge Bytes "slab_bytes" "slabs of small blocks" "gruyere_slab_bytes"
    /// The ceiling on held memory.
    Limit Gauge Bytes "limit_bytes" "ceiling" "gruyere_limit_bytes"
    /// Physical memory of the device.
    TotalMemory Gauge Bytes "total_memory_bytes" "memory of the device"
        "gruyere_device_memory_bytes"
    /// Calls of the driver.
    DriverCalls Counter Count "driver_calls" "driver calls" "gruyere_driver_calls"
    /// Calls of the driver that failed.
    DriverErrors Counter Count "driver_errors" "driver errors" "gruyere_driver_errors"
    /// Times that memory was taken from the driver.
    Grows Counter Count "grows" "grows" "gruyere_grows"
    /// Times that memory was given back to the driver.
    Releases Counter Count "releases" "releases" "gruyere_releases"
    /// Driver pools trimmed.
    Trims Counter Count "trims" "trims" "gruyere_trims"
    /// CUDA events recorded.
    EventRecords Counter Count "event_records" "event records" "gruyere_event_records"
    /// CUDA events queried.
    EventQueries Counter Count "event_queries" "event queries" "gruyere_event_queries"
    /// Waits of the host for the device.
    HostWaits Counter Count "host_waits" "host waits" "gruyere_host_waits"
    /// Time in waits of the host.
    HostWaitNanoseconds Counter Nanoseconds "host_wait_nanoseconds" "time in host waits"
        "gruyere_host_wait_seconds"
    /// Requests met only after memory was reclaimed.
    Retries Counter Count "retries" "requests after a retry" "gruyere_retries"
    /// Requests that could not be met.
    OutOfMemories Counter Count "out_of_memories" "out of memory" "gruyere_out_of_memory"
    /// Frees of what is no live block.
    BadFrees Counter Count "bad_frees" "frees of no live block" "gruyere_bad_frees"
    /// CUDA graph captures begun.
    CapturesBegun Counter Count "captures_begun" "captures begun" "gruyere_captures"
    /// The training step.
    Step Gauge Count "step" "step" "gruyere_step"
    /// Times that the first rung of the reclaim ladder was tried.
    Rung0Calls Counter Count "rung0_calls" "" ""
    /// Memory that it gained.
    Rung0Bytes Counter Bytes "rung0_bytes" "" ""
    /// Host time in it.
    Rung0Microseconds Counter Microseconds "rung0_microseconds" "" ""
    /// Times that the second rung was tried.
    Rung1Calls Counter Count "rung1_calls" "" ""
    /// Memory that it gained.
    Rung1Bytes Counter Bytes "rung1_bytes" "" ""
    /// Host time in it.
    Rung1Microseconds Counter Microseconds "rung1_microseconds" "" ""
    /// Times that the third rung was tried.
    Rung2Calls Counter Count "rung2_calls" "" ""
    /// Memory that it gained.
    Rung2Bytes Counter Bytes "rung2_bytes" "" ""
    /// Host time in it.
    Rung2Microseconds Counter Microseconds "rung2_microseconds" "" ""
    /// Times that the fourth rung was tried.
    Rung3Calls Counter Count "rung3_calls" "" ""
    /// Memory that it gained.
    Rung3Bytes Counter Bytes "rung3_bytes" "" ""
    /// Host time in it.
    Rung3Microseconds Counter Microseconds "rung3_microseconds" "" ""
    /// Times that the fifth rung was tried.
    Rung4Calls Counter Count "rung4_calls" "" ""
    /// Memory that it gained.
    Rung4Bytes Counter Bytes "rung4_bytes" "" ""
    /// Host time in it.
    Rung4Microseconds Counter Microseconds "rung4_microseconds" "" ""
    /// Times that the sixth rung was tried.
    Rung5Calls Counter Count "rung5_calls" "" ""
    /// Memory that it gained.
    Rung5Bytes Counter Bytes "rung5_bytes" "" ""
    /// Host time in it.
    Rung5Microseconds Counter Microseconds "rung5_microseconds" "" ""
    /// Times that a low-memory phase gave memory back to the device.
    LowPhaseTrims Counter Count "low_phase_trims" "low-memory phases, trims"
        "gruyere_low_memory_trims"
    /// Memory that low-memory phases gave back.
    LowPhaseBytes Counter Bytes "low_phase_given_bytes" "low-memory phases, given back"
        "gruyere_low_memory_trimmed_bytes"
    /// The largest request that what is held could satisfy.
    LargestRequest Gauge Bytes "largest_request_bytes" "largest request, as held"
        "gruyere_largest_request_bytes"
    /// The largest request that could be satisfied if the ceiling is reached for it.
    LargestGrowing Gauge Bytes "largest_request_growing_bytes" "largest request, with growth"
        "gruyere_largest_request_growing_bytes"
    /// Times that idle pages were mapped where a row of them was needed.
    Moves Counter Count "moves" "moves" "gruyere_moves"
    /// The bytes of those pages.
    MovedBytes Counter Bytes "moved_bytes" "moved pages" "gruyere_moved_bytes"
    /// Lost: held, and free between live blocks, when the allocator last counted it.
    Lost Gauge Bytes "lost_bytes" "" ""
    /// Where pages cannot move: lost is what this request does not fit into; 0: they can.
    TypicalRequest Gauge Bytes "typical_request_bytes" "" "gruyere_typical_request_bytes"
    /// Free memory held when the largest request was last counted.
    FreeHeld Gauge Bytes "free_held_then_bytes" "" ""
    /// How far the host runs ahead of the device, at least (where streams share memory).
    HostAhead Gauge Nanoseconds "host_ahead_nanoseconds" "host ahead of the device"
        "gruyere_host_ahead_seconds"
}

/// A rung of the reclaim ladder: its name in reports, and its gauges.
#[derive(Clone, Copy, Debug)]
pub struct Rung {
    /// What it does.
    pub name: &'static str,
    /// Times that it was tried.
    pub calls: DeviceGauge,
    /// Memory that it gained.
    pub bytes: DeviceGauge,
    /// Host time in it.
    pub microseconds: DeviceGauge,
}

impl Rung {
    /// Its gauges: calls, bytes, microseconds.
    pub fn gauges(self) -> [DeviceGauge; 3] {
        [self.calls, self.bytes, self.microseconds]
    }
}

/// The rungs, in the order in which the heap climbs them (`crates/heap/src/path/ladder.rs`).
pub const RUNGS: [Rung; 6] = {
    use DeviceGauge::*;
    const fn rung(name: &'static str, [calls, bytes, microseconds]: [DeviceGauge; 3]) -> Rung {
        Rung { name, calls, bytes, microseconds }
    }
    [
        rung("ask events", [Rung0Calls, Rung0Bytes, Rung0Microseconds]),
        rung("return slabs", [Rung1Calls, Rung1Bytes, Rung1Microseconds]),
        rung("give back", [Rung2Calls, Rung2Bytes, Rung2Microseconds]),
        rung("wait for events", [Rung3Calls, Rung3Bytes, Rung3Microseconds]),
        rung("synchronise", [Rung4Calls, Rung4Bytes, Rung4Microseconds]),
        rung("use the headroom", [Rung5Calls, Rung5Bytes, Rung5Microseconds]),
    ]
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_end_in_their_units_and_counters_of_metrics_have_no_suffix_of_their_own() {
        for &gauge in DeviceGauge::ALL {
            let suffix = match gauge.unit() {
                Unit::Count => "",
                Unit::Bytes => "_bytes",
                Unit::Nanoseconds => "_nanoseconds",
                Unit::Microseconds => "_microseconds",
            };
            assert!(gauge.name().ends_with(suffix), "{gauge:?}");
            assert!(gauge.help().ends_with('.') && !gauge.help().starts_with(' '), "{gauge:?}");
            let Some(metric) = gauge.metric() else { continue };
            assert!(metric.starts_with("gruyere_") && metric.ends_with(gauge.unit().base()));
            assert!(!metric.ends_with("_total"), "{metric}");
        }
    }

    #[test]
    fn a_gauge_without_a_metric_of_its_own_is_in_another() {
        let of_rungs: Vec<_> = RUNGS.into_iter().flat_map(Rung::gauges).collect();
        for &gauge in DeviceGauge::ALL {
            // By lifetime, or from the block map of the moment.
            let otherwise =
                matches!(gauge, DeviceGauge::Pending | DeviceGauge::Lost | DeviceGauge::FreeHeld);
            assert_eq!(gauge.metric().is_none(), otherwise || of_rungs.contains(&gauge));
        }
        assert_eq!(
            of_rungs.iter().map(|gauge| gauge.name().len()).min(),
            Some("rung0_calls".len())
        );
    }
}
