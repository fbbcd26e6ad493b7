//! The models reserve what the real allocators reserve, to the byte (reference: the real torch 2.11 on a stand-in device).

use gruyere::driver::{Driver, StreamHandle};
use gruyere_replay::allocator::Allocator;
use gruyere_replay::instant::InstantDevice;
use gruyere_replay::peers::Torch;
use gruyere_replay::trace::{Op, Trace};
use std::path::Path;
use std::sync::Arc;

const MIB: u64 = 1 << 20;

/// Trace, peak of torch's default in MiB, peak with expandable segments in MiB.
const REAL: [(&str, u64, u64); 7] = [
    ("fsdp", 19306, 15444),
    ("generate", 21816, 20744),
    ("gpt2xl_accum", 23298, 22782),
    ("llama7b_full", 78346, 66348),
    ("llama7b_lora", 41672, 33194),
    ("moe", 16832, 14608),
    ("offload", 20506, 12892),
];

fn trace(name: &str) -> Trace {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../traces/{name}.trace.zst"));
    Trace::open(&path).unwrap()
}

fn replay(trace: &Trace, allocator: &mut impl Allocator) {
    let mut addresses = vec![(0, 0, 0); trace.blocks as usize];
    let stream = |s: u16| StreamHandle(trace.streams[s as usize] as usize);
    for &op in &trace.ops {
        match op {
            Op::Alloc { size, block, stream: s, device } => {
                let address = allocator.malloc(size, device.into(), stream(s)).unwrap();
                addresses[block as usize] = (address, size, s);
            }
            Op::Free { block } => {
                let (address, size, s) = addresses[block as usize];
                allocator.free(address, size, 0, stream(s)).unwrap();
            }
            Op::RecordStream { block, stream: s } => {
                allocator.record_stream(addresses[block as usize].0, stream(s)).unwrap();
            }
            _ => {}
        }
    }
}

#[test]
fn peak_reserved_is_that_of_the_real_allocators() {
    for (name, native, expandable) in REAL {
        let trace = trace(name);
        for (which, want) in [("native", native), ("expandable", expandable)] {
            let device = Arc::new(InstantDevice::new(200 << 30));
            let driver: Arc<dyn Driver> = device.clone();
            let mut torch =
                if which == "native" { Torch::native(&driver) } else { Torch::expandable(&driver) }.unwrap();
            replay(&trace, &mut torch);
            torch.validate().unwrap();
            println!("{name} {which}: {} want {want}", device.peak() as f64 / MIB as f64);
            assert_eq!(device.peak(), want * MIB, "{name} {which}");
        }
    }
}
