//! Parses the output of test programs: the number of passed and failed tests, the skipped ones with
//! their reasons, and the running test.

use std::collections::BTreeMap;

/// Prefix in a Rust test's output if an installable tool is missing (`tests/common/skip.rs`;
/// libtest cannot skip a running test).
const LACKS: &str = "skipped test, lacks ";
/// Prefix if this user or this machine does not allow the test.
const REFUSED: &str = "skipped test, not allowed here: ";
/// pytest's `-rs` format: `SKIPPED [2] test_a.py:3: why`.
const OF_PYTEST: &str = "SKIPPED [";

/// Numbers of tests, as in the closing lines of cargo and pytest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub passed: u32,
    pub failed: u32,
    pub skipped: u32,
    /// Number of skipped tests by reason, if known.
    pub reasons: BTreeMap<Reason, u32>,
}

/// Reason of a skipped test.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reason {
    /// A missing, installable tool.
    Lacks(String),
    /// Any other: not allowed for this user or machine, or pytest's reason.
    Other(String),
}

impl Counts {
    /// The sum.
    pub fn plus(mut self, other: Self) -> Self {
        for (reason, number) in other.reasons {
            *self.reasons.entry(reason).or_default() += number;
        }
        Self {
            passed: self.passed + other.passed,
            failed: self.failed + other.failed,
            skipped: self.skipped + other.skipped,
            reasons: self.reasons,
        }
    }

    /// Text behind a part's name.
    pub fn note(&self) -> String {
        match (self.passed, self.failed, self.skipped) {
            (0, 0, 0) => String::new(),
            (passed, 0, 0) => format!(": {passed} tests"),
            (passed, failed, 0) => format!(": {passed} passed, {failed} failed"),
            (passed, failed, skipped) => {
                format!(": {passed} passed, {failed} failed, {skipped} skipped")
            }
        }
    }

    /// Parses a closing line: cargo's `test result: ok. 3 passed; 0 failed; ...` or pytest's `== 1
    /// failed, 3 passed in 2s ==`.
    fn of_line(line: &str) -> Option<Self> {
        if !line.starts_with("test result:") && !line.starts_with('=') {
            return None;
        }
        let mut counts = Self::default();
        let words: Vec<_> =
            line.split([' ', ',', ';', '=']).filter(|word| !word.is_empty()).collect();
        for pair in words.windows(2) {
            match (pair[0].parse::<u32>(), pair[1]) {
                (Ok(number), "passed") => counts.passed = number,
                (Ok(number), "failed" | "error" | "errors") => counts.failed += number,
                (Ok(number), "skipped" | "ignored") => counts.skipped += number,
                _ => {}
            }
        }
        Some(counts)
    }
}

/// Output of a program so far.
#[derive(Debug, Default)]
pub struct Said {
    counts: Counts,
    /// Tests that have begun; if a program runs several at once, the slow ones.
    running: Vec<String>,
    /// Tests skipped since the last closing line, which counts them as passed.
    uncounted: u32,
    /// Whether the running test has reported that it is skipped.
    told: bool,
    /// The last non-blank line.
    last: String,
    /// An incomplete line.
    rest: Vec<u8>,
}

impl Said {
    /// Takes in output; returns the lines complete by now.
    pub fn hear(&mut self, bytes: &[u8]) -> String {
        self.rest.extend_from_slice(bytes);
        let end = self.rest.iter().rposition(|&byte| byte == b'\n').map_or(0, |at| at + 1);
        let lines: Vec<u8> = self.rest.drain(..end).collect();
        let lines = String::from_utf8_lossy(&lines).into_owned();
        lines.lines().for_each(|line| self.line(line));
        lines
    }

    /// Ends the output; returns the last line if it is incomplete.
    pub fn end(&mut self) -> String {
        let rest = std::mem::take(&mut self.rest);
        let rest = String::from_utf8_lossy(&rest).into_owned();
        self.line(&rest);
        self.counts.skipped += std::mem::take(&mut self.uncounted);
        rest
    }

    /// Number of tests by outcome.
    pub fn counts(&self) -> Counts {
        self.counts.clone()
    }

    /// The last line.
    pub fn last(&self) -> &str {
        &self.last
    }

    /// The tests that have begun and not ended, as far as the output shows.
    pub fn running(&self) -> Vec<String> {
        let mut running = self.running.clone();
        if let Some((name, "")) = verdict(&String::from_utf8_lossy(&self.rest)) {
            running.push(name.to_owned());
        }
        running
    }

    fn line(&mut self, line: &str) {
        if !line.trim().is_empty() {
            line.clone_into(&mut self.last);
        }
        if let Some(counts) = Counts::of_line(line) {
            let uncounted = std::mem::take(&mut self.uncounted);
            self.counts = self.counts().plus(Counts {
                passed: counts.passed.saturating_sub(uncounted),
                skipped: counts.skipped + uncounted,
                ..counts
            });
            self.running.clear();
        } else if let Some(name) = takes_long(line) {
            self.running.push(name.to_owned());
        } else if let Some((name, outcome)) = verdict(line) {
            self.running.retain(|running| running != name);
            self.told = false;
            if !is_outcome(outcome) {
                self.running.push(name.to_owned());
            }
        } else if is_outcome(line) {
            self.running.pop();
            self.told = false;
        }
        self.skip(line);
    }

    /// Counts a test that reports in `line` that it is skipped: behind its name, or on a line of
    /// its own.
    fn skip(&mut self, line: &str) {
        let reason = |prefix| Some(line.split_once(prefix)?.1.trim().to_owned());
        let found = reason(LACKS).map(Reason::Lacks).or_else(|| reason(REFUSED).map(Reason::Other));
        if let Some(reason) = found {
            // If tests run one after another, each counts once.
            if !(self.told && self.running.len() == 1) {
                self.told = true;
                self.uncounted += 1;
                *self.counts.reasons.entry(reason).or_default() += 1;
            }
            return;
        }
        let of_pytest = line.strip_prefix(OF_PYTEST).and_then(|rest| {
            let (number, rest) = rest.split_once("] ")?;
            Some((number.parse::<u32>().ok()?, rest.split_once(": ")?.1))
        });
        if let Some((number, reason)) = of_pytest {
            *self.counts.reasons.entry(Reason::Other(reason.to_owned())).or_default() += number;
        }
    }
}

/// The test of a libtest line, and its verdict: `test name ... ok`.
fn verdict(line: &str) -> Option<(&str, &str)> {
    let (name, outcome) = line.strip_prefix("test ")?.split_once(" ...")?;
    Some((name, outcome.trim()))
}

fn is_outcome(words: &str) -> bool {
    words == "ok" || words == "FAILED" || words.starts_with("ignored")
}

fn takes_long(line: &str) -> Option<&str> {
    line.strip_prefix("test ")?.split_once(" has been running for over ").map(|(name, _)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(text: &str) -> Said {
        let mut said = Said::default();
        // In pieces, as from a pipe.
        text.as_bytes().chunks(7).for_each(|piece| drop(said.hear(piece)));
        said
    }

    fn counts(text: &str) -> (u32, u32, u32) {
        let mut said = said(text);
        said.end();
        (said.counts().passed, said.counts().failed, said.counts().skipped)
    }

    #[test]
    fn closing_lines_are_counted() {
        assert_eq!(counts("test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured"), (3, 0, 1));
        assert_eq!(counts("test result: FAILED. 1 passed; 2 failed;\n"), (1, 2, 0));
        assert_eq!(
            counts("===== 1 failed, 12 passed, 1 error, 2 skipped in 3.2s ====="),
            (12, 2, 2)
        );
        assert_eq!(counts("99 passed; somebody prints this"), (0, 0, 0));
        assert_eq!(
            counts("test result: ok. 3 passed; 0 failed\ntest result: ok. 4 passed"),
            (7, 0, 0)
        );
    }

    #[test]
    fn a_test_that_lacks_something_counts_as_skipped_and_not_as_passed() {
        let text = "test a ... ok\n\
                    test b ... skipped test, lacks chromium\nskipped test, lacks chromium\nok\n\
                    test c ... ok\n\
                    test d ... skipped test, lacks chromium\nok\n\
                    test e ... skipped test, not allowed here: only root may\nok\n\
                    test result: ok. 5 passed; 0 failed; 0 ignored\n";
        assert_eq!(counts(text), (2, 0, 3));
        let skipped = said(text).counts().reasons;
        let lacks = Reason::Lacks("chromium".into());
        assert_eq!((skipped[&lacks], skipped.len()), (2, 2));
        assert_eq!(skipped[&Reason::Other("only root may".into())], 1);
        // A program without libtest has no closing line.
        assert_eq!(counts("skipped test, lacks chromium\n"), (0, 0, 1));
        // Several at once.
        let text = "skipped test, lacks x\nskipped test, lacks x\ntest a ... ok\ntest b ... ok\n\
                    test result: ok. 2 passed; 0 failed";
        assert_eq!(counts(text), (0, 0, 2));
    }

    #[test]
    fn pytest_s_skips_are_counted_by_reason() {
        let text = "SKIPPED [2] test_a.py:43: no such thing: here\n\
                    SKIPPED [1] test_b.py:4: no such thing: here\n\
                    == 5 passed, 3 skipped in 1.2s ==\n";
        assert_eq!(counts(text), (5, 0, 3));
        assert_eq!(said(text).counts().reasons[&Reason::Other("no such thing: here".into())], 3);
    }

    #[test]
    fn the_test_that_runs_is_known() {
        let running = |text: &str| said(text).running();
        assert_eq!(running("\nrunning 2 tests\ntest a ... ok\ntest b::c ... "), ["b::c"]);
        assert_eq!(running("test a ... ok\ntest b ...\nit says something\n"), ["b"]);
        assert_eq!(running("test a ...\nit says something\ntest a ... ok\n"), [""; 0]);
        assert_eq!(running("test a ... it says something\nok\n"), [""; 0]);
        let long = "test a has been running for over 60 seconds\n\
                    test b has been running for over 60 seconds\ntest a ... ok\n";
        assert_eq!(running(long), ["b"]);
        assert_eq!(running("test a ... ok\ntest result: ok. 1 passed; 0 failed\n"), [""; 0]);
    }
}
