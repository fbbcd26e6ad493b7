//! Runs: which addresses are free, whose, and who owns a page. Book-keeping alone: nothing here
//! knows a driver.

pub(crate) mod arena;
pub(crate) mod page_table;
pub(crate) mod rows;
pub(crate) mod spaces;
