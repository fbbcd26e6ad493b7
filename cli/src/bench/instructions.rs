//! `gruyere bench --instructions`: what a malloc and a free cost, counted by callgrind.
//!
//! This command runs itself under valgrind: it replays a trace once to warm up and once more while the instructions in and below
//! `gruyere_malloc` and `gruyere_free` are collected; the stand-in GPU's are taken off.

use super::callgrind::Profile;
use gruyere_replay::bench::{Pass, SteadyState};
use gruyere_replay::trace::Trace;
use std::fmt;
use std::path::Path;
use std::process::{Command, Stdio};

/// Instructions of one pass over a trace.
#[derive(Debug, serde::Serialize)]
pub struct Instructions {
    /// The trace.
    pub trace: String,
    /// `gruyere_malloc` of more than 0 bytes.
    pub mallocs: u64,
    /// `gruyere_free` of those.
    pub frees: u64,
    /// In and below `gruyere_malloc` and `gruyere_free`, the stand-in GPU included.
    pub collected: u64,
    /// Of those, the stand-in GPU's.
    pub phantom: u64,
    /// In and below `gruyere_malloc`, a malloc, the stand-in GPU included.
    pub per_malloc: f64,
    /// In and below `gruyere_free`, a free, the stand-in GPU included.
    pub per_free: f64,
    /// Without the stand-in GPU, a malloc or free.
    pub per_operation: f64,
}

impl fmt::Display for Instructions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{}: {:.1} instructions a malloc or free ({} mallocs, {} frees, record on, through the C ABI)",
            self.trace, self.per_operation, self.mallocs, self.frees
        )?;
        writeln!(
            f,
            "  a malloc {:.1}, a free {:.1} with the stand-in GPU, whose share is {:.1} an operation",
            self.per_malloc,
            self.per_free,
            self.phantom as f64 / (self.mallocs + self.frees).max(1) as f64
        )
    }
}

/// Counts them for `trace`, the file at `path`.
///
/// # Errors
/// Where valgrind cannot be run, or does not say what is needed.
pub fn count(trace: &Trace, path: &Path) -> Result<Instructions, String> {
    let folder = std::env::temp_dir().join(format!("gruyere-callgrind-{}", std::process::id()));
    std::fs::create_dir_all(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let output = folder.join("callgrind.out");
    let counted = under_callgrind(path, &output).and_then(|pass| {
        let text = std::fs::read_to_string(&output).map_err(|e| format!("{}: {e}", output.display()))?;
        Ok(evaluate(trace, pass, &Profile::parse(&text)))
    });
    // Whatever happened, the folder is ours and of no further use.
    let _ = std::fs::remove_dir_all(&folder);
    let counted = counted?;
    if counted.collected == 0 {
        return Err("callgrind collected nothing: is this binary stripped of its symbols?".to_owned());
    }
    Ok(counted)
}

fn under_callgrind(trace: &Path, output: &Path) -> Result<Pass, String> {
    let this = std::env::current_exe().map_err(|error| format!("this program's own file: {error}"))?;
    let mut out_file = std::ffi::OsString::from("--callgrind-out-file=");
    out_file.push(output);
    let child = Command::new("valgrind")
        .args([
            "--tool=callgrind",
            "--quiet",
            "--toggle-collect=gruyere_malloc",
            "--toggle-collect=gruyere_free",
        ])
        .arg("--zero-before=*gruyere_bench_measured_pass*")
        .arg(out_file)
        .arg(this)
        .args(["bench", "--counted-passes", "--trace"])
        .arg(trace)
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .map_err(|error| format!("valgrind: {error} (Debian: apt install valgrind)"))?;
    let text = String::from_utf8_lossy(&child.stdout);
    if !child.status.success() {
        return Err(format!("valgrind: {}", child.status));
    }
    serde_json::from_str(&text).map_err(|error| format!("the run under valgrind said {text:?}: {error}"))
}

fn evaluate(trace: &Trace, pass: Pass, profile: &Profile) -> Instructions {
    let malloc = profile.inclusive("gruyere_malloc");
    let free = profile.inclusive("gruyere_free");
    let phantom = profile.entered(|name| name.contains("phantom") || name.contains("Phantom"));
    Instructions {
        trace: trace.name.clone(),
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

/// The run under valgrind: a pass to warm up, and the one that counts.
///
/// # Errors
/// Where a replay breaks off.
pub fn counted_passes(trace: &Trace) -> Result<Pass, String> {
    let mut state = SteadyState::new(trace, "").map_err(|error| error.to_string())?;
    state.pass().map_err(|error| error.to_string())?;
    gruyere_bench_measured_pass(&mut state).map_err(|error| error.to_string())
}

/// A function of its own, so that callgrind can begin to count where it is entered.
#[inline(never)]
fn gruyere_bench_measured_pass(
    state: &mut SteadyState<'_>,
) -> Result<Pass, gruyere_replay::bench::BenchError> {
    std::hint::black_box(state).pass()
}
