//! Bars of the bench on the bundled traces.

use gruyere_replay::bench::{Contender, Wanted, run};
use gruyere_replay::trace::Trace;
use std::path::Path;

#[test]
fn gruyere_holds_no_more_than_torch_on_any_trace() {
    let wanted = Wanted::default();
    for name in
        ["fsdp", "generate", "gpt2xl_accum", "llama7b_full", "llama7b_lora", "moe", "offload"]
    {
        let path =
            Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../traces/{name}.trace.zst"));
        let trace = Trace::open(&path).unwrap();
        let hold = |contender| run(&trace, &contender, &wanted).unwrap().hold_ratio;
        let (ours, torch) = (hold(Contender::Gruyere(String::new())), hold(Contender::Torch));
        assert!(ours <= torch, "{name}: {ours:.4}, torch {torch:.4}");
    }
}
