//! How callers come in.

pub mod fork;
pub mod raise;
