//! The doctor's findings, and their text.
#![deny(unsafe_code, clippy::unwrap_used)]

use std::fmt::Write as _;

use gruyere_record::plain;
use serde::Serialize;

use crate::wrap::wrap;

/// Severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// As it should be.
    Ok,
    /// Worth knowing.
    Note,
    /// A fixable loss.
    Warning,
    /// Gruyère cannot work.
    Problem,
}

impl Level {
    fn word(self) -> &'static str {
        match self {
            Level::Ok => "ok",
            Level::Note => "note",
            Level::Warning => "warning",
            Level::Problem => "problem",
        }
    }
}

/// One finding.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Subject of the finding.
    pub area: &'static str,
    /// Its severity.
    pub level: Level,
    /// One line.
    pub text: String,
    /// The remedy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
}

/// Columns of a level's word.
const WORD: usize = 8;

/// All findings, in order.
#[derive(Debug, Default)]
pub struct Findings(pub Vec<Finding>);

impl Findings {
    fn add(&mut self, area: &'static str, level: Level, text: &str, remedy: Option<&str>) {
        self.0.push(Finding { area, level, text: plain(text), remedy: remedy.map(plain) });
    }

    /// Adds a finding: as it should be.
    pub fn ok(&mut self, area: &'static str, text: impl AsRef<str>) {
        self.add(area, Level::Ok, text.as_ref(), None);
    }

    /// Adds a finding: worth knowing.
    pub fn note(&mut self, area: &'static str, text: impl AsRef<str>) {
        self.add(area, Level::Note, text.as_ref(), None);
    }

    /// Adds a finding: a fixable loss.
    pub fn warning(&mut self, area: &'static str, text: impl AsRef<str>, remedy: impl AsRef<str>) {
        self.add(area, Level::Warning, text.as_ref(), Some(remedy.as_ref()));
    }

    /// Adds a finding: Gruyère cannot work.
    pub fn problem(&mut self, area: &'static str, text: impl AsRef<str>, remedy: impl AsRef<str>) {
        self.add(area, Level::Problem, text.as_ref(), Some(remedy.as_ref()));
    }

    /// Number of findings of a level.
    pub fn count(&self, level: Level) -> usize {
        self.0.iter().filter(|finding| finding.level == level).count()
    }

    /// The findings as text for people, on a line each if `columns` is `None`.
    pub fn text(&self, columns: Option<usize>) -> String {
        let mut out = String::new();
        let width = self.0.iter().map(|finding| finding.area.len()).max().unwrap_or(0);
        let below = " ".repeat(WORD + 1 + width + 2);
        let fitted = |text: &str, indent: &str| match columns {
            Some(columns) => wrap(text, columns.saturating_sub(below.len()), indent),
            None => vec![text.to_owned()],
        };
        for Finding { area, level, text, remedy } in &self.0 {
            let head = format!("{:<WORD$} {area:<width$}  ", level.word());
            let remedy = remedy.iter().flat_map(|remedy| fitted(&format!("-> {remedy}"), "   "));
            for (at, line) in fitted(text, "").into_iter().chain(remedy).enumerate() {
                // Writing to a String cannot fail.
                let _ = writeln!(out, "{}{line}", if at == 0 { &head } else { &below });
            }
        }
        let count = |level, one: &str, many: &str| match self.count(level) {
            0 => format!("no {many}"),
            1 => format!("1 {one}"),
            number => format!("{number} {many}"),
        };
        let problems = count(Level::Problem, "problem", "problems");
        let _ = writeln!(out, "{problems}, {}", count(Level::Warning, "warning", "warnings"));
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_of_others_do_not_reach_the_terminal() {
        let mut findings = Findings::default();
        findings.problem("x", "a\u{1b}[2Jb\nc", "d\re");
        let text = findings.text(None);
        assert!(
            text.contains("a [2Jb c")
                && text.contains("-> d e")
                && text.ends_with("1 problem, no warnings\n")
        );
        assert!(text.chars().all(|character| character == '\n' || !character.is_control()));
    }

    #[test]
    fn on_a_terminal_a_finding_fits_and_loses_no_word() {
        let mut findings = Findings::default();
        findings.warning("shared memory", "64 MiB ".repeat(20).trim(), "give it more ".repeat(9));
        let (line, folded) = (findings.text(None), findings.text(Some(60)));
        assert!(folded.lines().all(|line| line.chars().count() <= 60), "{folded}");
        let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(words(&folded), words(&line));
    }
}
