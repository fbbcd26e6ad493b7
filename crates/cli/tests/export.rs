//! `gruyere export` and `gruyere completions`, from another process.

#[path = "common/live_record.rs"]
mod live_record;
#[expect(dead_code, reason = "the tests of the terminal use the rest")]
#[path = "common/signals.rs"]
mod signals;
#[path = "common/sites.rs"]
mod sites;
#[path = "../../../tests/common/skip.rs"]
mod skip;

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use gruyere_record::BlockEntry;
use gruyere_record::sites::NewSite;
use live_record::{Exporter, ask, forged, record, word};
use signals::{as_from_a_shell, send, until};
use sites::{BASE, PAGE, record_with_sites};

const ONLY_ROOT: &str = "only root can give a file away";

fn export(arguments: &[&str], directory: &Path) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gruyere"));
    command
        .arg("export")
        .args(arguments)
        .arg("--directory")
        .arg(directory)
        .output()
        .expect("the command runs")
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("text")
}

fn printed(arguments: &[&str], directory: &Path) -> String {
    let output = export(&[&["--print"], arguments].concat(), directory);
    assert!(output.status.success(), "{output:?}");
    text(&output.stdout).to_owned()
}

/// The value of the only sample whose name and labels have these parts.
fn value(metrics: &str, name: &str, labels: &[&str]) -> f64 {
    let found: Vec<&str> = metrics
        .lines()
        .filter(|line| line.split(['{', ' ']).next() == Some(name))
        .filter(|line| labels.iter().all(|label| line.contains(label)))
        .collect();
    let [line] = found[..] else { panic!("{} of {name} {labels:?} in\n{metrics}", found.len()) };
    line.rsplit(' ').next().and_then(|value| value.parse().ok()).expect("a number")
}

#[test]
fn every_device_in_use_is_told_in_base_units_with_its_labels() {
    let folder = tempfile::tempdir().unwrap();
    let record = record(folder.path());
    // The length of a tick is known only once the record is this old.
    std::thread::sleep(Duration::from_millis(150));
    let metrics = printed(&["--job", "llama"], folder.path());
    let pid = format!("pid=\"{}\"", std::process::id());
    let device = [
        pid.as_str(),
        "gpu=\"1\"",
        "uuid=\"GPU-01010101-0101-0101-0101-010101010101\"",
        "job=\"llama\"",
    ];
    let value = |name, more: &[&str]| value(&metrics, name, &[&device[..], more].concat());
    assert_eq!(value("gruyere_live_bytes", &["lifetime=\"step\""]), f64::from(8 << 20));
    assert_eq!(value("gruyere_live_bytes", &["lifetime=\"auto\""]), f64::from(32 << 20));
    assert_eq!(value("gruyere_pending_bytes", &["lifetime=\"transient\""]), f64::from(4 << 20));
    assert_eq!(value("gruyere_reserved_bytes", &[]), f64::from(112 << 20));
    assert_eq!(value("gruyere_fragmentation_ratio", &[]), 0.25);
    assert_eq!(value("gruyere_unused_ratio", &[]), 0.5);
    assert_eq!(value("gruyere_lost_bytes", &[]), f64::from(28 << 20));
    assert_eq!(value("gruyere_idle_bytes", &[]), f64::from(24 << 20));
    // 56 MiB live and 4 pending.
    assert_eq!(value("gruyere_in_use_peak_bytes", &[]), f64::from(60 << 20));
    // Live memory only; nothing grows.
    assert_eq!(value("gruyere_live_recent_peak_bytes", &[]), f64::from(56 << 20));
    assert!(!metrics.contains("forecast_seconds") && !metrics.contains("gruyere_growth"));
    assert_eq!(value("gruyere_allocations_total", &["pool=\"large\""]), 5.0);
    assert_eq!(value("gruyere_driver_calls_total", &[]), 17.0);
    assert_eq!(value("gruyere_host_wait_seconds_total", &[]), 1.5);
    assert_eq!(value("gruyere_out_of_memory_total", &[]), 2.0);
    assert_eq!(value("gruyere_reclaim_calls_total", &["rung=\"synchronise\""]), 3.0);
    assert_eq!(value("gruyere_reclaim_seconds_total", &["rung=\"synchronise\""]), 0.0015);
    assert_eq!(value("gruyere_malloc_size_bytes_bucket", &["le=\"4194303.0\""]), 1.0);
    assert_eq!(value("gruyere_malloc_size_bytes_count", &[]), 5.0);
    assert_eq!(value("gruyere_malloc_size_bytes_sum", &[]), f64::from(62 << 20));
    assert_eq!(self::value(&metrics, "gruyere_malloc_duration_seconds_count", &[&pid]), 1.0);
    assert_eq!(self::value(&metrics, "gruyere_exporter_records", &["state=\"live\""]), 1.0);
    assert!(metrics.contains("gruyere_process_info{pid="), "{metrics}");
    assert!(!metrics.contains("gpu=\"0\""), "a device that the process does not use is no series");
    record.close();
}

#[test]
fn no_sample_is_there_twice_and_every_family_is_described() {
    let folder = tempfile::tempdir().unwrap();
    let record = record(folder.path());
    let metrics = printed(&[], folder.path());
    let mut samples = BTreeSet::new();
    let described: BTreeSet<&str> = metrics
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE "))
        .filter_map(|line| line.split(' ').next())
        .collect();
    for line in metrics.lines().filter(|line| !line.starts_with('#')) {
        let (sample, _) = line.rsplit_once(' ').expect("a value");
        assert!(samples.insert(sample.to_owned()), "twice: {sample}");
        let name = sample.split('{').next().expect("a name");
        let family =
            ["_bucket", "_sum", "_count"].iter().find_map(|suffix| name.strip_suffix(suffix));
        assert!(
            described.contains(name) || family.is_some_and(|family| described.contains(family)),
            "{name}"
        );
        assert!(metrics.contains(&format!("# HELP {} ", family.unwrap_or(name))), "{name}");
    }
    record.close();
}

#[test]
fn the_ten_lines_that_hold_most_are_told_and_no_more_where_sites_are_kept() {
    let folder = tempfile::tempdir().unwrap();
    let record = record_with_sites(folder.path());
    // They differ only in their folders: a single series. And a name with characters to escape.
    let mut shard = record.shard(0, 0);
    for (n, file) in (600..).zip(["/a/x.py", "/b/x.py", "/odd\\\"file\".py"]) {
        let frames = [record.frame(file, "f", 1)];
        let site = record.site(&NewSite { frames: &frames, ..NewSite::default() });
        let (address, size) = (BASE + n * PAGE, 60 << 20);
        let requested = size;
        shard.block_insert(&BlockEntry { address, size, requested, site, ..Default::default() });
    }
    let metrics = printed(&[], folder.path());
    let series: Vec<&str> =
        metrics.lines().filter(|line| line.starts_with("gruyere_site_live_bytes{")).collect();
    assert_eq!(series.len(), 9, "ten lines, of which two are written alike: {series:#?}");
    let of = |labels: &[&str]| value(&metrics, "gruyere_site_live_bytes", labels);
    assert_eq!(of(&["line=\"x.py:1 in f\""]), f64::from(120 << 20));
    assert_eq!(of(&[r#"line="odd\\\"file\".py:1 in f""#]), f64::from(60 << 20));
    assert_eq!(of(&["module=\"model.layers.13\"", "gpu=\"0\"", "pid="]), f64::from(26 << 20));
    assert!(!metrics.contains("train.py:50"), "the eleventh");
    // It holds the least, and is the only one that grows.
    let growing: Vec<&str> =
        metrics.lines().filter(|line| line.starts_with("gruyere_site_growth_bytes{")).collect();
    assert_eq!(growing.len(), 1, "{growing:#?}");
    let of_it = value(&metrics, "gruyere_site_growth_bytes", &["line=\"losses.py:7 in keep\""]);
    assert_eq!(of_it, f64::from(1 << 20));
    record.close();
    let folder = tempfile::tempdir().unwrap();
    let without = live_record::record(folder.path());
    assert!(!printed(&[], folder.path()).contains("gruyere_site_live_bytes"));
    without.close();
}

#[test]
fn dead_damaged_and_doubled_records_are_counted_and_spoil_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let record = record(folder.path());
    let path = record.path().unwrap();
    std::fs::copy(path, folder.path().join("gruyere-1-2-3-0.record")).unwrap();
    std::fs::write(folder.path().join("gruyere-1-2-4-0.record"), "junk of more than eight bytes")
        .unwrap();
    // The same process again, under another name, with the same lock.
    std::fs::hard_link(path, folder.path().join("gruyere-1-2-5-0.record")).unwrap();
    let output = export(&["--print"], folder.path());
    assert!(output.status.success(), "{output:?}");
    let metrics = text(&output.stdout);
    for (state, count) in [
        ("live", 1.0),
        ("stale", 1.0),
        ("unreadable", 1.0),
        ("duplicate", 1.0),
        ("beyond_limit", 0.0),
    ] {
        let label = format!("state=\"{state}\"");
        assert_eq!(value(metrics, "gruyere_exporter_records", &[&label]), count, "{state}");
    }
    assert_eq!(value(metrics, "gruyere_exporter_read_errors_total", &[]), 1.0);
    assert!(text(&output.stderr).contains("gruyere-1-2-4-0.record"), "{output:?}");
    record.close();
}

#[test]
fn a_dead_processs_record_that_is_cut_or_of_another_version_is_unreadable_and_named_once() {
    let folder = tempfile::tempdir().unwrap();
    let record = record(folder.path());
    let file = |pid: u64| folder.path().join(format!("gruyere-1-{pid}-3-0.record"));
    let change = |pid: u64| {
        std::fs::copy(record.path().unwrap(), file(pid)).unwrap();
        std::fs::File::options().write(true).open(file(pid)).unwrap()
    };
    change(2);
    change(3).set_len(1 << 20).unwrap();
    // The version follows the magic.
    std::os::unix::fs::FileExt::write_all_at(&change(4), &99u32.to_le_bytes(), 8).unwrap();
    let output = export(&["--print"], folder.path());
    assert!(output.status.success(), "{output:?}");
    for (state, count) in [("live", 1.0), ("stale", 1.0), ("unreadable", 2.0)] {
        let label = format!("state=\"{state}\"");
        let found = value(text(&output.stdout), "gruyere_exporter_records", &[&label]);
        assert_eq!(found, count, "{state}");
    }
    let said = text(&output.stderr);
    for (pid, reason) in [(3, "damaged"), (4, "layout 99")] {
        let name = file(pid).display().to_string();
        let lines: Vec<&str> = said.lines().filter(|line| line.contains(&name)).collect();
        assert!(lines.len() == 1 && lines[0].contains(reason), "{said}");
        assert!(!lines[0].contains("read another"), "{said}");
    }
    record.close();
}

/// A forged record like `record`'s, with other numbers and a later time of creation.
fn newer_with_other_numbers(bytes: &mut [u8]) {
    // By the header's table, 32 bytes per section: process facts (their fourth word is the time of
    // creation), then devices.
    let created = word(bytes, 64) + 24;
    let later = word(bytes, created) as u64 + 1_000_000_000;
    bytes[created..created + 8].copy_from_slice(&later.to_le_bytes());
    let (begin, length) = (word(bytes, 96), word(bytes, 104) * word(bytes, 112));
    for at in (begin..begin + length).step_by(8) {
        if word(bytes, at) == 1 << 30 {
            bytes[at..at + 8].copy_from_slice(&12345u64.to_le_bytes());
        }
    }
}

#[test]
fn a_record_that_claims_anothers_process_is_counted_and_takes_no_place() {
    let folder = tempfile::tempdir().unwrap();
    let record = record(folder.path());
    let path = folder.path().join("gruyere-4026531836-999-1-0.record");
    let Some(_lock) = forged(record, &path, Some(65534), newer_with_other_numbers) else {
        return skip::refused(ONLY_ROOT);
    };
    let pid = std::process::id().to_string();
    for (options, state, count) in [
        (&[][..], "of_other_users", 1.0),
        (&["--all-users"], "claimed", 1.0),
        (&["--all-users"], "live", 1.0),
    ] {
        let mut arguments = vec!["--print"];
        arguments.extend(options);
        let output = export(&arguments, folder.path());
        let metrics = text(&output.stdout);
        assert_eq!(value(metrics, "gruyere_limit_bytes", &[]), f64::from(1 << 30), "{metrics}");
        assert!(!metrics.contains(" 12345"), "{metrics}");
        let label = format!("state=\"{state}\"");
        assert_eq!(value(metrics, "gruyere_exporter_records", &[&label]), count, "{state}");
        assert_eq!(
            text(&output.stderr).contains("-999-1-0.record says that it is process"),
            options.len() == 1
        );
        for arguments in [&["stat", &pid, "--json"][..], &["ps", "--json"]] {
            let output = Command::new(env!("CARGO_BIN_EXE_gruyere"))
                .args(arguments)
                .args(options)
                .arg("--directory")
                .arg(folder.path())
                .output()
                .expect("the command runs");
            let answer = text(&output.stdout);
            assert!(answer.contains(&pid) && !answer.contains("999-1-0"), "{output:?}");
        }
    }
    record.close();
}

#[test]
fn two_true_records_of_one_process_are_told_apart_by_a_label() {
    let folder = tempfile::tempdir().unwrap();
    let (first, second) = (record(folder.path()), record(folder.path()));
    let metrics = printed(&[], folder.path());
    let live: Vec<&str> =
        metrics.lines().filter(|line| line.starts_with("gruyere_reserved_bytes{")).collect();
    assert_eq!(live.len(), 2, "{metrics}");
    assert_eq!(live.iter().filter(|line| line.contains("record=\"1\"")).count(), 1, "{live:?}");
    assert_eq!(live.iter().filter(|line| line.contains("record=")).count(), 1, "{live:?}");
    first.close();
    second.close();
}

#[test]
fn a_process_of_another_container_is_exported_on_its_files_owners_word_and_that_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let record = record(folder.path());
    let path = folder.path().join("gruyere-1-77-3-0.record");
    let elsewhere = |bytes: &mut [u8]| {
        let namespace = word(bytes, 64) + 16;
        bytes[namespace..namespace + 8].copy_from_slice(&1u64.to_le_bytes());
    };
    let Some(_lock) = forged(record, &path, Some(65534), elsewhere) else {
        return skip::refused(ONLY_ROOT);
    };
    let metrics = printed(&["--all-users"], folder.path());
    let label = format!("pid=\"{}@1\"", std::process::id());
    assert_eq!(
        value(&metrics, "gruyere_limit_bytes", &[&label, "user=\"65534\""]),
        f64::from(1 << 30)
    );
    assert_eq!(value(&metrics, "gruyere_exporter_unseen_processes", &[]), 1.0);
    assert_eq!(metrics.lines().filter(|line| line.starts_with("gruyere_limit_bytes{")).count(), 2);
    // `ps` prints it too: what each record is vouched for by.
    let mut command = Command::new(env!("CARGO_BIN_EXE_gruyere"));
    command.args(["ps", "--all-users", "--directory"]).arg(folder.path());
    let said = command.output().expect("the command runs");
    let table = text(&said.stdout);
    assert!(table.contains("(says user 65534): "), "{table}");
    assert!(table.contains("1 of other users can't be seen from here"), "{table}");
    record.close();
}

#[test]
fn a_page_is_served_in_the_format_that_the_client_accepts() {
    let folder = tempfile::tempdir().unwrap();
    let exporter = Exporter::start(folder.path(), &[]);
    let (head, body) = exporter.get("/metrics", "");
    assert!(
        head.starts_with("HTTP/1.1 200") && head.contains("text/plain; version=0.0.4"),
        "{head}"
    );
    assert!(
        !body.contains("gruyere_reserved_bytes")
            && body.contains("gruyere_exporter_build_info{version="),
        "{body}"
    );
    // A process comes, appears without a restart, and goes.
    let record = record(folder.path());
    std::thread::sleep(Duration::from_millis(150));
    let (head, body) = exporter
        .get("/metrics", "application/openmetrics-text;version=1.0.0;q=0.9,text/plain;q=0.5");
    assert!(head.contains("application/openmetrics-text; version=1.0.0"), "{head}");
    assert!(
        body.ends_with("# EOF\n") && body.contains("# UNIT gruyere_reserved_bytes bytes"),
        "{body}"
    );
    assert!(body.contains("# TYPE gruyere_allocations counter"), "{body}");
    record.close();
    std::thread::sleep(Duration::from_millis(150));
    assert!(!exporter.get("/metrics", "").1.contains("gruyere_reserved_bytes"));
    let (head, body) = exporter.get("/-/healthy", "");
    assert!(head.starts_with("HTTP/1.1 200") && body == "healthy\n", "{head}");
    assert!(exporter.get("/nothing", "").0.starts_with("HTTP/1.1 404"));
    let head = ask(&exporter.address, b"HEAD /metrics HTTP/1.0\r\n\r\n");
    assert!(head.starts_with("HTTP/1.1 200") && head.ends_with("\r\n\r\n"), "{head}");
    assert!(ask(&exporter.address, b"POST /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 405"));
    assert!(
        ask(&exporter.address, b"\x16\x03\x01 this is not HTTP\r\n\r\n")
            .starts_with("HTTP/1.1 400")
    );
    let endless = [&b"GET /metrics HTTP/1.1\r\nX: "[..], &vec![b'x'; 20 << 10]].concat();
    assert!(ask(&exporter.address, &endless).starts_with("HTTP/1.1 431"));
}

#[test]
fn silent_and_slow_clients_do_not_keep_the_scraper_waiting() {
    let folder = tempfile::tempdir().unwrap();
    let exporter = Exporter::start(folder.path(), &[]);
    let mut silent = Vec::new();
    for _ in 0..100 {
        let mut stream = TcpStream::connect(&exporter.address).expect("it listens");
        let _ = stream.write_all(b"GET /metr");
        silent.push(stream);
    }
    for _ in 0..10 {
        let began = Instant::now();
        assert!(exporter.get("/metrics", "").0.starts_with("HTTP/1.1 200"));
        assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
    }
    // The server finally closes one that stays.
    let mut last = silent.pop().expect("some");
    last.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let mut answer = String::new();
    let _ = last.read_to_string(&mut answer);
    assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 408"), "{answer}");
}

#[test]
fn an_address_without_a_port_or_a_port_without_an_address_is_wrong_usage() {
    let folder = tempfile::tempdir().unwrap();
    for wrong in ["9404", "127.0.0.1", ":9404", "127.0.0.1:", "127.0.0.1:94040"] {
        let output = export(&["--listen", wrong], folder.path());
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{wrong}: {said}");
        assert!(said.contains(wrong) && said.contains("as in 127.0.0.1:9404"), "{said}");
    }
    // A name is looked up, and may be missing.
    let output = export(&["--listen", "no-such-host.invalid:9404"], folder.path());
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
}

#[test]
fn two_exporters_at_one_port_are_told_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let exporter = Exporter::start(folder.path(), &[]);
    let second = export(&["--listen", &exporter.address], folder.path());
    assert_eq!(second.status.code(), Some(1));
    let words = text(&second.stderr);
    assert!(
        words.contains(&exporter.address)
            && words.contains("stop that one")
            && words.contains("--listen"),
        "{words}"
    );
    let nowhere = export(&["--listen", "nonsense"], folder.path());
    assert!(text(&nowhere.stderr).contains("127.0.0.1:9404"), "{nowhere:?}");
    assert_eq!(export(&[], Path::new("/nowhere")).status.code(), Some(1));
    assert_eq!(export(&["--once"], folder.path()).status.code(), Some(2));
}

#[test]
fn the_textfile_is_replaced_at_once_and_readable_by_all() {
    let folder = tempfile::tempdir().unwrap();
    let record = record(folder.path());
    let file = folder.path().join("gruyere.prom");
    std::fs::write(&file, "old").unwrap();
    let output = export(&["--textfile", file.to_str().unwrap(), "--once"], folder.path());
    assert!(output.status.success(), "{output:?}");
    let metrics = std::fs::read_to_string(&file).unwrap();
    assert_eq!(value(&metrics, "gruyere_reserved_bytes", &[]), f64::from(112 << 20));
    assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o644);
    let left: Vec<_> = std::fs::read_dir(folder.path())
        .unwrap()
        .flatten()
        .map(|entry| entry.file_name())
        .collect();
    assert!(left.iter().all(|name| !name.to_string_lossy().contains(".tmp")), "{left:?}");
    let nowhere = export(&["--textfile", "/nowhere/gruyere.prom", "--once"], folder.path());
    assert_eq!(nowhere.status.code(), Some(1));
    assert!(text(&nowhere.stderr).contains("--collector.textfile.directory"), "{nowhere:?}");
    record.close();
}

#[test]
fn help_has_examples_and_exit_codes() {
    for command in ["completions", "export"] {
        let output =
            Command::new(env!("CARGO_BIN_EXE_gruyere")).args([command, "--help"]).output().unwrap();
        let help = text(&output.stdout);
        assert!(help.contains("Examples:") && help.contains("Exit codes:"), "{help}");
    }
}

#[test]
fn shells_learn_every_command() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let output = Command::new(env!("CARGO_BIN_EXE_gruyere"))
            .args(["completions", shell])
            .output()
            .unwrap();
        let script = text(&output.stdout);
        assert!(
            output.status.success() && script.contains("export") && script.contains("textfile"),
            "{shell}"
        );
    }
    let unknown =
        Command::new(env!("CARGO_BIN_EXE_gruyere")).args(["completions", "csh"]).output().unwrap();
    assert_eq!(unknown.status.code(), Some(2));
    // bash reads it without complaint.
    let script = Command::new(env!("CARGO_BIN_EXE_gruyere"))
        .args(["completions", "bash"])
        .output()
        .unwrap()
        .stdout;
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), script).unwrap();
    let read = Command::new("bash").arg("-n").arg(file.path()).output().expect("bash runs");
    assert!(read.status.success(), "{read:?}");
}

#[test]
fn the_textfile_goes_when_a_signal_ends_the_exporter() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("gruyere.prom");
    for signal in [libc::SIGTERM, libc::SIGINT] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_gruyere"));
        command.args(["export", "--textfile"]).arg(&file).arg("--directory").arg(folder.path());
        let mut child = as_from_a_shell(&mut command).spawn().expect("the command runs");
        until("there is a file", || file.exists());
        send(child.id(), signal);
        until("it ends", || child.try_wait().unwrap().is_some());
        assert_eq!(child.wait().unwrap().signal(), Some(signal));
        assert!(!file.exists(), "node_exporter would serve it for ever");
    }
}

#[test]
fn the_exporter_counts_each_end_once_whatever_becomes_of_the_record() {
    let folder = tempfile::tempdir().unwrap();
    let live = record(folder.path());
    let dead = |number: u32| folder.path().join(format!("gruyere-1-{number}-3-0.record"));
    let leave = |number| std::fs::copy(live.path().unwrap(), dead(number)).unwrap();
    leave(70);
    let exporter = Exporter::start(folder.path(), &[]);
    let ends = || {
        // Scrapes at once share a look.
        std::thread::sleep(Duration::from_millis(150));
        let (_, metrics) = exporter.get("/metrics", "");
        let exits = ["clean", "out_of_memory", "refused", "unclean", "unknown"];
        exits.map(|exit| {
            let label = format!("exit=\"{exit}\"");
            value(&metrics, "gruyere_exporter_process_exits_total", &[&label])
        })
    };
    assert_eq!(ends(), [0.0; 5], "what was there before does not count");
    leave(71);
    let [clean, uncaught, refused, unclean, unknown] = ends();
    assert_eq!((clean, uncaught + refused + unclean + unknown), (0.0, 1.0));
    std::fs::remove_file(dead(70)).unwrap();
    std::fs::remove_file(dead(71)).unwrap();
    leave(72);
    assert_eq!(ends().iter().sum::<f64>(), 2.0);
    live.close();
    assert_eq!((ends()[0], ends().iter().sum::<f64>()), (1.0, 3.0));
}

#[test]
fn a_request_of_more_than_16_kib_is_refused_also_if_it_comes_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let exporter = Exporter::start(folder.path(), &[]);
    let (head, _) = exporter.get("/metrics", &"x".repeat(20_000));
    assert!(head.starts_with("HTTP/1.1 431"), "{head}");
}
