//! Traces and models.
