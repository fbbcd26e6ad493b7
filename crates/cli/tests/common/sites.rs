//! A record whose blocks have sites.

use std::path::Path;

use gruyere_record::sites::{NewSite, Phase, SiteId};
use gruyere_record::{
    BlockEntry, DeviceFacts, DeviceGauge, Record, RecordOptions, SegmentEntry, SegmentKind,
};

pub const PAGE: u64 = 2 << 20;
pub const BASE: u64 = 0x7f00_0000_0000;

/// A record of this process with blocks of thirteen lines, the n-th of n pages: the first block is
/// persistent, odd ones come from a module's forward, and the first has a backward too. A block in
/// a slab has the slab's site, and one block has none. A further line has left a MiB in each of
/// five steps.
pub fn record_with_sites(directory: &Path) -> &'static Record {
    let options = RecordOptions {
        directory: directory.to_owned(),
        ring_events: 256,
        max_blocks: 4096,
        ..RecordOptions::default()
    };
    let facts = DeviceFacts { name: "Phantom".into(), uuid: [1; 16], total_memory: 80 << 30 };
    let record: &'static Record = Box::leak(Box::new(Record::create(&options, &[facts])));
    let inner = record.frame("/venv/lib/python3.12/site-packages/torch/nn/linear.py", "forward", 9);
    let mut sites: Vec<SiteId> = Vec::new();
    for n in 1..=13u32 {
        let line = record.frame("/home/me/train.py", "Model.<locals>.step", 10 * n);
        let (module, phase) = match n % 2 {
            1 => (format!("model.layers.{n}"), Phase::Forward),
            _ => (String::new(), Phase::Unknown),
        };
        let frames = [inner, line];
        let site = NewSite { frames: &frames, module: &module, phase, ..NewSite::default() };
        sites.push(record.site(&site));
    }
    let (phase, forward) = (Phase::Backward, sites[0]);
    sites.push(record.site(&NewSite { phase, forward, ..NewSite::default() }));
    record.segment_insert(&SegmentEntry {
        address: BASE,
        bytes: 256 * PAGE,
        ..SegmentEntry::default()
    });
    let slab = SegmentEntry {
        kind: SegmentKind::Slab,
        address: BASE,
        bytes: PAGE,
        slot: 512 << 10,
        site: sites[4],
        ..SegmentEntry::default()
    };
    record.segment_insert(&slab);
    let mut shard = record.shard(0, 0);
    let mut block = |address: u64, size: u64, lifetime: u8, site: SiteId| {
        let requested = size;
        let block = BlockEntry { address, size, requested, lifetime, site, ..Default::default() };
        shard.block_insert(&block);
    };
    block(BASE, 512 << 10, 0, SiteId::NONE);
    let mut at = BASE + PAGE;
    for (n, &site) in (1u64..).zip(&sites) {
        block(at, n * PAGE, if n == 1 { 3 } else { 0 }, site);
        at += n * PAGE;
    }
    block(at, PAGE, 0, SiteId::NONE);
    let line = record.frame("/home/me/losses.py", "keep", 7);
    let site = record.site(&NewSite { frames: &[line], ..NewSite::default() });
    for step in 1..=5 {
        let address = at + u64::from(step) * PAGE;
        let size = PAGE / 2;
        let left = BlockEntry { address, size, requested: size, step, site, ..Default::default() };
        shard.block_insert(&left);
    }
    record.device(0).set(&[
        (DeviceGauge::Reserved, 256 * PAGE),
        (DeviceGauge::Limit, 80 << 30),
        (DeviceGauge::Step, 5),
    ]);
    record
}
