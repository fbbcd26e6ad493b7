//! State of the screen, and its response to keys: no terminal, no drawing.

use std::collections::{BTreeMap, VecDeque};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use gruyere_record::Reader;
use gruyere_record::facts::Process;
use gruyere_record::reader::DeviceSnapshot;
use gruyere_record::sites::{LISTED, Line, read_lines};
use gruyere_record::timeline::TimelineEntry;
use gruyere_record::watch::{Facts, Forecast};
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use super::columns::Sort;
use super::details::Details;
use super::sick::{self, Grew};
use super::theme::Theme;
use super::verdict::Verdict;
use crate::ending::Ending;
use crate::follow::{Follower, Life, SHORTEST};
use crate::sites::{Order, SeldomRead};

/// A device of a process: the path of the record, and the device's number in it.
pub type Key = (PathBuf, u32);

/// Row of the table.
#[derive(Clone, Debug)]
pub struct Row {
    /// Identity of the row.
    pub key: Key,
    /// The process.
    pub process: Process,
    /// State of the process.
    pub life: Life,
    /// How the process ended, or ends while it shuts down, and what is left of it.
    pub ending: Option<Ending>,
    /// The device's numbers.
    pub snapshot: DeviceSnapshot,
    /// The highest live bytes of the last step, or of the last minute if no steps are marked.
    pub peak: u64,
    /// Bytes allocated per second.
    pub rate: Option<f64>,
    /// Forecast of out of memory.
    pub forecast: Forecast,
}

impl Row {
    /// Whether the process runs, and does not shut down after an out-of-memory.
    pub fn runs(&self) -> bool {
        self.life == Life::Live && self.ending.is_none()
    }

    /// Input of the metrics.
    pub fn facts(&self) -> Facts<'_> {
        Facts { device: &self.snapshot, rate: self.rate, forecast: self.forecast }
    }
}

/// A sample of a device, for the small graphs.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Tick {
    /// Seconds since 1970.
    pub seconds: f64,
    /// Live bytes.
    pub live: u64,
    /// Bytes held.
    pub reserved: u64,
    /// Lost / held.
    pub fragmentation: f64,
    /// Bytes allocated per second.
    pub rate: f64,
}

/// Samples kept: ten minutes at two per second.
const TICKS: usize = 1200;

/// The time span of the graph.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Span {
    /// From its start.
    #[default]
    Run,
    /// The latest minute.
    Minute,
    /// The latest ten.
    TenMinutes,
    /// The latest hour.
    Hour,
}

impl Span {
    /// Seconds; `None`: the whole run.
    pub fn seconds(self) -> Option<f64> {
        match self {
            Self::Run => None,
            Self::Minute => Some(60.0),
            Self::TenMinutes => Some(600.0),
            Self::Hour => Some(3600.0),
        }
    }

    /// Its name on the screen.
    pub fn name(self) -> &'static str {
        match self {
            Self::Run => "whole run",
            Self::Minute => "last minute",
            Self::TenMinutes => "last 10 minutes",
            Self::Hour => "last hour",
        }
    }

    fn next(self) -> Self {
        match self {
            Self::Run => Self::Minute,
            Self::Minute => Self::TenMinutes,
            Self::TenMinutes => Self::Hour,
            Self::Hour => Self::Run,
        }
    }
}

/// Content of the screen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum View {
    /// The table and the graphs.
    #[default]
    Main,
    /// A single process in full.
    Detail,
    /// The keys.
    Help,
}

/// Effect of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flow {
    /// Redraw only.
    Stay,
    /// Read now.
    Look,
    /// Drop the processes that died.
    ForgetDead,
    /// Stop the job until it is continued.
    Stop,
    /// Quit.
    Quit,
}

/// The screen's state.
pub struct App {
    /// Rows of the table, in order.
    pub rows: Vec<Row>,
    /// Sort order of the table.
    pub sort: Sort,
    /// Whether the order is reversed.
    pub is_reversed: bool,
    /// The user's order of program lines; `None`: by growth if the device grows.
    pub lines_by: Option<Order>,
    /// While paused, nothing is read.
    pub is_paused: bool,
    /// Content of the screen.
    pub view: View,
    /// Lines of the detail view scrolled off the top.
    pub scroll: u16,
    /// The time span of the graph.
    pub span: Span,
    /// Time between two samples.
    pub interval: Duration,
    /// Colours and weights.
    pub theme: Theme,
    /// The timeline of the chosen device.
    pub timeline: Vec<TimelineEntry>,
    /// Data read for the chosen process only.
    pub details: Details,
    /// Number of records whose processes ended before the start.
    pub old: usize,
    /// Number of other users' records, which are not read.
    pub foreign: usize,
    /// Errors of records that could not be read.
    pub trouble: Vec<String>,
    /// Name of this machine.
    pub host: String,
    chosen: Option<Key>,
    /// The device that runs out of memory soonest.
    sick: Option<Key>,
    /// Its lines and verdict, if another device is chosen.
    sick_lines: SeldomRead<(Vec<Line>, Verdict)>,
    /// The sentence at the top about it.
    pub alarm: Option<String>,
    /// Below the alarm, for an ended process: remedies and places to look.
    pub next: Vec<String>,
    /// Growth at the last sample with any growth.
    grew: Option<Grew>,
    ticks: BTreeMap<Key, VecDeque<Tick>>,
}

impl App {
    /// State before the first sample.
    pub fn new(sort: Sort, interval: Duration, theme: Theme) -> Self {
        Self {
            rows: Vec::new(),
            sort,
            is_reversed: false,
            lines_by: None,
            is_paused: false,
            view: View::Main,
            scroll: 0,
            span: Span::default(),
            interval,
            theme,
            timeline: Vec::new(),
            details: Details::default(),
            old: 0,
            foreign: 0,
            trouble: Vec::new(),
            host: String::new(),
            chosen: None,
            sick: None,
            sick_lines: SeldomRead::default(),
            alarm: None,
            next: Vec::new(),
            grew: None,
            ticks: BTreeMap::new(),
        }
    }

    /// The chosen row; if none is chosen, or the chosen row is gone, the row that runs out of
    /// memory soonest, or the first.
    pub fn chosen(&self) -> Option<&Row> {
        self.rows.get(self.chosen_at())
    }

    /// Position of the chosen row in the table.
    pub fn chosen_at(&self) -> usize {
        let place = |key: &Option<Key>| {
            let key = key.as_ref()?;
            self.rows.iter().position(|row| row.key == *key)
        };
        place(&self.chosen).or_else(|| place(&self.sick)).unwrap_or(0)
    }

    /// The row that runs out of memory soonest.
    pub fn sick(&self) -> Option<&Row> {
        self.rows.iter().find(|row| Some(&row.key) == self.sick.as_ref())
    }

    /// Whether the sick row is the chosen row.
    pub fn sick_is_chosen(&self) -> bool {
        self.sick.is_some() && self.sick.as_ref() == chosen_key(self)
    }

    /// Order of the program lines.
    pub fn order_of_lines(&self) -> Order {
        let grows = || self.chosen().is_some_and(|row| sick::growth(row).is_some());
        self.lines_by.unwrap_or_else(|| if grows() { Order::Growth } else { Order::Bytes })
    }

    /// Samples of the chosen device, oldest first.
    pub fn ticks(&self) -> impl DoubleEndedIterator<Item = &Tick> {
        self.chosen().and_then(|row| self.ticks.get(&row.key)).into_iter().flatten()
    }

    /// Adds samples of a device made elsewhere.
    #[cfg(test)]
    pub fn remember(&mut self, key: Key, ticks: impl Iterator<Item = Tick>) {
        self.ticks.insert(key, ticks.collect());
    }

    /// Takes in what the follower read.
    pub fn update(&mut self, follower: &Follower, now: Instant) {
        if self.is_paused {
            return;
        }
        let since_1970 = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        let seconds = since_1970.map_or(0.0, |time| time.as_secs_f64());
        self.old = follower.old();
        self.foreign = follower.foreign();
        self.trouble = follower.trouble().map(str::to_owned).collect();
        let before = std::mem::take(&mut self.rows);
        for (path, followed) in follower.followed() {
            // A process that has used no device yet still has a row, with its first device.
            let first = followed.devices.first().filter(|_| followed.used().next().is_none());
            for device in followed.used().chain(first) {
                let key = (path.clone(), device.snapshot.device);
                // An ended process without a record keeps its last sample: at its end all memory
                // may be freed.
                let is_gone = followed.ending.as_ref().is_some_and(|end| end.record.is_none());
                if let Some(row) = before.iter().find(|row| is_gone && row.key == key) {
                    let (life, ending) = (followed.life, followed.ending.clone());
                    self.rows.push(Row { life, ending, ..row.clone() });
                    continue;
                }
                let runs = followed.life == Life::Live && followed.ending.is_none();
                let row = Row {
                    key: key.clone(),
                    process: followed.process.clone(),
                    life: followed.life,
                    ending: followed.ending.clone(),
                    snapshot: device.snapshot.clone(),
                    peak: device.peak,
                    rate: device.rate.filter(|_| runs),
                    forecast: if runs { device.forecast } else { Forecast::Unknown },
                };
                if runs {
                    let ticks = self.ticks.entry(key).or_default();
                    if ticks.len() == TICKS {
                        ticks.pop_front();
                    }
                    ticks.push_back(Tick {
                        seconds,
                        live: row.snapshot.live,
                        reserved: row.snapshot.gauge(gruyere_record::DeviceGauge::Reserved),
                        fragmentation: row.snapshot.held().fragmentation(),
                        rate: row.rate.unwrap_or(0.0),
                    });
                }
                self.rows.push(row);
            }
        }
        self.ticks.retain(|(path, _), _| follower.followed().contains_key(path));
        if let Some(row) = self.rows.first() {
            self.host.clone_from(&row.process.host);
        }
        self.arrange();
        let chosen = self.chosen().map(|row| row.key.clone());
        if let Some(key) = chosen
            && let Some(followed) = follower.followed().get(&key.0)
        {
            if let Some(device) = followed.devices.get(key.1 as usize) {
                self.timeline.clone_from(&device.timeline);
            }
            self.details.look(&key, followed, now);
        } else {
            self.timeline.clear();
            self.details = Details::default();
        }
        let key = self.sick.clone().filter(|key| chosen_key(self) != Some(key));
        let reader = key.and_then(|key| Some((key.1, &follower.followed().get(&key.0)?.reader)));
        let mut seldom = std::mem::take(&mut self.sick_lines);
        let read = |reader: &Reader<'_>, device| {
            (read_lines(reader, device, LISTED).unwrap_or_default(), Verdict::read(reader, device))
        };
        let found = reader.and_then(|(device, reader)| seldom.look(reader, device, now, read));
        self.raise_alarm(found.map(|(lines, verdict)| (&**lines, verdict)));
        self.sick_lines = seldom;
    }

    /// Finds the row that runs out of memory soonest; failing that, the row that ran out or died
    /// last. In the default order, it comes first.
    pub fn arrange(&mut self) {
        let (sort, is_reversed) = (self.sort, self.is_reversed);
        let first = sick::soonest(&self.rows, self.sick.as_ref())
            .or_else(|| sick::refused(&self.rows, self.grew.as_ref()))
            .or_else(|| sick::last_dead(&self.rows));
        self.sick = first.map(|row| row.key.clone());
        self.rows.sort_by(|a, b| {
            let order = sort.compare(a, b);
            if is_reversed { order.reverse() } else { order }
        });
        let place = self.rows.iter().position(|row| Some(&row.key) == self.sick.as_ref());
        if let (Some(place), Sort::Sick) = (place, sort) {
            self.rows[..=place].rotate_right(1);
        }
    }

    /// Writes the sentence at the top; `other`: lines and verdict of the sick device, if another
    /// device is chosen.
    pub fn raise_alarm(&mut self, other: Option<(&[Line], &Verdict)>) {
        let unknown = (&[][..], &Verdict::default());
        let (lines, verdict) = match self.sick_is_chosen() {
            true => (self.details.lines.as_deref().unwrap_or_default(), &self.details.verdict),
            false => other.unwrap_or(unknown),
        };
        let told = sick::Told { lines, verdict };
        let grew = self.sick().and_then(|row| sick::grew(row, told));
        let said = self.sick().and_then(|row| match &row.ending {
            Some(ending) => sick::epitaph(row, ending),
            None => sick::sentence(row, &self.rows, told)
                .or_else(|| Some(grew.as_ref().or(self.grew.as_ref())?.refusal(row))),
        });
        self.grew = grew.or(self.grew.take());
        self.next = match self.sick().and_then(|row| Some((row, row.ending.as_ref()?))) {
            Some((row, ending)) if said.is_some() => sick::way_on(row, ending),
            _ => Vec::new(),
        };
        self.alarm = said;
    }

    /// Handles a key.
    pub fn key(&mut self, key: KeyEvent) -> Flow {
        let with_control = key.modifiers.contains(KeyModifiers::CONTROL);
        match (key.code, self.view) {
            (KeyCode::Char('c'), _) if with_control => return Flow::Quit,
            (KeyCode::Char('z'), _) if with_control => return Flow::Stop,
            (KeyCode::Char('q'), View::Main) => return Flow::Quit,
            (KeyCode::Esc | KeyCode::Char('q' | '?' | 'h') | KeyCode::Enter, View::Help) => {
                self.view = View::Main
            }
            (
                KeyCode::Esc | KeyCode::Char('q') | KeyCode::Enter | KeyCode::Backspace,
                View::Detail,
            ) => {
                (self.view, self.scroll) = (View::Main, 0);
            }
            (KeyCode::Char('?' | 'h'), _) => self.view = View::Help,
            (KeyCode::Enter, View::Main) if !self.rows.is_empty() => {
                (self.view, self.scroll) = (View::Detail, 0)
            }
            (KeyCode::Down | KeyCode::Char('j'), View::Detail) => {
                self.scroll = self.scroll.saturating_add(1)
            }
            (KeyCode::Up | KeyCode::Char('k'), View::Detail) => {
                self.scroll = self.scroll.saturating_sub(1)
            }
            (KeyCode::PageDown, View::Detail) => self.scroll = self.scroll.saturating_add(10),
            (KeyCode::PageUp, View::Detail) => self.scroll = self.scroll.saturating_sub(10),
            (KeyCode::Home, View::Detail) => self.scroll = 0,
            (KeyCode::Down | KeyCode::Char('j'), _) => return self.choose(self.chosen_at() + 1),
            (KeyCode::Up | KeyCode::Char('k'), _) => {
                return self.choose(self.chosen_at().saturating_sub(1));
            }
            (KeyCode::PageDown, _) => return self.choose(self.chosen_at() + 10),
            (KeyCode::PageUp, _) => return self.choose(self.chosen_at().saturating_sub(10)),
            (KeyCode::Home, _) => return self.choose(0),
            (KeyCode::End, _) => return self.choose(usize::MAX),
            (KeyCode::Char('s'), _) => {
                (self.sort, self.is_reversed) = (self.sort.next(), false);
                self.arrange();
            }
            (KeyCode::Char('r'), _) => {
                self.is_reversed = !self.is_reversed;
                self.arrange();
            }
            (KeyCode::Char(' ' | 'p'), _) => {
                self.is_paused = !self.is_paused;
                return Flow::Look;
            }
            (KeyCode::Char('g'), _) => {
                self.lines_by = Some(match self.order_of_lines() {
                    Order::Bytes => Order::Growth,
                    Order::Growth => Order::Bytes,
                })
            }
            (KeyCode::Char('t'), _) => self.span = self.span.next(),
            (KeyCode::Char('x'), _) => return Flow::ForgetDead,
            (KeyCode::Char('+'), _) => self.interval = (self.interval / 2).max(SHORTEST),
            (KeyCode::Char('-'), _) => self.interval = (self.interval * 2).min(LONGEST),
            _ => {}
        }
        Flow::Stay
    }

    fn choose(&mut self, at: usize) -> Flow {
        let at = at.min(self.rows.len().saturating_sub(1));
        self.chosen = self.rows.get(at).map(|row| row.key.clone());
        if self.is_paused { Flow::Stay } else { Flow::Look }
    }
}

fn chosen_key(app: &App) -> Option<&Key> {
    app.chosen().map(|row| &row.key)
}

/// The longest interval that keys can set.
const LONGEST: Duration = Duration::from_secs(10);
