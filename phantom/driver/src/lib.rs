//! The in-process face.
