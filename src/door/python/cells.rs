//! Cells that a notebook has run, until the record knows them.
#![deny(unsafe_code)]

use crate::record::Record;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Cells kept at most: before the process has a heap, a notebook may run on.
const MOST: usize = 1 << 10;

/// Names of files, with the numbers of their cells, in the order in which they ran.
static WAITING: Mutex<VecDeque<(Box<str>, u32)>> = Mutex::new(VecDeque::new());
/// Whether there are some, so that most who look take no lock:
///
/// ```text
/// false -> true   add(), with the lock
/// true -> false   note(), with the lock
/// ```
static ANY: AtomicBool = AtomicBool::new(false);

fn waiting() -> MutexGuard<'static, VecDeque<(Box<str>, u32)>> {
    WAITING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Adds a cell.
pub(super) fn add(file: &str, number: u32) {
    let mut waiting = waiting();
    if waiting.len() == MOST {
        waiting.pop_front();
    }
    waiting.push_back((file.into(), number));
    ANY.store(true, Ordering::Relaxed);
}

/// Notes those that wait on the record.
pub(super) fn note(record: &Record) {
    if ANY.load(Ordering::Relaxed) {
        let mut waiting = waiting();
        ANY.store(false, Ordering::Relaxed);
        waiting.drain(..).for_each(|(file, number)| record.cell(&file, number));
    }
}
