//! P, the left operand of PV: in registers, or in shared memory where registers are short.

use fa3_ir::lang::*;

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
pub(crate) enum P<'k> {
    Registers(AFrag<'k>),
    Shared(Tile<'k, 'k>),
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
        let p = s.map_to_a(self.ty, f);
        match self.shared {
            None => P::Registers(p),
            Some((tile, _)) => {
                p.store(tile);
                P::Shared(tile)
            }
        }
    }

    /// Lets products read what all threads have put there: every thread fences for the async proxy, then the barrier.
    #[track_caller]
    pub(crate) fn publish(&self) {
        if let Some((_, barrier)) = self.shared {
            self.builder.fence(FenceInst::ProxyAsyncShared);
            barrier.sync();
        }
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
    /// Becomes that of another block, of the same place; no product reads this one any more.
    #[track_caller]
    pub(crate) fn set(&mut self, next: &P<'k>) {
        if let (P::Registers(p), P::Registers(next)) = (self, next) {
            p.set(next);
        }
    }
}

impl<'s, 'k> From<&'s P<'k>> for Left<'s, 'k> {
    fn from(p: &'s P<'k>) -> Left<'s, 'k> {
        match p {
            P::Registers(p) => p.into(),
            P::Shared(tile) => (*tile).into(),
        }
    }
}
