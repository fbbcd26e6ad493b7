//! Prints where in the program the live blocks and the slabs of a record come from: a line of JSON
//! each. For tests and for looking by hand.
//!
//!     sites /dev/shm/gruyere.PID...

use gruyere_record::sites::{Site, Sites};
use gruyere_record::{Reader, SegmentKind, SiteId};
use serde_json::{Value, json};
use std::path::Path;

fn told(sites: &Sites, id: SiteId) -> Value {
    let Some(Site { frames, module, phase, forward, .. }) = sites.get(id) else {
        return json!(if id == SiteId::NONE { "none" } else { "other" });
    };
    let frames: Vec<Value> =
        frames.iter().map(|frame| json!([frame.file, frame.function, frame.line])).collect();
    let forward = sites.get(*forward).map(|_| told(sites, *forward));
    json!({
        "id": id.0, "frames": frames, "module": module, "phase": phase.name(), "forward": forward,
    })
}

fn main() {
    let path = std::env::args_os().nth(1).expect("the record's file");
    let reader = Reader::open(Path::new(&path)).expect("a record");
    let (blocks, segments) = (reader.blocks().entries, reader.segments().entries);
    let sites = reader.sites();
    for (block, _) in blocks {
        let site = told(&sites, block.site);
        println!(
            "{}",
            json!({
                "kind": "block", "address": block.address, "bytes": block.requested, "site": site,
            })
        );
    }
    for slab in segments.iter().filter(|segment| segment.kind == SegmentKind::Slab) {
        let site = told(&sites, slab.site);
        println!(
            "{}",
            json!({"kind": "slab", "address": slab.address, "bytes": slab.bytes, "site": site})
        );
    }
    println!("{}", json!({"kind": "table", "sites": sites.iter().count()}));
}
