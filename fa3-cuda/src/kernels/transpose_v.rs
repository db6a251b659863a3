//! V of e4m3 transposed, before a forward pass that reads each block of it many times: see
//! [`ValueLayout::Transposed`](fa3_types::ValueLayout). Codes keep their bits. A CTA has 128 keys of a head.
//!
//! Keys are rows of the tile in their own order, as the TMA writes them. So reads of shared memory take four times as
//! long as in the order that the quantizer has, which is still less than the tile's share of the memory's time.

use fa3_ir::lang::*;
use fa3_ir::{BufferId, Program};
use fa3_sched::forward::V_TILE_KEYS;
use fa3_sched::{Decoder, Longest, Order, TileCounts};
use fa3_types::TensorDesc;

use super::params::{Declare, Fill, Form, Host, Pass, Side, TensorForm};
use super::parts::key_rows::KeyRows;
use super::parts::store_rows::Global;
use super::tensors::{transposed_strides, view};
use super::{KernelSpec, Spec};

const THREADS: u32 = 256;

/// Heads are the fastest: neighbouring CTAs read memory that is near.
const ORDER: Order = Order::LongestFirst { section: u32::MAX, longest: Longest::First };

/// What the kernel's code depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TransposeSpec {
    /// Columns of V, a multiple of 16.
    pub head_dim: u32,
}

/// What a launch passes to the kernel.
struct Params<S: Side> {
    v: S::Tensor,
    codes: S::Pointer,
    /// Bytes from one sequence, head, row of keys to the next.
    strides: [S::U64; 3],
    decoder: Decoder<S::U32>,
}

impl<A: Side> Params<A> {
    /// Goes over them in the order in which they are passed.
    #[track_caller]
    fn pass<B: Side>(self, by: &mut impl Pass<A, B>) -> Params<B> {
        let [batch, head, row] = self.strides;
        Params {
            v: by.tensor("v", self.v),
            codes: by.pointer("v_transposed", self.codes),
            strides: [by.u64("batch_bytes", batch), by.u64("head_bytes", head), by.u64("row_bytes", row)],
            decoder: self.decoder.map_named(&mut |name: &str, number| by.u32(name, number)),
        }
    }
}

impl KernelSpec for TransposeSpec {
    fn kernel(&self) -> Kernel {
        kernel(self)
    }
}

fn kernel(spec: &TransposeSpec) -> Kernel {
    let head_dim = spec.head_dim;
    // Whole panels; what a row has fewer is zeros.
    let shape = TileShape::new(
        Elem::E4m3,
        V_TILE_KEYS,
        head_dim.next_multiple_of(if head_dim <= 64 { 64 } else { 128 }),
    );
    Kernel::build("transpose_v", Launch::threads(THREADS), |b| {
        let form = Params::<Form> {
            v: TensorForm { tile: shape, rank: 4, rows: 2 },
            codes: Elem::E4m3,
            strides: [(); 3],
            decoder: Decoder::new(TileCounts::ONE, ORDER).map(|_| ()),
        };
        let params = form.pass(&mut Declare(b));
        let (tile, arrived) = (b.tile("v", shape), b.mbarriers("arrived", 1, 1));
        b.init_mbarriers();
        // CTAs of the next kernel may take their places as ours leave them, and begin when all of ours are done.
        b.launch_dependents();
        b.grid_dependency_wait();
        let fa3_sched::Tile { m_block, head, batch } = params.decoder.decode(b.cta_x());
        b.once_per_role(|| {
            b.mbarrier_arrive_expect(arrived, shape.bytes());
            let row = m_block * V_TILE_KEYS;
            b.load_tile(tile, &params.v, (0, head, row, batch), arrived, LoadOptions::default());
        });
        b.mbarrier_wait(arrived, 0);
        let codes = KeyRows { tile, row_of: |key| key, keys: V_TILE_KEYS, head_dim, threads: THREADS };
        let to = Global { address: params.codes, strides: params.strides };
        codes.store(b, to, [batch, head, m_block], None);
    })
}

/// The step that transposes a tensor of so many tiles into `codes`.
pub(super) fn step(
    program: &mut Program<Spec>,
    (v, tensor): (BufferId, &TensorDesc),
    codes: BufferId,
    tiles: TileCounts,
) {
    let mut args = Fill::default();
    let params = Params::<Host> {
        v: view(v, tensor),
        codes,
        strides: transposed_strides(tensor.shape),
        decoder: Decoder::new(tiles, ORDER),
    };
    _ = params.pass(&mut args);
    let spec = TransposeSpec { head_dim: tensor.shape.head_dim as u32 };
    program.step(spec.into(), [tiles.m_blocks * tiles.heads * tiles.batch, 1, 1], args.0);
}
