//! Memory that processes share.
//!
//! | file | content |
//! |---|---|
//! | `exports` | what another process must map to reach a block of this one |
//! | `foreign` | the books of others' memory that is mapped in this one |
//! | `imports` | opening and closing it |
//!
//! How the two processes talk to each other is the caller's affair.

pub(crate) mod exports;
pub(crate) mod foreign;
pub(crate) mod imports;
