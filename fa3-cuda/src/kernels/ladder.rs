//! From a vector sum to a warp-specialised GEMM: each rung adds one thing to the one before.
//!
//! | rung | what is new |
//! |---|---|
//! | [`vector_add`] | lanes, guards, global memory |
//! | [`row_softmax`] | loops, variables, shuffles |
//! | [`tile_copy`] | tensor maps, swizzles, an mbarrier, a tensor store |
//! | [`transpose`] | ldmatrix, stmatrix, generic writes that a copy reads |
//! | [`gemm_simple`] | wgmma, one warpgroup that does everything in turn |
//! | [`gemm_ring`] | a ring: loads run ahead of products |
//! | [`gemm`] | roles: a producer, two consumers, persistent tiles, an outbox |
//! | [`gemm_cluster`] | two CTAs that load for each other |
//! | [`gemm_split_k`] | partial sums added by copies |
//! | [`gemm_fp8`] | e4m3, summed in two levels |

pub mod gemm;
pub mod gemm_cluster;
pub mod gemm_fp8;
pub mod gemm_ring;
pub mod gemm_simple;
pub mod gemm_split_k;
pub mod row_softmax;
pub mod tile_copy;
mod tiles;
pub mod transpose;
pub mod vector_add;

/// The sizes of a product: C (`m` x `n`) = A (`m` x `k`) · Bᵀ, B being `n` x `k`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GemmSize {
    /// Rows of A and C.
    pub m: u32,
    /// Rows of B, columns of C.
    pub n: u32,
    /// Columns of A and B.
    pub k: u32,
}
