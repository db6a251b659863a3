//! Decoding: how CTAs split the keys of a few query rows, and how the splits become one result.
//!
//! **Work decomposition** (Stream-K). A work unit is a tile of query rows of one sequence, which may have rows of all
//! query heads that share a head of K and V (PackGQA). It visits a number of KV blocks. The units of a launch lie on a
//! line, one behind the other, with a place for each KV block. Each CTA takes an equal share of the line, whatever the
//! lengths of sequences. [`fa3_sched::WorkDecomposition`] has the arithmetic, which the host and the kernel share.
//!
//! ```text
//! units   ├─ 0 ───┼─ 1 ───────────────────┼─ 2 ───┼─ 3 ───┤      in KV blocks
//! CTAs    ├─ 0 ─────────┼─ 1 ─────────┼─ 2 ─────────┼─ 3 ─┤
//!              │      └────────┬───────────┘
//!              O          splits of unit 1: f32 buffers ──► reduction ──► O
//! ```
//!
//! No earlier kernel makes a schedule. The producer's warps of a CTA find the sequence in which the CTA's share begins,
//! by a sum over the lengths of all sequences ([`Shares::start`]). One thread goes on from there, and sends a
//! [`WorkTileInfo`] message about each work tile to the other warps ([`Shares::walk`]). A work tile is the part of a
//! unit that lies in the CTA's share: the unit's rows, and a range of its KV blocks.
//!
//! **Split.** A work tile that has all KV blocks of its unit writes O and LSE. Any other work tile is a split: it
//! writes O in f32 and LSE to a buffer, at the index that [`Out`] gives (`fwd/epilogue.rs`). A CTA has at most two
//! splits, one at each end of its share.
//!
//! **Reduction.** A later kernel, of `fwd/combine.rs`, adds up the splits of each row by their LSE. It learns of the
//! splits in one of three ways ([`ReductionSource`]): from a [`Reduction`] message for each unit; from one for each
//! CTA, about the unit that begins in it; or, where splits have a fixed number of keys, from the lengths of a sequence.
//! With splits of fixed size, the bits of a sequence's result do not depend on other sequences.

use fa3_ir::BufferId;
use fa3_ir::lang::*;
use fa3_sched::forward::{ReductionSource, SplitKvPlan};
use fa3_sched::packed::{Arrays, ClampedRows, Cut};
use fa3_sched::{
    Int, IterationSpace, ListLens, SeqLens, Split, Tiling, WorkDecomposition as WorkShares, WorkUnits,
};
use fa3_types::Mask;

use super::geometry::WorkTile;
use super::lists::{ListForm, ListLengths};
use super::out::Out;
use super::pages::prefetch_words;
use super::reduction::Reduction;
use super::side_rows::SideRows;
use super::work_tile_info::{Word, WorkTileInfo};
use crate::kernels::params::{Form, Host, InKernel, Pass, Side, copies, param, params};

/// Everything that the code of a split-KV kernel depends on, apart from the tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ShareForm {
    /// The arrays of lengths of Q.
    pub q: Arrays,
    /// The arrays of lengths of K and V.
    pub k: Arrays,
    /// How the reduction kernel learns of the splits.
    pub said_by: ReductionSource,
    /// Whether the tiles of a group of heads are at the same KV block at the same time
    /// ([`fa3_sched::WorkDecomposition::co_scheduled`]).
    pub twins: bool,
    /// Whether a unit of one split is reduced, too ([`fa3_sched::WorkDecomposition::reducing_whole_units`]).
    pub reduces_whole: bool,
    /// The lists, if keys are listed.
    pub lists: Option<ListForm>,
}

impl ShareForm {
    /// The form of a plan whose blocks have `keys` keys.
    pub(crate) fn of(shared: &SplitKvPlan, keys: u32) -> ShareForm {
        let (q, k) = (shared.sequences().q().arrays, shared.sequences().k().arrays);
        let (said_by, reduces_whole) = (shared.reduction_source(), shared.reduces_whole_units());
        let twins = shared.co_schedules_tiles();
        ShareForm { q, k, said_by, twins, reduces_whole, lists: ListForm::of(shared, keys) }
    }
}

params! {
    /// The arguments of a split-KV launch.
    struct Shares {
        /// The lengths of Q and of K.
        q: named SideRows,
        k: named SideRows,
        /// Number of sequences.
        count: u32 = "sequences",
        shares: numbers WorkShares,
        /// The tile sizes and the mask.
        tiling: numbers Tiling,
        /// Number of query heads of a tile.
        pack: u32,
        /// The array of [`Reduction`] messages, for each unit or for each CTA, if messages say what is to be reduced.
        begun: maybe pointer,
        said_by: fixed ReductionSource,
        /// The lengths of lists, if keys are listed: then K has the rows of all blocks of whole lists.
        lists: maybe all ListLengths,
    }
}

copies!(Shares);

impl Shares<Form> {
    /// The parameters that all launches with this mask share.
    pub(crate) fn form(form: ShareForm, mask: Mask) -> Shares<Form> {
        let ShareForm { q, k, said_by, twins, reduces_whole, lists } = form;
        let shares = WorkShares::new(1, 1, 0, Cut::new(1, 1, mask));
        let in_pieces = said_by == ReductionSource::Lengths;
        let shares = if in_pieces { shares.fixed_size(1) } else { shares.or_whole_units(0) };
        let shares = if twins { shares.co_scheduled(1) } else { shares };
        let shares = if reduces_whole { shares.reducing_whole_units() } else { shares };
        let are_equal = lists.is_some_and(|lists| !k.seqused && lists.second_used != Some(true));
        let shares = if are_equal { shares.equal_sequences(1, 1, SeqLens { q: 1, k: 1 }) } else { shares };
        Shares {
            q: SideRows::form(q),
            k: SideRows::form(k),
            count: (),
            shares: shares.map_named(&mut |_, _| ()),
            tiling: Tiling::new(1, 1, 1, mask).map(|_| ()),
            pack: (),
            begun: (!in_pieces).then_some(Elem::U32),
            said_by,
            lists: lists.map(ListLengths::form),
        }
    }
}

impl Shares<Host> {
    /// The arguments of a launch of kernels of this form. `find` gives the buffers of arrays by their names.
    pub(crate) fn of(
        (shared, form): (&SplitKvPlan, ShareForm),
        tiling: Tiling<u32>,
        begun: Option<BufferId>,
        find: impl Fn(&str) -> Option<BufferId>,
    ) -> Shares<Host> {
        let lists = shared.lists().zip(form.lists);
        let lists = lists.map(|(lists, form)| ListLengths::of(lists, find("extra_seqused_k"), form));
        let [q, k] = SideRows::of(shared.sequences(), find);
        let (count, shares) = (shared.sequences().count(), shared.decomposition());
        let (pack, said_by) = (shared.pack(), shared.reduction_source());
        Shares { q, k, count, shares, tiling, pack, begun, said_by, lists }
    }
}

/// The beginning of a CTA's share.
#[derive(Clone, Copy)]
pub(crate) struct Start<'k> {
    line: IterationSpace<U32<'k>>,
    /// The sequence in which the share begins, and the place on the line where that sequence's units begin.
    sequence: U32<'k>,
    first: U32<'k>,
}

/// The rows of a sequence, and its work units.
struct Entry<'k> {
    q: ClampedRows<U32<'k>>,
    k: ClampedRows<U32<'k>>,
    units: WorkUnits<U32<'k>>,
}

impl<'k> Shares<InKernel<'k>> {
    /// Number of groups of heads whose rows share a tile.
    pub(crate) fn heads(&self) -> U32<'k> {
        self.shares.heads()
    }

    /// Prefetches the lengths of the first sequences to L2.
    #[track_caller]
    pub(crate) fn prefetch(&self, b: &'k Builder) {
        for SideRows { cu_seqlens, seqused, leftpad, .. } in [self.q, self.k] {
            let arrays = [cu_seqlens, seqused, leftpad].into_iter().flatten();
            arrays.for_each(|array| prefetch_words(b, b.tid(), array, self.count));
        }
        if let Some(array) = self.lists.and_then(|lists| lists.second_used) {
            prefetch_words(b, b.tid(), array, self.count);
        }
    }

    /// The lengths of the lists of sequence `number`, which must exist, and the base-2 logarithm of the keys of a
    /// block; `None` if keys are not listed.
    #[track_caller]
    pub(crate) fn list_lens(&self, b: &'k Builder, number: U32<'k>) -> Option<(ListLens<U32<'k>>, u32)> {
        self.lists.map(|lists| (lists.lens(b, &self.k, number), lists.form.log_keys))
    }

    /// Number of entries: one for each sequence, and one for the rows behind the last sequence, if Q is packed.
    #[track_caller]
    fn entries(&self) -> U32<'k> {
        if self.q.cu_seqlens.is_some() { self.count + 1 } else { self.count }
    }

    /// Entry `number`, which must exist.
    #[track_caller]
    fn entry(&self, b: &'k Builder, number: U32<'k>) -> Entry<'k> {
        let (is_sequence, read) = (number.lt(self.count), number.min(self.count - 1));
        let q = self.q.of_sequence(b, read, is_sequence);
        let k = match self.list_lens(b, read) {
            // Q is not packed, so that all entries are sequences.
            Some((lens, log_keys)) => ClampedRows::dense(lens.keys(log_keys)),
            None => self.k.of_sequence(b, read, is_sequence),
        };
        let q = match self.q.end(b, self.count) {
            None => q,
            Some(end) => {
                let behind = ClampedRows::behind(end, self.q.rows);
                ClampedRows {
                    row: is_sequence.select(q.row, behind.row),
                    rows: is_sequence.select(q.rows, behind.rows),
                    len: q.len,
                }
            }
        };
        let units = self.shares.units(q.rows, SeqLens { q: q.len, k: k.len });
        Entry { q, k, units }
    }

    /// The rows of Q of sequence `number`, which must exist, and the number of partial results of each of its units.
    /// `None` unless splits have a fixed size.
    #[track_caller]
    pub(crate) fn pieces_of(
        &self,
        b: &'k Builder,
        number: U32<'k>,
    ) -> Option<(ClampedRows<U32<'k>>, U32<'k>)> {
        let Entry { q, units, .. } = self.entry(b, number);
        self.shares.partial_results(&units).map(|pieces| (q, pieces))
    }

    /// Finds where the CTA's share begins. All lanes of a warp must call this.
    #[track_caller]
    pub(super) fn start(&self, b: &'k Builder) -> Start<'k> {
        if let Some(equal) = self.shares.equal() {
            let line = equal.space;
            let [sequence, first] = equal.sequence(self.shares.number(b.cta_x()) * line.share);
            return Start { line, sequence, first };
        }
        let (lane, entries) = (b.tid() & 31, self.entries());
        // Entries behind the last one have no units.
        let units = |number: U32<'k>| {
            let units = self.entry(b, number.min(entries - 1)).units;
            WorkUnits { count: number.lt(entries).select::<B32>(units.count, 0), ..units }
        };
        let of_first = units(lane);
        let count = b.var("units", of_first.count);
        let longest = b.var("longest", of_first.iterations);
        let sum = b.var("places", of_first.all());
        b.for_each((32, entries), 32, |from| {
            let units = units(from + lane);
            count.set(count.get() + units.count);
            longest.set(longest.get().max(units.iterations));
            sum.set(sum.get() + units.all());
        });
        let of_all = |var: Var<'k, B32>| over_warp(var.get(), |a, b| a + b);
        let units_of_all = || [of_all(count), over_warp(longest.get(), |a, b| a.max(b))];
        let line = self.shares.iteration_space(of_all(sum), units_of_all);
        let place = self.shares.number(b.cta_x()) * line.share;

        let (from, before) = (b.var("from", 0), b.var("before", 0));
        let iterations_up_to_lane = |units: WorkUnits<U32<'k>>| sum_up_to_lane(lane, units.on(&line).all());
        let upto = b.var("up to lane", iterations_up_to_lane(of_first));
        b.repeat(|| {
            let end = before.get() + upto.get().shfl_idx(31);
            let next = from.get() + 32;
            b.break_if(place.lt(end) | entries.le(next));
            before.set(end);
            from.set(next);
            upto.set(iterations_up_to_lane(units(next + lane)));
        });
        let passed = (before.get() + upto.get()).le(place).ballot().popc();
        let within = passed.gt(0).select::<B32>(upto.get().shfl_idx(passed - 1), 0);
        Start {
            line,
            sequence: (from.get() + passed).shfl_idx(0),
            first: (before.get() + within).shfl_idx(0),
        }
    }

    /// Runs `each`, in one thread, for every work tile of the CTA's share, and once more at the end. `each` gets a
    /// function that writes the message about the work tile, and a predicate that is false at the end. The last message
    /// has a tile without rows. With `in_role`, all warps of the producer run `each`, which writes in one thread. Only
    /// that thread knows where the walk is.
    #[track_caller]
    pub(super) fn walk(
        &self,
        b: &'k Builder,
        start: Start<'k>,
        in_role: bool,
        each: impl FnOnce(&dyn Fn(&dyn Fn(Word, U32<'k>)), V<'k, Pred>),
    ) {
        let Start { line, sequence, first } = start;
        let cta = b.cta_x();
        if let (ReductionSource::Ctas, Some(begun)) = (self.said_by, self.begun) {
            let store = || Reduction::store_none(b, Reduction::at(begun, cta));
            if in_role { b.once_per_role(store) } else { store() }
        }
        let place = b.var("place", self.shares.number(cta) * line.share);
        let end = (place.now() + line.share).min(line.total);
        let (sequence, first) = (b.var("sequence", sequence), b.var("first", first));
        let zero = || b.var("rows", 0);
        let rows = [zero(), zero(), zero(), zero(), zero()];
        if self.said_by == ReductionSource::Lengths {
            // If splits have a fixed size, the share may begin within a split, which then belongs to the previous CTA.
            b.if_uniform(place.get().lt(end), || {
                let Entry { units, .. } = self.entry(b, sequence.get());
                place.set(first.get() + self.shares.begin(&units, place.get() - first.get()));
            });
        }
        b.repeat(|| {
            let is_there = place.get().lt(end);
            let write = |store: &dyn Fn(Word, U32<'k>)| {
                b.if_else_uniform(
                    is_there,
                    || {
                        b.repeat(|| {
                            let Entry { q, k, units } = self.entry(b, sequence.get());
                            for (var, number) in rows.iter().zip([q.row, q.rows, q.len, k.row, k.len]) {
                                var.set(number);
                            }
                            let behind = first.get() + units.on(&line).all();
                            b.break_if(place.get().lt(behind));
                            first.set(behind);
                            sequence.set(sequence.get() + 1);
                        });
                        let [q_row, q_rows, q_len, k_row, k_len] = rows.each_ref().map(|var| var.get());
                        let lens = SeqLens { q: q_len, k: k_len };
                        let units = self.shares.units(q_rows, lens).on(&line);
                        let from = place.get();
                        let segment = self.shares.split(&units, from - first.get(), end - from);
                        let Split { m_block, head, iterations, .. } = segment;
                        let head = self.shares.head(head, cta);
                        let row = m_block * self.tiling.tile_m();
                        if let Some(begun) = self.begun {
                            let parts = segment.splits(line.share);
                            let (at, says) = if self.said_by == ReductionSource::Units {
                                let unit = (sequence.get() * self.heads() + head) * units.tiles + m_block;
                                (unit, segment.first.eq(0))
                            } else {
                                (cta, parts.gt(0))
                            };
                            b.if_uniform(says, || {
                                let positions = q_rows.sub_sat(row).min(self.tiling.tile_m());
                                let rows = parts.gt(0).select::<B32>(positions * self.pack, 0);
                                let at = Reduction::at(begun, at);
                                let (splits, batch, used) = (parts, sequence.get(), q_len);
                                let (heads, first) = (head, row);
                                Reduction { rows, splits, batch, heads, q_row, first, used, cta }
                                    .store(b, at);
                            });
                        }
                        let kv = self.shares.blocks(self.tiling.kv_range(m_block, lens), &segment);
                        let batch = sequence.get();
                        let out = self.shares.partial_index(&segment, cta);
                        WorkTileInfo { batch, q_row, k_row, lens, q_rows, head, row, kv }.store(store);
                        store(Word::Extra, out);
                        place.set(from + iterations);
                    },
                    || WorkTileInfo::store_end(|| b.value(0), true, store),
                );
            };
            each(&write, is_there);
        });
    }

    /// The work tile that a message describes; `read` gives the message's words.
    #[track_caller]
    pub(super) fn work(&self, read: impl Fn(Word) -> U32<'k>) -> WorkTile<'k> {
        let info = WorkTileInfo::load(&read);
        let out = Some(Out(read(Word::Extra)));
        WorkTile { out, ..info.work(&self.tiling) }
    }
}

/// The reduction of `x` over the lanes of a warp, in each lane.
#[track_caller]
fn over_warp<'k>(x: U32<'k>, reduce: fn(U32<'k>, U32<'k>) -> U32<'k>) -> U32<'k> {
    [16, 8, 4, 2, 1].into_iter().fold(x, |x, mask: u32| reduce(x, x.shfl_bfly(mask))).shfl_idx(0)
}

/// The sum of `x` over all lanes up to the calling lane, which is included.
#[track_caller]
fn sum_up_to_lane<'k>(lane: U32<'k>, x: U32<'k>) -> U32<'k> {
    [1, 2, 4, 8, 16].into_iter().fold(x, |sum, distance: u32| {
        let with = sum + sum.shfl_up(distance);
        lane.ge(distance).select(with, sum)
    })
}
