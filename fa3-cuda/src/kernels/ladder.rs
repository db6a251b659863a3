//! From a vector sum to a warp-specialised GEMM: each kernel adds one feature to the one before.
//!
//! | rung | what is new |
//! |---|---|
//! | [`vector_add`] | lanes, guards, global memory |
//! | [`row_softmax`] | loops, variables, shuffles |
//! | [`tile_copy`] | tensor maps, swizzles, an mbarrier, a tensor store |
//! | [`transpose`] | ldmatrix, stmatrix, generic writes that a copy reads |
//! | [`gemm_simple`] | wgmma, one warpgroup that does everything in turn |
//! | [`gemm_pipeline`] | a pipeline: loads run ahead of products |
//! | [`gemm`] | roles: a producer, two consumers, persistent tiles, a staging buffer with TMA stores |
//! | [`gemm_cluster`] | two CTAs that multicast to each other |
//! | [`gemm_split_k`] | partial sums added by copies |
//! | [`gemm_fp8`] | e4m3, summed in two levels |

use fa3_ir::{Elem, Kernel, Passed, Program, Swizzle};

use super::KernelSpec;

pub mod gemm;
pub mod gemm_cluster;
pub mod gemm_fp8;
pub mod gemm_pipeline;
pub mod gemm_simple;
pub mod gemm_split_k;
pub mod row_softmax;
pub mod tile_copy;
mod tiles;
pub mod transpose;
pub mod vector_add;

/// The sizes of a product: C (`m` x `n`) = A (`m` x `k`) · Bᵀ, where B is `n` x `k`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GemmSize {
    /// Number of rows of A and C.
    pub m: u32,
    /// Number of rows of B, and of columns of C.
    pub n: u32,
    /// Number of columns of A and B.
    pub k: u32,
}

/// A kernel of the ladder, with its element type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Spec {
    /// [`vector_add`].
    VectorAdd,
    /// [`row_softmax`].
    RowSoftmax,
    /// [`tile_copy`] with this swizzle.
    TileCopy(Swizzle),
    /// [`transpose`].
    Transpose,
    /// [`gemm_simple`] with elements of this type.
    GemmSimple(Elem),
    /// [`gemm_pipeline`] with elements of this type.
    GemmPipeline(Elem),
    /// [`gemm`] with elements of this type.
    Gemm(Elem),
    /// [`gemm_cluster`] with elements of this type.
    GemmCluster(Elem),
    /// [`gemm_split_k`] with elements of this type.
    GemmSplitK(Elem),
    /// [`gemm_fp8`].
    GemmFp8,
}

impl Spec {
    /// All kernels. A kernel that takes bf16 or f16 occurs with both.
    pub const ALL: [Spec; 15] = [
        Spec::VectorAdd,
        Spec::RowSoftmax,
        Spec::TileCopy(Swizzle::B128),
        Spec::Transpose,
        Spec::GemmSimple(Elem::Bf16),
        Spec::GemmSimple(Elem::F16),
        Spec::GemmPipeline(Elem::Bf16),
        Spec::GemmPipeline(Elem::F16),
        Spec::Gemm(Elem::Bf16),
        Spec::Gemm(Elem::F16),
        Spec::GemmCluster(Elem::Bf16),
        Spec::GemmCluster(Elem::F16),
        Spec::GemmSplitK(Elem::Bf16),
        Spec::GemmSplitK(Elem::F16),
        Spec::GemmFp8,
    ];

    /// The kernel's name.
    pub const fn name(self) -> &'static str {
        match self {
            Spec::VectorAdd => "vector_add",
            Spec::RowSoftmax => "row_softmax",
            Spec::TileCopy(_) => "tile_copy",
            Spec::Transpose => "transpose",
            Spec::GemmSimple(_) => "gemm_simple",
            Spec::GemmPipeline(_) => "gemm_pipeline",
            Spec::Gemm(_) => "gemm",
            Spec::GemmCluster(_) => "gemm_cluster",
            Spec::GemmSplitK(_) => "gemm_split_k",
            Spec::GemmFp8 => "gemm_fp8",
        }
    }

    /// The type of the elements that the kernel reads.
    pub const fn elem(self) -> Elem {
        match self {
            Spec::VectorAdd | Spec::RowSoftmax => Elem::F32,
            Spec::TileCopy(_) | Spec::Transpose => Elem::Bf16,
            Spec::GemmSimple(elem)
            | Spec::GemmPipeline(elem)
            | Spec::Gemm(elem)
            | Spec::GemmCluster(elem)
            | Spec::GemmSplitK(elem) => elem,
            Spec::GemmFp8 => Elem::E4m3,
        }
    }
}

impl KernelSpec for Spec {
    fn kernel(&self) -> Kernel {
        match *self {
            Spec::VectorAdd => vector_add::kernel(),
            Spec::RowSoftmax => row_softmax::kernel(),
            Spec::TileCopy(swizzle) => tile_copy::kernel(swizzle),
            Spec::Transpose => transpose::kernel(),
            Spec::GemmSimple(elem) => gemm_simple::kernel(elem),
            Spec::GemmPipeline(elem) => gemm_pipeline::kernel(elem),
            Spec::Gemm(elem) => gemm::kernel(elem),
            Spec::GemmCluster(elem) => gemm_cluster::kernel(elem),
            Spec::GemmSplitK(elem) => gemm_split_k::kernel(elem),
            Spec::GemmFp8 => gemm_fp8::kernel(),
        }
    }
}

/// The program of one launch of a kernel of the ladder, with named arguments.
fn launch<const N: usize>(
    mut program: Program<super::Spec>,
    spec: Spec,
    grid: [u32; 3],
    args: [(&str, Passed); N],
) -> Program<super::Spec> {
    program.step(spec.into(), grid, args);
    program
}
