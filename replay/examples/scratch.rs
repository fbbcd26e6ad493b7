use gruyere_replay::bench::*;
use gruyere_replay::trace::Trace;
fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let conf = args[0].clone();
    let timeline = args[1] == "t";
    for name in &args[2..] {
        let p = if name.contains('/') { name.clone() } else { format!("traces/{name}.trace.zst") };
        let trace = Trace::open(std::path::Path::new(&p)).unwrap();
        let t = std::time::Instant::now();
        let r = run(&trace, &Contender::Gruyere(conf.clone()), Wanted { fit: false, timeline }).unwrap();
        let ns = ns_per_operation(&trace, &Contender::Gruyere(conf.clone())).unwrap();
        println!("{name:14} hold {:.4} area {:.3} calls {:6} ns/op {:.1} faults {} {:?} tl {:?} took {:?}", r.hold_ratio, r.area_ratio, r.driver_calls, ns, r.fault_count, r.faults.first(), r.timeline.map(|t| (t.hold_ratio, t.end_ratio(), t.host_blocked_ns, t.driver_calls)), t.elapsed());
    }
}
