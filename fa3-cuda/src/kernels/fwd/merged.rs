//! Pieces of keys of a fixed size that a consumer merges in its main loop, one after the other: the recurrence of the
//! reduction ([`parts::combine`](crate::kernels::parts::combine)), with the same bits.
//!
//! ```text
//! M' = max(M, lse)      a = exp(M - M')      b = exp(lse - M')      L = L a + b      O = O a + b o
//! ```
//!
//! The producer knows nothing of pieces: it loads blocks as for a tile of one piece. Before the first block of a piece
//! counts, a consumer merges its accumulators with O of the pieces so far, and the softmax starts anew. No thread reads
//! O of another thread.

use fa3_ir::Address;
use fa3_ir::lang::*;
use fa3_sched::forward::CtaTile;

use super::p_type::PType;
use super::row_softmax::{Finished, RowSoftmax};
use super::scales;
use super::state::Fwd;
use crate::kernels::parts::combine::{end, reference, weight};
use crate::kernels::parts::geometry::WorkTile;
use crate::kernels::parts::kv_blocks::KvBlock;
use crate::kernels::parts::score::Exponents;

/// Bytes of a vector of O in memory. Vector i of all threads lies before vector i + 1.
const VECTOR: u32 = 16;

/// The pieces of a tile so far.
pub(super) struct Merged<'k> {
    /// The largest LSE: -inf if all pieces are empty.
    max: RowsVar<'k>,
    /// Sum of exp(LSE - max) over the pieces.
    sum: RowsVar<'k>,
    o: Running<'k>,
    /// The scale of e4m3 V.
    of_v: Option<V<'k, F32>>,
}

/// O of the pieces so far.
enum Running<'k> {
    Registers(Frag<'k>),
    Memory(Memory<'k>),
}

/// The calling thread's part of O in memory.
struct Memory<'k> {
    builder: &'k Builder,
    tile: CtaTile,
    place: Place<'k>,
    /// 0 if no piece has been stored yet.
    has_pieces: Var<'k, B32>,
}

/// The address of a vector, and the registers that it holds, with their positions.
type Vector<'k> = (Address, Vec<(At, Var<'k, F32>)>);

/// Memory for the CTA's tile of O, or for the tiles of all CTAs.
#[derive(Clone, Copy)]
enum Place<'k> {
    Shared(Region),
    Workspace(U64<'k>),
}

impl<'k> Memory<'k> {
    #[track_caller]
    fn new(fwd: &Fwd<'k>) -> Option<Memory<'k>> {
        let shared = fwd.running_o.map(Place::Shared);
        let place = shared.or(fwd.params.running_o.map(Place::Workspace))?;
        let builder = fwd.builder;
        Some(Memory { builder, tile: fwd.spec.tile, place, has_pieces: builder.var("has_pieces", 0) })
    }

    /// The registers of `o`, four at a time, and the address of each vector of them. Addresses are computed again for
    /// each piece, because keeping them would occupy registers all along.
    #[track_caller]
    fn vectors(&self, o: &Frag<'k>) -> Vec<Vector<'k>> {
        let (b, consumers) = (self.builder, 128 * self.tile.consumers);
        let thread = (b.tid() - (self.tile.threads() - consumers)) * VECTOR;
        let at: Box<dyn Fn(i32) -> Address + 'k> = match self.place {
            Place::Shared(region) => {
                let first = b.address(region) + thread;
                Box::new(move |offset| first.at(offset).into())
            }
            Place::Workspace(workspace) => {
                let first = b.cta_x().mad_wide(self.tile.bytes_of_o(), workspace) + thread.to_u64();
                Box::new(move |offset| first.at(offset).into())
            }
        };
        let elements: Vec<_> = o.elements().collect();
        let offsets = (0..).map(|vector| vector * (consumers * VECTOR) as i32);
        offsets.map(at).zip(elements.chunks(4).map(<[_]>::to_vec)).collect()
    }

    /// Adds O in memory to a piece's `o`.
    #[track_caller]
    fn add_to(&self, o: &Frag<'k>, [of_before, of_piece]: [Rows<'k>; 2]) {
        self.builder.if_uniform(self.has_pieces.get().ne(0), || {
            for (from, registers) in self.vectors(o) {
                let before = self.builder.load_vector::<F32, 4>(from);
                for ((at, o), before) in registers.into_iter().zip(before) {
                    o.update(|o| of_piece[at].fma(o, before * of_before[at]));
                }
            }
        });
    }

    #[track_caller]
    fn store(&self, o: &Frag<'k>) {
        for (to, registers) in self.vectors(o) {
            self.builder.store_vector(to, [0, 1, 2, 3].map(|index| registers[index].1.now()));
        }
        self.has_pieces.set(1);
    }
}

impl<'k> Merged<'k> {
    /// No pieces of a tile yet; `None` if the kernel merges none.
    #[track_caller]
    pub(super) fn new(fwd: &Fwd<'k>, work: &WorkTile<'k>) -> Option<Merged<'k>> {
        let (b, columns) = (fwd.builder, fwd.spec.tile.columns());
        fwd.spec.merges?;
        let o = Memory::new(fwd).map_or_else(|| Running::Registers(Frag::zeros(b, columns)), Running::Memory);
        let max = b.rows_var("merged_max", f32::NEG_INFINITY);
        Some(Merged { max, sum: b.rows_var("merged_sum", 0.0), o, of_v: scales::of_v(fwd, work, None) })
    }

    /// Sets `p` to P of a block whose scores are `s`. If the block begins a piece, first merges the piece before, whose
    /// sums are `o`.
    #[track_caller]
    pub(super) fn step(
        &self,
        softmax: &RowSoftmax<'k>,
        begins_piece: V<'k, Pred>,
        (s, exponents, ty): (&mut Frag<'k>, Option<&Exponents<'_, 'k>>, PType),
        (p, o): (&mut AFrag<'k>, &mut Frag<'k>),
    ) {
        let b = o.builder();
        b.if_uniform(begins_piece, || {
            self.add(o, softmax);
            if let Running::Memory(memory) = &self.o {
                memory.store(o);
            }
            o.map_in_place(|_, _| 0.0);
            softmax.restart();
            p.set(&softmax.first(s, exponents, ty));
        });
        b.if_uniform(begins_piece.negated(), || p.set(&softmax.step_lazily(s, exponents, ty, o)));
    }

    /// Merges a piece whose sums are `o`. Where O of the pieces so far lies in memory, the result is in `o`. Gives the
    /// largest scores of all pieces so far, if they are a result.
    #[track_caller]
    fn add(&self, o: &mut Frag<'k>, softmax: &RowSoftmax<'k>) -> Option<Rows<'k>> {
        let Finished { inverse, lse, max_logits, .. } = softmax.finish(None);
        let max = self.max.get();
        let highest = max.max(lse);
        let reference = highest.map(reference);
        let [of_before, of_piece] = [max, lse].map(|lse| lse.zip(reference, weight));
        self.max.set(highest);
        self.sum.set(self.sum.get() * of_before + of_piece);
        o.scale_rows(self.of_v.map_or(inverse, |of_v| inverse.map(|inverse| inverse * of_v)));
        // As in the reduction, a piece without weight does not count, even if its O is NaN.
        let empty = of_piece.map(|weight| weight.eq(0.0));
        o.builder().if_uniform(empty.any().vote_any(), || {
            o.map_in_place(|o, at| empty[at].select(0.0, o));
        });
        match &self.o {
            Running::Registers(running) => {
                for ((at, o), (_, running)) in o.elements().zip(running.elements()) {
                    running.update(|running| of_piece[at].fma(o, running * of_before[at]));
                }
            }
            Running::Memory(memory) => memory.add_to(o, [of_before, of_piece]),
        }
        max_logits
    }

    /// Merges the tile's last piece, whose sums are `o`. Gives O, the factor of its rows, their LSE, with the rows'
    /// sinks, and their largest scores.
    #[track_caller]
    pub(super) fn end(
        self,
        (mut o, softmax): (Frag<'k>, &RowSoftmax<'k>),
        sinks: Option<Rows<'k>>,
        lse_without_sink: bool,
    ) -> (Frag<'k>, (Rows<'k>, Rows<'k>, Option<Rows<'k>>)) {
        let max_logits = self.add(&mut o, softmax);
        let (max, sum) = (self.max.get(), self.sum.get());
        let ends = Half::BOTH.map(|half| {
            let sink = sinks.map(|sinks| sinks[half]);
            end((max[half], sum[half]), sink, lse_without_sink)
        });
        let o = if let Running::Registers(running) = self.o { running } else { o };
        (o, (Rows(ends.map(|(scale, _)| scale)), Rows(ends.map(|(_, lse)| lse)), max_logits))
    }
}

/// Sets `p` to P of a block whose scores are `s`, under lazy rescaling. `o` has the sums of the blocks before.
#[track_caller]
pub(super) fn step_lazily<'k>(
    (softmax, merged): (&RowSoftmax<'k>, Option<&Merged<'k>>),
    block: &KvBlock<'k>,
    (s, exponents, ty): (&mut Frag<'k>, Option<&Exponents<'_, 'k>>, PType),
    (p, o): (&mut AFrag<'k>, &mut Frag<'k>),
) {
    match merged.zip(block.begins_piece) {
        Some((merged, begins_piece)) => merged.step(softmax, begins_piece, (s, exponents, ty), (p, o)),
        None => p.set(&softmax.step_lazily(s, exponents, ty, o)),
    }
}
