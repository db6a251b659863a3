//! The epilogue of a tile of keys: it writes dK and dV to global memory.

use fa3_ir::lang::*;

use super::state::Dkv;
use crate::kernels::bwd::dq_accum::AccumBlock;
use crate::kernels::bwd::gradients::write_tile;
use crate::kernels::bwd::reduce;
use crate::kernels::params::InKernel;
use crate::kernels::parts::geometry::WorkTile;
use crate::kernels::parts::strided::Strided;

impl<'k> Dkv<'k> {
    /// Writes a tile's dK.
    #[track_caller]
    pub(super) fn write_dk(&self, dk: Frag<'k>, work: &WorkTile<'k>, key: U32<'k>) {
        let params = &self.params;
        let parts = params.parts.as_ref().map(|parts| parts.dk);
        let to = (&params.dk, self.spec.head_dim);
        self.write(dk, Some(params.inputs.softmax_scale), work, key, parts, to);
    }

    /// Writes a tile's dV.
    #[track_caller]
    pub(super) fn write_dv(&self, dv: Frag<'k>, work: &WorkTile<'k>, key: U32<'k>) {
        let params = &self.params;
        let parts = params.parts.as_ref().map(|parts| parts.dv);
        self.write(dv, None, work, key, parts, (&params.dv, self.spec.head_dim_v));
    }

    /// Writes a gradient of a tile, times `factor`, to a tensor of `cols` columns. The gradient of a part of a split
    /// tile goes to `parts`, without the factor.
    #[track_caller]
    pub(super) fn write(
        &self,
        gradient: Frag<'k>,
        factor: Option<V<'k, F32>>,
        work: &WorkTile<'k>,
        key: U32<'k>,
        parts: Option<U64<'k>>,
        (to, cols): (&Strided<InKernel<'k>>, u32),
    ) {
        let (b, tile_n) = (self.builder, self.spec.tile.tile_n);
        let (rows, format) = ((key, tile_n), (self.spec.elem, cols));
        let Some((out, parts)) = work.out.zip(parts) else {
            return write_tile(gradient, factor, to, work, rows, format);
        };
        b.if_uniform(out.is_split(), || {
            let block = out.split().mad(tile_n / reduce::KEYS, (key - work.row) >> reduce::KEYS.ilog2());
            AccumBlock::at(b, parts, block, gradient.cols()).store(&gradient);
        });
        b.if_uniform(out.is_tensor(), || write_tile(gradient, factor, to, work, rows, format));
    }
}
