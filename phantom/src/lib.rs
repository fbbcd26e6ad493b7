//! The stand-in GPU.
