//! `gruyere stat`: all gauges of a process.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use gruyere_record::device_gauge::{RUNGS, Rung, Unit};
use gruyere_record::facts::Process;
use gruyere_record::gauges::BlockCounts;
use gruyere_record::held::{IDLE, LOST};
use gruyere_record::histogram::Counts;
use gruyere_record::layout::Degraded;
use gruyere_record::reader::{Cursor, DeviceSnapshot};
use gruyere_record::sites::{Phase, live_blocks};
use gruyere_record::{BlockState, DeviceGauge, LIFETIME_NAMES, Reader, SegmentKind};
use serde_json::{Map, Value, json};

use crate::amounts::bytes;
use crate::driver_calls;
use crate::failure::{Ended, Exit};
use crate::output;
use crate::shares;
use crate::sites::{auto_by_phase, shares_of_phases};
use crate::target::Target;
use crate::wrap;

/// Prints all gauges of one process, living or killed.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  gruyere stat 4242                     a process, by its pid
  gruyere stat /dev/shm/gruyere-4026531836-4242-99-0.record
                                        the record of a killed process
  gruyere stat 4242 --json | jq '.devices[0].lifetimes'

Live bytes are rounded up, as allocated; `requested` is what the program asked for. Lost memory, \
from which fragmentation is computed, comes from the current map, as in `gruyere map`. If the \
process is at work and the map is inconsistent, it is as of the last write of the gauges, as the \
largest requests are: at a step's mark, or every few thousand frees. Latencies are of sampled calls.

Exit codes: 0 success; 1 no such process or record, or it can't be read; 2 wrong usage; 3 read, \
but some values are marked torn: they are not from one moment, since the process was killed while \
it wrote.")]
pub struct Arguments {
    #[command(flatten)]
    target: Target,
    /// Print JSON. Sizes are in bytes, times in nanoseconds.
    #[arg(long)]
    json: bool,
}

pub fn run(arguments: &Arguments) -> Ended {
    let reader = arguments.target.open()?;
    let mut devices = reader.device_snapshots();
    for device in &mut devices {
        device.read_lost(&reader);
    }
    reader.expect_sound()?;
    let torn = devices.iter().any(|device| device.torn_shards > 0 || device.torn_gauges);
    let value = value(&reader, &devices);
    let text = if arguments.json { format!("{value:#}") } else { text(&reader, &devices, &value) };
    output::print(format_args!("{}\n", text.trim_end()))?;
    Ok(if torn { Exit::Torn } else { Exit::Fine })
}

fn counts(counts: &BlockCounts) -> Value {
    json!({
        "live_blocks": counts.live_blocks(),
        "live_bytes": counts.live_bytes(),
        "live_requested_bytes": counts.live_requested(),
        "pending_blocks": counts.pending_blocks(),
        "pending_bytes": counts.pending_bytes(),
        "mallocs": counts.mallocs,
        "malloc_bytes": counts.malloc_bytes,
        "malloc_requested_bytes": counts.malloc_requested,
        "frees": counts.frees,
        "free_bytes": counts.free_bytes,
        "free_requested_bytes": counts.free_requested,
    })
}

fn device(snapshot: &DeviceSnapshot) -> Value {
    let total = snapshot.total();
    let gauges: Map<String, Value> = DeviceGauge::ALL
        .iter()
        .map(|&gauge| (gauge.name().to_owned(), json!(snapshot.gauge(gauge))))
        .collect();
    let lifetimes: Map<String, Value> = LIFETIME_NAMES
        .iter()
        .enumerate()
        .map(|(number, &name)| {
            (name.to_owned(), counts(&snapshot.sum(|_, lifetime| lifetime == number)))
        })
        .collect();
    let value = json!({
        "device": snapshot.device,
        "name": snapshot.facts.name,
        "uuid": snapshot.facts.uuid.iter().map(|byte| format!("{byte:02x}")).collect::<String>(),
        "live_bytes": snapshot.live,
        "live_peak_bytes": snapshot.live_peak,
        "external_fragmentation": snapshot.external_fragmentation(),
        "internal_fragmentation": snapshot.internal_fragmentation(),
        "free_held_bytes": snapshot.held().free(),
        "request_p99_bytes": snapshot.request_p99(),
        "p99_fits": snapshot.p99_fits(),
        "gauges": gauges,
        "total": counts(&total),
        "small_pool": counts(&snapshot.sum(|pool, _| pool == 0)),
        "large_pool": counts(&snapshot.sum(|pool, _| pool == 1)),
        "lifetimes": lifetimes,
        "torn": snapshot.torn_shards > 0 || snapshot.torn_gauges,
    });
    shares::told(value, snapshot)
}

const QUANTILES: [(&str, f64); 5] =
    [("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p99.9", 0.999), ("max", 1.0)];

fn histogram(counts: &Counts, scale: f64) -> Value {
    let histogram = counts.to_hdr(scale);
    let mut value = json!({ "count": counts.total() });
    for (name, quantile) in QUANTILES {
        value[name] = if histogram.is_empty() {
            Value::Null
        } else {
            json!(histogram.value_at_quantile(quantile))
        };
    }
    value
}

fn value(reader: &Reader, devices: &[DeviceSnapshot]) -> Value {
    let process = reader.process();
    let health = reader.health();
    let histograms = reader.histograms();
    let (blocks, segments) = (reader.blocks(), reader.segments());
    let pending = blocks.entries.iter().filter(|(_, state)| *state == BlockState::Pending).count();
    let of = |kind| segments.entries.iter().filter(move |segment| segment.kind == kind);
    let bytes_of = |kind| of(kind).fold(0u64, |sum, segment| sum.wrapping_add(segment.bytes));
    let retired = || segments.entries.iter().filter(|segment| segment.is_retired());
    let events = reader.events(&mut Cursor::default());
    let facts = reader.event_facts();
    let sites = reader.sites();
    let with_phases = |snapshot: &DeviceSnapshot| {
        let mut value = device(snapshot);
        let live = live_blocks(&blocks.entries, &segments.entries, snapshot.device);
        let sent = live.iter().filter(|block| block.is_sent).map(|block| block.size);
        value["sent_bytes"] = json!(sent.fold(0, u64::saturating_add));
        if !sites.is_empty() {
            let bytes = auto_by_phase(&live, &sites);
            let names = Phase::ALL.map(Phase::name);
            value["auto_live_bytes_by_phase"] =
                json!(names.into_iter().zip(bytes).collect::<BTreeMap<_, _>>());
        }
        value
    };
    // Without a scale, latencies stay in ticks under another name.
    let scale = reader.scale().map(|scale| scale.nanoseconds_per_tick);
    let unit = if scale.is_some() { "nanoseconds" } else { "ticks" };
    json!({
        "process": {
            "pid": process.pid,
            "pid_namespace": process.pid_namespace,
            "rank": process.rank,
            "local_rank": process.local_rank,
            "world_size": process.world_size,
            "host": process.host,
            "command": process.command,
            "configuration": process.configuration,
            "version": process.version,
            "created_nanoseconds": process.created,
            "live": reader.is_live(),
        },
        "record": {
            "path": reader.path().display().to_string(),
            "held_bytes": reader.bytes_held(),
            "blocks_unrecorded": health.blocks_unrecorded,
            "segments_unrecorded": health.segments_unrecorded,
            "no_room": health.no_room,
            "degraded": degraded(health.degraded),
        },
        "devices": devices.iter().map(with_phases).collect::<Vec<_>>(),
        "blocks": {
            "live": blocks.entries.len() - pending, "pending": pending, "torn": blocks.torn
        },
        "segments": {
            "spans": of(SegmentKind::Span).count(),
            "span_bytes": bytes_of(SegmentKind::Span),
            "slabs": of(SegmentKind::Slab).count(),
            "slab_bytes": bytes_of(SegmentKind::Slab),
            "chunks": of(SegmentKind::Chunk).count(),
            "chunk_bytes": bytes_of(SegmentKind::Chunk),
            "views": of(SegmentKind::View).count(),
            "view_bytes": bytes_of(SegmentKind::View),
            "retired_views": retired().count(),
            "retired_view_bytes": retired().fold(0u64, |sum, view| sum.wrapping_add(view.bytes)),
            "reservations": of(SegmentKind::Reservation).count(),
            "reserved_address_bytes": bytes_of(SegmentKind::Reservation),
            "torn": segments.torn,
        },
        "events": {
            "written": facts.written,
            "held": events.entries.len(),
            "lost": events.lost,
            "dropped": facts.dropped,
            "capacity": facts.capacity,
        },
        "driver_calls": reader.driver_call_times(),
        "histograms": {
            "malloc_bytes": histogram(&histograms.malloc_sizes, 1.0),
            "free_bytes": histogram(&histograms.free_sizes, 1.0),
            (format!("malloc_{unit}")): histogram(&histograms.malloc_latency, scale.unwrap_or(1.0)),
            (format!("free_{unit}")): histogram(&histograms.free_latency, scale.unwrap_or(1.0)),
        },
    })
}

fn degraded(bits: u64) -> Vec<&'static str> {
    let names = [
        (Degraded::SMALL_RING, "a smaller event ring"),
        (Degraded::SMALL_MAP, "a smaller block map"),
        (Degraded::MEMFD, "no file in the folder of the records"),
        (Degraded::PRIVATE, "private memory"),
        (Degraded::LATER_REFUSED, "later out-of-memories are missing"),
        (Degraded::NO_LOCK, "no lock, so it is unknown whether the process runs"),
    ];
    names.iter().filter(|(bit, _)| bits & bit != 0).map(|(_, name)| *name).collect()
}

/// A process's configuration, for people.
pub fn configuration(process: &Process) -> &str {
    if process.configuration.trim().is_empty() { "all defaults" } else { &process.configuration }
}

fn gauge_text(gauge: DeviceGauge, value: u64) -> String {
    match gauge.unit() {
        Unit::Count => value.to_string(),
        Unit::Bytes => bytes(value),
        Unit::Nanoseconds => format!("{:.3} ms", value as f64 / 1e6),
        Unit::Microseconds => format!("{:.3} ms", value as f64 / 1e3),
    }
}

fn text(reader: &Reader, devices: &[DeviceSnapshot], value: &Value) -> String {
    let mut out = String::new();
    let process = reader.process();
    let life = match reader.is_live() {
        Some(true) => "live",
        Some(false) => "ended without a clean exit",
        None => "life unknown",
    };
    let number = |value: Option<u64>| value.map_or("-".to_owned(), |value| value.to_string());
    let mut line = |text: std::fmt::Arguments| {
        let _ = writeln!(out, "{text}");
    };
    let columns = wrap::width().unwrap_or(usize::MAX);
    let words = |head: &str, text: &str| wrap::below(head, text.split(' '), " ", columns);
    let about = format!("({life}) on {}, gruyere {}", process.host, process.version);
    line(format_args!("{}", words(&format!("process {} ", process.pid), &about)));
    line(format_args!("{}", words("  command        ", &process.command)));
    let (rank, local, world) =
        (number(process.rank), number(process.local_rank), number(process.world_size));
    line(format_args!("  rank           {rank} (local {local}, of {world})"));
    line(format_args!("{}", words("  configuration  ", configuration(&process))));
    line(format_args!("  record         {}", reader.path().display()));
    for (at, snapshot) in devices.iter().enumerate() {
        let torn = if snapshot.torn_gauges || snapshot.torn_shards > 0 {
            "  (torn: not of one moment)"
        } else {
            ""
        };
        line(format_args!("\ndevice {} {}{torn}", snapshot.device, snapshot.facts.name));
        let fact = |name: &str, value: String| format!("  {name:<31} {value:>13}");
        let percent = |share: f64| format!("{:.2}%", share * 100.0);
        let held = snapshot.held();
        line(format_args!("{}", fact("live", bytes(snapshot.live))));
        line(format_args!("{}", fact("live, at the peak", bytes(snapshot.live_peak))));
        let sent = value["devices"][at]["sent_bytes"].as_u64().filter(|&sent| sent > 0);
        if let Some(sent) = sent {
            line(format_args!("{}", fact("live, sent to other processes", bytes(sent))));
        }
        if let Some(ratio) = snapshot.peak_ratio() {
            line(format_args!("{}", fact("peak ratio (held / live)", format!("{ratio:.4}"))));
        }
        let by = match held.typical_request {
            0 => String::new(),
            request => format!("what a request of {} does not fit into", bytes(request)),
        };
        let lost = fact(LOST, bytes(held.lost()));
        line(format_args!("{}", words(&format!("{lost}  "), &by).trim_end()));
        line(format_args!(
            "{}",
            fact("fragmentation (lost / held)", percent(held.fragmentation()))
        ));
        line(format_args!("{}", fact(IDLE, bytes(held.idle()))));
        line(format_args!("{}", fact("unused (1 - live / held)", percent(held.unused()))));
        let external = percent(snapshot.external_fragmentation());
        line(format_args!("{}", fact("external fragmentation", external)));
        let internal = percent(snapshot.internal_fragmentation());
        line(format_args!("{}", fact("internal fragmentation", internal)));
        let fits = match snapshot.p99_fits() {
            None => "-".to_owned(),
            // More digits say no more.
            Some(times) if times > 1000.0 => "more than 1000 times".to_owned(),
            Some(times) => format!("{times:.1} times"),
        };
        line(format_args!("{}", fact("99th-percentile request", bytes(snapshot.request_p99()))));
        line(format_args!("{}", fact("  which would fit", fits)));
        for &gauge in DeviceGauge::ALL {
            if let Some(name) = gauge.screen() {
                line(format_args!("{}", fact(name, gauge_text(gauge, snapshot.gauge(gauge)))));
            }
        }
        let climbed = |rung: &Rung| snapshot.gauge(rung.calls) > 0;
        if RUNGS.iter().any(climbed) {
            line(format_args!(
                "\n  {:<30} {:>14} {:>11} {:>11}",
                "memory reclaimed, by what", "TIMES", "GAINED", "TOOK"
            ));
        }
        for rung in RUNGS.iter().filter(|rung| climbed(rung)) {
            let [calls, gained, took] =
                rung.gauges().map(|gauge| gauge_text(gauge, snapshot.gauge(gauge)));
            let name = rung.name;
            line(format_args!("  {name:<30} {calls:>14} {gained:>11} {took:>11}"));
        }
        let head = ["BLOCKS", "LIVE", "REQUESTED", "PENDING", "MALLOCS", "FREES"];
        let [blocks, live, requested, pending, mallocs, frees] = head;
        line(format_args!(
            "\n  {:<11} {blocks:>8} {live:>11} {requested:>11} {pending:>11} {mallocs:>10} \
             {frees:>10}",
            ""
        ));
        let row = |name: &str, counts: BlockCounts| {
            format!(
                "  {name:<11} {:>8} {:>11} {:>11} {:>11} {:>10} {:>10}",
                counts.live_blocks(),
                bytes(counts.live_bytes()),
                bytes(counts.live_requested()),
                bytes(counts.pending_bytes()),
                counts.mallocs,
                counts.frees
            )
        };
        let phases = &value["devices"][at]["auto_live_bytes_by_phase"];
        let of_auto =
            shares_of_phases(Phase::ALL.map(|phase| phases[phase.name()].as_u64().unwrap_or(0)));
        for (number, name) in LIFETIME_NAMES.iter().enumerate() {
            line(format_args!("{}", row(name, snapshot.sum(|_, lifetime| lifetime == number))));
            if let (0, Some(of_auto)) = (number, &of_auto) {
                line(format_args!("{}", words("    ", of_auto)));
            }
        }
        line(format_args!("{}", row("small", snapshot.sum(|pool, _| pool == 0))));
        line(format_args!("{}", row("large", snapshot.sum(|pool, _| pool == 1))));
        line(format_args!("{}", row("total", snapshot.total())));
    }
    line(format_args!("\nhistograms"));
    for (name, histogram) in value["histograms"].as_object().into_iter().flatten() {
        let quantiles: Vec<String> = QUANTILES
            .iter()
            .filter_map(|(quantile, _)| {
                let value = histogram[quantile].as_u64()?;
                Some(match name.ends_with("bytes") {
                    true => format!("{quantile} {}", bytes(value)),
                    false => format!("{quantile} {value}"),
                })
            })
            .collect();
        let head = format!("  {:<20} count {:<12} ", name.replace('_', " "), histogram["count"]);
        let quantiles = quantiles.iter().map(String::as_str);
        line(format_args!("{}", wrap::below(&head, quantiles, "  ", columns)));
    }
    for (at, row) in driver_calls::table(&reader.driver_call_times()).into_iter().enumerate() {
        line(format_args!("{}  {row}", if at == 0 { "\n" } else { "" }));
    }
    let parts: [(&str, &str); 4] = [
        ("blocks", "block map"),
        ("segments", "segments"),
        ("events", "events"),
        ("record", "record"),
    ];
    for (key, title) in parts {
        let facts: Vec<String> = value[key]
            .as_object()
            .into_iter()
            .flatten()
            .filter(|(name, _)| *name != "path")
            .map(|(name, value)| {
                let bytes = value.as_u64().filter(|_| name.ends_with("_bytes")).map(bytes);
                let told = bytes.unwrap_or_else(|| value.to_string());
                let name = name.trim_end_matches("_bytes").replace("retired_view", "old_mapping");
                format!("{} {told}", name.replace('_', " "))
            })
            .collect();
        let facts = facts.iter().map(String::as_str);
        let text = wrap::below(&format!("{title:<10} "), facts, "  ", columns);
        line(format_args!("{text}"));
    }
    out
}
