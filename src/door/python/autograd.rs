//! The calling thread's place in autograd, as the native door's shim reports it.
//!
//! torch runs a backward on threads of its own that run no Python. But each operator of a forward
//! takes a number, counted by thread, for its node in the backward, before it allocates its output;
//! and the running node has that number, and knows the output's size. So the site of a forward's
//! request is kept under its thread, number and size, and a request of the node finds it there. The
//! size distinguishes an output from the next allocation under the same number where an operator
//! allocates nothing (in place, or a view).

use super::known::Known;
use super::word::mix;
use crate::record::sites::SiteId;
use std::ffi::{CStr, c_char, c_int};
use std::sync::OnceLock;

/// A thread's place in autograd.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct GruyereAutograd {
    /// torch's number of the thread.
    pub thread: u64,
    /// Number of the thread's next node; 0 if the thread creates none.
    pub next: u64,
    /// Kind of the node that runs on the thread, equal for all nodes of a kind; 0 if none runs.
    pub kind: u64,
    /// Of that node: the thread that created it.
    pub node_thread: u64,
    /// Of that node: its number on that thread.
    pub node: u64,
    /// Of that node: bytes of its operator's output in the forward, or of the first of several
    /// outputs; 0 if unknown.
    pub node_bytes: u64,
    /// Of that node: its NUL-terminated name, if requested.
    pub name: [c_char; 128],
}

/// Fills `origin` for the calling thread, the name only if `is_name_wanted` is not 0. Must not
/// unwind or wait.
pub type GruyereAskAutograd = extern "C" fn(origin: *mut GruyereAutograd, is_name_wanted: c_int);

/// Unset: no shim can report. Then the first `ask`, for good.
static ASK: OnceLock<GruyereAskAutograd> = OnceLock::new();

/// Sets `ask`; the first one stays.
pub(in crate::door) extern "C" fn origins(ask: GruyereAskAutograd) {
    let _ = ASK.set(ask);
}

/// The calling thread's place. `None`: no shim can report it.
#[inline]
pub(super) fn origin() -> Option<GruyereAutograd> {
    ASK.get().map(|ask| asked(*ask, false))
}

fn asked(ask: GruyereAskAutograd, is_name_wanted: bool) -> GruyereAutograd {
    let mut origin = GruyereAutograd {
        thread: 0,
        next: 0,
        kind: 0,
        node_thread: 0,
        node: 0,
        node_bytes: 0,
        name: [0; 128],
    };
    ask(&raw mut origin, c_int::from(is_name_wanted));
    origin
}

impl GruyereAutograd {
    /// The key of a request of `bytes` until its backward; `None`: it has no backward.
    pub(super) fn forward_key(&self, bytes: u64) -> Option<u64> {
        (self.kind == 0 && self.next > 0).then(|| key(self.thread, self.next - 1, bytes))
    }

    /// The key of the forward whose node runs; `None`: none runs.
    pub(super) fn backward_key(&self) -> Option<u64> {
        (self.kind != 0).then(|| key(self.node_thread, self.node, self.node_bytes))
    }
}

fn key(thread: u64, number: u64, bytes: u64) -> u64 {
    mix(thread.rotate_left(48) ^ number, bytes).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// The name of the node that runs on the calling thread.
pub(super) fn name() -> String {
    let Some(ask) = ASK.get() else { return String::new() };
    let origin = asked(*ask, true);
    let bytes = origin.name.map(|byte| byte as u8);
    CStr::from_bytes_until_nul(&bytes)
        .map_or_else(|_| String::new(), |name| name.to_string_lossy().into_owned())
}

/// The sites of the latest forwards, by their keys, as many as fit.
#[derive(Default)]
pub(super) struct Forwards(Known);

impl Forwards {
    /// Notes `site` for the operator with this key. The first request counts: a later one under the
    /// same number belongs to an operator without a number.
    pub(super) fn set(&self, key: u64, site: SiteId) {
        if self.0.get(key).is_none() {
            self.0.set(key, site);
        }
    }

    /// The site of the forward with that key. NONE: not known.
    pub(super) fn get(&self, key: u64) -> SiteId {
        self.0.get(key).unwrap_or(SiteId::NONE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: u64 = 4 << 20;

    fn origin(thread: u64, next: u64, node: Option<(u64, u64)>) -> GruyereAutograd {
        let (node_thread, number) = node.unwrap_or_default();
        let kind = u64::from(node.is_some());
        let node_bytes = if node.is_some() { BYTES } else { 0 };
        GruyereAutograd {
            thread,
            next,
            kind,
            node_thread,
            node: number,
            node_bytes,
            name: [0; 128],
        }
    }

    #[test]
    fn a_node_finds_the_forward_of_its_thread_and_number_and_no_other() {
        let forwards = Forwards::default();
        for (thread, number, site) in [(1, 7, 10), (2, 7, 20), (1, 8, 30)] {
            let at = origin(thread, number + 1, None).forward_key(BYTES).unwrap();
            forwards.set(at, SiteId(site));
            forwards.set(at, SiteId(99));
        }
        let found = |thread, number| {
            let at = origin(9, 3, Some((thread, number))).backward_key().unwrap();
            forwards.get(at)
        };
        assert_eq!([found(1, 7), found(2, 7), found(1, 8)], [10, 20, 30].map(SiteId));
        assert_eq!([found(2, 8), found(3, 7)], [SiteId::NONE; 2]);
    }

    #[test]
    fn what_is_allocated_next_in_another_size_is_not_taken_for_an_output() {
        let forwards = Forwards::default();
        let at = |bytes| origin(1, 8, None).forward_key(bytes).unwrap();
        let node = origin(9, 3, Some((1, 7))).backward_key().unwrap();
        forwards.set(at(BYTES + 1), SiteId(10));
        assert_eq!(forwards.get(node), SiteId::NONE);
        forwards.set(at(BYTES), SiteId(20));
        assert_eq!(forwards.get(node), SiteId(20));
    }

    #[test]
    fn a_thread_that_makes_no_nodes_or_runs_one_is_in_no_forward() {
        assert_eq!(origin(1, 0, None).forward_key(BYTES), None);
        assert_eq!(origin(1, 5, Some((1, 3))).forward_key(BYTES), None);
        assert_eq!(origin(1, 5, None).backward_key(), None);
    }
}
