//! Tiles of sequences whose lengths only the device knows, found through a table in its memory.
//!
//! One kernel writes the table, and other kernels of the same and of later calls read it. It has 32-bit words:
//!
//! ```text
//! header     [HEADER]                      row blocks, then zeros
//! records    [count + 1][Record::WORDS]    sequences, those with the longest tile first; the last one has no keys
//! record_of  [capacity]                    the record that has row block i
//! ```
//!
//! A row block is `tile_m` rows of a sequence, of all heads. A tile is a row block of one head. [`locate`] finds a tile
//! by its number with two loads that depend on each other, whatever the number of sequences.

mod locate;
mod memory_rows;
mod record;

pub use locate::{Located, Sections, locate};
pub use memory_rows::{MemoryRows, NotInRows};
pub use record::Record;

/// Words before the first record. The first one is the number of row blocks.
pub const HEADER: u32 = 4;
