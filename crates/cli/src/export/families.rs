//! A record's values as families of metrics: names, units, types, labels. Pure.
#![deny(unsafe_code, clippy::unwrap_used)]

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use gruyere_record::calls::{Calls, SIZE_CLASSES};
use gruyere_record::device_gauge::{self, RUNGS};
use gruyere_record::facts::Process;
use gruyere_record::histogram::{Counts, bucket_ceiling, bucket_floor};
use gruyere_record::reader::DeviceSnapshot;
use gruyere_record::run::name_of;
use gruyere_record::sites::{LISTED, Line};
use gruyere_record::timeline::TimelineEntry;
use gruyere_record::{DeviceGauge, LIFETIME_NAMES, Reader};

use super::exposition::{Family, Kind, Labels, Sample, Value};
use super::growth;
use crate::device_uuid::uuid_text;
use crate::recent;
use crate::sites::SeldomRead;

/// Exported devices of a process; a damaged record may list more.
const MOST_DEVICES: usize = 64;

/// Families, in the order of their first samples.
#[derive(Default)]
pub struct Families {
    families: Vec<Family>,
    places: HashMap<&'static str, usize>,
}

/// Subject of a sample: labels, and creation time.
#[derive(Clone)]
pub struct Of {
    labels: Labels,
    born: u64,
}

impl Of {
    /// These labels, without a creation time.
    pub fn labels(pairs: &[(&str, &str)]) -> Of {
        Of { labels: Labels::new(pairs), born: 0 }
    }

    fn with(&self, name: &'static str, value: &'static str) -> Of {
        Of { labels: self.labels.with(name, value), born: self.born }
    }
}

/// Name, base unit (the end of the name, or empty) and a sentence of help.
type Said = (&'static str, &'static str, &'static str);

impl Families {
    /// Adds a sample.
    pub fn add(&mut self, kind: Kind, (name, unit, help): Said, of: &Of, value: Value) {
        let place = *self.places.entry(name).or_insert_with(|| {
            self.families.push(Family::new(name, kind, unit, help));
            self.families.len() - 1
        });
        self.families[place].samples.push(Sample {
            labels: of.labels.clone(),
            value,
            born: of.born,
        });
    }

    /// Adds a gauge.
    pub fn gauge(&mut self, said: Said, of: &Of, value: u64) {
        self.add(Kind::Gauge, said, of, Value::Count(value));
    }

    /// Adds a gauge with a fraction.
    pub fn number(&mut self, said: Said, of: &Of, value: f64) {
        self.add(Kind::Gauge, said, of, Value::Number(value));
    }

    /// Adds a counter.
    pub fn counter(&mut self, said: Said, of: &Of, value: u64) {
        self.add(Kind::Counter, said, of, Value::Count(value));
    }

    /// Adds all families of `other`.
    pub fn append(&mut self, other: Families) {
        for family in other.families {
            match self.places.get(family.name) {
                Some(&place) => self.families[place].samples.extend(family.samples),
                None => {
                    self.places.insert(family.name, self.families.len());
                    self.families.push(family);
                }
            }
        }
    }

    /// All families.
    pub fn into_inner(self) -> Vec<Family> {
        self.families
    }
}

/// A process's identity as labels. `namespace`: of our own pids.
pub struct Identity {
    pid: String,
    rank: String,
    local_rank: String,
    job: String,
    /// The user, if other than the exporter's; else empty, as below.
    user: String,
    /// The record's number among the process's records, if not the first.
    record: String,
    born: u64,
}

impl Identity {
    /// Identity of `process`; `job` overrides the process's own.
    pub fn new(process: &Process, namespace: u64, job: Option<&str>) -> Identity {
        let number = |value: Option<u64>| value.map_or(String::new(), |value| value.to_string());
        let pid = match process.pid_namespace == namespace {
            true => process.pid.to_string(),
            // In another container: the bare number may be another process's here.
            false => format!("{}@{}", process.pid, process.pid_namespace),
        };
        Identity {
            pid,
            rank: number(process.rank),
            local_rank: number(process.local_rank),
            job: job.unwrap_or(&process.job).to_owned(),
            user: String::new(),
            record: String::new(),
            born: process.created,
        }
    }

    /// Marks the process as another user's.
    pub fn of_user(&mut self, user: u32) {
        self.user = user.to_string();
    }

    /// Marks the record as the process's `number`th, counted from 0.
    pub fn of_record(&mut self, number: u32) {
        self.record = if number == 0 { String::new() } else { number.to_string() };
    }

    /// A key that differs between any two records exported together.
    pub fn unique(&self) -> String {
        format!("{} {} {}", self.pid, self.user, self.record)
    }

    fn of(&self, more: &[(&str, &str)]) -> Of {
        let mut pairs = vec![
            ("pid", self.pid.as_str()),
            ("rank", &self.rank),
            ("local_rank", &self.local_rank),
            ("job", &self.job),
            ("user", &self.user),
            ("record", &self.record),
        ];
        pairs.extend_from_slice(more);
        Of { labels: Labels::new(&pairs), born: self.born }
    }
}

/// All metrics of a record.
pub fn of_record(
    families: &mut Families,
    reader: &Reader,
    process: &Process,
    identity: &Identity,
    lines: &mut SeldomRead,
) {
    let script = name_of(&process.command);
    let configured = gruyere::config::Config::parse(&process.configuration);
    let run = configured.ok().and_then(|config| config.name).unwrap_or_else(|| script.clone());
    let world_size = process.world_size.map_or(String::new(), |size| size.to_string());
    let facts = [
        ("host", process.host.as_str()),
        ("version", &process.version),
        ("world_size", &world_size),
        ("backing", backing(&process.configuration)),
        ("script", &script),
        ("run", &run),
    ];
    let said = ("gruyere_process", "", "A process that uses Gruyère.");
    families.add(Kind::Info, said, &identity.of(&facts), Value::Count(1));
    let of = identity.of(&[]);
    let said = (
        "gruyere_process_start_time_seconds",
        "seconds",
        "Creation time of the process's record, since 1970.",
    );
    families.number(said, &of, process.created as f64 / 1e9);
    let health = reader.health();
    let said = ("gruyere_blocks_unrecorded", "", "Blocks that the record had no room for.");
    families.counter(said, &of, health.blocks_unrecorded);
    let said = ("gruyere_segments_unrecorded", "", "Segments that the record had no room for.");
    families.counter(said, &of, health.segments_unrecorded);
    let histograms = reader.histograms();
    if let Some(scale) = reader.scale() {
        // Rounded, so that it stays the same from scrape to scrape as the clock estimate improves.
        let seconds =
            format!("{:.2e}", scale.nanoseconds_per_tick).parse::<f64>().unwrap_or(1.0) / 1e9;
        let said = (
            "gruyere_malloc_duration_seconds",
            "seconds",
            "Host time of sampled mallocs; the sum is of bucket middles.",
        );
        families.add(Kind::Histogram, said, &of, durations(&histograms.malloc_latency, seconds));
        let said = (
            "gruyere_free_duration_seconds",
            "seconds",
            "Host time of sampled frees; the sum is of bucket middles.",
        );
        families.add(Kind::Histogram, said, &of, durations(&histograms.free_latency, seconds));
        for calls in reader.driver_calls() {
            let of = identity.of(&[("call", calls.call.name()), ("size", size_class(&calls))]);
            let said = (
                "gruyere_driver_call_duration_seconds",
                "seconds",
                "Host time of the library's driver calls that change memory or wait, over all \
                 devices.",
            );
            families.add(Kind::Histogram, said, &of, call_durations(&calls, seconds));
        }
    }
    let used = |device: &DeviceSnapshot| {
        device.total().mallocs > 0
            || device.gauge(DeviceGauge::Reserved) > 0
            || device.gauge(DeviceGauge::DriverCalls) > 0
    };
    for device in reader.device_snapshots().iter().filter(|device| used(device)).take(MOST_DEVICES)
    {
        let timeline = reader.timeline(device.device).entries;
        of_device(families, device, recent_peak(&timeline, device), identity);
        growth::of_device(families, device, &timeline, &of_place(device, identity));
        let found = lines.lines(reader, device.device, Instant::now()).unwrap_or_default();
        of_lines(families, device, found, identity);
    }
}

/// The most characters of a line's or a module's name in a label.
const LONGEST_NAME: usize = 120;

/// Subject: a device of a process.
fn of_place(device: &DeviceSnapshot, identity: &Identity) -> Of {
    let (gpu, uuid) = (device.device.to_string(), uuid_text(&device.facts.uuid));
    identity.of(&[("gpu", gpu.as_str()), ("uuid", &uuid)])
}

/// The lines that hold most, and the lines that grow most.
fn of_lines(families: &mut Families, device: &DeviceSnapshot, found: &[Line], identity: &Identity) {
    let said = (
        "gruyere_site_live_bytes",
        "bytes",
        "Live memory of the ten lines of the program that hold most.",
    );
    let held = found.iter().take(LISTED).map(|line| (line, line.live_bytes));
    by_line(families, said, device, held, identity);
    let said = (
        "gruyere_site_growth_bytes",
        "bytes",
        "Memory that a step leaves behind, of the five lines of the program that grow most.",
    );
    by_line(families, said, device, growth::most_growing(found).into_iter(), identity);
}

/// Bytes by line and module. Labels must be unique, so lines with the same text are merged.
fn by_line<'a>(
    families: &mut Families,
    said: Said,
    device: &DeviceSnapshot,
    lines: impl Iterator<Item = (&'a Line, u64)>,
    identity: &Identity,
) {
    // The end of a path says most.
    let label = |name: &str| {
        let excess = name.chars().count().saturating_sub(LONGEST_NAME);
        name.chars().skip(excess).collect::<String>()
    };
    let mut sums: BTreeMap<(String, String), u64> = BTreeMap::new();
    for (line, bytes) in lines {
        let named = (label(&line.name), label(line.module.as_deref().unwrap_or_default()));
        let sum = sums.entry(named).or_default();
        *sum = sum.saturating_add(bytes);
    }
    let (gpu, uuid) = (device.device.to_string(), uuid_text(&device.facts.uuid));
    for ((line, module), bytes) in sums {
        let place = [("gpu", gpu.as_str()), ("uuid", &uuid), ("line", &line), ("module", &module)];
        families.gauge(said, &identity.of(&place), bytes);
    }
}

/// The configured backing, if it is a known one.
fn backing(configuration: &str) -> &'static str {
    match gruyere::config::Config::parse(configuration).map(|config| config.heap.backing) {
        Ok(gruyere::config::Backing::Auto) => "auto",
        Ok(gruyere::config::Backing::Stitch) => "stitch",
        Ok(gruyere::config::Backing::Pool) => "pool",
        Ok(gruyere::config::Backing::Fixed) => "fixed",
        Ok(gruyere::config::Backing::Passthrough) => "passthrough",
        Err(_) => "",
    }
}

/// A difference of counters, 0 if negative: different shards are read some microseconds apart.
fn whole(difference: u64) -> u64 {
    if difference > i64::MAX as u64 { 0 } else { difference }
}

/// Time over which the highest use is reported: a training step goes up and down.
const RECENT: Duration = Duration::from_secs(60);

/// Highest use in that time; if nothing has happened for longer, the current use.
fn recent_peak(timeline: &[TimelineEntry], device: &DeviceSnapshot) -> u64 {
    let since = recent::now().saturating_sub(RECENT.as_nanos() as u64);
    let recent = timeline.iter().rev().take_while(|entry| entry.realtime_nanoseconds >= since);
    let high = recent.map(|entry| whole(entry.sample.in_use_high)).max().unwrap_or(0);
    high.max(device.live.saturating_add(whole(device.total().pending_bytes())))
}

fn of_device(families: &mut Families, device: &DeviceSnapshot, recent: u64, identity: &Identity) {
    let (gpu, uuid) = (device.device.to_string(), uuid_text(&device.facts.uuid));
    let place = [("gpu", gpu.as_str()), ("uuid", &uuid)];
    let of = identity.of(&place);
    let named = [place[0], place[1], ("model", &device.facts.name)];
    let said = ("gruyere_device", "", "A device that a process uses.");
    families.add(Kind::Info, said, &identity.of(&named), Value::Count(1));
    for (lifetime, &name) in LIFETIME_NAMES.iter().enumerate() {
        let counts = device.sum(|_, number| number == lifetime);
        let of = of.with("lifetime", name);
        let said = ("gruyere_live_bytes", "bytes", "Live memory, with requests rounded up.");
        families.gauge(said, &of, whole(counts.live_bytes()));
        let said = ("gruyere_requested_bytes", "bytes", "Live memory, as requested.");
        families.gauge(said, &of, whole(counts.live_requested()));
        families.gauge(
            ("gruyere_live_blocks", "", "Live blocks."),
            &of,
            whole(counts.live_blocks()),
        );
        let said = (
            "gruyere_pending_bytes",
            "bytes",
            "Memory that the program freed and streams may still use.",
        );
        families.gauge(said, &of, whole(counts.pending_bytes()));
    }
    let said = ("gruyere_live_peak_bytes", "bytes", "Highest live memory so far.");
    families.gauge(said, &of, device.live_peak);
    let said = (
        "gruyere_in_use_peak_bytes",
        "bytes",
        "Highest memory in use (live, waiting, in slabs) in the last minute.",
    );
    families.gauge(said, &of, recent);
    // By pool and not by lifetime: a block may change its lifetime, and a counter must not fall.
    for (pool, name) in [(0, "small"), (1, "large")] {
        let counts = device.sum(|number, _| number == pool);
        let of = of.with("pool", name);
        families.counter(("gruyere_allocations", "", "Blocks allocated."), &of, counts.mallocs);
        families.counter(
            ("gruyere_frees", "", "Blocks that the program freed."),
            &of,
            counts.frees,
        );
        let said =
            ("gruyere_allocated_bytes", "bytes", "Bytes allocated, with requests rounded up.");
        families.counter(said, &of, counts.malloc_bytes);
        let said = ("gruyere_freed_bytes", "bytes", "Bytes that the program freed.");
        families.counter(said, &of, counts.free_bytes);
    }
    let held = device.held();
    let said = ("gruyere_fragmentation_ratio", "ratio", "Lost memory / held memory.");
    families.number(said, &of, held.fragmentation());
    let said = ("gruyere_lost_bytes", "bytes", "Held memory that is free between live blocks.");
    families.gauge(said, &of, held.lost());
    let said = ("gruyere_idle_bytes", "bytes", "Held memory in whole free pages.");
    families.gauge(said, &of, held.idle());
    let said = ("gruyere_unused_ratio", "ratio", "1 - live / held.");
    families.number(said, &of, held.unused());
    if let Some(ratio) = device.peak_ratio() {
        families.number(("gruyere_peak_ratio", "ratio", "Peak held / peak live."), &of, ratio);
    }
    let said = (
        "gruyere_external_fragmentation_ratio",
        "ratio",
        "1 - largest satisfiable request / free bytes held.",
    );
    families.number(said, &of, device.external_fragmentation());
    let said = ("gruyere_internal_fragmentation_ratio", "ratio", "1 - requested / live.");
    families.number(said, &of, device.internal_fragmentation());
    let said = (
        "gruyere_free_held_bytes",
        "bytes",
        "Held memory that is neither live nor waiting for streams.",
    );
    families.gauge(said, &of, held.free());
    for &gauge in DeviceGauge::ALL {
        let Some(name) = gauge.metric() else { continue };
        let kind = match gauge.kind() {
            device_gauge::Kind::Gauge => Kind::Gauge,
            device_gauge::Kind::Counter => Kind::Counter,
        };
        let unit = gauge.unit();
        let value = scaled(device.gauge(gauge), unit.per_base());
        families.add(kind, (name, unit.base(), gauge.help()), &of, value);
    }
    for rung in RUNGS {
        let of = of.with("rung", rung.name);
        let said =
            ("gruyere_reclaim_calls", "", "Times that a rung of the reclaim ladder was used.");
        families.counter(said, &of, device.gauge(rung.calls));
        let said =
            ("gruyere_reclaim_bytes", "bytes", "Memory that a rung of the reclaim ladder gained.");
        families.counter(said, &of, device.gauge(rung.bytes));
        let said =
            ("gruyere_reclaim_seconds", "seconds", "Host time in a rung of the reclaim ladder.");
        let seconds = scaled(device.gauge(rung.microseconds), rung.microseconds.unit().per_base());
        families.add(Kind::Counter, said, &of, seconds);
    }
    let torn = device.torn_gauges || device.torn_shards > 0;
    let said = ("gruyere_torn", "", "1: the values of this device are not from one moment.");
    families.gauge(said, &of, u64::from(torn));
    let total = device.total();
    let said = ("gruyere_malloc_size_bytes", "bytes", "Sizes of mallocs, rounded up.");
    let sizes = sizes(&device.malloc_sizes, total.malloc_bytes);
    families.add(Kind::Histogram, said, &of, sizes);
}

fn scaled(value: u64, scale: u64) -> Value {
    if scale == 1 { Value::Count(value) } else { Value::Number(value as f64 / scale as f64) }
}

/// Powers of two that separate sizes. Our own buckets begin at them, so a bound is a byte less.
const SIZE_POWERS: [u32; 14] = [10, 12, 14, 16, 18, 20, 21, 22, 24, 26, 28, 30, 32, 34];

fn sizes(counts: &Counts, sum: u64) -> Value {
    let bounds: Vec<u64> = SIZE_POWERS.iter().map(|power| (1 << power) - 1).collect();
    let names = bounds.iter().map(|bound| format!("{bound}.0"));
    let counted = taken(counts).map(|(bucket, count)| (bucket_ceiling(bucket), count));
    Value::Buckets(grouped(names, &bounds, counted), sum as f64)
}

/// Bounds of durations, seconds.
const DURATIONS: [&str; 14] = [
    "1e-07", "2e-07", "5e-07", "1e-06", "2e-06", "5e-06", "1e-05", "2e-05", "5e-05", "0.0001",
    "0.001", "0.01", "0.1", "1.0",
];

/// A bucket of ticks counts at its middle.
fn durations(counts: &Counts, seconds_per_tick: f64) -> Value {
    let middle = |bucket| {
        let floor = bucket_floor(bucket);
        (floor + (bucket_ceiling(bucket) - floor) / 2) as f64 * seconds_per_tick
    };
    let counted = taken(counts).map(|(bucket, count)| (middle(bucket), count));
    let sum = counted.clone().map(|(seconds, count)| count as f64 * seconds).sum();
    Value::Buckets(in_seconds(&DURATIONS, counted), sum)
}

/// The non-empty buckets with their counts.
fn taken(counts: &Counts) -> impl Iterator<Item = (usize, u64)> + Clone + '_ {
    counts.0.iter().copied().enumerate().filter(|&(_, count)| count > 0)
}

/// The class of sizes as a label's value; empty for calls that are not split by size.
fn size_class(calls: &Calls) -> &'static str {
    let class = calls.up_to.and_then(|most| SIZE_CLASSES.iter().position(|&class| class == most));
    class.map_or("", |class| ["2MiB", "32MiB", "256MiB", "larger"][class])
}

/// Bounds of driver calls' durations, seconds.
const CALL_DURATIONS: [&str; 14] = [
    "1e-06", "2e-06", "5e-06", "1e-05", "2e-05", "5e-05", "0.0001", "0.0002", "0.0005", "0.001",
    "0.002", "0.01", "0.1", "1.0",
];

/// A bucket of ticks counts at its middle; the sum is exact.
fn call_durations(calls: &Calls, seconds_per_tick: f64) -> Value {
    let counted = calls.buckets().map(|(middle, count)| (middle as f64 * seconds_per_tick, count));
    Value::Buckets(in_seconds(&CALL_DURATIONS, counted), calls.ticks as f64 * seconds_per_tick)
}

/// Counts by these bounds, seconds.
fn in_seconds(names: &[&str], counted: impl Iterator<Item = (f64, u64)>) -> Vec<(String, u64)> {
    let bounds: Vec<f64> = names.iter().filter_map(|name| name.parse().ok()).collect();
    grouped(names.iter().map(|name| (*name).to_owned()), &bounds, counted)
}

/// Counts by the first bound not below the value; the last group takes all values above the bounds.
fn grouped<T: PartialOrd>(
    names: impl Iterator<Item = String>,
    bounds: &[T],
    counted: impl Iterator<Item = (T, u64)>,
) -> Vec<(String, u64)> {
    let mut groups = vec![0u64; bounds.len() + 1];
    for (value, count) in counted {
        let group = &mut groups[bounds.partition_point(|bound| *bound < value)];
        *group = group.saturating_add(count);
    }
    names.chain(["+Inf".to_owned()]).zip(groups).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use gruyere_record::bucket_of;

    #[test]
    fn sizes_are_counted_at_or_below_their_bounds() {
        let mut counts = Counts::default();
        for size in [512u64, 1 << 10, (1 << 20) - 512, 1 << 20, 2 << 20, 40 << 30] {
            counts.0[bucket_of(size)] += 1;
        }
        let Value::Buckets(buckets, sum) = sizes(&counts, 42) else { panic!("no histogram") };
        assert_eq!((buckets.len(), sum), (15, 42.0));
        let up_to = |bound: &str| -> u64 {
            let place = buckets.iter().position(|(name, _)| name == bound).expect("a bound");
            buckets[..=place].iter().map(|(_, count)| count).sum()
        };
        for (bound, count) in [
            ("1023.0", 1),
            ("4095.0", 2),
            ("1048575.0", 3),
            ("2097151.0", 4),
            ("4194303.0", 5),
            ("+Inf", 6),
        ] {
            assert_eq!(up_to(bound), count, "{bound}");
        }
    }

    #[test]
    fn durations_are_in_seconds_whatever_a_tick_is() {
        let mut counts = Counts::default();
        counts.0[bucket_of(3000)] += 7;
        let Value::Buckets(buckets, sum) = durations(&counts, 1e-9 / 3.0) else {
            panic!("no histogram")
        };
        let counted: Vec<_> = buckets.iter().filter(|(_, count)| *count > 0).collect();
        assert_eq!(counted.len(), 1);
        assert!(
            ["1e-06", "2e-06"].contains(&counted[0].0.as_str()) && counted[0].1 == 7,
            "{counted:?}"
        );
        assert!((sum / 7e-6 - 1.0).abs() < 0.07, "{sum}");
    }
}
