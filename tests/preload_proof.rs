//! Proofs of the LD_PRELOAD door on whole programs (tests/preload/crowd.c, start.c): what is served
//! is served right, whoever uses it and however it ends; what is observed is as without us.
//!
//! `GRUYERE_PROOF_STARTS` is how often the small program is started (`cargo xtask test` asks for
//! more than a plain test run).

#[path = "common/preload.rs"]
mod preload;

use preload::{Run, Workshop};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::SystemTime;

fn workshop() -> &'static Workshop {
    static WORKSHOP: OnceLock<Workshop> = OnceLock::new();
    WORKSHOP.get_or_init(|| {
        let workshop = Workshop::new();
        workshop.program("crowd.c", "crowd", "-l:libcudart.so.12");
        workshop.program("start.c", "start", "-l:libcudart.so.12");
        workshop
    })
}

/// Kernels are long against all that the host does, and everything that is in order only by luck is
/// found.
const ORACLE: [(&str, &str); 2] = [("PHANTOM_ORACLE", "on"), ("PHANTOM_KERNEL_NS", "200000")];

/// What crowd counts in its last line, by its word.
#[track_caller]
fn count(run: &Run, word: &str) -> i64 {
    let line = run.stdout.lines().last().unwrap_or_default();
    let mut words = line.split_whitespace().skip_while(|&w| w != word);
    let number = words.nth(1).and_then(|number| number.parse().ok());
    number.unwrap_or_else(|| panic!("{}\n{}{}", run.status, run.stdout, run.stderr))
}

/// The books that the stand-in wrote at the end.
fn books(name: &str) -> serde_json::Value {
    let file = std::fs::read_to_string(workshop().path(name)).expect("the books were written");
    serde_json::from_str(&file).expect("they are JSON")
}

/// Runs crowd managed and checks everything that it promises.
#[track_caller]
fn managed(name: &str, arguments: &[&str], settings: &[(&str, &str)]) -> serde_json::Value {
    let file = workshop().path(name);
    let mut all = vec![("CROWD_MANAGED", "1"), ("PHANTOM_BOOKS", &file)];
    all.extend(ORACLE);
    all.extend(settings);
    let run = workshop().preloaded("crowd", arguments, &all);
    assert!(run.success, "{}\n{}{}", run.status, run.stdout, run.stderr);
    assert!(!run.stderr.contains("phantom oracle"), "{}", run.stderr);
    assert_eq!(count(&run, "hazards"), 0);
    assert!(
        count(&run, "mallocs") > 1000
            && count(&run, "touches") > 1000
            && count(&run, "checks") > 10
    );
    assert_eq!(count(&run, "mallocs"), count(&run, "frees"));
    let books = books(name);
    assert_eq!(books["devices"][0]["physical"], 0, "nothing is lost: {books:#}");
    assert_eq!(books["misuse"], serde_json::json!([]));
    assert_eq!(books["hazards"], serde_json::json!([]));
    // The program's own allocations never reached the runtime. (For its last error to read
    // out-of-memory, each refusal asks for what cannot be.)
    for (call, times) in [
        ("cuMemAlloc", count(&run, "refused")),
        ("cuMemFree", 0),
        ("cuMemAllocFromPoolAsync", 0),
        ("cuMemFreeAsync", 0),
    ] {
        assert_eq!(books["program"][call].as_i64().unwrap_or(0), times, "{call}");
    }
    books
}

#[test]
fn a_crowd_is_served_in_order_and_the_books_are_equal() {
    for (seed, streams) in [("1", "32"), ("2", "4")] {
        let books = managed("crowd-books", &["8", streams, "40000", seed], &[]);
        assert!(
            books["allocator"]["cuCtxRecordEvent"].as_u64() > Some(0),
            "events of the context: {books:#}"
        );
    }
}

#[test]
fn so_it_is_on_drivers_without_events_of_a_context() {
    managed("crowd-old", &["8", "32", "40000", "3"], &[("PHANTOM_WITHOUT", "context_events")]);
    let tight = [
        ("PHANTOM_WITHOUT", "context_events"),
        ("PHANTOM_MEMORY", "1.2GiB"),
        ("GRUYERE_LOG", "off"),
    ];
    managed("crowd-old-tight", &["8", "8", "40000", "4"], &tight);
}

/// What cannot be served is answered with an out-of-memory, and nothing else goes wrong.
#[test]
fn so_it_is_where_memory_runs_short() {
    let tight = [("PHANTOM_MEMORY", "1.2GiB"), ("GRUYERE_LOG", "off")];
    managed("crowd-tight", &["8", "32", "40000", "5"], &tight);
}

#[test]
fn so_it_is_with_every_backing() {
    for backing in ["pool", "fixed", "passthrough"] {
        let conf = format!("preload:manage,backing:{backing}");
        let file = workshop().path("crowd-backing");
        let mut settings = vec![("PHANTOM_BOOKS", file.as_str()), ("GRUYERE_CONF", &conf)];
        settings.extend(ORACLE);
        // Block by block from the driver, which takes whole pages for each: there the two count
        // differently.
        if backing != "passthrough" {
            settings.push(("CROWD_MANAGED", "1"));
        }
        let run = workshop().preloaded("crowd", &["8", "32", "20000", "6"], &settings);
        assert!(run.success, "{backing}: {}\n{}{}", run.status, run.stdout, run.stderr);
        assert_eq!(count(&run, "hazards"), 0, "{backing}: {}", run.stderr);
        let books = books("crowd-backing");
        assert_eq!(
            (&books["devices"][0]["physical"], &books["misuse"]),
            (&0.into(), &serde_json::json!([])),
            "{backing}"
        );
    }
}

/// The oracle is not silent because it is blind.
#[test]
fn each_mistake_of_a_program_is_found() {
    let mut settings = vec![("CROWD_MANAGED", "1")];
    settings.extend(ORACLE);
    for (mistake, complaint) in [
        ("unordered", "was handed out while a kernel on"),
        ("early", "for every stream was handed out while a kernel on"),
        ("freed", "which is in no live block"),
    ] {
        // A mistake is one of order: a busy machine may run the threads so that it does no harm.
        let found = ["1", "2", "3", "4"].into_iter().any(|seed| {
            let run = workshop().preloaded("crowd", &["8", "4", "40000", seed, mistake], &settings);
            count(&run, "hazards") > 0 && run.stderr.contains(complaint)
        });
        assert!(found, "{mistake}");
    }
}

/// Line for line: the same calls with the same arguments in the same order, the same results, and
/// the same addresses. Of the library's own there is only the question which device is current,
/// which neither makes a context nor changes anything.
#[test]
fn observed_a_program_is_call_for_call_as_without_us() {
    for (name, without) in [("new", ""), ("old", "context_events")] {
        let logs = [false, true].map(|preloaded| {
            let log = workshop().path(&format!("{name}-{preloaded}.log"));
            let mut settings = vec![
                ("PHANTOM_CALL_LOG", log.as_str()),
                ("GRUYERE_CONF", "preload:observe"),
                ("PHANTOM_WITHOUT", without),
            ];
            settings.extend(ORACLE);
            let arguments = ["1", "32", "10000", "7"];
            let run = match preloaded {
                true => workshop().preloaded("crowd", &arguments, &settings),
                false => workshop().bare("crowd", &arguments, &settings),
            };
            assert!(run.success, "{}\n{}{}", run.status, run.stdout, run.stderr);
            assert_eq!((count(&run, "hazards"), run.stderr.as_str()), (0, ""));
            std::fs::read_to_string(log).unwrap()
        });
        let [without_us, with_us] = logs.each_ref().map(|log| {
            log.lines().filter(|line| *line != "cudaGetDevice(out) = 0 0").collect::<Vec<_>>()
        });
        let differing = without_us.iter().zip(&with_us).find(|(a, b)| a != b);
        assert!(differing.is_none() && without_us.len() == with_us.len(), "{differing:?}");
        for call in [
            "cudaMalloc(",
            "cudaFree(d+",
            "cudaMallocAsync(",
            "cudaFreeAsync(d+",
            "cudaMallocPitch(",
            "cudaMalloc3D(",
        ] {
            assert!(
                with_us.iter().any(|line| line.starts_with(call)),
                "{call} is among the {} calls",
                with_us.len()
            );
        }
    }
}

/// The ways of start.c, and whether the process gets as far as its exit handlers in them.
const WAYS: [(&str, bool); 10] = [
    ("0", true),
    ("1", true),
    ("2", false),
    ("3", true),
    ("4", true),
    ("5", true),
    ("6", true),
    ("7", true),
    ("8", false),
    ("9", true),
];

/// Starts one process and waits for its end: what went wrong, where something did.
fn start(number: usize) -> Option<String> {
    let began = SystemTime::now();
    let (way, to_the_end) = WAYS[number % WAYS.len()];
    let conf =
        if (number / WAYS.len()).is_multiple_of(2) { "preload:manage" } else { "preload:observe" };
    let child = Command::new(workshop().path("start"))
        .arg(way)
        .env("LD_LIBRARY_PATH", &workshop().folder)
        .env("LD_PRELOAD", workshop().path("libgruyere.so"))
        .env("GRUYERE_CONF", conf)
        .env_remove("GRUYERE_LOG")
        .envs([preload::phantom_owner::variable().unwrap()])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let id = child.id();
    let output = child.wait_with_output().unwrap();
    // A process that ends without its exit handlers leaves its record behind, for
    // `gruyere ps --sweep`; nobody else does.
    let mark = format!("-{id}-");
    for entry in std::fs::read_dir(gruyere::config::record_dir::record_dir()).unwrap().flatten() {
        // Not what a process of the same number has left before.
        let made = entry.metadata().and_then(|metadata| metadata.modified());
        if !entry.file_name().to_string_lossy().contains(&mark)
            || made.is_ok_and(|made| made < began)
        {
            continue;
        }
        let _ = std::fs::remove_file(entry.path());
        if to_the_end {
            return Some(format!("way {way}, {conf}: left {:?}", entry.path()));
        }
    }
    let text = preload::phantom_owner::without_its_line(&output.stderr);
    let is_fine = output.status.success() && output.stdout.is_empty() && text.is_empty();
    (!is_fine).then(|| format!("way {way}, {conf}: {}: {text}", output.status))
}

#[test]
fn programs_start_and_end_without_one_failure() {
    let starts = match std::env::var("GRUYERE_PROOF_STARTS") {
        Ok(number) => number.parse().expect("GRUYERE_PROOF_STARTS is a number"),
        Err(_) => 400,
    };
    let began = std::time::Instant::now();
    let next = AtomicUsize::new(0);
    let failures: Vec<String> = std::thread::scope(|scope| {
        let work = || {
            let mine = std::iter::from_fn(|| Some(next.fetch_add(1, Ordering::Relaxed)));
            mine.take_while(|&number| number < starts).filter_map(start).collect::<Vec<_>>()
        };
        let workers = [(); 2].map(|()| scope.spawn(work));
        workers.into_iter().flat_map(|worker| worker.join().unwrap()).collect()
    });
    println!(
        "{starts} starts in {:.1} s, {} failures",
        began.elapsed().as_secs_f64(),
        failures.len()
    );
    assert!(
        failures.is_empty(),
        "{} of {starts}: {:#?}",
        failures.len(),
        &failures[..failures.len().min(10)]
    );
}
