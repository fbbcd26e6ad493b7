//! Instructions of a call that the LD_PRELOAD door passes on and records (`preload:observe`):
//! callgrind's count.
//!
//! A C program makes many mallocs and frees over an almost empty runtime, once with some calls and
//! once with twice as many: the difference is the cost of the calls, without start and end. We
//! exclude the program and that runtime by the object of the instructions; the rest is ours, and
//! our callees'.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::parts::{cargo, output};

/// The bar: instructions per malloc or free, on average over both.
const BAR: u64 = 300;
/// Calls of the shorter run.
const CALLS: u64 = 20_000;
/// Objects that are not ours: the program and its runtime.
const THEIRS: [&str; 2] = ["many_calls", "libcudart.so.12"];

/// Counts, prints, and fails above the bar.
pub fn check(root: &Path, target: &Path) -> Result<(), String> {
    output(&mut cargo(root, &["build", "--release", "--quiet", "--package", "gruyere", "--lib"]))?;
    let folder = target.join("observed");
    std::fs::create_dir_all(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let program = compile(root, &folder)?;
    let library = target.join("release/libgruyere.so");
    let [some, twice] = [CALLS, 2 * CALLS].map(|calls| count(&program, &library, &folder, calls));
    let each = (twice? - some?).div_ceil(CALLS);
    println!("watched by preload:observe: {each} instructions a malloc or free (at most {BAR})");
    if each > BAR {
        return Err(format!(
            "{each} instructions a malloc or free that is watched; the bar is {BAR}"
        ));
    }
    Ok(())
}

/// Compiles the runtime and the program linked with it; returns the program.
fn compile(root: &Path, folder: &Path) -> Result<PathBuf, String> {
    let sources = root.join("tests/preload");
    let compiler = || {
        let mut compiler = Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()));
        compiler.arg("-O1").arg("-L").arg(folder);
        compiler
    };
    let mut runtime = compiler();
    runtime.args(["-shared", "-fPIC", "-o"]).arg(folder.join(THEIRS[1]));
    output(runtime.arg(sources.join("quick_runtime.c")))?;
    let program = folder.join(THEIRS[0]);
    output(
        compiler()
            .arg("-o")
            .arg(&program)
            .arg(sources.join("many_calls.c"))
            .arg("-l:libcudart.so.12"),
    )?;
    Ok(program)
}

/// Our instructions in a run.
fn count(program: &Path, library: &Path, folder: &Path, calls: u64) -> Result<u64, String> {
    let profile = folder.join(format!("callgrind.{calls}"));
    let mut valgrind = Command::new("valgrind");
    valgrind.args(["--tool=callgrind", "--quiet", "--compress-strings=no"]);
    valgrind.arg(format!("--callgrind-out-file={}", profile.display()));
    valgrind.arg(program).arg(calls.to_string());
    valgrind.env("LD_PRELOAD", library).env("LD_LIBRARY_PATH", folder);
    valgrind.env("GRUYERE_CONF", "preload:observe").env_remove("GRUYERE_LOG");
    output(&mut valgrind)?;
    let text = std::fs::read_to_string(&profile)
        .map_err(|error| format!("{}: {error}", profile.display()))?;
    let own = outside(&text, &THEIRS);
    if !text.contains("libgruyere.so") {
        return Err("the library was not in the program".into());
    }
    Ok(own)
}

/// Instructions in all objects but those whose file names are `left_out`. In callgrind's format
/// `ob=` names the object of the lines that follow, each a position and a cost; a line after
/// `calls=` is the callee's.
fn outside(profile: &str, left_out: &[&str]) -> u64 {
    let (mut counts, mut sum) = (true, 0);
    let mut lines = profile.lines();
    while let Some(line) = lines.next() {
        if let Some(object) = line.strip_prefix("ob=") {
            counts = !left_out.contains(&object.rsplit('/').next().unwrap_or_default());
        } else if line.starts_with("calls=") {
            lines.next();
        } else if counts
            && line.starts_with(|first: char| first.is_ascii_digit() || "+-*".contains(first))
        {
            sum += line.split(' ').nth(1).and_then(|cost| cost.parse::<u64>().ok()).unwrap_or(0);
        }
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_others_take_is_left_out_and_callees_count_where_they_are() {
        let profile = "ob=/x/many_calls\nfl=a.c\nfn=main\n7 4\ncob=/y/libgruyere.so\n\
                       cfn=cudaMalloc\ncalls=1 5\n9 100\n\
                       ob=/y/libgruyere.so\nfl=b.rs\nfn=cudaMalloc\n3 20\n+1 5\ncalls=1 2\n* 50\n\
                       ob=/x/libcudart.so.12\nfn=f\n1 9\n\
                       ob=/lib/libc.so.6\nfn=g\n* 2\n";
        assert_eq!(outside(profile, &THEIRS), 27);
        assert_eq!(outside(profile, &[]), 40);
    }
}
