//! The sizes of the ladder's problems. Those that are not given are small, with remainders in every dimension.

use clap::ValueEnum;
use fa3_cuda::kernels::ladder::GemmSize;
use fa3_ir::{Elem, Swizzle};
use fa3_types::Dtype;

use crate::args::number::{half, multiple_of};

/// The largest dimension of a matrix. What kernels compute in 32 bits, such as numbers of tiles, is far from overflow.
pub(super) const MOST: u32 = 1 << 20;
/// The most elements of a vector.
const MOST_ELEMENTS: u32 = 1 << 31;

#[derive(Debug, clap::Args)]
pub(super) struct VectorArgs {
    /// Elements
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = multiple_of(1, MOST_ELEMENTS), allow_negative_numbers = true)]
    pub(super) n: u32,
}

/// X with multiples of `ROWS` and `COLS`.
#[derive(Debug, clap::Args)]
pub(super) struct MatrixArgs<const ROWS: u32, const COLS: u32> {
    /// Rows of X
    #[arg(long, value_name = "N", default_value_t = 72, value_parser = multiple_of(ROWS, MOST), allow_negative_numbers = true)]
    pub(super) rows: u32,
    /// Columns of X
    #[arg(long, value_name = "N", default_value_t = 136, value_parser = multiple_of(COLS, MOST), allow_negative_numbers = true)]
    pub(super) cols: u32,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(super) enum RowBytes {
    #[value(name = "128")]
    B128,
    #[value(name = "64")]
    B64,
    #[value(name = "32")]
    B32,
    None,
}

#[derive(Debug, clap::Args)]
pub(super) struct CopyArgs {
    #[command(flatten)]
    pub(super) matrix: MatrixArgs<1, 8>,
    /// Bytes of a row of the swizzle in shared memory
    #[arg(long, value_name = "BYTES", default_value = "128")]
    swizzle: RowBytes,
}

/// Multiples of `N` and `K`.
#[derive(Debug, clap::Args)]
pub(super) struct SizeArgs<const N: u32, const K: u32> {
    /// Rows of A and C
    #[arg(long, value_name = "N", default_value_t = 136, value_parser = multiple_of(1, MOST), allow_negative_numbers = true)]
    m: u32,
    /// Columns of C
    #[arg(long, value_name = "N", default_value_t = 264, value_parser = multiple_of(N, MOST), allow_negative_numbers = true)]
    n: u32,
    /// Columns of A and B
    #[arg(long, value_name = "N", default_value_t = 400, value_parser = multiple_of(K, MOST), allow_negative_numbers = true)]
    k: u32,
}

/// A product of 16-bit elements, C having a multiple of `N` columns.
#[derive(Debug, clap::Args)]
pub(super) struct GemmArgs<const N: u32> {
    #[command(flatten)]
    size: SizeArgs<N, 8>,
    /// Elements of A and B: bf16 or f16
    #[arg(long, value_name = "TYPE", default_value_t = Dtype::Bf16, value_parser = half)]
    dtype: Dtype,
}

/// A grid whose CTAs are a multiple of `CLUSTER`.
#[derive(Debug, clap::Args)]
pub(super) struct GridArgs<const CLUSTER: u32> {
    /// CTAs that walk over the tiles of C, no more than it has
    #[arg(long, value_name = "N", default_value_t = 132, value_parser = multiple_of(CLUSTER, MOST), allow_negative_numbers = true)]
    pub(super) ctas: u32,
}

#[derive(Debug, clap::Args)]
pub(super) struct SplitArgs {
    /// Parts of K, no more than it has tiles
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = multiple_of(1, MOST), allow_negative_numbers = true)]
    pub(super) splits: u32,
}

impl CopyArgs {
    pub(super) fn swizzle(&self) -> Swizzle {
        match self.swizzle {
            RowBytes::B128 => Swizzle::B128,
            RowBytes::B64 => Swizzle::B64,
            RowBytes::B32 => Swizzle::B32,
            RowBytes::None => Swizzle::None,
        }
    }
}

impl<const N: u32, const K: u32> SizeArgs<N, K> {
    pub(super) fn size(&self) -> GemmSize {
        GemmSize { m: self.m, n: self.n, k: self.k }
    }
}

impl<const N: u32> GemmArgs<N> {
    pub(super) fn size(&self) -> GemmSize {
        self.size.size()
    }

    pub(super) fn elem(&self) -> Elem {
        if self.dtype == Dtype::F16 { Elem::F16 } else { Elem::Bf16 }
    }
}
