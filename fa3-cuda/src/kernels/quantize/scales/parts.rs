//! Sums the columns of a part of a head's rows.

use fa3_ir::lang::*;
use fa3_sched::Tile;
use fa3_sched::quantize::{CHUNK, ChannelPlan, GROUPS, PART_ROWS};

use super::params::PartsParams;
use super::span::{Groups, KINDS, Span};
use crate::kernels::params::{Declare, Form};
use crate::kernels::parts::unpack::unpacked;

/// Two numbers that are not finite, in either type of 16 bits.
const NEITHER_IS_FINITE: u32 = 0x7FFF_7FFF;

/// Columns that a thread loads at once.
const COLUMNS: usize = CHUNK as usize;

/// The kernel.
pub(super) fn kernel(elem: Elem, head_dim: u32) -> Kernel {
    let threads = ChannelPlan::threads(head_dim, CHUNK);
    Kernel::build("channel_parts", Launch::threads(threads), |b| {
        let params = PartsParams::<Form>::form(elem).pass(&mut Declare(b));
        let groups = Groups::declare(b, head_dim, CHUNK);
        b.launch_dependents();
        b.grid_dependency_wait();

        let Tile { m_block: part, head, batch } = params.decoder.decode(b.cta_x());
        let x = params.x.global();
        // All loads before the first sum.
        let loaded: Vec<_> = (0..PART_ROWS / GROUPS)
            .map(|turn| {
                let row = part.mad(PART_ROWS, groups.group + turn * GROUPS);
                let at = x.at([batch, head, row.min(params.seqlen - 1)]);
                (row.lt(params.seqlen), b.load_vector::<B32, 4>(groups.col.mad_wide(2, at)))
            })
            .collect();
        let rows = loaded
            .into_iter()
            .map(|(inside, words)| words.map(|word| inside.select::<B32>(word, NEITHER_IS_FINITE)));
        groups.put_together(&columns(b, elem, &rows.collect::<Vec<_>>()), |col, span| {
            let part = batch.mad(params.heads, head).mad(params.parts, part);
            let to = (part * (KINDS * head_dim) + col).mad_wide(4, params.spans);
            for (number, x) in (0..).zip(span.all()) {
                b.store(to.at(number * 4 * head_dim as i32), x);
            }
        });
    })
}

/// The spans of the columns of rows. Numbers that are not finite are left out where sums show that there are some.
#[track_caller]
fn columns<'k>(b: &'k Builder, elem: Elem, rows: &[[V<'k, B32>; COLUMNS / 2]]) -> [Span<'k>; COLUMNS] {
    let over_rows = |and: fn(Span<'k>, V<'k, F32>) -> Span<'k>| {
        let mut spans = [Span::none(b); COLUMNS];
        for words in rows {
            let numbers = words.iter().flat_map(|&word| unpacked(elem, word));
            spans.iter_mut().zip(numbers).for_each(|(span, x)| *span = and(*span, x));
        }
        spans
    };
    let of_any = over_rows(Span::and_any);
    let sums = of_any.iter().map(|span| span.sum.abs().lt(f32::INFINITY));
    let are_finite = sums.reduce(|x, y| x & y).expect("there are columns");
    let spans = of_any.map(|span| span.all().map(|number| b.var("span", number)));
    b.if_lanes(!are_finite, || {
        for (span, finite) in spans.iter().zip(over_rows(Span::and_finite)) {
            span.iter().zip(finite.all()).for_each(|(to, number)| to.set(number));
        }
    });
    spans.map(|span| Span::new(span.map(Var::get)))
}
