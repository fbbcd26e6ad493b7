//! Gaps of a picture: entries that do not fit together, and entries that the record's tables had no
//! room for.

use gruyere_record::dump::from_record::unrecorded;
use gruyere_record::dump::state::Sum;
use gruyere_record::picture::Picture;
use gruyere_record::{Reader, counted};

use crate::amounts::bytes;

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
    /// Compares `picture` with the gauges.
    pub fn of(reader: &Reader<'_>, picture: &Picture) -> Missing {
        let recorded = reader.device(picture.device);
        let blocks = recorded.map(|device| unrecorded(reader, &device, picture));
        let Sum { blocks, bytes, .. } = blocks.unwrap_or_default();
        Missing { blocks, bytes, segments: reader.health().segments_unrecorded }
    }

    /// Whether the picture shows a part of the blocks only, so that its sums are too low.
    pub fn is_any(&self) -> bool {
        self.blocks > 0
    }

    /// A sentence about the missing blocks, for the head of the picture: below it all is a part.
    pub fn note(&self, live: u64) -> Option<String> {
        self.is_any().then(|| {
            format!(
                "incomplete: {} ({}) of {} live are drawn as free, and no sum here has them: the \
                 record had no room for them. Its folder was full (GRUYERE_RECORD_DIR names \
                 another), or record_blocks is too low",
                counted(self.blocks, "live block"),
                bytes(self.bytes),
                bytes(live.saturating_add(self.bytes))
            )
        })
    }
}

/// Sentences for people, besides [`Missing::note`]; empty if there is nothing to say.
pub fn notes(picture: &Picture, missing: Missing) -> Vec<String> {
    let mut notes = Vec::new();
    if missing.segments > 0 {
        notes.push(format!(
            "the record had no room for {}, so their contents may be missing here: its folder was \
             full (GRUYERE_RECORD_DIR names another), or record_blocks is too low",
            counted(missing.segments, "segment")
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_segments_are_told_with_both_causes() {
        let missing = Missing { segments: 2, ..Missing::default() };
        let notes = notes(&Picture::default(), missing);
        let [note] = &notes[..] else { panic!("{notes:?}") };
        assert!(note.contains("room for 2 segments"), "{note}");
        assert!(note.contains("GRUYERE_RECORD_DIR") && note.contains("record_blocks"), "{note}");
    }
}
