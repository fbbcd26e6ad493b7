//! Traces: a program's requests to its allocator, in order.
//!
//! `traces/FORMAT.md` describes the text format. [`Trace::read`] checks every line and converts the
//! text to a vector of small operations in which allocations, events and streams are dense indices:
//! a replay touches no hash table of identifiers and no text.

#![deny(unsafe_code)]
#![deny(clippy::unwrap_used)]

mod damage;
mod jitter;
mod join;
mod reader;

pub use damage::{Damage, TraceError};
pub use join::drawn_order;

use std::path::{Path, PathBuf};

/// Unit of accounted sizes, bytes: the rounding of every allocator here.
pub const ALIGNMENT: u64 = 512;

/// `bytes` as it counts towards live memory.
pub const fn rounded(bytes: u64) -> u64 {
    bytes.div_ceil(ALIGNMENT) * ALIGNMENT
}

/// One operation of a trace. Blocks, events and streams are indices from 0 without gaps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Allocate `size` bytes (as requested, may be 0) for `stream`.
    Alloc {
        /// Requested bytes.
        size: u64,
        /// The block; every `Alloc` has the next one.
        block: u32,
        /// Index into [`Trace::streams`].
        stream: u16,
        /// The device.
        device: u8,
    },
    /// Free `block`, on the stream of its allocation.
    Free {
        /// The block.
        block: u32,
    },
    /// `stream` uses `block` too.
    RecordStream {
        /// The block.
        block: u32,
        /// Index into [`Trace::streams`].
        stream: u16,
    },
    /// `count` kernels were launched on `stream`.
    Kernels {
        /// Their number.
        count: u32,
        /// Index into [`Trace::streams`].
        stream: u16,
    },
    /// The program recorded `event` on `stream`.
    EventRecord {
        /// The event.
        event: u32,
        /// Index into [`Trace::streams`].
        stream: u16,
    },
    /// The program made `stream` wait for `event`.
    StreamWait {
        /// The event.
        event: u32,
        /// Index into [`Trace::streams`].
        stream: u16,
    },
    /// The program's host waited for `event`.
    HostWaitEvent {
        /// The event.
        event: u32,
    },
    /// The program's host waited for `stream`.
    HostWaitStream {
        /// Index into [`Trace::streams`].
        stream: u16,
    },
    /// The program's host waited for the device.
    HostWaitDevice,
    /// A training step or a request ended.
    Step,
    /// Another mark; its text is [`Trace::marks`]`[mark]`.
    Mark {
        /// Index into [`Trace::marks`].
        mark: u32,
    },
}

/// A checked trace: identifiers resolve, nothing is freed twice, and every awaited event was
/// recorded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trace {
    /// Name for reports: the file's name without its extensions.
    pub name: String,
    /// The operations in order.
    pub ops: Vec<Op>,
    /// Stream numbers in the file; index 0 is always the default stream 0.
    pub streams: Vec<u64>,
    /// Marks other than `step`.
    pub marks: Vec<String>,
    /// The blocks' identifiers in the file.
    pub ids: Vec<u64>,
    /// Number of the program's events.
    pub events: u32,
    /// Number of devices: the highest in the trace plus one.
    pub devices: u8,
    /// Allocations and frees together.
    pub operations: u64,
    /// Highest sum of live blocks, each rounded up to [`ALIGNMENT`]; over all devices. Bytes.
    pub peak_live: u64,
}

/// The mark at the end of a trace whose last piece is cut.
const CUT: &str = "cut short: its writer was killed while it wrote";

impl Trace {
    /// Number of allocations, and so of blocks.
    pub fn blocks(&self) -> usize {
        self.ids.len()
    }

    /// Number of ranks in the traced process's job, from a mark `ranks N`; 1 without a mark.
    pub fn ranks(&self) -> u32 {
        let said = self.marks.iter().find_map(|mark| mark.strip_prefix("ranks ")?.parse().ok());
        said.unwrap_or(1)
    }

    /// Whether the end is missing: the last of its compressed pieces is cut.
    pub fn is_cut(&self) -> bool {
        self.marks.last().is_some_and(|mark| mark == CUT)
    }

    /// Reads the trace at `path`, zstd-compressed or plain (detected by content).
    ///
    /// # Errors
    /// [`TraceError`] if the file is unreadable or invalid; it names the file, the line, the fault
    /// and a remedy.
    pub fn open(path: &Path) -> Result<Self, TraceError> {
        let name = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        let name = name.trim_end_matches(".zst").trim_end_matches(".trace").to_owned();
        let file = std::fs::File::open(path)
            .map_err(|e| TraceError::new(0, Damage::Unreadable(e.to_string())).in_file(path))?;
        Self::read(&name, file).map_err(|e| e.in_file(path))
    }

    /// Paths of the compressed traces of a folder (`*.trace.zst`), by name; may be empty.
    ///
    /// # Errors
    /// If the folder cannot be read.
    pub fn files_in(folder: &Path) -> Result<Vec<PathBuf>, TraceError> {
        let unreadable = |e: std::io::Error| {
            TraceError::new(0, Damage::Unreadable(e.to_string())).in_file(folder)
        };
        let entries = std::fs::read_dir(folder).map_err(unreadable)?;
        let mut paths: Vec<_> = entries
            .map(|entry| entry.map(|entry| entry.path()).map_err(unreadable))
            .collect::<Result<_, _>>()?;
        paths.retain(|path| path.to_string_lossy().ends_with(".trace.zst"));
        paths.sort();
        Ok(paths)
    }

    /// Reads the compressed traces of a folder, by name; may be empty.
    ///
    /// # Errors
    /// If the folder or one of its traces cannot be read: as for [`Trace::open`].
    pub fn open_all(folder: &Path) -> Result<Vec<Self>, TraceError> {
        Self::files_in(folder)?.iter().map(|path| Self::open(path)).collect()
    }

    /// Reads a trace from `input`, zstd-compressed or plain.
    ///
    /// # Errors
    /// [`TraceError`], as for [`Trace::open`].
    pub fn read(name: &str, input: impl std::io::Read) -> Result<Self, TraceError> {
        reader::read(name, input)
    }

    /// Highest sum of live blocks on one device, each rounded up to [`ALIGNMENT`]: the least memory
    /// of a device. Equals [`Trace::peak_live`] for one device.
    #[must_use]
    pub fn peak_live_of_a_device(&self) -> u64 {
        if self.devices <= 1 {
            return self.peak_live;
        }
        let (mut live, mut peak) = (vec![0; self.devices.into()], 0);
        let mut blocks = vec![(0, 0); self.blocks()];
        for op in &self.ops {
            match *op {
                Op::Alloc { size, block, device, .. } => {
                    blocks[block as usize] = (rounded(size), usize::from(device));
                    live[usize::from(device)] += rounded(size);
                    peak = peak.max(live[usize::from(device)]);
                }
                Op::Free { block } => {
                    let (size, device) = blocks[block as usize];
                    live[device] -= size;
                }
                _ => {}
            }
        }
        peak
    }

    /// The trace without the program's kernels, events, waits and marks: only the requests to the
    /// allocator.
    #[must_use]
    pub fn allocator_calls_only(&self) -> Self {
        let asked = |op: &&Op| {
            matches!(op, Op::Alloc { .. } | Op::Free { .. } | Op::RecordStream { .. } | Op::Step)
        };
        Self { ops: self.ops.iter().filter(asked).copied().collect(), ..self.clone() }
    }

    /// The trace of the program if it marked no steps, as a server does.
    #[must_use]
    pub fn without_steps(&self) -> Self {
        let ops = self.ops.iter().filter(|op| !matches!(op, Op::Step)).copied();
        Self { ops: ops.collect(), ..self.clone() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_operation_takes_sixteen_bytes() {
        assert_eq!(std::mem::size_of::<Op>(), 16);
    }

    #[test]
    fn a_device_must_have_what_was_live_on_the_fullest() {
        let read = |text: &str| Trace::read("devices", text.as_bytes()).expect("a trace");
        let two = read("a 1 1024 0 0\na 2 4096 1 0\nf 1\na 3 2048 0 0\nf 2\na 4 1024 1 0\n");
        assert_eq!((two.peak_live, two.peak_live_of_a_device()), (6144, 4096));
        let one = read("a 1 1024 0 0\na 2 4096 0 7\nf 1\n");
        assert_eq!((one.peak_live, one.peak_live_of_a_device()), (5120, 5120));
    }

    #[test]
    fn rounding_goes_up_to_the_alignment_and_keeps_zero() {
        assert_eq!([rounded(0), rounded(1), rounded(512), rounded(513)], [0, 512, 512, 1024]);
    }
}
