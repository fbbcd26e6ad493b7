//! The doctor's findings, and their text.
#![deny(unsafe_code, clippy::unwrap_used)]

use std::fmt::Write as _;

use gruyere_record::plain;
use serde::Serialize;

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

    /// The findings as text for people.
    pub fn text(&self) -> String {
        let mut out = String::new();
        let width = self.0.iter().map(|finding| finding.area.len()).max().unwrap_or(0);
        for Finding { area, level, text, remedy } in &self.0 {
            // Writing to a String cannot fail.
            let _ = writeln!(out, "{:<8} {area:<width$}  {text}", level.word());
            if let Some(remedy) = remedy {
                let _ = writeln!(out, "{:<8} {:<width$}  -> {remedy}", "", "");
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
        let text = findings.text();
        assert!(
            text.contains("a [2Jb c")
                && text.contains("-> d e")
                && text.ends_with("1 problem, no warnings\n")
        );
        assert!(text.chars().all(|character| character == '\n' || !character.is_control()));
    }
}
