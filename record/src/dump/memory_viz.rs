//! A state in the form of torch's memory snapshots, as `torch.cuda.memory._snapshot()` gives them:
//! what memory_viz and `torch.cuda._memory_viz` open.
#![deny(unsafe_code)]

use super::state::{Block, BlockKind, Event, Segment, State};
use crate::EventKind;
use serde::{Serialize, Serializer};
use std::collections::BTreeMap;

/// A stack frame; there are none, but for notes.
#[derive(Clone, Debug, Serialize)]
struct Frame {
    name: String,
    filename: &'static str,
    line: u32,
}

#[derive(Debug, Serialize)]
struct VizBlock {
    address: u64,
    size: u64,
    requested_size: u64,
    state: &'static str,
    frames: Vec<Frame>,
}

/// The blocks of a segment, made one at a time while they are written: there may be millions.
#[derive(Debug)]
struct Blocks<'a>(&'a Segment);

impl Serialize for Blocks<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut at = self.0.address;
        serializer.collect_seq(self.0.blocks.iter().map(|entry| {
            let told = block(at, entry);
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

/// What is known of a block, as the one frame of its stack: viewers show it where they would show
/// where it came from.
fn frames(lifetime: &str, step: Option<u32>) -> Vec<Frame> {
    let step = step.map_or(String::new(), |step| format!(", step {step}"));
    vec![Frame { name: format!("lifetime {lifetime}{step}"), filename: "gruyere", line: 0 }]
}

fn block(address: u64, block: &Block) -> VizBlock {
    let &Block(size, kind, requested_size, lifetime, _, step, _) = block;
    let (state, frames) = match kind {
        BlockKind::Free => ("inactive", Vec::new()),
        BlockKind::Live => {
            ("active_allocated", frames(&super::state::lifetime_name(lifetime), step))
        }
        BlockKind::Pending => {
            ("active_pending_free", frames(&super::state::lifetime_name(lifetime), step))
        }
    };
    VizBlock { address, size, requested_size, state, frames }
}

fn segment(device: u32, segment: &Segment) -> VizSegment<'_> {
    let sum = |kinds: &[BlockKind], bytes: fn(&Block) -> u64| {
        // Saturating, here and below: the numbers may be a record's.
        let chosen = segment.blocks.iter().filter(|block| kinds.contains(&block.1));
        chosen.map(bytes).fold(0, u64::saturating_add)
    };
    // As in the Python package: memory belongs to no stream for good. A span in which all blocks
    // are of one is told as that stream's.
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
        blocks: Blocks(segment),
    }
}

/// An event as entries of a trace; most kinds have none there.
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
        frames: frames(&event.lifetime, None),
    };
    let is = |kind: EventKind| event.kind == kind.name();
    if is(EventKind::Malloc) {
        out.push(entry("alloc", ""));
    } else if is(EventKind::Free) {
        // When the streams are past it is not among the events.
        out.extend([entry("free_requested", ""), entry("free_completed", "")]);
    } else if is(EventKind::OutOfMemory) {
        let free = state.out_of_memory.as_ref().and_then(|oom| oom.cause.free_bytes).unwrap_or(0);
        out.push(Trace { addr: None, device_free: Some(free), ..entry("oom", "") });
    }
}

impl<'a> Snapshot<'a> {
    /// The form of `state`.
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
        let mut notes = BTreeMap::new();
        let merged: u64 = state.devices.iter().map(|device| device.merged_blocks).sum();
        if merged > 0 {
            notes.insert("gruyere_merged_blocks", merged.to_string());
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
                    device.segments.iter().map(|entry| segment(device.device, entry))
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
