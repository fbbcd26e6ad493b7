//! Gaps of a picture: entries that do not fit together, and entries that the record's tables had no
//! room for.

use gruyere_record::Reader;
use gruyere_record::picture::Picture;

/// Entries missing from a picture.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Missing {
    /// Live blocks that did not fit into the block map; the picture shows them as free.
    pub blocks: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Segments that did not fit into the table, of all devices since the start. Their contents are
    /// missing, or drawn without a range.
    pub segments: u64,
}

impl Missing {
    /// Compares `picture` with the gauges. The gauges are of another moment, so blocks count as
    /// missing only if the map was ever full.
    pub fn of(reader: &Reader<'_>, picture: &Picture) -> Missing {
        let health = reader.health();
        let mut missing = Missing { segments: health.segments_unrecorded, ..Missing::default() };
        if let (1.., Some(device)) = (health.blocks_unrecorded, reader.device(picture.device)) {
            missing.blocks = device.total().live_blocks().saturating_sub(picture.sums.live_blocks);
            missing.bytes = device.live.saturating_sub(picture.sums.live);
        }
        missing
    }
}

/// Sentences for people; empty if the picture is complete.
pub fn notes(picture: &Picture, missing: Missing) -> Vec<String> {
    let mut notes = Vec::new();
    if missing.blocks > 0 {
        notes.push(format!(
            "{} live blocks ({} bytes) are drawn as free: the record has no room for them; raise \
             record_blocks",
            missing.blocks, missing.bytes
        ));
    }
    if missing.segments > 0 {
        notes.push(format!(
            "the record had no room for {} segments, so their contents may be missing here: raise \
             record_blocks",
            missing.segments
        ));
    }
    if picture.misfits.total() > 0 {
        let there = picture.misfits.parts().into_iter().filter(|part| part.1 > 0);
        let parts: Vec<String> = there.map(|(name, count)| format!("{name} {count}")).collect();
        notes.push(format!(
            "inconsistent entries (the record was read while it was written): {}",
            parts.join(", ")
        ));
    }
    notes
}
