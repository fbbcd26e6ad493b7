//! The last moments, event by event: from what is live at the end, backwards.

use std::collections::HashMap;

use super::super::state::{DeviceState, Event, State};
use super::course::Course;
use super::lines::{CLASSES, Lines, live};
use crate::EventKind;

/// Parts of the picture.
const PARTS: usize = 400;
/// Fewer events than this are no picture.
const LEAST_EVENTS: usize = 8;
/// What the sum of the events may differ from the timeline by: small blocks are rounded up, and an
/// event is noted a moment before or after its bytes are counted.
const TOLERANCE: f64 = 0.02;
const LEAST_TOLERANCE: u64 = 32 << 20;

/// Live memory after an event: by line what is live at the end too, and what was freed before it.
#[derive(Clone, Copy)]
struct Moment {
    time: u64,
    layers: [u64; CLASSES],
    freed: u64,
}

/// The last events of a device, as far back as they are whole: a ring of events that was written
/// over has gaps, and there their sum leaves what the timeline says. `None`: too few.
pub fn course(state: &State, device: &DeviceState, lines: &Lines<'_>) -> Option<Course> {
    let names = [EventKind::Malloc, EventKind::Free].map(EventKind::name);
    let of_device = |event: &&Event| {
        u32::from(event.device) == device.device && names.contains(&event.kind.as_str())
    };
    let events: Vec<&Event> = state.events.entries.iter().filter(of_device).collect();
    let mut blocks: HashMap<u64, (usize, u64)> = HashMap::new();
    let mut layers = [0u64; CLASSES];
    for (address, block) in live(device) {
        let line = lines.number(block);
        blocks.insert(address, (line, block.0));
        layers[line] = layers[line].saturating_add(block.0);
    }
    let mut freed_later: HashMap<u64, u64> = HashMap::new();
    let mut freed = 0u64;
    let mut moments: Vec<Moment> = Vec::with_capacity(events.len());
    for event in events.iter().rev() {
        moments.push(Moment { time: event.time_nanoseconds, layers, freed });
        let live: u64 = layers.iter().fold(freed, |sum, &bytes| sum.saturating_add(bytes));
        if !agrees(device, event.time_nanoseconds, live) {
            moments.pop();
            break;
        }
        if event.kind == names[1] {
            freed = freed.saturating_add(event.size);
            // Of two frees without a malloc between them, one is lost: the picture ends there.
            if freed_later.insert(event.address, event.size).is_some() {
                break;
            }
        } else if let Some(bytes) = freed_later.remove(&event.address) {
            freed = freed.saturating_sub(bytes);
        } else if let Some((line, bytes)) = blocks.remove(&event.address) {
            layers[line] = layers[line].saturating_sub(bytes);
        }
    }
    moments.reverse();
    let (first, last) = (moments.first()?.time, moments.last()?.time);
    if moments.len() < LEAST_EVENTS || first >= last {
        return None;
    }
    Some(drawn(&moments, device))
}

/// Whether so much live at that time is what the timeline says. Where that does not tell, yes.
fn agrees(device: &DeviceState, time: u64, live: u64) -> bool {
    let parts = &device.timeline;
    let part = parts.partition_point(|part| part.time_nanoseconds < time);
    // A part is told when it is over, an event when it begins: the neighbours count too.
    let near = &parts[part.saturating_sub(1)..(part + 2).min(parts.len())];
    let low = near.iter().map(|part| part.live_low_bytes).min();
    let high = near.iter().map(|part| part.live_high_bytes).max();
    let (Some(low), Some(high)) = (low, high) else { return true };
    let tolerance = ((high as f64 * TOLERANCE) as u64).max(LEAST_TOLERANCE);
    live <= high.saturating_add(tolerance) && live >= low.min(high).saturating_sub(tolerance)
}

/// The moments in at most [`PARTS`] parts of equally many events, each with its highest moment.
fn drawn(moments: &[Moment], device: &DeviceState) -> Course {
    let end = moments.last().map_or(0, |moment| moment.time);
    let before = |time: u64| -(end.saturating_sub(time) as f64) / 1e9;
    let sum = |moment: &Moment| moment.layers.iter().fold(moment.freed, |sum, &of| sum + of);
    let mut course = Course { layers: vec![Vec::new(); CLASSES], ..Course::default() };
    course.edges.push(before(moments.first().map_or(0, |moment| moment.time)));
    for part in moments.chunks(moments.len().div_ceil(PARTS).max(1)) {
        let (Some(highest), Some(last)) = (part.iter().max_by_key(|one| sum(one)), part.last())
        else {
            continue;
        };
        course.edges.push(before(last.time));
        for (layer, &bytes) in course.layers.iter_mut().zip(&highest.layers) {
            layer.push(bytes);
        }
        course.high.push(sum(highest));
        let at = device.timeline.partition_point(|part| part.time_nanoseconds < last.time);
        let stretch = device.timeline.get(at).or(device.timeline.last());
        course.steps.push(stretch.map_or(device.step, |stretch| stretch.step));
    }
    course
}
