//! Problem sizes of the ladder kernels. The defaults are small and leave remainders in every dimension.

use fa3_cuda::kernels::ladder::GemmSize;
use fa3_ir::{Elem, Swizzle};
use fa3_types::Dtype;

use crate::args::choice::{Choice, one_of};
use crate::args::number::{half, multiple_of};

/// The largest dimension of a matrix. It keeps 32-bit values of the kernels, such as numbers of tiles, far from
/// overflow.
pub(super) const MOST: u32 = 1 << 20;
/// The largest number of elements of a vector.
const MOST_ELEMENTS: u32 = 1 << 31;

#[derive(Debug, clap::Args)]
pub(super) struct VectorArgs {
    /// Number of elements
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = multiple_of(1, MOST_ELEMENTS), allow_negative_numbers = true)]
    pub(super) n: u32,
}

/// The size of X: multiples of `ROWS` and `COLS`.
#[derive(Debug, clap::Args)]
pub(super) struct MatrixArgs<const ROWS: u32, const COLS: u32> {
    /// Rows of X
    #[arg(long, value_name = "N", default_value_t = 72, value_parser = multiple_of(ROWS, MOST), allow_negative_numbers = true)]
    pub(super) rows: u32,
    /// Columns of X
    #[arg(long, value_name = "N", default_value_t = 136, value_parser = multiple_of(COLS, MOST), allow_negative_numbers = true)]
    pub(super) cols: u32,
}

const SWIZZLES: &[Choice<Swizzle>] = &[
    ("128", "", Swizzle::B128),
    ("64", "", Swizzle::B64),
    ("32", "", Swizzle::B32),
    ("none", "", Swizzle::None),
];

#[derive(Debug, clap::Args)]
pub(super) struct CopyArgs {
    #[command(flatten)]
    pub(super) matrix: MatrixArgs<1, 8>,
    /// Bytes per row of the swizzle in shared memory
    #[arg(long, value_name = "BYTES", default_value = "128", value_parser = one_of(SWIZZLES))]
    pub(super) swizzle: Swizzle,
}

/// The size of a product: n and k are multiples of `N` and `K`.
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

/// A product of 16-bit elements. The columns of C are a multiple of `N`.
#[derive(Debug, clap::Args)]
pub(super) struct GemmArgs<const N: u32> {
    #[command(flatten)]
    size: SizeArgs<N, 8>,
    /// Elements of A and B: bf16 or f16
    #[arg(long, value_name = "TYPE", default_value_t = Dtype::Bf16, value_parser = half)]
    dtype: Dtype,
}

/// A grid whose number of CTAs is a multiple of `CLUSTER`.
#[derive(Debug, clap::Args)]
pub(super) struct GridArgs<const CLUSTER: u32> {
    /// Persistent CTAs, at most as many as tiles of C
    #[arg(long, value_name = "N", default_value_t = 132, value_parser = multiple_of(CLUSTER, MOST), allow_negative_numbers = true)]
    pub(super) ctas: u32,
}

#[derive(Debug, clap::Args)]
pub(super) struct SplitArgs {
    /// Parts of K, at most as many as tiles of K
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = multiple_of(1, MOST), allow_negative_numbers = true)]
    pub(super) splits: u32,
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
