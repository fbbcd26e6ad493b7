//! The report of an out-of-memory: its cause in bytes, and advice. [`crate::path::oom`] gathers it.

use crate::lifetime::{LIFETIMES, Lifetime};
use crate::report::rungs::Ladder;
use gruyere_record::held::{IDLE, LOST};
pub(crate) use gruyere_record::size::Bytes;
use std::fmt;

/// From this number of bytes on, a request is a mistake in its computation: no device has a
/// thousandth of it.
const ABSURD: u64 = 1 << 50;

/// The exception leaves out parts of less than one in this.
const MUCH: u64 = 20;

/// The facts of an out-of-memory. All numbers but `device` and `count` are bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// The device.
    pub device: u32,
    /// Out-of-memories on the device, this one included; 0 until it reaches the program.
    pub count: u64,
    /// Bytes requested.
    pub asked: u64,
    /// The stream of the request: its number and its handle.
    pub stream: (u32, u64),
    /// The lifetime tag of the requesting thread.
    pub lifetime: Lifetime,
    /// The requesting thread's context ([`crate::journal::set_context`]).
    pub context: u64,
    /// The training step.
    pub step: u32,
    /// Physical memory of the device.
    pub total: u64,
    /// Free memory of the device by the driver; `None`: the driver could not say.
    pub free: Option<u64>,
    /// The ceiling on memory held.
    pub limit: u64,
    /// Memory held from the driver.
    pub reserved: u64,
    /// Live blocks, each rounded up to 512 B.
    pub live: u64,
    /// The peak of live blocks.
    pub live_peak: u64,
    /// The largest request that the memory held could serve at once.
    pub largest: u64,
    /// Held: freed by the program, waiting for streams.
    pub pending: u64,
    /// Held by captures of CUDA graphs.
    pub captured: u64,
    /// Held: free slots of slabs.
    pub slab_free: u64,
    /// Held: free runs between blocks, by the lifetime of their arena.
    pub arena_free: [u64; LIFETIMES],
    /// Spans that the driver refused to take back.
    pub orphaned: u64,
    /// Whether a capture kept the allocator from asking and waiting.
    pub capturing: bool,
    /// The work of the reclaim ladder on this device so far.
    pub ladder: Ladder,
    /// Its work for this request alone; `None`: the request did not climb it (during captures, or
    /// beyond all bounds).
    pub this_time: Option<Ladder>,
    /// Held: free memory on pages shared with blocks, or beyond a block's need.
    pub partly: u64,
    /// Held by named pools.
    pub pooled: u64,
    /// The named pool of the request.
    pub pool: Option<PoolNote>,
    /// Whether free memory had to stay with the stream that freed it: `share:off`, or the loader
    /// has wired no record_stream.
    pub apart: bool,
    /// Address space that Gruyère has reserved, if the driver had no more of it, whatever memory
    /// there is; `None`: addresses were not short.
    pub addresses: Option<u64>,
    /// Whether free pages could not move although the device can map pages: another backing was
    /// chosen.
    pub immovable: bool,
    /// Whether less `slack` would take memory in shorter chunks, whose pages move by themselves.
    pub slack_is_loose: bool,
    /// Whether the process is known to be without torch: advice names none of torch's functions. A
    /// component that knows the program fills it in.
    pub no_torch: bool,
    /// The lines of the program that hold the memory or make it grow, and a remedy, in lines for
    /// people. A component that knows the program fills them in; else empty.
    pub conclusion: Vec<String>,
    /// The path of a page about it; `None`: not written.
    pub page: Option<String>,
}

/// The figures of the named pool that the request was for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolNote {
    /// Its name.
    pub name: String,
    /// Bytes that it holds.
    pub held: u64,
    /// Its live blocks, each rounded up to 512 B.
    pub live: u64,
    /// The ceiling on live blocks.
    pub limit: Option<u64>,
}

impl fmt::Display for PoolNote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "The request was for pool {:?}, which holds {}, {} of it live",
            self.name,
            Bytes(self.held),
            Bytes(self.live)
        )?;
        match self.limit {
            Some(limit) => write!(f, ", with a limit of {}.", Bytes(limit)),
            None => write!(f, "."),
        }
    }
}

impl Report {
    /// Held by others on the device: processes, contexts, libraries that allocate for themselves.
    pub fn others(&self) -> Option<u64> {
        Some(self.total.saturating_sub(self.free?).saturating_sub(self.reserved))
    }

    /// torch's first sentence, which tools search for.
    pub fn headline(&self) -> String {
        let free = self
            .free
            .map_or_else(|| "an unknown amount".to_owned(), |free| Bytes(free).to_string());
        format!(
            "CUDA out of memory. Tried to allocate {}. GPU {} has a total capacity of {} of which \
             {} is free.",
            Bytes(self.asked),
            self.device,
            Bytes(self.total),
            free
        )
    }

    /// Free: lost and idle.
    fn between(&self) -> u64 {
        self.slab_free + self.arena_free.iter().sum::<u64>()
    }

    /// Free between live blocks, on pages shared with them.
    fn lost(&self) -> u64 {
        self.partly.min(self.between())
    }

    /// Free whole pages.
    fn idle(&self) -> u64 {
        self.between() - self.lost()
    }

    /// Advice for programs of torch's, or for others.
    fn of_torch(&self, torch: &'static str, others: &'static str) -> &'static str {
        if self.no_torch { others } else { torch }
    }

    /// The way to raise the ceiling.
    fn raise(&self) -> &'static str {
        self.of_torch(
            "raise `limit` (GRUYERE_CONF, gruyere.enable) or \
             torch.cuda.set_per_process_memory_fraction",
            "raise `limit` in GRUYERE_CONF",
        )
    }

    /// [`Report::addresses`], unless no device would have had the memory either.
    fn short_addresses(&self) -> Option<u64> {
        self.addresses.filter(|_| self.asked <= self.limit)
    }

    /// The name of the request's pool, if its limit refuses the request.
    fn full_pool(&self) -> Option<&str> {
        let PoolNote { name, live, limit, .. } = self.pool.as_ref()?;
        (live.saturating_add(self.asked) > (*limit)?).then_some(name)
    }

    /// The remedy if no state of the memory could serve the request, whatever else is true.
    fn of_the_request(&self) -> Option<String> {
        let asked = self.asked;
        if let Some(name) = self.full_pool() {
            return Some(format!("Pool {name:?} is full: raise its limit, or free blocks of it."));
        }
        if asked > self.total {
            let check = match asked >= ABSURD {
                true => "check its computation (a negative size, or one that overflowed?)",
                false => self.of_torch("check its shape", "check its size"),
            };
            return Some(format!("The request alone is larger than the device: {check}."));
        }
        if asked > self.limit {
            let raise = self.raise();
            return Some(format!("The request alone is larger than the ceiling: {raise}."));
        }
        // No memory would cure it, so no advice on memory applies.
        self.short_addresses().map(|_| {
            self.of_torch(
                "Use fewer CUDA graphs with pools of their own (let them share one, or drop \
                 them), and call torch.cuda.empty_cache() between phases: both save address space.",
                "Use fewer CUDA graphs with pools of their own (let them share one, or drop \
                 them), and call gruyere_trim() between phases: both save address space.",
            )
            .to_owned()
        })
    }

    /// Whether the graphs captured before hold what was asked for.
    fn graphs_have_it(&self) -> bool {
        self.captured >= self.asked
    }

    /// Remedies that apply, in sentences.
    pub fn advice(&self) -> Vec<String> {
        if let Some(alone) = self.of_the_request() {
            return vec![alone];
        }
        let asked = self.asked;
        let mut advice = Vec::new();
        if self.limit < self.total && self.free.is_none_or(|free| free >= asked) {
            let raise = self.raise();
            advice.push(format!("The ceiling is reached while the device has room: {raise}."));
        }
        if self.others().is_some_and(|others| others > self.total / 4) {
            advice.push(
                "Others hold more than a quarter of the device: `nvidia-smi` and `gruyere ps` list \
                 the processes; this one may have allocated some of it outside Gruyère (a pool or \
                 a context of its own, managed memory)."
                    .to_owned(),
            );
        }
        if self.graphs_have_it() {
            advice.push(
                "CUDA graphs hold more memory than requested: drop those that are no longer \
                 replayed, or let them share a pool."
                    .to_owned(),
            );
        } else if self.capturing {
            advice.push(
                "A CUDA graph is being captured, so the allocator could not wait for freed memory: \
                 run the same work once before the capture."
                    .to_owned(),
            );
        }
        if self.pending >= asked {
            advice.push(
                self.of_torch(
                    "More memory than requested is freed but still used by other streams \
                     (record_stream): let the host wait for them from time to time.",
                    "More memory than requested is freed but may still be used by streams: let \
                     the host wait for them from time to time (cudaStreamSynchronize).",
                )
                .to_owned(),
            );
        }
        if self.between() >= asked {
            let why = if self.apart {
                self.of_torch(
                    "More memory than requested is free, but it stays with the stream that freed \
                     it: `share:on`, with all of torch's hooks wired (gruyere.enable() wires \
                     them), shares it.",
                    "More memory than requested is free, but it stays with the stream that freed \
                     it: `share:on` shares it (in a program that calls gruyere_malloc itself, \
                     with gruyere_announce_hooks(3)).",
                )
            } else if self.immovable {
                "More memory than requested is free, but in pieces: `backing:auto` would move free \
                 pages together."
            } else if self.slack_is_loose && self.idle() >= asked.max(self.reserved / MUCH) {
                "More memory than requested is idle, but in pieces, in chunks shared with live \
                 blocks: `slack:0` in GRUYERE_CONF takes memory in shorter chunks, whose pages \
                 move together (with more driver calls as the heap grows)."
            } else {
                self.of_torch(
                    "More memory than requested is free, but in pieces between live blocks: copy \
                     those blocks (one torch.cat, or clone() of each) to free the pages between \
                     them, or allocate in parts.",
                    "More memory than requested is free, but in pieces between live blocks: move \
                     those blocks together (copy them, and free the originals), or allocate in \
                     parts.",
                )
            };
            advice.push(why.to_owned());
        }
        if advice.is_empty() {
            advice.push(
                self.of_torch(
                    "The device is full of live blocks: a smaller batch, activation checkpointing \
                     or offloading would help.",
                    "The device is full of live blocks: free what is not needed at once, or work \
                     on less at a time.",
                )
                .to_owned(),
            );
        }
        advice
    }
}

impl Report {
    /// The remedy that holds whatever lines of the program hold the memory; `None`: it depends on
    /// them.
    fn overriding(&self) -> Option<String> {
        let is_of_capture = self.capturing && !self.graphs_have_it();
        let of_capture = || self.advice().into_iter().next().filter(|_| is_of_capture);
        // The conclusion has the line of a request that is too large by itself.
        let is_alone = self.asked > self.total.min(self.limit) && self.full_pool().is_none();
        let is_concluded = is_alone && !self.conclusion.is_empty();
        self.of_the_request().filter(|_| !is_concluded).or_else(of_capture)
    }

    /// The places of the bytes, in a sentence or two; small parts are in the dump.
    fn held(&self) -> String {
        let is_much = |bytes: u64, whole: u64| bytes > 0 && bytes >= whole / MUCH;
        let parts = [
            (self.pending, "freed but still used by other streams"),
            (self.captured, "kept for CUDA graphs"),
            (self.pooled, "held by named pools"),
            (self.lost(), LOST),
            (self.idle(), IDLE),
            (self.orphaned, "that the driver would not take back"),
        ];
        let much: Vec<_> =
            parts.into_iter().filter(|part| is_much(part.0, self.reserved)).collect();
        let is_full = !is_much(self.reserved.saturating_sub(self.live), self.reserved);
        let mut said = match self.reserved {
            0 => "Gruyère holds no memory of it".to_owned(),
            reserved if much.is_empty() && is_full => {
                format!("Gruyère holds {}, nearly all of it live", Bytes(reserved))
            }
            reserved => {
                format!("Gruyère holds {}: {} live", Bytes(reserved), Bytes(self.live))
            }
        };
        for (bytes, what) in much {
            said.push_str(&format!(", {} {what}", Bytes(bytes)));
        }
        said.push('.');
        if self.largest > 0 && is_much(self.between(), self.reserved) {
            said.push_str(&format!(" The largest free piece is {}.", Bytes(self.largest)));
        }
        if is_much(self.live_peak.saturating_sub(self.live), self.live) {
            said.push_str(&format!(" Live memory peaked at {}.", Bytes(self.live_peak)));
        }
        if let Some(others) = self.others().filter(|&others| is_much(others, self.total)) {
            said.push_str(&format!(" Others hold {}.", Bytes(others)));
        }
        said
    }
}

/// The message for the program, from the top: torch's own sentence; the conclusion, with the line
/// of the program; one piece of advice; the places of the bytes. The dump has the work of the
/// reclaim ladder.
impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.headline())?;
        // In torch's words.
        if self.limit < self.total {
            write!(f, " {} allowed.", Bytes(self.limit))?;
        }
        if let Some(pool) = &self.pool {
            write!(f, "\n{pool}")?;
        }
        if let Some(reserved) = self.short_addresses() {
            write!(
                f,
                "\nAddress space ran out, not memory: Gruyère has reserved {} of it on this \
                 device, and the driver gave no more.",
                Bytes(reserved)
            )?;
        }
        match (self.overriding(), self.conclusion.is_empty()) {
            (Some(advice), _) => write!(f, "\n{advice}")?,
            (None, true) => {
                self.advice().iter().take(1).try_for_each(|said| write!(f, "\n{said}"))?;
            }
            (None, false) => self.conclusion.iter().try_for_each(|line| write!(f, "\n{line}"))?,
        }
        write!(f, "\n{}", self.held())?;
        self.page.iter().try_for_each(|path| write!(f, "\nThe page: {path}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_message_starts_as_torchs_does() {
        let report =
            Report { asked: 20 << 20, total: 80 << 30, free: Some(1 << 30), ..Report::default() };
        let text = report.to_string();
        assert!(text.starts_with(
            "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 80.00 \
             GiB"
        ));
    }

    /// A device of 80 GiB, full of live blocks.
    fn full() -> Report {
        Report {
            asked: 1 << 30,
            total: 80 << 30,
            limit: 80 << 30,
            reserved: 79 << 30,
            live: 79 << 30,
            live_peak: 79 << 30,
            free: Some(0),
            ..Report::default()
        }
    }

    #[test]
    fn the_whole_text_of_a_full_device() {
        assert_eq!(
            full().to_string(),
            "CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of 80.00 \
             GiB of which 0 bytes is free.\n\
             The device is full of live blocks: a smaller batch, activation checkpointing \
             or offloading would help.\n\
             Gruyère holds 79.00 GiB, nearly all of it live."
        );
    }

    #[test]
    fn advice_is_given_only_where_it_applies() {
        const GIB: u64 = 1 << 30;
        let capped = Report {
            limit: 10 * GIB,
            reserved: 10 * GIB,
            live: 10 * GIB,
            free: Some(70 * GIB),
            ..full()
        };
        let cases = [
            ("full of live blocks", full()),
            ("The ceiling is reached", capped.clone()),
            ("larger than the device", Report { asked: 81 * GIB, ..full() }),
            ("larger than the ceiling", Report { asked: 11 * GIB, ..capped.clone() }),
            ("nvidia-smi", Report { reserved: 10 * GIB, live: 10 * GIB, ..full() }),
            ("is being captured", Report { capturing: true, captured: GIB / 2, ..full() }),
            ("CUDA graphs hold", Report { captured: 5 * GIB, ..full() }),
            ("CUDA graphs hold", Report { capturing: true, captured: 5 * GIB, ..full() }),
            ("record_stream", Report { pending: 2 * GIB, ..full() }),
            ("one torch.cat", Report { arena_free: [0, 0, 2 * GIB, 0], ..full() }),
            ("address space", Report { addresses: Some(8 << 40), ..full() }),
            ("backing:auto", Report { slab_free: 2 * GIB, immovable: true, ..full() }),
            ("share:on", Report { slab_free: 2 * GIB, apart: true, ..full() }),
            ("`slack:0`", Report { slab_free: 8 * GIB, slack_is_loose: true, ..full() }),
        ];
        for (words, report) in &cases {
            let text = report.to_string();
            assert_eq!(report.advice().len(), 1, "{text}");
            for (other, _) in &cases {
                assert_eq!(text.contains(other), other == words, "{other}: {text}");
            }
        }
        // A ceiling of no consequence: the device has no room either.
        let full_device = Report { free: Some(0), ..capped };
        assert!(!full_device.to_string().contains("The ceiling is reached"));
    }

    #[test]
    fn chunks_of_less_slack_are_advised_only_where_whole_pages_would_suffice() {
        let idle = Report { slab_free: 8 << 30, slack_is_loose: true, ..full() };
        let lost = Report { partly: 8 << 30, ..idle.clone() };
        let little = Report { slab_free: 2 << 30, ..idle.clone() };
        let tight = Report { slack_is_loose: false, ..idle.clone() };
        assert!(idle.to_string().contains("`slack:0`"));
        for report in [lost, little, tight] {
            assert!(report.to_string().contains("one torch.cat"), "{report}");
        }
    }

    #[test]
    fn a_program_without_torch_is_told_of_none_of_torch_s_functions() {
        const GIB: u64 = 1 << 30;
        let capped = Report { limit: 10 * GIB, free: Some(70 * GIB), ..full() };
        let reports = [
            full(),
            capped.clone(),
            Report { asked: 11 * GIB, ..capped },
            Report { asked: 81 * GIB, ..full() },
            Report { asked: u64::MAX, ..full() },
            Report { pending: 2 * GIB, ..full() },
            Report { arena_free: [0, 0, 2 * GIB, 0], ..full() },
            Report { slab_free: 2 * GIB, apart: true, ..full() },
            Report { addresses: Some(8 << 40), ..full() },
        ];
        for report in reports {
            let text = Report { no_torch: true, ..report }.to_string();
            let (_, said) = text.split_once('\n').unwrap();
            for word in ["torch", "shape", "tensor", "batch", "checkpoint", "record_stream"] {
                assert!(!said.contains(word), "{word}: {text}");
            }
        }
    }

    #[test]
    fn the_line_of_a_request_above_the_ceiling_is_told_and_a_full_pool_first() {
        let line = "train.py:3 asks for 2 GiB at once: more than the ceiling of 1 GiB";
        let report =
            Report { asked: 2 << 30, limit: 1 << 30, conclusion: vec![line.to_owned()], ..full() };
        let text = report.to_string();
        assert!(text.contains(line) && !text.contains("The request alone"), "{text}");
        let pool = PoolNote { name: "kv".into(), held: 0, live: 0, limit: Some(1 << 20) };
        let text = Report { pool: Some(pool), ..report }.to_string();
        assert!(text.contains("Pool \"kv\" is full") && !text.contains(line), "{text}");
    }

    #[test]
    fn a_size_that_no_device_has_is_told_for_what_it_is() {
        let text = Report { asked: u64::MAX - 4095, ..full() }.to_string();
        assert!(text.starts_with("CUDA out of memory. Tried to allocate 17179869184.00 GiB."));
        assert!(text.contains("a negative size, or one that overflowed?"), "{text}");
    }

    #[test]
    fn nothing_held_is_not_called_live() {
        let text = Report { reserved: 0, live: 0, live_peak: 0, ..full() }.to_string();
        assert!(text.contains("Gruyère holds no memory of it. Others hold 80.00 GiB."), "{text}");
        assert!(text.contains("this one may have allocated some of it outside"), "{text}");
    }

    #[test]
    fn want_of_addresses_is_not_called_want_of_memory() {
        let text = Report { addresses: Some(2 << 40), free: Some(40 << 30), ..full() }.to_string();
        assert!(
            text.contains(
                "Address space ran out, not memory: Gruyère has reserved 2048.00 GiB of it"
            )
        );
        assert!(!text.contains("full of live blocks") && !text.contains("smaller batch"), "{text}");
        let more = Report { asked: 32 << 40, addresses: Some(2 << 40), ..full() }.to_string();
        assert!(!more.contains("ddress space"), "{more}");
    }

    #[test]
    fn causes_are_named_only_where_there_are_bytes() {
        let text = Report { pending: 8 << 30, orphaned: 5 << 30, ..full() }.to_string();
        assert!(text.contains(
            "79.00 GiB live, 8.00 GiB freed but still used by other streams, 5.00 GiB that the \
             driver would not"
        ));
        assert!(!text.contains("CUDA graphs") && !text.contains("lost"));
        // Less than a twentieth is not worth reading.
        let little = Report {
            slab_free: 1 << 30,
            partly: 1 << 30,
            largest: 1 << 20,
            live_peak: 80 << 30,
            ..full()
        };
        assert_eq!(little.held(), "Gruyère holds 79.00 GiB, nearly all of it live.");
        let (slab_free, partly) = (9 << 30, 5 << 30);
        let report = Report { slab_free, partly, largest: 1 << 20, total: 90 << 30, ..full() };
        let told = "5.00 GiB lost (free between live blocks), 4.00 GiB idle (whole free pages). \
                    The largest free piece is 1.00 MiB. Others";
        assert!(report.held().contains(told), "{report}");
        let fell = Report { live: 70 << 30, ..full() }.to_string();
        assert!(fell.contains("Live memory peaked at 79.00 GiB."));
    }
}
