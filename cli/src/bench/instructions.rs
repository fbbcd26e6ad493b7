//! `gruyere bench --instructions`: the cost of a malloc and a free, counted by callgrind.
//!
//! The command runs itself under valgrind: it replays a trace once to warm up, and once more while
//! callgrind collects the instructions in and below `gruyere_malloc` and `gruyere_free`; the
//! stand-in GPU's are subtracted.

use super::callgrind::Profile;
use crate::signals;
use gruyere_replay::bench::BenchError;
use gruyere_replay::steady::{Pass, SteadyState};
use gruyere_replay::trace::Trace;
use std::fmt;
use std::path::Path;
use std::process::{Command, Stdio};

/// Instructions of Gruyère on a trace.
#[derive(Debug, serde::Serialize)]
pub struct Counted {
    /// The trace.
    pub trace: String,
    /// A pass after the first has warmed up.
    pub warm: Instructions,
    /// The first pass, which takes memory from the driver.
    pub first: Instructions,
}

/// Instructions of one pass over a trace.
#[derive(Debug, serde::Serialize)]
pub struct Instructions {
    /// `gruyere_malloc` of more than 0 bytes.
    pub mallocs: u64,
    /// `gruyere_free` of those.
    pub frees: u64,
    /// In and below `gruyere_malloc` and `gruyere_free`, the stand-in GPU included.
    pub collected: u64,
    /// Of those, the stand-in GPU's.
    pub phantom: u64,
    /// Per malloc, in and below `gruyere_malloc`, the stand-in GPU included.
    pub per_malloc: f64,
    /// Per free, in and below `gruyere_free`, the stand-in GPU included.
    pub per_free: f64,
    /// Per malloc or free, without the stand-in GPU.
    pub per_operation: f64,
}

impl fmt::Display for Counted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { trace, warm, first } = self;
        writeln!(f, "{trace}: {:.1} instructions a malloc or free", warm.per_operation)?;
        writeln!(
            f,
            "  through the C ABI, record on, after a pass to warm up; a malloc {:.1}, a free \
             {:.1}; {} of each",
            warm.per_malloc, warm.per_free, warm.mallocs
        )?;
        writeln!(f, "  in the first pass, from an empty heap: {:.1}", first.per_operation)?;
        writeln!(
            f,
            "  the stand-in GPU's own are taken off: {:.1} and {:.1} a malloc or free",
            warm.phantom_per_operation(),
            first.phantom_per_operation()
        )
    }
}

impl Instructions {
    fn phantom_per_operation(&self) -> f64 {
        self.phantom as f64 / (self.mallocs + self.frees).max(1) as f64
    }
}

/// Counts the instructions for `trace`, the file at `path`.
///
/// # Errors
/// valgrind cannot run, or lacks a figure in its output.
pub fn count(trace: &Trace, path: &Path) -> Result<Counted, String> {
    let folder = std::env::temp_dir().join(format!("gruyere-callgrind-{}", std::process::id()));
    std::fs::create_dir_all(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let counted = [2, 1].map(|passes| count_last(passes, path, &folder.join("callgrind.out")));
    // The folder is ours and of no further use, whatever happened.
    let _ = std::fs::remove_dir_all(&folder);
    let [warm, first] = counted;
    Ok(Counted { trace: trace.name.clone(), warm: warm?, first: first? })
}

/// Counts the last of `passes`.
fn count_last(passes: u32, trace: &Path, output: &Path) -> Result<Instructions, String> {
    let pass = under_callgrind(passes, trace, output)?;
    let text = std::fs::read_to_string(output).map_err(|e| format!("{}: {e}", output.display()))?;
    let counted = evaluate(pass, &Profile::parse(&text));
    match counted.collected {
        0 => Err("callgrind collected nothing: is this binary stripped of its symbols?".to_owned()),
        _ => Ok(counted),
    }
}

fn under_callgrind(passes: u32, trace: &Path, output: &Path) -> Result<Pass, String> {
    let this =
        std::env::current_exe().map_err(|error| format!("this program's own file: {error}"))?;
    let mut out_file = std::ffi::OsString::from("--callgrind-out-file=");
    out_file.push(output);
    let mut valgrind = Command::new("valgrind");
    let child = signals::ends_with_us(&mut valgrind)
        .args([
            "--tool=callgrind",
            "--quiet",
            "--toggle-collect=gruyere_malloc",
            "--toggle-collect=gruyere_free",
        ])
        .arg("--zero-before=*gruyere_bench_measured_pass*")
        .arg(out_file)
        .arg(this)
        .args(["bench", "--counted-passes", &passes.to_string(), "--trace"])
        .arg(trace)
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .map_err(|error| format!("valgrind: {error} (Debian: apt install valgrind)"))?;
    let text = String::from_utf8_lossy(&child.stdout);
    if !child.status.success() {
        return Err(format!("valgrind: {}", child.status));
    }
    serde_json::from_str(&text)
        .map_err(|error| format!("the run under valgrind said {text:?}: {error}"))
}

fn evaluate(pass: Pass, profile: &Profile) -> Instructions {
    let malloc = profile.inclusive("gruyere_malloc");
    let free = profile.inclusive("gruyere_free");
    let phantom = profile.entered(|name| name.contains("phantom") || name.contains("Phantom"));
    Instructions {
        mallocs: pass.mallocs,
        frees: pass.frees,
        collected: malloc + free,
        phantom,
        per_malloc: malloc as f64 / pass.mallocs.max(1) as f64,
        per_free: free as f64 / pass.frees.max(1) as f64,
        per_operation: (malloc + free).saturating_sub(phantom) as f64
            / (pass.mallocs + pass.frees).max(1) as f64,
    }
}

/// The run under valgrind: warm-up passes, then the counted pass.
///
/// # Errors
/// A replay breaks off.
pub fn counted_passes(trace: &Trace, passes: u32) -> Result<Pass, BenchError> {
    let mut state = SteadyState::new(trace, "")?;
    for _ in 1..passes {
        state.pass()?;
    }
    gruyere_bench_measured_pass(&mut state)
}

/// A separate function, so that callgrind can begin to count at its entry.
#[inline(never)]
fn gruyere_bench_measured_pass(state: &mut SteadyState<'_>) -> Result<Pass, BenchError> {
    std::hint::black_box(state).pass()
}
