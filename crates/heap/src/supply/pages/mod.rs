//! Pages that move: physical chunks, mapped where a row of pages is needed (`backing:stitch`).
//!
//! | file | content |
//! |---|---|
//! | `remapped` | the supply |
//! | `growth` | the length of each growth and of its chunks |
//! | `moves` | making a request fit, from fresh chunks and idle pages elsewhere |
//! | `move_time` | how much of the program's time they may take |
//! | `compact` | idle chunks in one row again, between two steps |
//! | `creep` | whether that may be worth a look |
//! | `gather` | the choice of idle pages for a row |
//! | `chunks` | the books of chunks, pages and their mappings |
//! | `access` | access of devices to mappings |
//! | `addresses`, `reservations` | address space, reserved and given back; its books |
//! | `mapping_book` | mappings in the record |

pub(crate) mod access;
pub(crate) mod addresses;
pub(crate) mod chunks;
pub(crate) mod compact;
pub(crate) mod creep;
pub(crate) mod gather;
pub(crate) mod growth;
pub(crate) mod mapping_book;
pub(crate) mod move_time;
pub(crate) mod moves;
pub(crate) mod remapped;
pub(crate) mod reservations;

/// The longest chunk (bytes). To create one has a fixed cost, which few long chunks pay seldom. A
/// view maps the whole chunk, also where few of its pages are used there: that takes address space
/// only.
pub(crate) const LONGEST_CHUNK: u64 = 64 << 20;

pub(crate) type ChunkId = u32;
