//! Who decides where a block goes.
