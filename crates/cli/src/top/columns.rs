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

/// Defines [`Column`]. A row: what it is, variant, heading, width in cells (0: what the others
/// leave), the place in the order in which columns go where there is no room (0: it stays), and the
/// cell's text.
macro_rules! columns {
    ($(
        $(#[$doc:meta])*
        $variant:ident $heading:literal $width:literal $goes:literal $text:expr;
    )*) => {
        /// A column.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Column { $($(#[$doc])* $variant,)* }

        impl Column {
            /// All, in the order of the screen.
            const ALL: &[Column] = &[$(Column::$variant,)*];

            /// The heading.
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => $heading,)* }
            }

            /// Width in cells; 0 for the column that takes the rest.
            pub fn width(self) -> u16 {
                match self { $(Self::$variant => $width,)* }
            }

            /// Its place in the order in which columns go; 0: it stays.
            fn goes(self) -> u8 {
                match self { $(Self::$variant => $goes,)* }
            }

            /// The cell's text for a row; empty for the bar.
            pub fn text(self, row: &Row) -> String {
                let text: fn(&Row) -> String = match self { $(Self::$variant => $text,)* };
                text(row)
            }
        }
    };
}

columns! {
    /// Process number.
    Pid "PID" 7 0 |row| row.process.pid.to_string();
    /// Rank.
    Rank "RANK" 5 0 |row| or_dash(row.process.rank.map(|rank| rank.to_string()));
    /// Device number.
    Device "GPU" 4 0 |row| row.key.1.to_string();
    /// Training step.
    Step "STEP" 7 3 |row| {
        let step = row.snapshot.gauge(DeviceGauge::Step);
        or_dash((step > 0).then(|| step.to_string()))
    };
    /// Live bytes.
    Live "LIVE" 10 0 |row| metric(row, Metric::Live);
    /// The highest live bytes of the last step, or of the last minute.
    Peak "PEAK" 10 7 |row| {
        or_dash((row.facts().limit() > 0).then(|| Unit::Bytes.show(row.peak as f64)))
    };
    /// Bytes held.
    Held "HELD" 10 0 |row| metric(row, Metric::Reserved);
    /// A bar of live, peak and held bytes against the ceiling. It shows what IDLE cannot: which
    /// idle memory each step needs again.
    Bar "OF THE CEILING" 16 4 |_| String::new();
    /// Held and free in whole pages.
    Idle "IDLE" 10 2 |row| metric(row, Metric::Idle);
    /// Lost / held.
    Fragmentation "LOST" 6 0 |row| metric(row, Metric::Fragmentation);
    /// The largest satisfiable request.
    Largest "LARGEST" 10 5 |row| metric(row, Metric::Largest);
    /// Bytes allocated per second.
    Rate "ALLOC/S" 12 1 |row| or_dash(row.rate.map(|rate| Unit::BytesPerSecond.show(rate)));
    /// Time to out of memory.
    OomIn "OOM IN" 8 0 |row| match row.life {
        _ if row.ending.as_ref().is_some_and(|ending| ending.ran_out) => "ran out".to_owned(),
        Life::Live => oom_in(row.forecast),
        life => life.name().to_owned(),
    };
    /// The command, or how the process ended.
    Command "COMMAND" 0 6 |row| command::short(&row.process.command);
}

fn or_dash(text: Option<String>) -> String {
    text.unwrap_or_else(|| "-".to_owned())
}

fn metric(row: &Row, metric: Metric) -> String {
    or_dash(metric.value(&row.facts()).map(|value| metric.unit().show(value)))
}

impl Column {
    /// The columns for a screen of this width, in order. The last takes the remaining width.
    pub fn fitting(width: u16) -> Vec<Column> {
        let mut columns = Self::ALL.to_vec();
        let mut going: Vec<Column> =
            columns.iter().copied().filter(|column| column.goes() > 0).collect();
        going.sort_by_key(|column| column.goes());
        for gone in going {
            let used: u16 = columns.iter().map(|column| column.width() + 1).sum();
            // Fewer cells cannot show a command.
            let command = if columns.contains(&Column::Command) { COMMAND } else { 0 };
            if used + command <= width {
                break;
            }
            columns.retain(|column| *column != gone);
        }
        columns
    }

    /// Whether the column holds numbers, which align right.
    pub fn is_number(self) -> bool {
        !matches!(self, Self::Bar | Self::Command)
    }
}

/// Minimum width of the command.
const COMMAND: u16 = 10;

/// A forecast in a few cells.
pub fn oom_in(forecast: Forecast) -> String {
    match forecast {
        Forecast::Unknown => "...".to_owned(),
        Forecast::NoGrowth => "-".to_owned(),
        Forecast::Far => "far".to_owned(),
        Forecast::Unsure => "?".to_owned(),
        Forecast::Growing(growth) if growth.seconds < 1.0 => "now".to_owned(),
        Forecast::Growing(growth) => Duration(growth.seconds).to_string(),
    }
}
