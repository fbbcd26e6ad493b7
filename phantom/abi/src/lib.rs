//! The ABI face.
