//! Callers other than torch's hooks: CUDA programs, and programs that the heap only watches. And
//! what callers tell of the program beside its blocks.
pub(crate) mod cuda;
pub(crate) mod hooks;
pub(crate) mod program_waits;
pub(crate) mod stream_numbers;
pub(crate) mod watched;
pub(crate) mod watched_blocks;
