//! Library workspaces of a size known only to NVIDIA: counted, so that a reader of the books knows
//! what is missing.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

static UNKNOWN: Mutex<BTreeMap<&'static str, u64>> = Mutex::new(BTreeMap::new());

/// `call` might have wanted memory of its own.
pub fn unknown(call: &'static str) {
    *UNKNOWN.lock().unwrap_or_else(PoisonError::into_inner).entry(call).or_default() += 1;
}

/// The calls that might have wanted memory, with their counts.
pub fn all() -> BTreeMap<&'static str, u64> {
    UNKNOWN.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

/// Exports functions that query the size of a call's workspace: they return 0 and count it as
/// unknown under the call's name. The size goes through the argument behind the named ones, which
/// are integers or pointers; callers may pass more behind it. `null` is the result for a NULL
/// place.
macro_rules! sizes {
    ($null:ident $size:ty: $before:tt => $($name:ident)*) => {
        $(sizes! { @one $null $size, $name $before })*
    };
    (@one $null:ident $size:ty, $name:ident ($($before:ident)*)) => {
        #[unsafe(no_mangle)]
        pub extern "C" fn $name($($before: usize,)* bytes: $crate::abi::Out<$size>) -> u32 {
            $crate::workspaces::unknown($crate::workspaces::asked_for(stringify!($name)));
            bytes.put(0).map_or($null, |()| 0)
        }
    };
}

pub(crate) use sizes;

/// The call that a query is about.
pub fn asked_for(question: &'static str) -> &'static str {
    question.split("_bufferSize").next().unwrap_or(question)
}
