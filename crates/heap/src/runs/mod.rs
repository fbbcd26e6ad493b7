//! Runs: which addresses are free, and the owner of each run and page. Book-keeping alone: nothing
//! here knows a driver.

pub(crate) mod arena;
pub(crate) mod kept;
pub(crate) mod page_table;
pub(crate) mod rows;
pub(crate) mod spaces;
