//! The detail view of a process, which Enter opens.

use gruyere_record::device_gauge::RUNGS;
use gruyere_record::plain;
use gruyere_record::stream::StreamNumber;
use gruyere_record::watch::{Duration, Forecast, Metric, Unit};
use gruyere_record::{DeviceGauge, LIFETIME_NAMES};
use ratatui::text::{Line, Span};

use super::app::{App, Row};
use super::columns::oom_in;
use super::fit::wrap;
use super::panels::{self, count};
use super::sick;
use crate::amounts::bytes;
use crate::driver_calls;
use crate::stat::configuration;

/// The lines of the view for `width` columns: growth, then memory, then facts.
pub fn lines(app: &App, row: &Row, width: usize) -> Vec<Line<'static>> {
    let theme = app.theme;
    let mut lines: Vec<Line<'static>> = Vec::new();
    let process = &row.process;
    let number =
        |value: Option<u64>| value.map_or_else(|| "-".to_owned(), |value| value.to_string());
    let head = |text: String| Line::styled(format!(" {text}"), theme.title());
    lines.push(head(format!(
        "process {} ({}) on {}",
        process.pid,
        row.life.name(),
        plain(&process.host)
    )));
    let found = app.details.lines.as_deref().unwrap_or_default();
    let verdict = &app.details.verdict;
    let (said, next) = match &row.ending {
        Some(ending) => match sick::epitaph(row, ending) {
            Some(said) => (Some(said), sick::way_on(row, ending)),
            None => (None, Vec::new()),
        },
        None => {
            let told = sick::Told { lines: found, verdict };
            (sick::sentence(row, std::slice::from_ref(row), told), verdict.sentences())
        }
    };
    let room = width.saturating_sub(1);
    let wrapped = |text: &str| wrap(&plain(text), room, usize::MAX).into_iter();
    if let Some(text) = said {
        lines.extend(wrapped(&text).map(|text| Line::styled(text, theme.bad())));
    }
    for text in next {
        lines.extend(wrapped(&text).map(Line::raw));
    }
    lines.push(Line::raw(""));
    lines.push(head("by line of the program".to_owned()));
    match app.details.lines.clone() {
        Some(found) => lines.extend(panels::lines_of(app, found, width)),
        None => lines.push(Line::styled(format!("  {}", panels::no_lines(app)), theme.dim())),
    }
    lines.push(Line::raw(""));
    lines.push(head("process and device".to_owned()));
    let mut fact = |name: &str, value: String| {
        lines.push(Line::from(vec![
            Span::styled(format!("   {name:<15} "), theme.dim()),
            Span::raw(plain(&value)),
        ]));
    };
    fact("command", process.command.clone());
    let (rank, local, world) =
        (number(process.rank), number(process.local_rank), number(process.world_size));
    fact("rank", format!("{rank} (local {local}, of {world})"));
    fact("configuration", configuration(process).to_owned());
    fact("record", row.key.0.display().to_string());
    fact("gruyère", process.version.clone());
    fact("device", format!("{} {}", row.key.1, row.snapshot.facts.name));
    for metric in [
        Metric::Live,
        Metric::Reserved,
        Metric::Fragmentation,
        Metric::Lost,
        Metric::Idle,
        Metric::Unused,
        Metric::External,
        Metric::Internal,
        Metric::Largest,
        Metric::Rate,
        Metric::OomIn,
    ] {
        let value = match metric.value(&row.facts()) {
            // A threshold is never passed then, but memory may run out all the same.
            _ if metric == Metric::OomIn
                && matches!(row.forecast, Forecast::Unsure | Forecast::Far) =>
            {
                oom_in(row.forecast)
            }
            Some(value) => metric.unit().show(value),
            None => "-".to_owned(),
        };
        let name = if metric == Metric::Reserved { "held" } else { metric.name() };
        fact(name, value);
        if metric == Metric::Live {
            fact("peak", bytes(row.peak));
        }
    }
    if row.snapshot.torn_gauges || row.snapshot.torn_shards > 0 {
        fact(
            "torn",
            "the process was killed while it wrote: not all values are from one moment".to_owned(),
        );
    }
    lines.push(Line::raw(""));
    let columns = format!(
        "{:>9} {:>11} {:>11} {:>11} {:>9} {:>9}",
        "BLOCKS", "LIVE", "REQUESTED", "WAITING", "MALLOCS", "FREES"
    );
    lines.push(head(format!("{:<12}{columns}", "by lifetime")));
    for (number, name) in LIFETIME_NAMES.iter().enumerate() {
        let sum = row.snapshot.sum(|_, lifetime| lifetime == number);
        lines.push(Line::from(vec![
            Span::styled(format!("   {name:<11}"), theme.lifetime(number)),
            Span::raw(format!(
                "{:>8} {:>11} {:>11} {:>11} {:>9} {:>9}",
                count(sum.live_blocks()),
                bytes(sum.live_bytes()),
                bytes(sum.live_requested()),
                bytes(sum.pending_bytes()),
                count(sum.mallocs),
                count(sum.frees)
            )),
        ]));
    }
    lines.push(Line::raw(""));
    let age = app.details.streams_at.map_or_else(String::new, |at| {
        format!(", of {} ago", Duration(at.elapsed().as_secs_f64()))
    });
    lines.push(head(format!("by stream{age}")));
    for (stream, sum) in &app.details.streams {
        lines.push(Line::raw(format!(
            "   stream {:<8} {:>8} blocks {:>11}",
            StreamNumber(*stream),
            count(sum.count),
            bytes(sum.bytes)
        )));
    }
    lines.push(Line::raw(""));
    lines.push(head("slabs by size class".to_owned()));
    for (slot, sum) in &app.details.slabs {
        lines.push(Line::raw(format!(
            "   {:>11} {:>8} slabs {:>11}",
            bytes(*slot),
            count(sum.count),
            bytes(sum.bytes)
        )));
    }
    for (at, row) in driver_calls::table(&app.details.calls).into_iter().enumerate() {
        if at == 0 {
            lines.push(Line::raw(""));
            lines.push(head("driver calls of the process, host time".to_owned()));
        }
        lines.push(Line::raw(format!("   {row}")));
    }
    lines.push(Line::raw(""));
    lines.push(head("gauges".to_owned()));
    let value = |gauge: DeviceGauge| {
        let metric = Metric::Gauge(gauge);
        let value = metric.value(&row.facts()).unwrap_or(0.0);
        match metric.unit() {
            Unit::Count => count(value as u64),
            unit => unit.show(value),
        }
    };
    let gauges: Vec<String> = DeviceGauge::ALL
        .iter()
        .filter_map(|&gauge| Some(format!("   {:<30} {:>12}", gauge.screen()?, value(gauge))))
        .collect();
    let each = 3 + 30 + 1 + 12;
    let across = (width / each).clamp(1, 3);
    let down = gauges.len().div_ceil(across);
    for at in 0..down {
        let line: String =
            (0..across).filter_map(|column| gauges.get(column * down + at)).cloned().collect();
        lines.push(Line::raw(line));
    }
    lines.push(Line::raw(""));
    let columns = format!("{:>9} {:>11} {:>11}", "TIMES", "GAINED", "TOOK");
    lines.push(head(format!("{:<22}{columns}", "memory reclaimed")));
    for rung in RUNGS {
        let [times, gained, took] = rung.gauges().map(value);
        let name = rung.name;
        lines.push(Line::raw(format!("   {name:<19} {times:>9} {gained:>11} {took:>11}")));
    }
    lines
}
