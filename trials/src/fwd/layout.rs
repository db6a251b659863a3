//! Memory layouts of tensors.

use fa3_types::{Dtype, ProblemSpec, Shape, Strides, TensorDesc, ValueLayout};

/// Memory layout of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Layout {
    /// (batch, seqlen, heads, head_dim), contiguous.
    Contiguous,
    /// (batch, heads, seqlen, head_dim), contiguous.
    HeadsFirst,
    /// Other data lies between heads, between rows and between sequences.
    Gaps,
    /// (seqlen, batch, heads, head_dim), with Q, K and V of a row interleaved.
    Interleaved,
}

impl Layout {
    /// Every layout.
    pub const ALL: [Layout; 4] = [Layout::Contiguous, Layout::HeadsFirst, Layout::Gaps, Layout::Interleaved];

    /// Puts all tensors of the problem into this layout.
    pub fn of(self, mut spec: ProblemSpec) -> ProblemSpec {
        for tensor in [&mut spec.q, &mut spec.k, &mut spec.o].into_iter().chain(&mut spec.qv) {
            tensor.strides = self.strides(tensor);
        }
        for scales in spec.token_scales.iter_mut().flat_map(|scales| [&mut scales.k, &mut scales.v]) {
            scales.strides = self.strides(scales);
        }
        // Transposed V has one layout only.
        if spec.v_layout == ValueLayout::Rows {
            spec.v.strides = self.strides(&spec.v);
        }
        spec
    }

    /// A tensor in this layout.
    pub(crate) fn tensor(self, dtype: Dtype, shape: Shape) -> TensorDesc {
        let tensor = TensorDesc::contiguous(dtype, shape);
        TensorDesc { strides: self.strides(&tensor), ..tensor }
    }

    /// The strides of a tensor.
    pub(crate) fn strides(self, tensor: &TensorDesc) -> Strides {
        let [batch, seqlen, heads, head_dim] = tensor.shape.dims().map(|extent| extent as i64);
        match self {
            Layout::Contiguous => tensor.shape.contiguous_strides(),
            Layout::HeadsFirst => Strides {
                batch: heads * seqlen * head_dim,
                seqlen: head_dim,
                heads: seqlen * head_dim,
                head_dim: 1,
            },
            Layout::Gaps => {
                // Every stride is a multiple of 16 bytes.
                let unit = tensor.dtype.row_multiple() as i64;
                let row = heads * (head_dim + unit) + 3 * unit;
                Strides { batch: seqlen * row + 5 * unit, seqlen: row, heads: head_dim + unit, head_dim: 1 }
            }
            Layout::Interleaved => Strides {
                batch: 3 * heads * head_dim,
                seqlen: 3 * batch * heads * head_dim,
                heads: head_dim,
                head_dim: 1,
            },
        }
    }
}
