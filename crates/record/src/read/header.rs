//! Checks a record's header: whether this version can read the record, and whether every table lies
//! within the file. Reads nothing else.

use std::path::Path;

use crate::SHARDS;
use crate::block_map::BlockCell;
use crate::calls::{CallTimes, RECORDED_CALLS};
use crate::facts::ProcessFacts;
use crate::gauges::{DeviceArea, Shard, ShardSizes};
use crate::histogram::Buckets;
use crate::layout::{Header, MAGIC, PAGE, SECTIONS, Section, VERSION};
use crate::open::ReadError;
use crate::ring::{RingCell, RingHead};
use crate::segments::SegmentCell;
use crate::shard_ring::ShardRingCell;
use crate::sites::{FrameCell, MAX_FRAMES, MAX_SITES, MAX_TEXT, SiteCell};
use crate::sync::{AtomicU64, Ordering};
use crate::timeline::Timeline;

/// Entry sizes of this version, by section.
const ENTRY_BYTES: [usize; SECTIONS] = [
    size_of::<ProcessFacts>(),
    size_of::<DeviceArea>(),
    size_of::<Shard>(),
    size_of::<Buckets>(),
    size_of::<RingHead>(),
    size_of::<RingCell>(),
    size_of::<Timeline>(),
    size_of::<ShardSizes>(),
    size_of::<CallTimes>(),
    size_of::<ShardRingCell>(),
    size_of::<SegmentCell>(),
    size_of::<BlockCell>(),
    size_of::<AtomicU64>(),
    size_of::<SiteCell>(),
    size_of::<FrameCell>(),
    size_of::<AtomicU64>(),
];
const ALL_SECTIONS: [Section; SECTIONS] = [
    Section::Process,
    Section::Devices,
    Section::Shards,
    Section::Latency,
    Section::RingHead,
    Section::Ring,
    Section::Timelines,
    Section::Sizes,
    Section::Calls,
    Section::ShardRings,
    Section::Segments,
    Section::Blocks,
    Section::BlockSites,
    Section::Sites,
    Section::Frames,
    Section::Text,
];

/// The error for a file of `length` bytes that has no whole header.
pub(crate) fn too_short(length: u64, path: &Path) -> ReadError {
    let what = format!("{length} bytes are less than a header");
    ReadError::Damaged { path: path.to_owned(), what, locked: None }
}

/// Offset and number of entries of each section of the file at `path`, which has this header and
/// `length` bytes.
///
/// # Errors
/// Not a record, of another version, or a table that can't be there.
pub(crate) fn sections(
    header: &Header,
    length: u64,
    path: &Path,
) -> Result<[(u64, u64); SECTIONS], ReadError> {
    let damaged = |what: String| ReadError::Damaged { path: path.to_owned(), what, locked: None };
    let path = || path.to_owned();
    match header.magic.load(Ordering::Acquire) {
        MAGIC => {}
        0 => return Err(ReadError::NotReady { path: path(), locked: None }),
        _ => return Err(ReadError::NotARecord { path: path() }),
    }
    let version = header.version.load(Ordering::Relaxed);
    if version != VERSION {
        return Err(ReadError::Version { path: path(), version, locked: None });
    }
    let total = header.total_bytes.load(Ordering::Relaxed);
    if total > length {
        return Err(damaged(format!("it says {total} bytes and has {length}")));
    }
    let count = header.section_count.load(Ordering::Relaxed);
    if u64::from(header.header_bytes.load(Ordering::Relaxed)) < PAGE || (count as usize) < SECTIONS
    {
        return Err(damaged(format!("a header of {count} sections")));
    }
    let mut sections = [(0, 0); SECTIONS];
    for section in ALL_SECTIONS {
        let entry = &header.sections[section as usize];
        let [offset, bytes, entries] = [&entry.offset, &entry.entry_bytes, &entry.entries]
            .map(|word| word.load(Ordering::Relaxed));
        let name = section.name();
        if bytes != ENTRY_BYTES[section as usize] as u64 {
            return Err(damaged(format!("entries of {bytes} bytes in {name}")));
        }
        let end = entries.checked_mul(bytes).and_then(|length| length.checked_add(offset));
        if offset < PAGE || offset % PAGE != 0 || end.is_none_or(|end| end > total) {
            return Err(damaged(format!(
                "{entries} entries of {name} at {offset} in {total} bytes"
            )));
        }
        sections[section as usize] = (offset, entries);
    }
    let entries = |section: Section| sections[section as usize].1;
    let devices = entries(Section::Devices);
    let shards = devices.checked_mul(SHARDS as u64);
    let sound = devices <= 256
        && Some(entries(Section::Shards)) == shards
        && Some(entries(Section::Sizes)) == shards
        && entries(Section::Latency) == 2
        && entries(Section::Process) == 1
        && entries(Section::Calls) == RECORDED_CALLS as u64
        && entries(Section::Timelines) == devices
        && entries(Section::RingHead) == 1
        && entries(Section::Ring).is_power_of_two()
        && entries(Section::Ring) >= 2
        && entries(Section::BlockSites) == entries(Section::Blocks)
        && entries(Section::Sites) <= MAX_SITES
        && entries(Section::Frames) <= MAX_FRAMES
        && entries(Section::Text) <= MAX_TEXT
        && shards.is_none_or(|shards| match shards {
            0 => entries(Section::ShardRings) == 0,
            shards => entries(Section::ShardRings) % shards == 0,
        });
    if !sound {
        return Err(damaged("sections that don't fit each other".to_owned()));
    }
    Ok(sections)
}
