//! What is in use, and when that changed.

use super::Arenas;

impl Arenas {
    /// Grows whenever memory becomes free, or free for more streams.
    pub fn changes(&self) -> u64 {
        self.changes
    }

    /// Bytes of blocks and slabs, those included that wait for streams.
    pub fn busy(&self) -> u64 {
        self.busy
    }

    /// The highest that [`Arenas::busy`] was since this was asked last, for samples of the
    /// timeline.
    pub fn sample_busy_peak(&mut self) -> u64 {
        let peak = std::mem::replace(&mut self.busy_peak, self.busy);
        self.sampled_peak = self.sampled_peak.max(peak);
        peak
    }

    /// The highest that [`Arenas::busy`] was since this was asked last, whatever samples were taken
    /// meanwhile.
    pub fn take_busy_peak(&mut self) -> u64 {
        let peak = self.sample_busy_peak();
        peak.max(std::mem::take(&mut self.sampled_peak))
    }
}
