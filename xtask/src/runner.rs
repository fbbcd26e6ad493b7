//! Runs parts one after another, counts their tests and sums up.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// How a part went.
pub enum Outcome {
    /// The whole part passed.
    Passed(Counts),
    /// It could not be run, for this reason.
    Skipped(String),
    /// Something failed.
    Failed(Counts, String),
}

impl Outcome {
    /// The outcome of two halves of a part.
    pub fn and(self, other: Self) -> Self {
        use Outcome::{Failed, Passed, Skipped};
        match (self, other) {
            (Passed(one), Passed(two)) => Passed(one.plus(two)),
            (Failed(one, reason), Failed(two, further)) => {
                Failed(one.plus(two), format!("{reason}; {further}"))
            }
            (Failed(one, reason), Passed(two)) | (Passed(one), Failed(two, reason)) => {
                Failed(one.plus(two), reason)
            }
            (Failed(counts, reason), Skipped(_)) | (Skipped(_), Failed(counts, reason)) => {
                Failed(counts, reason)
            }
            (Skipped(reason), Passed(_) | Skipped(_)) | (Passed(_), Skipped(reason)) => {
                Skipped(reason)
            }
        }
    }
}

/// Tests, as cargo's and pytest's closing lines count them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    passed: u32,
    failed: u32,
}

/// A part of the test run.
pub struct Part {
    /// Its heading.
    pub name: &'static str,
    /// What it does.
    pub run: Box<dyn Fn() -> Outcome>,
    /// Whether it takes too long to be waited for, so that only a run of all parts has it.
    pub only_with_all: bool,
}

/// Which parts are to be run.
#[derive(Clone, Copy)]
pub enum Chosen<'a> {
    /// The parts that one can wait for.
    Quick,
    /// All parts.
    All,
    /// The parts whose name contains this.
    Named(&'a str),
}

impl Chosen<'_> {
    fn has(self, part: &Part) -> bool {
        match self {
            Chosen::Quick => !part.only_with_all,
            Chosen::All => true,
            Chosen::Named(name) => part.name.contains(name),
        }
    }
}

/// What a part's exit code means if it is this one: it could not be run, and its last line says why
/// (automake's custom).
const SKIPPED: i32 = 77;

/// Runs the chosen parts, and then `last`, whatever they are; fails at the end if one of them did.
/// Skipping is failing where CI is set.
pub fn run(
    parts: &[Part],
    choice: Chosen<'_>,
    last: (&'static str, impl FnOnce() -> Outcome),
) -> Result<(), String> {
    let (chosen, left): (Vec<_>, Vec<_>) = parts.iter().partition(|part| choice.has(part));
    if chosen.is_empty() {
        let names: Vec<_> = parts.iter().map(|part| part.name).collect();
        return Err(format!("no such part; the parts are: {}", names.join(", ")));
    }
    let mut results = Vec::new();
    for (number, part) in chosen.iter().enumerate() {
        println!("\n=== {}/{}: {} ===", number + 1, chosen.len(), part.name);
        let start = Instant::now();
        let outcome = (part.run)();
        results.push((part.name, outcome, start.elapsed()));
    }
    let start = Instant::now();
    results.push((last.0, last.1(), start.elapsed()));
    let done = sum_up(&results, std::env::var("CI").is_ok_and(|value| value == "true"));
    if !left.is_empty() && matches!(choice, Chosen::Quick) {
        let names: Vec<_> = left.iter().map(|part| part.name).collect();
        println!("left to cargo xtask test --all: {}", names.join(", "));
    }
    done
}

fn sum_up(results: &[(&str, Outcome, Duration)], ci: bool) -> Result<(), String> {
    println!("\n=== summary ===");
    let mut total = Counts::default();
    let mut bad = Vec::new();
    for (name, outcome, took) in results {
        let (word, note) = match outcome {
            Outcome::Passed(counts) => {
                total = total.plus(*counts);
                ("ok", counts.note())
            }
            Outcome::Skipped(reason) => {
                if ci {
                    bad.push(format!("{name} (skipped, which CI does not allow)"));
                }
                ("SKIPPED", format!(": {reason}"))
            }
            Outcome::Failed(counts, reason) => {
                total = total.plus(*counts);
                bad.push((*name).to_owned());
                ("FAILED", format!("{}: {reason}", counts.note()))
            }
        };
        println!("{word:>8}  {name} [{:.1} s]{note}", took.as_secs_f64());
    }
    let took: Duration = results.iter().map(|(.., took)| took).sum();
    println!(
        "{} passed, {} failed, {:.1} minutes",
        total.passed,
        total.failed,
        took.as_secs_f64() / 60.0
    );
    if bad.is_empty() { Ok(()) } else { Err(format!("failed: {}", bad.join(", "))) }
}

impl Counts {
    /// How many passed.
    #[cfg(test)]
    pub fn passed(self) -> u32 {
        self.passed
    }

    /// The sum.
    pub fn plus(self, other: Self) -> Self {
        Self { passed: self.passed + other.passed, failed: self.failed + other.failed }
    }

    fn note(self) -> String {
        match self {
            Self { passed: 0, failed: 0 } => String::new(),
            Self { passed, failed: 0 } => format!(": {passed} tests"),
            Self { passed, failed } => format!(": {passed} passed, {failed} failed"),
        }
    }

    /// Reads a closing line: cargo's `test result: ok. 3 passed; 0 failed; ...` or pytest's
    /// `== 1 failed, 3 passed in 2s ==`.
    pub fn of_line(line: &str) -> Self {
        let mut counts = Self::default();
        if !line.starts_with("test result:") && !line.starts_with('=') {
            return counts;
        }
        let words: Vec<_> =
            line.split([' ', ',', ';', '=']).filter(|word| !word.is_empty()).collect();
        for pair in words.windows(2) {
            match (pair[0].parse(), pair[1]) {
                (Ok(number), "passed") => counts.passed = number,
                (Ok(number), "failed" | "error" | "errors") => counts.failed += number,
                _ => {}
            }
        }
        counts
    }
}

/// Runs a command with no input, showing its output as it comes.
pub fn command(command: &mut Command) -> Outcome {
    let mut counts = Counts::default();
    let mut last = String::new();
    let status =
        command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().and_then(|mut child| {
            if let Some(stdout) = child.stdout.take() {
                for line in BufReader::new(stdout).split(b'\n') {
                    let line = String::from_utf8_lossy(&line?).into_owned();
                    println!("{line}");
                    counts = counts.plus(Counts::of_line(&line));
                    if !line.trim().is_empty() {
                        last = line;
                    }
                }
            }
            child.wait()
        });
    match status {
        Ok(status) if status.success() => Outcome::Passed(counts),
        Ok(status) if status.code() == Some(SKIPPED) => Outcome::Skipped(last),
        Ok(status) => Outcome::Failed(
            counts,
            format!("{} ended with {status}", command.get_program().to_string_lossy()),
        ),
        Err(error) => {
            Outcome::Failed(counts, format!("{}: {error}", command.get_program().to_string_lossy()))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Outcome {
        command(Command::new("sh").args(["-c", script]))
    }

    #[test]
    fn closing_lines_are_counted() {
        let counts = |line| Counts::of_line(line);
        assert_eq!(
            counts("test result: ok. 3 passed; 0 failed; 1 ignored"),
            Counts { passed: 3, failed: 0 }
        );
        assert_eq!(
            counts("test result: FAILED. 1 passed; 2 failed;"),
            Counts { passed: 1, failed: 2 }
        );
        assert_eq!(
            counts("===== 1 failed, 12 passed, 1 error in 3.2s ====="),
            Counts { passed: 12, failed: 2 }
        );
        assert_eq!(counts("99 passed; somebody prints this"), Counts::default());
    }

    #[test]
    fn a_part_passes_fails_or_says_why_it_was_skipped() {
        assert!(matches!(
            shell("echo 'test result: ok. 2 passed; 0 failed'"),
            Outcome::Passed(Counts { passed: 2, failed: 0 })
        ));
        assert!(matches!(shell("exit 3"), Outcome::Failed(..)));
        assert!(
            matches!(shell("echo no registry; exit 77"), Outcome::Skipped(reason) if reason == "no \
                registry")
        );
        assert!(matches!(command(&mut Command::new("/nowhere/at/all")), Outcome::Failed(..)));
    }

    #[test]
    fn one_failed_part_fails_the_run_and_skipping_fails_only_in_ci() {
        let took = Duration::from_secs(1);
        let passed = || ("a", Outcome::Passed(Counts::default()), took);
        let skipped = || ("b", Outcome::Skipped("no registry".into()), took);
        let failed = || ("c", Outcome::Failed(Counts::default(), "why".into()), took);
        assert_eq!(sum_up(&[passed(), skipped()], false), Ok(()));
        assert!(sum_up(&[passed(), skipped()], true).unwrap_err().contains('b'));
        assert!(sum_up(&[failed(), passed()], false).unwrap_err().contains('c'));
    }

    #[test]
    fn the_parts_after_a_failed_one_still_run() {
        let ran = std::rc::Rc::new(std::cell::Cell::new(0));
        let failed = || Outcome::Failed(Counts::default(), "why".into());
        let part = |name, good: bool| {
            let ran = ran.clone();
            let run = move || {
                ran.set(ran.get() + 1);
                if good { Outcome::Passed(Counts::default()) } else { failed() }
            };
            Part { name, run: Box::new(run), only_with_all: name == "slow" }
        };
        let last = |good| {
            ("last", move || if good { Outcome::Passed(Counts::default()) } else { failed() })
        };
        assert!(run(&[part("one", false), part("two", true)], Chosen::Quick, last(true)).is_err());
        assert_eq!(ran.get(), 2);
        assert!(
            run(&[part("one", false), part("two", true)], Chosen::Named("two"), last(true)).is_ok()
        );
        assert!(run(&[part("one", true)], Chosen::Named("three"), last(true)).is_err());
        assert!(
            run(&[part("one", true)], Chosen::Quick, last(false)).unwrap_err().contains("last")
        );
        ran.set(0);
        assert!(run(&[part("one", true), part("slow", false)], Chosen::Quick, last(true)).is_ok());
        assert_eq!(ran.get(), 1);
        assert!(run(&[part("one", true), part("slow", false)], Chosen::All, last(true)).is_err());
        assert!(run(&[part("slow", true)], Chosen::Named("slow"), last(true)).is_ok());
    }
}
