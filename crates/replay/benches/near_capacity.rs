//! Out of memory near a device's capacity, by allocator: `cargo bench -p gruyere-replay --bench
//! near_capacity`.
//!
//! Random programs (`random_trace.py SEED FILE` prints the capacity for the program) on a simulated
//! GPU of that capacity, through the model of torch's default allocator and through Gruyère with
//! each backing. For each, the number of programs that ran out of memory, of those that torch
//! completes, and of those where torch ran out and it completes. Nothing takes time. The last
//! figures are in docs/decisions/near-capacity.md.
//!
//! Arguments: `FROM..TO` (seeds; 0..1000), `--seeds` (lists the seeds that differ), `--conf CONF`
//! (repeatable; in place of the backings).

mod random_program;

use gruyere_replay::bench::{Contender, completes};
use random_program::{Outcome, Program};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Default configurations.
const BACKINGS: [&str; 3] = ["", "backing:pool", "backing:fixed"];

/// The command's arguments.
struct Arguments {
    seeds: std::ops::Range<u64>,
    confs: Vec<String>,
    named: bool,
}

impl Arguments {
    fn read() -> Outcome<Self> {
        let mut arguments = Self { seeds: 0..1000, confs: Vec::new(), named: false };
        let mut words = std::env::args().skip(1);
        while let Some(word) = words.next() {
            match word.as_str() {
                // Cargo's own argument.
                "--bench" => {}
                "--seeds" => arguments.named = true,
                "--conf" => arguments.confs.push(words.next().ok_or("--conf: which?")?),
                _ => {
                    let (from, to) = word
                        .split_once("..")
                        .ok_or(format!("{word}: FROM..TO, --seeds or --conf CONF"))?;
                    arguments.seeds = from.parse()?..to.parse()?;
                }
            }
        }
        if arguments.confs.is_empty() {
            arguments.confs = BACKINGS.map(str::to_owned).to_vec();
        }
        Ok(arguments)
    }
}

/// The number of programs of one kind that ran out of memory.
#[derive(Default)]
struct Count {
    programs: u32,
    failed: u32,
    /// Of these, torch completes.
    worse: u32,
    /// torch ran out, and this allocator completes.
    better: u32,
}

impl Count {
    fn add(&mut self, torch: bool, completed: bool) {
        self.programs += 1;
        self.failed += u32::from(!completed);
        self.worse += u32::from(torch && !completed);
        self.better += u32::from(!torch && completed);
    }
}

fn main() -> Outcome<()> {
    let Arguments { seeds, confs, named } = Arguments::read()?;
    let file = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("near_capacity.trace");
    let mut counts: BTreeMap<String, Vec<Count>> = BTreeMap::new();
    for seed in seeds {
        let program = Program::of(seed, &file)?;
        let torch = completes(&program.trace, &Contender::Torch, program.capacity)?;
        let mut completed = vec![torch];
        for conf in &confs {
            let ours =
                completes(&program.trace, &Contender::Gruyere(conf.clone()), program.capacity)?;
            if named && ours != torch {
                let who = if torch { "only torch completes" } else { "torch alone fails" };
                println!(
                    "seed {seed} {} {} B gruyere {conf}: {who}",
                    program.kind, program.capacity
                );
            }
            completed.push(ours);
        }
        for kind in ["all", &program.kind] {
            let counts = counts.entry(kind.to_owned()).or_default();
            counts.resize_with(completed.len(), Count::default);
            for (count, &completed) in counts.iter_mut().zip(&completed) {
                count.add(torch, completed);
            }
        }
    }
    std::fs::remove_file(&file)?;
    println!(
        "programs     allocator                 number  failed  torch completes  torch alone fails"
    );
    for (kind, counts) in &counts {
        let names = std::iter::once("torch".to_owned())
            .chain(confs.iter().map(|conf| Contender::Gruyere(conf.clone()).name()));
        for (count, name) in counts.iter().zip(names) {
            let Count { programs, failed, worse, better } = count;
            println!("{kind:<12} {name:<25} {programs:>6}  {failed:>6}  {worse:>15}  {better:>17}");
        }
    }
    Ok(())
}
