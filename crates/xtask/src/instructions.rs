//! Instructions of a malloc and of a free: callgrind's inclusive count, without the stand-in's
//! driver.

use std::collections::HashMap;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use crate::observed;
use crate::parts::{cargo, output};

/// The program that replays the trace (a package of the workspace).
const PROGRAM: &str = "gruyere-instructions";
/// The trace of the bar.
const TRACE: &str = "traces/moe.trace.zst";
/// The trace for a replay under a reader, the longest; and its maximum operations per second, so
/// that it takes at least three seconds, of which `gruyere top` needs one to find it.
const READ_TRACE: &str = "traces/llama7b_full.trace.zst";
const READ_PACE: u32 = 75_000;
/// The bar: instructions per malloc or free, on average over both.
const BAR: u64 = 355;
/// Streams of a random program, and the maximum ratio of instructions per operation with many
/// streams to those with few.
const FEW_STREAMS: u32 = 10;
const MANY_STREAMS: u32 = 1000;
const STREAMS_BAR: f64 = 3.0;
/// The bar on the record's share of them, in percent.
const RECORD_BAR: u64 = 25;
/// Source files of the record, and of the atomics inlined into it. (This includes the heap's own
/// atomics, so it is an upper bound.)
const RECORD: [&str; 2] = ["crates/record/src/", "core/src/sync/atomic.rs"];
/// Prefix of the stand-in's driver calls.
const DRIVER: &str = "PhantomDriver as gruyere_heap::driver::Driver>::";

/// Inclusive cost of all calls of a function.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Cost {
    calls: u64,
    instructions: u64,
}

/// Tolerance between two counts, instructions: the clock determines which calls are timed, and when
/// its facts are refreshed.
const CHANCE: f64 = 1.0;
/// The fewest samples of the process by `gruyere top` for a valid test.
const LEAST_SAMPLES: usize = 3;

/// Counts, prints, and fails above the bars; then counts again while `gruyere top` reads the record
/// ten times a second; then counts a watched call.
pub fn check(root: &Path) -> Result<(), String> {
    let packages = ["--package", PROGRAM, "--package", "gruyere-cli"];
    output(cargo(root, &["build", "--release", "--quiet"]).args(packages))?;
    let target = std::env::var_os("CARGO_TARGET_DIR")
        .map_or_else(|| root.join("target"), |folder| root.join(folder));
    let moe = count(root, &target, &[TRACE])?;
    report(&calls(&moe), in_files(&moe, &RECORD))?;
    streams(root, &target)?;
    let paced = || count(root, &target, &[READ_TRACE, "record:on", &READ_PACE.to_string()]);
    let alone = paced()?;
    let (read, samples) = while_read(&target, paced)?;
    let [alone, read] = [&alone, &read].map(|profile| average(&calls(profile)));
    println!(
        "{READ_TRACE}: an operation while `gruyere top` reads, {samples} times: {read:.2} \
         instructions ({alone:.2} without)"
    );
    if samples < LEAST_SAMPLES {
        return Err(format!("`gruyere top` saw the process {samples} times only"));
    }
    if (read - alone).abs() > CHANCE {
        return Err(format!("readers cost the writer {:.2} instructions", read - alone));
    }
    observed::check(root, &target)
}

/// Cost of the number of streams: a random program with few streams and with many.
fn streams(root: &Path, target: &Path) -> Result<(), String> {
    let [few, many] = [FEW_STREAMS, MANY_STREAMS].map(|streams| {
        Ok::<_, String>(average(&calls(&count(root, target, &[&format!("streams:{streams}")])?)))
    });
    let (few, many) = (few?, many?);
    println!(
        "a random program: {few:.0} instructions an operation at {FEW_STREAMS} streams, {many:.0} \
         at {MANY_STREAMS}: {:.2} times (at most {STREAMS_BAR})",
        many / few
    );
    if many > STREAMS_BAR * few {
        return Err(format!(
            "at {MANY_STREAMS} streams an operation takes {:.2} times what it takes at \
             {FEW_STREAMS}",
            many / few
        ));
    }
    Ok(())
}

/// Runs the program with `arguments` under callgrind; returns the profile.
fn count(root: &Path, target: &Path, arguments: &[&str]) -> Result<String, String> {
    let profile = target.join("callgrind.out");
    let mut valgrind = Command::new("valgrind");
    valgrind.args(["--tool=callgrind", "--quiet", "--collect-atstart=no"]);
    valgrind.args([
        "--toggle-collect=gruyere_malloc",
        "--toggle-collect=gruyere_free",
        "--compress-strings=no",
    ]);
    valgrind.arg(format!("--callgrind-out-file={}", profile.display()));
    valgrind.arg(target.join("release").join(PROGRAM)).args(arguments).current_dir(root);
    output(&mut valgrind)?;
    std::fs::read_to_string(&profile).map_err(|error| format!("{}: {error}", profile.display()))
}

/// Runs `body` while `gruyere top` reads all records at 10 Hz; returns the number of its samples
/// that include the program.
fn while_read(
    target: &Path,
    body: impl FnOnce() -> Result<String, String>,
) -> Result<(String, usize), String> {
    let mut top = Command::new(target.join("release/gruyere"))
        .args(["top", "--json", "--count", "1000000", "--interval", "100ms"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|error| format!("gruyere top: {error}"))?;
    let lines = top.stdout.take().map(BufReader::new).ok_or("gruyere top has no output")?;
    let samples = std::thread::spawn(move || {
        lines.lines().map_while(Result::ok).filter(|line| line.contains(PROGRAM)).count()
    });
    let profile = body();
    // It reads until it is killed.
    let _ = top.kill();
    let _ = top.wait();
    Ok((profile?, samples.join().map_err(|_| "reading what gruyere top says failed")?))
}

/// Instructions per malloc or free, without the driver's.
fn average(calls: &HashMap<&str, Cost>) -> f64 {
    let [malloc, free] =
        ["gruyere_malloc", "gruyere_free"].map(|name| calls.get(name).copied().unwrap_or_default());
    let own = (malloc.instructions + free.instructions).saturating_sub(driver(calls));
    own as f64 / (malloc.calls + free.calls).max(1) as f64
}

/// Instructions of the stand-in's driver.
fn driver(calls: &HashMap<&str, Cost>) -> u64 {
    calls.iter().filter(|(name, _)| name.contains(DRIVER)).map(|(_, cost)| cost.instructions).sum()
}

fn report(calls: &HashMap<&str, Cost>, record: u64) -> Result<(), String> {
    let of = |name: &str| calls.get(name).copied().filter(|cost| cost.calls > 0);
    let (malloc, free) = of("gruyere_malloc")
        .zip(of("gruyere_free"))
        .ok_or("the profile has no malloc or no free")?;
    let driver = driver(calls);
    let operations = malloc.calls + free.calls;
    let own = (malloc.instructions + free.instructions).saturating_sub(driver);
    let average = own.div_ceil(operations);
    println!("{TRACE}, through the C ABI, record on:");
    for (name, cost) in [("malloc", malloc), ("free", free)] {
        println!(
            "  {name:<8}{:>8} calls {:>6} instructions each",
            cost.calls,
            cost.instructions / cost.calls
        );
    }
    println!(
        "  driver (the stand-in's work, excluded below): {} instructions an operation",
        driver / operations
    );
    println!("  an operation: {average} instructions (at most {BAR})");
    let (record, share) = (record / operations, (100 * record).div_ceil(own.max(1)));
    println!("  of them the record's, at most: {record}, {share}% (at most {RECORD_BAR}%)");
    if average > BAR {
        return Err(format!("{average} instructions a malloc or free; the bar is {BAR}"));
    }
    if share > RECORD_BAR {
        return Err(format!(
            "the record takes {share}% of the instructions; the bar is {RECORD_BAR}%"
        ));
    }
    Ok(())
}

/// Instructions of lines in files whose names contain one of `names`, including inlined lines. In
/// callgrind's format `fl=`, `fi=` and `fe=` name the file of the lines that follow, each a
/// position and a cost; a line after `calls=` is the callee's.
fn in_files(profile: &str, names: &[&str]) -> u64 {
    let (mut inside, mut sum) = (false, 0);
    let mut lines = profile.lines();
    while let Some(line) = lines.next() {
        if let Some(file) = ["fl=", "fi=", "fe="].iter().find_map(|key| line.strip_prefix(key)) {
            inside = names.iter().any(|name| file.contains(name));
        } else if line.starts_with("calls=") {
            lines.next();
        } else if inside
            && line.starts_with(|first: char| first.is_ascii_digit() || "+-*".contains(first))
        {
            sum += line.split(' ').nth(1).and_then(|cost| cost.parse::<u64>().ok()).unwrap_or(0);
        }
    }
    sum
}

/// The inclusive cost of each called function. In callgrind's format a call is `cfn=NAME`, then
/// `calls=COUNT POSITION`, then a line whose last number is the inclusive cost of those calls.
fn calls(profile: &str) -> HashMap<&str, Cost> {
    let mut costs: HashMap<&str, Cost> = HashMap::new();
    let mut callee = "";
    let mut lines = profile.lines();
    while let Some(line) = lines.next() {
        if let Some(name) = line.strip_prefix("cfn=") {
            callee = name;
        } else if let Some(call) = line.strip_prefix("calls=") {
            let number =
                |word: Option<&str>| word.and_then(|word| word.parse::<u64>().ok()).unwrap_or(0);
            let cost = costs.entry(callee).or_default();
            cost.calls += number(call.split(' ').next());
            cost.instructions += number(lines.next().and_then(|line| line.split(' ').next_back()));
        }
    }
    costs
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROFILE: &str = "fn=main\ncfi=x.rs\ncfn=gruyere_malloc\ncalls=10 5 \n7 4500\n+1 3\n\
                           fn=gruyere_malloc\ncfn=<x::PhantomDriver as \
                           gruyere_heap::driver::Driver>::alloc\ncalls=1 0 \n* 500\n\
                           fn=main\ncfn=gruyere_free\ncalls=6 5\n8 500\ncfn=gruyere_free\ncalls=4 \
                           5\n9 500\n";

    #[test]
    fn calls_are_summed_by_callee() {
        let calls = calls(PROFILE);
        assert_eq!(calls["gruyere_malloc"], Cost { calls: 10, instructions: 4500 });
        assert_eq!(calls["gruyere_free"], Cost { calls: 10, instructions: 1000 });
    }

    #[test]
    fn lines_are_summed_by_file_and_what_they_call_is_not() {
        let profile = "fl=src/door/torch.rs\nfn=gruyere_malloc\n7 4\n\
                       fi=crates/record/src/write/shard.rs\n9 2\n\
                       +1 3\ncfi=x.rs\ncfn=y\ncalls=1 5\n9 100\n\
                       * 1\nfe=src/door/torch.rs\n-2 50\n";
        assert_eq!(in_files(profile, &["crates/record/src/"]), 6);
        assert_eq!(in_files(profile, &["torch"]), 54);
    }

    #[test]
    fn the_driver_s_work_is_excluded_and_the_bar_is_held() {
        // (4500 + 1000 - 500) / 20
        assert_eq!(report(&calls(PROFILE), 1250), Ok(()));
        assert!(report(&calls(PROFILE), 1251).unwrap_err().contains("26%"));
        let slow = PROFILE.replace("7 4500", "7 14500");
        assert!(report(&calls(&slow), 0).unwrap_err().contains("750 instructions"));
        assert!(report(&calls(""), 0).is_err());
    }
}
