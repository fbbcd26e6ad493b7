//! The evidence about a device at the end, for the causes.

use std::collections::{HashMap, HashSet};
use std::ops::RangeInclusive;

use crate::dump::state::{BlockKind, DeviceState, Event, State, Stretch, Training, last_refused};
use crate::facts::Uses;
use crate::gauges::IN_SLABS;
use crate::sites::{Frame, SiteId, Sites};
use crate::size::Size;
use crate::{BlockEntry, EventKind, LIFETIME_NAMES};

use super::Advice;
use super::callers::Callers;
use super::words::{Names, bytes};

/// Growth since one of so many first steps is no full queue: nothing has left it yet.
const FIRST_STEPS: u64 = 2;

/// The part of a rise (one part in so many) by which it exceeds what was live before.
const NEW: u64 = 4;

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
    /// Bytes freed since: the process may have gone on, and other requests may have ended.
    pub freed_since: u64,
}

/// Live memory between two steps.
struct Low {
    /// The one that ended.
    step: u64,
    bytes: u64,
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
                freed_since: 0,
            }),
            None => {
                last_refused(&state.events.entries).map(|Event { size: asked, site, .. }| Refused {
                    asked: *asked,
                    site: *site,
                    limit_site: SiteId::NONE,
                    others: others_at_least(device, *asked),
                    free: None,
                    largest: None,
                    freed_since: freed_at_the_end(state, device),
                })
            }
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

    /// The device's events of a kind, each with its place among all events.
    pub fn events(&self, kind: EventKind) -> impl DoubleEndedIterator<Item = (usize, &'a Event)> {
        let device = self.device.device;
        let is_meant =
            move |event: &Event| event.kind == kind.name() && u32::from(event.device) == device;
        let entries = self.state.events.entries.iter().enumerate();
        entries.filter(move |(_, event)| is_meant(event))
    }

    /// The latest malloc of each address, by its place among all events: of a live block its own,
    /// if the events have it. Which line asked, only live blocks know.
    pub fn last_mallocs(&self) -> HashMap<u64, usize> {
        self.events(EventKind::Malloc).map(|(at, event)| (event.address, at)).collect()
    }

    /// All live bytes, also of blocks that the record had no room for: a share of the others only
    /// would take a part for the whole.
    pub fn live_bytes(&self) -> u64 {
        self.device.live.all.bytes.saturating_add(self.device.unrecorded.bytes)
    }

    /// The same when the request was refused, as far as the events know; and the difference, in
    /// words.
    pub fn live_at_refusal(&self, refused: &Refused) -> (u64, String) {
        let live = self.live_bytes();
        let since = match refused.freed_since {
            0 => String::new(),
            _ => format!(" ({} now)", bytes(live)),
        };
        (live.saturating_add(refused.freed_since), since)
    }

    /// The bytes of the device available to the program.
    pub fn room(&self) -> u64 {
        match self.device.limit_bytes {
            0 => self.device.total_bytes,
            limit => limit.min(self.device.total_bytes),
        }
    }

    /// Whether the program is known to train, or marks steps, as one that trains does.
    pub fn trains(&self) -> bool {
        self.now > 0 || self.has_trained()
    }

    /// Whether the program has an optimiser, or a backward has run: a server may mark steps too.
    pub fn has_trained(&self) -> bool {
        let Training { has_optimizer, backward_lines } = &self.state.training;
        *has_optimizer || !backward_lines.is_empty()
    }

    /// Whether activations are recomputed in the backward (torch.utils.checkpoint).
    pub fn recomputes(&self) -> bool {
        let is_checkpoint = |frame: &Frame| frame.file.ends_with("torch/utils/checkpoint.py");
        self.sites.iter().any(|(_, site)| site.frames.iter().any(is_checkpoint))
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

    /// Whether the program ran out of memory just now: then what has grown is what it lacked,
    /// however usual such growth is while there is room.
    pub fn is_out(&self) -> bool {
        self.refused.as_ref().is_some_and(|refused| refused.freed_since == 0)
    }

    /// The stretches of the timeline with these steps.
    pub fn stretches(&self, steps: RangeInclusive<u64>) -> impl Iterator<Item = &'a Stretch> {
        self.device.timeline.iter().filter(move |stretch| steps.contains(&stretch.step))
    }

    /// Whether about as much as this pile was live before and went, without a mark of a step. What
    /// is kept never goes; what requests under way hold does.
    pub fn came_and_went(&self, pile: &[&BlockEntry]) -> bool {
        let (live, turned) = (self.live_bytes(), Turned::of(self, pile));
        let goes = turned.bytes / 4 * 3;
        // Loading may need more than it leaves: weights in 32 bits, which are then halved. Half of
        // the weights, since a second model may be loaded long after the first.
        let weights = self.live.iter().filter(|block| is_persistent(block));
        let weights = weights.fold(0u64, |sum, block| sum.saturating_add(block.size));
        let is_loading = |one: &Stretch| one.live_low_bytes < weights / 2;
        // The stretch in which it ends is a part of it.
        let loading = match self.device.timeline.iter().position(|one| !is_loading(one)) {
            Some(end) if weights > 0 => end + 1,
            _ => 0,
        };
        let mut has_been = false;
        turned.went
            || self.device.timeline[loading..].iter().any(|one| {
                let has_gone = has_been && one.live_low_bytes.saturating_add(goes) <= live;
                has_been |= turned.may_have_been(one, live);
                has_gone
            })
    }

    /// Whether about as much as this pile was live in one of the steps up to `last`.
    pub fn was_in_a_step(&self, last: u64, pile: &[&BlockEntry]) -> bool {
        let (live, turned) = (self.live_bytes(), Turned::of(self, pile));
        turned.went || self.stretches(1..=last).any(|one| turned.may_have_been(one, live))
    }

    /// The rise of live memory from step `since` to the end, by its lows between steps, or by its
    /// highs if the timeline is too coarse. `None`: unknown.
    pub fn rise(&self, since: u32) -> Option<u64> {
        let (since, now) = (u64::from(since), u64::from(self.now));
        let steps = now.saturating_sub(since);
        // Of several the lowest, as a look may have missed the moment between two steps.
        let few = steps / 8;
        let lows: Vec<_> = self.lows().filter(|low| low.step >= since).collect();
        let lowest = |from: u64, to: u64| {
            let within = lows.iter().filter(|low| (from..=to).contains(&low.step));
            within.min_by_key(|low| low.bytes)
        };
        let ends = lows.first().zip(lows.last());
        ends.and_then(|(first, last)| {
            let early = lowest(first.step, first.step + few)?;
            let late = lowest(last.step.saturating_sub(few), last.step)?;
            // As fast in all steps as in these.
            let seen = late.step.checked_sub(early.step).filter(|&seen| seen > steps / 4)?;
            Some(late.bytes.saturating_sub(early.bytes).saturating_mul(steps) / seen)
        })
        .or_else(|| self.rise_of_highs(since, now.saturating_sub(few.max(1))))
    }

    /// Whether, before step `since`, hardly less lay there between two steps than now, and went:
    /// load that comes in waves, and results that are kept for a time. What is new then is a part
    /// of the rise.
    pub fn came_back(&self, since: u32) -> bool {
        let lows: Vec<_> = self.lows().collect();
        let (before, within) = lows.split_at(lows.partition_point(|low| low.step < since.into()));
        let few = within.len().div_ceil(8);
        let lowest = |part: &[Low]| part.iter().map(|low| low.bytes).min();
        let most = before.iter().map(|low| low.bytes).max();
        let ends = lowest(&within[..few]).zip(lowest(&within[within.len() - few..]));
        most.zip(ends).is_some_and(|(most, (early, late))| {
            let is_rise = late > early;
            is_rise && most.saturating_add((late - early) / NEW) >= late
        })
    }

    /// The lows between steps, oldest first.
    ///
    /// A stretch may reach into the step after its own, and a part of a step has no such low. What
    /// follows it, up to two steps on, contains the moment between two steps for certain.
    fn lows(&self) -> impl Iterator<Item = Low> {
        let timeline = &self.device.timeline;
        let after = (1..).map(|next| timeline.get(next..).unwrap_or_default());
        timeline.iter().zip(after).filter_map(|(ended, after)| {
            let step = ended.step;
            let until = after.iter().position(|one| one.step >= step + 2)?;
            let bytes = after[..=until].iter().map(|one| one.live_low_bytes).min()?;
            Some(Low { step, bytes })
        })
    }

    /// The same by the highs of the steps, from `since` to those from `late` on.
    fn rise_of_highs(&self, since: u64, late: u64) -> Option<u64> {
        let high = |steps| self.stretches(steps).map(|one| one.live_high_bytes).max();
        let start = self.stretches(0..=since).last()?;
        // Steps shorter than the timeline's looks: most are in the stretch that they began in,
        // whose high is that of its end. Those of a full queue would not go back to the first.
        let reached = self.device.timeline.iter().map(|one| one.step).find(|&s| s > start.step);
        let (steps, now) = (reached.unwrap_or(u64::MAX) - since, u64::from(self.now));
        if since < FIRST_STEPS && steps > now.saturating_sub(since) / 2 {
            return None;
        }
        // Of its last step it may have a part without the high.
        let before = high(start.step.saturating_sub(1)..=start.step)?;
        let whole = u64::from(self.now).saturating_sub(1);
        high(late..=whole).map(|end| end.saturating_sub(before)).or_else(|| {
            // The running step may be larger than those before. What is kept is live at the lowest
            // too, in the steps that share its stretch.
            let low = self.stretches(late..=u64::MAX).map(|one| one.live_low_bytes).min()?;
            let end = high(late..=u64::MAX)?;
            Some(end.saturating_sub(before).min(low.saturating_sub(start.live_low_bytes)))
        })
    }

    /// The sentence about missing lines, if sites are off and could be on.
    pub fn untold(&self) -> Option<String> {
        let under = match self.state.process.uses {
            Some(Uses { python: false, .. }) => return None,
            Some(Uses { torch: false, .. }) => "",
            _ => ", under python -m gruyere",
        };
        self.sites.is_empty().then(|| {
            format!(
                "No lines of the program are known; `blame:large` in GRUYERE_CONF keeps \
                 them{under}."
            )
        })
    }

    /// Advice for programs of torch's, or for those known to be without.
    pub fn of_torch(&self, torch: Advice, others: Advice) -> Advice {
        match self.state.process.uses {
            Some(Uses { torch: false, .. }) => others,
            _ => torch,
        }
    }

    /// Whether free whole pages would suffice for `asked` bytes, and lie in chunks that less slack
    /// would have taken shorter.
    pub fn slack_would_help(&self, asked: u64) -> bool {
        let is_stitched = self.device.segments.iter().any(|segment| segment.stitched);
        let settings = self.state.process.configuration.split(',').rev();
        let slack = settings.filter_map(|one| one.trim().strip_prefix("slack:")).next();
        let slack = slack.and_then(|slack| slack.trim().parse::<Size>().ok());
        let is_loose = slack.is_none_or(|slack| slack.resolve(self.device.live_peak_bytes) > 0);
        is_stitched && is_loose && self.device.held.whole_pages_bytes >= asked
    }
}

/// What the events know about earlier piles like one that is live now.
///
/// The timeline cannot tell a forward's temporaries, which come and go while results pile up, from
/// an earlier pile. The events can, by the sizes.
struct Turned {
    /// Bytes of the pile.
    bytes: u64,
    /// Whether blocks of the pile's sizes have come and gone, three quarters of its bytes at once.
    went: bool,
    /// The time from which on the events have all blocks of these sizes. `u64::MAX`: they lack most
    /// of the pile, or it has small blocks, of which only the latest events are kept.
    since_nanoseconds: u64,
}

impl Turned {
    fn of(evidence: &Evidence<'_>, pile: &[&BlockEntry]) -> Self {
        let sizes = || pile.iter().map(|block| block.size);
        let bytes = sizes().fold(0, u64::saturating_add);
        let alike = sizes().min().unwrap_or(0)..=sizes().max().unwrap_or(0);
        let mut turned = Self { bytes, went: false, since_nanoseconds: u64::MAX };
        if *alike.start() <= IN_SLABS {
            return turned;
        }
        let goes = i64::try_from(bytes / 4 * 3).unwrap_or(i64::MAX);
        let events = &evidence.state.events;
        let is_large = |event: &&Event| {
            u32::from(event.device) == evidence.device.device && event.size > IN_SLABS
        };
        let large = || events.entries.iter().filter(is_large);
        let mut since = match events.earlier {
            0 => 0,
            _ => large().next().map_or(u64::MAX, |event| event.time_nanoseconds),
        };
        let mut live: HashMap<u64, u64> =
            evidence.live.iter().map(|block| (block.address, block.size)).collect();
        let mut unseen: HashSet<u64> = pile.iter().map(|block| block.address).collect();
        // Backwards, by how much more of these sizes was live than at the end. An event of a malloc
        // has the bytes asked for, that of a free the block's.
        let (mut more, mut least, mut freed) = (0i64, 0i64, HashMap::new());
        for event in large().rev() {
            let (is_free, is_malloc) = (event.is(EventKind::Free), event.is(EventKind::Malloc));
            let size = match (is_free, is_malloc) {
                (true, _) if freed.insert(event.address, event.size).is_none() => Some(event.size),
                (_, true) => {
                    unseen.remove(&event.address);
                    freed.remove(&event.address).or_else(|| live.remove(&event.address))
                }
                (true, _) => None,
                _ => continue,
            };
            // An overwritten ring has gaps.
            let Some(size) = size else {
                since = event.time_nanoseconds;
                break;
            };
            if alike.contains(&size) {
                let size = i64::try_from(size).unwrap_or(i64::MAX);
                more = more.saturating_add(if is_free { size } else { -size });
                least = least.min(more);
                turned.went |= more.saturating_sub(least) >= goes;
            }
        }
        match unseen.len() > pile.len() / 2 {
            true => turned.went = false,
            false => turned.since_nanoseconds = since,
        }
        turned
    }

    /// Whether a stretch of the timeline may have had such a pile: it is older than what the events
    /// know, and about as much was live as the `live` bytes now.
    fn may_have_been(&self, stretch: &Stretch, live: u64) -> bool {
        stretch.time_nanoseconds < self.since_nanoseconds
            && stretch.live_high_bytes >= live - live / 5
    }
}

/// The device of a state: the one `asked` for, else that of the refused request, else the one with
/// most held.
pub fn device_of(state: &State, asked: Option<u32>) -> Option<&DeviceState> {
    let refused = || state.out_of_memory.as_ref().map(|refused| refused.device);
    let last = || last_refused(&state.events.entries).map(|event| u32::from(event.device));
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
                is_sent: device.sent.contains(&at),
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

/// Bytes freed on a device since its last request.
fn freed_at_the_end(state: &State, device: &DeviceState) -> u64 {
    let events = state.events.entries.iter().rev();
    let of_device = events.filter(|event| u32::from(event.device) == device.device);
    let since = of_device.take_while(|event| !event.is_request());
    let frees = since.filter(|event| event.is(EventKind::Free));
    frees.fold(0, |sum, event| sum.saturating_add(event.size))
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
