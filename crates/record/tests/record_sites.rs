//! Where in the program blocks came from: what the writer was told is what a reader finds, within
//! bounds.

use std::path::Path;

use gruyere_record::sites::{
    DEPTH, Frame, FrameId, MAX_SITES, NewSite, Phase, Site, SiteId, fill_from_slabs,
};
use gruyere_record::{
    BlockEntry, DeviceFacts, Reader, Record, RecordOptions, SegmentEntry, SegmentKind,
};

fn record(directory: &Path, max_blocks: u32) -> &'static Record {
    let options = RecordOptions {
        directory: directory.to_owned(),
        ring_events: 256,
        max_blocks,
        ..RecordOptions::default()
    };
    let facts = DeviceFacts { name: "Phantom".into(), uuid: [1; 16], total_memory: 80 << 30 };
    Box::leak(Box::new(Record::create(&options, &[facts])))
}

fn block(address: u64, site: SiteId) -> BlockEntry {
    BlockEntry { address, size: 4 << 20, requested: 4 << 20, site, ..BlockEntry::default() }
}

/// The sites of all blocks, by address.
fn told(reader: &Reader<'_>) -> Vec<(u64, SiteId)> {
    let mut found: Vec<(u64, SiteId)> =
        reader.blocks().entries.iter().map(|(block, _)| (block.address, block.site)).collect();
    found.sort_unstable();
    found
}

#[test]
fn a_block_is_found_with_its_stack_its_module_and_its_phase_by_who_maps_the_file_and_after_death() {
    let folder = tempfile::tempdir().unwrap();
    let record = record(folder.path(), 1 << 12);
    let inner = record.frame("/venv/lib/python3.12/site-packages/torch/nn/linear.py", "forward", 9);
    let outer = record.frame("/home/zoë/train.py", "main.<locals>.step", 42);
    let stack = [inner, outer];
    let forward = NewSite {
        frames: &stack,
        module: "model.layers.3.mlp",
        phase: Phase::Forward,
        no_grad: true,
        ..NewSite::default()
    };
    let forward = record.site(&forward);
    let node = record.frame("autograd", "MmBackward0", 0);
    let backward = record.site(&NewSite {
        frames: &[node],
        phase: Phase::Backward,
        forward,
        ..NewSite::default()
    });
    let mut shard = record.shard(0, 32);
    shard.block_insert(&block(1 << 30, forward));
    let slot = shard.block_insert(&block(2 << 30, SiteId::NONE));
    shard.set_site(slot, backward);
    shard.block_insert(&block(3 << 30, SiteId::NONE));

    let path = record.path().unwrap().to_owned();
    let live = Reader::open(&path).unwrap();
    let dead = Reader::from_bytes(&std::fs::read(&path).unwrap()).unwrap();
    for reader in [live, dead, Reader::own(record).unwrap()] {
        assert_eq!(
            told(&reader),
            [(1 << 30, forward), (2 << 30, backward), (3 << 30, SiteId::NONE)]
        );
        let sites = reader.sites();
        let site = sites.get(forward).unwrap();
        let line = Frame {
            file: "/home/zoë/train.py".into(),
            function: "main.<locals>.step".into(),
            line: 42,
        };
        assert_eq!((site.frames.len(), site.line()), (2, Some(&line)));
        assert_eq!((&*site.module, site.phase), ("model.layers.3.mlp", Phase::Forward));
        let site = sites.get(backward).unwrap();
        assert_eq!((site.phase, site.forward), (Phase::Backward, forward));
        assert_eq!(sites.iter().count(), 2);
        assert_eq!((sites.get(SiteId::NONE), sites.get(SiteId::OTHER)), (None, None));
    }
    record.close();
}

#[test]
fn the_same_stack_has_the_same_number_and_another_module_another() {
    let folder = tempfile::tempdir().unwrap();
    let record = record(folder.path(), 1 << 12);
    let frame = |line| record.frame("train.py", "step", line);
    assert_eq!(frame(1), frame(1));
    let site = |line, module| {
        record.site(&NewSite { frames: &[frame(line)], module, ..NewSite::default() })
    };
    assert_eq!(site(1, "a"), site(1, "a"));
    let all = [site(1, "a"), site(2, "a"), site(1, "b")];
    assert!(all[0] != all[1] && all[0] != all[2] && all[1] != all[2], "{all:?}");
    record.close();
}

#[test]
fn the_next_block_in_a_place_of_the_map_does_not_have_the_site_of_the_one_before() {
    let folder = tempfile::tempdir().unwrap();
    let record = record(folder.path(), 1 << 12);
    let site = record.site(&NewSite { module: "a", ..NewSite::default() });
    let mut shard = record.shard(0, 32);
    let first = shard.block_insert(&block(1 << 30, site));
    shard.block_pending(first, 4 << 20, 4 << 20, 0);
    let reader = Reader::own(record).unwrap();
    assert_eq!(told(&reader), [(1 << 30, site)], "also while it waits for a stream");
    shard.block_remove(first, 4 << 20, 4 << 20, 0, true);
    let second = shard.block_insert(&block(2 << 30, SiteId::NONE));
    assert_eq!(first, second, "else this shows nothing");
    assert_eq!(told(&reader), [(2 << 30, SiteId::NONE)]);
    record.close();
}

#[test]
fn ten_thousand_stacks_too_many_are_counted_and_cost_nothing_more() {
    let folder = tempfile::tempdir().unwrap();
    let record = record(folder.path(), 1 << 12);
    let site = |number: u64| {
        let module = format!("layers.{number}");
        record.site(&NewSite { module: &module, ..NewSite::default() })
    };
    let numbers: Vec<SiteId> = (0..MAX_SITES + 10_000).map(site).collect();
    let held = |reader: &Reader<'_>| reader.bytes_held().unwrap();
    let reader = Reader::open(record.path().unwrap()).unwrap();
    let known = numbers.iter().filter(|&&number| number != SiteId::OTHER).count();
    assert_eq!(known as u64, MAX_SITES - 1);
    assert_eq!(reader.health().sites_untold, 10_001);
    let before = held(&reader);
    assert!((0..10_000).all(|number| site(MAX_SITES + 20_000 + number) == SiteId::OTHER));
    assert_eq!(held(&reader), before);
    assert_eq!(site(5), numbers[5], "those that are known stay known");
    let mut shard = record.shard(0, 32);
    shard.block_insert(&block(1 << 30, SiteId::OTHER));
    assert_eq!(told(&reader), [(1 << 30, SiteId::OTHER)]);
    record.close();
}

#[test]
fn texts_have_a_bound_and_a_path_keeps_its_end() {
    let folder = tempfile::tempdir().unwrap();
    let record = record(folder.path(), 1 << 12);
    let path = format!("/{}é/train.py", "deep/".repeat(1000));
    let frames = [record.frame(&path, "f\u{1b}[2J", 1)];
    let site = record.site(&NewSite { frames: &frames, ..NewSite::default() });
    let sites = Reader::own(record).unwrap().sites();
    let frame = &sites.get(site).unwrap().frames[0];
    assert!(frame.file.len() <= 1024 && frame.file.ends_with("/deep/é/train.py"), "{frame:?}");
    assert_eq!(frame.function, "f [2J", "nothing that a terminal obeys");
    // More text than there is room for: the frame has no number, and the rest goes on.
    let many: Vec<FrameId> =
        (0..2000).map(|n| record.frame(&format!("{path}/{n}"), "f", n)).collect();
    assert_eq!(many.last(), Some(&FrameId::default()));
    assert_eq!(record.frame(&path, "f\u{1b}[2J", 1), frames[0]);
    record.close();
}

#[test]
fn a_stack_deeper_than_the_bound_keeps_its_innermost_frames() {
    let folder = tempfile::tempdir().unwrap();
    let record = record(folder.path(), 1 << 12);
    let frames: Vec<FrameId> = (0..100).map(|line| record.frame("a.py", "f", line)).collect();
    let site = record.site(&NewSite { frames: &frames, ..NewSite::default() });
    let sites = Reader::own(record).unwrap().sites();
    let lines: Vec<u32> = sites.get(site).unwrap().frames.iter().map(|frame| frame.line).collect();
    assert_eq!(lines, (0..DEPTH as u32).collect::<Vec<_>>());
    record.close();
}

#[test]
fn a_record_without_sites_has_no_memory_for_them() {
    let folder = tempfile::tempdir().unwrap();
    let record = record(folder.path(), 1 << 16);
    let mut shard = record.shard(0, 32);
    let slots: Vec<_> =
        (1..=5000).map(|n| shard.block_insert(&block(n << 30, SiteId::NONE))).collect();
    let reader = Reader::open(record.path().unwrap()).unwrap();
    let before = reader.bytes_held().unwrap();
    assert!(reader.sites().is_empty() && told(&reader).len() == 5000);
    assert_eq!(reader.bytes_held().unwrap(), before, "and a reader takes none");
    let site = record.site(&NewSite { module: "a", ..NewSite::default() });
    slots.iter().for_each(|&slot| shard.set_site(slot, site));
    assert!(told(&reader).iter().all(|&(_, found)| found == site));
    record.close();
}

#[test]
fn a_record_that_is_off_knows_no_sites() {
    let options = RecordOptions { enabled: false, ..RecordOptions::default() };
    let record: &'static Record = Box::leak(Box::new(Record::create(&options, &[])));
    let frames = [record.frame("train.py", "step", 1)];
    let site = record.site(&NewSite { frames: &frames, ..NewSite::default() });
    assert_eq!((frames[0], site), (FrameId::default(), SiteId::NONE));
}

#[test]
fn small_blocks_have_the_site_of_their_slab() {
    let folder = tempfile::tempdir().unwrap();
    let record = record(folder.path(), 1 << 12);
    let site = record.site(&NewSite { module: "norm", ..NewSite::default() });
    record.segment_insert(&SegmentEntry {
        kind: SegmentKind::Slab,
        address: 4 << 20,
        bytes: 2 << 20,
        slot: 512,
        site,
        ..SegmentEntry::default()
    });
    record.shard(0, 3).block_insert(&BlockEntry { size: 512, ..block(5 << 20, SiteId::NONE) });
    let reader = Reader::own(record).unwrap();
    let mut blocks: Vec<BlockEntry> =
        reader.blocks().entries.into_iter().map(|(block, _)| block).collect();
    fill_from_slabs(&mut blocks, &reader.segments().entries);
    assert_eq!(blocks[0].site, site);
    record.close();
}

#[test]
fn a_notebooks_cell_is_named_by_the_number_of_its_last_run() {
    let folder = tempfile::tempdir().unwrap();
    let record = record(folder.path(), 64);
    let (jupyter, terminal) = ("/tmp/ipykernel_42/1234567.py", "<ipython-input-3-a1b2>");
    record.cell(jupyter, 2);
    let frames = [record.frame(jupyter, "step", 4), record.frame(terminal, "<module>", 1)];
    let site = record.site(&NewSite { frames: &frames, ..NewSite::default() });
    record.cell(terminal, 3);
    let read = || Reader::own(record).unwrap().sites().get(site).unwrap().clone();
    let words = |site: &Site| site.frames.iter().map(|frame| frame.to_string()).collect::<Vec<_>>();
    assert_eq!(words(&read()), ["In[2]:4 in step", "In[3]:1"]);
    assert!(read().frames.iter().all(Frame::is_own));
    record.cell(jupyter, 17);
    assert_eq!(words(&read()), ["In[17]:4 in step", "In[3]:1"]);
    assert_eq!(read().frames[0].file, "/tmp/ipykernel_42/1234567.py/In[17]");
}

#[test]
fn what_compiled_training_makes_is_none_of_a_forward_without_gradients() {
    let folder = tempfile::tempdir().unwrap();
    let record = record(folder.path(), 1 << 12);
    // As `torch.compile` runs a forward whose backward will come, with the cache in a folder of the
    // user's; a plain forward below it in `torch.no_grad()`.
    let hash = "cy5idtj6".to_owned() + &"a2".repeat(22);
    let code = record.frame(&format!("/cache/y5/{hash}.py"), "call", 924);
    let torch = "/venv/lib/python3.12/site-packages/torch/_functorch/_aot_autograd/";
    let wrapper = format!("{torch}runtime_wrappers.py");
    let compiled = record.frame(&wrapper, "CompiledFunction.forward", 3540);
    let program = record.frame("/home/me/train.py", "step", 7);
    let site = |frames: &[_]| {
        let new = NewSite { frames, phase: Phase::Forward, no_grad: true, ..NewSite::default() };
        record.site(&new)
    };
    let trains = site(&[code, compiled, program]);
    let infers = site(&[code, record.frame(&wrapper, "runtime_wrapper", 700), program]);
    let reader = Reader::own(record).unwrap();
    let sites = reader.sites();
    assert!(!sites.get(trains).unwrap().no_grad && sites.get(infers).unwrap().no_grad);
    for site in [trains, infers] {
        assert_eq!(sites.get(site).unwrap().line().unwrap().file, "/home/me/train.py");
    }
}
