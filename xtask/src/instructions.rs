//! Instructions of a malloc and of a free: callgrind's count, inclusive, without what the stand-in's driver does.

use std::collections::HashMap;
use std::path::Path;
use std::process::Command;

use crate::parts::{cargo, output};

/// The trace that the bar is set on.
const TRACE: &str = "traces/moe.trace.zst";
/// The bar: instructions of a malloc or a free, on average over both.
const BAR: u64 = 380;
/// How the stand-in's driver calls are named.
const DRIVER: &str = "PhantomDriver as gruyere::driver::Driver>::";

/// Inclusive cost of all calls of a function.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Cost {
    calls: u64,
    instructions: u64,
}

/// Counts, prints, and fails above the bar.
pub fn check(root: &Path) -> Result<(), String> {
    output(&mut cargo(root, &["build", "--release", "--quiet", "--package", "gruyere-instructions"]))?;
    let target =
        std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), |folder| root.join(folder));
    let profile = target.join("callgrind.out");
    let mut valgrind = Command::new("valgrind");
    valgrind.args(["--tool=callgrind", "--quiet", "--collect-atstart=no"]);
    valgrind.args([
        "--toggle-collect=gruyere_malloc",
        "--toggle-collect=gruyere_free",
        "--compress-strings=no",
    ]);
    valgrind.arg(format!("--callgrind-out-file={}", profile.display()));
    valgrind.arg(target.join("release/gruyere-instructions")).arg(root.join(TRACE));
    output(&mut valgrind)?;
    let text =
        std::fs::read_to_string(&profile).map_err(|error| format!("{}: {error}", profile.display()))?;
    report(&calls(&text))
}

fn report(calls: &HashMap<&str, Cost>) -> Result<(), String> {
    let of = |name: &str| calls.get(name).copied().filter(|cost| cost.calls > 0);
    let (malloc, free) =
        of("gruyere_malloc").zip(of("gruyere_free")).ok_or("the profile has no malloc or no free")?;
    let driver: u64 =
        calls.iter().filter(|(name, _)| name.contains(DRIVER)).map(|(_, cost)| cost.instructions).sum();
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
    if average <= BAR {
        Ok(())
    } else {
        Err(format!("{average} instructions a malloc or free; the bar is {BAR}"))
    }
}

/// The inclusive cost of each called function. In callgrind's format a call is `cfn=NAME`, then `calls=COUNT POSITION`, then a
/// line whose last number is the inclusive cost of those calls.
fn calls(profile: &str) -> HashMap<&str, Cost> {
    let mut costs: HashMap<&str, Cost> = HashMap::new();
    let mut callee = "";
    let mut lines = profile.lines();
    while let Some(line) = lines.next() {
        if let Some(name) = line.strip_prefix("cfn=") {
            callee = name;
        } else if let Some(call) = line.strip_prefix("calls=") {
            let number = |word: Option<&str>| word.and_then(|word| word.parse::<u64>().ok()).unwrap_or(0);
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
                           fn=gruyere_malloc\ncfn=<x::PhantomDriver as gruyere::driver::Driver>::alloc\ncalls=1 0 \n* 500\n\
                           fn=main\ncfn=gruyere_free\ncalls=6 5\n8 500\ncfn=gruyere_free\ncalls=4 5\n9 500\n";

    #[test]
    fn calls_are_summed_by_callee() {
        let calls = calls(PROFILE);
        assert_eq!(calls["gruyere_malloc"], Cost { calls: 10, instructions: 4500 });
        assert_eq!(calls["gruyere_free"], Cost { calls: 10, instructions: 1000 });
    }

    #[test]
    fn the_driver_s_work_is_excluded_and_the_bar_is_held() {
        // (4500 + 1000 - 500) / 20
        assert_eq!(report(&calls(PROFILE)), Ok(()));
        let slow = PROFILE.replace("7 4500", "7 14500");
        assert!(report(&calls(&slow)).unwrap_err().contains("750 instructions"));
        assert!(report(&calls("")).is_err());
    }
}
