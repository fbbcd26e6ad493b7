//! The models match the real allocators: the reference figures here come from torch 2.11.0's
//! libc10_cuda, driven by the same traces on a simulated device with exact books.

use gruyere_replay::allocator::Allocator;
use gruyere_replay::engine::{Blind, End, ReplayError, Watch, replay};
use gruyere_replay::fit;
use gruyere_replay::peers::Torch;
use gruyere_replay::stage::{Charge, PhantomStage, Setup, Stage};
use gruyere_replay::trace::Trace;
use std::path::Path;

/// Peak reserved of the real allocators with room to spare, bytes, from the PyTorch tests.
fn real_peak(trace: &str, which: usize) -> u64 {
    let path =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/pytorch/expected_peaks.json");
    let json: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    json["peak_bytes"][trace][["native", "expandable"][which]].as_u64().unwrap()
}

/// Figures of the real allocators: native first, then expandable segments.
struct Real {
    trace: &'static str,
    /// Smallest device / peak live, three digits.
    fit: [f64; 2],
    /// Reserved / live, both summed over the operations, two digits.
    area: [f64; 2],
}

const REAL: [Real; 7] = [
    Real { trace: "fsdp", fit: [1.001, 1.002], area: [2.52, 2.11] },
    Real { trace: "generate", fit: [1.064, 1.006], area: [1.34, 1.28] },
    Real { trace: "gpt2xl_accum", fit: [1.029, 1.006], area: [1.45, 1.41] },
    Real { trace: "llama7b_full", fit: [1.052, 1.026], area: [1.65, 1.46] },
    Real { trace: "llama7b_lora", fit: [1.111, 1.005], area: [2.42, 1.94] },
    Real { trace: "moe", fit: [1.089, 1.009], area: [1.66, 1.44] },
    Real { trace: "offload", fit: [1.021, 1.009], area: [2.01, 1.58] },
];

fn trace(name: &str) -> Trace {
    Trace::open(
        &Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../traces/{name}.trace.zst")),
    )
    .unwrap()
}

fn model(which: usize, stage: &PhantomStage) -> Torch {
    let driver = stage.driver();
    if which == 0 { Torch::native(&driver) } else { Torch::expandable(&driver) }.unwrap()
}

#[derive(Default)]
struct Area {
    live: u128,
    held: u128,
}

impl Watch for Area {
    fn after(&mut self, live: u64, held: impl FnOnce() -> u64) {
        let held = held();
        self.live += u128::from(live);
        self.held += u128::from(held);
    }
}

#[test]
fn peak_and_area_are_those_of_the_real_allocators() {
    for real in REAL {
        let trace = trace(real.trace);
        for which in 0..2 {
            let mut stage = PhantomStage::new(&trace, Setup::instant(8 * trace.peak_live));
            let mut torch = model(which, &stage);
            let mut area = Area::default();
            assert_eq!(replay(&trace, &mut stage, &mut torch, &mut area), Ok(End::Completed));
            torch.validate().unwrap();
            assert_eq!(stage.held_peak(), real_peak(real.trace, which), "{} {which}", real.trace);
            assert_eq!(stage.held(), torch.reserved(0));
            let ratio = area.held as f64 / area.live as f64;
            assert!((ratio - real.area[which]).abs() < 0.01, "{} {which}: {ratio}", real.trace);
        }
    }
}

/// Traces with completion not monotonic around the result, which therefore depends on the addresses
/// of cudaMalloc (blocks of equal size are taken in order of address) and on the steps of the
/// search: the model may complete earlier or, by at most this much of the peak, later. (On this
/// project's simulator the real libc10_cuda completes and fails at the same capacities as the
/// model: moe at 85 to 89/1024 above its peak and not at 90, llama7b_lora at 5/1024 and not at 6.)
const NOT_MONOTONIC: [(&str, usize, f64); 2] = [("moe", 0, 0.0), ("llama7b_lora", 1, 0.002)];

fn completes(trace: &Trace, which: usize, capacity: u64) -> Result<bool, ReplayError> {
    let mut stage = PhantomStage::new(trace, Setup::instant(capacity));
    let mut torch = model(which, &stage);
    let end = replay(trace, &mut stage, &mut torch, &mut Blind)?;
    torch.validate().unwrap();
    Ok(end == End::Completed)
}

#[test]
fn smallest_device_is_that_of_the_real_allocators() {
    for real in REAL {
        let trace = trace(real.trace);
        for which in 0..2 {
            let fit = fit::smallest(trace.peak_live, |capacity| completes(&trace, which, capacity));
            let ratio = fit.unwrap().unwrap() as f64 / trace.peak_live as f64;
            let case = format!("{} {which}: {ratio:.4}", real.trace);
            match NOT_MONOTONIC.iter().find(|known| (known.0, known.1) == (real.trace, which)) {
                Some((_, _, later)) => assert!(ratio <= real.fit[which] + later, "{case}"),
                None => {
                    assert_eq!(format!("{ratio:.3}"), format!("{:.3}", real.fit[which]), "{case}")
                }
            }
            let theirs = (trace.peak_live as f64 * (real.fit[which] + 0.0005)) as u64;
            assert!(
                completes(&trace, which, theirs).unwrap(),
                "{case} where the real one completes"
            );
        }
    }
}

#[test]
fn hold_on_the_timeline_is_that_of_the_real_allocators() {
    let trace = trace("offload");
    for (which, real) in ["4.01", "2.81"].into_iter().enumerate() {
        let mut stage =
            PhantomStage::new(&trace, Setup::timeline(8 * trace.peak_live, Charge::Program));
        let mut torch = model(which, &stage);
        assert_eq!(replay(&trace, &mut stage, &mut torch, &mut Blind), Ok(End::Completed));
        assert_eq!(format!("{:.2}", stage.held_peak() as f64 / trace.peak_live as f64), real);
        assert_eq!(stage.faults(), Vec::<String>::new());
    }
}
