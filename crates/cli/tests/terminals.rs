//! Every command on a terminal that closes, under signals, as a stopped job, and before a pipe
//! without a reader.

#[path = "common/commands.rs"]
mod commands;
#[path = "common/live_record.rs"]
#[allow(dead_code)]
mod live_record;
#[path = "common/signals.rs"]
mod signals;
#[path = "../../../tests/common/skip.rs"]
mod skip;
#[path = "common/terminal.rs"]
mod terminal;

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead as _, BufReader, Read as _};
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

use commands::{End, Place, TAKEN, gruyere, that_print};
use signals::{as_from_a_shell, ignoring, send, state, until};
use terminal::Terminal;

/// Leaves the alternate screen.
const GIVEN_BACK: &str = "\x1b[?1049l";

fn matches(end: End, status: ExitStatus, signal: i32) -> bool {
    match end {
        End::Signal => status.signal() == Some(signal),
        End::Code(code) => status.code() == Some(code),
        End::Not => false,
    }
}

/// Processor time of a process, in ticks of 10 ms.
fn ticks(pid: u32) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let rest = stat.rsplit_once(") ").map_or("", |(_, rest)| rest);
    rest.split(' ').skip(11).take(2).filter_map(|ticks| ticks.parse::<u64>().ok()).sum()
}

#[test]
fn a_signal_ends_every_command_at_once_and_the_terminal_is_as_it_was() {
    let place = Place::new();
    for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP] {
        for (number, case) in place.cases(&format!("signal-{signal}")).iter().enumerate() {
            let mut terminal = Terminal::with(case.command());
            case.has_begun(&mut terminal);
            assert_eq!(terminal.is_cooked(), number != 0, "{}", case.name());
            send(terminal.pid(), signal);
            let status = terminal.ended();
            assert!(matches(case.ends, status, signal), "{}: {signal}: {status:?}", case.name());
            assert!(terminal.is_cooked(), "{}: {signal}", case.name());
            if number == 0 {
                assert!(terminal.seen().contains(GIVEN_BACK), "{:?}", terminal.seen());
            }
            case.helper_has_ended();
        }
    }
}

#[test]
fn a_terminal_that_closes_ends_every_command() {
    let place = Place::new();
    for case in place.cases("closed") {
        let mut terminal = Terminal::with(case.command());
        case.has_begun(&mut terminal);
        terminal.close();
        let status = terminal.ended();
        // The kernel sends SIGHUP; a writer may notice the end before the signal.
        let ends = [case.ends, case.without_terminal];
        assert!(
            ends.into_iter().any(|end| matches(end, status, libc::SIGHUP)),
            "{}: {status:?}",
            case.name()
        );
        case.helper_has_ended();
    }
}

#[test]
fn under_nohup_a_terminal_that_closes_ends_what_only_writes_to_it_and_nothing_spins() {
    let place = Place::new();
    for case in place.cases("nohup") {
        let mut command = case.command();
        ignoring(&mut command, &[libc::SIGHUP]);
        let mut terminal = Terminal::with(command);
        case.has_begun(&mut terminal);
        terminal.close();
        if case.without_terminal != End::Not {
            let status = terminal.ended();
            assert!(
                matches(case.without_terminal, status, libc::SIGHUP),
                "{}: {status:?}",
                case.name()
            );
            continue;
        }
        let before = ticks(terminal.pid());
        std::thread::sleep(Duration::from_millis(500));
        let spent = ticks(terminal.pid()) - before;
        assert!(spent < 25 || case.command == "bench", "{}: {spent} ticks of 50", case.name());
        assert_ne!(state(terminal.pid() as i32), Some('Z'), "{}: it goes on", case.name());
        send(terminal.pid(), libc::SIGTERM);
        let status = terminal.ended();
        assert!(matches(case.ends, status, libc::SIGTERM), "{}: {status:?}", case.name());
    }
}

#[test]
fn what_was_ignored_at_the_start_stays_ignored() {
    let place = Place::new();
    for case in place.cases("ignored") {
        let mut command = case.command();
        ignoring(&mut command, &[libc::SIGINT, libc::SIGHUP]);
        let mut terminal = Terminal::with(command);
        case.has_begun(&mut terminal);
        let status = fs::read_to_string(format!("/proc/{}/status", terminal.pid())).unwrap();
        let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).expect("a set");
        let ignored = u64::from_str_radix(ignored.trim(), 16).unwrap();
        for signal in [libc::SIGINT, libc::SIGHUP] {
            assert!(ignored >> (signal - 1) & 1 == 1, "{}: {signal}: {ignored:x}", case.name());
        }
        send(terminal.pid(), libc::SIGTERM);
        let status = terminal.ended();
        assert!(matches(case.ends, status, libc::SIGTERM), "{}: {status:?}", case.name());
    }
}

#[test]
fn as_process_1_of_a_container_a_signal_ends_it_too() {
    let unshare = ["--user", "--map-root-user", "--pid", "--fork", "--kill-child"];
    if !Command::new("unshare")
        .args(unshare)
        .arg("true")
        .status()
        .is_ok_and(|status| status.success())
    {
        return skip::refused("no pid namespaces for users");
    }
    let place = Place::new();
    let directory = place.records.path().to_str().unwrap();
    let mut command = Command::new("unshare");
    command.args(unshare).arg(env!("CARGO_BIN_EXE_gruyere"));
    command.args(["export", "--listen", "127.0.0.1:0", "--directory", directory]);
    let mut child = as_from_a_shell(&mut command).stderr(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stderr.take().unwrap()).read_line(&mut line).unwrap();
    assert!(line.contains("serving"), "{line}");
    let children = format!("/proc/{0}/task/{0}/children", child.id());
    let first: u32 = fs::read_to_string(children).unwrap().trim().parse().unwrap();
    send(first, libc::SIGTERM);
    until("it ends", || child.try_wait().unwrap().is_some());
    assert_eq!(child.wait().unwrap().code(), Some(128 + libc::SIGTERM));
}

#[test]
fn a_stopped_job_leaves_the_terminal_to_the_shell_and_goes_on_in_front() {
    let place = Place::new();
    let mut bash = Command::new("bash");
    as_from_a_shell(&mut bash).env("HELPER", place.file("stopped.pid")).env_remove("GRUYERE_CONF");
    let mut terminal = Terminal::with_shell(bash);
    for case in place.cases("stopped") {
        println!("{}", case.name());
        let words: Vec<String> = case.arguments.iter().map(|word| format!("'{word}'")).collect();
        terminal.write(&format!("{} {}\n", env!("CARGO_BIN_EXE_gruyere"), words.join(" ")));
        // The shell echoes the input.
        terminal.expect("\r\n");
        terminal.wait_for_a_job();
        case.has_begun(&mut terminal);
        for _ in 0..2 {
            terminal.write("\x1a");
            let before = terminal.expect("Stopped");
            terminal.expect("prompt> ");
            assert!(terminal.is_cooked(), "{}", case.name());
            assert_eq!(
                before.contains(GIVEN_BACK),
                case.name().starts_with("top --dir"),
                "{before:?}"
            );
            terminal.write("fg\n");
            terminal.expect("\r\n");
            terminal.wait_for_a_job();
            terminal.wait_until_the_job_goes_on();
            if case.name().starts_with("top --dir") {
                terminal.expect(TAKEN);
                // Drawn again, including the heading.
                terminal.expect("HELD");
                until("keys are its again", || !terminal.is_cooked());
            }
        }
        let code = match case.name().starts_with("top --dir") {
            true => {
                terminal.write("q");
                0
            }
            false => {
                terminal.write("\x03");
                if case.ends == End::Signal { 128 + libc::SIGINT } else { 0 }
            }
        };
        terminal.expect("prompt> ");
        terminal.write("echo code $?\n");
        terminal.expect(&format!("code {code}\r"));
        terminal.expect("prompt> ");
        assert!(terminal.is_cooked(), "{}", case.name());
    }
}

#[test]
fn a_job_behind_others_draws_nothing_and_is_stopped_where_it_would_take_the_terminal() {
    let place = Place::new();
    let mut bash = Command::new("bash");
    as_from_a_shell(&mut bash);
    let mut terminal = Terminal::with_shell(bash);
    let directory = place.records.path().display().to_string();
    let top =
        format!("{} top --interval 100ms --directory {directory}", env!("CARGO_BIN_EXE_gruyere"));
    terminal.write(&format!("{top} & top=$!\n"));
    terminal.expect("prompt> ");
    // `jobs` shows it once it has stopped, as the next prompt does.
    let job = |terminal: &mut Terminal, letter: &str| {
        terminal.write(
            "for n in $(seq 400); do s=$(cut -d' ' -f3 /proc/$top/stat); [ $s = T ] && break; \
             sleep .05; done; echo state $s.\n",
        );
        terminal.expect("state $s.");
        terminal.expect(&format!("state {letter}."));
        terminal.expect("prompt> ")
    };
    job(&mut terminal, "T");
    assert!(!terminal.seen().contains(TAKEN));
    // To the front; stopped by a signal that it cannot catch; continued behind the shell, for which
    // the next line is already typed.
    terminal.write("fg\n");
    terminal.expect(TAKEN);
    until("it takes keys", || !terminal.is_cooked());
    let top: u32 = {
        let children = format!("/proc/{0}/task/{0}/children", terminal.pid());
        fs::read_to_string(children).unwrap().split_whitespace().next().unwrap().parse().unwrap()
    };
    send(top, libc::SIGSTOP);
    terminal.expect("Stopped");
    terminal.expect("prompt> ");
    terminal.write("bg\n:\n");
    terminal.expect("prompt> ");
    terminal.expect("prompt> ");
    job(&mut terminal, "T");
    std::thread::sleep(Duration::from_millis(500));
    let seen = terminal.seen().to_owned();
    assert!(!seen.contains(TAKEN) && !seen.contains("PID"), "{seen:?}");
    terminal.write("fg\n");
    terminal.expect(TAKEN);
    until("it takes keys again", || !terminal.is_cooked());
    terminal.expect("HELD");
    terminal.write("q");
    terminal.expect("prompt> ");
    assert!(terminal.is_cooked());
}

/// A command with a pipe as standard output, of which a line or nothing is read.
fn with_a_closed_pipe(mut command: Command, lines: usize) -> (std::process::Child, String) {
    let mut child =
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    for _ in 0..lines {
        out.read_line(&mut line).unwrap();
    }
    (child, line)
}

#[test]
fn what_follows_something_ends_quietly_when_nobody_reads_on() {
    let place = Place::new();
    for lines in [1, 0] {
        for case in place.cases("unread").into_iter().filter(|case| case.without_reader != End::Not)
        {
            // It writes a line at once, and then none, or none for long: the end must not wait for
            // the next.
            let (mut child, line) = with_a_closed_pipe(case.command(), lines);
            assert_eq!(line.is_empty(), lines == 0);
            until(&case.name(), || child.try_wait().unwrap().is_some());
            let status = child.wait().unwrap();
            assert!(matches(case.without_reader, status, 0), "{}: {status:?}", case.name());
            let mut said = String::new();
            child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
            assert_eq!(said, "", "{}", case.name());
        }
    }
}

#[test]
fn what_prints_and_ends_does_so_quietly_when_nobody_reads() {
    let place = Place::new();
    for (words, code) in that_print(&place) {
        let mut command = gruyere();
        let (mut child, _) = with_a_closed_pipe(
            {
                command.args(&words);
                command
            },
            0,
        );
        let status = child.wait().unwrap();
        let mut said = String::new();
        child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        assert_eq!((status.code(), said.as_str()), (Some(code), ""), "{words:?}");
        // `2>&1 | head`: error messages have no reader either.
        let mut command = gruyere();
        let (out, into) = std::io::pipe().unwrap();
        drop(out);
        command.args(&words).stdin(Stdio::null()).stdout(into.try_clone().unwrap()).stderr(into);
        assert_eq!(command.status().unwrap().code(), Some(code), "{words:?}");
    }
}

#[test]
fn a_full_disk_is_told_of_by_every_command() {
    let place = Place::new();
    let print = that_print(&place).into_iter().map(|(words, _)| words);
    // Those that follow something, as far as they print.
    let follow = place.cases("full").into_iter();
    let follow = follow.filter(|case| case.without_reader != End::Not).map(|case| case.arguments);
    let doctor = ["doctor", "--json", "--python", "/bin/false"].map(str::to_owned).to_vec();
    for words in print.chain(follow).chain([doctor]) {
        // What a program prints under `run` is its own.
        if words[0] == "run" {
            continue;
        }
        let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let output = gruyere().args(&words).stdout(full).stderr(Stdio::piped()).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{words:?}: {said}");
        assert!(said.contains("standard output: No space"), "{words:?}: {said}");
    }
}

#[test]
fn every_command_is_tried() {
    let place = Place::new();
    let help = String::from_utf8(gruyere().arg("--help").output().unwrap().stdout).unwrap();
    let listed = help.split("Options:\n").next().unwrap();
    let listed: BTreeSet<&str> = listed
        .lines()
        .filter_map(|line| line.strip_prefix("  ")?.split("  ").next())
        .filter(|name| !name.contains(' ') && *name != "help")
        .collect();
    assert!(listed.len() > 15, "{listed:?}");
    let (follow, print) = (place.cases("names"), that_print(&place));
    let tried = follow
        .iter()
        .map(|case| case.command)
        .chain(print.iter().map(|(words, _)| words[0].as_str()));
    let tried: BTreeSet<&str> = tried.collect();
    // They become Python programs (tests/pytorch/test_newcomer.py, test_dryrun.py).
    let elsewhere = ["compare", "dryrun"];
    let missing: Vec<&&str> =
        listed.difference(&tried).filter(|name| !elsewhere.contains(name)).collect();
    assert!(missing.is_empty(), "{missing:?}");
}
