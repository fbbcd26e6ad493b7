//! Schedule of the measurements: as many processes side by side as there are cores. No figure
//! depends on a clock, so they do not disturb each other.

use super::job::{Answer, Job};
use crate::bench::instructions;
use crate::bench::schedule::progress;
use gruyere_replay::trace::Trace;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// A unit of work.
pub enum Work {
    /// A job in a process of its own.
    Apart(Job),
    /// Instructions on the trace at this path.
    Instructions(PathBuf),
}

/// Result of a unit of work.
pub enum Done {
    Answer(Answer),
    Instructions(Result<f64, String>),
}

impl Done {
    /// The answer of a job.
    pub fn answer(self) -> Option<Answer> {
        match self {
            Self::Answer(answer) => Some(answer),
            Self::Instructions(_) => None,
        }
    }

    /// Instructions per malloc or free, or why they were not counted.
    pub fn instructions(self) -> Option<Result<f64, String>> {
        match self {
            Self::Answer(_) => None,
            Self::Instructions(counted) => Some(counted),
        }
    }
}

/// Runs `works` side by side; returns the results in their order.
///
/// # Errors
/// The first failure; work that has not begun by then is dropped.
pub fn all(works: &[Work], workers: Option<usize>) -> Result<Vec<Done>, String> {
    let workers =
        workers.or_else(|| std::thread::available_parallelism().ok().map(usize::from)).unwrap_or(1);
    let (next, failure) = (AtomicUsize::new(0), Mutex::new(None));
    let results = Mutex::new(works.iter().map(|_| None).collect::<Vec<_>>());
    let bar = progress(works.len());
    let work = || {
        while let Some((index, work)) =
            works.iter().enumerate().nth(next.fetch_add(1, Ordering::Relaxed))
        {
            match work.done() {
                Ok(done) => {
                    results.lock().unwrap_or_else(PoisonError::into_inner)[index] = Some(done)
                }
                Err(error) => {
                    next.store(works.len(), Ordering::Relaxed);
                    failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                    return;
                }
            }
            bar.inc(1);
        }
    };
    std::thread::scope(|scope| (0..workers.max(1)).for_each(|_| drop(scope.spawn(work))));
    bar.finish_and_clear();
    match failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some(error) => Err(error),
        None => Ok(results
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner)
            .into_iter()
            .flatten()
            .collect()),
    }
}

impl Work {
    fn done(&self) -> Result<Done, String> {
        match self {
            Self::Apart(job) => job.run_apart().map(Done::Answer),
            Self::Instructions(path) => {
                let trace = Trace::open(path).map_err(|error| error.to_string())?;
                let counted =
                    instructions::count(&trace, path).map(|counted| counted.warm.per_operation);
                Ok(Done::Instructions(counted))
            }
        }
    }
}
