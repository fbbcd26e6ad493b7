//! Programs observed from outside, recorded and killed.
//!
//! Without libtest's harness: the observed program is this one too, started with a role as its
//! first argument.

#[path = "common/signals.rs"]
#[allow(dead_code)]
mod signals;

use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Output, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use gruyere::config::Config;
use gruyere::driver::StreamHandle;
use gruyere::heap::{Error, Heap, Lifetime, lifetime};
use gruyere_phantom::{Config as GpuConfig, Gpu, StreamKind, as_program};
use gruyere_phantom_driver::PhantomDriver;
use gruyere_record::Reader;
use gruyere_record::facts::Process;
use gruyere_replay::trace::{Op, Trace};
use serde_json::Value;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match &arguments[..] {
        [role, conf] if role == "program" => return role_program(conf, 1),
        [role, conf] if role == "threads" => return role_program(conf, 4),
        [role, conf] if role == "forever" => return role_forever(conf),
        [role, conf] if role == "refused" => return role_refused(conf),
        [role, conf] if role == "left" => return role_left(conf, false),
        [role, conf] if role == "went_on" => return role_left(conf, true),
        _ => {}
    }
    let tests: &[(&str, fn())] = &[
        ("a_snapshot_from_outside_is_read_by_python_and_tiles_what_is_held", snapshots),
        ("a_diff_tells_what_is_new_and_what_is_gone_and_fails_beyond_a_bound", diffs),
        ("post_reads_whatever_a_killed_process_leaves", killed),
        ("post_without_an_argument_takes_the_process_that_died_last", died_last),
        ("post_names_the_pid_keeps_to_columns_and_ends_with_what_is_seldom_needed", as_asked),
        ("of_a_jobs_ranks_post_takes_the_one_that_ran_out_of_memory", rank_that_ran_out),
        ("the_dead_are_listed_one_a_line_the_newest_first", listed),
        ("one_killed_after_its_out_of_memory_is_one_process_as_it_was_then", killed_after),
        ("one_that_went_on_after_its_out_of_memory_is_told_as_it_ended", killed_later),
        ("a_trace_in_the_process_has_every_call", traced),
        ("a_trace_survives_the_death_of_its_process", traced_and_killed),
        ("a_trace_from_outside_has_the_programs_peak", recorded),
        ("a_trace_with_loss_says_so_and_is_mended", recorded_with_loss),
        ("what_can_not_be_done_is_said_with_its_remedy", refused),
    ];
    // As in libtest: words are filters, and options are ignored.
    let filters: Vec<&String> =
        arguments.iter().filter(|argument| !argument.starts_with('-')).collect();
    for (name, test) in tests {
        if filters.is_empty() || filters.iter().any(|filter| name.contains(filter.as_str())) {
            println!("test {name} ...");
            test();
            println!("test {name} ... ok");
        }
    }
    ExitCode::SUCCESS
}

// ---- roles --------------------------------------------------------------------------------------

const MIB: u64 = 1 << 20;

fn heap(conf: &str) -> (Arc<Gpu>, &'static Heap) {
    let gpu = Arc::new(Gpu::new(GpuConfig::new(32 << 30)));
    let driver = Arc::new(PhantomDriver::new(gpu.clone()));
    let settings = Config::parse(conf).unwrap().heap;
    let heap: &'static Heap = Box::leak(Box::new(Heap::new(driver, settings).unwrap()));
    heap.announce_hooks(3);
    (gpu, heap)
}

struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }
}

/// Makes `calls` random allocations and frees; returns what is live then.
fn work(heap: &Heap, streams: &[StreamHandle], seed: u64, calls: u64, pace: u64) -> Vec<u64> {
    let mut random = Random(seed);
    let mut live = Vec::new();
    for call in 0..calls {
        if live.len() < 20 || random.below(2) == 0 && live.len() < 400 {
            let size = if random.below(8) == 0 {
                MIB + random.below(8 * MIB)
            } else {
                1 + random.below(60_000)
            };
            let tag = Lifetime::ALL[random.below(4) as usize];
            assert!(lifetime::push(tag));
            let stream = streams[random.below(streams.len() as u64) as usize];
            live.push(heap.malloc(size, 0, stream).unwrap());
            assert!(lifetime::pop());
        } else {
            let block = live.swap_remove(random.below(live.len() as u64) as usize);
            if random.below(10) == 0 {
                assert!(
                    heap.record_stream(block, streams[random.below(streams.len() as u64) as usize])
                );
            }
            assert!(heap.free(block));
        }
        if call % 500 == 499 {
            heap.mark_step();
        }
        if pace > 0 && call % pace == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    live
}

/// Works before and after a line of its input, and prints its heap's statistics each time.
fn role_program(conf: &str, threads: u64) -> ExitCode {
    let (gpu, heap) = heap(conf);
    let side = StreamHandle(as_program(|| gpu.stream_create(0, StreamKind::NonBlocking)).unwrap());
    let streams = [StreamHandle(0), side];
    let pace = if conf.contains("ring_events:1024") { 0 } else { 100 };
    let mut lines = std::io::stdin().lines();
    let mut say = |heap: &Heap| {
        let stats = heap.stats(0).unwrap();
        println!(
            "{{\"live\": {}, \"peak\": {}, \"reserved\": {}}}",
            stats.live, stats.live_peak, stats.reserved
        );
        lines.next().is_some()
    };
    work(heap, &streams, 7, 300, 0);
    if !say(heap) {
        return ExitCode::SUCCESS;
    }
    std::thread::scope(|scope| {
        (0..threads).for_each(|n| {
            scope.spawn(move || work(heap, &streams, 99 + n, 20_000, pace));
        });
    });
    say(heap);
    heap.record().close();
    heap.flush_trace();
    ExitCode::SUCCESS
}

/// Works until it is killed.
fn role_forever(conf: &str) -> ExitCode {
    let (_gpu, heap) = heap(conf);
    println!("{}", heap.record().path().expect("a file").display());
    for n in 1..3 {
        std::thread::spawn(move || {
            loop {
                let live = work(heap, &[StreamHandle(0)], n, 5000, 0);
                live.into_iter().for_each(|block| assert!(heap.free(block)));
            }
        });
    }
    std::thread::sleep(Duration::from_secs(60));
    ExitCode::SUCCESS
}

/// Requests more than the device has, and waits to be killed.
fn role_refused(conf: &str) -> ExitCode {
    let (_gpu, heap) = heap(conf);
    let block = heap.malloc(64 << 20, 0, StreamHandle(0)).unwrap();
    let refused = heap.malloc(1 << 40, 0, StreamHandle(0));
    let Err(Error::OutOfMemory(mut report)) = refused else { panic!("{refused:?}") };
    heap.note_out_of_memory(&mut report, StreamHandle(0));
    // Like an exception that leaves frames behind.
    assert!(heap.free(block));
    println!("{}", heap.record().path().expect("a file").display());
    std::thread::sleep(Duration::from_secs(60));
    ExitCode::SUCCESS
}

/// Ends by an out-of-memory, as under the Python package, but a thread keeps the process alive
/// until it is killed; `goes_on`: and it works.
fn role_left(conf: &str, goes_on: bool) -> ExitCode {
    let (_gpu, heap) = heap(conf);
    let block = heap.malloc(64 << 20, 0, StreamHandle(0)).unwrap();
    let refused = heap.malloc(1 << 40, 0, StreamHandle(0));
    let Err(Error::OutOfMemory(mut report)) = refused else { panic!("{refused:?}") };
    heap.note_out_of_memory(&mut report, StreamHandle(0));
    heap.record().keep_moment().unwrap();
    // The exception frees it on its way.
    assert!(heap.free(block));
    let copy = heap.record().leave_copy().expect("a file");
    if goes_on {
        // A reader takes the last sign of life from the clock, which is read now and then.
        std::thread::sleep(Duration::from_millis(100));
        (0..8).for_each(|_| _ = work(heap, &[StreamHandle(0)], 3, 5000, 0));
    }
    println!("{}", copy.display());
    std::thread::sleep(Duration::from_secs(60));
    ExitCode::SUCCESS
}

// ---- helpers ------------------------------------------------------------------------------------

/// A child in a role; killed on drop.
struct Running {
    child: Child,
    out: BufReader<std::process::ChildStdout>,
}

impl Running {
    fn start(role: &str, conf: &str) -> Running {
        Running::begin(Command::new(std::env::current_exe().unwrap()), role, conf)
    }

    /// Starts it with its record in `folder`.
    fn start_in(folder: &Path, role: &str) -> Running {
        Running::start_with(folder, role, &[])
    }

    /// The same with more variables in its environment.
    fn start_with(folder: &Path, role: &str, variables: &[(&str, &str)]) -> Running {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.env("GRUYERE_RECORD_DIR", folder).envs(variables.iter().copied());
        Running::begin(command, role, "record:on")
    }

    fn begin(mut command: Command, role: &str, conf: &str) -> Running {
        command
            .args([role, conf])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .env_remove("GRUYERE_CONF");
        let mut child = command.spawn().unwrap();
        let out = BufReader::new(child.stdout.take().unwrap());
        Running { child, out }
    }

    fn pid(&self) -> String {
        self.child.id().to_string()
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.out.read_line(&mut line).unwrap();
        line.trim().to_owned()
    }

    fn json(&mut self) -> Value {
        serde_json::from_str(&self.line()).unwrap()
    }

    fn go_on(&mut self) {
        self.child.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
    }

    fn ends(mut self) {
        self.go_on();
        assert!(self.child.wait().unwrap().success());
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gruyere"));
    // SIGINT ends a recorder, but these tests may have inherited it as ignored.
    signals::as_from_a_shell(&mut command).args(arguments).env("RUST_BACKTRACE", "0");
    command.env_remove("COLUMNS");
    command
}

fn gruyere(arguments: &[&str]) -> Output {
    command(arguments).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
}

/// Live bytes (rounded) at the end of a trace.
fn live_at_the_end(trace: &Trace) -> u64 {
    let mut live = std::collections::HashMap::new();
    for op in &trace.ops {
        match *op {
            Op::Alloc { size, block, .. } => _ = live.insert(block, size.next_multiple_of(512)),
            Op::Free { block } => _ = live.remove(&block),
            _ => {}
        }
    }
    live.values().sum()
}

/// The command that replays traces accepts it.
fn replays(path: &Path) {
    let folder = tempfile::tempdir().unwrap();
    let arguments = [
        "bench",
        "--json",
        "--out",
        folder.path().to_str().unwrap(),
        "--trace",
        path.to_str().unwrap(),
    ];
    let output = gruyere(&arguments);
    assert!(output.status.success(), "{output:?}");
    let report = json(&output);
    for run in report["traces"][0]["runs"].as_array().unwrap() {
        assert_eq!(run["fault_count"], 0, "{run}");
    }
}

// ---- tests --------------------------------------------------------------------------------------

fn snapshots() {
    let folder = tempfile::tempdir().unwrap();
    let mut program = Running::start("program", "record:on");
    let said = program.json();
    let pickle = folder.path().join("now.pickle");
    let output = gruyere(&["snapshot", &program.pid(), "-o", pickle.to_str().unwrap()]);
    assert!(output.status.success(), "{output:?}");
    let script = "import json, pickle, sys\n\
                  raw = open(sys.argv[1], 'rb').read()\n\
                  assert raw[:2] == b'\\x80\\x04'\n\
                  snapshot = pickle.loads(raw)\n\
                  for segment in snapshot['segments']:\n\
                  \x20   at = segment['address']\n\
                  \x20   for block in segment['blocks']:\n\
                  \x20       assert block['address'] == at\n\
                  \x20       at += block['size']\n\
                  \x20   assert at == segment['address'] + segment['total_size']\n\
                  print(json.dumps({'live': sum(s['allocated_size'] for s in \
                  snapshot['segments']),\n\
                  \x20   'reserved': sum(s['total_size'] for s in snapshot['segments']), 'traces': \
                  len(snapshot['device_traces'][0]),\n\
                  \x20   'keys': sorted(snapshot)}))\n";
    let python =
        Command::new("python3").args(["-c", script]).arg(&pickle).output().expect("python3");
    assert!(python.status.success(), "{python:?}");
    let read = json(&python);
    assert_eq!(read["live"], said["live"]);
    assert!(read["reserved"].as_u64() <= said["reserved"].as_u64());
    assert!(read["traces"].as_u64().unwrap() > 300);
    let keys: Value = serde_json::json!([
        "allocator_settings",
        "device_traces",
        "external_annotations",
        "segments"
    ]);
    assert_eq!(read["keys"], keys);
    let state = json(&gruyere(&["snapshot", &program.pid(), "--json", "-o", "-"]));
    assert_eq!(state["devices"][0]["held"]["live_bytes"], said["live"]);
    assert_eq!(state["devices"][0]["held"]["reserved_bytes"], said["reserved"]);
    program.go_on();
    program.line();
    program.ends();
}

fn diffs() {
    let folder = tempfile::tempdir().unwrap();
    let before = folder.path().join("before.json");
    let before = before.to_str().unwrap();
    let mut program = Running::start("program", "record:on");
    let first = program.json();
    assert!(gruyere(&["snapshot", &program.pid(), "--json", "-o", before]).status.success());
    let same = gruyere(&["diff", before, &program.pid(), "--json", "--fail-if", "live>+0"]);
    assert_eq!(same.status.code(), Some(0), "{same:?}");
    assert_eq!(
        (&json(&same)["devices"][0]["new"]["blocks"], &json(&same)["devices"][0]["gone"]["blocks"]),
        (&0.into(), &0.into())
    );
    program.go_on();
    let second = program.json();
    let pid = program.pid();
    let output = gruyere(&[
        "diff",
        before,
        &pid,
        "--json",
        "--fail-if",
        "blocks>+1",
        "--fail-if",
        "live>100GiB",
    ]);
    assert_eq!(output.status.code(), Some(4), "{output:?}");
    assert!(text(&output.stderr).contains("blocks>+1") && !text(&output.stderr).contains("100GiB"));
    let device = json(&output)["devices"][0].clone();
    assert_eq!(
        (&device["live"]["before"], &device["live"]["after"]),
        (&first["live"], &second["live"])
    );
    let number = |value: &Value| value.as_u64().unwrap();
    assert_eq!(
        number(&first["live"]) + number(&device["new"]["bytes"]) - number(&device["gone"]["bytes"]),
        number(&second["live"])
    );
    for table in ["lifetimes", "sizes", "streams"] {
        let rows = device[table].as_array().unwrap();
        let after: u64 = rows.iter().map(|row| number(&row[1]["after"])).sum();
        assert_eq!(after, number(&second["live"]), "{table}");
    }
    let page = text(&gruyere(&["diff", before, &pid]).stdout);
    assert!(
        page.contains("lifetime persistent")
            && page.contains("new: ")
            && page.contains("s after A"),
        "{page}"
    );
    // First the conclusion, in percent; all of it fits 80 columns.
    let bytes = |which: &Value| number(&which["live"]) as f64;
    let verb = if bytes(&second) > bytes(&first) { "grew" } else { "shrank" };
    assert!(page.starts_with(&format!("device 0: live {verb} by ")), "{page}");
    let share = format!("{:.0}%", (bytes(&second) / bytes(&first) - 1.0).abs() * 100.0);
    let said = page.lines().next().unwrap();
    assert!(said.contains("% (") && said.contains(", held "), "{said}");
    assert!(said.contains(&share) || share.len() < 3, "{share}: {said}");
    assert!(page.lines().all(|line| line.chars().count() <= 80), "{page}");
    program.ends();
}

fn killed() {
    let mut random = Random(12345);
    let (mut torn, mut read) = (0, 0);
    for round in 0..40 {
        let mut program = Running::start("forever", "record:on");
        let path = program.line();
        std::thread::sleep(Duration::from_micros(2000 + random.below(30_000)));
        program.child.kill().unwrap();
        program.child.wait().unwrap();
        let output = gruyere(&["post", &path, "--json"]);
        let code = output.status.code();
        assert!(matches!(code, Some(0 | 3)), "round {round}: {output:?}");
        torn += u32::from(code == Some(3));
        let post = json(&output);
        assert_eq!(post["ended"]["how"], "killed");
        let device = &post["state"]["devices"][0];
        read += u32::from(device["live"]["all"]["blocks"].as_u64().unwrap() > 0);
        if round == 0 {
            let brief = [
                "without a clean exit",
                "Its last event was at",
                "The last events",
                "What to look at next",
                "--sweep",
            ];
            let page = text(&gruyere(&["post", &path]).stdout);
            let full = text(&gruyere(&["post", &path, "--full"]).stdout);
            for part in brief {
                assert!(page.contains(part) && full.contains(part), "no {part:?} in\n{page}");
            }
            for part in ["  lifetime ", "The map", "'s timeline, in s"] {
                assert!(full.contains(part) && !page.contains(part), "{part}: {page}");
            }
            assert!(page.lines().count() <= 60, "{page}");
            let snapshot = gruyere(&["snapshot", &path, "--json", "-o", "-"]);
            assert!(snapshot.status.code().is_some_and(|code| matches!(code, 0 | 3)));
        }
        std::fs::remove_file(&path).unwrap();
    }
    println!("{torn} of 40 were torn, {read} had live blocks");
    assert!(read >= 30, "{read} of 40 had live blocks");
    let mut program = Running::start("program", "record:on");
    program.line();
    let running = gruyere(&["post", &program.pid()]);
    assert!(text(&running.stdout).contains("It runs"), "{running:?}");
    program.go_on();
    program.line();
    program.ends();
}

/// Three processes that died one after another in `folder`: their pids, first death first.
fn three_dead(folder: &Path) -> [String; 3] {
    // All start together: otherwise one would tidy up after another.
    let mut running = ["forever", "refused", "forever"].map(|role| Running::start_in(folder, role));
    let pids = running.each_ref().map(Running::pid);
    for program in &mut running {
        program.line();
    }
    let mut died = SystemTime::UNIX_EPOCH;
    for (at, program) in running.iter_mut().enumerate() {
        // So that it has worked for a while.
        std::thread::sleep(Duration::from_millis(200));
        if at == 2 {
            // It works, but on a busy machine perhaps not since the others died.
            wait_for_sign_of_life(folder, &pids[at], died);
        }
        program.child.kill().unwrap();
        program.child.wait().unwrap();
        died = SystemTime::now();
    }
    pids
}

/// Waits until the process has given a sign of life later than `since`.
fn wait_for_sign_of_life(folder: &Path, pid: &str, since: SystemTime) {
    let file = record_of(folder, pid);
    let late = Instant::now() + Duration::from_secs(60);
    while Reader::open(&file).unwrap().last_seen() <= since {
        assert!(Instant::now() < late, "{pid} does not go on");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The process's record in a folder.
fn record_of(folder: &Path, pid: &str) -> PathBuf {
    let mut files = std::fs::read_dir(folder).unwrap().map(|file| file.unwrap().path());
    files.find(|file| file.to_string_lossy().contains(&format!("-{pid}-"))).unwrap()
}

/// The rows of a list of processes, without the continuation lines of conclusions.
fn rows(text: &str) -> Vec<&str> {
    let lines = text.lines().skip_while(|line| !line.contains("AGE  EXIT")).skip(1);
    let has_pid = |line: &&str| {
        let first = line.split_whitespace().next();
        first.is_some_and(|word| word.parse::<u64>().is_ok()) && !line.starts_with("          ")
    };
    lines.filter(has_pid).collect()
}

fn as_asked() {
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path().to_str().unwrap();
    let [first, ..] = three_dead(folder.path());
    let post = |columns: &[(&str, &str)]| {
        let mut command = command(&["post", &first]);
        let command = command.env("GRUYERE_RECORD_DIR", directory).envs(columns.iter().copied());
        text(&command.output().unwrap().stdout)
    };
    let whole = |page: &str| {
        page.lines().any(|line| line.contains("What killed it") && line.contains("the GPU driver"))
    };
    let (wide, narrow) = (post(&[]), post(&[("COLUMNS", "80")]));
    assert!(whole(&wide) && !whole(&narrow), "{wide}\n{narrow}");
    for page in [wide, narrow] {
        assert!(page.contains(&format!("gruyere map {first}`")), "{page}");
        assert!(page.contains(&format!("gruyere post {first} --full")), "{page}");
        assert!(!page.contains(directory), "{page}");
        let place = |part: &str| page.find(part).unwrap_or_else(|| panic!("{part}: {page}"));
        assert!(place("What to look at next") < place("The last events"), "{page}");
    }
    // Where the pid is not enough to find the record: its path once, and then by a variable.
    let file = record_of(folder.path(), &first);
    let page = text(&gruyere(&["post", file.to_str().unwrap()]).stdout);
    assert!(page.contains(&format!("`RECORD={}`", file.display())), "{page}");
    for command in ["gruyere map \"$RECORD\"`", "gruyere post \"$RECORD\" --full`"] {
        assert!(page.contains(command), "{page}");
    }
    assert_eq!(page.matches(directory).count(), 1, "{page}");
}

/// Makes the record of the dead process `pid` in `folder` again, as of a later process with its
/// pid.
fn of_another_start(folder: &Path, pid: &str) -> PathBuf {
    let file = record_of(folder, pid);
    let Process { created, start_time, .. } = Reader::open(&file).unwrap().process();
    let mut bytes = std::fs::read(&file).unwrap();
    let place = bytes.windows(8).position(|of| of == created.to_le_bytes()).unwrap();
    bytes[place..place + 8].copy_from_slice(&(created + 1).to_le_bytes());
    let name = file.file_name().unwrap().to_str().unwrap();
    let [was, is] = [start_time, start_time + 1].map(|start| format!("-{start}-"));
    let again = folder.join(name.replace(&was, &is));
    assert_ne!(again, file);
    std::fs::write(&again, bytes).unwrap();
    again
}

fn died_last() {
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path().to_str().unwrap();
    let post = |more: &[&str]| gruyere(&[&["post", "--directory", directory], more].concat());
    let nobody = post(&[]);
    assert_eq!(nobody.status.code(), Some(1), "{nobody:?}");
    assert!(text(&nobody.stderr).contains("with an out-of-memory error"), "{nobody:?}");
    let [first, refused, last] = three_dead(folder.path());
    // A running process is not the one wanted.
    let mut program = Running::start_in(folder.path(), "forever");
    program.line();
    let output = post(&[]);
    let page = text(&output.stdout);
    assert!(matches!(output.status.code(), Some(0 | 3)), "{output:?}");
    let said = page.lines().next().unwrap();
    assert!(said.starts_with("The process that died last, "), "{page}");
    assert!(said.contains(&format!(" s ago: {last} (")), "{page}");
    assert!(page.contains(&format!("pid {last},")), "{page}");
    let others = rows(page.split("\nOthers that died").nth(1).expect("a list"));
    assert!(others.len() == 2 && !page.contains(&format!("\n{} ", program.pid())), "{page}");
    for pid in [&first, &refused] {
        assert!(others.iter().any(|line| line.trim().starts_with(&**pid)), "{pid}: {others:?}");
    }
    let told = json(&post(&["--json"]));
    assert_eq!(
        (&told["died_last"], &told["state"]["process"]["pid"]),
        (&true.into(), &last.parse::<u64>().unwrap().into())
    );
    // With a named process, the text does not repeat which it is.
    let named = text(&post(&[&first]).stdout);
    assert!(named.contains(&format!("pid {first},")) && !named.contains("died last"), "{named}");
    // A container's program has the same pid each time that it is started again.
    let again = of_another_start(folder.path(), &first);
    let output = post(&[&first]);
    let (page, told) = (text(&output.stdout), text(&output.stderr));
    assert!(page.contains(&format!("pid {first},")), "{output:?}");
    assert!(told.contains("2 dead processes had the pid"), "{told}");
    assert!(told.contains(&*again.to_string_lossy()) && told.contains("name the file"), "{told}");
    // Without the folder, only the pid can lead to a record.
    let elsewhere = gruyere(&["post", "--directory", "/nonexistent", &first]);
    let said = text(&elsewhere.stderr);
    assert!(said.contains("no such folder") && said.contains("has no record"), "{said}");
    std::fs::read_dir(folder.path()).unwrap().flatten().for_each(|entry| {
        if !entry.file_name().to_string_lossy().contains(&*program.pid()) {
            std::fs::remove_file(entry.path()).unwrap();
        }
    });
    let living = text(&post(&[]).stdout);
    assert!(living.contains("It runs") && !living.contains("died last"), "{living}");
}

fn rank_that_ran_out() {
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path().to_str().unwrap();
    let rank = |role, rank: &str, size| {
        let job = [("RANK", rank), ("WORLD_SIZE", size), ("TORCHELASTIC_RUN_ID", "7")];
        Running::start_with(folder.path(), role, &job)
    };
    let end = |mut program: Running| {
        std::thread::sleep(Duration::from_millis(200));
        program.child.kill().unwrap();
        program.child.wait().unwrap();
    };
    let post = || text(&gruyere(&["post", "--directory", directory]).stdout);
    let mut ranks =
        [rank("forever", "0", "2"), rank("refused", "1", "2"), rank("refused", "0", "1")];
    let pids = ranks.each_ref().map(Running::pid);
    ranks.iter_mut().for_each(|program| drop(program.line()));
    let [waits, refused, alone] = ranks;
    // The launcher ends the others once one has failed.
    end(alone);
    end(refused);
    end(waits);
    let page = post();
    let said = page.lines().next().unwrap();
    assert!(said.starts_with("Of the job that died last, the rank that ran out"), "{page}");
    assert!(said.contains(&format!(" {} (", pids[1])), "{page}");
    let others = rows(page.split("\nOthers that died").nth(1).expect("a list"));
    let listed: Vec<_> = others.iter().filter_map(|line| line.split_whitespace().next()).collect();
    assert_eq!(listed, [&*pids[0], &*pids[2]], "latest first: {page}");
}

fn listed() {
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path().to_str().unwrap();
    let [first, refused, last] = three_dead(folder.path());
    let told = json(&gruyere(&["ps", "--json", "--directory", directory]));
    let dead = told["dead"].as_array().unwrap();
    let pids: Vec<String> = dead.iter().map(|one| one["pid"].to_string()).collect();
    let signs: Vec<u64> =
        dead.iter().map(|one| one["last_sign_of_life_nanoseconds"].as_u64().unwrap()).collect();
    assert!(signs.is_sorted_by(|newer, older| newer >= older), "{told}");
    assert!(pids.len() == 3 && pids[0] == last && pids.contains(&first), "{told}");
    for (pid, one) in pids.iter().zip(dead) {
        let exit = if *pid == refused { "refused" } else { "unclean" };
        assert_eq!(one["exit"], exit, "{one}");
        assert!(*pid != refused || one["cause"] == "large_request", "{one}");
    }
    for (arguments, stream) in [(["ps"], 1), (["map"], 2)] {
        let mut command = command(&arguments);
        let output = command.args(["--directory", directory]).env("COLUMNS", "80").output();
        let output = output.unwrap();
        let text = text(if stream == 1 { &output.stdout } else { &output.stderr });
        let rows = rows(&text);
        assert_eq!(rows.len(), 3, "{text}");
        let head = text.lines().position(|line| line.contains("AGE  EXIT")).expect("a list");
        assert!(text.lines().skip(head).all(|line| line.chars().count() <= 80), "{text}");
        let begin: Vec<&str> =
            rows.iter().filter_map(|row| row.split_whitespace().next()).collect();
        assert_eq!(begin, pids, "{text}");
        let row = rows[pids.iter().position(|pid| *pid == refused).unwrap()];
        // The part in common with the others is left out.
        assert!(row.contains(" s  refused  …refused "), "{text}");
        // The conclusion is whole, over lines.
        let said = text.replace(|c: char| c.is_whitespace(), "");
        assert!(said.contains("1TiBatonce:morethanthe32GiBthatitmayhave"), "{text}");
        assert!(row.contains("  One request asks for "), "{text}");
    }
    let swept = text(&gruyere(&["ps", "--sweep", "--directory", directory]).stdout);
    assert!(swept.contains("removed 3 records"), "{swept}");
}

/// A process in this role, and the copy that it left.
fn left(folder: &Path, role: &str) -> (Running, String) {
    let mut program = Running::start_in(folder, role);
    let copy = program.line();
    (program, copy)
}

fn records(folder: &Path) -> usize {
    std::fs::read_dir(folder).unwrap().count()
}

fn killed_after() {
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path().to_str().unwrap();
    let (mut program, copy) = left(folder.path(), "left");
    let pid = program.pid();
    let by_pid = |arguments: &[&str]| {
        let output = gruyere(&[arguments, &["--directory", directory]].concat());
        assert!(output.status.success(), "{arguments:?}: {output:?}");
        output
    };
    // While it lives, its own record has the state, and the copy is named.
    let alive = text(&by_pid(&["post", &pid]).stdout);
    let named = format!("What was live then: `gruyere post {copy}`");
    assert!(alive.contains("It runs") && alive.contains(&named), "{alive}");
    program.child.kill().unwrap();
    program.child.wait().unwrap();
    assert_eq!(records(folder.path()), 2);
    let post = json(&by_pid(&["post", &pid, "--json"]));
    assert_eq!(post["state"]["devices"][0]["held"]["live_bytes"], 64 * MIB, "as it was then");
    assert_eq!(post["conclusion"]["cause"], "large_request", "{post}");
    assert!(!post["next"].to_string().contains("What was live then"), "{post}");
    let page = folder.path().join("page.html");
    by_pid(&["post", &pid, "--html", page.to_str().unwrap()]);
    let state = folder.path().join("state.json");
    by_pid(&["snapshot", &pid, "--json", "-o", state.to_str().unwrap()]);
    let state = state.to_str().unwrap();
    for arguments in
        [&["map", &pid][..], &["stat", &pid], &["address", &pid, "0x1000"], &["diff", state, &pid]]
    {
        by_pid(arguments);
    }
    // Listed and counted once.
    let dead = json(&by_pid(&["ps", "--json"]));
    let dead = dead["dead"].as_array().unwrap();
    assert_eq!(dead.len(), 1, "{dead:?}");
    assert_eq!((&dead[0]["record"], &dead[0]["exit"]), (&copy.into(), &"out_of_memory".into()));
    let last = text(&by_pid(&["post"]).stdout);
    assert!(last.contains("died last") && !last.contains("Others that died"), "{last}");
    std::fs::remove_file(page).unwrap();
    std::fs::remove_file(state).unwrap();
    // A new process that keeps the record of one other removes neither.
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.env("GRUYERE_RECORD_DIR", directory);
    let mut other = Running::begin(command, "forever", "record:on,records_kept:1");
    other.line();
    assert_eq!(records(folder.path()), 3);
}

fn killed_later() {
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path().to_str().unwrap();
    let (mut program, copy) = left(folder.path(), "went_on");
    program.child.kill().unwrap();
    program.child.wait().unwrap();
    let output = gruyere(&["post", &program.pid(), "--directory", directory]);
    let page = text(&output.stdout);
    assert!(output.status.success() && page.contains("and went on"), "{output:?}");
    assert!(page.contains(&format!("What was live then: `gruyere post {copy}`")), "{page}");
    let then = text(&gruyere(&["post", &copy]).stdout);
    assert!(then.contains("It ended with an out-of-memory error"), "{then}");
    let dead = json(&gruyere(&["ps", "--json", "--directory", directory]));
    let dead = dead["dead"].as_array().unwrap();
    assert_eq!((dead.len(), &dead[0]["exit"]), (1, &"unclean".into()), "{dead:?}");
}

fn traced() {
    let folder = tempfile::tempdir().unwrap();
    for role in ["program", "threads"] {
        let name = folder.path().join(format!("{role}-%p-%r.trace.zst"));
        let mut program = Running::start(role, &format!("trace:{}", name.display()));
        let path = folder.path().join(format!("{role}-{}-0.trace.zst", program.pid()));
        program.line();
        program.go_on();
        let said = program.json();
        program.ends();
        let trace = Trace::open(&path).unwrap();
        assert_eq!(live_at_the_end(&trace), said["live"].as_u64().unwrap());
        let peak = said["peak"].as_u64().unwrap();
        match role {
            "program" => assert_eq!(trace.peak_live, peak),
            // A free is noted before it is done, a malloc after.
            _ => assert!(
                trace.peak_live <= peak && trace.peak_live > peak - 64 * MIB,
                "{} {peak}",
                trace.peak_live
            ),
        }
        assert!(trace.ops.contains(&Op::Step) && trace.streams.len() == 2);
        replays(&path);
    }
}

fn traced_and_killed() {
    let folder = tempfile::tempdir().unwrap();
    let mut random = Random(777);
    for round in 0..10 {
        let path = folder.path().join(format!("{round}.trace.zst"));
        let mut program = Running::start("forever", &format!("trace:{}", path.display()));
        let record = program.line();
        // Until some of it is on the disk, however busy the machine is; then at any moment.
        while Trace::open(&path).map_or(true, |trace| trace.operations <= 1000) {
            assert_eq!(program.child.try_wait().unwrap(), None, "the program has ended");
            std::thread::sleep(Duration::from_millis(20));
        }
        std::thread::sleep(Duration::from_millis(random.below(300)));
        program.child.kill().unwrap();
        program.child.wait().unwrap();
        let trace = Trace::open(&path).unwrap_or_else(|error| panic!("round {round}: {error}"));
        assert!(trace.operations > 1000, "round {round}: {} calls", trace.operations);
        std::fs::remove_file(record).unwrap();
    }
}

/// Waits until the recorder has read the live blocks, and begun to follow. (The program has blocks
/// by then. A block freed during the recorder's first read may leave the block map before its free
/// is in the ring: a free of an unknown block.)
fn until_recording(recorder: &mut Child, path: &Path) {
    while Trace::open(path).map_or(true, |trace| trace.operations == 0) {
        assert_eq!(recorder.try_wait().unwrap(), None, "the recorder has ended");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Records a program from outside; returns the summary, the program's output, and the trace.
fn record(conf: &str, role: &str, path: &Path) -> (Value, i32, Value, Trace) {
    let mut program = Running::start(role, conf);
    program.line();
    let mut recorder = command(&["record", &program.pid(), "--json", "-o", path.to_str().unwrap()]);
    let mut recorder = recorder.stdout(Stdio::piped()).spawn().unwrap();
    until_recording(&mut recorder, path);
    program.go_on();
    let said = program.json();
    program.ends();
    let output = recorder.wait_with_output().unwrap();
    let summary = json(&output);
    (summary, output.status.code().unwrap(), said, Trace::open(path).unwrap())
}

fn recorded() {
    let folder = tempfile::tempdir().unwrap();
    for role in ["program", "threads"] {
        let path = folder.path().join("a.trace.zst");
        let (summary, code, said, trace) = record("ring_events:1048576", role, &path);
        assert_eq!(
            (code, &summary["lost_events"], &summary["unknown_frees"]),
            (0, &0.into(), &0.into()),
            "{summary}"
        );
        assert!(summary["blocks_at_start"].as_u64().unwrap() > 10);
        assert_eq!(live_at_the_end(&trace), said["live"].as_u64().unwrap());
        let peak = said["peak"].as_u64().unwrap();
        match role {
            "program" => assert_eq!(trace.peak_live, peak),
            _ => assert!(trace.peak_live.abs_diff(peak) < 64 * MIB, "{} {peak}", trace.peak_live),
        }
        assert!(trace.ops.contains(&Op::Step));
        replays(&path);
        std::fs::remove_file(&path).unwrap();
    }
}

fn recorded_with_loss() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.trace.zst");
    // Rings overwritten many times between two reads.
    let (summary, code, said, trace) = record("ring_events:1024", "program", &path);
    assert_eq!(code, 3, "{summary}");
    assert!(
        summary["lost_events"].as_u64().unwrap() > 0
            && summary["mended_blocks"].as_u64().unwrap() > 0,
        "{summary}"
    );
    assert!(
        trace.marks.iter().any(|mark| mark.contains("events lost until here")),
        "{:?}",
        trace.marks
    );
    assert_eq!(
        live_at_the_end(&trace),
        said["live"].as_u64().unwrap(),
        "the block map is right in the end"
    );
    replays(&path);
}

fn refused() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let out = out.to_str().unwrap();
    let mut program = Running::start("program", "record:on");
    program.line();
    let pid = program.pid();
    let failed = |arguments: &[&str], code: i32, part: &str| {
        let output = gruyere(arguments);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {output:?}");
        assert!(text(&output.stderr).contains(part), "{arguments:?}: {output:?}");
    };
    failed(&["snapshot", &pid], 2, "--output");
    failed(&["snapshot", &pid, "-o", "/no/such/folder/x"], 1, "-o");
    failed(&["record", &pid, "-o", "/dev/full"], 1, "-o");
    failed(&["record", &pid, "-o", out, "--for", "long"], 2, "30s");
    failed(&["record", &pid, "-o", "-"], 2, "as in run.trace.zst");
    failed(&["diff", &pid, &pid, "--fail-if", "heat>1"], 2, "held");
    let pickle = folder.path().join("now.pickle");
    let pickle = pickle.to_str().unwrap();
    assert!(gruyere(&["snapshot", &pid, "-o", pickle]).status.success());
    failed(&["diff", pickle, &pid], 1, "--json");
    std::fs::write(out, "{\"format\": 3}").unwrap();
    failed(&["diff", out, &pid], 1, "--json");
    let mut recorder =
        command(&["record", &pid, "-o", out]).stdout(Stdio::piped()).spawn().unwrap();
    until_recording(&mut recorder, Path::new(out));
    failed(&["record", &pid, "-o", out], 1, "another process");
    signals::send(recorder.id(), libc::SIGINT);
    signals::until("the recorder ends", || recorder.try_wait().unwrap().is_some());
    let mut said = String::new();
    recorder.stdout.take().unwrap().read_to_string(&mut said).unwrap();
    assert!(recorder.wait().unwrap().success() && said.contains("0 events lost"), "{said}");
    let record =
        json(&gruyere(&["stat", &pid, "--json"]))["record"]["path"].as_str().unwrap().to_owned();
    program.child.kill().unwrap();
    program.child.wait().unwrap();
    failed(&["record", &record, "-o", out], 1, "gruyere post");
    std::fs::remove_file(record).unwrap();
    for name in ["diff", "post", "record", "snapshot"] {
        let help = text(&gruyere(&[name, "--help"]).stdout);
        assert!(help.contains("Examples:") && help.contains("Exit codes:"), "{help}");
    }
}
