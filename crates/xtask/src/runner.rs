//! Runs parts, counts their tests and sums up. Parts that use one core run side by side.

use std::collections::VecDeque;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::deadline::{self, Ended, Stream};
pub use crate::said::Counts;
use crate::said::{Reason, Said};
use crate::tools;
use Uses::OneCore;

/// Result of a part.
pub enum Outcome {
    /// The whole part passed.
    Passed(Counts),
    /// It could not run, for this reason.
    Skipped(String),
    /// A test or command failed.
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

/// A part of the test run.
pub struct Part {
    /// Heading of the part.
    pub name: &'static str,
    /// Runs the part.
    pub run: Box<dyn Fn() -> Outcome>,
    /// Required tools; without them the part is skipped (names of [`tools::TOOLS`]).
    pub needs: &'static [&'static str],
    /// The runs that include it.
    pub when: When,
    /// What it uses of the machine.
    pub uses: Uses,
}

/// What a part uses of the machine.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Uses {
    /// All cores: it runs alone.
    AllCores,
    /// One core for most of its time: it runs beside those like it that follow it in the list.
    OneCore,
}

/// The runs that include a part.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum When {
    /// All.
    Always,
    /// Those of all parts (`--all`): it takes minutes.
    WithAll,
    /// Those that name it (`--only`): it takes too long for continuous integration.
    Named,
}

/// The parts to run.
#[derive(Clone, Copy)]
pub enum Chosen<'a> {
    /// The quick parts.
    Quick,
    /// All parts.
    All,
    /// The parts whose names contain this.
    Named(&'a str),
}

impl Chosen<'_> {
    fn has(self, part: &Part) -> bool {
        match self {
            Chosen::Quick => part.when == When::Always,
            Chosen::All => part.when != When::Named,
            Chosen::Named(name) => part.name.contains(name),
        }
    }
}

/// Exit code of a part that could not run; its last line has the reason (automake's convention).
const SKIPPED: i32 = 77;
/// Exit code of a part that failed, in a process of its own; its last line has the reason.
const FAILED: i32 = 76;

/// Runs the chosen parts, and then `last` in any case; fails at the end if one failed. If CI is
/// set, skipping counts as failing. `alone` makes the command that runs a part in a process of its
/// own and ends as [`end`] says.
pub fn run(
    root: &Path,
    parts: &[Part],
    choice: Chosen<'_>,
    alone: impl Fn(&str) -> Command + Sync,
    last: (&'static str, impl FnOnce() -> Outcome),
) -> Result<(), String> {
    let (chosen, left): (Vec<_>, Vec<_>) = parts.iter().partition(|part| choice.has(part));
    if chosen.is_empty() {
        let names: Vec<_> = parts.iter().map(|part| part.name).collect();
        return Err(format!("no such part; the parts are: {}", names.join(", ")));
    }
    let missing = tools::missing(root);
    let needs: Vec<_> = chosen.iter().map(|part| (part.name, part.needs)).collect();
    print!("{}", tools::notice(&missing, &needs));
    let begun = Instant::now();
    let mut results = Vec::new();
    for beside in chosen.chunk_by(|one, two| (one.uses, two.uses) == (OneCore, OneCore)) {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let mut ready = Vec::new();
        for part in beside {
            match missing.iter().find(|tool| part.needs.contains(&tool.name)) {
                Some(tool) => {
                    let outcome = Outcome::Skipped(format!("lacks {}", tool.name));
                    results.push((part.name, outcome, Duration::ZERO));
                }
                None => ready.push(*part),
            }
        }
        if let [part] = *ready {
            println!("\n=== {} ===", part.name);
            let start = Instant::now();
            results.push((part.name, (part.run)(), start.elapsed()));
        } else {
            let names = ready.iter().map(|part| part.name).collect();
            results.extend(side_by_side(names, cores, &alone));
        }
    }
    let start = Instant::now();
    results.push((last.0, last.1(), start.elapsed()));
    let left: Vec<_> = match choice {
        Chosen::Quick => left.iter().map(|part| part.name).collect(),
        _ => Vec::new(),
    };
    let ci = std::env::var("CI").is_ok_and(|value| value == "true");
    let (text, done) = sum_up(&results, begun.elapsed(), &left, ci);
    println!("\n=== summary ===\n{text}");
    done
}

/// A part that has ended, and the time that it took.
type Done = (&'static str, Outcome, Duration);

/// Runs parts in processes of their own, so that the output of each can be printed as a whole.
fn side_by_side(
    names: VecDeque<&'static str>,
    cores: usize,
    alone: &(impl Fn(&str) -> Command + Sync),
) -> Vec<Done> {
    let waiting = Mutex::new(names);
    let done = Mutex::new(Vec::new());
    let next = || waiting.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
    let work = || {
        while let Some(name) = next() {
            println!("--- {name} has begun");
            let start = Instant::now();
            let mut text = String::new();
            let outcome = in_its_own_process(&mut alone(name), &mut text);
            let took = start.elapsed();
            // A single call, so that the output of two parts does not mix.
            print!("\n=== {name} [{:.1} s] ===\n{text}", took.as_secs_f64());
            done.lock().unwrap_or_else(PoisonError::into_inner).push((name, outcome, took));
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..cores {
            scope.spawn(work);
        }
    });
    done.into_inner().unwrap_or_else(PoisonError::into_inner)
}

fn in_its_own_process(command: &mut Command, text: &mut String) -> Outcome {
    // A part may have several commands, each with its own limit.
    let limit = deadline::stretched(2 * deadline::COMMAND);
    listen("the part", command.stderr(Stdio::piped()), limit, |_, said| *text += said)
}

/// The end of a process that has run one part: its exit code; the reason, if any, on the last line.
pub fn end(outcome: Outcome) -> u8 {
    let (reason, code) = match outcome {
        Outcome::Passed(_) => return 0,
        Outcome::Skipped(reason) => (reason, SKIPPED),
        Outcome::Failed(_, reason) => (reason, FAILED),
    };
    // Behind a line that the part has not ended, too.
    println!("\n{}", reason.replace('\n', "; "));
    code as u8
}

/// The summary; its last line is only the number of tests, for tools to read.
fn sum_up(
    results: &[Done],
    took: Duration,
    left: &[&str],
    ci: bool,
) -> (String, Result<(), String>) {
    let mut lines = Vec::new();
    let mut total = Counts::default();
    let mut bad = Vec::new();
    for (name, outcome, took) in results {
        let (word, note) = match outcome {
            Outcome::Passed(counts) => {
                total = total.plus(counts.clone());
                ("ok", counts.note())
            }
            Outcome::Skipped(reason) => {
                total.skipped += 1;
                if ci {
                    bad.push(format!("{name} (skipped, which CI does not allow)"));
                }
                ("SKIPPED", format!(": {reason}"))
            }
            Outcome::Failed(counts, reason) => {
                total = total.plus(counts.clone());
                bad.push((*name).to_owned());
                ("FAILED", format!("{}: {reason}", counts.note()))
            }
        };
        lines.push(format!("{word:>8}  {name} [{:.1} s]{note}", took.as_secs_f64()));
    }
    for (reason, number) in &total.reasons {
        let tests = if *number == 1 { "test" } else { "tests" };
        lines.push(match reason {
            Reason::Lacks(tool) => format!(" skipped  {number} {tests}: lacks {tool}"),
            Reason::Other(reason) => format!(" skipped  {number} {tests}: {reason}"),
        });
        if let (Reason::Lacks(tool), true) = (reason, ci) {
            bad.push(format!("{number} {tests} skipped for want of {tool}, as CI must not"));
        }
    }
    if !left.is_empty() {
        lines.push(format!("left to cargo xtask test --all: {}", left.join(", ")));
    }
    lines.push(format!("took {:.1} minutes", took.as_secs_f64() / 60.0));
    lines.push(format!(
        "{} passed, {} failed, {} skipped",
        total.passed, total.failed, total.skipped
    ));
    let done = if bad.is_empty() { Ok(()) } else { Err(format!("failed: {}", bad.join(", "))) };
    (lines.join("\n"), done)
}

/// Runs a command without input, showing its output as it comes.
pub fn command(command: &mut Command) -> Outcome {
    command_within(command, deadline::stretched(deadline::COMMAND))
}

fn command_within(command: &mut Command, limit: Duration) -> Outcome {
    let name = command.get_program().to_string_lossy().into_owned();
    listen(&name, command, limit, |_, said| print!("{said}"))
}

/// Runs a command without input, and calls `hear` with its output: whole lines of stdout, and
/// stderr as it comes, if that is piped.
pub fn listen(
    name: &str,
    command: &mut Command,
    limit: Duration,
    mut hear: impl FnMut(Stream, &str),
) -> Outcome {
    let mut said = Said::default();
    let ended = deadline::run(command, limit, |stream, bytes| match stream {
        Stream::Out => hear(stream, &said.hear(bytes)),
        Stream::Err => hear(stream, &String::from_utf8_lossy(bytes)),
    });
    // Before the last line counts as complete: it may name the running test.
    let running = said.running();
    let rest = said.end();
    if !rest.is_empty() {
        hear(Stream::Out, &(rest + "\n"));
    }
    match ended {
        Ok(ended) => outcome(name, &ended, &said, &running, limit),
        Err(error) => Outcome::Failed(said.counts(), format!("{name}: {error}")),
    }
}

/// Result of a command that has ended.
fn outcome(name: &str, ended: &Ended, said: &Said, running: &[String], limit: Duration) -> Outcome {
    let counts = said.counts();
    if ended.overdue {
        let running = match running {
            [] => String::new(),
            tests => format!("; this test ran: {}", tests.join(", ")),
        };
        let limit = limit.as_secs_f64();
        return Outcome::Failed(
            counts,
            format!("{name} took longer than {limit:.0} s, its deadline, and was ended{running}"),
        );
    }
    match ended.status {
        status if status.success() => Outcome::Passed(counts),
        status if status.code() == Some(SKIPPED) => Outcome::Skipped(said.last().to_owned()),
        status if status.code() == Some(FAILED) => Outcome::Failed(counts, said.last().to_owned()),
        status => Outcome::Failed(counts, format!("{name} ended with {status}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Outcome {
        command(Command::new("sh").args(["-c", script]))
    }

    #[test]
    fn a_part_passes_fails_or_says_why_it_was_skipped() {
        let passed = shell("echo 'test result: ok. 2 passed; 0 failed'");
        assert!(matches!(passed, Outcome::Passed(Counts { passed: 2, failed: 0, .. })));
        assert!(matches!(shell("exit 3"), Outcome::Failed(..)));
        assert!(
            matches!(shell("echo no registry; exit 77"), Outcome::Skipped(reason) if reason == "no \
                registry")
        );
        assert!(matches!(command(&mut Command::new("/nowhere/at/all")), Outcome::Failed(..)));
    }

    #[test]
    fn a_part_that_hangs_is_ended_and_the_test_that_runs_is_named() {
        let script = "echo 'test one ... ok'; printf 'test two ... '; sleep 300";
        let ended = command_within(Command::new("sh").args(["-c", script]), Duration::from_secs(1));
        let Outcome::Failed(_, reason) = ended else { panic!("it has not failed") };
        let wanted = "sh took longer than 1 s, its deadline, and was ended; this test ran: two";
        assert_eq!(reason, wanted);
    }

    #[test]
    fn one_failed_part_fails_the_run_and_skipping_fails_only_in_ci() {
        let took = Duration::from_secs(1);
        let passed = || ("a", Outcome::Passed(Counts::default()), took);
        let skipped = || ("b", Outcome::Skipped("no registry".into()), took);
        let failed = || ("c", Outcome::Failed(Counts::default(), "why".into()), took);
        let done = |results: &[_], ci| sum_up(results, took, &[], ci).1;
        assert_eq!(done(&[passed(), skipped()], false), Ok(()));
        assert!(done(&[passed(), skipped()], true).unwrap_err().contains('b'));
        assert!(done(&[failed(), passed()], false).unwrap_err().contains('c'));
    }

    #[test]
    fn what_was_skipped_is_counted_by_its_reason_and_the_last_line_is_the_tests_number_alone() {
        let took = Duration::from_secs(90);
        let reasons =
            [(Reason::Lacks("chromium".into()), 2), (Reason::Other("only root may".into()), 1)];
        let counts = Counts { passed: 7, failed: 0, skipped: 3, reasons: reasons.into() };
        let results = [
            ("a", Outcome::Passed(counts), took),
            ("b", Outcome::Skipped("lacks valgrind".into()), took),
        ];
        let (text, done) = sum_up(&results, 2 * took, &["slow"], false);
        assert_eq!(done, Ok(()));
        assert_eq!(
            text.lines().collect::<Vec<_>>(),
            [
                "      ok  a [90.0 s]: 7 passed, 0 failed, 3 skipped",
                " SKIPPED  b [90.0 s]: lacks valgrind",
                " skipped  2 tests: lacks chromium",
                " skipped  1 test: only root may",
                "left to cargo xtask test --all: slow",
                "took 3.0 minutes",
                "7 passed, 0 failed, 4 skipped",
            ]
        );
        // CI must have every installable tool; missing permissions are not CI's fault.
        let reason = sum_up(&results[..1], took, &[], true).1.unwrap_err();
        assert!(reason.contains("chromium") && !reason.contains("root"), "{reason}");
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
            Part {
                name,
                run: Box::new(run),
                needs: &[],
                uses: Uses::AllCores,
                when: if name == "slow" { When::WithAll } else { When::Always },
            }
        };
        let root = Path::new("/nowhere");
        let never = |_: &str| -> Command { unreachable!() };
        let run =
            |parts: &[Part], choice, last: (&'static str, _)| run(root, parts, choice, never, last);
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

    #[test]
    fn parts_side_by_side_have_their_own_outcomes_and_none_waits_for_another() {
        // "first" ends once "second" has begun.
        let folder = tempfile::tempdir().unwrap();
        let begun = folder.path().join("begun");
        let script = |name: &str| match name {
            "first" => format!(
                "until [ -e {} ]; do sleep 0.01; done; echo 'test result: ok. 2 passed; 0 failed'",
                begun.display()
            ),
            "second" => format!("touch {}; echo it is broken; exit {FAILED}", begun.display()),
            "third" => "echo no registry; exit 77".to_owned(),
            _ => "kill -9 $$".to_owned(),
        };
        let alone = |name: &str| {
            let mut command = Command::new("sh");
            command.args(["-c", &script(name)]);
            command
        };
        let names = ["first", "second", "third", "fourth"].into();
        let mut done = side_by_side(names, 2, &alone);
        done.sort_by_key(|(name, ..)| *name);
        let outcomes: Vec<_> = done.into_iter().map(|(_, outcome, _)| outcome).collect();
        let [first, fourth, second, third] = outcomes.as_slice() else { panic!("not four") };
        assert!(matches!(first, Outcome::Passed(Counts { passed: 2, .. })));
        assert!(matches!(second, Outcome::Failed(_, reason) if reason == "it is broken"));
        assert!(matches!(third, Outcome::Skipped(reason) if reason == "no registry"));
        assert!(matches!(fourth, Outcome::Failed(_, reason) if reason.contains("signal")));
    }

    #[test]
    fn a_part_in_its_own_process_ends_with_its_outcome() {
        let failed = Outcome::Failed(Counts::default(), "two\nlines".into());
        assert_eq!(end(Outcome::Passed(Counts::default())), 0);
        assert_eq!(end(Outcome::Skipped("no registry".into())), SKIPPED as u8);
        assert_eq!(end(failed), FAILED as u8);
    }
}
