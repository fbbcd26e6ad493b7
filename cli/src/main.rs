//! The gruyere command.
fn main() {}
