//! Memory that a library would have taken beside its operands, where nobody outside of NVIDIA knows
//! how much: counted, so that whoever reads the books knows what is missing in them.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

static UNKNOWN: Mutex<BTreeMap<&'static str, u64>> = Mutex::new(BTreeMap::new());

/// `call` might have wanted memory of its own.
pub fn unknown(call: &'static str) {
    *UNKNOWN.lock().unwrap_or_else(PoisonError::into_inner).entry(call).or_default() += 1;
}

/// Which calls might have, and how often each was made.
pub fn all() -> BTreeMap<&'static str, u64> {
    UNKNOWN.lock().unwrap_or_else(PoisonError::into_inner).clone()
}
