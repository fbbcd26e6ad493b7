//! The callers that are not torch: CUDA programs, and watched ones.
pub(crate) mod cuda;
pub(crate) mod hooks;
pub(crate) mod stream_numbers;
pub(crate) mod watched;
pub(crate) mod watched_blocks;
