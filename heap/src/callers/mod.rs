//! The callers that are not torch: CUDA programs, and watched ones.
pub(crate) mod cuda;
