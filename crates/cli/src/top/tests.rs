//! The screen in a buffer: its content for made-up processes on screens of every size, and its
//! response to keys.

use std::path::PathBuf;
use std::time::Duration;

use gruyere_record::calls::CallTime;
use gruyere_record::clock::{Moment, Scale};
use gruyere_record::conclusion::Cause;
use gruyere_record::facts::{Process, Uses};
use gruyere_record::reader::DeviceSnapshot;
use gruyere_record::ring::Event;
use gruyere_record::sites::{self, Line};
use gruyere_record::timeline::{Sample, TimelineEntry};
use gruyere_record::watch::{Forecast, Growth};
use gruyere_record::{
    BlockEntry, DeviceFacts, DeviceGauge, EventKind, Record, RecordOptions, bucket_of, clock,
};
use insta::{assert_binary_snapshot, assert_snapshot};
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use ratatui::style::{Color, Modifier};

use super::app::{App, Flow, Row, Tick, View};
use super::columns::{Column, Sort};
use super::details::Sum;
use super::picture::{DARK, LIGHT, contrast};
use super::sample::sample;
use super::theme::Theme;
use super::verdict::Verdict;
use super::{draw, panels, text};
use crate::follow::{Follower, Life, Which};
use crate::sites::{Order, SeldomRead};
use crate::target::{Folder, Target};

pub const GIB: u64 = 1 << 30;
const NOW: u64 = 1_790_000_000;

/// A process of this rank; its live bytes grow with the rank.
pub fn row(rank: u64, life: Life, forecast: Forecast) -> Row {
    let mut snapshot = DeviceSnapshot {
        device: rank as u32 % 8,
        live: (30 + 3 * rank) * GIB,
        gauges: vec![0; DeviceGauge::ALL.len()],
        ..DeviceSnapshot::default()
    };
    snapshot.facts.name = "NVIDIA H100 80GB HBM3".to_owned();
    for (gauge, value) in [
        (DeviceGauge::Limit, 80 * GIB),
        (DeviceGauge::TotalMemory, 80 * GIB),
        (DeviceGauge::Reserved, (45 + rank) * GIB),
        (DeviceGauge::Lost, (2 + rank) * GIB),
        (DeviceGauge::LargestGrowing, 33 * GIB),
        (DeviceGauge::Step, 1200 + rank),
    ] {
        snapshot.gauges[gauge as usize] = value;
    }
    for (lifetime, (blocks, bytes)) in
        [(900, 10 * GIB), (12, GIB / 4), (400, 6 * GIB), (3000, 13 * GIB)].into_iter().enumerate()
    {
        let counts = &mut snapshot.blocks[1][lifetime];
        (counts.mallocs, counts.malloc_bytes, counts.malloc_requested) =
            (blocks, bytes, bytes - bytes / 50);
    }
    snapshot.blocks[0][0].pending_begun = 7;
    snapshot.blocks[0][0].pending_begun_bytes = GIB / 2;
    for (size, number) in
        [(512u64, 80_000u64), (20 << 10, 160_000), (2 << 20, 610_000), (100 << 20, 215_000)]
    {
        snapshot.malloc_sizes.0[bucket_of(size)] = number;
    }
    let process = Process {
        pid: 4200 + rank,
        rank: Some(rank),
        local_rank: Some(rank),
        world_size: Some(4),
        host: "node-17".to_owned(),
        command: "/usr/bin/python3 /work/me/train.py --model llama-7b --batch 4".to_owned(),
        version: "0.1.0".to_owned(),
        ..Process::default()
    };
    let key =
        (PathBuf::from(format!("/dev/shm/gruyere-1-{}-3-0.record", 4200 + rank)), snapshot.device);
    let peak = (40 + 2 * rank) * GIB;
    Row { key, process, life, ending: None, snapshot, peak, rate: Some(3.5e10), forecast }
}

pub fn growing(seconds: f64) -> Forecast {
    Forecast::Growing(Growth { seconds, bytes_per_second: 5.6e7, steps: Some(seconds / 3.0) })
}

/// Four ranks: one will soon be out of memory, one was killed.
pub fn app(theme: Theme) -> App {
    let mut app = App::new(Sort::Sick, Duration::from_millis(500), theme);
    app.host = "node-17".to_owned();
    app.rows = vec![
        row(0, Life::Live, Forecast::NoGrowth),
        row(1, Life::Live, growing(400.0)),
        row(2, Life::Live, growing(9000.0)),
        row(3, Life::Killed, Forecast::Unknown),
    ];
    app.arrange();
    app.timeline = (0..600)
        .map(|n| TimelineEntry {
            realtime_nanoseconds: (NOW - 600 + n) * 1_000_000_000,
            sample: Sample {
                live_low: 20 * GIB,
                in_use_high: (30 + n % 40 / 4) * GIB,
                reserved_high: (35 + n / 60) * GIB,
                step: n / 3,
                ..Sample::default()
            },
        })
        .collect();
    let ticks = (0..50).map(|n| Tick {
        seconds: (NOW - 25) as f64 + f64::from(n) / 2.0,
        live: 30 * GIB,
        reserved: 45 * GIB,
        fragmentation: 0.2 + f64::from(n % 10) / 50.0,
        rate: 1e9 * f64::from(1 + n % 7),
    });
    let key = app.rows[0].key.clone();
    app.remember(key, ticks);
    let details = &mut app.details;
    details.slabs.insert(512, Sum { count: 2, bytes: 4 << 20 });
    details.slabs.insert(20 << 10, Sum { count: 30, bytes: 60 << 20 });
    details.streams =
        vec![(0, Sum { count: 4000, bytes: 29 * GIB }), (7, Sum { count: 312, bytes: GIB })];
    let line = |name: &str, module: Option<&str>, bytes, blocks, growth| Line {
        name: name.to_owned(),
        module: module.map(str::to_owned),
        live_bytes: bytes,
        live_blocks: blocks,
        growth,
        ..Line::default()
    };
    let growth = |bytes_a_step, since| {
        let bytes = bytes_a_step * (1198 - u64::from(since));
        Some(sites::Growth { bytes_a_step, since, bytes })
    };
    details.lines = Some(vec![
        line("train.py:31 in build", Some("model"), 13 * GIB, 290, None),
        line("mlp.py:57 in forward", Some("model.layers.3.mlp"), 6 * GIB, 96, None),
        line("train.py:88 in step", None, 4 * GIB, 1190, growth(64 << 20, 3)),
        line("not known", None, 2 * GIB, 2400, None),
        line("metrics.py:12 in Meter.keep", None, GIB, 600, growth(96 << 20, 1010)),
    ]);
    details.live = 33 * GIB;
    details.verdict = Verdict {
        cause: Cause::Leak,
        says: "metrics.py:12 in Meter.keep keeps 96 MiB a step since step 1010: 17.6 GiB of the 33 \
               GiB live (53%)"
            .to_owned(),
        remedy: Some(
            "To do: find what keeps that line's result (a list, an attribute, a closure) and bound \
             it; of a loss or a metric store .item(), or a copy on the host (.detach().cpu()), in \
             its place."
                .to_owned(),
        ),
        accused: None,
    };
    details.auto = Some("forward 61%, backward 22%, not known 17%".to_owned());
    let call = |call: &str, up_to_bytes: Option<u64>, count: u64, each: u64| CallTime {
        call: call.to_owned(),
        up_to_bytes,
        is_sized: up_to_bytes.is_some(),
        count,
        total_nanoseconds: count * each,
        p50_nanoseconds: each,
        p99_nanoseconds: 2 * each,
        max_nanoseconds: 7 * each,
    };
    details.calls = vec![
        call("cuMemCreate", Some(32 << 20), 812, 44_000),
        call("cuStreamSynchronize", None, 3, 2_000_000),
    ];
    // A tick is a nanosecond; the clock's origin is now.
    let first = Moment { ticks: 0, realtime: 0, monotonic: 0 };
    let later = Moment { ticks: 1 << 40, realtime: NOW * 1_000_000_000, monotonic: 1 << 40 };
    details.scale = Scale::between(first, later);
    let event = |kind, seconds_ago: u64, size| Event {
        position: 0,
        kind,
        device: 0,
        lifetime: 0,
        stream: 0,
        address: 0,
        size,
        time: (1 << 40) - seconds_ago * 1_000_000_000,
        turn: (1 << 40) - seconds_ago * 1_000_000_000,
    };
    details.events = [
        event(EventKind::Step, 12, 1197),
        event(EventKind::Grow, 10, 512 << 20),
        event(EventKind::Step, 9, 1198),
        event(EventKind::Wait, 8, 3_000_000),
        event(EventKind::OutOfMemory, 7, 12 * GIB),
        event(EventKind::Step, 3, 1200),
    ]
    .into();
    app.raise_alarm(None);
    app
}

pub fn shown(app: &mut App, width: u16, height: u16) -> String {
    text(app, (width, height)).expect("a buffer can be drawn to")
}

pub fn press(app: &mut App, code: KeyCode) -> Flow {
    app.key(KeyEvent::new(code, KeyModifiers::NONE))
}

/// Common terminal sizes.
pub const SIZES: [(u16, u16); 3] = [(80, 24), (120, 40), (200, 50)];

pub fn buffer(app: &mut App, (width, height): (u16, u16)) -> ratatui::buffer::Buffer {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).expect("a buffer");
    terminal.draw(|frame| draw::draw(frame, app)).expect("drawn");
    terminal.backend().buffer().clone()
}

/// To see them, open `snapshots/*.svg` in a browser.
#[test]
fn pictures_of_the_usual_sizes_on_light_and_dark_terminals_are_kept() {
    for size in SIZES {
        for palette in [LIGHT, DARK] {
            let picture = palette.svg(&buffer(&mut app(Theme::new(false)), size));
            let name = format!("top-{}x{}-{}.svg", size.0, size.1, palette.name);
            assert_binary_snapshot!(name.as_str(), picture.into_bytes());
        }
    }
}

#[test]
fn every_text_can_be_read_on_light_and_dark_terminals_and_the_chosen_row_best() {
    for size in SIZES {
        for view in [View::Main, View::Detail, View::Help] {
            let mut app = app(Theme::new(false));
            app.view = view;
            let buffer = buffer(&mut app, size);
            for cell in buffer.content().iter().filter(|cell| cell.symbol() != " ") {
                let is_chosen = cell.modifier.contains(Modifier::REVERSED);
                let least = if is_chosen { 7.0 } else { 2.4 };
                for palette in [LIGHT, DARK] {
                    let (text, ground) = palette.colours(cell);
                    let seen = contrast(text, ground);
                    assert!(seen >= least, "{}: {cell:?} {seen}", palette.name);
                }
            }
            let chosen = |cell: &&ratatui::buffer::Cell| cell.modifier.contains(Modifier::REVERSED);
            let marked = buffer.content().iter().filter(chosen).count();
            assert_eq!(marked > 0, view != View::Detail, "{size:?} {view:?}");
        }
    }
}

#[test]
fn the_rank_that_runs_out_soonest_comes_first_is_chosen_and_a_line_above_all_says_it() {
    let mut app = app(Theme::new(false));
    assert_eq!((app.chosen().map(|row| row.process.pid), app.chosen_at()), (Some(4201), 0));
    for (width, height) in SIZES {
        let screen = shown(&mut app, width, height);
        let second = screen.lines().nth(1).expect("a line");
        let said =
            " rank 1 runs out in 7 min: metrics.py:12 keeps 96 MiB a step; 1 other grows too";
        assert_eq!(second, said);
        // Verdict and remedy precede all figures.
        let place = |what: &str| screen.lines().position(|line| line.contains(what));
        let sentences = [place("keeps 96 MiB a step since step 1010"), place("To do: find what")];
        assert!(sentences.is_sorted() && sentences[0].is_some(), "{screen}");
        assert!(screen.contains("its place.") && sentences[1] < place("memory whole"), "{screen}");
        // So do the growing lines; on a small terminal, before the graph.
        let (line, graph) = (place("train.py:88 in step"), place(" memory whole run"));
        assert!(line.is_some() && (width > 80 || line < graph), "{screen}");
    }
    // Choosing another row changes neither the line nor the order.
    press(&mut app, KeyCode::Down);
    app.raise_alarm(None);
    assert_eq!((app.chosen().map(|row| row.process.pid), app.chosen_at()), (Some(4200), 1));
    let said = app.alarm.clone().expect("it still runs out");
    assert!(said.starts_with("rank 1 runs out in 7 min: it grows by "), "{said}");
    // Another part of the screen says what to do about the row that is not chosen.
    let screen = shown(&mut app, 120, 40);
    assert!(screen.contains("What to do: gruyere post 4201"), "{screen}");
    // A sooner row replaces it only if it is sooner by a good part.
    for (seconds, first) in [(390.0, 4201), (200.0, 4202)] {
        let row = app.rows.iter_mut().find(|row| row.process.pid == 4202).expect("a rank");
        row.forecast = growing(seconds);
        app.arrange();
        assert_eq!(app.rows[0].process.pid, first);
    }
    app.rows.iter_mut().for_each(|row| row.forecast = Forecast::NoGrowth);
    app.arrange();
    app.raise_alarm(None);
    let order: Vec<u64> = app.rows.iter().map(|row| row.process.pid).collect();
    assert_eq!((order, app.alarm.is_none()), (vec![4200, 4201, 4202, 4203], true));
}

#[test]
fn growth_that_is_not_forecast_is_not_shown_as_none() {
    let mut app = app(Theme::new(false));
    app.rows.retain(|row| row.process.pid == 4200);
    app.rows[0].forecast = Forecast::Unsure;
    let row = |screen: &str| -> Vec<String> {
        let row = screen.lines().find(|line| line.contains("4200")).expect("the row");
        row.split_whitespace().map(str::to_owned).collect()
    };
    let screen = shown(&mut app, 120, 40);
    assert!(row(&screen).contains(&"?".to_owned()), "{screen}");
    press(&mut app, KeyCode::Enter);
    let process = shown(&mut app, 120, 60);
    let said = process.lines().find(|line| line.contains("oom-in")).expect("the fact");
    assert!(said.contains('?') && !process.contains("never"), "{process}");
}

#[test]
fn growth_that_ends_too_far_away_for_a_forecast_is_not_shown_as_none() {
    let mut app = app(Theme::new(false));
    app.rows.retain(|row| row.process.pid == 4200);
    app.rows[0].forecast = Forecast::Far;
    let screen = shown(&mut app, 120, 40);
    let row = screen.lines().find(|line| line.contains("4200")).expect("the row");
    assert!(row.split_whitespace().any(|word| word == "far"), "{screen}");
    press(&mut app, KeyCode::Enter);
    let process = shown(&mut app, 120, 60);
    let said = process.lines().find(|line| line.contains("oom-in")).expect("the fact");
    assert!(said.contains("far") && !process.contains("never"), "{process}");
}

#[test]
fn at_eighty_by_twenty_four_what_grows_comes_before_the_facts_of_the_record() {
    let mut app = app(Theme::new(false));
    press(&mut app, KeyCode::Enter);
    let screen = shown(&mut app, 80, 24);
    let place = |what: &str| screen.lines().position(|line| line.contains(what));
    let (grows, fact) = (place("+96.00 MiB/step"), place("configuration"));
    assert!(grows.is_some() && (fact.is_none() || grows < fact), "{screen}");
    let remedy = place("To do: find what keeps");
    assert!(remedy.is_some() && remedy < grows, "{screen}");
    // The same with as many ranks as a machine has devices.
    app.view = View::Main;
    app.rows.extend((4..8).map(|rank| row(rank, Life::Live, Forecast::NoGrowth)));
    let screen = shown(&mut app, 80, 24);
    assert!(screen.contains("metrics.py:12 in Meter") && screen.contains("+96.00 MiB/step"));
}

#[test]
fn a_tick_in_the_bar_tells_what_the_last_step_needed_of_what_is_held() {
    let mut app = app(Theme::new(false));
    let bar = |app: &App| -> String {
        panels::shares(app, &app.rows[0], 16).iter().map(|span| span.content.as_ref()).collect()
    };
    let row = &mut app.rows[0];
    (row.snapshot.live, row.peak) = (5 * GIB, 60 * GIB);
    row.snapshot.gauges[DeviceGauge::Reserved as usize] = 70 * GIB;
    assert_eq!(bar(&app), "█░░░░░░░░░░┃▒▒··");
    app.rows[0].peak = 5 * GIB;
    assert_eq!(bar(&app), "█▒▒▒▒▒▒▒▒▒▒▒▒▒··", "what is held was not needed of late");
    app.rows[0].peak = 400 * GIB;
    assert_eq!(bar(&app), "█░░░░░░░░░░░░┃··", "never beyond what is held");
}

#[test]
fn fragmentation_that_says_nothing_takes_one_row() {
    let mut app = app(Theme::new(false));
    let rows = |app: &mut App| {
        let screen = shown(app, 160, 46);
        let place = |what: &str| screen.lines().position(|line| line.contains(what)).unwrap_or(0);
        place(" by line") - place(" of held")
    };
    assert!(rows(&mut app) > 3);
    let key = app.rows[0].key.clone();
    app.remember(key, (0..9).map(|_| Tick { fragmentation: 0.001, ..Tick::default() }));
    assert_eq!(rows(&mut app), 1);
    assert!(shown(&mut app, 160, 46).contains("lost 0.1% of held, at most 0.1%"));
}

#[test]
fn what_is_cut_ends_in_an_ellipsis() {
    let mut app = app(Theme::new(false));
    app.rows.iter_mut().for_each(|row| row.process.command = "program ".repeat(40));
    app.details.auto = Some("forward 61%, ".repeat(20));
    if let Some(lines) = &mut app.details.lines {
        lines.iter_mut().for_each(|line| line.name = "a/long/path/".repeat(30));
    }
    app.alarm = Some("rank 1 ".repeat(60));
    for width in [60, 80, 120, 200] {
        let screen = shown(&mut app, width, 50);
        for what in ["rank 1 rank 1", "forward 61%", "a/long/path", "program program"] {
            for line in screen.lines().filter(|line| line.contains(what)) {
                assert!(line.contains('…'), "{width}: {line}");
            }
        }
    }
    app.view = View::Detail;
    let screen = shown(&mut app, 80, 50);
    let line = screen.lines().find(|line| line.contains("command ")).expect("the command");
    assert!(line.ends_with('…'), "{line}");
}

#[test]
fn a_wide_screen_shows_all_panels() {
    assert_snapshot!(shown(&mut app(Theme::new(false)), 160, 46));
}

#[test]
fn eighty_columns_show_the_lines_of_the_program() {
    assert_snapshot!(shown(&mut app(Theme::new(false)), 80, 40));
}

#[test]
fn lines_are_sorted_by_what_they_hold_or_by_their_growth_by_a_key() {
    let mut app = app(Theme::new(false));
    // In the list, which is below the conclusion.
    let order = |screen: &str| -> Vec<usize> {
        let list = screen.lines().position(|line| line.contains(" by line ")).unwrap_or(0);
        ["train.py:31 in", "train.py:88 in", "metrics.py:12 in"]
            .map(|name| screen.lines().skip(list).position(|line| line.contains(name)).unwrap_or(0))
            .into()
    };
    for width in [80, 160] {
        app.lines_by = Some(Order::Bytes);
        let places = order(&shown(&mut app, width, 46));
        assert!(places[0] > 0 && places.is_sorted(), "{places:?}");
        press(&mut app, KeyCode::Char('g'));
        let places = order(&shown(&mut app, width, 46));
        assert!(places[2] < places[1] && places[1] < places[0], "{places:?}");
    }
}

#[test]
fn where_no_lines_are_kept_one_line_says_how() {
    let mut app = app(Theme::new(false));
    (app.details.lines, app.details.auto) = (None, None);
    for (width, height) in [(80, 40), (160, 46)] {
        let screen = shown(&mut app, width, height);
        let told: Vec<&str> = screen.lines().filter(|line| line.contains("by line")).collect();
        assert!(told.len() == 1 && told[0].contains("blame:large"), "{screen}");
    }
}

#[test]
fn of_a_program_without_python_no_setting_is_named_that_keeps_lines_of_python() {
    let mut app = app(Theme::new(false));
    (app.details.lines, app.details.auto) = (None, None);
    for row in &mut app.rows {
        row.process.uses = Some(Uses { torch: false, python: false });
    }
    let screen = shown(&mut app, 80, 40);
    assert!(screen.contains("of Python programs only") && !screen.contains("blame"), "{screen}");
}

#[test]
fn a_narrow_screen_shows_what_is_most_wanted() {
    assert_snapshot!(shown(&mut app(Theme::new(false)), 60, 40));
}

#[test]
fn a_short_screen_keeps_the_table() {
    assert_snapshot!(shown(&mut app(Theme::new(false)), 80, 10));
}

#[test]
fn the_detail_shows_all_that_is_known() {
    let mut app = app(Theme::new(false));
    press(&mut app, KeyCode::Enter);
    app.details.streams_at = None;
    assert_snapshot!(shown(&mut app, 100, 64));
}

#[test]
fn every_size_can_be_drawn_and_no_line_is_longer_than_the_screen() {
    let mut app = app(Theme::new(false));
    for width in [1, 2, 19, 20, 40, 59, 60, 61, 79, 80, 99, 100, 120, 149, 150, 200, 250] {
        for height in [1, 3, 4, 5, 8, 12, 14, 20, 24, 30, 50, 70] {
            for view in [View::Main, View::Detail, View::Help] {
                app.view = view;
                for line in shown(&mut app, width, height).lines() {
                    let cells = ratatui::text::Span::raw(line).width();
                    assert!(cells <= usize::from(width), "{width}x{height}: {line}");
                }
            }
        }
    }
}

#[test]
fn sixty_columns_have_who_what_and_when() {
    let columns = Column::fitting(60);
    for needed in [
        Column::Pid,
        Column::Rank,
        Column::Live,
        Column::Held,
        Column::Fragmentation,
        Column::OomIn,
    ] {
        assert!(columns.contains(&needed), "{needed:?}");
    }
    for needed in [Column::Peak, Column::Held, Column::Command] {
        assert!(Column::fitting(80).contains(&needed), "{needed:?}");
    }
    assert!(Column::fitting(120).contains(&Column::Bar));
    assert_eq!(Column::fitting(200).len(), 14);
}

#[test]
fn without_colour_no_cell_has_one() {
    for view in [View::Main, View::Detail, View::Help] {
        let mut app = app(Theme::new(true));
        app.view = view;
        let mut terminal = Terminal::new(TestBackend::new(120, 40)).expect("a buffer");
        terminal.draw(|frame| draw::draw(frame, &mut app)).expect("drawn");
        for cell in terminal.backend().buffer().content() {
            assert_eq!((cell.fg, cell.bg), (Color::Reset, Color::Reset), "{cell:?}");
        }
        // Urgent values still stand out.
        let urgent = |cell: &ratatui::buffer::Cell| cell.modifier.contains(Modifier::REVERSED);
        assert!(view != View::Main || terminal.backend().buffer().content().iter().any(urgent));
    }
}

#[test]
fn keys_choose_sort_pause_and_quit() {
    let mut app = app(Theme::new(true));
    let chosen = |app: &App| app.chosen().map(|row| row.process.pid);
    assert_eq!(chosen(&app), Some(4201));
    assert_eq!(press(&mut app, KeyCode::Down), Flow::Look);
    assert_eq!(chosen(&app), Some(4200));
    press(&mut app, KeyCode::End);
    assert_eq!(chosen(&app), Some(4203));
    press(&mut app, KeyCode::Down);
    assert_eq!(chosen(&app), Some(4203), "there is nobody further down");
    // The chosen row stays chosen, wherever the sort puts it.
    press(&mut app, KeyCode::Char('r'));
    assert_eq!((chosen(&app), app.chosen_at()), (Some(4203), 1));
    app.sort = Sort::Rate;
    press(&mut app, KeyCode::Char('s'));
    let order: Vec<u64> = app.rows.iter().map(|row| row.process.pid).collect();
    assert_eq!((app.sort, order), (Sort::OomIn, vec![4201, 4202, 4200, 4203]));
    assert_eq!(press(&mut app, KeyCode::Char(' ')), Flow::Look);
    assert!(app.is_paused);
    assert_eq!(press(&mut app, KeyCode::Char('x')), Flow::ForgetDead);
    press(&mut app, KeyCode::Char('?'));
    assert_eq!(app.view, View::Help);
    assert_eq!(press(&mut app, KeyCode::Esc), Flow::Stay);
    press(&mut app, KeyCode::Enter);
    assert_eq!(app.view, View::Detail);
    assert_eq!(press(&mut app, KeyCode::Char('q')), Flow::Stay);
    assert_eq!(app.view, View::Main);
    assert_eq!(press(&mut app, KeyCode::Char('q')), Flow::Quit);
    let control_c = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
    app.view = View::Help;
    assert_eq!(app.key(control_c), Flow::Quit);
}

#[test]
fn a_command_of_a_strange_process_does_not_move_the_terminal() {
    let mut app = app(Theme::new(false));
    app.rows[0].process.command = "evil \u{1b}[2J\u{7} \u{202e}name\n".to_owned();
    for view in [View::Main, View::Detail] {
        app.view = view;
        let screen = shown(&mut app, 200, 40);
        assert!(screen.contains("evil"), "{screen}");
        assert!(
            !screen.chars().any(|c| (c.is_control() && c != '\n') || c == '\u{202e}'),
            "{screen:?}"
        );
    }
}

#[test]
fn a_damaged_record_is_drawn_or_refused_but_never_a_panic() {
    let folder = tempfile::tempdir().expect("a folder");
    let options = RecordOptions {
        directory: folder.path().to_owned(),
        ring_events: 64,
        max_blocks: 256,
        ..RecordOptions::default()
    };
    let facts = DeviceFacts { name: "Phantom".to_owned(), uuid: [1; 16], total_memory: 80 << 30 };
    let record: &'static Record = Box::leak(Box::new(Record::create(&options, &[facts])));
    let mut shard = record.shard(0, 0);
    for n in 1..20 {
        shard.block_insert(&BlockEntry {
            address: n << 30,
            size: 1 << 20,
            requested: 1,
            ..BlockEntry::default()
        });
        record.device(0).set(&[(DeviceGauge::Limit, 80 << 30), (DeviceGauge::Reserved, n << 30)]);
        record.device(0).sample(n << 30);
        record.event(EventKind::Grow, 0, 0, 0, n << 30, 1 << 30, clock::now());
    }
    let whole = std::fs::read(record.path().expect("a file")).expect("read");
    record.close();
    // Changes only bytes that are not zero: the others say nothing.
    let said: Vec<usize> = (0..whole.len()).filter(|&at| whole[at] != 0).collect();
    let mut seed = 7u64;
    let mut draw_lot = move |below: usize| {
        seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (seed >> 33) as usize % below
    };
    let mut drawn = 0;
    for n in 0..600 {
        let mut bytes = whole.clone();
        for _ in 0..1 + n % 20 {
            let near = said[draw_lot(said.len())] & !7;
            let at = (near + draw_lot(16)).min(bytes.len() - 1);
            bytes[at] = [0xff, 0x80, 0x01, 0x7f][draw_lot(4)];
        }
        if n % 10 == 0 {
            bytes.truncate(draw_lot(bytes.len()));
        }
        let path = folder.path().join(format!("gruyere-1-2-{n}-0.record"));
        std::fs::write(&path, bytes).expect("written");
        let folder = Folder { directory: folder.path().to_owned(), all_users: false };
        let target = Target { target: Some(path.display().to_string()), folder };
        let Ok(mut follower) = Follower::new(Which::One(target)) else { continue };
        let mut app = App::new(Sort::OomIn, Duration::from_millis(500), Theme::new(false));
        for _ in 0..2 {
            follower.look(std::time::Instant::now());
            app.update(&follower, std::time::Instant::now());
        }
        for view in [View::Main, View::Detail] {
            app.view = view;
            assert!(!shown(&mut app, 160, 50).is_empty());
        }
        sample(&follower, &mut SeldomRead::default(), std::time::Instant::now());
        std::fs::remove_file(&path).expect("removed");
        drawn += 1;
    }
    assert!(drawn > 100, "only {drawn} of 600 could be opened");
}

#[test]
fn no_process_is_no_trouble() {
    let mut app = App::new(Sort::Rank, Duration::from_millis(500), Theme::new(false));
    app.trouble = vec!["gruyere-1-2-3-0.record: damaged".to_owned()];
    let screen = shown(&mut app, 80, 10);
    assert!(screen.contains("no process here") && screen.contains("damaged"), "{screen}");
    press(&mut app, KeyCode::Enter);
    assert_eq!(app.view, View::Main);
}
