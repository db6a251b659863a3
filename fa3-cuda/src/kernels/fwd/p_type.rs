//! P, the left operand of PV: in registers, or in shared memory where registers are short.

use fa3_ir::lang::*;

use super::unpack::unpacked;

/// Where the warpgroups of a kernel put P.
pub(crate) struct POperands<'k> {
    ty: WgmmaType,
    /// In rows of a tile, each warpgroup its own and with a barrier of its own; or in registers.
    shared: Option<(Tile<'k, 'k>, WarpgroupBarriers<'k>)>,
}

/// Where one warpgroup puts P.
pub(crate) struct POperand<'k> {
    builder: &'k Builder,
    ty: WgmmaType,
    shared: Option<(Tile<'k, 'k>, WarpgroupBarrier<'k>)>,
}

/// P of a block.
pub(crate) struct P<'k> {
    registers: AFrag<'k>,
    /// Where products read it, if not there.
    tile: Option<Tile<'k, 'k>>,
}

impl<'k> POperands<'k> {
    /// In registers, for products of this type.
    pub(crate) fn registers(ty: WgmmaType) -> POperands<'k> {
        POperands { ty, shared: None }
    }

    /// In a tile, 64 rows a warpgroup.
    #[track_caller]
    pub(crate) fn shared(b: &'k Builder, ty: WgmmaType, shape: TileShape) -> POperands<'k> {
        let tile = b.tile("p", shape);
        POperands { ty, shared: Some((tile, b.warpgroup_barriers("p", shape.rows / 64, 1))) }
    }

    /// The place of warpgroup `me`.
    #[track_caller]
    pub(crate) fn of(&self, b: &'k Builder, me: V<'k, B32>) -> POperand<'k> {
        let shared = self.shared.as_ref().map(|(tile, barriers)| (tile.row_block(me, 64), barriers.of(me)));
        POperand { builder: b, ty: self.ty, shared }
    }
}

impl<'k> POperand<'k> {
    /// What `f` makes of scores, rounded and put there. Products may read it once it is published.
    #[track_caller]
    pub(crate) fn put(&self, s: &Frag<'k>, f: impl FnMut(V<'k, F32>, At) -> V<'k, F32>) -> P<'k> {
        let registers = s.map_to_a(self.ty, f);
        let tile = self.shared.map(|(tile, _)| {
            registers.store(tile);
            tile
        });
        P { registers, tile }
    }

    /// A thread's part of a row may add up to so much: an f16 to its largest, a bf16 to what leaves O room below the
    /// largest binary32.
    pub(crate) fn most(&self) -> f32 {
        if self.ty == WgmmaType::F16 { 65504.0 } else { 2.0f32.powi(30) }
    }

    /// A thread's part of a row of P that was rounded already may add up to so much if P is to be multiplied by a power
    /// of 2 that makes it small: no element is infinite, and the factor is a normal bf16. f16 has no room for it.
    pub(crate) fn most_rounded(&self) -> Option<f32> {
        (self.ty == WgmmaType::Bf16).then_some(2.0f32.powi(100))
    }

    /// How many powers of 2 a reference may be above the largest score, so that larger ones may follow: what is
    /// rounded as a subnormal f16 then, or small beside O, has no weight in its row.
    pub(crate) fn headroom(&self) -> f32 {
        if self.ty == WgmmaType::F16 { 4.0 } else { 16.0 }
    }

    /// log2 of P of the largest score, if that is not 1: e4m3 has most of its numbers there.
    pub(crate) fn offset(&self) -> f32 {
        if self.ty == WgmmaType::E4m3 { 8.0 } else { 0.0 }
    }

    /// Lets products read what all threads have put there: every thread fences for the async proxy, then the barrier.
    #[track_caller]
    pub(crate) fn publish(&self) {
        if let Some((_, barrier)) = self.shared {
            self.builder.fence(FenceInst::ProxyAsyncShared);
            barrier.sync();
        }
    }

    /// Two numbers as products of 16 bits see them.
    #[track_caller]
    pub(crate) fn rounded(&self, Rows([upper, lower]): Rows<'k>) -> Rows<'k> {
        Rows(match self.ty == WgmmaType::F16 {
            true => unpacked(Elem::F16, lower.f16x2_above(upper)),
            false => unpacked(Elem::Bf16, lower.bf16x2_above(upper)),
        })
    }

    /// P of a block, rounded, where products find it.
    #[track_caller]
    pub(crate) fn round(&self, p: &Frag<'k>) -> P<'k> {
        let p = self.put(p, |p, _| p);
        self.publish();
        p
    }
}

impl<'k> P<'k> {
    /// Multiplies each row by its factor, a power of 2; no product reads it yet.
    #[track_caller]
    pub(crate) fn scale_rows(&mut self, factors: Rows<'k>) {
        self.registers.scale_rows(factors);
        if let Some(tile) = self.tile {
            self.registers.store(tile);
        }
    }

    /// Becomes that of another block, of the same place; no product reads this one any more.
    #[track_caller]
    pub(crate) fn set(&mut self, next: &P<'k>) {
        self.registers.set(&next.registers);
    }
}

impl<'s, 'k> From<&'s P<'k>> for Left<'s, 'k> {
    fn from(p: &'s P<'k>) -> Left<'s, 'k> {
        match p.tile {
            None => (&p.registers).into(),
            Some(tile) => tile.into(),
        }
    }
}
