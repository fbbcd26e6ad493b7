//! Memory of graphs: in use for as long as a graph may be replayed, on streams not known in
//! advance.

use crate::oracle::Oracle;
use crate::oracle::content::Use;
use crate::streams::StreamKey;

/// Captures and graphs that share memory.
#[derive(Debug, Default)]
pub(crate) struct Group {
    /// Running captures and graphs not destroyed.
    alive: u32,
    /// The last replay on each stream.
    replays: Vec<Use>,
}

impl Oracle {
    pub(crate) fn capture_began(&mut self, capture: u64, group: u64, stream: StreamKey) {
        self.captures.insert(capture, group);
        self.groups.entry(group).or_default().alive += 1;
        self.joined_capture(stream);
    }

    /// A stream joins a capture: order learned there holds in the graph only.
    pub(crate) fn joined_capture(&mut self, stream: StreamKey) {
        let clock = self.clock(stream).clone();
        self.before_capture.insert(stream, clock);
    }

    /// A capture ends on its streams; without a graph its memory becomes free.
    pub(crate) fn capture_ended(&mut self, group: u64, streams: &[StreamKey], with_graph: bool) {
        for &stream in streams {
            if let Some(mut before) = self.before_capture.remove(&stream) {
                before.raise(stream, self.clock(stream).of(stream));
                *self.clock(stream) = before;
            }
        }
        if !with_graph {
            self.graph_destroyed(group);
        }
    }

    pub(crate) fn replayed(&mut self, group: u64, stream: StreamKey) {
        let now = self.advance(stream);
        let replays = &mut self.groups.entry(group).or_default().replays;
        match replays.iter_mut().find(|replay| replay.stream == stream) {
            Some(replay) => *replay = now,
            None => replays.push(now),
        }
    }

    pub(crate) fn graph_destroyed(&mut self, group: u64) {
        if let Some(group) = self.groups.get_mut(&group) {
            group.alive = group.alive.saturating_sub(1);
        }
    }

    /// The pseudo-capture of a block outside any capture, in the memory of a group.
    pub(crate) fn beside_captures(&mut self, group: u64) -> u64 {
        // Capture ids count up from 1.
        let beside = !group;
        self.captures.insert(beside, group);
        beside
    }

    fn group_of(&self, capture: u64) -> Option<&Group> {
        if capture == 0 {
            return None;
        }
        self.groups.get(self.captures.get(&capture)?)
    }

    /// Whether a graph of the capture's group may still be replayed.
    pub(super) fn may_replay(&self, capture: u64) -> bool {
        self.group_of(capture).is_some_and(|group| group.alive > 0)
    }

    /// The last replays of the capture's group.
    pub(super) fn replays(&self, capture: u64) -> &[Use] {
        self.group_of(capture).map_or(&[], |group| &group.replays)
    }

    /// Whether two captures belong to one group.
    pub(super) fn share_memory(&self, a: u64, b: u64) -> bool {
        match (self.captures.get(&a), self.captures.get(&b)) {
            (Some(a), Some(b)) => a == b,
            _ => false,
        }
    }
}
