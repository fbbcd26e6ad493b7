//! A state in the form of torch's memory snapshots (`torch.cuda.memory._snapshot()`), as memory_viz
//! and `torch.cuda._memory_viz` open them.
#![deny(unsafe_code)]

use super::pickle::Again;
use super::state::{Block, BlockKind, Event, Segment, State};
use crate::EventKind;
use crate::sites::{self, Phase, Place, SiteId, Sites};
use serde::ser::SerializeSeq;
use serde::{Serialize, Serializer};
use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;

/// A stack frame, or a note in its place.
#[derive(Clone, Debug, Serialize)]
struct Frame {
    name: String,
    filename: String,
    line: u32,
}

/// The stacks of all sites: each frame once, and per site the numbers of its frames.
#[derive(Debug, Default)]
struct Stacks {
    frames: Vec<Frame>,
    of_site: Vec<Vec<u32>>,
    sites: Sites,
}

impl Stacks {
    fn of(sites: &Sites) -> Self {
        let mut stacks = Self { sites: sites.clone(), ..Self::default() };
        let mut known: HashMap<&sites::Frame, u32> = HashMap::new();
        for (_, site) in sites.iter() {
            // A backward's stack says nothing without its forward's.
            let forward = sites.get(site.forward).into_iter().flat_map(|site| &site.frames);
            let number = |frame| {
                *known.entry(frame).or_insert_with(|| {
                    let sites::Frame { file, function, line } = frame.clone();
                    stacks.frames.push(Frame { name: function, filename: file, line });
                    stacks.frames.len() as u32 - 1
                })
            };
            let numbers = site.frames.iter().chain(forward).map(number).collect();
            stacks.of_site.push(numbers);
        }
        stacks
    }

    fn of_block(&self, lifetime: u8, step: Option<u32>, id: SiteId) -> Stack<'_> {
        let place = id.0.checked_sub(1).map(|place| place as usize);
        let numbers =
            place.and_then(|place| self.of_site.get(place)).map_or(&[][..], Vec::as_slice);
        let module = match self.sites.module(id) {
            Place::Module(path) => format!(", module {path}"),
            _ => String::new(),
        };
        let said = match (lifetime, self.sites.phase(id)) {
            (0, phase) if phase != Phase::Unknown => phase.name().to_owned(),
            _ => format!("lifetime {}", super::state::lifetime_name(lifetime)),
        };
        Stack { note: note(format!("{said}{module}"), step), numbers, frames: &self.frames }
    }
}

/// A block's origin; none for a free one.
#[derive(Debug, Serialize)]
#[serde(untagged)]
enum Frames<'a> {
    None([Frame; 0]),
    Of(Stack<'a>),
}

/// A block's stack, innermost frame first: a note about the block, then its origin.
#[derive(Debug)]
struct Stack<'a> {
    note: Frame,
    numbers: &'a [u32],
    frames: &'a [Frame],
}

impl Serialize for Stack<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut list = serializer.serialize_seq(Some(self.numbers.len() + 1))?;
        list.serialize_element(&self.note)?;
        for &number in self.numbers {
            // A million blocks share a few hundred frames.
            list.serialize_element(&Again(number, &self.frames[number as usize]))?;
        }
        list.end()
    }
}

#[derive(Debug, Serialize)]
struct VizBlock<'a> {
    address: u64,
    size: u64,
    requested_size: u64,
    state: &'static str,
    frames: Frames<'a>,
}

/// The blocks of a segment, made one at a time while written: there may be millions.
#[derive(Debug)]
struct Blocks<'a>(&'a Segment, Rc<Stacks>);

impl Serialize for Blocks<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut at = self.0.address;
        serializer.collect_seq(self.0.blocks.iter().map(|entry| {
            let told = block(at, entry, &self.1);
            at = at.saturating_add(entry.0);
            told
        }))
    }
}

#[derive(Debug, Serialize)]
struct VizSegment<'a> {
    device: u32,
    address: u64,
    total_size: u64,
    allocated_size: u64,
    active_size: u64,
    requested_size: u64,
    stream: u64,
    segment_type: &'static str,
    segment_pool_id: (u64, u64),
    is_expandable: bool,
    frames: Vec<Frame>,
    blocks: Blocks<'a>,
}

#[derive(Debug, Serialize)]
struct Trace {
    action: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    addr: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    device_free: Option<u64>,
    size: u64,
    stream: u64,
    time_us: u64,
    compile_context: &'static str,
    user_metadata: String,
    frames: Vec<Frame>,
}

#[derive(Debug, Serialize)]
struct Settings {
    #[serde(rename = "PYTORCH_CUDA_ALLOC_CONF")]
    torch: String,
    max_split_size: i64,
    garbage_collection_threshold: f64,
    expandable_segments: bool,
    #[serde(rename = "GRUYERE_CONF")]
    ours: String,
    gruyere: String,
    #[serde(flatten)]
    notes: BTreeMap<&'static str, String>,
}

/// torch's dictionary.
#[derive(Debug, Serialize)]
pub struct Snapshot<'a> {
    segments: Vec<VizSegment<'a>>,
    device_traces: Vec<Vec<Trace>>,
    allocator_settings: Settings,
    external_annotations: Vec<()>,
}

/// A note about a block, as a frame: viewers show it beside the origin.
fn note(said: String, step: Option<u32>) -> Frame {
    let step = step.map_or(String::new(), |step| format!(", step {step}"));
    Frame { name: format!("{said}{step}"), filename: "gruyere".to_owned(), line: 0 }
}

fn block<'a>(address: u64, block: &Block, stacks: &'a Stacks) -> VizBlock<'a> {
    let &Block(size, kind, requested_size, lifetime, _, step, site) = block;
    let state = match kind {
        BlockKind::Free => "inactive",
        BlockKind::Live => "active_allocated",
        BlockKind::Pending => "active_pending_free",
    };
    let frames = match kind {
        BlockKind::Free => Frames::None([]),
        _ => Frames::Of(stacks.of_block(lifetime, step, site)),
    };
    VizBlock { address, size, requested_size, state, frames }
}

fn segment<'a>(device: u32, segment: &'a Segment, stacks: &Rc<Stacks>) -> VizSegment<'a> {
    let sum = |kinds: &[BlockKind], bytes: fn(&Block) -> u64| {
        // Saturating, here and below: the numbers may come from a record.
        let chosen = segment.blocks.iter().filter(|block| kinds.contains(&block.1));
        chosen.map(bytes).fold(0, u64::saturating_add)
    };
    // As in the Python package: no stream owns memory for good. A span whose blocks are all of one
    // stream is shown as that stream's.
    let mut streams: Vec<u64> = segment
        .blocks
        .iter()
        .filter(|block| block.1 != BlockKind::Free)
        .map(|block| block.4)
        .collect();
    streams.dedup();
    VizSegment {
        device,
        address: segment.address,
        total_size: segment.bytes,
        allocated_size: sum(&[BlockKind::Live], |block| block.0),
        active_size: sum(&[BlockKind::Live, BlockKind::Pending], |block| block.0),
        requested_size: sum(&[BlockKind::Live, BlockKind::Pending], |block| block.2),
        stream: if streams.len() == 1 && !segment.stitched { streams[0] } else { 0 },
        segment_type: if segment.small { "small" } else { "large" },
        segment_pool_id: segment.pool_id,
        is_expandable: segment.stitched,
        frames: Vec::new(),
        blocks: Blocks(segment, Rc::clone(stacks)),
    }
}

/// An event as entries of a trace; most kinds give none.
fn traces(event: &Event, state: &State, out: &mut Vec<Trace>) {
    let entry = |action, user_metadata: &str| Trace {
        action,
        addr: Some(event.address),
        device_free: None,
        size: event.size.checked_next_multiple_of(512).unwrap_or(u64::MAX),
        stream: event.stream.into(),
        time_us: event.time_nanoseconds / 1000,
        compile_context: "N/A",
        user_metadata: user_metadata.to_owned(),
        frames: vec![note(format!("lifetime {}", event.lifetime), None)],
    };
    let is = |kind: EventKind| event.kind == kind.name();
    if is(EventKind::Malloc) {
        out.push(entry("alloc", ""));
    } else if is(EventKind::Free) {
        // The events do not show when the streams were done with the block.
        out.extend([entry("free_requested", ""), entry("free_completed", "")]);
    } else if is(EventKind::OutOfMemory) {
        let free = state.out_of_memory.as_ref().and_then(|oom| oom.cause.free_bytes).unwrap_or(0);
        out.push(Trace { addr: None, device_free: Some(free), ..entry("oom", "") });
    }
}

impl<'a> Snapshot<'a> {
    /// Wraps `state`.
    pub fn of(state: &'a State) -> Snapshot<'a> {
        // torch's lists are by the device's number.
        let devices =
            state.devices.iter().map(|device| device.device as usize + 1).max().unwrap_or(0);
        let mut device_traces: Vec<Vec<Trace>> = (0..devices).map(|_| Vec::new()).collect();
        for event in &state.events.entries {
            if let Some(trace) = device_traces.get_mut(event.device as usize) {
                traces(event, state, trace);
            }
        }
        let stacks = Rc::new(Stacks::of(&state.sites));
        let mut notes = BTreeMap::new();
        let merged: u64 = state.devices.iter().map(|device| device.merged_blocks).sum();
        if merged > 0 {
            notes.insert("gruyere_merged_blocks", merged.to_string());
        }
        let unrecorded = state.all_unrecorded().blocks;
        if unrecorded > 0 {
            notes.insert("gruyere_unrecorded_blocks", unrecorded.to_string());
        }
        if state.events.earlier > 0 {
            notes.insert("gruyere_earlier_events", state.events.earlier.to_string());
        }
        if let Some(oom) = &state.out_of_memory {
            notes.insert("gruyere_out_of_memory", oom.message.clone());
        }
        Snapshot {
            segments: state
                .devices
                .iter()
                .flat_map(|device| {
                    device.segments.iter().map(|entry| segment(device.device, entry, &stacks))
                })
                .collect(),
            device_traces,
            allocator_settings: Settings {
                torch: String::new(),
                max_split_size: -1,
                garbage_collection_threshold: 0.0,
                expandable_segments: false,
                ours: state.process.configuration.clone(),
                gruyere: state.gruyere.clone(),
                notes,
            },
            external_annotations: Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_has_the_frames_of_its_site_and_a_backward_those_of_its_forward_too() {
        let frame = |function: &str, line| sites::Frame {
            file: "/home/me/train.py".into(),
            function: function.into(),
            line,
        };
        let forward = sites::Site {
            frames: vec![frame("forward", 9), frame("step", 42)],
            module: "mlp".into(),
            phase: Phase::Forward,
            ..sites::Site::default()
        };
        let backward = sites::Site {
            frames: vec![frame("step", 42)],
            phase: Phase::Backward,
            forward: SiteId(1),
            ..sites::Site::default()
        };
        let stacks = Stacks::of(&Sites::new([forward, backward]));
        let told = |lifetime, site| {
            let Stack { note, numbers, frames } = stacks.of_block(lifetime, Some(7), SiteId(site));
            let lines: Vec<u32> = numbers.iter().map(|&n| frames[n as usize].line).collect();
            (note.name, lines)
        };
        assert_eq!(told(0, 1), ("forward, module mlp, step 7".into(), vec![9, 42]));
        assert_eq!(told(0, 2), ("backward, module mlp, step 7".into(), vec![42, 9, 42]));
        assert_eq!(told(3, 1), ("lifetime persistent, module mlp, step 7".into(), vec![9, 42]));
        for unknown in [0, 3, u32::MAX] {
            assert_eq!(told(0, unknown), ("lifetime auto, step 7".into(), vec![]));
        }
        assert_eq!(stacks.frames.len(), 2, "each frame once");
    }
}
