//! Ranks of one job with unequal memory.

use super::evidence::Evidence;
use super::words::bytes;
use super::{Cause, Finding};

/// A rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rank {
    /// Its number.
    pub rank: u64,
    /// The peak of its live blocks, on the device where it holds most.
    pub live_peak_bytes: u64,
}

/// One rank's peak is far above the others'.
pub fn uneven(evidence: &Evidence<'_>, ranks: &[Rank]) -> Option<Finding> {
    let most = ranks.iter().max_by_key(|rank| rank.live_peak_bytes)?;
    let mut others: Vec<u64> = ranks
        .iter()
        .filter(|rank| rank.rank != most.rank)
        .map(|rank| rank.live_peak_bytes)
        .collect();
    others.sort_unstable();
    let median = *others.get(others.len() / 2)?;
    let excess = most.live_peak_bytes.saturating_sub(median);
    if median == 0 || excess < median / 4 {
        return None;
    }
    let this = match evidence.state.process.rank {
        Some(rank) if rank == most.rank => " (this one)".to_owned(),
        Some(rank) => format!(" (this is rank {rank})"),
        None => String::new(),
    };
    let others = match others.len() {
        1 => format!("the other rank {}", bytes(median)),
        count => format!("the other {count} ranks {}", bytes(median)),
    };
    Some(Finding {
        cause: Cause::UnevenRanks,
        bytes: excess,
        says: format!(
            "Rank {}{this} had {} live at its peak, {others}: work is spread unevenly",
            most.rank,
            bytes(most.live_peak_bytes)
        ),
        advice: &[
            "To do: compare what the ranks are given (longest batch, last batch, layers a stage, \
             experts), and what rank 0 alone does: logging, checkpoints, evaluation, gathered \
             results.",
        ],
        ..Finding::default()
    })
}
