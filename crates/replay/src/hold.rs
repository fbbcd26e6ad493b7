//! The bar of hold: the memory that Gruyère may hold at the peak beyond torch's allocators, by
//! program, and the table of results.
//!
//! `crates/replay/tests/hold.rs` applies it on the instant clock, `crates/replay/tests/lagging.rs`
//! with a device that lags behind its host; `crates/replay/examples/hold.rs` prints the tables.

#![deny(unsafe_code)]
#![deny(clippy::unwrap_used)]

use crate::bench::{BenchError, Contender, ample, on_clock};
use crate::clock::Clock;
use crate::trace::Trace;
use gruyere::record::watch::median;
use std::fmt;

/// Unit of device memory, bytes.
pub const PAGE: u64 = 2 << 20;

/// The settings with memory in long spans of addresses.
pub const SPANS: [&str; 2] = ["backing:pool", "backing:fixed"];

/// The bar by kind of program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bar {
    /// A trace: torch's default and a page, and expandable segments and the larger of 2% and two
    /// pages.
    Trace,
    /// A trace on a lagging device: torch's default on the same clock, and a page.
    Lagging,
    /// Random blocks: torch's default and the larger of 2% and a page per stream.
    Drawn,
    /// Minimal programs: torch's default.
    Bottom,
    /// In spans, which never move: torch's default and the larger of 10% and the smallest span of
    /// the driver's pools. The aim is 2% or a page per stream (docs/decisions/placement.md lists
    /// the programs that miss it).
    Span,
}

/// Smallest span of the driver's pools (bytes).
const SPAN: u64 = 32 << 20;

impl Bar {
    /// Allowed bytes, given those of torch's allocators.
    pub fn allowed(self, torch: u64, expandable: u64, streams: u64) -> u64 {
        let more = |held: u64, pages: u64| held + (held / 50).max(pages * PAGE);
        match self {
            Self::Trace => (torch + PAGE).min(more(expandable, 2)),
            Self::Lagging => torch + PAGE,
            Self::Drawn => more(torch, streams),
            Self::Span => (torch + torch / 100 * 10).next_multiple_of(PAGE).max(SPAN),
            Self::Bottom => torch,
        }
    }
}

/// Peaks of held memory of a program, bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Held {
    /// The program's name.
    pub program: String,
    /// The peak of live.
    pub live: u64,
    /// Of torch's default allocator.
    pub torch: u64,
    /// Of expandable segments.
    pub expandable: u64,
    /// Of Gruyère, by configuration; `None`: out of memory with room to spare.
    pub ours: Vec<Option<u64>>,
    /// The bar for Gruyère.
    pub allowed: u64,
}

impl Held {
    /// Runs torch's allocators, and Gruyère with each of `confs`, over `trace` on `clock`.
    ///
    /// # Errors
    /// If an allocator's setup fails or a replay breaks off.
    pub fn of(trace: &Trace, clock: Clock, confs: &[&str], bar: Bar) -> Result<Self, BenchError> {
        let room = ample(trace);
        // `None`: out of memory with room to spare.
        let at_peak = |contender: Contender| {
            let lag = on_clock(trace, &contender, clock)?;
            Ok::<_, BenchError>(lag.completed.then_some(lag.peak_reserved))
        };
        let model = |contender| at_peak(contender).map(|held| held.unwrap_or(room));
        let (torch, expandable) = (model(Contender::Torch)?, model(Contender::Expandable)?);
        let ours = |conf: &&str| at_peak(Contender::Gruyere((*conf).to_owned()));
        Ok(Self {
            program: trace.name.clone(),
            live: trace.peak_live,
            torch,
            expandable,
            ours: confs.iter().map(ours).collect::<Result<_, _>>()?,
            allowed: bar.allowed(torch, expandable, trace.streams.len() as u64),
        })
    }

    /// Its breach of the bar, in a line; `None` if there is none.
    pub fn breach(&self) -> Option<String> {
        let excess = self.excess()?;
        let Some(most) = self.ours.iter().copied().collect::<Option<Vec<_>>>() else {
            return Some(format!("{}: out of memory with room to spare", self.program));
        };
        let most = most.into_iter().max().unwrap_or(0);
        let [most, allowed, excess] = [most, self.allowed, excess].map(mib);
        Some(format!("{}: {most} MiB held, {allowed} allowed, {excess} beyond", self.program))
    }

    /// Bytes beyond the bar of the configuration that holds the most; `None` if all keep it.
    pub fn excess(&self) -> Option<u64> {
        let most = self.ours.iter().map(|held| held.unwrap_or(u64::MAX)).max()?;
        most.checked_sub(self.allowed).filter(|&excess| excess > 0)
    }
}

/// Held memory of several programs, against the bar.
#[derive(Clone, Debug)]
pub struct Table {
    bar: Bar,
    confs: Vec<String>,
    rows: Vec<Held>,
}

impl Table {
    /// Runs all of `traces` on the instant clock.
    ///
    /// # Errors
    /// As [`Held::of`].
    pub fn of<'a>(
        traces: impl IntoIterator<Item = &'a Trace>,
        confs: &[&str],
        bar: Bar,
    ) -> Result<Self, BenchError> {
        Self::on(Clock::INSTANT, traces, confs, bar)
    }

    /// Runs all of `traces` on `clock`.
    ///
    /// # Errors
    /// As [`Held::of`].
    pub fn on<'a>(
        clock: Clock,
        traces: impl IntoIterator<Item = &'a Trace>,
        confs: &[&str],
        bar: Bar,
    ) -> Result<Self, BenchError> {
        let rows = traces.into_iter().map(|trace| Held::of(trace, clock, confs, bar));
        Ok(Self {
            bar,
            confs: confs.iter().map(|&conf| conf.to_owned()).collect(),
            rows: rows.collect::<Result<_, _>>()?,
        })
    }

    /// The programs.
    pub fn rows(&self) -> &[Held] {
        &self.rows
    }

    /// Breaches of the bar, one line each.
    pub fn breaches(&self) -> Vec<String> {
        let mut told: Vec<String> = self.rows.iter().filter_map(Held::breach).collect();
        if self.bar == Bar::Trace
            && let Some(median) = self.median()
            && median > 1.0
        {
            told.push(format!("the median of ours to expandable segments': {median:.4}, above 1"));
        }
        told
    }

    /// Held memory of the first configuration over that of expandable segments, median of all
    /// programs.
    pub fn median(&self) -> Option<f64> {
        let ratio = |row: &Held| {
            let ours = (*row.ours.first()?)?;
            Some(ours as f64 / row.expandable as f64)
        };
        let mut ratios: Vec<f64> = self.rows.iter().filter_map(ratio).collect();
        median(&mut ratios)
    }
}

fn mib(bytes: u64) -> String {
    format!("{:.1}", bytes as f64 / f64::from(1 << 20))
}

impl fmt::Display for Table {
    /// Figures in MiB; `over` is the excess over the bar.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:<28}{:>9}{:>9}{:>9}", "MiB held at the peak", "live", "torch", "expand.")?;
        for conf in &self.confs {
            let name = conf.rsplit(':').next().filter(|name| !name.is_empty()).unwrap_or("ours");
            write!(f, "{name:>9}")?;
        }
        writeln!(f, "{:>9}", "over")?;
        for row in &self.rows {
            write!(f, "{:<28}", row.program)?;
            for bytes in [row.live, row.torch, row.expandable] {
                write!(f, "{:>9}", mib(bytes))?;
            }
            for held in &row.ours {
                write!(f, "{:>9}", held.map_or("none".to_owned(), mib))?;
            }
            writeln!(f, "{:>9}", row.excess().map_or(String::new(), mib))?;
        }
        if self.bar == Bar::Trace
            && let Some(median) = self.median()
        {
            writeln!(f, "the median of ours to expandable segments': {median:.4}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bar_of_a_trace_is_the_lower_of_its_two() {
        let bar = |torch, expandable| Bar::Trace.allowed(torch * PAGE, expandable * PAGE, 1);
        assert_eq!(bar(100, 100), 101 * PAGE);
        assert_eq!(bar(100, 90), 92 * PAGE);
        assert_eq!(bar(2000, 1000), 1020 * PAGE);
        assert_eq!(Bar::Lagging.allowed(100 * PAGE, PAGE, 1), 101 * PAGE);
        assert_eq!(Bar::Drawn.allowed(100 * PAGE, 0, 16), 116 * PAGE);
        assert_eq!(Bar::Drawn.allowed(1000 * PAGE, 0, 16), 1020 * PAGE);
        assert_eq!(Bar::Bottom.allowed(PAGE, 0, 1), PAGE);
    }

    #[test]
    fn a_row_beyond_the_bar_is_named_with_its_excess_and_so_is_the_median() {
        let row = |program: &str, ours| Held {
            program: program.to_owned(),
            live: PAGE,
            torch: 4 * PAGE,
            expandable: 3 * PAGE,
            ours: vec![ours],
            allowed: 5 * PAGE,
        };
        let table = |rows| Table { bar: Bar::Trace, confs: vec![String::new()], rows };
        let kept = table(vec![row("kept", Some(3 * PAGE)), row("less", Some(2 * PAGE))]);
        assert_eq!(kept.breaches(), Vec::<String>::new());
        let broken = table(vec![row("broken", Some(6 * PAGE)), row("none", None)]);
        assert_eq!(
            broken.breaches(),
            [
                "broken: 12.0 MiB held, 10.0 allowed, 2.0 beyond",
                "none: out of memory with room to spare",
                "the median of ours to expandable segments': 2.0000, above 1",
            ]
        );
        assert!(broken.to_string().contains("broken"), "{broken}");
    }
}
