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

/// One rank's peak is far above the others'. `explained`: the most that another cause explains of
/// this rank's memory. Where this rank is the one above, that cause has made it so: the ranks
/// differ by what is left.
pub fn uneven(evidence: &Evidence<'_>, ranks: &[Rank], explained: u64) -> Option<Finding> {
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
    let this = evidence.state.process.rank;
    let is_this = this == Some(most.rank);
    let who = match this {
        Some(_) if is_this => " (this one)".to_owned(),
        Some(rank) => format!(" (this is rank {rank})"),
        None => String::new(),
    };
    let others = match others.len() {
        1 => format!("the other rank {}", bytes(median)),
        count => format!("the other {count} ranks {}", bytes(median)),
    };
    Some(Finding {
        cause: Cause::UnevenRanks,
        bytes: if is_this { excess.saturating_sub(explained) } else { excess },
        says: format!(
            "Rank {}{who} had {} live at its peak, {others}: work is spread unevenly",
            most.rank,
            bytes(most.live_peak_bytes)
        ),
        advice: match (is_this, most.rank) {
            (true, 0) => FIRST,
            (true, _) => GIVEN,
            (false, _) => OTHER,
        },
        ..Finding::default()
    })
}

const FIRST: &[&str] = &[
    "To do: compare what the ranks are given (longest batch, last batch, layers a stage, experts), \
     and what rank 0 alone does: logging, checkpoints, evaluation, gathered results.",
];
const GIVEN: &[&str] = &[
    "To do: compare what the ranks are given: longest batch, last batch, layers a stage, experts.",
];
const OTHER: &[&str] = &[
    "To do: look at that rank (`gruyere ps` has its process, `gruyere post PID` its lines), and \
     compare what the ranks are given: longest batch, last batch, layers a stage, experts.",
];
