//! Time in driver calls, for people.

use gruyere_record::calls::CallTime;
use gruyere_record::size::BinaryBytes;

/// A duration with three digits.
pub fn span(nanoseconds: u64) -> String {
    match nanoseconds as f64 {
        n if n < 1e3 => format!("{n:.0} ns"),
        n if n < 1e6 => digits(n / 1e3, "us"),
        n if n < 1e9 => digits(n / 1e6, "ms"),
        n => digits(n / 1e9, "s"),
    }
}

fn digits(value: f64, unit: &str) -> String {
    let places = if value < 10.0 { 2 } else { usize::from(value < 100.0) };
    format!("{value:.places$} {unit}")
}

/// The class of sizes of `time`.
fn size(time: &CallTime) -> String {
    match time.up_to_bytes {
        _ if !time.is_sized => String::new(),
        Some(most) => format!("to {}", BinaryBytes(most).to_string().replace(".00", "")),
        None => "larger".to_owned(),
    }
}

/// The times as a table, a line each; empty without any.
pub fn table(times: &[CallTime]) -> Vec<String> {
    if times.is_empty() {
        return Vec::new();
    }
    let row = |[a, b, c, d, e, f, g]: [&str; 7]| {
        format!("{a:<24} {b:<10} {c:>8} {d:>7} {e:>7} {f:>7} {g:>7}")
    };
    let head = row(["DRIVER CALL", "SIZE", "COUNT", "TOTAL", "MEDIAN", "99%", "MAX"]);
    let lines = times.iter().map(|time| {
        let [total, median, high, most] = [
            time.total_nanoseconds,
            time.p50_nanoseconds,
            time.p99_nanoseconds,
            time.max_nanoseconds,
        ]
        .map(span);
        row([&time.call, &size(time), &time.count.to_string(), &total, &median, &high, &most])
    });
    std::iter::once(head).chain(lines).collect()
}

/// The times in a single line: the total, the three costliest kinds, then the host's waiting time.
/// `None` without any.
pub fn line(times: &[CallTime]) -> Option<String> {
    let (waits, calls): (Vec<CallTime>, Vec<CallTime>) =
        times.iter().cloned().partition(CallTime::is_wait);
    let total = |kinds: &[(&str, u64, u64)]| {
        kinds.iter().fold(0u64, |sum, kind| sum.saturating_add(kind.2))
    };
    let (calls, waits) = (CallTime::by_kind(&calls), CallTime::by_kind(&waits));
    let costliest: Vec<String> = calls
        .iter()
        .take(3)
        .map(|(call, count, time)| format!("{call} {} in {count} calls", span(*time)))
        .collect();
    let mut parts = Vec::new();
    if !calls.is_empty() {
        parts.push(format!("driver calls took {} ({})", span(total(&calls)), costliest.join(", ")));
    }
    if !waits.is_empty() {
        parts.push(format!("the library waited {}", span(total(&waits))));
    }
    (!parts.is_empty()).then(|| parts.join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn time(call: &str, up_to_bytes: Option<u64>, count: u64, total: u64) -> CallTime {
        CallTime {
            call: call.to_owned(),
            up_to_bytes,
            is_sized: up_to_bytes.is_some(),
            count,
            total_nanoseconds: total,
            p50_nanoseconds: total / count,
            p99_nanoseconds: total / count,
            max_nanoseconds: total,
        }
    }

    #[test]
    fn spans_have_three_digits() {
        let told = [0, 999, 1_000, 29_040, 193_320, 6_300_000, 61_000_000_000].map(span);
        assert_eq!(told, ["0 ns", "999 ns", "1.00 us", "29.0 us", "193 us", "6.30 ms", "61.0 s"]);
    }

    #[test]
    fn a_line_names_the_costliest_and_tells_waits_apart() {
        let times = [
            time("cuMemCreate", Some(2 << 20), 10, 290_000),
            time("cuMemCreate", Some(32 << 20), 10, 440_000),
            time("cuMemMap", Some(2 << 20), 20, 40_000),
            time("cuMemSetAccess", Some(2 << 20), 5, 190_000),
            time("cuMemRelease", None, 1, 23_000),
            time("cuStreamSynchronize", None, 2, 5_000_000),
        ];
        assert_eq!(
            line(&times).unwrap(),
            "driver calls took 983 us (cuMemCreate 730 us in 20 calls, cuMemSetAccess 190 us in 5 \
             calls, cuMemMap 40.0 us in 20 calls); the library waited 5.00 ms"
        );
        assert_eq!(line(&[]), None);
        let table = table(&times);
        assert_eq!(table.len(), 7);
        assert!(
            table[1].contains("to 2 MiB")
                && table[2].contains("44.0 us")
                && !table[5].contains("to "),
            "{table:#?}"
        );
    }
}
