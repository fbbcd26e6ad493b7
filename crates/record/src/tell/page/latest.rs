//! The last moments, event by event, backwards from the live memory of the end.

use std::collections::HashMap;

use super::course::{self, Course};
use super::lines::{CLASSES, Lines, live};
use crate::EventKind;
use crate::dump::state::{DeviceState, Event, State};

/// Parts of the picture.
const PARTS: usize = 400;
/// Fewer events than this make no picture.
const LEAST_EVENTS: usize = 8;
/// Small blocks are rounded up, and events have the bytes asked for: tolerated excess.
const TOLERANCE: u64 = 32 << 20;

/// Live memory after an event: by line what is still live at the end, and what was freed before it.
#[derive(Clone, Copy)]
struct Moment {
    time: u64,
    layers: [u64; CLASSES],
    freed: u64,
}

/// The last events of a device, as far back as they are whole, and no further than the course of
/// the run. `None`: too few events.
pub fn course(state: &State, device: &DeviceState, lines: &Lines<'_>) -> Option<Course> {
    let mut moments = moments(state, device, lines);
    let begin = course::begin(device);
    moments.drain(..moments.partition_point(|moment| moment.time < begin));
    let (first, last) = (moments.first()?.time, moments.last()?.time);
    if moments.len() < LEAST_EVENTS || first >= last {
        return None;
    }
    Some(drawn(&moments, device))
}

/// The time from which on all events are known, nanoseconds since 1970.
pub fn since(state: &State, device: &DeviceState, lines: &Lines<'_>) -> Option<u64> {
    moments(state, device, lines).first().map(|moment| moment.time)
}

/// Live memory after each of the last events, oldest first. An overwritten ring has gaps, where a
/// block is freed or allocated twice, or more would be live than ever was; the moments begin there.
fn moments(state: &State, device: &DeviceState, lines: &Lines<'_>) -> Vec<Moment> {
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
        if sum(&layers, freed) > device.live_peak_bytes.saturating_add(TOLERANCE) {
            moments.pop();
            break;
        }
        if event.kind == names[1] {
            freed = freed.saturating_add(event.size);
            if freed_later.insert(event.address, event.size).is_some() {
                break;
            }
        } else if let Some(bytes) = freed_later.remove(&event.address) {
            freed = freed.saturating_sub(bytes);
        } else if let Some((line, bytes)) = blocks.remove(&event.address) {
            layers[line] = layers[line].saturating_sub(bytes);
        } else {
            break;
        }
    }
    moments.reverse();
    moments
}

fn sum(layers: &[u64], freed: u64) -> u64 {
    layers.iter().fold(freed, |sum, &bytes| sum.saturating_add(bytes))
}

/// The moments in at most [`PARTS`] parts of equally many events, each with its highest moment.
fn drawn(moments: &[Moment], device: &DeviceState) -> Course {
    let end = moments.last().map_or(0, |moment| moment.time);
    let before = |time: u64| -(end.saturating_sub(time) as f64) / 1e9;
    let sum = |moment: &Moment| sum(&moment.layers, moment.freed);
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
