//! P, the left operand of PV: in registers, or in shared memory where registers are short.

use fa3_ir::{
    AFrag, At, B32, Builder, Elem, F32, FenceInst, Frag, InFlight, Tile, TileShape, V, WgmmaType, gemm_rs,
    gemm_ss,
};
use fa3_sched::forward::PPlace;

use super::FwdSpec;

/// Threads of a warpgroup.
const THREADS: u32 = 128;

/// Where the warpgroups of a kernel put P.
pub(super) struct Storage {
    ty: WgmmaType,
    /// In rows of a tile, each warpgroup its own and with a barrier of its own, whose first number this is; or in registers.
    shared: Option<(Tile<'static>, u32)>,
}

/// Where one warpgroup puts P.
pub(super) struct Place {
    ty: WgmmaType,
    shared: Option<(Tile<'static>, V<B32>)>,
}

/// P of a block.
pub(super) enum Probabilities {
    Registers(AFrag),
    Shared(Tile<'static>),
}

impl Storage {
    pub(super) fn declare(b: &mut Builder, spec: &FwdSpec) -> Storage {
        let tile = &spec.tile;
        let shared = match tile.p_place {
            PPlace::Registers => None,
            PPlace::Smem => {
                let place = b.tile("p", TileShape::new(spec.elem, tile.tile_m, tile.tile_n));
                Some((place, b.barriers("p", tile.consumers, THREADS)))
            }
        };
        Storage { ty: if spec.elem == Elem::F16 { WgmmaType::F16 } else { WgmmaType::Bf16 }, shared }
    }

    /// The place of warpgroup `me`.
    #[track_caller]
    pub(super) fn of(&self, b: &mut Builder, me: V<B32>) -> Place {
        let shared = self.shared.map(|(tile, first)| (tile.row_block(b, me, 64), b.add(me, first)));
        Place { ty: self.ty, shared }
    }
}

impl Place {
    /// What `f` makes of scores, rounded and put there. Products may read it once it is published.
    #[track_caller]
    pub(super) fn put(
        &self,
        b: &mut Builder,
        s: &Frag,
        f: impl FnMut(&mut Builder, V<F32>, At) -> V<F32>,
    ) -> Probabilities {
        let p = s.map_to_a(b, self.ty, f);
        match self.shared {
            None => Probabilities::Registers(p),
            Some((tile, _)) => {
                p.store(b, &tile);
                Probabilities::Shared(tile)
            }
        }
    }

    /// Lets products read what all threads have put there: their proxy sees it after every thread's fence, and the barrier.
    #[track_caller]
    pub(super) fn publish(&self, b: &mut Builder) {
        if let Some((_, barrier)) = self.shared {
            b.fence(FenceInst::ProxyAsyncShared);
            b.sync_computed(barrier, THREADS);
        }
    }
}

impl Probabilities {
    /// Becomes those of another block, of the same place; no product reads these any more.
    #[track_caller]
    pub(super) fn set(&mut self, b: &mut Builder, next: &Probabilities) {
        if let (Probabilities::Registers(p), Probabilities::Registers(next)) = (self, next) {
            p.set(b, next);
        }
    }

    /// Begins O += P V.
    #[track_caller]
    pub(super) fn times<'s>(
        &'s self,
        b: &mut Builder,
        v: Tile<'s>,
        o: &'s mut Frag,
    ) -> InFlight<'s, &'s mut Frag> {
        match self {
            Probabilities::Registers(p) => gemm_rs(b, p, v, o),
            Probabilities::Shared(p) => gemm_ss(b, *p, v, o),
        }
    }
}
