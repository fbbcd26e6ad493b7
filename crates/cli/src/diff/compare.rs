//! The comparison of two states.
#![deny(unsafe_code)]

use std::collections::{BTreeMap, HashMap, HashSet};

use gruyere_record::conclusion;
use gruyere_record::dump::alike::{self, Run};
use gruyere_record::dump::state::{BlockKind, Class, DeviceState, State, Sum, lifetime_name};
use gruyere_record::sites::By;
use gruyere_record::size::BinaryBytes;
use gruyere_record::stream::{NO_STREAM, StreamNumber};
use serde::Serialize;

/// Bytes (or a count) before and after.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Change {
    pub before: u64,
    pub after: u64,
}

/// A live block absent from the other state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Block {
    pub address: u64,
    pub requested_bytes: u64,
    pub lifetime: String,
    pub step: Option<u32>,
}

/// Live blocks absent from the other state.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Blocks {
    pub blocks: u64,
    pub bytes: u64,
    pub largest: Vec<Block>,
}

/// Changes by class, in the order of the classes.
type Table = Vec<(String, Change)>;

/// Changes on a device.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct DeviceChange {
    pub device: u32,
    /// Its counterpart in A: of another number if each is the only one that its process uses.
    pub before_device: u32,
    pub reserved: Change,
    pub live: Change,
    pub pending: Change,
    /// Free or surplus bytes beside blocks on their pages.
    pub partly_used: Change,
    pub blocks: Change,
    /// By line of the program (with the whole path), largest change first.
    pub lines: Table,
    /// By module; by line if no module is known.
    pub modules: Table,
    pub lifetimes: Table,
    pub sizes: Table,
    pub steps: Table,
    pub streams: Table,
    pub new: Blocks,
    pub gone: Blocks,
}

impl DeviceChange {
    /// Which devices are compared, in words.
    pub fn name(&self) -> String {
        match (self.before_device, self.device) {
            (before, after) if before == after => format!("device {after}"),
            (before, after) => format!("device {before} of A with device {after} of B"),
        }
    }

    /// The short tables, each with the name of its classes.
    pub fn tables(&self) -> [(&'static str, &Table); 3] {
        [("lifetime", &self.lifetimes), ("size", &self.sizes), ("stream", &self.streams)]
    }

    /// Changes by the step of allocation: steps with equal changes are joined, with the range of
    /// their rows.
    pub fn step_runs(&self) -> Vec<(Run, Change)> {
        let rows =
            self.steps.iter().filter_map(|(step, change)| Some((step.parse().ok()?, *change)));
        let rows: Vec<(u64, Change)> = rows.collect();
        let mut found: Vec<(Run, Change)> = Vec::new();
        for came in [false, true] {
            let is_chosen = |(_, change): &&(u64, Change)| match came {
                true => change.after > change.before,
                false => change.after < change.before,
            };
            let chosen: Vec<&(u64, Change)> = rows.iter().filter(is_chosen).collect();
            let amounts: Vec<(u64, u64)> = chosen
                .iter()
                .map(|(step, change)| (*step, change.after.abs_diff(change.before)))
                .collect();
            for run in alike::runs(&amounts) {
                let of_run =
                    chosen.iter().filter(|(step, _)| (run.first..=run.last).contains(step));
                let sum = of_run.fold(Change::default(), |sum, (_, change)| Change {
                    before: sum.before.saturating_add(change.before),
                    after: sum.after.saturating_add(change.after),
                });
                found.push((run, sum));
            }
        }
        found.sort_by_key(|(run, _)| run.first);
        found
    }
}

/// The number of the only device on which a process holds or held memory.
fn only_used(state: &State) -> Option<u32> {
    let mut used = state.devices.iter().filter(|device| device.is_used()).map(|of| of.device);
    used.next().filter(|_| used.next().is_none())
}

/// All devices of either state. Two ranks, each on a GPU of its own, are compared although the
/// numbers differ.
pub fn devices(before: &State, after: &State, largest: usize) -> Vec<DeviceChange> {
    let mut numbers: Vec<u32> =
        before.devices.iter().chain(&after.devices).map(|device| device.device).collect();
    numbers.sort_unstable();
    numbers.dedup();
    let ranks = only_used(before).zip(only_used(after)).filter(|(one, other)| one != other);
    if let Some((one, _)) = ranks {
        numbers.retain(|number| *number != one);
    }
    let nothing = DeviceState::default();
    let of = |state: &State, number: u32| {
        state.devices.iter().position(|device| device.device == number)
    };
    let pair = |number: u32| {
        let counterpart = match ranks {
            Some((one, other)) if other == number => one,
            _ => number,
        };
        let one = of(before, counterpart).map_or(&nothing, |at| &before.devices[at]);
        let other = of(after, number).map_or(&nothing, |at| &after.devices[at]);
        let mut change = device(number, one, other, largest);
        change.before_device = counterpart;
        change.lines = sites((before, one), (after, other), By::Line);
        change.modules = sites((before, one), (after, other), By::Module);
        change
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
        before_device: number,
        reserved: change(|device| device.held.reserved_bytes),
        live: change(|device| device.live.all.bytes),
        pending: change(|device| device.held.pending_bytes),
        partly_used: change(|device| {
            device.held.slab_free_bytes.saturating_add(device.held.between_bytes)
        }),
        blocks: change(|device| device.live.all.blocks),
        lines: Table::new(),
        modules: Table::new(),
        lifetimes: table(lifetimes(before), lifetimes(after)),
        sizes: classes(&before.live.sizes, &after.live.sizes, size),
        steps: classes(&by_step(before), &by_step(after), number_of),
        streams: classes(&before.live.streams, &after.live.streams, stream),
        new: beyond(&other, &one, largest),
        gone: beyond(&one, &other, largest),
    }
}

/// The live blocks by step: all steps, although the state itself lists only the largest.
fn by_step(device: &DeviceState) -> Vec<Class> {
    device.live_by_step().into_iter().map(|(class, sum)| Class { class, sum }).collect()
}

/// Live bytes by line or by module, largest change first; empty if no line is known.
fn sites(before: (&State, &DeviceState), after: (&State, &DeviceState), by: By) -> Table {
    if before.0.sites.is_empty() && after.0.sites.is_empty() {
        return Table::new();
    }
    let mut changes: BTreeMap<String, Change> = BTreeMap::new();
    for holder in conclusion::holders(before.0, before.1, by) {
        changes.entry(holder.key).or_default().before += holder.usage.bytes;
    }
    for holder in conclusion::holders(after.0, after.1, by) {
        changes.entry(holder.key).or_default().after += holder.usage.bytes;
    }
    let mut changes: Table = changes.into_iter().collect();
    changes.sort_by_key(|(_, change)| std::cmp::Reverse(change.after.abs_diff(change.before)));
    changes
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

/// Identity of a block: address, bytes, requested bytes, step.
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

#[cfg(test)]
mod tests {
    use super::*;
    use gruyere_record::SiteId;
    use gruyere_record::dump::state::{Block as Piece, Segment};
    use gruyere_record::sites::{Frame, Phase, Site, Sites};

    const MIB: u64 = 1 << 20;

    /// Live blocks as (line, step, bytes), in a program of these lines.
    fn state(lines: &[u32], blocks: &[(u32, u32, u64)]) -> State {
        let site = |&line: &u32| Site {
            frames: vec![Frame { file: "/me/train.py".into(), function: "step".into(), line }],
            module: if line > 20 { format!("layers.{line}") } else { String::new() },
            phase: Phase::Forward,
            ..Site::default()
        };
        let site_of = |line| SiteId(1 + lines.iter().position(|at| *at == line).unwrap() as u32);
        let block = |&(line, step, bytes): &(u32, u32, u64)| {
            Piece(bytes, BlockKind::Live, bytes, 0, 0, Some(step), site_of(line))
        };
        let mut device = DeviceState::default();
        let blocks = blocks.iter().map(block).collect();
        device.segments = vec![Segment { blocks, ..Segment::default() }];
        let sites = Sites::new(lines.iter().map(site));
        State { sites, devices: vec![device], ..State::default() }
    }

    #[test]
    fn what_grew_is_told_by_line_and_by_module_whatever_their_numbers_are() {
        let before = state(&[10, 30], &[(10, 0, MIB), (30, 1, 5 * MIB)]);
        let after =
            state(&[30, 12, 10], &[(10, 0, MIB), (30, 1, 2 * MIB), (12, 2, 9 * MIB), (12, 3, MIB)]);
        let [change] = &devices(&before, &after, 0)[..] else { panic!("one device") };
        let told = |table: &Table| -> Vec<(String, u64, u64)> {
            table.iter().map(|(name, to)| (name.clone(), to.before / MIB, to.after / MIB)).collect()
        };
        let line = |line: u32| format!("/me/train.py:{line} in step");
        assert_eq!(told(&change.lines), [(line(12), 0, 10), (line(30), 5, 2), (line(10), 1, 1)]);
        assert_eq!(
            told(&change.modules),
            [(line(12), 0, 10), ("layers.30".into(), 5, 2), (line(10), 1, 1)]
        );
    }

    #[test]
    fn two_ranks_with_a_gpu_each_are_compared_although_the_numbers_differ() {
        let rank = |used: &[u32], bytes| {
            let device = |number| {
                let mut device = DeviceState { device: number, ..DeviceState::default() };
                let held = if used.contains(&number) { bytes } else { 0 };
                device.held.reserved_bytes = held;
                device.reserved_peak_bytes = held;
                device
            };
            State { devices: (0..3).map(device).collect(), ..State::default() }
        };
        let told = |before: &State, after: &State| -> Vec<(String, Change)> {
            let changes = devices(before, after, 0);
            changes.iter().map(|change| (change.name(), change.reserved)).collect()
        };
        let nothing = |device: u32| (format!("device {device}"), Change::default());
        let both = Change { before: MIB, after: 2 * MIB };
        assert_eq!(
            told(&rank(&[0], MIB), &rank(&[1], 2 * MIB)),
            [("device 0 of A with device 1 of B".to_owned(), both), nothing(2)]
        );
        // Of a process with several devices, one may be missing in the other state.
        let grew = Change { before: 0, after: 2 * MIB };
        assert_eq!(
            told(&rank(&[0], MIB), &rank(&[0, 1], 2 * MIB)),
            [("device 0".to_owned(), both), ("device 1".to_owned(), grew), nothing(2)]
        );
    }

    #[test]
    fn steps_of_which_the_same_came_are_one_row() {
        let row = |step: u64, before, after| (step.to_string(), Change { before, after });
        let mut steps = vec![row(3, 40 * MIB, 0)];
        steps.extend((4..=33).map(|step| row(step, 0, 16 * MIB)));
        let change = DeviceChange { steps, ..DeviceChange::default() };
        let told: Vec<(String, Change)> =
            change.step_runs().into_iter().map(|(run, sum)| (run.steps(), sum)).collect();
        assert_eq!(
            told,
            [
                ("step 3".into(), Change { before: 40 * MIB, after: 0 }),
                ("steps 4 to 33".into(), Change { before: 0, after: 480 * MIB })
            ]
        );
    }
}
