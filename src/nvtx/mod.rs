//! The heap's work, for Nsight Systems and other NVTX tools, in a domain of its own: `nvtx:on`.
//!
//! Growth, moves of pages, waits, trims and turns on the reclaim ladder are ranges of their thread;
//! out of memory and steps are marks. Each has bytes as payload. Held, live and the like are
//! counters, sampled where they change by more than a block: never on the straight path of a
//! malloc. Without a tool, or with `nvtx:off`, each place costs a load and a branch.
//!
//! The heap calls this as it calls the record: nothing here calls back.

mod injection;

use std::ffi::CString;
use std::path::PathBuf;

use once_cell::race::OnceBox;

use crate::heap::profiler::{self, Counter, Profiler, What};
use injection::{Handle, Look, Tool};

/// The variable with the path of a profiler's library.
pub const VARIABLE: &str = "NVTX_INJECTION64_PATH";

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

/// Names and meanings, by [`Counter`].
const COUNTERS: [(&str, &str); 4] = [
    ("reserved", "bytes held from the driver"),
    ("live", "bytes of live blocks"),
    ("pending", "freed bytes that streams may still use"),
    ("largest request", "the largest request, in bytes, that held memory could satisfy"),
];

/// Devices that have counters; those beyond have only ranges and marks.
const DEVICES: usize = crate::heap::MAX_DEVICES as usize;

/// An attached tool, with its handles for us.
struct Attached {
    tool: Tool,
    texts: [Handle; KINDS.len()],
    /// By device, made when first sampled.
    counters: [OnceBox<[u64; COUNTERS.len()]>; DEVICES],
}

fn text(text: &str) -> CString {
    // No text of ours has a NUL.
    CString::new(text).unwrap_or_default()
}

/// Attaches the tool that the environment names, if there is one. Idempotent.
pub fn attach() {
    if profiler::is_attached() {
        return;
    }
    let set = std::env::var_os(VARIABLE).filter(|path| !path.is_empty());
    let Some(path) = set.map(PathBuf::from) else {
        log::info!("nvtx:on has no effect: {VARIABLE} is not set (`nsys profile` sets it)");
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
                    "nvtx:on: this tool does not support counters (NVTX 3.1); ranges and marks \
                     have bytes as payload"
                );
            }
            let counters = [const { OnceBox::new() }; DEVICES];
            // For as long as the process lives: the heap may report to it until then.
            profiler::attach(Box::leak(Box::new(Attached { tool, texts, counters })));
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

impl Profiler for Attached {
    fn begin(&self, what: What, bytes: u64) {
        self.tool.push(self.look(what), bytes);
    }

    fn end(&self) {
        self.tool.pop();
    }

    fn mark(&self, what: What, payload: u64) {
        self.tool.mark(self.look(what), payload);
    }

    fn sample(&self, device: u32, values: &[(Counter, u64)]) {
        if !self.tool.counts {
            return;
        }
        let Some(cell) = self.counters.get(device as usize) else { return };
        // Two threads may make them at once; the tool then has one set too many, which is never
        // sampled.
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
