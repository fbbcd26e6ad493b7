//! What the heap does, for Nsight Systems and other NVTX tools, in a domain of its own: `nvtx:on`.
//!
//! Growth, moves of pages, waits, trims and turns on the reclaim ladder are ranges of the thread they happen on; out of memory and steps are
//! marks. Each has bytes for payload. What is held, live and so on are counters, sampled where they change by more than a block: never on the
//! straight path of a malloc. Without a tool, or with `nvtx:off`, each place costs a load and a branch.
//!
//! The heap tells us as it tells the record: nothing here calls back.

mod injection;

use std::ffi::CString;
use std::path::PathBuf;

use once_cell::race::OnceBox;

use injection::{Handle, Look, Tool};

/// The variable by which a profiler names its library.
pub const VARIABLE: &str = "NVTX_INJECTION64_PATH";

/// What is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum What {
    /// The heap takes memory from the driver, or maps pages where they are needed.
    Growth,
    /// Pages move. Inside [`What::Growth`].
    Stitch,
    /// The host waits for the device.
    HostWait,
    /// A stream is made to wait for another.
    StreamWait,
    /// Memory goes back to the device on request.
    Trim,
    /// A low-memory phase gives memory back.
    LowMemoryTrim,
    /// A turn on the reclaim ladder.
    Reclaim,
    /// A request was answered with out of memory.
    OutOfMemory,
    /// A training step is over.
    Step,
}

/// Texts and colours (ARGB), by [`What`].
const KINDS: [(&str, u32); 9] = [
    ("grow", 0xff4c_af50),
    ("stitch", 0xff00_96c7),
    ("wait on host", 0xffff_9800),
    ("stream waits", 0xffff_c107),
    ("trim", 0xff9c_27b0),
    ("low-memory trim", 0xffba_68c8),
    ("reclaim", 0xffff_5722),
    ("out of memory", 0xfff4_4336),
    ("step", 0xff9e_9e9e),
];

/// What is counted; [`COUNTERS`] has names and meanings.
#[derive(Clone, Copy)]
#[repr(usize)]
enum Counter {
    Reserved,
    Live,
    Pending,
    LargestRequest,
}

const COUNTERS: [(&str, &str); 4] = [
    ("reserved", "bytes held from the driver"),
    ("live", "bytes in the program's hands"),
    ("pending", "freed bytes that streams may still use"),
    ("largest request", "the largest request, in bytes, that what is held could satisfy"),
];

/// Devices that have counters; those beyond have only ranges and marks.
const DEVICES: usize = crate::heap::MAX_DEVICES as usize;

/// A tool that is attached, and what it knows of us.
struct Attached {
    tool: Tool,
    texts: [Handle; KINDS.len()],
    /// By device, made when first sampled.
    counters: [OnceBox<[u64; COUNTERS.len()]>; DEVICES],
}

/// Unset: nothing is told. Set once, by [`attach`].
static ATTACHED: OnceBox<Attached> = OnceBox::new();

fn text(text: &str) -> CString {
    // No text of ours has a NUL.
    CString::new(text).unwrap_or_default()
}

/// Lets the tool attach that the environment names, if there is one. Any number of calls is fine.
pub fn attach() {
    if ATTACHED.get().is_some() {
        return;
    }
    let Some(path) = std::env::var_os(VARIABLE).map(PathBuf::from) else {
        log::info!("nvtx:on, and no tool: {VARIABLE} is not set (`nsys profile` sets it)");
        return;
    };
    match Tool::attach(&path, c"gruyere") {
        Ok(tool) => {
            let texts = KINDS.map(|(name, _)| tool.register(&text(name)));
            for (number, (name, _)) in KINDS.iter().enumerate() {
                tool.name_category(number as u32 + 1, &text(name));
            }
            if !tool.counts {
                log::info!(
                    "nvtx:on: this tool takes no counters (NVTX 3.1); ranges and marks have bytes for payload"
                );
            }
            let _ = ATTACHED.set(Box::new(Attached {
                tool,
                texts,
                counters: [const { OnceBox::new() }; DEVICES],
            }));
        }
        Err(reason) => log::warn!("nvtx:on: the tool {} cannot be used: {reason}", path.display()),
    }
}

impl Attached {
    fn look(&self, what: What) -> Look {
        let number = what as usize;
        Look { message: self.texts[number], category: number as u32 + 1, color: KINDS[number].1 }
    }
}

/// A range that is open, until it is dropped.
#[must_use]
pub struct Range(&'static Attached);

impl Drop for Range {
    fn drop(&mut self) {
        self.0.tool.pop();
    }
}

/// Begins a range of this thread.
#[inline]
pub fn range(what: What, bytes: u64) -> Option<Range> {
    let attached = ATTACHED.get()?;
    attached.tool.push(attached.look(what), bytes);
    Some(Range(attached))
}

/// Tells of an instant.
#[inline]
pub fn mark(what: What, payload: u64) {
    if let Some(attached) = ATTACHED.get() {
        attached.tool.mark(attached.look(what), payload);
    }
}

/// Tells how many bytes a device holds.
#[inline]
pub fn reserved(device: u32, bytes: u64) {
    sample(device, &[(Counter::Reserved, bytes)]);
}

/// Tells what gauges of a device stand at that are not kept up with every block: bytes live, bytes that streams may still use, and the largest
/// request that what is held could satisfy.
#[inline]
pub fn gauges(device: u32, live: u64, pending: u64, largest_request: u64) {
    sample(
        device,
        &[(Counter::Live, live), (Counter::Pending, pending), (Counter::LargestRequest, largest_request)],
    );
}

#[inline]
fn sample(device: u32, values: &[(Counter, u64)]) {
    if let Some(attached) = ATTACHED.get()
        && attached.tool.counts
    {
        attached.sample(device, values);
    }
}

impl Attached {
    fn sample(&self, device: u32, values: &[(Counter, u64)]) {
        let Some(cell) = self.counters.get(device as usize) else { return };
        // Two threads may make them at once; the tool has one set too many then, which is never sampled.
        let counters = cell.get_or_init(|| {
            Box::new(COUNTERS.map(|(name, description)| {
                self.tool.counter(&text(&format!("GPU {device} {name}")), &text(description))
            }))
        });
        for &(counter, value) in values {
            self.tool.sample(counters[counter as usize], value);
        }
    }
}
