//! Parts of kernels. Each takes the two or three values that it uses, and imports no operation's module. Most parts
//! serve several operations. `gather`, `lists`, `pages`, `seen`, `shares` and `walk` serve the forward pass alone,
//! `key_tiles` and `row_blocks` the backward pass alone.
//!
//! Public parts serve kernels of other crates, too. They are unstable: any version may change them.

pub(crate) mod block_column;
pub(crate) mod block_words;
pub(crate) mod combine;
pub(crate) mod gather;
pub(crate) mod geometry;
pub(crate) mod intervals;
pub(crate) mod key_rows;
pub(crate) mod key_tiles;
pub(crate) mod kv_blocks;
pub(crate) mod lists;
pub(crate) mod lookup;
pub(crate) mod lse_form;
pub(crate) mod out;
pub(crate) mod over_warp;
pub(crate) mod pages;
pub(crate) mod ping_pong;
pub(crate) mod ragged;
pub(crate) mod reduction;
pub(crate) mod row_blocks;
pub(crate) mod score;
pub(crate) mod scores;
pub(crate) mod seen;
pub(crate) mod shares;
pub(crate) mod side_rows;
pub(crate) mod store_rows;
pub(crate) mod strided;
pub(crate) mod summaries;
pub(crate) mod table;
pub(crate) mod tile_indices;
pub(crate) mod tile_scheduler;
pub(crate) mod tma_pipeline;
mod tree_words;
pub(crate) mod unpack;
pub mod visible;
pub(crate) mod walk;
mod work_tile_info;
