//! Metrics that can be watched, by name.

use super::amount::Unit;
use super::forecast::Forecast;
use crate::device_gauge::{self, DeviceGauge};
use crate::near::near;
use crate::reader::DeviceSnapshot;

/// The source of the metrics' values.
#[derive(Clone, Copy, Debug)]
pub struct Facts<'a> {
    /// The device now.
    pub device: &'a DeviceSnapshot,
    /// Recent bytes allocated per second, if known yet.
    pub rate: Option<f64>,
    /// When its memory runs out.
    pub forecast: Forecast,
}

impl Facts<'_> {
    /// The ceiling on held bytes; 0 for an unused device.
    pub fn limit(&self) -> u64 {
        limit(self.device)
    }
}

pub(super) fn limit(device: &DeviceSnapshot) -> u64 {
    let (limit, total) = (device.gauge(DeviceGauge::Limit), device.gauge(DeviceGauge::TotalMemory));
    if limit == 0 || total == 0 { limit.max(total) } else { limit.min(total) }
}

/// A quantity with a value on each device at each moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Metric {
    /// Lost / held.
    Fragmentation,
    /// Held, and free between live blocks.
    Lost,
    /// Held and free in whole pages.
    Idle,
    /// 1 - live / held.
    Unused,
    /// 1 - largest request that what is held could satisfy / free bytes held.
    External,
    /// 1 - requested / live.
    Internal,
    /// The largest request that could be satisfied, counting what the driver may still give.
    Largest,
    /// Live bytes.
    Live,
    /// Bytes held from the driver.
    Reserved,
    /// Bytes freed by the program and waiting for streams.
    Pending,
    /// Bytes allocated per second.
    Rate,
    /// Seconds until memory runs out.
    OomIn,
    /// A gauge of the record.
    Gauge(DeviceGauge),
}

/// The metrics besides gauges.
const NAMED: [(&str, Metric); 12] = [
    ("fragmentation", Metric::Fragmentation),
    ("lost", Metric::Lost),
    ("idle", Metric::Idle),
    ("unused", Metric::Unused),
    ("external", Metric::External),
    ("internal", Metric::Internal),
    ("largest", Metric::Largest),
    ("live", Metric::Live),
    ("held", Metric::Reserved),
    ("pending", Metric::Pending),
    ("rate", Metric::Rate),
    ("oom-in", Metric::OomIn),
];

impl Metric {
    /// All of them.
    pub fn all() -> impl Iterator<Item = Metric> {
        let gauges = DeviceGauge::ALL.iter().map(|&gauge| Metric::Gauge(gauge));
        NAMED.iter().map(|&(_, metric)| metric).chain(gauges)
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Gauge(gauge) => gauge.name(),
            named => NAMED.iter().find(|(_, metric)| *metric == named).map_or("", |(name, _)| name),
        }
    }

    /// The metric of a name. `-` and `_` are the same; `-bytes` at the end of a gauge's name is
    /// optional.
    pub fn named(name: &str) -> Option<Metric> {
        let plain = |text: &str| text.to_ascii_lowercase().replace('_', "-");
        let wanted = match plain(name).as_str() {
            // torch's name, and the gauge's.
            "reserved" => "held".to_owned(),
            other => other.to_owned(),
        };
        let is = |metric: &Metric| {
            let name = plain(metric.name());
            name == wanted || name.strip_suffix("-bytes") == Some(&wanted)
        };
        Self::all().find(is)
    }

    /// Names like `name`, likest first; may be empty.
    pub fn near(name: &str) -> Vec<&'static str> {
        near(name, Self::all().map(Metric::name))
    }

    /// The unit of its value.
    pub fn unit(self) -> Unit {
        match self {
            Self::Fragmentation | Self::Unused | Self::External | Self::Internal => Unit::Share,
            Self::Lost
            | Self::Idle
            | Self::Largest
            | Self::Live
            | Self::Reserved
            | Self::Pending => Unit::Bytes,
            Self::Rate => Unit::BytesPerSecond,
            Self::OomIn => Unit::Seconds,
            Self::Gauge(gauge) => match gauge.unit() {
                device_gauge::Unit::Count => Unit::Count,
                device_gauge::Unit::Bytes => Unit::Bytes,
                device_gauge::Unit::Nanoseconds | device_gauge::Unit::Microseconds => Unit::Seconds,
            },
        }
    }

    /// Its value, in its unit. `None`: not known (yet), for instance before the device's first
    /// allocation. `oom-in` is infinite without a forecast.
    pub fn value(self, facts: &Facts<'_>) -> Option<f64> {
        let device = facts.device;
        if facts.limit() == 0 {
            return None;
        }
        Some(match self {
            Self::Fragmentation => device.held().fragmentation(),
            Self::Lost => device.held().lost() as f64,
            Self::Idle => device.held().idle() as f64,
            Self::Unused => device.held().unused(),
            Self::External => device.external_fragmentation(),
            Self::Internal => device.internal_fragmentation(),
            Self::Largest => {
                // The gauge is as old as the last step mark; what the driver may still give is
                // known at every moment.
                let room = facts.limit().saturating_sub(device.gauge(DeviceGauge::Reserved));
                device.gauge(DeviceGauge::LargestGrowing).max(room) as f64
            }
            Self::Live => device.live as f64,
            Self::Reserved => device.gauge(DeviceGauge::Reserved) as f64,
            Self::Pending => device.total().pending_bytes() as f64,
            Self::Rate => facts.rate?,
            Self::OomIn => match facts.forecast {
                Forecast::Unknown => return None,
                Forecast::NoGrowth | Forecast::Far | Forecast::Unsure => f64::INFINITY,
                Forecast::Growing(growth) => growth.seconds,
            },
            Self::Gauge(gauge) => device.gauge(gauge) as f64 / gauge.unit().per_base() as f64,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::Growth;
    use super::*;

    fn device(gauges: &[(DeviceGauge, u64)]) -> DeviceSnapshot {
        let mut device =
            DeviceSnapshot { gauges: vec![0; DeviceGauge::ALL.len()], ..Default::default() };
        for &(gauge, value) in gauges {
            device.gauges[gauge as usize] = value;
        }
        device
    }

    #[test]
    fn every_metric_is_found_by_its_name_however_it_is_written() {
        for metric in Metric::all() {
            assert_eq!(Metric::named(metric.name()), Some(metric));
            assert_eq!(Metric::named(&metric.name().replace('_', "-")), Some(metric));
        }
        assert_eq!(Metric::named("OOM_IN"), Some(Metric::OomIn));
        assert_eq!(Metric::named("nonsense"), None);
        let pinned = Metric::Gauge(DeviceGauge::CapturePinned);
        assert_eq!(Metric::named("capture-pinned"), Some(pinned), "bytes of any gauge");
        assert_eq!(Metric::named("lost"), Some(Metric::Lost), "the number of now, not the gauge");
    }

    #[test]
    fn a_misspelt_name_suggests_what_was_meant() {
        assert_eq!(Metric::near("fragmentatoin").first(), Some(&"fragmentation"));
        assert_eq!(Metric::near("oomin").first(), Some(&"oom-in"));
        assert_eq!(Metric::near("bad_free").first(), Some(&"bad_frees"));
        assert!(Metric::near("driver").contains(&"driver_errors"));
        assert!(Metric::near("xyzzy").is_empty());
    }

    #[test]
    fn values_come_in_the_unit_of_their_metric() {
        let device = device(&[
            (DeviceGauge::Limit, 80 << 30),
            (DeviceGauge::TotalMemory, 100 << 30),
            (DeviceGauge::Reserved, 50 << 30),
            (DeviceGauge::LargestGrowing, 20 << 30),
            (DeviceGauge::HostWaitNanoseconds, 2_500_000_000),
            (DeviceGauge::Rung1Microseconds, 1500),
            (DeviceGauge::OutOfMemories, 3),
        ]);
        let growth = Growth { seconds: 90.0, bytes_per_second: 1e6, steps: None };
        let facts = Facts { device: &device, rate: None, forecast: Forecast::Growing(growth) };
        let value = |metric: Metric| metric.value(&facts);
        assert_eq!(value(Metric::OomIn), Some(90.0));
        assert_eq!(value(Metric::Rate), None);
        // The driver may still give 30 GiB, whatever an older gauge says.
        assert_eq!(value(Metric::Largest), Some((30u64 << 30) as f64));
        assert_eq!(value(Metric::Gauge(DeviceGauge::HostWaitNanoseconds)), Some(2.5));
        assert_eq!(value(Metric::Gauge(DeviceGauge::Rung1Microseconds)), Some(0.0015));
        assert_eq!(value(Metric::Gauge(DeviceGauge::OutOfMemories)), Some(3.0));
        let steady = Facts { forecast: Forecast::NoGrowth, ..facts };
        assert_eq!(Metric::OomIn.value(&steady), Some(f64::INFINITY));
        assert_eq!(Metric::OomIn.value(&Facts { forecast: Forecast::Unknown, ..facts }), None);
    }

    #[test]
    fn a_device_that_was_never_used_has_no_values() {
        let device = device(&[]);
        let facts = Facts { device: &device, rate: Some(1.0), forecast: Forecast::NoGrowth };
        for metric in Metric::all() {
            assert_eq!(metric.value(&facts), None, "{}", metric.name());
        }
    }
}
