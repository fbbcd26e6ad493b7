//! Why memory ran out: the cause in bytes, gathered when an out-of-memory is answered.
#![deny(unsafe_code)]

use super::device::Device;
use super::ladder::Ladder;
use super::lifetime::{LIFETIMES, Lifetime};
use super::{Shared, lock};
use std::fmt;

/// What is known of an out-of-memory. All numbers but `device` and `count` are bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// The device.
    pub device: u32,
    /// How many there were on it, this one included.
    pub count: u64,
    /// What was asked for.
    pub asked: u64,
    /// Physical memory of the device.
    pub total: u64,
    /// Of it free, as the driver says; `None`: it could not say.
    pub free: Option<u64>,
    /// The ceiling on what may be reserved.
    pub limit: u64,
    /// Held from the driver.
    pub reserved: u64,
    /// Live blocks, each rounded up to 512 B.
    pub live: u64,
    /// Their peak.
    pub live_peak: u64,
    /// The largest request that what is held could satisfy at once.
    pub largest: u64,
    /// Held, freed by the program, waiting for streams.
    pub pending: u64,
    /// Held by captures of CUDA graphs.
    pub captured: u64,
    /// Held, free slots of slabs.
    pub slab_free: u64,
    /// Held, free runs between blocks, by the lifetime of their arena.
    pub arena_free: [u64; LIFETIMES],
    /// Spans that the driver refused to take back.
    pub orphaned: u64,
    /// Whether captures kept the allocator from asking and waiting.
    pub capturing: bool,
    /// What the reclaim ladder has done on this device so far.
    pub ladder: Ladder,
    /// Held by named pools.
    pub pooled: u64,
    /// The named pool that the request was for.
    pub pool: Option<PoolNote>,
}

/// What an out-of-memory says of the named pool that the request was for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolNote {
    /// Its name.
    pub name: String,
    /// What it holds.
    pub held: u64,
    /// Its live blocks, each rounded up to 512 B.
    pub live: u64,
    /// The ceiling on those.
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
    /// Looks at everything; takes one lock after the other.
    pub(super) fn gather(device: &Device, shared: &Shared, asked: u64, _stream: u32, count: u64) -> Self {
        let (live, live_peak) = shared.record.live(device.id);
        let info = shared.driver.memory_info(device.id).ok();
        let mut report = Self {
            device: device.id,
            count,
            asked,
            total: device.capabilities.total_memory,
            free: info.map(|info| info.free),
            live,
            live_peak,
            capturing: !device.may_ask(),
            ..Self::default()
        };
        for lane in device.lanes.iter() {
            let cell = lock(lane);
            report.pending += cell.lane.pending_bytes();
            report.slab_free += cell.lane.slabs().map(|(_, slab)| slab.free_bytes()).sum::<u64>();
        }
        let central = lock(&device.central);
        report.limit = central.limit;
        report.reserved = central.backing.reserved;
        report.pending += central.pending_bytes();
        report.orphaned = central.backing.orphaned();
        report.largest = central.largest_request(shared.shares());
        report.ladder = central.ladder.clone();
        for lifetime in Lifetime::ALL {
            let space = central.space(lifetime);
            report.arena_free[lifetime as usize] = central.arenas.free_bytes(space).0;
        }
        for pool in central.captures.pools.iter().flatten() {
            report.captured += central.arenas.held_bytes(pool.space);
        }
        report.pooled = central.named.iter().map(|(_, pool)| central.arenas.held_bytes(pool.space)).sum();
        report
    }

    /// Taken by others on the device: processes, contexts, libraries that allocate for themselves.
    pub fn others(&self) -> Option<u64> {
        Some(self.total.saturating_sub(self.free?).saturating_sub(self.reserved))
    }

    /// torch's first sentence, which tools look for.
    pub fn headline(&self) -> String {
        let free = self.free.map_or_else(|| "an unknown amount".to_owned(), |free| Bytes(free).to_string());
        format!(
            "CUDA out of memory. Tried to allocate {}. GPU {} has a total capacity of {} of which {} is free.",
            Bytes(self.asked),
            self.device,
            Bytes(self.total),
            free
        )
    }

    /// What to do about it; only what applies.
    fn advice(&self) -> Vec<String> {
        let mut advice = Vec::new();
        if let Some(PoolNote { name, live, limit: Some(limit), .. }) = &self.pool
            && live.saturating_add(self.asked) > *limit
        {
            return vec![format!("pool {name:?} is full: raise its limit, or free blocks of it")];
        }
        let free = self.free.unwrap_or(0);
        if self.asked > self.total {
            return vec!["the request alone is larger than the device: look at its shape".to_owned()];
        }
        if self.limit < self.total && self.reserved + self.asked > self.limit {
            advice.push(format!(
                "the ceiling of {} is reached while the device has {} free: raise `limit` or the memory fraction",
                Bytes(self.limit),
                Bytes(free)
            ));
        }
        if self.others().is_some_and(|others| others > self.total / 4) {
            advice.push(
                "other users hold more than a quarter of the device: look for other processes".to_owned(),
            );
        }
        if self.capturing {
            advice.push(
                "a CUDA graph is being captured, so nothing could be waited for: allocate before the capture"
                    .to_owned(),
            );
        }
        if self.arena_free.iter().sum::<u64>() > self.asked {
            advice.push(format!(
                "{} lie free between blocks, but the largest piece has {}",
                Bytes(self.arena_free.iter().sum()),
                Bytes(self.largest)
            ));
        }
        if advice.is_empty() {
            advice.push(
                "the device is full of live blocks: a smaller batch, checkpointing or offloading would help"
                    .to_owned(),
            );
        }
        advice
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.headline())?;
        write!(
            f,
            " Gruyère holds {}: {} live (peak {})",
            Bytes(self.reserved),
            Bytes(self.live),
            Bytes(self.live_peak)
        )?;
        for (bytes, what) in [
            (self.pending, "freed and waiting for other streams"),
            (self.captured, "held by CUDA graphs"),
            (self.pooled, "held by named pools"),
            (self.slab_free, "free slots of slabs"),
            (self.orphaned, "refused by the driver when given back"),
        ] {
            if bytes > 0 {
                write!(f, ", {} {what}", Bytes(bytes))?;
            }
        }
        for lifetime in Lifetime::ALL {
            let bytes = self.arena_free[lifetime as usize];
            if bytes > 0 {
                write!(f, ", {} free between {} blocks", Bytes(bytes), lifetime.name())?;
            }
        }
        write!(f, ". The largest request that this could satisfy is {}.", Bytes(self.largest))?;
        if let Some(others) = self.others().filter(|&others| others > 0) {
            write!(f, " Others hold {}.", Bytes(others))?;
        }
        let climbed: Vec<String> =
            self.ladder.climbed().map(|(name, rung)| format!("{name} {rung}")).collect();
        if !climbed.is_empty() {
            write!(f, " Tried so far: {}.", climbed.join("; "))?;
        }
        if let Some(pool) = &self.pool {
            write!(f, " {pool}")?;
        }
        write!(f, " What helps: {}.", self.advice().join("; "))
    }
}

/// Bytes as torch prints them: two digits, binary units.
pub struct Bytes(pub u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = self.0 as f64;
        match self.0 {
            0..1024 => write!(f, "{} bytes", self.0),
            1024..1_048_576 => write!(f, "{:.2} KiB", value / 1024.0),
            1_048_576..1_073_741_824 => write!(f, "{:.2} MiB", value / 1_048_576.0),
            _ => write!(f, "{:.2} GiB", value / 1_073_741_824.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_message_starts_as_torchs_does() {
        let report = Report { asked: 20 << 20, total: 80 << 30, free: Some(1 << 30), ..Report::default() };
        let text = report.to_string();
        assert!(text.starts_with(
            "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 80.00 GiB"
        ));
    }

    #[test]
    fn advice_is_given_only_where_it_applies() {
        let full = Report {
            asked: 1 << 30,
            total: 80 << 30,
            limit: 80 << 30,
            reserved: 79 << 30,
            live: 79 << 30,
            free: Some(0),
            ..Report::default()
        };
        assert!(full.to_string().contains("full of live blocks") && !full.to_string().contains("ceiling"));
        let capped = Report {
            limit: 10 << 30,
            reserved: 10 << 30,
            live: 10 << 30,
            free: Some(70 << 30),
            ..full.clone()
        };
        assert!(
            capped.to_string().contains("raise `limit`")
                && !capped.to_string().contains("full of live blocks")
        );
        let absurd = Report { asked: 81 << 30, ..full.clone() };
        assert!(
            absurd.to_string().contains("larger than the device")
                && !absurd.to_string().contains("checkpointing")
        );
        let crowded = Report { reserved: 10 << 30, live: 10 << 30, ..full };
        assert!(crowded.to_string().contains("other processes"));
    }
}
