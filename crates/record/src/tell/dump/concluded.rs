//! A conclusion, as dumps, files and views have it; [`crate::conclusion`] draws it.
#![deny(unsafe_code, clippy::unwrap_used)]

use serde::{Deserialize, Serialize};

use crate::sites::Frame;

/// Lines of a conclusion at most.
pub const MOST_LINES: usize = 10;
/// Columns per line at most.
pub const MOST_COLUMNS: usize = 100;

/// The cause of the loss of memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// Nothing grows, and no request was refused.
    #[default]
    Nothing,
    /// A line leaves blocks behind step after step.
    Leak,
    /// The same, with ever new sizes or not in every step.
    Cache,
    /// The program keeps the autograd graphs of past steps.
    AutogradGraphs,
    /// Hooks keep outputs of modules.
    Hooks,
    /// Autograd graphs pile up without a step.
    NoGrad,
    /// Many blocks of one line pile up within a step.
    Collected,
    /// The states of an optimiser exist twice.
    OptimizerTwice,
    /// One rank holds much more than others.
    UnevenRanks,
    /// One request is large beside all else.
    LargeRequest,
    /// Others hold much of the device.
    Others,
    /// The ceiling is reached, though the device has room.
    Ceiling,
    /// CUDA graphs hold memory of their own.
    CudaGraphs,
    /// Freed memory waits for other streams.
    Streams,
    /// Free memory lies in pieces between blocks.
    Pieces,
    /// The device is full of live blocks, and nothing grows.
    Full,
}

/// A conclusion.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Conclusion {
    /// The cause in the first line.
    pub cause: Cause,
    /// At most [`MOST_LINES`], of at most [`MOST_COLUMNS`] columns.
    pub lines: Vec<String>,
    /// The growth in the first line; files have it as text.
    #[serde(skip)]
    pub accused: Option<Accused>,
}

/// A line that the first sentence accuses of growth, for views that list lines themselves.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Accused {
    /// The line: it makes the growing blocks, or calls the modules that do.
    pub line: Frame,
    /// Bytes per step left by all lines that grow with it.
    pub bytes_a_step: u64,
    /// Other lines that leave much of that.
    pub more: usize,
}
