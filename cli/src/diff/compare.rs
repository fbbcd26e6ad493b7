//! The comparison itself.
#![deny(unsafe_code)]

use std::collections::{BTreeMap, HashMap, HashSet};

use gruyere_record::dump::state::{BlockKind, Class, DeviceState, State, Sum, lifetime_name};
use gruyere_record::stream::{NO_STREAM, StreamNumber};
use indicatif::BinaryBytes;
use serde::Serialize;

/// Bytes (or a count) before and after.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Change {
    pub before: u64,
    pub after: u64,
}

/// A live block that the other state has not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Block {
    pub address: u64,
    pub requested_bytes: u64,
    pub lifetime: String,
    pub step: Option<u32>,
}

/// Live blocks that the other state has not.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Blocks {
    pub blocks: u64,
    pub bytes: u64,
    pub largest: Vec<Block>,
}

/// Changes by class, in the order of the classes.
type Table = Vec<(String, Change)>;

/// What changed on a device.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct DeviceChange {
    pub device: u32,
    pub reserved: Change,
    pub live: Change,
    pub pending: Change,
    /// Free, or over, beside blocks on their pages.
    pub partly_used: Change,
    pub blocks: Change,
    pub lifetimes: Table,
    pub sizes: Table,
    pub steps: Table,
    pub streams: Table,
    pub new: Blocks,
    pub gone: Blocks,
}

impl DeviceChange {
    /// The tables, with what their classes are.
    pub fn tables(&self) -> [(&'static str, &Table); 4] {
        [
            ("lifetime", &self.lifetimes),
            ("size", &self.sizes),
            ("step", &self.steps),
            ("stream", &self.streams),
        ]
    }
}

/// All devices of either state.
pub fn devices(before: &State, after: &State, largest: usize) -> Vec<DeviceChange> {
    let mut numbers: Vec<u32> =
        before.devices.iter().chain(&after.devices).map(|device| device.device).collect();
    numbers.sort_unstable();
    numbers.dedup();
    let nothing = DeviceState::default();
    let of = |state: &State, number: u32| {
        state.devices.iter().position(|device| device.device == number)
    };
    let pair = |number: u32| {
        let one = of(before, number).map_or(&nothing, |at| &before.devices[at]);
        let other = of(after, number).map_or(&nothing, |at| &after.devices[at]);
        device(number, one, other, largest)
    };
    numbers.into_iter().map(pair).collect()
}

fn device(number: u32, before: &DeviceState, after: &DeviceState, largest: usize) -> DeviceChange {
    let change =
        |value: fn(&DeviceState) -> u64| Change { before: value(before), after: value(after) };
    let lifetimes = |device: &DeviceState| device.live.lifetimes.clone().into_iter().collect();
    let number_of = |class: &Class| format!("{}", class.class);
    let stream =
        |class: &Class| StreamNumber(u32::try_from(class.class).unwrap_or(NO_STREAM)).to_string();
    let size = |class: &Class| format!("up to {}", BinaryBytes(class.class));
    let (one, other) = (live(before), live(after));
    DeviceChange {
        device: number,
        reserved: change(|device| device.held.reserved_bytes),
        live: change(|device| device.live.all.bytes),
        pending: change(|device| device.held.pending_bytes),
        partly_used: change(|device| {
            device.held.slab_free_bytes.saturating_add(device.held.between_bytes)
        }),
        blocks: change(|device| device.live.all.blocks),
        lifetimes: table(lifetimes(before), lifetimes(after)),
        sizes: classes(&before.live.sizes, &after.live.sizes, size),
        steps: classes(&before.live.steps, &after.live.steps, number_of),
        streams: classes(&before.live.streams, &after.live.streams, stream),
        new: beyond(&other, &one, largest),
        gone: beyond(&one, &other, largest),
    }
}

fn table(before: Vec<(String, Sum)>, after: Vec<(String, Sum)>) -> Table {
    let mut changes: BTreeMap<String, Change> = BTreeMap::new();
    for (name, sum) in before {
        changes.entry(name).or_default().before = sum.bytes;
    }
    for (name, sum) in after {
        changes.entry(name).or_default().after = sum.bytes;
    }
    changes.into_iter().collect()
}

fn classes(before: &[Class], after: &[Class], name: impl Fn(&Class) -> String) -> Table {
    let mut changes: BTreeMap<u64, (String, Change)> = BTreeMap::new();
    let mut entry = |class: &Class, set: fn(&mut Change) -> &mut u64| {
        let (_, change) =
            changes.entry(class.class).or_insert_with(|| (name(class), Change::default()));
        *set(change) = class.sum.bytes;
    };
    before.iter().for_each(|class| entry(class, |change| &mut change.before));
    after.iter().for_each(|class| entry(class, |change| &mut change.after));
    changes.into_values().collect()
}

/// What makes a block the same: address, bytes, bytes asked for, step.
type Key = (u64, u64, u64, Option<u32>);

/// The live blocks, with their lifetimes.
fn live(device: &DeviceState) -> HashMap<Key, u8> {
    let mut found = HashMap::new();
    for segment in &device.segments {
        let mut at = segment.address;
        for block in &segment.blocks {
            if block.1 == BlockKind::Live {
                found.insert((at, block.0, block.2, block.5), block.3);
            }
            at = at.saturating_add(block.0);
        }
    }
    found
}

fn beyond(these: &HashMap<Key, u8>, those: &HashMap<Key, u8>, largest: usize) -> Blocks {
    let known: HashSet<&Key> = those.keys().collect();
    let mut new: Vec<(&Key, &u8)> = these.iter().filter(|(key, _)| !known.contains(key)).collect();
    new.sort_unstable_by_key(|(key, _)| (std::cmp::Reverse(key.2), key.0));
    let block = |(key, lifetime): &(&Key, &u8)| Block {
        address: key.0,
        requested_bytes: key.2,
        lifetime: lifetime_name(**lifetime),
        step: key.3,
    };
    Blocks {
        blocks: new.len() as u64,
        bytes: new.iter().fold(0u64, |sum, (key, _)| sum.saturating_add(key.1)),
        largest: new.iter().take(largest).map(block).collect(),
    }
}
