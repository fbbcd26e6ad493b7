//! What is derived from a record, and files: conclusions, dumps, runs, traces, alerts.

pub mod brief;
pub mod conclusion;
pub mod dump;
pub mod file;
pub mod page;
pub mod run;
pub mod text;
pub mod trace;
pub mod watch;
