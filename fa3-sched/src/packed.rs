//! Varlen: tiles of sequences whose lengths only the device knows, found through a table in its memory.
//!
//! One kernel writes the table, and the attention kernel after it reads it. The table has 32-bit words:
//!
//! ```text
//! header     [HEADER]                      number of row blocks, then zeros
//! records    [count + 1][Record::WORDS]    sequences, the longest tile first; the last record has no keys
//! record_of  [capacity]                    the record that has row block i
//! ```
//!
//! A row block is `tile_m` rows of a sequence, of all heads. A tile is a row block of one head. [`locate`] finds a tile
//! by its number with two loads that depend on each other, whatever the number of sequences.
//!
//! A [`Plan`] is made without lengths. Host and kernel share the functions that take lengths: [`ClampedRows`] are the
//! rows of a sequence, [`Cut`] gives its row blocks and its cost, and [`sort_key`] orders sequences. [`Plan::table`] is
//! the table as plain code, with which the kernel's table is compared.

mod clamped_rows;
mod cut;
mod locate;
mod memory_rows;
mod pages;
mod plan;
mod record;
mod table;
mod tiles;

pub use clamped_rows::ClampedRows;
pub(crate) use clamped_rows::not_negative;
pub use cut::{Cut, sort_key};
pub use locate::{Sections, SequenceTile, locate};
pub use memory_rows::{MemoryRows, NotInRows};
pub use pages::{PageLayout, PagesError};
pub use plan::{Arrays, Plan, PlanError, Side};
pub use record::SequenceRecord;
pub use table::{LengthArrays, LengthArraysError};
pub use tiles::{Tiles, nearest_section, section};

/// Words before the first record. The first word is the number of row blocks.
pub const HEADER: u32 = 4;

/// Number of sequences that are sorted together as a chunk; chunks stay in the given order. Most batches have fewer
/// sequences.
pub const CHUNK: u32 = 1024;
