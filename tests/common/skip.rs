//! Tests that can't run here say so, in words that `cargo xtask test` counts as skipped
//! (xtask/src/said.rs): libtest knows no test that is skipped while it runs.
#![allow(dead_code)] // not every test program has both reasons

use std::io::Write as _;

/// This test needs a tool that is not there (a name of xtask/src/tools.rs). With CI=true that is a
/// failure.
#[track_caller]
pub fn lacks(tool: &str) {
    assert_ne!(
        std::env::var("CI").as_deref(),
        Ok("true"),
        "no {tool}, which CI must have: cargo xtask tools --install"
    );
    say(&format!("skipped test, lacks {tool}"));
}

/// This user or this machine does not allow what this test does.
pub fn refused(reason: &str) {
    say(&format!("skipped test, not allowed here: {reason}"));
}

/// Past libtest, which keeps what a test prints to itself if the test passes.
fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}
