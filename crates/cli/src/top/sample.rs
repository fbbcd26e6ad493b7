//! The screen's data as JSON, for programs.

use std::time::Instant;

use gruyere_record::watch::{Forecast, Metric};
use gruyere_record::{DeviceGauge, LIFETIME_NAMES};
use jiff::Timestamp;
use serde_json::{Map, Value, json};

use crate::follow::{Device, Followed, Follower};
use crate::shares;
use crate::sites::SeldomRead;

/// A sample: `time`, `processes`, `stale`, `of_other_users`. Bytes are bytes, times seconds, shares
/// 0 to 1; null is unknown.
pub fn sample(follower: &Follower, lines: &mut SeldomRead, now: Instant) -> Value {
    let trouble: Vec<&str> = follower.trouble().collect();
    let processes: Vec<Value> =
        follower.followed().values().map(|followed| process(followed, lines, now)).collect();
    json!({
        "time": Timestamp::now().to_string(),
        "processes": processes,
        "stale": follower.old(),
        "of_other_users": follower.foreign(),
        "unreadable": trouble,
    })
}

fn process(followed: &Followed, lines: &mut SeldomRead, now: Instant) -> Value {
    let process = &followed.process;
    let device = |of: &Device| {
        let mut value = device(of);
        let found = lines.lines(&followed.reader, of.snapshot.device, now);
        value["lines"] = json!(found);
        value
    };
    json!({
        "pid": process.pid,
        "rank": process.rank,
        "local_rank": process.local_rank,
        "world_size": process.world_size,
        "host": process.host,
        "command": process.command,
        "record": followed.reader.path().display().to_string(),
        "user": followed.whose.user,
        "seen": followed.whose.is_seen,
        "state": followed.life.name(),
        "devices": followed.used().map(device).collect::<Vec<_>>(),
    })
}

fn device(device: &Device) -> Value {
    let (snapshot, facts) = (&device.snapshot, device.facts());
    let value = |metric: Metric| metric.value(&facts).filter(|value| value.is_finite());
    let bytes = |metric: Metric| value(metric).map(|value| value as u64);
    let lifetimes: Map<String, Value> = LIFETIME_NAMES
        .iter()
        .enumerate()
        .map(|(number, &name)| {
            let sum = snapshot.sum(|_, lifetime| lifetime == number);
            (
                name.to_owned(),
                json!({ "live_blocks": sum.live_blocks(), "live_bytes": sum.live_bytes() }),
            )
        })
        .collect();
    let growth = match device.forecast {
        Forecast::Growing(growth) => Some(growth),
        _ => None,
    };
    let sample = json!({
        "device": snapshot.device,
        "name": snapshot.facts.name,
        "step": snapshot.gauge(DeviceGauge::Step),
        "live_bytes": snapshot.live,
        "live_peak_bytes": snapshot.live_peak,
        "peak_bytes": device.peak,
        "reserved_bytes": snapshot.gauge(DeviceGauge::Reserved),
        "limit_bytes": facts.limit(),
        "pending_bytes": bytes(Metric::Pending),
        "external_fragmentation": value(Metric::External),
        "internal_fragmentation": value(Metric::Internal),
        "largest_request_bytes": bytes(Metric::Largest),
        "allocated_bytes_per_second": device.rate,
        "forecast": match device.forecast {
            Forecast::Unknown => "unknown",
            Forecast::NoGrowth => "no growth",
            Forecast::Far => "far",
            Forecast::Unsure => "unsure",
            Forecast::Growing(_) => "growing",
        },
        "oom_in_seconds": growth.map(|growth| growth.seconds),
        "oom_in_steps": growth.and_then(|growth| growth.steps),
        "growth_bytes_per_second": growth.map(|growth| growth.bytes_per_second),
        "lifetimes": lifetimes,
        "torn": snapshot.torn_gauges || snapshot.torn_shards > 0,
    });
    shares::told(sample, snapshot)
}
