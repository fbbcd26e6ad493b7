//! Tests that cannot run here print a line that `cargo xtask test` counts as skipped
//! (crates/xtask/src/said.rs): libtest has no skip at run time.
#![allow(dead_code)] // not every test program has both reasons

use std::io::Write as _;

/// This test needs a missing tool (a name of crates/xtask/src/tools.rs). A failure with CI=true.
#[track_caller]
pub fn lacks(tool: &str) {
    assert_ne!(
        std::env::var("CI").as_deref(),
        Ok("true"),
        "no {tool}, which CI must have: cargo xtask tools --install"
    );
    say(&format!("skipped test, lacks {tool}"));
}

/// This user or this machine does not allow the test.
pub fn refused(reason: &str) {
    say(&format!("skipped test, not allowed here: {reason}"));
}

/// Prints past libtest, which hides the output of passing tests.
fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}
