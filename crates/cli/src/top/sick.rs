//! The device that runs out of memory soonest, or ran out last, and the sentence about it at the
//! top.

use gruyere_record::DeviceGauge;
use gruyere_record::conclusion::{Accused, Cause};
use gruyere_record::sites::{Growth, Line};
use gruyere_record::watch::{self, Duration, Forecast, Unit};

use super::app::{Key, Row};
use super::verdict::{Verdict, place};
use crate::candidates;
use crate::ending::Ending;
use crate::follow::Life;

/// Another device replaces the soonest only if its time is shorter by this factor: forecasts of
/// ranks that leak alike change places at every sample.
const SOONER: f64 = 0.8;

/// Facts about a device besides its numbers.
#[derive(Clone, Copy)]
pub struct Told<'a> {
    /// The lines that hold most and grow most.
    pub lines: &'a [Line],
    /// Verdict on its memory.
    pub verdict: &'a Verdict,
}

/// Growth of a row whose memory will run out.
pub fn growth(row: &Row) -> Option<watch::Growth> {
    match row.forecast {
        Forecast::Growing(growth) if row.runs() => Some(growth),
        _ => None,
    }
}

/// The row that runs out soonest; `before`: the soonest at the last sample.
pub fn soonest<'a>(rows: &'a [Row], before: Option<&Key>) -> Option<&'a Row> {
    let seconds = |row: &Row| growth(row).map(|growth| growth.seconds);
    let growing = || rows.iter().filter_map(|row| Some((seconds(row)?, row)));
    let first = growing().min_by(|a, b| a.0.total_cmp(&b.0))?;
    let kept = growing().find(|(_, row)| Some(&row.key) == before);
    match kept {
        Some((seconds, row)) if first.0 >= SOONER * seconds => Some(row),
        _ => Some(first.1),
    }
}

/// The sentence: which device runs out, when, and which line keeps the memory.
pub fn sentence(row: &Row, rows: &[Row], told: Told<'_>) -> Option<String> {
    let growth = growth(row)?;
    let is_of_many = rows.iter().filter(|other| other.key.0 == row.key.0).count() > 1;
    let gpu = if is_of_many { format!(" GPU {}", row.key.1) } else { String::new() };
    let when = match growth.seconds {
        ..1.0 => "now".to_owned(),
        seconds => format!("in {}", Duration(seconds)),
    };
    let others = rows.iter().filter(|other| self::growth(other).is_some()).count() - 1;
    let others = match others {
        0 => String::new(),
        1 => "; 1 other grows too".to_owned(),
        _ => format!("; {others} others grow too"),
    };
    let cause = cause(&growth, told);
    Some(format!("{}{gpu} runs out {when}: {cause}{others}", name(row)))
}

/// What grew on a device, kept for when it has run out of memory and stopped growing.
#[derive(Clone, Debug)]
pub struct Grew {
    key: Key,
    out_of_memories: u64,
    cause: String,
}

/// What grows on a device.
pub fn grew(row: &Row, told: Told<'_>) -> Option<Grew> {
    let out_of_memories = row.snapshot.gauge(DeviceGauge::OutOfMemories);
    Some(Grew { key: row.key.clone(), out_of_memories, cause: cause(&growth(row)?, told) })
}

impl Grew {
    /// The sentence about a row that has run out.
    pub fn refusal(&self, row: &Row) -> String {
        format!("{} ran out of memory: {}", name(row), self.cause)
    }
}

/// The row that grew before, still runs, and has been refused memory since.
pub fn refused<'a>(rows: &'a [Row], grew: Option<&Grew>) -> Option<&'a Row> {
    let grew = grew?;
    let row = rows.iter().find(|row| row.key == grew.key && row.runs())?;
    (row.snapshot.gauge(DeviceGauge::OutOfMemories) > grew.out_of_memories).then_some(row)
}

/// The row of the process that died last, if there is more to say than that it ended; of a job's
/// ranks, the first that ran out of memory, since the others die of it. Once a process has started
/// since, the screen is that one's.
pub fn last_dead(rows: &[Row]) -> Option<&Row> {
    let running = rows.iter().filter(|row| row.runs());
    let latest = running.map(|row| row.process.created_at()).max();
    let told = |row: &&Row| {
        row.ending.as_ref().is_some_and(|end| {
            (end.ran_out || !end.says.is_empty()) && latest.is_none_or(|latest| latest < end.since)
        })
    };
    let since = |row: &&Row| row.ending.as_ref().map(|ending| ending.since);
    let last = rows.iter().filter(told).max_by_key(since)?;
    let is_it = |row: &&Row| {
        row.process.is_of_job(&last.process) && row.ending.as_ref().is_some_and(|end| end.ran_out)
    };
    Some(rows.iter().filter(told).filter(is_it).min_by_key(since).unwrap_or(last))
}

/// The sentence about a process that died: how it ended, and the verdict on its memory.
pub fn epitaph(row: &Row, ending: &Ending) -> Option<String> {
    let how = match (ending.ran_out, row.life) {
        (true, _) => "ran out of memory",
        (false, Life::Killed) => "died without a clean exit",
        _ => return None,
    };
    let (name, age) = (name(row), candidates::age(ending.since));
    let says = ending.says.trim_end_matches('.');
    let says = if says.is_empty() { String::new() } else { format!(": {says}") };
    Some(format!("{name} {how} {age} ago{says}"))
}

/// Remedies, and where to find more.
pub fn way_on(row: &Row, ending: &Ending) -> Vec<String> {
    let pid = row.process.pid;
    let look = match (&ending.page, &ending.record) {
        (Some(page), Some(_)) => format!("More: gruyere post {pid}; the page: {}", page.display()),
        (Some(page), None) => format!("More: the page {}", page.display()),
        (None, Some(_)) => format!("More: gruyere post {pid}; gruyere post {pid} --html: a page"),
        (None, None) => {
            "It left no record; dump_dir:FOLDER in GRUYERE_CONF keeps a page".to_owned()
        }
    };
    ending.remedy.iter().cloned().chain([look]).collect()
}

/// Name of the process: by rank if it has a rank.
pub fn name(row: &Row) -> String {
    match row.process.rank {
        Some(rank) => format!("rank {rank}"),
        None => format!("process {}", row.process.pid),
    }
}

/// Names a line only if it and the other growing lines keep at least half of the device's growth:
/// else the growth is elsewhere, and the line only stands beside it. The line accused by the
/// conclusion precedes the largest line: it may be the caller's.
fn cause(growth: &watch::Growth, Told { lines, verdict }: Told<'_>) -> String {
    let a_step = growth
        .steps
        .filter(|steps| *steps > 0.0)
        .map(|steps| growth.bytes_per_second * growth.seconds / steps);
    let mut growing: Vec<(&Line, Growth)> =
        lines.iter().filter_map(|line| Some((line, line.growth?))).collect();
    growing.sort_by_key(|(_, growth)| std::cmp::Reverse(growth.bytes_a_step));
    let kept = growing.iter().fold(0u64, |sum, (_, one)| sum.saturating_add(one.bytes_a_step));
    let explains = |bytes: u64| a_step.is_none_or(|a_step| bytes as f64 >= a_step / 2.0);
    if let Some(Accused { line, bytes_a_step, more }) = &verdict.accused
        && explains(*bytes_a_step)
    {
        let what = match verdict.cause {
            Cause::AutogradGraphs | Cause::NoGrad => "graphs, ",
            Cause::Hooks => "outputs of modules, ",
            _ => "",
        };
        let line = line.to_string();
        return kept_by(place(&line), *more, &format!("{what}{}", short(*bytes_a_step as f64)));
    }
    match growing.first().filter(|_| kept > 0 && explains(kept)) {
        Some((line, one)) if one.bytes_a_step >= kept / 2 => {
            kept_by(place(&line.name), 0, &short(one.bytes_a_step as f64))
        }
        Some((line, _)) => kept_by(place(&line.name), growing.len() - 1, &short(kept as f64)),
        None => match a_step {
            Some(a_step) => format!("it grows by {} a step", short(a_step)),
            None => format!("it grows by {} a second", short(growth.bytes_per_second)),
        },
    }
}

fn kept_by(place: &str, more: usize, what: &str) -> String {
    match more {
        0 => format!("{place} keeps {what} a step"),
        1 => format!("{place} and 1 more line keep {what} a step"),
        more => format!("{place} and {more} more lines keep {what} a step"),
    }
}

/// Bytes without meaningless zeros: 62.5 MiB, 64 MiB.
fn short(bytes: f64) -> String {
    let text = Unit::Bytes.show(bytes);
    match text.split_once(' ') {
        Some((number, unit)) if number.contains('.') => {
            format!("{} {unit}", number.trim_end_matches('0').trim_end_matches('.'))
        }
        _ => text,
    }
}

#[cfg(test)]
mod tests {
    use gruyere_record::sites::Frame;

    use super::*;

    const MIB: u64 = 1 << 20;

    fn line(name: &str, bytes_a_step: u64) -> Line {
        let growth = Some(Growth { bytes_a_step, since: 3, bytes: 9 * bytes_a_step });
        Line { name: name.to_owned(), growth, ..Line::default() }
    }

    /// A step per second, each of which leaks `bytes`.
    fn leak(bytes: u64) -> watch::Growth {
        watch::Growth { seconds: 60.0, bytes_per_second: bytes as f64, steps: Some(60.0) }
    }

    /// Without a verdict.
    fn caused(growth: &watch::Growth, lines: &[Line]) -> String {
        cause(growth, Told { lines, verdict: &Verdict::default() })
    }

    #[test]
    fn the_line_that_the_conclusion_accuses_goes_before_those_of_the_layers_that_it_called() {
        let lines = [line("layers.py:9 in forward", 40 * MIB), line("layers.py:12", 24 * MIB)];
        let frame = |line| Frame { file: "/a/train.py".into(), function: "step".into(), line };
        let verdict = |cause, bytes_a_step, more| Verdict {
            cause,
            accused: Some(Accused { line: frame(21), bytes_a_step, more }),
            ..Verdict::default()
        };
        let said = |verdict: &Verdict| cause(&leak(64 * MIB), Told { lines: &lines, verdict });
        let graphs = verdict(Cause::AutogradGraphs, 64 * MIB, 0);
        assert_eq!(said(&graphs), "train.py:21 keeps graphs, 64 MiB a step");
        let leak = verdict(Cause::Leak, 64 * MIB, 1);
        assert_eq!(said(&leak), "train.py:21 and 1 more line keep 64 MiB a step");
        // A line that explains only a little of the growth is not accused.
        let little = verdict(Cause::Leak, MIB, 0);
        assert_eq!(said(&little), "layers.py:9 keeps 40 MiB a step");
    }

    #[test]
    fn the_line_that_keeps_most_is_named_with_what_a_step_leaves() {
        let lines = [line("b.py:2 in g", MIB), line("a.py:28 in f", 62 * MIB + MIB / 2)];
        assert_eq!(caused(&leak(64 * MIB), &lines), "a.py:28 keeps 62.5 MiB a step");
    }

    #[test]
    fn lines_that_share_the_growth_are_told_together() {
        let lines = [line("a.py:1 in f", MIB), line("a.py:2 in f", MIB), line("a.py:3", 2 * MIB)];
        assert_eq!(caused(&leak(4 * MIB), &lines), "a.py:3 keeps 2 MiB a step");
        let lines = [line("a.py:1 in f", MIB), line("a.py:2", MIB), line("a.py:3", MIB)];
        assert_eq!(caused(&leak(3 * MIB), &lines), "a.py:1 and 2 more lines keep 3 MiB a step");
    }

    #[test]
    fn a_line_that_keeps_a_little_is_not_blamed_for_growth_that_is_elsewhere() {
        let lines = [line("a.py:1 in f", MIB)];
        assert_eq!(caused(&leak(64 * MIB), &lines), "it grows by 64 MiB a step");
        assert_eq!(caused(&leak(64 * MIB), &[]), "it grows by 64 MiB a step");
        let unmarked = watch::Growth { steps: None, ..leak(64 * MIB) };
        assert_eq!(caused(&unmarked, &[]), "it grows by 64 MiB a second");
    }
}
