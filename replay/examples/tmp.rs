#![allow(missing_docs)]
use gruyere_replay::{bench::*, trace::Trace};
fn main() {
    for path in std::env::args().skip(1) {
        let t = Trace::open(path.as_ref()).unwrap();
        for c in [Contender::Torch, Contender::Expandable, Contender::Gruyere(String::new())] {
            let s = std::time::Instant::now();
            match run(&t, &c, Wanted { fit: false, timeline: true }) {
                Ok(r) => { println!("{} {} {:.4} area {:.2} calls {} faults {} {:?} tl {:?} took {:?}", t.name, r.allocator, r.hold_ratio, r.area_ratio, r.driver_calls, r.fault_count, r.faults.first(), r.timeline, s.elapsed()); }
                Err(e) => println!("{} {} {e}", t.name, c.name()),
            }
            if c.is_ours() { println!("ns {:?}", ns_per_operation(&t, &c)); }
        }
    }
}
