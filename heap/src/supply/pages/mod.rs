//! Pages that move: physical chunks, mapped where a row of pages is needed (`backing:stitch`).
//!
//! | file | what it is |
//! |---|---|
//! | `remapped` | the supply |
//! | `growth` | by how much the heap grows, and in chunks of what length |
//! | `moves` | a request is made to fit: fresh chunks, and idle pages of others |
//! | `gather` | which idle pages make a row |
//! | `chunks` | the books of chunks, pages and their mappings |
//! | `access` | which devices reach a mapping |
//! | `addresses`, `reservations` | address space: reserved, given back; its books |
//! | `mapping_book` | mappings on the record |

pub(crate) mod access;
pub(crate) mod addresses;
pub(crate) mod chunks;
pub(crate) mod gather;
pub(crate) mod growth;
pub(crate) mod mapping_book;
pub(crate) mod moves;
pub(crate) mod remapped;
pub(crate) mod reservations;
/// The longest chunk (bytes). Creating one has a fixed cost, which few chunks pay; a page table
/// entry of the view at the other end of a chunk takes address space only.
pub(crate) const LONGEST_CHUNK: u64 = 64 << 20;

pub(crate) type ChunkId = u32;
