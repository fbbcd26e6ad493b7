//! Near a device's capacity, memory in spans serves the programs that torch's caching allocator
//! serves. `cargo bench --bench near_capacity` checks a thousand.

#[path = "../benches/random_program/mod.rs"]
mod random_program;

use gruyere_replay::bench::{Contender, completes};
use random_program::{Outcome, Program};
use std::path::Path;

/// Programs that ran out of memory, with one backing or both, because of long spans, or of slabs
/// and blocks of all sizes in one span.
const SEEDS: [u64; 10] = [8, 31, 43, 45, 49, 50, 57, 91, 93, 104];

#[test]
fn memory_in_spans_serves_near_capacity_what_torchs_allocator_serves() -> Outcome<()> {
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join("near_capacity_test.trace");
    for seed in SEEDS {
        let program = Program::of(seed, &file)?;
        assert!(
            completes(&program.trace, &Contender::Torch, program.capacity)?,
            "seed {seed}, torch"
        );
        for conf in ["backing:pool", "backing:fixed"] {
            let done =
                completes(&program.trace, &Contender::Gruyere(conf.to_owned()), program.capacity)?;
            assert!(done, "{conf} runs out of memory in seed {seed}, {}", program.kind);
        }
    }
    Ok(std::fs::remove_file(&file)?)
}
