//! Causes found by the use of bytes, without a look for growth.

use std::collections::{BTreeMap, HashSet};

use super::callers::caller;
use super::evidence::{Evidence, Refused};
use super::words::{bytes, of};
use super::{Advice, Cause, Finding, full};
use crate::sites::{By, Frame, Phase, SiteId, usage};
use crate::stream::StreamNumber;
use crate::{BlockEntry, DeviceGauge, EventKind};

/// Share of held memory (or of the device) that makes a cause: one part in so many.
const CAUSE: u64 = 4;
/// From this number on, capture pools are many.
const MANY_POOLS: usize = 8;

/// All findings. `is_steady`: nothing grows.
pub fn find(evidence: &Evidence<'_>, is_steady: bool) -> Vec<Finding> {
    let (pieces, refused) = (pieces(evidence), evidence.refused.as_ref());
    let split = refused.and_then(|one| split_chunks(evidence, one));
    let is_told = |refused: &&Refused| {
        split.is_some() || pieces.is_some() && fits_but_for_pieces(evidence, refused)
    };
    let large_request =
        refused.filter(|one| !is_told(one)).and_then(|one| large_request(evidence, one));
    // Its line has mostly made the large block too.
    let large_block = large_block(evidence).filter(|_| large_request.is_none());
    // A request larger than the ceiling is told with it.
    let is_ceiling_told =
        large_request.as_ref().is_some_and(|finding| finding.bytes > evidence.room());
    let findings = [
        refused.and_then(|one| others(evidence, one)),
        large_request,
        refused.filter(|_| !is_ceiling_told).and_then(|one| ceiling(evidence, one)),
        cuda_graphs(evidence),
        streams(evidence),
        pieces,
        split,
        large_block,
        large_once(evidence).filter(|_| is_steady),
    ];
    findings.into_iter().flatten().collect()
}

fn large_request(evidence: &Evidence<'_>, refused: &Refused) -> Option<Finding> {
    let (asked, room) = (refused.asked, evidence.room());
    let (live, now) = evidence.live_at_refusal(refused);
    // Beside more memory than that, it is one request of many.
    if asked < room / CAUSE || asked / 2 < live / 3 {
        return None;
    }
    let place = evidence.names.place(evidence.sites, refused.site);
    let who = place.map_or("One request asks".to_owned(), |place| format!("{place} asks"));
    let live = bytes(live);
    // The device has it: the program has set less.
    let is_of_ceiling = asked > room && has_room_beyond(evidence, refused);
    let says = match (asked > room, bytes(asked) == bytes(room)) {
        (true, true) => {
            let it = if is_of_ceiling { "the ceiling" } else { "it may have" };
            format!("{who} for {} at once: {} more than {it}", bytes(asked), bytes(asked - room))
        }
        (true, false) if is_of_ceiling => {
            let (asked, room, set) = (bytes(asked), bytes(room), set_by(evidence, refused));
            format!("{who} for {asked} at once: more than the ceiling of {room}{set}")
        }
        (true, false) => format!(
            "{who} for {} at once: more than the {} that it may have",
            bytes(asked),
            bytes(room)
        ),
        (false, _) => {
            format!("{who} for {} at once, with {live}{now} live of {}", bytes(asked), bytes(room))
        }
    };
    let advice = match is_of_ceiling {
        true => raise_or_less(evidence),
        false => advice_on(evidence, refused.site, false),
    };
    Some(Finding { cause: Cause::LargeRequest, bytes: asked, says, advice, ..Finding::default() })
}

/// Whether the device has room for the request, and the ceiling is less than the device.
fn has_room_beyond(evidence: &Evidence<'_>, refused: &Refused) -> bool {
    let has_room = refused.free.is_some_and(|free| free >= refused.asked);
    evidence.room() < evidence.device.total_bytes && has_room
}

/// The line that set the ceiling, behind a sentence.
fn set_by(evidence: &Evidence<'_>, refused: &Refused) -> String {
    let place = evidence.names.place(evidence.sites, refused.limit_site);
    place.map_or(String::new(), |place| format!(": {place} has set it"))
}

/// The remedy for a request beyond the ceiling. The same ceiling is set in several ways.
fn raise_or_less(evidence: &Evidence<'_>) -> Advice {
    evidence.of_torch(
        &["To do: raise `limit` (GRUYERE_CONF, gruyere.enable) or \
           torch.cuda.set_per_process_memory_fraction, or look at the shape of that one tensor."],
        &["To do: raise `limit` in GRUYERE_CONF, or make that one request smaller."],
    )
}

/// Whether blocks of a program that calls modules were there before all that its forwards have
/// live, as a dataset is.
pub fn is_before_forwards(evidence: &Evidence<'_>, blocks: &[&BlockEntry]) -> bool {
    let last = evidence.last_mallocs();
    let is_forward = |block: &&BlockEntry| {
        evidence.sites.get(block.site).is_some_and(|site| site.phase == Phase::Forward)
    };
    let forwards = evidence.live.iter().filter(is_forward);
    let first = forwards.filter_map(|block| last.get(&block.address)).min();
    // What the events do not have is older.
    let is_before = |block: &&BlockEntry| last.get(&block.address) < first;
    first.is_some() && blocks.iter().all(is_before)
}

/// The remedy for one large tensor of this site. `is_early`: it was there before the first
/// forward.
fn advice_on(evidence: &Evidence<'_>, site: SiteId, is_early: bool) -> Advice {
    let Some(site) = evidence.sites.get(site) else {
        return evidence.of_torch(LARGE, LARGE_BLOCK);
    };
    let is_gathered = |frame: &Frame| frame.file.ends_with("transformers/trainer_pt_utils.py");
    let is_outside = site.phase == Phase::Unknown && site.module.is_empty();
    match site.frames.iter().any(is_gathered) {
        true => GATHERED,
        false if is_outside && (is_early || !evidence.trains()) => DATA,
        false => LARGE,
    }
}

const LARGE: &[&str] = &[
    "To do: look at the shape of that one tensor: a smaller batch or shorter inputs there, or work \
     on it in pieces (chunks, attention that keeps no matrix of scores, logits of the last \
     position only).",
];

const LARGE_BLOCK: Advice =
    &["To do: look at the size of that one request: make it smaller, or work on it in parts."];

const LARGE_STEP: Advice = &[
    "To do: if that was too much, give such a step less (batch, length), since the others needed \
     less, or work on it in parts.",
];
const LARGE_BLOCKS: Advice = &["To do: if that was too much, give such a step less work."];

const DATA: &[&str] = &[
    "To do: if that is a dataset, leave it on the host, or in fewer bits, and move one batch at a \
     time to the device; else look at its shape, or work on it in pieces.",
];
const GATHERED: &[&str] = &[
    "To do: that is all predictions of the evaluation, whatever its batch: eval_accumulation_steps \
     moves them to the host as they come, preprocess_logits_for_metrics keeps less of each.",
];

/// One block of the running step, large beside all else.
fn large_block(evidence: &Evidence<'_>) -> Option<Finding> {
    let largest = evidence.live.iter().max_by_key(|block| block.size)?;
    evidence.refused.as_ref()?;
    let is_much = largest.size >= evidence.room() / CAUSE;
    if largest.step != evidence.now || !is_much || largest.size < evidence.live_bytes() / 2 {
        return None;
    }
    let place = evidence.names.place(evidence.sites, largest.site);
    let who = place.map_or("One block".to_owned(), |place| format!("{place}: one block"));
    let share = of(largest.size, evidence.live_bytes());
    Some(Finding {
        cause: Cause::LargeRequest,
        bytes: largest.size,
        says: match evidence.now {
            0 => format!("{who} is large, {share}"),
            step => format!("{who} of step {step} is large, {share}"),
        },
        advice: advice_on(evidence, largest.site, is_before_forwards(evidence, &[largest])),
        names: largest.site,
        ..Finding::default()
    })
}

/// One step's peak, far above all others, and past.
fn large_once(evidence: &Evidence<'_>) -> Option<Finding> {
    if evidence.refused.is_some() {
        return None;
    }
    let highs = evidence.device.peaks_by_step();
    let (&step, &peak) = highs.iter().max_by_key(|&(_, high)| high)?;
    let mut others: Vec<u64> = highs.values().copied().collect();
    others.sort_unstable();
    let median = others[others.len() / 2];
    let second = others.len().checked_sub(2).map_or(0, |at| others[at]);
    let is_alone = others.len() >= 4 && peak / 2 >= median && second < peak - peak / 5;
    if median == 0 || !is_alone || step >= u64::from(evidence.now) {
        return None;
    }
    let sizes = evidence.events(EventKind::Malloc).map(|(_, event)| event.size);
    let (block, advice) = match sizes.max().filter(|&size| size >= (peak - median) / 2) {
        Some(size) => (format!("; one block of {} came and went", bytes(size)), LARGE),
        None => (String::new(), evidence.of_torch(LARGE_STEP, LARGE_BLOCKS)),
    };
    Some(Finding {
        cause: Cause::LargeRequest,
        bytes: peak - median,
        says: format!(
            "Step {step} alone had {} live at its peak, other steps {}{block}",
            bytes(peak),
            bytes(median)
        ),
        advice,
        ..Finding::default()
    })
}

fn others(evidence: &Evidence<'_>, refused: &Refused) -> Option<Finding> {
    let total = evidence.device.total_bytes;
    if refused.others < (total / CAUSE).max(1) {
        return None;
    }
    let about = if refused.free.is_none() { "at least " } else { "" };
    let (live, _) = evidence.live_at_refusal(refused);
    // Without them it would have fitted: then they are the cause, however large the request is.
    let would_fit = live.saturating_add(refused.asked) <= evidence.room();
    let least = if would_fit { refused.asked } else { 0 };
    Some(Finding {
        cause: Cause::Others,
        bytes: refused.others.max(least),
        says: format!(
            "Others hold {about}{} of the {} of device {}; this process holds {}",
            bytes(refused.others),
            bytes(total),
            evidence.device.device,
            bytes(evidence.device.held.reserved_bytes)
        ),
        advice: &[
            "To do: `nvidia-smi` names the processes, `gruyere ps` those that use Gruyère; another \
             run that was not ended, a notebook, or what this process allocates outside Gruyère \
             (libraries, a pool or a context of its own, managed memory).",
        ],
        ..Finding::default()
    })
}

fn ceiling(evidence: &Evidence<'_>, refused: &Refused) -> Option<Finding> {
    let (limit, total) = (evidence.room(), evidence.device.total_bytes);
    let set = set_by(evidence, refused);
    has_room_beyond(evidence, refused).then(|| Finding {
        cause: Cause::Ceiling,
        // It was refused, but did not take the memory.
        bytes: 0,
        says: format!(
            "The ceiling of {} is reached, while the device of {} has room{set}",
            bytes(limit),
            bytes(total)
        ),
        advice: evidence.of_torch(
            &["To do: raise `limit` (GRUYERE_CONF, gruyere.enable) or \
               torch.cuda.set_per_process_memory_fraction."],
            &["To do: raise `limit` in GRUYERE_CONF."],
        ),
        ..Finding::default()
    })
}

fn cuda_graphs(evidence: &Evidence<'_>) -> Option<Finding> {
    let captured = evidence.device.segments.iter().filter(|segment| segment.holder == "captured");
    let (mut pools, mut held, mut sites) = (HashSet::new(), 0u64, Vec::new());
    for segment in captured {
        pools.insert(segment.pool_id);
        held = held.saturating_add(segment.bytes);
        sites.extend(segment.blocks.iter().filter_map(|block| evidence.sites.get(block.6)));
    }
    // One graph has its memory for its replays: too much of it, if it is the most.
    let least = evidence.device.held.reserved_bytes / if pools.len() < 2 { 2 } else { CAUSE };
    if pools.is_empty() || held < least {
        return None;
    }
    let free = evidence.device.held.captured_free_bytes;
    let graphs = match pools.len() {
        1 => "A CUDA graph has",
        2..MANY_POOLS => "CUDA graphs have",
        _ => "Many CUDA graphs have",
    };
    let own = match pools.len() {
        1 => "a pool of its own".to_owned(),
        count => format!("{count} pools of their own"),
    };
    let line = caller(&sites).filter(|frame| frame.is_own());
    let made = line.map_or(String::new(), |line| format!(", from {}", evidence.names.frame(line)));
    Some(Finding {
        cause: Cause::CudaGraphs,
        bytes: held,
        says: format!(
            "{graphs} {} of the {} held, in {own}, {} of it free{made}",
            bytes(held),
            bytes(evidence.device.held.reserved_bytes),
            bytes(free)
        ),
        advice: evidence.of_torch(
            &["To do: let graphs that are not replayed at once share a pool \
               (torch.cuda.graph(g, pool=...)), pad shapes to a few sizes, drop graphs that are \
               replayed no more."],
            &["To do: let graphs that are not replayed at once share a pool, and drop graphs that \
               are replayed no more."],
        ),
        ..Finding::default()
    })
}

fn streams(evidence: &Evidence<'_>) -> Option<Finding> {
    let (waits, held) = (evidence.device.held.pending_bytes, evidence.device.held.reserved_bytes);
    if waits == 0 || waits < held / CAUSE {
        return None;
    }
    let found = usage(&evidence.pending, evidence.sites, By::Line, evidence.now);
    let place = found.first().and_then(|most| evidence.names.place(evidence.sites, most.site));
    let made = place.map_or(String::new(), |place| format!(", most from {place}"));
    let mut by_stream: BTreeMap<u32, u64> = BTreeMap::new();
    let events = evidence.state.events.entries.iter();
    for event in events.filter(|event| event.kind == EventKind::RecordStream.name()) {
        *by_stream.entry(event.stream).or_default() += 1;
    }
    let stream = by_stream.iter().max_by_key(|&(_, count)| count);
    let stream = stream
        .map_or("streams".to_owned(), |(&stream, _)| format!("stream {}", StreamNumber(stream)));
    let ahead = evidence.device.gauges.get(DeviceGauge::HostAhead.name()).copied().unwrap_or(0);
    let ahead = match ahead / 1_000_000 {
        0 => String::new(),
        milliseconds => {
            format!("; the host was {milliseconds} ms or more ahead of the device")
        }
    };
    Some(Finding {
        cause: Cause::Streams,
        bytes: waits,
        says: format!(
            "{} of the {} held is freed and waits for {stream}{made}{ahead}",
            bytes(waits),
            bytes(held)
        ),
        advice: evidence.of_torch(
            &["To do: the host runs ahead of a stream that record_stream named: let it wait for \
               that stream now and then (stream.synchronize() every few steps), or keep fewer \
               batches under way (FSDP1: limit_all_gathers=True; FSDP2: prefetch fewer modules)."],
            &["To do: the host runs ahead of its streams: let it wait for them now and then \
               (cudaStreamSynchronize), or keep less under way."],
        ),
        ..Finding::default()
    })
}

/// The request was refused while whole free pages would have sufficed: they lie in chunks that live
/// blocks share. Small pieces beside them are the finding of [`pieces`].
fn split_chunks(evidence: &Evidence<'_>, refused: &Refused) -> Option<Finding> {
    let held = &evidence.device.held;
    let idle = held.whole_pages_bytes.saturating_sub(refused.freed_since);
    let has_room = fits_but_for_pieces(evidence, refused);
    // Beside much live memory a little would not be the cause.
    if !has_room || idle < refused.asked || idle < held.reserved_bytes / CAUSE {
        return None;
    }
    let place = evidence.names.place(evidence.sites, refused.site);
    let by = place.map_or(String::new(), |place| format!(" by {place}"));
    Some(Finding {
        cause: Cause::Pieces,
        // Whoever holds the rest, the request was refused for this alone.
        bytes: held.reserved_bytes,
        says: format!(
            "{} of the {} held is idle, in pieces: whole free pages, in chunks of memory that live \
             blocks share; no room for the {} asked for{by}",
            bytes(idle),
            bytes(held.reserved_bytes),
            bytes(refused.asked)
        ),
        advice: match evidence.slack_would_help(refused.asked) {
            true => SHORTER_CHUNKS,
            false => evidence.of_torch(COPIES, MOVED),
        },
        ..Finding::default()
    })
}

const SHORTER_CHUNKS: Advice = &[
    "To do: `slack:0` in GRUYERE_CONF takes memory in shorter chunks, whose pages move together \
     (with more driver calls as the heap grows).",
];
const COPIES: Advice =
    &["To do: after the code that drops most of them, replace those you keep by copies (x = \
     x.clone(), or one torch.cat) and drop the originals; a clone() where they are made does not \
     help. Or make the large request in parts."];
const MOVED: Advice = &[
    "To do: after most of them are freed, move those that stay together (copy them, and free the \
     originals), or make the large request in parts.",
];

/// Whether the request would fit if no free memory lay in pieces.
fn fits_but_for_pieces(evidence: &Evidence<'_>, refused: &Refused) -> bool {
    let held = &evidence.device.held;
    let free = held.between_bytes.saturating_add(held.slab_free_bytes);
    let free = free.saturating_add(held.whole_pages_bytes).saturating_add(held.unmapped_bytes);
    let used = held.reserved_bytes.saturating_sub(free).saturating_add(refused.others);
    used.saturating_add(refused.asked) <= evidence.room()
}

fn pieces(evidence: &Evidence<'_>) -> Option<Finding> {
    let held = &evidence.device.held;
    let free = held.between_bytes.saturating_add(held.slab_free_bytes);
    // In a small program, a few pages are a large share.
    if free < (held.reserved_bytes / CAUSE).max(64 << 20) {
        return None;
    }
    // The line whose blocks share most of the pieces' pages.
    let mut found = usage(&evidence.live, evidence.sites, By::Line, evidence.now);
    found.sort_by_key(|usage| std::cmp::Reverse(usage.blocks));
    let most = found.first().filter(|most| most.blocks > evidence.device.live.all.blocks / 2);
    let site = most.map_or(SiteId::NONE, |most| most.site);
    let made = evidence.callers.made(&evidence.names, evidence.sites, site);
    let made = made.map_or(String::new(), |made| format!(" (most are from {made})"));
    let refused = evidence.refused.as_ref();
    let refused = refused.filter(|refused| fits_but_for_pieces(evidence, refused));
    let largest = refused.and_then(|refused| refused.largest);
    let most = largest.map_or(String::new(), |largest| format!(" of at most {}", bytes(largest)));
    let request = refused.map_or(String::new(), |Refused { asked, site, .. }| {
        let place = evidence.names.place(evidence.sites, *site);
        let by = place.map_or(String::new(), |place| format!(" by {place}"));
        format!(": no room for the {} asked for{by}", bytes(*asked))
    });
    Some(Finding {
        cause: Cause::Pieces,
        bytes: free,
        says: format!(
            "{} of the {} held is lost: free between live blocks{made}, in pieces{most}{request}",
            bytes(free),
            bytes(held.reserved_bytes)
        ),
        names: site,
        advice: evidence.of_torch(COPIES, MOVED),
        ..Finding::default()
    })
}

/// No finding.
pub fn nothing(evidence: &Evidence<'_>) -> Finding {
    let live = evidence.live_bytes();
    let peak = bytes(evidence.device.live_peak_bytes.max(live));
    let finding = match evidence.now {
        now if now > 0 && evidence.device.unrecorded.bytes > 0 => {
            format!("Growth of a line is not known ({now} steps)")
        }
        0 => "No step is marked, so growth of a line is not known".to_owned(),
        1 => "Nothing grows (1 step)".to_owned(),
        now => format!("Nothing grows ({now} steps)"),
    };
    if let Some(refused) = &evidence.refused {
        return full::find(evidence, refused);
    }
    let refusals = evidence.device.gauges.get(DeviceGauge::OutOfMemories.name());
    let refusals = match refusals.copied().unwrap_or(0) {
        0 => String::new(),
        1 => "; once it ran out of memory, and went on".to_owned(),
        times => format!("; {times} times it ran out of memory, and went on"),
    };
    Finding {
        cause: Cause::Nothing,
        bytes: 0,
        says: format!("{finding}: {} live, {peak} at the peak{refusals}", bytes(live)),
        ..Finding::default()
    }
}
