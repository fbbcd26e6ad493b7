//! Puts the state into a frame: where the panels are on a screen of any size, the table, the detail
//! and the help.

use gruyere::heap::policy::ladder::RUNG_NAMES;
use gruyere_record::plain;
use gruyere_record::stream::StreamNumber;
use gruyere_record::watch::{Duration, Metric, Unit};
use gruyere_record::{DeviceGauge, LIFETIME_NAMES};
use ratatui::Frame;
use ratatui::layout::{Alignment, Constraint, Layout, Rect};
use ratatui::style::Style;
use ratatui::text::{Line, Span};
use ratatui::widgets::{Clear, Paragraph};

use super::app::{App, Row, View};
use super::columns::Column;
use super::panels::{self, bytes, count};
use crate::driver_calls;
use crate::export::RUNGS;
use crate::follow::Life;
use crate::stat::{configuration, words};

/// From this width on, panels stand side by side.
const WIDE: u16 = 100;
/// And from this one on, three of them.
const VERY_WIDE: u16 = 150;

/// Draws all of it.
pub fn draw(frame: &mut Frame, app: &mut App) {
    let area = frame.area();
    if area.width < 20 || area.height < 4 {
        frame.render_widget(Paragraph::new("too small"), area);
        return;
    }
    let [head, body, foot] =
        Layout::vertical([Constraint::Length(1), Constraint::Min(1), Constraint::Length(1)])
            .areas(area);
    header(frame, head, app);
    match app.view {
        View::Detail => detail(frame, body, app),
        View::Main | View::Help => main(frame, body, app),
    }
    footer(frame, foot, app);
    if app.view == View::Help {
        help(frame, body, app);
    }
}

fn header(frame: &mut Frame, area: Rect, app: &App) {
    let theme = app.theme;
    let live = app.rows.iter().filter(|row| row.life == Life::Live);
    let mut processes: Vec<_> = live.clone().map(|row| &row.key.0).collect();
    processes.dedup();
    processes.sort();
    processes.dedup();
    let plural = |n: usize, what: &str| format!("{n} {what}{}", if n == 1 { "" } else { "s" });
    let mut spans = vec![
        Span::styled(" gruyère top ", theme.title()),
        Span::raw(format!(
            " {} · {} ",
            plural(processes.len(), "process").replace("processs", "processes"),
            plural(live.count(), "device")
        )),
    ];
    if !app.host.is_empty() && area.width >= 80 {
        spans.push(Span::styled(format!("· {} ", plain(&app.host)), theme.dim()));
    }
    let killed = app.rows.iter().filter(|row| row.life == Life::Killed).count();
    if killed > 0 {
        spans.push(Span::styled(format!("· {killed} killed "), theme.bad()));
    }
    if app.old > 0 {
        spans.push(Span::styled(format!("· {} stale ", app.old), theme.dim()));
    }
    if app.foreign > 0 {
        spans.push(Span::styled(format!("· {} of other users ", app.foreign), theme.dim()));
    }
    if !app.trouble.is_empty() {
        spans.push(Span::styled(format!("· {} unreadable ", app.trouble.len()), theme.warn()));
    }
    let head = Line::from(spans);
    let used = head.width();
    frame.render_widget(Paragraph::new(head), area);
    let interval = app.interval.as_secs_f64();
    let every = if app.is_paused {
        Span::styled(" paused ", theme.bad())
    } else if interval < 1.0 {
        Span::styled(format!(" {:.0} a second ", 1.0 / interval), theme.dim())
    } else {
        Span::styled(format!(" every {} ", Duration(interval)), theme.dim())
    };
    if used + every.width() <= usize::from(area.width) || app.is_paused {
        frame.render_widget(Paragraph::new(Line::from(every).alignment(Alignment::Right)), area);
    }
}

fn footer(frame: &mut Frame, area: Rect, app: &App) {
    let theme = app.theme;
    let keys: &[(&str, &str)] = match app.view {
        View::Main => &[
            ("q", "quit"),
            ("↑↓", "choose"),
            ("⏎", "all of it"),
            ("s", "sort"),
            ("␣", "pause"),
            ("t", "time"),
            ("g", "growth"),
            ("?", "help"),
            ("r", "reverse"),
            ("x", "drop killed"),
            ("+-", "pace"),
        ],
        View::Detail => &[("q", "back"), ("↑↓", "scroll"), ("␣", "pause"), ("?", "help")],
        View::Help => &[("q", "back")],
    };
    let mut spans = vec![Span::raw(" ")];
    let mut used = 1;
    for (key, what) in keys {
        let width = Span::raw(*key).width() + what.chars().count() + 3;
        if used + width > usize::from(area.width) {
            break;
        }
        used += width;
        spans.push(Span::styled(*key, theme.key()));
        spans.push(Span::styled(format!(" {what}  "), theme.dim()));
    }
    frame.render_widget(Paragraph::new(Line::from(spans)), area);
}

fn main(frame: &mut Frame, area: Rect, app: &App) {
    if app.rows.is_empty() {
        let mut lines = vec![
            Line::raw(""),
            Line::styled(
                " no process here uses gruyère; those that come will show",
                app.theme.dim(),
            ),
        ];
        for trouble in &app.trouble {
            lines.push(Line::styled(format!(" {}", plain(trouble)), app.theme.warn()));
        }
        frame.render_widget(Paragraph::new(lines), area);
        return;
    }
    // The table takes what it needs, up to a third; all of it where there is no room for more.
    let rows = app.rows.len() as u16 + 1;
    let most =
        if area.height < 14 { area.height.saturating_sub(1) } else { (area.height / 3).max(4) };
    let [top, line, rest] = Layout::vertical([
        Constraint::Length(rows.min(most)),
        Constraint::Length(1),
        Constraint::Min(0),
    ])
    .areas(area);
    table(frame, top, app);
    if let Some(row) = app.chosen() {
        frame.render_widget(Paragraph::new(panels::summary(app, row, line.width < WIDE)), line);
        if rows > top.height {
            let place = format!(" {} of {} ", app.chosen_at() + 1, app.rows.len());
            let place = Line::styled(place, app.theme.warn()).alignment(Alignment::Right);
            frame.render_widget(Paragraph::new(place), line);
        }
    }
    if rest.width >= WIDE {
        wide(frame, rest, app);
    } else {
        narrow(frame, rest, app);
    }
}

/// Lines of the panels, headings included.
const SIZES: u16 = 10;
fn lifetimes_height(app: &App) -> u16 {
    8 + u16::from(app.details.auto.is_some())
}
/// Of the lines of the program, a few; where none are known, the one that says so.
fn lines_height(app: &App) -> u16 {
    app.details.lines.as_ref().map_or(1, |lines| lines.len().clamp(1, 8) as u16 + 1)
}

fn wide(frame: &mut Frame, area: Rect, app: &App) {
    if area.height < 5 {
        return;
    }
    let tail = if area.height >= 24 { (area.height / 4).clamp(6, 14) } else { 0 };
    let [upper, lower] =
        Layout::vertical([Constraint::Min(5), Constraint::Length(tail)]).areas(area);
    let is_very_wide = area.width >= VERY_WIDE;
    let right = if is_very_wide { 62 } else { 48 };
    let [graphs, sums] = Layout::horizontal([Constraint::Min(40), Constraint::Length(right)])
        .spacing(1)
        .areas(upper);
    let lines = if graphs.height >= 16 { (graphs.height / 3).clamp(6, 10) } else { 0 };
    let [chart, spark] =
        Layout::vertical([Constraint::Min(4), Constraint::Length(lines)]).areas(graphs);
    panels::memory(frame, chart, app);
    if lines > 0 {
        panels::sparklines(frame, spark, app);
    }
    let [lifetimes, sizes, streams] = Layout::vertical([
        Constraint::Length(lifetimes_height(app)),
        Constraint::Length(SIZES.min(sums.height.saturating_sub(lifetimes_height(app)))),
        Constraint::Min(0),
    ])
    .areas(sums);
    panels::lifetimes(frame, lifetimes, app);
    if sizes.height > 1 {
        panels::sizes(frame, sizes, app);
    }
    let has_streams = streams.height >= 2;
    if has_streams {
        panels::streams(frame, streams, app);
    }
    if tail == 0 {
        return;
    }
    let lower = match app.details.lines {
        Some(_) => {
            let [lines, lower] =
                Layout::horizontal([Constraint::Percentage(60), Constraint::Min(30)])
                    .spacing(1)
                    .areas(lower);
            panels::lines(frame, lines, app);
            lower
        }
        None => {
            let [line, lower] =
                Layout::vertical([Constraint::Length(1), Constraint::Min(1)]).areas(lower);
            panels::lines(frame, line, app);
            lower
        }
    };
    if has_streams || app.details.lines.is_some() {
        panels::events(frame, lower, app);
    } else {
        let [events, streams] =
            Layout::horizontal([Constraint::Min(40), Constraint::Length(right)])
                .spacing(1)
                .areas(lower);
        panels::events(frame, events, app);
        panels::streams(frame, streams, app);
    }
}

/// One below the other, the most wanted first, as many as fit.
fn narrow(frame: &mut Frame, area: Rect, app: &App) {
    type Draw = fn(&mut Frame, Rect, &App);
    let panels: [(u16, Draw); 6] = [
        (8, panels::memory),
        (lines_height(app), panels::lines),
        (lifetimes_height(app), panels::lifetimes),
        (5, panels::events),
        (SIZES, panels::sizes),
        (4, panels::streams),
    ];
    let mut left = area.height;
    let mut shown: Vec<(u16, Draw)> = Vec::new();
    for (height, draw) in panels {
        if height <= left {
            left -= height;
            shown.push((height, draw));
        }
    }
    // What is left is the graph's.
    if let Some(first) = shown.first_mut() {
        first.0 += left;
    }
    let mut y = area.y;
    for (height, draw) in shown {
        draw(frame, Rect { y, height, ..area }, app);
        y += height;
    }
}

fn table(frame: &mut Frame, area: Rect, app: &App) {
    let columns = Column::fitting(area.width);
    let used: u16 = columns.iter().map(|column| column.width() + 1).sum();
    let last = usize::from(area.width.saturating_sub(used));
    let width =
        |column: &Column| if column.width() == 0 { last } else { usize::from(column.width()) };
    let sorted = app.sort.column();
    let mut head = Vec::new();
    for column in &columns {
        let mark = if *column == sorted { if app.is_reversed { "▴" } else { "▾" } } else { "" };
        let name = format!("{}{mark}", column.name());
        let style = if *column == sorted { app.theme.title() } else { app.theme.dim() };
        head.push(Span::styled(fit(&name, width(column), column.is_number()), style));
        head.push(Span::raw(" "));
    }
    let mut lines = vec![Line::from(head)];
    let room = usize::from(area.height.saturating_sub(1)).max(1);
    let chosen = app.chosen_at();
    let first =
        chosen.saturating_sub(room.saturating_sub(1)).min(app.rows.len().saturating_sub(room));
    // As few lines move as can while the chosen one stays on the screen.
    for (at, row) in app.rows.iter().enumerate().skip(first).take(room) {
        let mut spans = Vec::new();
        for column in &columns {
            if *column == Column::Bar {
                spans.extend(panels::shares(app, row, width(column)));
            } else {
                let style = match (row.life, column) {
                    (Life::Live, column) => panels::urgency(app, row, *column),
                    (Life::Killed, Column::OomIn) => app.theme.bad(),
                    _ => app.theme.dim(),
                };
                spans.push(Span::styled(
                    fit(&column.text(row), width(column), column.is_number()),
                    style,
                ));
            }
            spans.push(Span::raw(" "));
        }
        let style = if at == chosen { app.theme.chosen() } else { Style::new() };
        lines.push(Line::from(spans).style(style));
    }
    frame.render_widget(Paragraph::new(lines), area);
}

/// `text` in exactly `width` cells (of what is no number, the end goes first).
pub fn fit(text: &str, width: usize, to_the_right: bool) -> String {
    let cells = |text: &str| Span::raw(text).width();
    let mut text = text.to_owned();
    if cells(&text) > width {
        while cells(&text) + 1 > width && text.pop().is_some() {}
        if width > 0 {
            text.push('…');
        }
    }
    let room = " ".repeat(width.saturating_sub(cells(&text)));
    if to_the_right { room + &text } else { text + &room }
}

fn detail(frame: &mut Frame, area: Rect, app: &mut App) {
    let Some(row) = app.chosen() else {
        app.view = View::Main;
        return;
    };
    let lines = detail_lines(app, row, usize::from(area.width));
    let most = (lines.len() as u16).saturating_sub(area.height);
    let scroll = app.scroll.min(most);
    frame.render_widget(Paragraph::new(lines).scroll((scroll, 0)), area);
    app.scroll = scroll;
}

fn detail_lines(app: &App, row: &Row, width: usize) -> Vec<Line<'static>> {
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
        let value = metric
            .value(&row.facts())
            .map_or_else(|| "-".to_owned(), |value| metric.unit().show(value));
        fact(metric.name(), value);
    }
    if row.snapshot.torn_gauges || row.snapshot.torn_shards > 0 {
        fact(
            "torn",
            "the process was killed while it wrote: not all values are of one moment".to_owned(),
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
    lines.push(head("by line of the program".to_owned()));
    match app.details.lines.clone() {
        Some(found) => lines.extend(panels::lines_of(app, found, width)),
        None => lines.push(Line::styled(format!("  {}", panels::NO_LINES), theme.dim())),
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
        .filter_map(|&gauge| Some(format!("   {:<30} {:>12}", words(gauge)?, value(gauge))))
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
    for (name, rung) in RUNG_NAMES.iter().zip(RUNGS) {
        let [times, gained, took] = rung.map(value);
        lines.push(Line::raw(format!("   {name:<19} {times:>9} {gained:>11} {took:>11}")));
    }
    lines
}

fn help(frame: &mut Frame, area: Rect, app: &App) {
    let theme = app.theme;
    let text: &[(&str, &str)] = &[
        ("↑ ↓ j k", "choose a process's device; PgUp, PgDn, Home, End"),
        ("Enter", "all that is known of it; q or Esc leads back"),
        ("s", "sort by the next column"),
        ("r", "the other way round"),
        ("Space p", "pause: nothing is read, what is there can be looked at"),
        ("g", "lines of the program by what they hold, or by growth"),
        ("t", "what the graph shows: run, minute, 10 minutes, hour"),
        ("+ -", "look twice, or half as often"),
        ("x", "drop the killed processes from the table"),
        ("q", "quit"),
        ("", ""),
        ("LIVE", "what the program has; RESERVED: what is held for it"),
        ("IDLE", "what is held and free in whole pages"),
        ("FRAG", "the share of what is held that is free and can't serve"),
        ("LARGEST", "the largest request that could be met"),
        ("ALLOC/S", "bytes allocated a second"),
        ("OOM IN", "at this growth; -: none; ...: seen too little yet"),
        ("waiting", "freed, but a stream may still use it"),
    ];
    let width = 70.min(area.width);
    let height = (text.len() as u16 + 2).min(area.height);
    let area = Rect {
        x: area.x + (area.width - width) / 2,
        y: area.y + (area.height - height) / 2,
        width,
        height,
    };
    let lines: Vec<Line> = text
        .iter()
        .map(|(key, what)| {
            Line::from(vec![Span::styled(format!(" {key:<9}"), theme.key()), Span::raw(*what)])
        })
        .collect();
    let block =
        ratatui::widgets::Block::bordered().title(" keys and columns ").border_style(theme.dim());
    frame.render_widget(Clear, area);
    frame.render_widget(Paragraph::new(lines).block(block), area);
}
