//! The end of a tile: O and LSE to global memory.

use fa3_ir::lang::*;

use super::consumer::Sum;
use super::params::Apart;
use super::row_softmax::Finished;
use super::{Fwd, channels, descales};
use crate::kernels::parts::geometry::Work;
use crate::kernels::parts::store_rows::{Order, StoreRows};

/// Writes the rows of a tile that there are; the thread's are `row` and 8 more.
#[track_caller]
pub(super) fn write<'k>(fwd: &Fwd<'k>, sum: Sum<'k>, work: &Work<V<'k, B32>>, row: V<'k, B32>) {
    let (b, params) = (fwd.builder, &fwd.params);
    let rows = work.rows_of_o();
    let Sum { mut o, softmax, v_scale } = sum;
    let sink =
        params.sink.map(|sinks| b.load::<F32>(work.head.mad_wide(4, sinks)) * std::f32::consts::LOG2_E);
    let Finished { inverse, lse, of_keys } = softmax.finish(sink); // A1:24
    let (inverse, lse) = unless_unused(work, row, (inverse, lse));
    let inside = [row, row + 8].map(|row| row.lt(rows));
    let quad = b.tid() & 3;
    let in_memory = work.listed.map_or(row, |listed| listed.q_row + row);

    // All threads of a quad have the same LSE. A null pointer means: do not write.
    let writes = quad.eq(0) & params.lse.ne(0u64);
    let before = match &params.apart {
        None => work.batch.mad(params.heads, work.head).mul_wide(rows),
        Some(Apart { lse, lse_head, .. }) => work.batch.to_u64() * *lse + work.head.to_u64() * *lse_head,
    };
    let at = params.lse + ((before + in_memory.to_u64()) << 2);
    for half in Half::BOTH {
        let (inside, offset) = (inside[half as usize], 4 * half.rows() as i32);
        b.guarded(inside & writes, || b.store(at.at(offset), lse[half]));
    }

    let scale =
        descales::of_v(fwd, work, v_scale).map_or(inverse, |of_v| inverse.map(|inverse| inverse * of_v));
    o.scale_rows(scale); // A1:24
    let order = if fwd.transposed.is_some() { Order::EvensFirst } else { Order::Natural };
    channels::restore(fwd, &o, work, order, of_keys);
    // A row that has seen no key is 0, whatever was multiplied by its zeros.
    let empty = inverse.map(|inverse| inverse.eq(0.0));
    b.if_uniform(empty.any().vote_any(), || o.map_in_place(|o, at| empty[at].select(0.0, o)));

    let store = StoreRows { elem: fwd.spec.output, cols: fwd.spec.head_dim_v, order };
    store.store(o, params.o.global(), [work.batch, work.head, in_memory], inside); // A1:25
}

/// By what O is multiplied, and LSE: of a row that takes no part in attention, those of a row without keys.
#[track_caller]
fn unless_unused<'k>(
    work: &Work<V<'k, B32>>,
    row: V<'k, B32>,
    (Rows(inverse), Rows(lse)): (Rows<'k>, Rows<'k>),
) -> (Rows<'k>, Rows<'k>) {
    if work.listed.is_none() {
        return (Rows(inverse), Rows(lse));
    }
    let [upper, lower] = [row, row + 8].map(|row| row.lt(work.lens.q));
    let used = |[first, second]: [V<'k, F32>; 2], unused: f32| {
        Rows([upper.select(first, unused), lower.select(second, unused)])
    };
    (used(inverse, 0.0), used(lse, f32::NEG_INFINITY))
}
