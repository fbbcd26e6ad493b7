//! Draws the state into a frame: the table, the help, and the layout of panels for any screen size.

use gruyere_record::plain;
use gruyere_record::watch::Duration;
use ratatui::Frame;
use ratatui::layout::{Alignment, Constraint, Layout, Rect};
use ratatui::style::{Modifier, Style, Stylize as _};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Clear, Paragraph};

use super::app::{App, View};
use super::columns::Column;
use super::fit::{cut, fit, number, put, wrap};
use super::panels;
use super::process;
use super::sick;
use super::verdict::Verdict;
use crate::command;
use crate::follow::Life;

/// From this width on, panels stand side by side.
const WIDE: u16 = 100;
/// From this width on, three panels stand side by side.
const VERY_WIDE: u16 = 150;
/// Lower screens have no room for program lines below panels that stand side by side.
const TALL: u16 = 24;

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
    let head = cut(Line::from(spans), usize::from(area.width));
    let used = head.width();
    frame.render_widget(head, area);
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
            ("⏎", "details"),
            ("s", "sort"),
            ("␣", "pause"),
            ("t", "time"),
            ("g", "growth"),
            ("?", "help"),
            ("r", "reverse"),
            ("x", "drop dead"),
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
            Line::styled(" no process here uses gruyère; new ones will appear", app.theme.dim()),
        ];
        if app.old > 0 {
            lines.push(Line::raw(""));
            let said = format!(
                "{} died and left a record: `gruyere post` shows the last, `gruyere ps` lists them",
                app.old
            );
            lines.extend(wrap(&said, usize::from(area.width), 2).into_iter().map(Line::raw));
        }
        for trouble in &app.trouble {
            lines.push(Line::styled(format!(" {}", plain(trouble)), app.theme.warn()));
        }
        frame.render_widget(Paragraph::new(lines), area);
        return;
    }
    let area = alarm(frame, area, app);
    // The table takes what it needs, up to a third; all of the height if nothing else fits.
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
        let place = match rows > top.height {
            true => format!(" {} of {} ", app.chosen_at() + 1, app.rows.len()),
            false => String::new(),
        };
        let room = usize::from(line.width).saturating_sub(place.len());
        frame.render_widget(cut(panels::summary(app, row, line.width < WIDE), room), line);
        let place = Line::styled(place, app.theme.warn()).alignment(Alignment::Right);
        frame.render_widget(place, line);
    }
    let rest = verdict(frame, rest, app);
    if rest.width >= WIDE && rest.height >= TALL {
        wide(frame, rest, app);
    } else {
        narrow(frame, rest, app);
    }
}

/// The alarm at the top: the process that runs out of memory soonest. Returns the rest of the area.
fn alarm(frame: &mut Frame, area: Rect, app: &App) -> Rect {
    let (Some(text), Some(row)) = (&app.alarm, app.sick()) else { return area };
    let is_soon = row.forecast.seconds().is_some_and(|seconds| seconds < panels::SOON);
    let style = if is_soon || row.ending.is_some() { app.theme.bad() } else { app.theme.title() };
    let width = usize::from(area.width);
    let mut lines: Vec<Line> = Vec::new();
    if row.ending.is_none() {
        let mut line = Line::styled(format!(" {}", plain(text)), style);
        let remedy = format!("  What to do: gruyere post {}", row.process.pid);
        // The chosen row's remedy stands below the table.
        if !app.sick_is_chosen() && line.width() + remedy.len() < width {
            line.push_span(Span::styled(remedy, app.theme.dim()));
        }
        lines.push(cut(line, width));
    } else {
        // For an ended process, nothing else matters as much.
        lines
            .extend(wrap(&plain(text), width, 2).into_iter().map(|text| Line::styled(text, style)));
        let next = app.next.iter().flat_map(|text| wrap(&plain(text), width, 2));
        lines.extend(next.map(Line::raw));
    }
    let height = (lines.len() as u16).min(area.height.saturating_sub(2));
    let [top, rest] =
        Layout::vertical([Constraint::Length(height), Constraint::Min(0)]).areas(area);
    frame.render_widget(Paragraph::new(lines), top);
    rest
}

/// The most lines of a sentence in a verdict: a remedy takes three at 80 columns.
const SENTENCE: usize = 3;
/// With less height below the table, program lines and graph take all of it.
const LEAST_BELOW: u16 = 11;

/// The verdict on the chosen process, with its remedy, before the figures. Returns the rest of the
/// area.
fn verdict(frame: &mut Frame, area: Rect, app: &App) -> Rect {
    let Some(row) = app.chosen() else { return area };
    // The alarm at the top already says this for an ended process.
    if area.height < LEAST_BELOW || (row.ending.is_some() && app.sick_is_chosen()) {
        return area;
    }
    let width = usize::from(area.width);
    let sentences = Verdict::of(row, &app.details.verdict).sentences();
    let lines = sentences.iter().flat_map(|text| wrap(&plain(text), width, SENTENCE));
    let lines: Vec<Line> = lines.map(Line::raw).collect();
    let [top, rest] =
        Layout::vertical([Constraint::Length(lines.len() as u16), Constraint::Min(0)]).areas(area);
    frame.render_widget(Paragraph::new(lines), top);
    rest
}

/// Heights of the panels, headings included.
const SIZES: u16 = 10;
fn lifetimes_height(app: &App) -> u16 {
    panels::lifetime_lines(app, 0).len() as u16 + 1
}
/// Height for a few program lines; if none are known, for the line that says so.
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

/// Preferred and minimum height of a graph; minimum height of the program lines. Headings included.
const GRAPH: u16 = 8;
const LEAST_GRAPH: u16 = 5;
const LEAST_LINES: u16 = 4;

/// Stacks as many panels as fit, most important first. Growing lines precede the graph.
fn narrow(frame: &mut Frame, area: Rect, app: &App) {
    type Draw = fn(&mut Frame, Rect, &App);
    let grows = app.chosen().is_some_and(|row| sick::growth(row).is_some());
    let beside = if grows { GRAPH } else { LEAST_GRAPH };
    let lines = lines_height(app).min(area.height.saturating_sub(beside).max(LEAST_LINES));
    let graph = area.height.saturating_sub(lines).clamp(LEAST_GRAPH, GRAPH);
    let mut first: [(u16, Draw); 2] = [(graph, panels::memory), (lines, panels::lines)];
    if grows {
        first.reverse();
    }
    let panels: [(u16, Draw); 6] = [
        first[0],
        first[1],
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
    // The graph takes the rest.
    let graph = if grows { 1 } else { 0 };
    if let Some(graph) = shown.get_mut(graph) {
        graph.0 += left;
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
    let commands: Vec<&str> = app.rows.iter().map(|row| &*row.process.command).collect();
    let commands = command::told_apart(&commands, last);
    // Scrolls as little as possible to keep the chosen row on the screen.
    for (at, row) in app.rows.iter().enumerate().skip(first).take(room) {
        let is_chosen = at == chosen;
        let mut spans: Vec<Span> = Vec::new();
        for column in &columns {
            if *column == Column::Bar {
                let bar = panels::shares(app, row, width(column)).into_iter();
                spans.extend(bar.map(|part| match is_chosen {
                    true => part.remove_modifier(Modifier::REVERSED),
                    false => part,
                }));
            } else {
                let style = match (row.life, column) {
                    (Life::Live, column) => panels::urgency(app, row, *column),
                    (Life::Killed, Column::OomIn) => app.theme.bad(),
                    _ => app.theme.dim(),
                };
                let text = match column {
                    Column::Command => commands[at].clone(),
                    column => column.text(row),
                };
                let text = match column.is_number() {
                    true => number(&text, width(column)),
                    false => fit(&text, width(column), false),
                };
                let style = if is_chosen { app.theme.of_chosen(style) } else { style };
                spans.push(Span::styled(text, style));
            }
            spans.push(Span::raw(" "));
        }
        let style = if is_chosen { app.theme.chosen() } else { Style::new() };
        lines.push(Line::from(spans).style(style));
    }
    frame.render_widget(Paragraph::new(lines), area);
}

fn detail(frame: &mut Frame, area: Rect, app: &mut App) {
    let Some(row) = app.chosen() else {
        app.view = View::Main;
        return;
    };
    let width = usize::from(area.width);
    let lines = process::lines(app, row, width);
    let lines: Vec<Line> = lines.into_iter().map(|line| cut(line, width)).collect();
    let most = (lines.len() as u16).saturating_sub(area.height);
    let scroll = app.scroll.min(most);
    frame.render_widget(Paragraph::new(lines).scroll((scroll, 0)), area);
    app.scroll = scroll;
}

fn help(frame: &mut Frame, area: Rect, app: &App) {
    let theme = app.theme;
    let text: &[(&str, &str)] = &[
        ("↑ ↓ j k", "choose a process's device; PgUp, PgDn, Home, End"),
        ("Enter", "details of the process; q or Esc goes back"),
        ("s", "sort by the next column"),
        ("r", "reverse the order"),
        ("Space p", "pause: stop reading, to look at what is on the screen"),
        ("g", "lines of the program by memory held, or by growth"),
        ("t", "time span of the graph: run, minute, 10 minutes, hour"),
        ("+ -", "sample twice or half as often"),
        ("x", "remove dead processes from the table"),
        ("q", "quit"),
        ("", ""),
        ("LIVE", "live memory of the program now"),
        ("PEAK", "highest LIVE of the last step, or of the last minute"),
        ("HELD", "memory that the process holds on the device"),
        ("█░┃▒·", "live, peak (┃), held, of the ceiling"),
        ("IDLE", "whole free pages: for any request, or to give back"),
        ("LOST", "the share of HELD that is free between live blocks"),
        ("LARGEST", "the largest request that would fit"),
        ("ALLOC/S", "bytes allocated per second"),
        ("OOM IN", "at this growth; -: none; ?: perhaps; ...: too little data yet"),
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
    let block = Block::bordered().title(" keys and columns ").border_style(theme.dim());
    frame.render_widget(Clear, area);
    put(frame, area, lines, block);
}
