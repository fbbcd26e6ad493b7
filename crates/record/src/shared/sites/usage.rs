//! Memory of lines, modules and phases, and its growing part.

use std::collections::{BTreeMap, HashMap};

use serde::{Deserialize, Serialize};

use super::{Place, SiteId, Sites};
use crate::{BlockEntry, SegmentEntry, SegmentKind};

/// The key by which blocks are grouped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By {
    /// [`Sites::line`].
    Line,
    /// The place in views ([`Sites::place`]): a line, or the backward of one.
    Place,
    /// The module's path; the line if unknown.
    Module,
    /// The site: whole stack, module and phase.
    Site,
}

/// Steps whose blocks may still go in the ordinary course: the running one, and the one before,
/// whose gradients are freed when the next ones come.
const YOUNG_STEPS: u32 = 2;
/// Steps that must have left blocks before it counts as growth.
const LEAST_STEPS: usize = 3;
/// Bytes above this many times the median of a step were made once (weights, optimiser states), and
/// are no part of the growth.
const MADE_ONCE: u64 = 4;

/// Blocks left behind at regular steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Growth {
    /// Bytes left per step: as in most steps since, or on average over them.
    pub bytes_a_step: u64,
    /// The first step that left blocks.
    #[serde(rename = "since_step")]
    pub since: u32,
    /// Bytes left by all steps.
    pub bytes: u64,
}

/// The memory of a group of blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Usage {
    /// The site of most of it; [`SiteId::NONE`] for blocks of unknown site.
    pub site: SiteId,
    /// Bytes of the blocks, as [`BlockEntry::size`] counts them.
    pub bytes: u64,
    /// Number of blocks.
    pub blocks: u64,
    /// Its growing part.
    pub growth: Option<Growth>,
}

/// Gives blocks without a site the site of their slab: the request that made the slab stands for
/// all that share it.
pub fn fill_from_slabs(blocks: &mut [BlockEntry], segments: &[SegmentEntry]) {
    let is_told =
        |segment: &&SegmentEntry| segment.kind == SegmentKind::Slab && segment.site != SiteId::NONE;
    let slabs: BTreeMap<(u8, u64), &SegmentEntry> =
        segments.iter().filter(is_told).map(|slab| ((slab.device, slab.address), slab)).collect();
    for block in blocks.iter_mut().filter(|block| block.site == SiteId::NONE) {
        let before = slabs.range((block.device, 0)..=(block.device, block.address)).next_back();
        if let Some((_, slab)) = before
            && block.address - slab.address < slab.bytes
        {
            block.site = slab.site;
        }
    }
}

/// The memory of each line, module or site, largest first. `now` is the running step.
pub fn usage(blocks: &[BlockEntry], sites: &Sites, by: By, now: u32) -> Vec<Usage> {
    #[derive(Default)]
    struct Sum {
        blocks: u64,
        by_site: HashMap<SiteId, u64>,
        by_step: BTreeMap<u32, u64>,
    }
    let mut sums: HashMap<Key<'_>, Sum> = HashMap::new();
    for block in blocks {
        let sum = sums.entry(key(sites, block.site, by)).or_default();
        sum.blocks += 1;
        *sum.by_site.entry(block.site).or_default() += block.size;
        *sum.by_step.entry(block.step).or_default() += block.size;
    }
    let mut found: Vec<Usage> = sums
        .into_values()
        .map(|sum| {
            let most = sum.by_site.iter().max_by_key(|&(site, bytes)| (bytes, site.0));
            Usage {
                site: most.map_or(SiteId::NONE, |(&site, _)| site),
                bytes: sum.by_site.values().sum(),
                blocks: sum.blocks,
                growth: growth(&sum.by_step, now),
            }
        })
        .collect();
    found.sort_unstable_by_key(|usage| (std::cmp::Reverse(usage.bytes), usage.site));
    found
}

/// Key of a group.
#[derive(PartialEq, Eq, Hash)]
enum Key<'a> {
    Line(&'a str, u32),
    Place(Place<'a>),
    Module(&'a str),
    Site(SiteId),
}

fn key(sites: &Sites, id: SiteId, by: By) -> Key<'_> {
    match (sites.get(id), by) {
        (_, By::Place) => Key::Place(sites.place(id)),
        (Some(site), By::Module) if !site.module.is_empty() => Key::Module(&site.module),
        (Some(_), By::Line | By::Module) => match sites.line(id) {
            Some(line) => Key::Line(&line.file, line.line),
            None => Key::Site(id),
        },
        _ => Key::Site(id),
    }
}

/// The part of `by_step` (bytes by step of allocation) left behind step after step. In a single
/// look a bounded queue looks the same: it holds what its last steps have left.
pub(crate) fn growth(by_step: &BTreeMap<u32, u64>, now: u32) -> Option<Growth> {
    let old = now.checked_sub(YOUNG_STEPS)?;
    let left: Vec<(u32, u64)> =
        by_step.range(..=old).map(|(&step, &bytes)| (step, bytes)).collect();
    let mut sizes: Vec<u64> = left.iter().map(|&(_, bytes)| bytes).collect();
    sizes.sort_unstable();
    let median = *sizes.get(sizes.len() / 2)?;
    let left: Vec<(u32, u64)> =
        left.into_iter().filter(|&(_, bytes)| bytes <= MADE_ONCE * median).collect();
    let (&(since, _), &(latest, _)) = left.first().zip(left.last())?;
    if left.len() < LEAST_STEPS {
        return None;
    }
    // One step in every so many leaves blocks; a longer silence means the end of the growth.
    let every = (latest - since) / (left.len() as u32 - 1);
    if old - latest > 2 * every {
        return None;
    }
    let bytes: u64 = left.iter().map(|&(_, bytes)| bytes).sum();
    let steps = u64::from(old - since + 1);
    // If most steps have left the same, that is the amount per step; the first left more.
    let alike = left.iter().filter(|&&(_, bytes)| bytes == median).count();
    let is_steady = left.len() as u64 == steps && 2 * alike > left.len();
    let bytes_a_step = if is_steady { median } else { bytes / steps };
    Some(Growth { bytes_a_step, since, bytes })
}

#[cfg(test)]
mod tests {
    use super::super::{Frame, Phase, Site};
    use super::*;

    const MIB: u64 = 1 << 20;

    fn site(file: &str, line: u32, module: &str) -> Site {
        let frame = |file: &str, line| Frame { file: file.into(), function: "f".into(), line };
        Site {
            frames: vec![
                frame("/venv/lib/python3.12/site-packages/torch/x.py", 7),
                frame(file, line),
            ],
            module: module.into(),
            phase: Phase::Forward,
            ..Site::default()
        }
    }

    fn block(site: u32, step: u32, size: u64) -> BlockEntry {
        BlockEntry { site: SiteId(site), step, size, ..BlockEntry::default() }
    }

    #[test]
    fn a_line_that_leaves_a_block_each_step_grows_and_one_that_made_weights_once_does_not() {
        let sites = Sites::new([site("train.py", 10, ""), site("train.py", 20, "")]);
        let mut blocks: Vec<BlockEntry> = (3..=9).map(|step| block(1, step, 64 * MIB)).collect();
        blocks.extend((0..40).map(|_| block(2, 0, 50 * MIB)));
        let found = usage(&blocks, &sites, By::Line, 9);
        assert_eq!((found[0].site, found[0].bytes, found[0].growth), (SiteId(2), 2000 * MIB, None));
        let growth = Growth { bytes_a_step: 64 * MIB, since: 3, bytes: 5 * 64 * MIB };
        assert_eq!((found[1].site, found[1].growth), (SiteId(1), Some(growth)));
    }

    #[test]
    fn what_every_tenth_step_leaves_is_growth_and_what_stopped_long_ago_is_not() {
        let sites = Sites::new([site("train.py", 10, "")]);
        let blocks: Vec<BlockEntry> = (0..5).map(|n| block(1, 10 * n, 10 * MIB)).collect();
        let rate = |now| usage(&blocks, &sites, By::Line, now)[0].growth.map(|g| g.bytes_a_step);
        assert_eq!(rate(42), Some(50 * MIB / 41));
        assert_eq!(rate(70), None);
    }

    #[test]
    fn the_same_line_made_once_large_and_then_a_little_each_step_grows_by_the_little() {
        let sites = Sites::new([site("train.py", 10, "")]);
        let mut blocks: Vec<BlockEntry> = (1..=9).map(|step| block(1, step, MIB)).collect();
        blocks.push(block(1, 0, 1000 * MIB));
        let growth = usage(&blocks, &sites, By::Line, 9)[0].growth.unwrap();
        assert_eq!((growth.bytes_a_step, growth.since), (MIB, 1));
    }

    #[test]
    fn what_the_first_step_leaves_beside_does_not_make_the_others_more() {
        let sites = Sites::new([site("train.py", 10, "")]);
        let mut blocks: Vec<BlockEntry> = (0..=9).map(|step| block(1, step, 16 * MIB)).collect();
        blocks.push(block(1, 0, 16 * MIB));
        let growth = usage(&blocks, &sites, By::Line, 9)[0].growth.unwrap();
        assert_eq!((growth.bytes_a_step, growth.since, growth.bytes), (16 * MIB, 0, 144 * MIB));
    }

    #[test]
    fn code_that_a_library_has_written_is_not_the_programs_and_scripts_anywhere_are() {
        let is_own = |file: &str| site(file, 10, "").frames[1].is_own();
        for file in [
            "/tmp/torch_geometric.nn.conv.gat_conv_GATConv_propagate_xng5vk1u.py",
            "/home/me/.cache/pyg/message_passing/torch_geometric.nn.conv.gcn_conv_propagate.py",
            "/tmp/__main___OwnConv_propagate_xng5vk1u.py",
            "/tmp/models.gat_OwnConv_edge_updater_xng5vk1u.py",
            "/tmp/torchinductor_me/nl/cnl7.py",
        ] {
            assert!(!is_own(file), "{file}");
        }
        for file in [
            "/tmp/train.py",
            "/tmp/tmpx1y2z3/train.v2.py",
            "/tmp/ipykernel_7/1234.py",
            "/tmp/torch_geometric_train.py",
            "/home/me/label_propagate_training.py",
            "/home/me/torch_geometric.examples/train.py",
            "/home/me/__main__.py",
        ] {
            assert!(is_own(file), "{file}");
        }
    }

    #[test]
    fn a_backward_is_of_the_line_of_its_forward() {
        let node = Frame { file: "autograd".into(), function: "MmBackward0".into(), line: 0 };
        let backward = Site { frames: vec![node], forward: SiteId(1), ..Site::default() };
        let sites = Sites::new([site("train.py", 10, ""), backward]);
        let found = usage(&[block(1, 0, 1), block(2, 0, 2)], &sites, By::Line, 0);
        assert_eq!((found.len(), found[0].bytes), (1, 3));
        assert_eq!(sites.line(SiteId(2)).map(|line| line.line), Some(10));
    }

    #[test]
    fn sites_of_one_line_or_one_module_are_put_together() {
        let sites = Sites::new([
            site("train.py", 10, "layers.0"),
            site("train.py", 10, "layers.1"),
            site("other.py", 10, "layers.1"),
        ]);
        let blocks = [block(1, 0, 1), block(2, 0, 2), block(3, 0, 4), block(0, 0, 8)];
        let told = |by| -> Vec<(u32, u64)> {
            let found = usage(&blocks, &sites, by, 0);
            found.iter().map(|usage| (usage.site.0, usage.bytes)).collect()
        };
        assert_eq!(told(By::Line), [(0, 8), (3, 4), (2, 3)]);
        assert_eq!(told(By::Module), [(0, 8), (3, 6), (1, 1)]);
        assert_eq!(told(By::Site), [(0, 8), (3, 4), (2, 2), (1, 1)]);
    }

    #[test]
    fn a_small_block_has_the_site_of_its_slab_unless_it_has_one_of_its_own() {
        let slab = |address, site| SegmentEntry {
            kind: SegmentKind::Slab,
            address,
            bytes: 2 * MIB,
            site: SiteId(site),
            ..SegmentEntry::default()
        };
        let at = |address, site| BlockEntry { address, ..block(site, 0, 512) };
        let (first, second) = (16 * MIB, 18 * MIB);
        let mut blocks = [
            at(first, 0),
            at(first + 512, 9),
            at(second + MIB, 0),
            at(second + 2 * MIB, 0),
            at(1, 0),
        ];
        fill_from_slabs(&mut blocks, &[slab(first, 3), slab(second, 4)]);
        assert_eq!(blocks.map(|block| block.site.0), [3, 9, 4, 0, 0]);
    }
}
