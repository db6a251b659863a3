//! P, the left operand of PV: in registers, or in shared memory where registers are short.

use fa3_ir::{
    AFrag, B32, Builder, Elem, FenceInst, Frag, InFlight, Tile, TileShape, V, WgmmaType, gemm_rs, gemm_ss,
};
use fa3_sched::PPlace;

use super::FwdSpec;

/// Threads of a warpgroup.
const THREADS: u32 = 128;

/// Where the warpgroups of a kernel put P.
pub(super) enum Storage {
    /// In registers, as the left operand of products of this type.
    Registers(WgmmaType),
    /// In rows of a tile, each warpgroup its own, and with a barrier of its own; the first one's number.
    Shared(Tile<'static>, u32),
}

/// Where one warpgroup puts P.
pub(super) enum Place {
    Registers(WgmmaType),
    Shared(Tile<'static>, V<B32>),
}

/// P of a block.
pub(super) enum Probabilities {
    Registers(AFrag),
    Shared(Tile<'static>, V<B32>),
}

impl Storage {
    pub(super) fn declare(b: &mut Builder, spec: &FwdSpec) -> Storage {
        let tile = &spec.tile;
        match tile.p_place {
            PPlace::Registers => {
                Storage::Registers(if spec.elem == Elem::F16 { WgmmaType::F16 } else { WgmmaType::Bf16 })
            }
            PPlace::Smem | PPlace::Both => {
                let shape = TileShape::new(spec.elem, tile.tile_m, tile.tile_n);
                let place = b.tile("p", shape);
                let barriers: Vec<_> =
                    (0..tile.consumers).map(|index| b.barrier(&format!("p {index}"), THREADS)).collect();
                Storage::Shared(place, b.barrier_id(barriers[0]))
            }
        }
    }

    /// The place of warpgroup `me`.
    #[track_caller]
    pub(super) fn of(&self, b: &mut Builder, me: V<B32>) -> Place {
        match *self {
            Storage::Registers(ty) => Place::Registers(ty),
            Storage::Shared(tile, first) => Place::Shared(tile.row_block(b, me, 64), b.add(me, first)),
        }
    }
}

impl Place {
    /// Puts P, rounded, there.
    #[track_caller]
    pub(super) fn put(&self, b: &mut Builder, p: &Frag) -> Probabilities {
        match *self {
            Place::Registers(ty) => Probabilities::Registers(p.to_a(b, ty)),
            Place::Shared(tile, barrier) => {
                write(b, p, tile, barrier);
                Probabilities::Shared(tile, barrier)
            }
        }
    }
}

impl Probabilities {
    /// Becomes those of another block; no product reads these any more.
    #[track_caller]
    pub(super) fn set(&mut self, b: &mut Builder, p: &Frag) {
        match self {
            Probabilities::Registers(frag) => {
                let next = p.to_a(b, frag.product_type());
                frag.set(b, &next);
            }
            Probabilities::Shared(tile, barrier) => write(b, p, *tile, *barrier),
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
            Probabilities::Shared(p, _) => gemm_ss(b, *p, v, o),
        }
    }
}

/// Writes P where products read it: their proxy sees it after every thread's fence, and the barrier.
#[track_caller]
fn write(b: &mut Builder, p: &Frag, tile: Tile<'static>, barrier: V<B32>) {
    p.store(b, &tile);
    b.fence(FenceInst::ProxyAsyncShared);
    b.sync_computed(barrier, THREADS);
}
