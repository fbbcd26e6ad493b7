//! What is known of a device at the end, as the causes ask for it.

use crate::dump::state::{BlockKind, DeviceState, Event, State, Stretch, Training};
use crate::sites::{Frame, SiteId, Sites};
use crate::{BlockEntry, EventKind, LIFETIME_NAMES};

use super::callers::Callers;
use super::words::Names;

/// A request that could not be met.
pub struct Refused {
    /// What was asked for.
    pub asked: u64,
    /// Where in the program.
    pub site: SiteId,
    /// Where in the program the ceiling was set, where a line of it did.
    pub limit_site: SiteId,
    /// What others hold of the device. From outside of the process it is only known that it was at
    /// least so much.
    pub others: u64,
    /// What of the device is free, where the driver said so.
    pub free: Option<u64>,
    /// The largest request that what is held could satisfy, where that is known.
    pub largest: Option<u64>,
}

/// What is known.
pub struct Evidence<'a> {
    pub state: &'a State,
    /// The device that it is about: that of the refused request, else the one with most held.
    pub device: &'a DeviceState,
    pub sites: &'a Sites,
    pub names: Names,
    /// The step that runs.
    pub now: u32,
    /// The live blocks of which the step is known.
    pub live: Vec<BlockEntry>,
    /// Who called the lines that hold them.
    pub callers: Callers<'a>,
    /// Those that wait for streams.
    pub pending: Vec<BlockEntry>,
    /// The request that could not be met, if that is how it ended.
    pub refused: Option<Refused>,
}

impl<'a> Evidence<'a> {
    /// What `state` has; `None`: no device.
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

    /// All that is live.
    pub fn live_bytes(&self) -> u64 {
        self.device.live.all.bytes
    }

    /// What the program may have of the device.
    pub fn room(&self) -> u64 {
        match self.device.limit_bytes {
            0 => self.device.total_bytes,
            limit => limit.min(self.device.total_bytes),
        }
    }

    /// Whether code that was called from `frame` is no training: a backward has run through other
    /// lines and not through this, or nothing was trained at all, nor is to be.
    pub fn is_untrained(&self, frame: &Frame) -> bool {
        let Training { has_optimizer, backward_lines } = &self.state.training;
        match backward_lines.is_empty() {
            true => !has_optimizer && self.now == 0,
            false => !backward_lines.contains(frame),
        }
    }

    /// The stretches of the timeline in which these steps ran.
    pub fn stretches(&self, first: u32, last: u32) -> impl Iterator<Item = &'a Stretch> {
        let steps = u64::from(first)..=u64::from(last);
        self.device.timeline.iter().filter(move |stretch| steps.contains(&stretch.step))
    }

    /// How far live memory has risen from step `since` to the end, by its lows, or where the
    /// timeline is too coarse for those by its highs. `None`: it does not tell.
    pub fn rise(&self, since: u32) -> Option<u64> {
        // Lows within a step are not compared with those between two.
        let few = (self.now.saturating_sub(since) / 8).max(1);
        let low = |first, last| self.stretches(first, last).map(|one| one.live_low_bytes).min();
        // Steps that were shorter than a stretch are in that of a later step.
        let nearest = |step| self.stretches(0, step).last();
        let late = self.now.saturating_sub(few);
        // A stretch that holds several steps has the low of the first of them.
        let start = nearest(late.saturating_sub(1)).map_or(0, |one| one.step);
        if start < u64::from(self.now.saturating_sub(2 * few)) {
            // The last one may have begun a moment ago.
            let end = self.stretches(late, u32::MAX).map(|one| one.live_high_bytes).max()?;
            return Some(end.saturating_sub(nearest(since)?.live_high_bytes));
        }
        let before = low(since, since.saturating_add(few));
        let before = before.or_else(|| nearest(since).map(|one| one.live_low_bytes))?;
        Some(low(late, u32::MAX)?.saturating_sub(before))
    }

    /// What to say where lines are missing: nobody asked for them.
    pub fn untold(&self) -> Option<String> {
        self.sites.is_empty().then(|| {
            "No lines of the program are known; `blame:large` in GRUYERE_CONF keeps them, under \
             python -m gruyere."
                .to_owned()
        })
    }
}

/// The device that a state is about: the one `asked` for, else that of the refused request, else
/// the one with most held.
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

/// The live blocks of a device, and those that wait for streams.
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

/// The last request, if it was refused: what a program that died of it leaves.
fn last_refused(state: &State) -> Option<&Event> {
    let kinds = [EventKind::OutOfMemory, EventKind::Malloc].map(EventKind::name);
    let last = state.events.entries.iter().rev().find(|event| kinds.contains(&&*event.kind))?;
    (last.kind == kinds[0]).then_some(last)
}

/// What others held when so much was refused, at least: the device had less than that free.
fn others_at_least(device: &DeviceState, asked: u64) -> u64 {
    if device.limit_bytes > 0 && device.limit_bytes < device.total_bytes {
        return 0;
    }
    let held = device.held.reserved_bytes.max(device.reserved_peak_bytes);
    device.total_bytes.saturating_sub(held).saturating_sub(asked)
}
