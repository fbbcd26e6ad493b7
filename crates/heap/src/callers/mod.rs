//! Callers other than torch's hooks: CUDA programs, and programs that the heap only watches.
pub(crate) mod cuda;
pub(crate) mod hooks;
pub(crate) mod stream_numbers;
pub(crate) mod watched;
pub(crate) mod watched_blocks;
