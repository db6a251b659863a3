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

/// The kernel.
pub(super) fn kernel(elem: Elem, head_dim: u32) -> Kernel {
    let threads = ChannelPlan::threads(head_dim, CHUNK);
    Kernel::build("channel_parts", Launch::threads(threads), |b| {
        let params = PartsParams::<Form>::form(elem).pass(&mut Declare(b));
        let groups = Groups::declare(b, head_dim, CHUNK);
        b.launch_dependents();
        b.grid_dependency_wait();

        let Tile { m_block: part, head, batch, split: _ } = params.decoder.decode(b.cta_x());
        // All loads before the first sum.
        let rows: Vec<_> = (0..PART_ROWS / GROUPS)
            .map(|turn| {
                let row = part.mad(PART_ROWS, groups.group + turn * GROUPS);
                let words = [(); CHUNK as usize / 2].map(|()| b.var("chunk", NEITHER_IS_FINITE));
                b.guarded(row.lt(params.seqlen), || {
                    let at = groups.col.mad_wide(2, params.x.global().at([batch, head, row]));
                    let loaded = b.load_vector::<B32, 4>(at);
                    words.iter().zip(loaded).for_each(|(word, loaded)| word.set(loaded));
                });
                words
            })
            .collect();
        let mut spans = [Span::none(b); CHUNK as usize];
        for words in rows {
            let numbers = words.into_iter().flat_map(|word| unpacked(elem, word.now()));
            for (span, x) in spans.iter_mut().zip(numbers) {
                *span = span.and_number(x);
            }
        }
        groups.put_together(&spans, |col, span| {
            let part = batch.mad(params.heads, head).mad(params.parts, part);
            let to = (part * (KINDS * head_dim) + col).mad_wide(4, params.spans);
            for (number, x) in (0..).zip(span.all()) {
                b.store(to.at(number * 4 * head_dim as i32), x);
            }
        });
    })
}
