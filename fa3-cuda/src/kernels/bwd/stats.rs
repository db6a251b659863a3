//! Row statistics: of every row -D = dLSE - rowsum(dO ∘ O), which dP adds, and -LSE in base 2, which the exponent
//! of P adds. If dQ is added up in memory, the kernel clears what that begins with.
//!
//! They lie in pairs of rows, so that whoever has two neighbouring columns of Sᵀ loads 8 bytes of each. A row that sees
//! no key, and one that pads the last pair, has -inf in place of -LSE and 0 in place of -D: its P is 0 whatever its
//! scores are, and its dS is 0 whatever its O and dLSE are, even NaN.

use fa3_ir::lang::*;
use fa3_sched::Tile;
use fa3_sched::backward::{ADDED_ROWS, STATS_ROWS};

use super::params::StatsParams;
use super::{Cleared, StatsSpec};
use crate::kernels::params::{Declare, Form};
use crate::kernels::parts::unpack::unpacked;

const THREADS: u32 = 128;
const _: () = assert!(STATS_ROWS == ADDED_ROWS, "a CTA clears the sums of its rows");
/// Neighbouring threads that share a row.
const LANES: u32 = 8;
/// Elements that a thread loads at once: 16 bytes.
const CHUNK: u32 = 8;
/// Rows that a CTA's threads begin with.
const ROWS: u32 = THREADS / LANES;

/// The kernel.
pub(super) fn kernel(spec: &StatsSpec) -> Kernel {
    Kernel::build("bwd_stats", Launch::threads(THREADS), |b| {
        let params = StatsParams::<Form>::form(spec).pass(&mut Declare(b));
        b.launch_dependents();
        b.grid_dependency_wait();

        let Tile { m_block, head, batch } = params.decoder.decode(b.cta_x());
        let (tid, seqlen) = (b.tid(), params.seqlen);
        let lane = tid & (LANES - 1);
        let first = m_block.mad(STATS_ROWS, tid >> LANES.ilog2());
        let rows: Vec<V<'_, B32>> = (0..STATS_ROWS / ROWS).map(|turn| first + turn * ROWS).collect();

        // Blocks of rows are those of the sums.
        if let Some(sums) = &params.sums {
            let number = sums.number([batch, head, m_block]);
            if let Cleared::Sums(cols) = spec.cleared {
                sums.block(b, number, cols).clear(b);
            }
            if let Some((order, unvisited)) = sums.in_order.as_ref().zip(params.unvisited) {
                order.last(number).clear(b);
                let dq = order.dq.global();
                b.if_uniform((m_block * STATS_ROWS).lt(unvisited), || {
                    for &row in &rows {
                        clear_row(b, spec, row.lt(unvisited), dq.at([batch, head, row]), lane);
                    }
                });
            }
        }
        // All loads before the first sum.
        let loaded: Vec<Chunks<'_>> = rows
            .iter()
            .map(|&row| {
                let inside = row.min(seqlen - 1);
                let [o, dout] = [&params.o, &params.dout].map(|x| x.global().at([batch, head, inside]));
                Chunks::load(b, spec, [o, dout], lane)
            })
            .collect();
        let of_head = batch.mad(params.heads, head);
        for (&row, chunks) in rows.iter().zip(&loaded) {
            let mut sum = chunks.dot(b, spec.elem); // A3:1
            for mask in [1, 2, 4] {
                sum = sum + sum.shfl_bfly(mask);
            }
            // The last pair may have a row more than there are.
            let writes = lane.eq(0) & row.lt(params.pairs << 1);
            b.if_lanes(writes, || {
                let there = row.lt(seqlen);
                let at = of_head.mul_wide(seqlen) + row.min(seqlen - 1).to_u64();
                let lse = b.load::<F32>(params.lse + (at << 2));
                let has_dlse = params.dlse.ne(0_u64);
                let from = has_dlse.select(params.dlse, params.lse);
                let dlse = has_dlse.select(b.load::<F32>(from + (at << 2)), 0.0);
                // NaN is not equal to it, and stays.
                let sees_none = lse.eq(f32::NEG_INFINITY);
                let shift = sees_none.select(f32::NEG_INFINITY, lse * -std::f32::consts::LOG2_E);
                let shift = there.select(shift, f32::NEG_INFINITY);
                let minus_delta = sees_none.select(0.0, dlse - sum);
                let minus_delta = there.select(minus_delta, 0.0);
                let pair = of_head.mul_wide(params.pairs) + (row >> 1).to_u64();
                let to = params.stats + (pair << 4) + ((row & 1) << 2).to_u64();
                b.store(to, shift);
                b.store(to.at(8), minus_delta);
            });
        }
    })
}

/// Clears a row of dQ, if it is `unvisited`: chunk l, l + 8, … by lane l.
#[track_caller]
fn clear_row<'k>(
    b: &'k Builder,
    spec: &StatsSpec,
    unvisited: V<'k, Pred>,
    row: V<'k, B64>,
    lane: V<'k, B32>,
) {
    let Cleared::InOrder(cols) = spec.cleared else { return };
    let chunks = cols / CHUNK;
    let at = lane.mad_wide(16, row);
    for turn in 0..chunks.div_ceil(LANES) {
        let writes = unvisited & (lane + turn * LANES).lt(chunks);
        b.guarded(writes, || b.store_vector(at.at((16 * LANES * turn) as i32), [0_u32; 4]));
    }
}

/// A thread's part of a row of O and of dO: chunk l, l + 8, … for lane l, as packed pairs.
struct Chunks<'k>(Vec<[[Var<'k, B32>; 4]; 2]>);

impl<'k> Chunks<'k> {
    /// Begins to load it from rows of O and dO at these addresses; zeros beyond the row's end.
    #[track_caller]
    fn load(b: &'k Builder, spec: &StatsSpec, rows: [V<'k, B64>; 2], lane: V<'k, B32>) -> Chunks<'k> {
        let chunks = spec.head_dim_v / CHUNK;
        let load = |turn: u32| {
            let chunk = lane + turn * LANES;
            rows.map(|row| {
                let words = [(); 4].map(|()| b.var("chunk", 0));
                let at = chunk.mad_wide(16, row);
                let load = || {
                    let loaded = b.load_vector::<B32, 4>(at);
                    words.iter().zip(loaded).for_each(|(word, loaded)| word.set(loaded));
                };
                if (turn + 1) * LANES <= chunks {
                    load()
                } else {
                    b.if_lanes(chunk.lt(chunks), load)
                }
                words
            })
        };
        Chunks((0..chunks.div_ceil(LANES)).map(load).collect())
    }

    /// The sum of the products.
    #[track_caller]
    fn dot(&self, b: &'k Builder, elem: Elem) -> V<'k, F32> {
        let Chunks(chunks) = self;
        let words = chunks.iter().flat_map(|[o, dout]| o.iter().zip(dout));
        words.fold(b.copy(0.0), |sum, (o, dout)| {
            let [o, dout] = [o, dout].map(|word| unpacked(elem, word.now()));
            o[1].fma(dout[1], o[0].fma(dout[0], sum))
        })
    }
}
