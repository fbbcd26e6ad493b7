//! `gruyere run`: the program lives and ends as without it, has the library loaded, and gets a
//! summary.

#[path = "../../../tests/common/phantom_library.rs"]
#[allow(dead_code)]
mod phantom_library;
#[path = "common/signals.rs"]
#[allow(dead_code)]
mod signals;
#[path = "common/terminal.rs"]
#[allow(dead_code)]
mod terminal;

use std::io::{BufRead as _, BufReader};
use std::os::fd::AsRawFd as _;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use gruyere_record::run::Run;
use phantom_library::phantom_owner;
use signals::{SOON, state, until};
use tempfile::TempDir;
use terminal::Terminal;

/// Variables that a test sets itself, if needed.
const OURS: [&str; 6] =
    ["LD_PRELOAD", "GRUYERE_CONF", "GRUYERE_RUN", "GRUYERE_LIBRARY", "GRUYERE_LOG", "TMPDIR"];

fn command(program: &Path) -> Command {
    let mut command = Command::new(program);
    signals::as_from_a_shell(&mut command);
    OURS.iter().for_each(|name| {
        command.env_remove(name);
    });
    command
}

fn gruyere(arguments: &[&str]) -> Command {
    let mut command = command(Path::new(env!("CARGO_BIN_EXE_gruyere")));
    command.arg("run").args(arguments);
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn ran(arguments: &[&str]) -> Output {
    gruyere(arguments).stdin(Stdio::null()).output().unwrap()
}

/// A built program of tests/programs.
fn program(name: &str) -> String {
    static FOLDER: OnceLock<TempDir> = OnceLock::new();
    let folder = FOLDER.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        for (name, more) in [("signals", None), ("device_memory", Some("-ldl"))] {
            let source =
                Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/programs/{name}.c"));
            let mut cc = Command::new("cc");
            cc.args(["-Wall", "-Wextra", "-Werror", "-o"])
                .arg(folder.path().join(name))
                .arg(source);
            assert!(cc.args(more).status().unwrap().success(), "{name}");
        }
        folder
    });
    folder.path().join(name).to_str().unwrap().to_owned()
}

/// A program that prints its pid when ready, then each signal.
struct Running {
    child: Child,
    lines: BufReader<ChildStdout>,
    pid: i32,
}

impl Running {
    fn start(mut command: Command) -> Running {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        let mut running = Running { child, lines, pid: 0 };
        let ready = running.line();
        running.pid = ready.strip_prefix("ready ").expect(&ready).parse().unwrap();
        running
    }

    /// `gruyere run` with these words, in a process group of its own.
    fn start_in_a_group(words: &[&str]) -> Running {
        let mut command = gruyere(words);
        command.process_group(0);
        Running::start(command)
    }

    /// The next line; empty at the end.
    fn line(&mut self) -> String {
        if self.lines.buffer().is_empty() {
            let mut wanted = libc::pollfd {
                fd: self.lines.get_ref().as_raw_fd(),
                events: libc::POLLIN,
                revents: 0,
            };
            // SAFETY: one entry of ours.
            let ready = unsafe { libc::poll(&mut wanted, 1, SOON.as_millis() as i32) };
            assert_eq!(ready, 1, "not a word within {SOON:?}");
        }
        let mut line = String::new();
        self.lines.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    fn send(&self, signal: i32) {
        // SAFETY: no memory is involved; the child has not been waited for.
        assert_eq!(unsafe { libc::kill(self.child.id() as i32, signal) }, 0);
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // The program ends with it.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn the_exit_code_is_the_programs() {
    for code in [0, 1, 7, 125, 255] {
        let output = ran(&["--", "sh", "-c", &format!("echo out; echo err >&2; exit {code}")]);
        assert_eq!(output.status.code(), Some(code));
        assert_eq!(text(&output.stdout), "out\n", "stdout is the program's alone");
        assert!(text(&output.stderr).starts_with("err\n"));
    }
}

#[test]
fn it_dies_of_the_signal_that_the_program_died_of() {
    for signal in [libc::SIGTERM, libc::SIGKILL, libc::SIGSEGV, libc::SIGINT, libc::SIGPIPE, 40] {
        let output = ran(&["--", "sh", "-c", &format!("ulimit -c 0; kill -{signal} $$")]);
        assert_eq!(output.status.signal(), Some(signal), "{:?}", output.status);
    }
}

#[test]
fn what_cannot_be_run_has_the_codes_of_env() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("no_program");
    std::fs::write(&file, "echo").unwrap();
    for (program, code) in
        [("/no/such/program", 127), ("no-such-program", 127), (file.to_str().unwrap(), 126)]
    {
        let output = ran(&["--", program]);
        assert_eq!(output.status.code(), Some(code), "{program}");
        assert!(text(&output.stderr).contains(program), "{}", text(&output.stderr));
    }
    assert_eq!(ran(&[]).status.code(), Some(2));
    assert_eq!(ran(&["--observe", "--manage", "--", "true"]).status.code(), Some(2));
}

#[test]
fn a_bad_configuration_is_refused_before_the_program_starts() {
    for bad in [["--conf", "limits:1GiB"], ["--conf", "preload:on"]] {
        let output = gruyere(&bad).args(["--", "echo", "started"]).output().unwrap();
        assert_eq!((output.status.code(), text(&output.stdout).as_str()), (Some(125), ""));
        let said = text(&output.stderr);
        assert!(said.contains(bad[1]), "{said}");
    }
    let output =
        gruyere(&["--", "echo", "started"]).env("GRUYERE_CONF", "share:maybe").output().unwrap();
    assert_eq!((output.status.code(), text(&output.stdout).as_str()), (Some(125), ""));
}

#[test]
fn a_bad_setting_is_told_with_the_place_where_it_was_given() {
    for (environment, option, place) in [
        ("share:off", "bogus:1", "gruyere run: --conf: \"bogus:1\": "),
        ("bogus:1", "share:off", "gruyere run: GRUYERE_CONF: \"bogus:1\": "),
    ] {
        let mut command = gruyere(&["--conf", option, "--", "echo", "started"]);
        let output = command.env("GRUYERE_CONF", environment).output().unwrap();
        let said = text(&output.stderr);
        assert!(said.starts_with(place), "{said}");
    }
}

/// The variable `name` in a program run with `arguments`, and `set` in the environment.
fn variable(name: &str, arguments: &[&str], set: &[(&str, &str)]) -> String {
    let mut command = gruyere(arguments);
    command
        .args(["--quiet", "--", "sh", "-c", &format!("printf %s \"${name}\"")])
        .envs(set.iter().copied());
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    text(&output.stdout)
}

#[test]
fn settings_are_added_to_those_of_the_environment() {
    let conf = |arguments: &[&str], environment: &str| {
        variable("GRUYERE_CONF", arguments, &[("GRUYERE_CONF", environment)])
    };
    assert_eq!(conf(&[], "share:off"), "share:off");
    assert_eq!(
        conf(&["--conf", "limit:1GiB", "--conf", "slack:1%"], "share:off"),
        "share:off,limit:1GiB,slack:1%"
    );
    assert_eq!(conf(&["--observe"], "share:off"), "share:off,preload:observe");
    assert_eq!(conf(&["--manage"], "preload:observe"), "preload:observe,preload:manage");
}

#[test]
fn the_library_is_preloaded_before_what_was_there() {
    let preload = variable("LD_PRELOAD", &[], &[]);
    assert!(preload.ends_with("/libgruyere.so") && !preload.contains(':'), "{preload}");
    let with_other = variable("LD_PRELOAD", &[], &[("LD_PRELOAD", "libc.so.6")]);
    assert_eq!(with_other, format!("{preload}:libc.so.6"));
    let number: u64 = variable("GRUYERE_RUN", &[], &[]).parse().unwrap();
    assert!(number < 1 << 53);
}

#[test]
fn a_library_that_is_not_there_is_refused_with_what_was_looked_at() {
    let folder = tempfile::tempdir().unwrap();
    let bin = folder.path().join("bin");
    std::fs::create_dir(&bin).unwrap();
    let copy = bin.join("gruyere");
    std::fs::copy(env!("CARGO_BIN_EXE_gruyere"), &copy).unwrap();
    let run = |set: Option<(&str, &str)>| {
        let mut command = command(&copy);
        command.env_remove("VIRTUAL_ENV").env_remove("CONDA_PREFIX").envs(set);
        command.args(["run", "--", "sh", "-c", "printf %s \"$LD_PRELOAD\""]).output().unwrap()
    };
    let output = run(None);
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(125));
    for place in
        ["bin/libgruyere.so", "lib/libgruyere.so", "site-packages", "--library", "GRUYERE_LIBRARY"]
    {
        assert!(said.contains(place), "{place}: {said}");
    }
    let output = run(Some(("GRUYERE_LIBRARY", "/no/such.so")));
    assert!(
        output.status.code() == Some(125)
            && text(&output.stderr).contains("GRUYERE_LIBRARY /no/such.so")
    );
    let output = run(Some(("GRUYERE_LIBRARY", "/bin/sh")));
    assert!(
        output.status.code() == Some(125) && text(&output.stderr).contains("not a shared library")
    );

    // As pip installs it.
    let package = folder.path().join("lib/python3.11/site-packages/gruyere");
    std::fs::create_dir_all(&package).unwrap();
    let library = PathBuf::from(variable("LD_PRELOAD", &[], &[]));
    std::fs::copy(&library, package.join("libgruyere.so")).unwrap();
    let output = run(None);
    assert_eq!(text(&output.stdout), package.join("libgruyere.so").to_str().unwrap());
    let spaced = folder.path().join("a folder");
    std::fs::create_dir(&spaced).unwrap();
    std::fs::copy(&library, spaced.join("libgruyere.so")).unwrap();
    let output = run(Some(("GRUYERE_LIBRARY", spaced.join("libgruyere.so").to_str().unwrap())));
    assert!(
        output.status.code() == Some(125) && text(&output.stderr).contains("space"),
        "{output:?}"
    );
}

#[test]
fn a_program_finds_its_signals_as_without_us() {
    let status = "exec grep -E '^Sig(Blk|Ign|Cgt)|^ShdPnd' /proc/self/status";
    for before in ["", "trap '' HUP INT PIPE CHLD USR1 TSTP; "] {
        let sh = |inner: String| {
            let mut sh = command(Path::new("/bin/sh"));
            text(&sh.args(["-c", &format!("{before}{inner}")]).output().unwrap().stdout)
        };
        let run = env!("CARGO_BIN_EXE_gruyere");
        let alone = sh(format!("exec sh -c \"{status}\""));
        assert!(alone.contains("SigIgn"), "{alone}");
        assert_eq!(sh(format!("exec {run} run -q -- sh -c \"{status}\"")), alone, "{before}");
    }
}

#[test]
fn signals_sent_to_it_reach_the_program_once() {
    let mut running = Running::start(gruyere(&["--", &program("signals")]));
    for signal in [
        libc::SIGHUP,
        libc::SIGINT,
        libc::SIGQUIT,
        libc::SIGTERM,
        libc::SIGUSR1,
        libc::SIGWINCH,
        40,
    ] {
        running.send(signal);
        assert_eq!(running.line(), format!("got {signal}"));
    }
    running.send(libc::SIGUSR2);
    assert_eq!(running.line(), "", "nothing came twice");
    assert_eq!(running.child.wait().unwrap().code(), Some(5));
}

#[test]
fn a_signal_of_the_whole_group_is_not_sent_on() {
    // The program itself signals its group: then both have the signal.
    let mut running = Running::start_in_a_group(&["--", &program("signals"), "group"]);
    assert_eq!(running.line(), format!("got {}", libc::SIGUSR1));
    running.send(libc::SIGUSR2);
    assert_eq!(running.line(), "");
    assert_eq!(running.child.wait().unwrap().code(), Some(5));
}

#[test]
fn a_program_does_not_outlive_a_killed_run() {
    let mut running = Running::start(gruyere(&["--", &program("signals")]));
    running.send(libc::SIGKILL);
    running.child.wait().unwrap();
    let pid = running.pid;
    until("the program is killed", || !matches!(state(pid), Some(letter) if letter != 'Z'));
}

#[test]
fn a_stop_and_a_wake_up_reach_the_program() {
    // In an orphaned process group, nothing stops.
    let mut running = Running::start_in_a_group(&["--", &program("signals")]);
    let (pid, ours) = (running.pid, running.child.id() as i32);
    running.send(libc::SIGTSTP);
    until("both stop", || state(pid) == Some('T') && state(ours) == Some('T'));
    running.send(libc::SIGCONT);
    until("both go on", || state(pid) == Some('S') && state(ours) == Some('S'));
    running.send(libc::SIGUSR2);
    assert_eq!(running.child.wait().unwrap().code(), Some(5));
}

#[test]
fn a_stop_that_follows_a_wake_up_at_once_is_not_undone() {
    let mut running = Running::start_in_a_group(&["--", &program("signals")]);
    let (pid, ours) = (running.pid, running.child.id() as i32);
    for round in 0..200 {
        // The stop comes while the wake-up is handled, which takes some microseconds.
        // SAFETY: no memory is involved.
        unsafe { libc::kill(ours, libc::SIGCONT) };
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_micros(round) {}
        // SAFETY: as above.
        unsafe { libc::kill(pid, libc::SIGTSTP) };
        until("both stop", || state(pid) == Some('T') && state(ours) == Some('T'));
        running.send(libc::SIGCONT);
        until("both go on", || state(pid) == Some('S') && state(ours) == Some('S'));
    }
    running.send(libc::SIGUSR2);
    assert_eq!(running.child.wait().unwrap().code(), Some(5));
}

#[test]
fn keys_of_the_terminal_reach_the_program_once_and_job_control_works() {
    let mut terminal = Terminal::with_shell(command(Path::new("bash")));
    let line = format!("{} run -- {}\n", env!("CARGO_BIN_EXE_gruyere"), program("signals"));
    terminal.write(&line);
    terminal.expect("ready ");
    terminal.write("\x03");
    terminal.expect(&format!("got {}", libc::SIGINT));
    terminal.write("\x1a");
    terminal.expect("Stopped");
    terminal.expect("prompt> ");
    terminal.write("fg\n");
    terminal.expect("\r\n");
    // Until the shell has given it the terminal, the shell reads the keys.
    terminal.wait_for_a_job();
    terminal.write("\x1c");
    let between = terminal.expect(&format!("got {}", libc::SIGQUIT));
    assert!(!between.contains("got 2\r"), "Ctrl-C came twice: {between}");
    terminal.write("\x1a");
    terminal.expect("prompt> ");
    terminal.write("bg; kill -USR2 %1; wait %1; echo code $?\n");
    terminal.expect("code 5");
    terminal.expect("prompt> ");

    // A program that does not catch it: the shell must see the end by a signal.
    terminal.write(&format!("{} run -q -- sleep 100\n", env!("CARGO_BIN_EXE_gruyere")));
    terminal.expect("\r\n");
    until("sleep runs", || {
        let children = |pid: &str| {
            std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default()
        };
        let run = children(&terminal.pid().to_string());
        let name = |pid: &str| {
            std::fs::read_to_string(format!("/proc/{}/comm", pid.trim())).unwrap_or_default()
        };
        name(&children(run.trim())) == "sleep\n"
    });
    terminal.write("\x03");
    terminal.expect("prompt> ");
    terminal.write("echo code $?\n");
    terminal.expect("code 130");
}

#[test]
fn a_program_that_the_loader_puts_nothing_into_is_told_of() {
    let folder = tempfile::tempdir().unwrap();
    let (source, file) = (folder.path().join("static.c"), folder.path().join("static"));
    std::fs::write(&source, "int main(void) { return 3; }\n").unwrap();
    let built =
        Command::new("cc").arg("-static").arg(&source).arg("-o").arg(&file).status().unwrap();
    assert!(built.success());
    let output = ran(&["-q", "--", file.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(3), "it may start others, so it is run");
    let said = text(&output.stderr);
    assert!(said.contains("linked statically") && said.contains(file.to_str().unwrap()), "{said}");
    let script = folder.path().join("script");
    std::fs::write(&script, format!("#!{}\n", file.display())).unwrap();
    let script = script.to_str().unwrap();
    assert!(Command::new("chmod").args(["+x", script]).status().unwrap().success());
    assert!(text(&ran(&["-q", "--", script]).stderr).contains("is a script for"));
}

/// Runs tests/programs/device_memory.c with the library over the stand-in, which the loader finds
/// as libcuda.
struct OnPhantom {
    folder: TempDir,
}

impl OnPhantom {
    fn new() -> OnPhantom {
        let folder = tempfile::tempdir().unwrap();
        for name in ["libraries", "temporary", "records"] {
            std::fs::create_dir(folder.path().join(name)).unwrap();
        }
        let link = folder.path().join("libraries/libcuda.so.1");
        std::os::unix::fs::symlink(phantom_library::library(), link).unwrap();
        OnPhantom { folder }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn run(&self, options: &[&str], words: &[&str]) -> Output {
        let mut command = gruyere(options);
        command.arg("--").arg(program("device_memory")).args(words);
        self.output(command)
    }

    fn output(&self, mut command: Command) -> Output {
        command.env("LD_LIBRARY_PATH", self.at("libraries")).env("TMPDIR", self.at("temporary"));
        command.envs([phantom_owner::variable().unwrap()]);
        // A folder of its own: other processes of the machine sweep dead records from the usual
        // folder.
        command.env("GRUYERE_RECORD_DIR", self.at("records"));
        let mut output = command.env("GRUYERE_LOG", "error").output().unwrap();
        output.stderr = phantom_owner::without_its_line(&output.stderr).into_bytes();
        let left: Vec<_> = std::fs::read_dir(self.at("temporary")).unwrap().collect();
        assert!(left.is_empty(), "{left:?} was left");
        output
    }
}

/// The cells of the summary's rows.
fn rows(said: &str) -> Vec<Vec<String>> {
    // Sentences begin with the command's name, rows with blanks.
    let rows = said.lines().filter(|line| line.starts_with("  "));
    let rows = rows.map(|row| row.split_whitespace().map(str::to_owned).collect::<Vec<_>>());
    rows.filter(|row| row[0].parse::<u32>().is_ok()).collect()
}

#[test]
fn each_process_is_summed_up() {
    let phantom = OnPhantom::new();
    // 3 blocks of 64 MiB, 2 freed, in this process and in a child.
    let output = phantom.run(&[], &["3", "2", "again"]);
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{said}");
    assert!(
        said.lines().filter(|line| line.starts_with("  ")).all(|row| row.len() <= 80),
        "{said}"
    );
    let rows = rows(&said);
    assert_eq!(rows.len(), 2, "{said}");
    for row in rows {
        assert_eq!(row[..3], ["0", "192.00", "MiB"], "{said}");
        assert_eq!(row[6..10], ["64.00", "MiB", "3", "2"], "{said}");
        assert_eq!(row[11], "0");
    }
    assert_eq!(said.matches(", managed").count(), 2, "{said}");
    assert!(text(&phantom.run(&["--quiet"], &["3", "2"]).stderr).is_empty());
}

#[test]
fn a_killed_process_is_summed_up_from_its_record() {
    let phantom = OnPhantom::new();
    let output = phantom.run(&[], &["2", "0", "kill"]);
    let said = text(&output.stderr);
    assert_eq!(output.status.signal(), Some(libc::SIGKILL), "{said}");
    let rows = rows(&said);
    assert_eq!(rows.len(), 1, "{said}");
    assert_eq!(rows[0][8..10], ["2".to_owned(), "0".to_owned()], "{said}");
    assert!(said.contains("gruyere post"), "{said}");
    assert_eq!(std::fs::read_dir(phantom.at("records")).unwrap().count(), 1);
}

#[test]
fn a_full_temporary_folder_is_told_as_the_cause_and_no_other_advice() {
    let phantom = OnPhantom::new();
    let small = "mount -t tmpfs -o size=64k none \"$TMPDIR\" || exit 77; \
                 head -c 1M /dev/zero > \"$TMPDIR/fill\" 2> /dev/null; exec \"$@\"";
    let mut unshared = command(Path::new("unshare"));
    // Not with --user: there, the stand-in's owner would be another user's.
    unshared.args(["--mount", "sh", "-c", small, "sh"]);
    let program = program("device_memory");
    unshared.args([env!("CARGO_BIN_EXE_gruyere"), "run", "--", &program, "3", "3"]);
    let output = phantom.output(unshared);
    if matches!(output.status.code(), Some(1 | 77)) {
        println!("skipped: no file system can be mounted here: {}", text(&output.stderr));
        return;
    }
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{said}");
    let summary: Vec<_> = said.lines().filter(|line| line.starts_with("gruyere run:")).collect();
    assert!(summary.iter().any(|line| line.contains("No space left on device")), "{said}");
    assert!(
        !said.contains("no device memory was served") && !said.contains("statically"),
        "{said}"
    );
}

#[test]
fn runs_that_the_user_keeps_are_read_where_they_are() {
    let phantom = OnPhantom::new();
    let history = phantom.at("runs");
    let conf = format!("history:{},name:mine", history.display());
    for _ in 0..2 {
        let said = text(&phantom.run(&["--conf", &conf], &["1", "1"]).stderr);
        assert_eq!(rows(&said).len(), 1, "the run before is not told: {said}");
    }
    let kept: Vec<_> = std::fs::read_dir(&history).unwrap().flatten().collect();
    assert_eq!(kept.len(), 2);
    let run: Run = serde_json::from_str(&std::fs::read_to_string(kept[0].path()).unwrap()).unwrap();
    let device = &run.devices[0];
    assert_eq!(
        (run.name.as_str(), device.mallocs, device.frees, device.largest_block_bytes),
        ("mine", 1, 1, 64 << 20)
    );
    assert!(run.gruyere_run.is_some());
}

#[test]
fn where_nothing_was_seen_the_remedy_is_named() {
    let said = text(&ran(&["--", "true"]).stderr);
    assert!(
        said.contains("no device memory was served") && said.contains("--conf preload:driver"),
        "{said}"
    );
    assert!(text(&ran(&["-q", "--", "true"]).stderr).is_empty());
    let folder = tempfile::tempdir().unwrap();
    let later = format!("history:{}/made/later", folder.path().display());
    let said = text(&ran(&["--conf", &later, "--", "true"]).stderr);
    assert!(said.contains("no device memory was served"), "{said}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "nothing is left there");
    let mut expandable = gruyere(&["--", "true"]);
    expandable.env("PYTORCH_ALLOC_CONF", "expandable_segments:True");
    assert!(text(&expandable.output().unwrap().stderr).contains("expandable segments"));
}

#[test]
fn calls_of_the_driver_are_seen_where_they_are_asked_for() {
    let phantom = OnPhantom::new();
    let both = phantom.at("both");
    std::fs::create_dir(&both).unwrap();
    let library = variable("LD_PRELOAD", &[], &[]);
    for (file, name) in
        [(PathBuf::from(library), "libgruyere.so"), (driver_library(), "libgruyere_driver.so")]
    {
        std::os::unix::fs::symlink(file, both.join(name)).unwrap();
    }
    let library = both.join("libgruyere.so");
    let library = library.to_str().unwrap();
    let work = ["3", "2", "driver"];
    for (mode, word) in [("--manage", "managed"), ("--observe", "observed")] {
        let trace = phantom.at(&format!("run{mode}.trace.zst"));
        let conf = format!("preload:driver,trace:{}", trace.display());
        let output = phantom.run(&["--library", library, mode, "--conf", &conf], &work);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{said}");
        // As in docs/record-a-trace.md.
        let lines = text(&zstd::decode_all(std::fs::File::open(&trace).unwrap()).unwrap());
        let count = |word: &str| lines.lines().filter(|line| line.starts_with(word)).count();
        assert_eq!((count("a "), count("f ")), (3, 2), "{mode}: {lines}");
        let rows = rows(&said);
        assert!(rows.len() == 1 && said.contains(word), "{said}");
        assert_eq!(
            (&rows[0][1..3], &rows[0][8..10]),
            (&["192.00", "MiB"].map(String::from)[..], &["3", "2"].map(String::from)[..])
        );
    }
    let output = phantom.run(&["--library", library, "--observe"], &work);
    assert_eq!(output.status.code(), Some(0));
    assert!(text(&output.stderr).contains("no device memory was served"));

    std::fs::remove_file(both.join("libgruyere_driver.so")).unwrap();
    let output = phantom.run(&["--library", library, "--conf", "preload:driver"], &work);
    assert_eq!(output.status.code(), Some(125));
    assert!(text(&output.stderr).contains("libgruyere_driver.so"), "{output:?}");
}

/// Builds libgruyere_driver.so with this test's profile.
fn driver_library() -> PathBuf {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .args(["build", "--quiet", "--package", "gruyere-preload", "--message-format=json"])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    let messages = text(&output.stdout);
    let file = messages.split('"').find(|word| word.ends_with("/libgruyere_driver.so"));
    PathBuf::from(file.expect("cargo names the library"))
}
