//! Whether a compaction (`compact`) may be worth a look, without looking.

/// Held memory has crept up once it exceeds the peak of live bytes by this many times the slack.
const CREPT: u64 = 2;
/// Frees of runs from a look that led to no compaction to the next look.
const INTERVAL: u64 = 64;

/// What moves and growth have done since the last compaction.
#[derive(Default)]
pub(crate) struct Creep {
    /// Chunks that they have mapped.
    mapped: u64,
    /// No look before so many frees of runs.
    next_look: u64,
}

impl Creep {
    /// Counts the chunks of a row that has been mapped.
    pub(crate) fn note_row(&mut self, chunks: usize) {
        self.mapped += chunks as u64;
    }

    /// Whether a look is due, for a heap that holds `held` bytes, with a peak of live bytes, the
    /// slack above it, and frees of runs so far.
    pub(crate) fn is_due(&self, held: u64, peak: u64, slack: u64, frees: u64) -> bool {
        self.mapped > 0 && frees >= self.next_look && held > peak + CREPT * slack
    }

    /// Whether a compaction of `chunks` pays: as many have been mapped.
    pub(crate) fn pays(&self, chunks: usize) -> bool {
        self.mapped >= chunks as u64
    }

    /// Notes that a look has not led to a compaction.
    pub(crate) fn note_fruitless_look(&mut self, frees: u64) {
        self.next_look = frees + INTERVAL;
    }

    /// Notes a compaction, done or refused.
    pub(crate) fn note_compaction(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PEAK: u64 = 1 << 30;
    const SLACK: u64 = 1 << 20;
    const HELD: u64 = PEAK + 2 * SLACK + 1;

    #[test]
    fn a_look_is_due_once_rows_were_mapped_and_held_memory_exceeds_twice_the_slack() {
        let mut creep = Creep::default();
        assert!(!creep.is_due(HELD, PEAK, SLACK, 0), "nothing was mapped");
        creep.note_row(1);
        assert!(creep.is_due(HELD, PEAK, SLACK, 0));
        assert!(!creep.is_due(HELD - 1, PEAK, SLACK, 0));
    }

    #[test]
    fn a_compaction_pays_once_as_many_chunks_were_mapped_since_the_last_one() {
        let mut creep = Creep::default();
        creep.note_row(4);
        assert!(!creep.pays(5));
        creep.note_row(1);
        assert!(creep.pays(5));
        creep.note_compaction();
        assert!(!creep.pays(1));
    }

    #[test]
    fn after_a_fruitless_look_the_next_one_waits_for_frees() {
        let mut creep = Creep::default();
        creep.note_row(1);
        creep.note_fruitless_look(10);
        assert!(!creep.is_due(HELD, PEAK, SLACK, 10 + INTERVAL - 1));
        assert!(creep.is_due(HELD, PEAK, SLACK, 10 + INTERVAL));
    }
}
