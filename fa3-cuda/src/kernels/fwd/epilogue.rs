//! The epilogue of a tile: it writes O and LSE to global memory.

use fa3_ir::lang::*;

use super::channels;
use super::merged::Merged;
use super::params::{BatchStrides, Partials};
use super::row_softmax::{Finished, RowSoftmax};
use super::scales::{self, VScale};
use super::state::Fwd;
use super::tile_rows::{PackedRow, ThreadRow, TileRow};
use crate::kernels::params::InKernel;
use crate::kernels::parts::geometry::WorkTile;
use crate::kernels::parts::store_rows::{ColumnOrder, Columns, StoreRows};
use crate::kernels::parts::visible::Position;

/// The destination of a thread's two rows.
struct Destination<'k> {
    /// Whether each row exists in O.
    inside: [V<'k, Pred>; 2],
    /// Whether the thread writes LSE of its rows. One of the four threads of a quad, which share rows, writes it.
    writes_lse: V<'k, Pred>,
    /// The addresses of LSE of both rows.
    lse: [GlobalAddr; 2],
    /// The addresses of the largest scores of both rows, if they are a result.
    max_logits: Option<[GlobalAddr; 2]>,
    o: OfO<'k>,
}

/// The place of a thread's two rows in O.
enum OfO<'k> {
    /// The first row's index in the tile's head; the second row follows 8 rows later.
    Row(U32<'k>),
    /// The addresses of both rows.
    At([U64<'k>; 2]),
}

/// Finishes a tile's softmax: computes the factor of O, and LSE, of the thread's rows `row` and `row` + 8.
#[track_caller]
pub(super) fn finish<'k>(
    fwd: &Fwd<'k>,
    softmax: RowSoftmax<'k>,
    work: &WorkTile<'k>,
    row: ThreadRow<'k>,
) -> Finished<'k> {
    let softmax = if fwd.spec.lse_without_sink { softmax.with_lse_without_sink() } else { softmax };
    let sink = fwd.params.sink.map(|sinks| sinks_of(fwd, sinks, (work, row), true));
    let Finished { inverse, lse, of_keys, max_logits } = softmax.finish(sink); // A1:24
    let (inverse, lse, max_logits) = unless_unused(fwd, work, row, (inverse, lse, max_logits));
    Finished { inverse, lse, of_keys, max_logits }
}

/// Like [`finish`], for the last of a tile's pieces, which have been merged otherwise. Gives O of all pieces as well.
#[track_caller]
pub(super) fn finish_merged<'k>(
    fwd: &Fwd<'k>,
    merged: Merged<'k>,
    last: (Frag<'k>, &RowSoftmax<'k>),
    (work, row): (&WorkTile<'k>, ThreadRow<'k>),
) -> (Frag<'k>, Finished<'k>) {
    let sinks = fwd.params.sink.map(|sinks| sinks_of(fwd, sinks, (work, row), false));
    let (o, ends) = merged.end(last, sinks, fwd.spec.lse_without_sink);
    let (inverse, lse, max_logits) = unless_unused(fwd, work, row, ends);
    (o, Finished { inverse, lse, of_keys: None, max_logits })
}

/// The results for some columns of a tile of O, as the epilogue writes them.
pub(super) struct Results<'k> {
    /// The accumulators, not yet divided by row sums.
    pub(super) o: Frag<'k>,
    /// The scale in units of which O is kept, if V has one per block.
    pub(super) v_scale: Option<VScale<'k>>,
    /// The factor of each row of O: 1 / row_sum.
    pub(super) inverse: Rows<'k>,
    /// LSE of the rows; `None` if another warpgroup has the same rows and writes it.
    pub(super) lse: Option<Rows<'k>>,
    /// The largest score of the rows, if it is a result.
    pub(super) max_logits: Option<Rows<'k>>,
    /// The sum of P over keys, if there is a sink.
    pub(super) of_keys: Option<Rows<'k>>,
    /// The columns of O that `o` holds.
    pub(super) columns: Columns,
}

/// Writes the tile's valid rows. The thread has the rows `row` and `row` + 8.
#[track_caller]
pub(super) fn write<'k>(fwd: &Fwd<'k>, results: Results<'k>, work: &WorkTile<'k>, row: ThreadRow<'k>) {
    let (b, params) = (fwd.builder, &fwd.params);
    let Results { mut o, v_scale, inverse, lse, max_logits, of_keys, columns } = results;
    let destination = match row {
        ThreadRow::OfHead(row) => of_head(fwd, work, row),
        ThreadRow::OfHeads(row) => of_heads(fwd, work, row),
    };
    let store_lse = || {
        if let Some((largest, to)) = max_logits.zip(destination.max_logits) {
            let is_first = (b.tid() & 3).eq(0);
            for half in Half::BOTH {
                let at = half as usize;
                b.guarded(destination.inside[at] & is_first, || b.store(to[at], largest[half]));
            }
        }
        let Some(lse) = lse else { return };
        for half in Half::BOTH {
            let at = half as usize;
            b.guarded(destination.inside[at] & destination.writes_lse, || {
                b.store(
                    destination.lse[at],
                    params.stored_lse.map_or(lse[half], |form| form.stored(lse[half])),
                )
            });
        }
    };
    let split = work.out.zip(params.partials.as_ref());
    if split.is_none() {
        store_lse();
    }

    // Merged pieces have been multiplied by the scale of V.
    let of_v = fwd.spec.merges.is_none().then(|| scales::of_v(fwd, work, v_scale)).flatten();
    let scale = of_v.map_or(inverse, |of_v| inverse.map(|inverse| inverse * of_v));
    o.scale_rows(scale); // A1:24
    let order = if fwd.transposed.is_some() { ColumnOrder::EvensFirst } else { ColumnOrder::Natural };
    channels::restore(fwd, &o, work, order, of_keys);
    // A row that has seen no key becomes 0. Its accumulators may be NaN, because V may be. Where pieces are merged,
    // only a padding row's may be, and its LSE is -inf.
    let empty = match lse.filter(|_| fwd.spec.merges.is_some()) {
        Some(lse) => lse.map(|lse| lse.eq(f32::NEG_INFINITY)),
        None => inverse.map(|inverse| inverse.eq(0.0)),
    };
    b.if_uniform(empty.any().vote_any(), || o.map_in_place(|o, at| empty[at].select(0.0, o)));

    let store = StoreRows { elem: fwd.spec.output, columns, order };
    let to = params.o.global();
    let store_o = |o| match destination.o {
        OfO::Row(row) => store.store(o, to, [work.batch, work.head, row], destination.inside), // A1:25
        OfO::At(rows) => store.store_at(o, rows, destination.inside),
    };
    let Some(((out, partials), row)) = split.zip(row.packed()) else { return store_o(o) };
    b.if_uniform(out.is_not_tensor(), || match partials.rows {
        None => {
            let rows = rows_of_split(fwd, partials, out.split());
            store_part(
                fwd,
                rows,
                |row, array| row.mad_wide(4, array),
                (&o, columns, lse, max_logits),
                destination.inside,
            );
        }
        Some(all) => {
            let rows = rows_of_piece(fwd, partials, (out.split(), all), work, row);
            let results = (&o, columns, lse, max_logits);
            store_part(fwd, rows, |row, array| array + (row << 2), results, destination.inside);
        }
    });
    b.if_uniform(out.is_tensor(), || {
        store_lse();
        store_o(o);
    });
}

/// The destination of a thread's two rows in the buffer of a split.
struct OfPart<'k, T> {
    quad: U32<'k>,
    /// The rows' indices in the buffer.
    rows: [T; 2],
    /// The addresses of the thread's first column of O in each row.
    columns: [U64<'k>; 2],
}

/// The destination of the thread's rows in the buffer of a split that has the rows of one tile.
#[track_caller]
fn rows_of_split<'k>(
    fwd: &Fwd<'k>,
    partials: &Partials<InKernel<'k>>,
    split: U32<'k>,
) -> OfPart<'k, U32<'k>> {
    let (b, cols) = (fwd.builder, fwd.spec.head_dim_v);
    let quad = b.tid() & 3;
    let first = fwd.row_in_tile(b.warpgroup());
    let rows = Half::BOTH.map(|half| split.mad(fwd.spec.tile.tile_m, first + half.rows()));
    let columns = rows.map(|row| quad.mad_wide(8, row.mad_wide(4 * cols, partials.o)));
    OfPart { quad, rows, columns }
}

/// The destination of the thread's rows in the buffer of a fixed-size split, which has `all` rows, laid out like LSE.
#[track_caller]
fn rows_of_piece<'k>(
    fwd: &Fwd<'k>,
    partials: &Partials<InKernel<'k>>,
    (piece, all): (U32<'k>, U64<'k>),
    work: &WorkTile<'k>,
    row: PackedRow<'k>,
) -> OfPart<'k, U64<'k>> {
    let quad = fwd.builder.tid() & 3;
    let before = piece.to_u64() * all;
    let first = first_row(fwd, work);
    let rows = fwd.rows_of_heads(work, row);
    let rows = rows.map(|row| before + number_of_lse(fwd, work, first, row));
    let bytes = u64::from(4 * fwd.spec.head_dim_v);
    let columns = rows.map(|row| quad.mad_wide(8, partials.o + row * bytes));
    OfPart { quad, rows, columns }
}

/// Writes O and LSE of a split, and the largest scores, if they are a result. `at_row` gives the address of a row's
/// element in an array of the shape of LSE.
#[track_caller]
fn store_part<'k, T: Copy>(
    fwd: &Fwd<'k>,
    OfPart { quad, rows, columns }: OfPart<'k, T>,
    at_row: impl Fn(T, U64<'k>) -> U64<'k>,
    (o, of_o, lse, max_logits): (&Frag<'k>, Columns, Option<Rows<'k>>, Option<Rows<'k>>),
    inside: [V<'k, Pred>; 2],
) {
    let (b, partials) = (fwd.builder, fwd.params.partials.as_ref().expect("there are splits"));
    let arrays = [(lse, Some(partials.lse)), (max_logits, partials.max_logits)];
    for (numbers, array) in arrays.into_iter().filter_map(|(numbers, array)| numbers.zip(array)) {
        for half in Half::BOTH {
            let at = half as usize;
            let is_first = inside[at] & quad.eq(0);
            b.guarded(is_first, || b.store(at_row(rows[at], array), numbers[half]));
        }
    }
    for (at, pair) in o.pairs().filter(|(at, _)| at.col < of_o.count) {
        let half = at.half as usize;
        let to = columns[half].at(4 * (of_o.first + at.col) as i32);
        // A copied variable would stay live from tile to tile, and tiles as wide as this have no registers for it.
        let is_full = fwd.spec.tile.column_groups() > 1 || fwd.spec.tile.qv;
        let read = |var: Var<'k, F32>| if is_full { var.now() } else { var.get() };
        b.guarded(inside[half], || b.store_vector(to, pair.map(read)));
    }
}

/// The destination of a tile's rows, if the tile has rows of one head.
#[track_caller]
fn of_head<'k>(fwd: &Fwd<'k>, work: &WorkTile<'k>, Position(row): Position<'k>) -> Destination<'k> {
    let params = &fwd.params;
    let rows = work.rows_of_o();
    let inside = [row, row + 8].map(|row| row.lt(rows));
    let quad = fwd.builder.tid() & 3;
    let in_memory = work.varlen.map_or(row, |varlen| varlen.q_row + row);
    // A null pointer means that the caller does not want LSE.
    let writes_lse = quad.eq(0) & params.lse.ne(0u64);
    let before = match &params.strides {
        None => work.batch.mad(params.heads, work.head).mul_wide(rows),
        Some(strides) => before(strides, work, work.head),
    };
    let bytes = (before + in_memory.to_u64()) << 2;
    let of = |array: U64<'k>| {
        let at = array + bytes;
        Half::BOTH.map(|half| at.at(4 * half.rows() as i32))
    };
    let (lse, max_logits) = (of(params.lse), params.max_logits.map(of));
    Destination { inside, writes_lse, lse, max_logits, o: OfO::Row(in_memory) }
}

/// The destination of a tile's rows, if the tile may have rows of several heads (PackGQA).
#[track_caller]
fn of_heads<'k>(fwd: &Fwd<'k>, work: &WorkTile<'k>, row: PackedRow<'k>) -> Destination<'k> {
    let rows = fwd.rows_of_heads(work, row);
    let (b, params) = (fwd.builder, &fwd.params);
    let first = first_row(fwd, work);
    let of = |array: U64<'k>| rows.map(|row| (array + (number_of_lse(fwd, work, first, row) << 2)).at(0));
    let (lse, max_logits) = (of(params.lse), params.max_logits.map(of));
    Destination {
        inside: rows.map(|row| row.is_inside & row.position.0.lt(work.rows_of_o())),
        writes_lse: (b.tid() & 3).eq(0) & params.lse.ne(0u64),
        lse,
        max_logits,
        o: OfO::At(rows.map(|row| params.o.global().at([work.batch, row.head, first + row.position.0]))),
    }
}

/// The index in LSE of a row of a PackGQA tile. In memory, the sequence begins with row `first`.
#[track_caller]
fn number_of_lse<'k>(fwd: &Fwd<'k>, work: &WorkTile<'k>, first: U32<'k>, row: TileRow<'k>) -> U64<'k> {
    let strides = fwd.params.strides.as_ref().expect("tiles of several heads have lengths that are data");
    before(strides, work, row.head) + (first + row.position.0).to_u64()
}

/// The row in memory with which a work tile's sequence begins.
#[track_caller]
fn first_row<'k>(fwd: &Fwd<'k>, work: &WorkTile<'k>) -> U32<'k> {
    work.varlen.map_or(fwd.builder.value(0), |varlen| varlen.q_row)
}

/// Number of elements of LSE before the elements of this sequence and head.
#[track_caller]
fn before<'k>(strides: &BatchStrides<InKernel<'k>>, work: &WorkTile<'k>, head: U32<'k>) -> U64<'k> {
    work.batch.to_u64() * strides.lse + head.to_u64() * strides.lse_head
}

/// Sinks of both rows, in base 2 or in natural units. They are -inf in a split, because the reduction adds the sink,
/// once.
#[track_caller]
fn sinks_of<'k>(
    fwd: &Fwd<'k>,
    sinks: U64<'k>,
    (work, row): (&WorkTile<'k>, ThreadRow<'k>),
    base_two: bool,
) -> Rows<'k> {
    let load = |head: U32<'k>| {
        let sink = fwd.builder.load::<F32>(head.mad_wide(4, sinks));
        if base_two { sink * std::f32::consts::LOG2_E } else { sink }
    };
    let Some((out, row)) = work.out.zip(row.packed()) else {
        let sink = load(work.head);
        return Rows([sink, sink]);
    };
    // A row beyond the tile's rows reads the sink of the last head.
    let rows = fwd.rows_of_heads(work, row);
    let sinks = rows.map(|row| load(row.head.min(fwd.params.heads - 1)));
    Rows(sinks).map(|sink| out.is_tensor().select(sink, f32::NEG_INFINITY))
}

/// Replaces the factor of O, LSE and the largest score of padding rows by the values of a row without keys: 0, -inf and
/// -inf.
#[track_caller]
fn unless_unused<'k>(
    fwd: &Fwd<'k>,
    work: &WorkTile<'k>,
    row: ThreadRow<'k>,
    (Rows(inverse), Rows(lse), max_logits): (Rows<'k>, Rows<'k>, Option<Rows<'k>>),
) -> (Rows<'k>, Rows<'k>, Option<Rows<'k>>) {
    if work.varlen.is_none() {
        return (Rows(inverse), Rows(lse), max_logits);
    }
    let positions = match row {
        ThreadRow::OfHead(Position(row)) => [row, row + 8],
        ThreadRow::OfHeads(row) => fwd.rows_of_heads(work, row).map(|row| row.position.0),
    };
    let [upper, lower] = positions.map(|row| row.lt(work.lens.q));
    let used = |[first, second]: [V<'k, F32>; 2], unused: f32| {
        Rows([upper.select(first, unused), lower.select(second, unused)])
    };
    let max_logits = max_logits.map(|Rows(largest)| used(largest, f32::NEG_INFINITY));
    (used(inverse, 0.0), used(lse, f32::NEG_INFINITY), max_logits)
}
