//! The panels below the table; each draws into its area.

use gruyere_record::facts::Uses;
use gruyere_record::histogram::bucket_floor;
use gruyere_record::plain;
use gruyere_record::ring::Event;
use gruyere_record::sites;
use gruyere_record::stream::StreamNumber;
use gruyere_record::watch::{Duration, Forecast, Metric, Unit};
use gruyere_record::{DeviceGauge, EventKind, LIFETIME_NAMES};
use ratatui::Frame;
use ratatui::layout::{Alignment, Constraint, Layout, Rect};
use ratatui::style::Style;
use ratatui::symbols::Marker;
use ratatui::text::{Line, Span};
use ratatui::widgets::{
    Axis, Block, Borders, Chart, Dataset, GraphType, Paragraph, RenderDirection, Sparkline,
};

use super::app::{App, Row};
use super::columns::oom_in;
use super::fit::{cut, name, number, put};
use super::sick;
use crate::amounts;
use crate::driver_calls::span;
use crate::sites::Order;

/// Bytes for people, in at most ten cells.
pub fn bytes(value: u64) -> String {
    number(&amounts::bytes(value), 10).trim_start().to_owned()
}

/// A count for people.
pub fn count(value: u64) -> String {
    match value {
        0..10_000 => value.to_string(),
        10_000..10_000_000 => format!("{:.1}k", value as f64 / 1e3),
        10_000_000..10_000_000_000 => format!("{:.1}M", value as f64 / 1e6),
        _ => format!("{:.1}G", value as f64 / 1e9),
    }
}

/// A bar of `width` cells, filled to `share` in steps of an eighth of a cell.
pub fn bar(share: f64, width: usize) -> String {
    const EIGHTHS: [&str; 8] = ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"];
    let eighths = (share.clamp(0.0, 1.0) * (width * 8) as f64).round() as usize;
    // Any share above zero is visible.
    let eighths = if share > 0.0 { eighths.max(1) } else { 0 };
    let mut bar = "█".repeat(eighths / 8);
    bar.push_str(EIGHTHS[eighths % 8]);
    let used = eighths.div_ceil(8);
    bar.push_str(&" ".repeat(width.saturating_sub(used)));
    bar
}

fn panel<'a>(app: &App, title: impl Into<Line<'a>>) -> Block<'a> {
    Block::new().borders(Borders::TOP).border_style(app.theme.dim()).title(title)
}

fn heading<'a>(app: &App, name: &'a str, rest: String) -> Line<'a> {
    Line::from(vec![
        Span::raw(" "),
        Span::styled(name, app.theme.title()),
        Span::styled(
            if rest.is_empty() { " ".to_owned() } else { format!(" {rest} ") },
            app.theme.dim(),
        ),
    ])
}

/// The chosen device and its state in a line; the short form says only the worst.
pub fn summary<'a>(app: &App, row: &Row, is_short: bool) -> Line<'a> {
    let rank = row.process.rank.map(|rank| format!("rank {rank} ")).unwrap_or_default();
    let theme = app.theme;
    let limit = row.facts().limit();
    let held = row.snapshot.gauge(DeviceGauge::Reserved);
    let name = if is_short { "" } else { row.snapshot.facts.name.trim() };
    let mut spans = vec![
        Span::raw(" "),
        Span::styled(
            format!("{rank}GPU {} {}", row.key.1, plain(name)).trim_end().to_owned(),
            theme.title(),
        ),
    ];
    let amounts = [
        Span::styled(" live ", theme.dim()),
        Span::styled(bytes(row.snapshot.live), theme.live()),
        Span::styled(" peak ", theme.dim()),
        Span::styled(bytes(row.peak), theme.peak()),
        Span::styled(" held ", theme.dim()),
        Span::styled(bytes(held), theme.reserved()),
        Span::styled(" of ", theme.dim()),
        Span::styled(bytes(limit), theme.limit()),
    ];
    // The alarm at the top already gives the growth of the row that runs out soonest.
    let growth = sick::growth(row).filter(|_| app.sick().is_none_or(|sick| sick.key != row.key));
    if !(is_short && growth.is_some()) {
        spans.extend(amounts);
    }
    if let Some(growth) = growth {
        let style = if growth.seconds < SOON { theme.bad() } else { theme.warn() };
        let steps = growth.steps.map(|steps| format!(", {steps:.0} steps")).unwrap_or_default();
        let rate = Unit::BytesPerSecond.show(growth.bytes_per_second);
        spans.push(Span::styled(
            format!("  grows {rate}: out of memory in {}{steps}", oom_in(row.forecast)),
            style,
        ));
    }
    spans.push(Span::raw(" "));
    Line::from(spans)
}

/// A forecast below this many seconds is red.
pub const SOON: f64 = 600.0;

/// Graph of live and held memory over time.
pub fn memory(frame: &mut Frame, area: Rect, app: &App) {
    let Some(row) = app.chosen() else { return };
    let title = heading(app, "memory", app.span.name().to_owned());
    let block = panel(app, title).title(legend(app).alignment(Alignment::Right));
    let series = series(app, area.width.saturating_sub(10));
    let (Some(first), Some(last)) = (series.first(), series.last()) else {
        let text = Paragraph::new(" no sample yet").style(app.theme.dim()).block(block);
        frame.render_widget(text, area);
        return;
    };
    let (begin, end) = (first.seconds, last.seconds.max(first.seconds + 1.0));
    // Highs and lows alternate: a value that rises and falls in every step shows as a band.
    let live: Vec<(f64, f64)> = series
        .iter()
        .flat_map(|cell| [(cell.seconds, cell.low), (cell.seconds, cell.high)])
        .collect();
    let held: Vec<(f64, f64)> = series.iter().map(|cell| (cell.seconds, cell.held)).collect();
    let limit = row.facts().limit() as f64;
    let highest = held
        .iter()
        .map(|point| point.1)
        .fold(1.0, f64::max)
        .max(live.iter().map(|point| point.1).fold(1.0, f64::max));
    // Shows the ceiling once live memory is near it.
    let top = if highest > 0.5 * limit { limit.max(highest) } else { round(highest * 1.05) };
    let ceiling = [(begin, limit), (end, limit)];
    let line = |data, style| {
        Dataset::default()
            .marker(Marker::Braille)
            .graph_type(GraphType::Line)
            .style(style)
            .data(data)
    };
    let mut sets = vec![line(&live, app.theme.live()), line(&held, app.theme.reserved())];
    if top >= limit {
        sets.push(line(&ceiling, app.theme.limit()));
    }
    let label =
        |value: f64| Span::styled(Unit::Bytes.show(value).replace(".00", ""), app.theme.dim());
    let (before, last) = if row.runs() { ("ago", "now") } else { ("before", "the end") };
    let ago =
        |seconds: f64| Span::styled(format!("{} {before}", Duration(seconds)), app.theme.dim());
    let chart = Chart::new(sets)
        .block(block)
        .legend_position(None)
        .x_axis(
            Axis::default()
                .bounds([begin, end])
                .labels([ago(end - begin), Span::styled(last, app.theme.dim())]),
        )
        .y_axis(Axis::default().bounds([0.0, top]).labels([
            label(0.0),
            label(top / 2.0),
            label(top),
        ]))
        .style(app.theme.dim());
    frame.render_widget(chart, area);
}

/// Rounds up to 1, 2, 4 or 8 of a unit, times 1, 10 or 100.
fn round(value: f64) -> f64 {
    let mut unit = 1.0;
    while value >= 1024.0 * unit {
        unit *= 1024.0;
    }
    let steps = [1.0, 2.0, 4.0, 8.0];
    let mut scale = unit;
    loop {
        if let Some(step) = steps.iter().find(|step| *step * scale >= value) {
            return step * scale;
        }
        scale *= 10.0;
    }
}

fn legend<'a>(app: &App) -> Line<'a> {
    let theme = app.theme;
    Line::from(vec![
        Span::styled(" ━ live ", theme.live()),
        Span::styled("━ held ", theme.reserved()),
        Span::styled("━ ceiling ", theme.limit()),
    ])
}

/// A column of the graph.
#[derive(Clone, Copy, Debug)]
struct Cell {
    seconds: f64,
    low: f64,
    high: f64,
    held: f64,
}

/// The graph's columns: the record's timeline, then our own samples after its end.
fn series(app: &App, columns: u16) -> Vec<Cell> {
    let mut cells: Vec<Cell> = app
        .timeline
        .iter()
        .map(|entry| Cell {
            seconds: entry.realtime_nanoseconds as f64 / 1e9,
            low: entry.sample.live_low as f64,
            high: entry.sample.in_use_high.max(entry.sample.live_high) as f64,
            held: entry.sample.reserved_high as f64,
        })
        .collect();
    let timeline_ends = cells.last().map_or(0.0, |cell| cell.seconds);
    // After the end of a process, its record has the end.
    let has_ended = app.chosen().and_then(|row| row.ending.as_ref()?.record.as_ref()).is_some();
    let ticks = app.ticks().filter(|tick| !has_ended && tick.seconds > timeline_ends);
    cells.extend(ticks.map(|tick| Cell {
        seconds: tick.seconds,
        low: tick.live as f64,
        high: tick.live as f64,
        held: tick.reserved as f64,
    }));
    let end = cells.last().map_or(0.0, |cell| cell.seconds);
    if let Some(span) = app.span.seconds() {
        cells.retain(|cell| cell.seconds >= end - span);
    }
    let begin = cells.first().map_or(0.0, |cell| cell.seconds);
    let width = (end - begin) / f64::from(columns.max(1));
    let mut merged: Vec<Cell> = Vec::new();
    for cell in cells {
        match merged.last_mut() {
            Some(last) if cell.seconds - last.seconds < width => {
                last.low = last.low.min(cell.low);
                last.high = last.high.max(cell.high);
                last.held = last.held.max(cell.held);
            }
            _ => merged.push(cell),
        }
    }
    merged
}

/// A fragmentation that has always been below this gets a line of text instead of a graph.
const LITTLE: f64 = 0.05;

/// Allocation rate and fragmentation over time.
pub fn sparklines(frame: &mut Frame, area: Rect, app: &App) {
    let width = usize::from(area.width);
    let latest = |value: fn(&super::app::Tick) -> f64| -> Vec<f64> {
        app.ticks().rev().take(width).map(value).collect()
    };
    // Latest first: they are drawn from the right.
    let rates = latest(|tick| tick.rate);
    let fragmentation = latest(|tick| tick.fragmentation);
    let most = |values: &[f64], least: f64| values.iter().copied().fold(least, f64::max);
    let is_little = most(&fragmentation, 0.0) < LITTLE;
    let lower = if is_little { 1 } else { area.height - area.height / 2 };
    let [upper, lower] =
        Layout::vertical([Constraint::Min(0), Constraint::Length(lower)]).areas(area);
    let show = |unit: Unit, value: Option<&f64>| value.map_or(String::new(), |of| unit.show(*of));
    let highest = most(&rates, 1.0);
    let now = show(Unit::BytesPerSecond, rates.first());
    let said = format!("{now}, at most {}", Unit::BytesPerSecond.show(highest));
    let title = heading(app, "allocated", said);
    sparkline(frame, upper, (panel(app, title), app.theme.live()), &rates, highest);
    let now = show(Unit::Share, fragmentation.first());
    let said = match is_little {
        true => format!("{now} of held, at most {}", Unit::Share.show(most(&fragmentation, 0.0))),
        false => format!("{now} of held"),
    };
    let title = heading(app, "lost", said);
    sparkline(frame, lower, (panel(app, title), app.theme.reserved()), &fragmentation, 1.0);
}

fn sparkline(
    frame: &mut Frame,
    area: Rect,
    (block, style): (Block<'_>, Style),
    values: &[f64],
    most: f64,
) {
    let data: Vec<u64> = values.iter().map(|value| (value / most * 1000.0) as u64).collect();
    let line = Sparkline::default()
        .direction(RenderDirection::RightToLeft)
        .block(block)
        .data(data)
        .max(1000)
        .style(style);
    frame.render_widget(line, area);
}

/// Lead of the host over the device, nanoseconds, from which on the panel shows it.
const NOTABLE_LAG: u64 = 1_000_000;

/// Live memory by lifetime, and memory held but not live, for `columns` columns. There are no rows
/// for parts without memory.
pub fn lifetime_lines(app: &App, columns: u16) -> Vec<Line<'static>> {
    let Some(row) = app.chosen() else { return Vec::new() };
    let held = row.snapshot.gauge(DeviceGauge::Reserved).max(row.snapshot.live).max(1);
    let total = row.snapshot.total();
    let mut lines = Vec::new();
    let mut add = |name: &str, value: u64, blocks: Option<u64>, style: Style| {
        if value == 0 {
            return;
        }
        let blocks = blocks.map(|blocks| format!("{:>8}", count(blocks))).unwrap_or_default();
        let width = usize::from(columns).saturating_sub(12 + 12 + 9).clamp(4, 60);
        lines.push(Line::from(vec![
            Span::raw(format!(" {name:<11}")),
            Span::raw(format!("{:>10} ", bytes(value))),
            Span::styled(bar(value as f64 / held as f64, width), style),
            Span::styled(blocks, app.theme.dim()),
        ]));
    };
    for (number, name) in LIFETIME_NAMES.iter().enumerate() {
        let counts = row.snapshot.sum(|_, lifetime| lifetime == number);
        add(name, counts.live_bytes(), Some(counts.live_blocks()), app.theme.lifetime(number));
    }
    add("waiting", total.pending_bytes(), Some(total.pending_blocks()), app.theme.warn());
    let held = row.snapshot.held();
    add("idle", held.idle(), None, app.theme.dim());
    add("lost", held.lost(), None, app.theme.warn());
    let has_auto = row.snapshot.sum(|_, lifetime| lifetime == 0).live_bytes() > 0;
    if let Some(auto) = app.details.auto.as_ref().filter(|_| has_auto) {
        // Replaces what `auto` does not say.
        lines.insert(1, Line::styled(format!("   {auto}"), app.theme.dim()));
    }
    lines
}

/// [`lifetime_lines`], with a heading.
pub fn lifetimes(frame: &mut Frame, area: Rect, app: &App) {
    let Some(row) = app.chosen() else { return };
    let lines = lifetime_lines(app, area.width);
    let ahead = row.snapshot.gauge(DeviceGauge::HostAhead);
    let is_notable = ahead >= NOTABLE_LAG && row.snapshot.total().pending_bytes() > 0;
    let ahead = is_notable.then(|| span(ahead));
    let note = match ahead {
        Some(ahead) => format!("the host is {ahead} or more ahead of the device"),
        None => "share of memory held; blocks".to_owned(),
    };
    let title = heading(app, "by lifetime", note);
    put(frame, area, lines, panel(app, title));
}

/// Classes of the size histogram: each ends at eight times the previous end.
const CLASSES: [(u64, &str); 9] = [
    (4 << 10, "to 4 KiB"),
    (32 << 10, "32 KiB"),
    (256 << 10, "256 KiB"),
    (1 << 20, "1 MiB"),
    (8 << 20, "8 MiB"),
    (64 << 20, "64 MiB"),
    (512 << 20, "512 MiB"),
    (4 << 30, "4 GiB"),
    (u64::MAX, "more"),
];

/// Requests by size, and the slabs of those sizes.
pub fn sizes(frame: &mut Frame, area: Rect, app: &App) {
    let Some(row) = app.chosen() else { return };
    let mut requests = [0u64; CLASSES.len()];
    let class =
        |size: u64| CLASSES.iter().position(|(most, _)| size <= *most).unwrap_or(CLASSES.len() - 1);
    for (bucket, &number) in
        row.snapshot.malloc_sizes.0.iter().enumerate().filter(|(_, number)| **number > 0)
    {
        let sum = &mut requests[class(bucket_floor(bucket))];
        *sum = sum.saturating_add(number);
    }
    let mut slabs = [0u64; CLASSES.len()];
    for (&slot, sum) in &app.details.slabs {
        let all = &mut slabs[class(slot)];
        *all = all.saturating_add(sum.bytes);
    }
    let most = requests.iter().copied().max().unwrap_or(0).max(1);
    let width = usize::from(area.width).saturating_sub(10 + 9 + 20).clamp(4, 60);
    let lines: Vec<Line> = CLASSES
        .iter()
        .zip(requests.iter().zip(slabs))
        .map(|((_, name), (&number, slab))| {
            let slab = if slab > 0 { format!("  slabs {}", bytes(slab)) } else { String::new() };
            Line::from(vec![
                Span::raw(format!(" {name:<9}")),
                Span::raw(format!("{:>8} ", count(number))),
                Span::styled(bar(number as f64 / most as f64, width), app.theme.live()),
                Span::styled(slab, app.theme.dim()),
            ])
        })
        .collect();
    let title = heading(app, "by size", "requests so far".to_owned());
    put(frame, area, lines, panel(app, title));
}

/// Live memory by stream.
pub fn streams(frame: &mut Frame, area: Rect, app: &App) {
    let title = heading(app, "by stream", "live; blocks".to_owned());
    let room = usize::from(area.height.saturating_sub(1));
    let all = app.details.streams.iter().fold(0u64, |all, (_, sum)| all.saturating_add(sum.bytes));
    let width = usize::from(area.width).saturating_sub(12 + 12 + 9).clamp(4, 60);
    let mut lines: Vec<Line> = app
        .details
        .streams
        .iter()
        .map(|(stream, sum)| {
            let name = format!("stream {}", StreamNumber(*stream));
            Line::from(vec![
                Span::raw(format!(" {name:<11}")),
                Span::raw(format!("{:>10} ", bytes(sum.bytes))),
                Span::styled(bar(sum.bytes as f64 / all.max(1) as f64, width), app.theme.live()),
                Span::styled(format!("{:>8}", count(sum.count)), app.theme.dim()),
            ])
        })
        .collect();
    if lines.len() > room {
        let more = lines.len() - room + 1;
        lines.truncate(room.saturating_sub(1));
        lines.push(Line::styled(format!(" and {more} more"), app.theme.dim()));
    }
    if lines.is_empty() {
        lines.push(Line::styled(" no blocks on the map", app.theme.dim()));
    }
    put(frame, area, lines, panel(app, title));
}

/// Message: why no line of the program is shown.
pub fn no_lines(app: &App) -> &'static str {
    match app.chosen().and_then(|row| row.process.uses) {
        Some(Uses { python: false, .. }) => " by line: kept of Python programs only",
        _ => " by line: not kept; blame:large in GRUYERE_CONF keeps it",
    }
}

/// Live memory by line of the program, with its growth.
pub fn lines(frame: &mut Frame, area: Rect, app: &App) {
    let Some(found) = app.details.lines.clone() else {
        let line = Line::styled(no_lines(app), app.theme.dim());
        frame.render_widget(cut(line, usize::from(area.width)), area);
        return;
    };
    let by = match app.order_of_lines() {
        Order::Bytes => "live; g: by growth",
        Order::Growth => "growth; g: by bytes",
    };
    let columns = usize::from(area.width);
    let widths = Widths::of(&found, columns);
    let title = heading(app, "by line", by.to_owned());
    let has_room = title.width() <= widths.name;
    let block = panel(app, title);
    let block = match has_room {
        true => {
            let heads = Line::styled(widths.heads(), app.theme.dim());
            block.title(heads.alignment(Alignment::Right))
        }
        false => block,
    };
    put(frame, area, lines_of(app, found, columns), block);
}

/// Columns of the list of lines.
struct Widths {
    name: usize,
    blocks: usize,
    growth: usize,
    module: usize,
}

impl Widths {
    /// Bytes, share and growth are required; modules and blocks appear if there is room.
    fn of(found: &[sites::Line], columns: usize) -> Self {
        let growth = found.iter().map(|line| growth_of(line).len()).max().unwrap_or(0);
        let module = if columns >= 100 { columns / 4 } else { 0 };
        let blocks = if columns >= 76 { 8 } else { 0 };
        let name = columns.saturating_sub(1 + 11 + 6 + growth + module + blocks).max(8);
        Self { name, blocks, growth, module }
    }

    /// The headings of the columns behind the name.
    fn heads(&self) -> String {
        let Self { blocks, growth, module, .. } = *self;
        let blocks = if blocks > 0 { format!("{:>blocks$}", "blocks") } else { String::new() };
        let grows = if growth > 0 { " growth" } else { "" };
        let of = if module > 0 { " module" } else { "" };
        format!("{:>11}{:>6}{blocks}{grows:<growth$}{of:<module$}", "live", "share")
    }
}

fn growth_of(line: &sites::Line) -> String {
    line.growth.map_or_else(String::new, |growth| {
        format!(" +{}/step since {}", bytes(growth.bytes_a_step), growth.since)
    })
}

/// As text in `columns` columns, sorted by the chosen order.
pub fn lines_of(app: &App, mut found: Vec<sites::Line>, columns: usize) -> Vec<Line<'static>> {
    app.order_of_lines().sort(&mut found);
    let theme = app.theme;
    // A share of what was live when the lines were read, which is seldom.
    let all = app.details.live.max(1) as f64;
    let Widths { name: width, blocks, growth: grown, module } = Widths::of(&found, columns);
    let row = |line: sites::Line| {
        let growth = growth_of(&line);
        let share = format!("{:.0}%", 100.0 * line.live_bytes as f64 / all);
        let mut spans = vec![
            Span::raw(format!(" {}", name(&line.name, width - 1))),
            Span::styled(format!("{:>11}", bytes(line.live_bytes)), theme.live()),
            Span::raw(format!("{share:>6}")),
        ];
        if blocks > 0 {
            spans.push(Span::styled(format!("{:>blocks$}", count(line.live_blocks)), theme.dim()));
        }
        spans.push(Span::styled(format!("{growth:<grown$}"), theme.warn()));
        if module > 0 {
            spans.push(Span::styled(format!(" {}", line.module.unwrap_or_default()), theme.dim()));
        }
        Line::from(spans)
    };
    found.into_iter().map(row).collect()
}

/// The latest events.
pub fn events(frame: &mut Frame, area: Rect, app: &App) {
    let lost = match app.details.lost {
        0 => String::new(),
        lost => format!("({} overwritten unseen)", count(lost)),
    };
    let title = heading(app, "events", lost);
    let room = usize::from(area.height.saturating_sub(1));
    let is_step = |event: &&Event| event.kind == EventKind::Step;
    // Steps would drown the rest, so all of them share a line.
    let steps: Vec<&Event> = app.details.events.iter().filter(is_step).collect();
    let mut lines: Vec<Line> =
        steps.last().map(|last| steps_line(app, &steps, last)).into_iter().collect();
    let others = app.details.events.iter().rev().filter(|event| !is_step(event));
    lines.extend(others.take(room.saturating_sub(lines.len())).map(|event| event_line(app, event)));
    if lines.is_empty() {
        lines.push(Line::styled(" none yet", app.theme.dim()));
    }
    put(frame, area, lines, panel(app, title));
}

/// The latest step, and the duration of steps.
fn steps_line<'a>(app: &App, steps: &[&Event], last: &Event) -> Line<'a> {
    let between =
        steps.first().zip(app.details.scale).filter(|_| steps.len() > 1).map(|(first, scale)| {
            let ticks = last.time.saturating_sub(first.time) as f64;
            Duration(ticks * scale.nanoseconds_per_tick / 1e9 / (steps.len() - 1) as f64)
        });
    let mut line = event_line(app, last);
    if let Some(between) = between {
        line.push_span(Span::styled(format!(", one in {between}"), app.theme.dim()));
    }
    line
}

fn event_line<'a>(app: &App, event: &Event) -> Line<'a> {
    let theme = app.theme;
    let now = app.ticks().next_back().map_or(0.0, |tick| tick.seconds);
    let ago =
        app.details.scale.map(|scale| (now - scale.realtime(event.time) as f64 / 1e9).max(0.0));
    let ago = ago.map_or_else(|| "?".to_owned(), |seconds| format!("{} ago", Duration(seconds)));
    let (style, text) = match event.kind {
        EventKind::OutOfMemory => (theme.bad(), format!("{} refused", bytes(event.size))),
        EventKind::BadFree => (theme.bad(), format!("{:#x} is no live block", event.address)),
        EventKind::DriverError => (theme.bad(), String::new()),
        EventKind::Wait => (theme.warn(), format!("{}", Duration(event.size as f64 / 1e9))),
        EventKind::Grow => (theme.reserved(), format!("{} from the driver", bytes(event.size))),
        EventKind::Move => (theme.reserved(), format!("{} of idle pages", bytes(event.size))),
        EventKind::Release | EventKind::Trim => {
            (theme.good(), format!("{} to the driver", bytes(event.size)))
        }
        EventKind::Step => (theme.dim(), format!("{}", event.size)),
        _ => (Style::new(), String::new()),
    };
    Line::from(vec![
        Span::styled(format!(" {ago:>12}  "), theme.dim()),
        Span::styled(format!("{:<16}", event.kind.name().replace('_', " ")), style),
        Span::raw(text),
    ])
}

/// A device's memory as a bar: live, live at the recent peak, a tick for that peak, held, ceiling.
pub fn shares<'a>(app: &App, row: &Row, width: usize) -> Vec<Span<'a>> {
    let limit = row.facts().limit().max(1) as f64;
    let cells =
        |bytes: u64| ((bytes as f64 / limit).clamp(0.0, 1.0) * width as f64).round() as usize;
    let live = cells(row.snapshot.live);
    let held = cells(row.snapshot.gauge(DeviceGauge::Reserved)).max(live);
    // Held pages above the recent peak are pure waste.
    let peak = cells(row.peak).clamp(live, held);
    let has_tick = row.peak > row.snapshot.live && peak > live;
    let tick = usize::from(has_tick);
    vec![
        Span::styled("█".repeat(live), app.theme.live()),
        Span::styled("░".repeat(peak - live - tick), app.theme.peak()),
        Span::styled("┃".repeat(tick), app.theme.title()),
        Span::styled("▒".repeat(held - peak), app.theme.reserved()),
        Span::styled("·".repeat(width - held), app.theme.dim()),
    ]
}

/// Style of a table's value: red or yellow if it needs attention.
pub fn urgency(app: &App, row: &Row, column: super::columns::Column) -> Style {
    use super::columns::Column;
    let theme = app.theme;
    match column {
        Column::Fragmentation => match Metric::Fragmentation.value(&row.facts()) {
            Some(share) if share > 0.3 => theme.warn(),
            _ => Style::new(),
        },
        Column::OomIn => match row.forecast {
            Forecast::Growing(growth) if growth.seconds < SOON => theme.bad(),
            Forecast::Growing(_) | Forecast::Unsure | Forecast::Far => theme.warn(),
            _ => theme.dim(),
        },
        Column::Live => theme.live(),
        Column::Peak => theme.peak(),
        Column::Held => theme.reserved(),
        _ => Style::new(),
    }
}
