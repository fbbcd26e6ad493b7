//! Columns of the table: their text, their width, and the order they sort by.

use std::cmp::Ordering;

use clap::ValueEnum;
use gruyere_record::DeviceGauge;
use gruyere_record::watch::{Duration, Forecast, Metric, Unit};

use super::app::Row;
use crate::command;
use crate::follow::Life;

/// What the table is sorted by. The highest first, but ranks, pids and times.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Sort {
    /// The device that runs out of memory soonest, then rank.
    #[default]
    Sick,
    /// Rank, then pid, then device.
    Rank,
    /// Process number.
    Pid,
    /// Live bytes.
    Live,
    /// The highest live bytes of the last step or minute.
    Peak,
    /// Bytes held.
    #[value(alias = "reserved")]
    Held,
    /// Lost / held.
    #[value(alias = "lost")]
    Fragmentation,
    /// Held and free in whole pages.
    Idle,
    /// The largest satisfiable request, the least first.
    Largest,
    /// Bytes allocated per second.
    Rate,
    /// Time to out of memory, the soonest first.
    OomIn,
}

impl Sort {
    /// The next order.
    pub fn next(self) -> Self {
        let all = Self::value_variants();
        let at = all.iter().position(|sort| *sort == self).unwrap_or(0);
        all[(at + 1) % all.len()]
    }

    /// The column of this order.
    pub fn column(self) -> Column {
        match self {
            Self::Sick | Self::Rank => Column::Rank,
            Self::Pid => Column::Pid,
            Self::Live => Column::Live,
            Self::Peak => Column::Peak,
            Self::Held => Column::Held,
            Self::Fragmentation => Column::Fragmentation,
            Self::Idle => Column::Idle,
            Self::Largest => Column::Largest,
            Self::Rate => Column::Rate,
            Self::OomIn => Column::OomIn,
        }
    }

    /// The order of two rows.
    pub fn compare(self, a: &Row, b: &Row) -> Ordering {
        // Rows without a value come last.
        let least = |metric: Metric| {
            let value = |row: &Row| metric.value(&row.facts()).unwrap_or(f64::INFINITY);
            value(a).total_cmp(&value(b))
        };
        let most = |metric: Metric| {
            let value = |row: &Row| metric.value(&row.facts()).unwrap_or(f64::NEG_INFINITY);
            value(b).total_cmp(&value(a))
        };
        let by = match self {
            Self::Sick | Self::Rank => Ordering::Equal,
            Self::Pid => a.process.pid.cmp(&b.process.pid),
            Self::Live => most(Metric::Live),
            Self::Peak => b.peak.cmp(&a.peak),
            Self::Held => most(Metric::Reserved),
            Self::Fragmentation => most(Metric::Fragmentation),
            Self::Idle => most(Metric::Idle),
            Self::Largest => least(Metric::Largest),
            Self::Rate => most(Metric::Rate),
            Self::OomIn => least(Metric::OomIn),
        };
        // Rows without a rank come last.
        let rank = |row: &Row| row.process.rank.unwrap_or(u64::MAX);
        let name = |row: &Row| (rank(row), row.process.pid, row.key.clone());
        by.then_with(|| name(a).cmp(&name(b)))
    }
}

/// A column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Column {
    /// Process number.
    Pid,
    /// Rank.
    Rank,
    /// Device number.
    Device,
    /// Training step.
    Step,
    /// Live bytes.
    Live,
    /// The highest live bytes of the last step, or of the last minute.
    Peak,
    /// Bytes held.
    Held,
    /// A bar of live, peak and held bytes against the ceiling.
    Bar,
    /// Held and free in whole pages.
    Idle,
    /// Lost / held.
    Fragmentation,
    /// The largest satisfiable request.
    Largest,
    /// Bytes allocated per second.
    Rate,
    /// Time to out of memory.
    OomIn,
    /// The command, or how the process ended.
    Command,
}

impl Column {
    /// The columns for a screen of this width, in order. The last takes the remaining width.
    pub fn fitting(width: u16) -> Vec<Column> {
        use Column::*;
        let wide = [
            Pid,
            Rank,
            Device,
            Step,
            Live,
            Peak,
            Held,
            Bar,
            Idle,
            Fragmentation,
            Largest,
            Rate,
            OomIn,
            Command,
        ];
        let mut columns = wide.to_vec();
        // Columns to drop, in order, if there is no room. The bar shows what IDLE cannot: which
        // idle memory each step needs again.
        for gone in [Rate, Idle, Step, Bar, Largest, Command, Peak] {
            let used: u16 = columns.iter().map(|column| column.width() + 1).sum();
            // Fewer cells cannot show a command.
            let command = if columns.contains(&Command) { COMMAND } else { 0 };
            if used + command <= width {
                break;
            }
            columns.retain(|column| *column != gone);
        }
        columns
    }

    /// Width in cells; 0 for the column that takes the rest.
    pub fn width(self) -> u16 {
        match self {
            Self::Pid => 7,
            Self::Rank => 5,
            Self::Device => 4,
            Self::Step => 7,
            Self::Live | Self::Peak | Self::Held | Self::Idle | Self::Largest => 10,
            Self::Bar => 16,
            Self::Fragmentation => 6,
            Self::Rate => 12,
            Self::OomIn => 8,
            Self::Command => 0,
        }
    }

    /// The heading.
    pub fn name(self) -> &'static str {
        match self {
            Self::Pid => "PID",
            Self::Rank => "RANK",
            Self::Device => "GPU",
            Self::Step => "STEP",
            Self::Live => "LIVE",
            Self::Peak => "PEAK",
            Self::Held => "HELD",
            Self::Bar => "OF THE CEILING",
            Self::Idle => "IDLE",
            Self::Fragmentation => "LOST",
            Self::Largest => "LARGEST",
            Self::Rate => "ALLOC/S",
            Self::OomIn => "OOM IN",
            Self::Command => "COMMAND",
        }
    }

    /// Whether the column holds numbers, which align right.
    pub fn is_number(self) -> bool {
        !matches!(self, Self::Bar | Self::Command)
    }

    /// The cell's text for a row; empty for the bar.
    pub fn text(self, row: &Row) -> String {
        let metric = |metric: Metric| {
            let value = metric.value(&row.facts());
            value.map_or_else(|| "-".to_owned(), |value| metric.unit().show(value))
        };
        match self {
            Self::Pid => row.process.pid.to_string(),
            Self::Rank => row.process.rank.map_or_else(|| "-".to_owned(), |rank| rank.to_string()),
            Self::Device => row.key.1.to_string(),
            Self::Step => match row.snapshot.gauge(DeviceGauge::Step) {
                0 => "-".to_owned(),
                step => step.to_string(),
            },
            Self::Live => metric(Metric::Live),
            Self::Peak if row.facts().limit() == 0 => "-".to_owned(),
            Self::Peak => Unit::Bytes.show(row.peak as f64),
            Self::Held => metric(Metric::Reserved),
            Self::Bar => String::new(),
            Self::Idle => metric(Metric::Idle),
            Self::Fragmentation => metric(Metric::Fragmentation),
            Self::Largest => metric(Metric::Largest),
            Self::Rate => {
                row.rate.map_or_else(|| "-".to_owned(), |rate| Unit::BytesPerSecond.show(rate))
            }
            Self::OomIn if row.ending.as_ref().is_some_and(|ending| ending.ran_out) => {
                "ran out".to_owned()
            }
            Self::OomIn if row.life != Life::Live => row.life.name().to_owned(),
            Self::OomIn => oom_in(row.forecast),
            Self::Command => command::short(&row.process.command),
        }
    }
}

/// Minimum width of the command.
const COMMAND: u16 = 10;

/// A forecast in a few cells.
pub fn oom_in(forecast: Forecast) -> String {
    match forecast {
        Forecast::Unknown => "...".to_owned(),
        Forecast::NoGrowth => "-".to_owned(),
        Forecast::Growing(growth) if growth.seconds < 1.0 => "now".to_owned(),
        Forecast::Growing(growth) => Duration(growth.seconds).to_string(),
    }
}
