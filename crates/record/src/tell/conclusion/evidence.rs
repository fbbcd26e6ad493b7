//! The evidence about a device at the end, for the causes.

use crate::dump::state::{BlockKind, DeviceState, Event, State, Stretch, Training};
use crate::sites::{Frame, SiteId, Sites};
use crate::{BlockEntry, EventKind, LIFETIME_NAMES};

use super::callers::Callers;
use super::words::Names;

/// Steps in a stretch that are few.
const FEW_STEPS: u64 = 3;

/// A refused request.
pub struct Refused {
    /// Bytes asked for.
    pub asked: u64,
    /// The site of the request.
    pub site: SiteId,
    /// The site that set the ceiling, if a line of the program did.
    pub limit_site: SiteId,
    /// Bytes held by others on the device; from outside the process, a lower bound.
    pub others: u64,
    /// Free bytes of the device, if the driver reported them.
    pub free: Option<u64>,
    /// The largest request that held memory could satisfy, if known.
    pub largest: Option<u64>,
}

/// The evidence.
pub struct Evidence<'a> {
    pub state: &'a State,
    /// The device: that of the refused request, else the one with most held.
    pub device: &'a DeviceState,
    pub sites: &'a Sites,
    pub names: Names,
    /// The running step.
    pub now: u32,
    /// The live blocks of known step.
    pub live: Vec<BlockEntry>,
    /// The callers of their lines.
    pub callers: Callers<'a>,
    /// The blocks waiting for streams.
    pub pending: Vec<BlockEntry>,
    /// The refused request, if the run ended with one.
    pub refused: Option<Refused>,
}

impl<'a> Evidence<'a> {
    /// The evidence in `state`; `None`: no device.
    pub fn of(state: &'a State) -> Option<Self> {
        let device = device_of(state, None)?;
        let refused = match &state.out_of_memory {
            Some(refused) => Some(Refused {
                asked: refused.asked_bytes,
                site: refused.site,
                limit_site: refused.limit_site,
                others: refused.cause.others_bytes.unwrap_or(0),
                free: refused.cause.free_bytes,
                largest: Some(refused.cause.largest_request_bytes).filter(|&bytes| bytes > 0),
            }),
            None => last_refused(state).map(|Event { size: asked, site, .. }| Refused {
                asked: *asked,
                site: *site,
                limit_site: SiteId::NONE,
                others: others_at_least(device, *asked),
                free: None,
                largest: None,
            }),
        };
        let (live, pending) = blocks(device);
        Some(Self {
            state,
            device,
            sites: &state.sites,
            names: Names::of(&state.sites),
            now: u32::try_from(device.step).unwrap_or(u32::MAX),
            callers: Callers::of(&live, &state.sites),
            live,
            pending,
            refused,
        })
    }

    /// All live bytes.
    pub fn live_bytes(&self) -> u64 {
        self.device.live.all.bytes
    }

    /// The bytes of the device available to the program.
    pub fn room(&self) -> u64 {
        match self.device.limit_bytes {
            0 => self.device.total_bytes,
            limit => limit.min(self.device.total_bytes),
        }
    }

    /// Whether code called from `frame` is no training: a backward has run through other lines and
    /// not through this one, or nothing was or will be trained at all.
    pub fn is_untrained(&self, frame: &Frame) -> bool {
        let Training { has_optimizer, backward_lines } = &self.state.training;
        match backward_lines.is_empty() {
            true => !has_optimizer && self.now == 0,
            false => !backward_lines.contains(frame),
        }
    }

    /// The stretches of the timeline with these steps.
    pub fn stretches(&self, first: u32, last: u32) -> impl Iterator<Item = &'a Stretch> {
        let steps = u64::from(first)..=u64::from(last);
        self.device.timeline.iter().filter(move |stretch| steps.contains(&stretch.step))
    }

    /// The rise of live memory from step `since` to the end, by its lows, or by its highs if the
    /// timeline is too coarse. `None`: unknown.
    pub fn rise(&self, since: u32) -> Option<u64> {
        // Lows within a step must not be compared with lows between two.
        let few = (self.now.saturating_sub(since) / 8).max(1);
        let low = |first, last| self.stretches(first, last).map(|one| one.live_low_bytes).min();
        // Steps shorter than a stretch are in that of a later step.
        let nearest = |step| self.stretches(0, step).last();
        let late = self.now.saturating_sub(few);
        // A stretch of several steps has the low of the first.
        let start = nearest(late.saturating_sub(1)).map_or(0, |one| one.step);
        if start < u64::from(self.now.saturating_sub(2 * few)) {
            // The last one may have begun a moment ago; but the running step may be larger than
            // those before.
            let high = |last| self.stretches(late, last).map(|one| one.live_high_bytes).max();
            let before = nearest(since)?;
            let rise = |end: u64| end.saturating_sub(before.live_high_bytes);
            return match high(self.now.saturating_sub(1)) {
                Some(end) => Some(rise(end)),
                // What is kept is live at the lowest too, in the steps that share its stretch.
                None => {
                    let low = low(late, u32::MAX)?.saturating_sub(before.live_low_bytes);
                    Some(rise(high(u32::MAX)?).min(low))
                }
            };
        }
        let before = low(since, since.saturating_add(few));
        let before = before.or_else(|| nearest(since).map(|one| one.live_low_bytes))?;
        // A last stretch of few steps may have begun within one. The stretch before it may reach
        // into these steps, and have the low between them.
        let just_before = nearest(late.saturating_sub(1))
            .filter(|one| one.step + FEW_STEPS >= u64::from(self.now))
            .map(|one| one.live_low_bytes);
        let end = low(late, u32::MAX)?.min(just_before.unwrap_or(u64::MAX));
        Some(end.saturating_sub(before))
    }

    /// The sentence about missing lines, if sites are off.
    pub fn untold(&self) -> Option<String> {
        self.sites.is_empty().then(|| {
            "No lines of the program are known; `blame:large` in GRUYERE_CONF keeps them, under \
             python -m gruyere."
                .to_owned()
        })
    }
}

/// The device of a state: the one `asked` for, else that of the refused request, else the one with
/// most held.
pub fn device_of(state: &State, asked: Option<u32>) -> Option<&DeviceState> {
    let refused = || state.out_of_memory.as_ref().map(|refused| refused.device);
    let last = || last_refused(state).map(|event| u32::from(event.device));
    let chosen = asked.or_else(refused).or_else(last);
    let found = state.devices.iter().find(|device| Some(device.device) == chosen);
    found.or_else(|| state.devices.iter().max_by_key(|device| device.held.reserved_bytes))
}

/// Whether a block is a weight or a buffer, as the package tags them.
pub fn is_persistent(block: &BlockEntry) -> bool {
    LIFETIME_NAMES.get(usize::from(block.lifetime)) == Some(&"persistent")
}

/// The live and the waiting blocks of a device.
pub fn blocks(device: &DeviceState) -> (Vec<BlockEntry>, Vec<BlockEntry>) {
    let (mut live, mut pending) = (Vec::new(), Vec::new());
    for segment in &device.segments {
        let mut at = segment.address;
        for block in &segment.blocks {
            let entry = BlockEntry {
                address: at,
                size: block.0,
                requested: block.2,
                step: block.5.unwrap_or(0),
                lifetime: block.3,
                capture: u8::from(segment.holder == "captured"),
                site: block.6,
                ..BlockEntry::default()
            };
            match block.1 {
                BlockKind::Live => live.push(entry),
                BlockKind::Pending => pending.push(entry),
                BlockKind::Free => {}
            }
            at = at.saturating_add(block.0);
        }
    }
    (live, pending)
}

/// The last request, if refused: the end of a program that died of it.
fn last_refused(state: &State) -> Option<&Event> {
    let kinds = [EventKind::OutOfMemory, EventKind::Malloc].map(EventKind::name);
    let last = state.events.entries.iter().rev().find(|event| kinds.contains(&&*event.kind))?;
    (last.kind == kinds[0]).then_some(last)
}

/// A lower bound of the bytes held by others when `asked` bytes were refused: the device had less
/// than that free.
fn others_at_least(device: &DeviceState, asked: u64) -> u64 {
    if device.limit_bytes > 0 && device.limit_bytes < device.total_bytes {
        return 0;
    }
    let held = device.held.reserved_bytes.max(device.reserved_peak_bytes);
    device.total_bytes.saturating_sub(held).saturating_sub(asked)
}
