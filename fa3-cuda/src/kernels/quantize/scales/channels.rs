//! The means and scales of channels. The reduction over a head's rows takes two steps. First, a CTA for each part of
//! the rows writes the [`ChannelStats`] (sum, smallest and largest) of each of its columns. Then a CTA for each head
//! adds up the statistics of all parts.
//!
//! All sums have the order that [`CHANNEL_ROWS`](fa3_types::CHANNEL_ROWS) defines, so means equal the means of
//! `fa3_quant::Channels`, bit for bit.

use std::array::from_fn;

use fa3_ir::lang::*;
use fa3_sched::quantize::{CHUNK, ChannelPlan, GROUPS, PART_ROWS};
use fa3_sched::{Decoder, FastDiv, Order, TileCoord};

use crate::kernels::params::{Declare, Form, Pass, Side, param, params};
use crate::kernels::parts::strided::Strided;
use crate::kernels::parts::unpack::unpacked;
use crate::kernels::quantize::encode::scale_of;

/// A word that holds two numbers that are not finite, both as f16 and as bf16.
const NEITHER_IS_FINITE: u32 = 0x7FFF_7FFF;

/// Number of statistics in [`ChannelStats`].
pub(super) const KINDS: u32 = 3;

/// The statistics of an empty set of numbers.
const NONE: [f32; KINDS as usize] = [0.0, f32::INFINITY, f32::NEG_INFINITY];

params! {
    /// The parameters of the kernel that reduces rows to parts.
    struct PartsParams {
        x: named Strided,
        spans: pointer,
        seqlen: u32,
        heads: u32,
        /// Number of parts of a head.
        parts: u32,
        decoder: numbers Decoder,
    }
}

params! {
    /// The parameters of the kernel that reduces parts to heads.
    struct HeadsParams {
        spans: pointer,
        scales: pointer,
        mean: pointer,
        inverse: pointer,
        /// Number of parts of a head.
        parts: u32,
        /// Number of rows of a head.
        rows: f32,
    }
}

/// Builds the kernel that reduces rows to parts, with a CTA for each part of a head's rows.
pub(super) fn parts(elem: Elem, head_dim: u32) -> Kernel {
    const COLUMNS: u32 = CHUNK;
    let launch = Launch::threads(ChannelPlan::threads(head_dim, COLUMNS));
    Kernel::build("channel_parts", launch, |b| {
        let form = PartsParams::<Form> {
            x: Strided::form(elem),
            spans: Elem::F32,
            seqlen: (),
            heads: (),
            parts: (),
            decoder: Form::decoder(Order::HEADS_FASTEST),
        };
        let params = form.pass(&mut Declare(b));
        let groups = Groups::declare(b, head_dim, COLUMNS);
        b.launch_dependents();
        b.grid_dependency_wait();

        let TileCoord { m_block: part, head, batch } = params.decoder.decode(b.cta_x());
        let x = params.x.global();
        // All loads are issued before the first sum.
        let loaded: Vec<_> = (0..PART_ROWS / GROUPS)
            .map(|round| {
                let row = part.mad(PART_ROWS, groups.group + round * GROUPS);
                let at = x.at([batch, head, row.min(params.seqlen - 1)]);
                (row.lt(params.seqlen), b.load_vector::<B32, 4>(groups.col.mad_wide(2, at)))
            })
            .collect();
        let rows = loaded
            .into_iter()
            .map(|(inside, words)| words.map(|word| inside.select::<B32>(word, NEITHER_IS_FINITE)));
        groups.put_together(&of_rows(b, elem, &rows.collect::<Vec<_>>()), |col, ChannelStats(numbers)| {
            let part = batch.mad(params.heads, head).mad(params.parts, part);
            let to = (part * (KINDS * head_dim) + col).mad_wide(4, params.spans);
            for (kind, x) in (0..).zip(numbers) {
                b.store(to.at(kind * 4 * head_dim as i32), x);
            }
        });
    })
}

/// The statistics of eight columns of some rows. Numbers that are not finite do not count: if the sums show that there
/// are any, a second pass leaves them out.
#[track_caller]
fn of_rows<'k>(b: &'k Builder, elem: Elem, rows: &[[U32<'k>; 4]]) -> [ChannelStats<'k>; 8] {
    let sum_up = |number: fn(V<'k, F32>) -> ChannelStats<'k>| {
        let mut spans = [ChannelStats(NONE.map(|number| b.value(number))); 8];
        for words in rows {
            let numbers = words.iter().flat_map(|&word| unpacked(elem, word));
            spans.iter_mut().zip(numbers).for_each(|(span, x)| *span = span.and(number(x)));
        }
        spans
    };
    let of_all = sum_up(ChannelStats::of);
    let sums = of_all.iter().map(|ChannelStats([sum, ..])| sum.abs().lt(f32::INFINITY));
    let are_finite = sums.reduce(|x, y| x & y).expect("there are columns");
    let spans = of_all.map(|ChannelStats(numbers)| numbers.map(|number| b.var("span", number)));
    b.if_lanes(!are_finite, || {
        for (span, ChannelStats(finite)) in spans.iter().zip(sum_up(ChannelStats::of_finite)) {
            span.iter().zip(finite).for_each(|(to, number)| to.set(number));
        }
    });
    spans.map(|span| ChannelStats(span.map(Var::get)))
}

/// Builds the kernel that reduces parts to heads, with a CTA for each head.
pub(super) fn heads(head_dim: u32) -> Kernel {
    const COLUMNS: u32 = 4;
    let launch = Launch::threads(ChannelPlan::threads(head_dim, COLUMNS));
    Kernel::build("channel_scales", launch, |b| {
        let [spans, scales, mean, inverse] = [Elem::F32; 4];
        let form = HeadsParams::<Form> { spans, scales, mean, inverse, parts: (), rows: () };
        let params = form.pass(&mut Declare(b));
        let groups = Groups::declare(b, head_dim, COLUMNS);
        b.launch_dependents();
        b.grid_dependency_wait();

        let head = b.cta_x();
        let sums = [(); COLUMNS as usize].map(|()| NONE.map(|number| b.var("span", number)));
        b.for_each((0, params.parts), GROUPS, |first| {
            let part = first + groups.group;
            let loaded = [(); COLUMNS as usize].map(|()| NONE.map(|number| b.var("part", number)));
            b.guarded(part.lt(params.parts), || {
                let of_head = head.mad_wide(params.parts, part.to_u64());
                let at =
                    params.spans + of_head * u64::from(4 * KINDS * head_dim) + (groups.col << 2).to_u64();
                for kind in 0..KINDS {
                    let numbers = b.load_vector::<F32, 4>(at.at((kind * 4 * head_dim) as i32));
                    let of_kind = loaded.iter().map(|span| span[kind as usize]);
                    of_kind.zip(numbers).for_each(|(to, number)| to.set(number));
                }
            });
            for (sum, part) in sums.iter().zip(loaded) {
                let ChannelStats(next) =
                    ChannelStats(sum.map(Var::get)).and(ChannelStats(part.map(Var::get)));
                sum.iter().zip(next).for_each(|(sum, next)| sum.set(next));
            }
        });
        groups.put_together(&sums.map(|sum| ChannelStats(sum.map(Var::get))), |col, span| {
            let (mean, amax) = span.mean_and_amax(params.rows);
            let scale = scale_of(amax);
            let at = head.mad(head_dim, col);
            for (pointer, x) in
                [(params.mean, mean), (params.scales, scale), (params.inverse, b.value(1.0) / scale)]
            {
                b.store(at.mad_wide(4, pointer), x);
            }
        });
    })
}

/// The sum, the smallest and the largest of some numbers of a channel.
#[derive(Clone, Copy)]
struct ChannelStats<'k>([V<'k, F32>; KINDS as usize]);

impl<'k> ChannelStats<'k> {
    /// The statistics of a single number. If the number is not finite, neither is the sum.
    #[track_caller]
    fn of(x: V<'k, F32>) -> ChannelStats<'k> {
        ChannelStats([x; KINDS as usize])
    }

    /// The statistics of a single number, or of no number if it is not finite.
    #[track_caller]
    fn of_finite(x: V<'k, F32>) -> ChannelStats<'k> {
        let is_finite = x.abs().lt(f32::INFINITY);
        // The minimum, or the maximum, of a number and NaN is the number.
        let (number, summand) = (is_finite.select::<F32>(x, f32::NAN), is_finite.select::<F32>(x, 0.0));
        ChannelStats([summand, number, number])
    }

    /// The statistics of the numbers of both operands.
    #[track_caller]
    fn and(self, ChannelStats([sum, min, max]): ChannelStats<'k>) -> ChannelStats<'k> {
        let ChannelStats([own_sum, own_min, own_max]) = self;
        ChannelStats([own_sum + sum, own_min.min(min), own_max.max(max)])
    }

    /// The mean over `rows` rows, and the largest magnitude of a number minus the mean. If either would not be finite,
    /// the mean is 0.
    #[track_caller]
    fn mean_and_amax(self, rows: V<'k, F32>) -> (V<'k, F32>, V<'k, F32>) {
        let ChannelStats([sum, min, max]) = self;
        let around = |mean: V<'k, F32>| (max - mean).max(mean - min).max(0.0);
        let mean = sum / rows;
        let is_finite = mean.abs().lt(f32::INFINITY) & around(mean).lt(f32::INFINITY);
        let mean = is_finite.select::<F32>(mean, 0.0);
        (mean, around(mean))
    }
}

/// The threads of a CTA, which add up the statistics of their columns. Thread t belongs to group t / (head_dim /
/// columns), and has `columns` columns from column (t mod (head_dim / columns)) · columns on.
struct Groups<'k> {
    builder: &'k Builder,
    head_dim: u32,
    slots: Region,
    met: fa3_ir::Barrier,
    /// The thread's group, and its first column.
    group: U32<'k>,
    col: U32<'k>,
}

impl<'k> Groups<'k> {
    /// Groups for rows of `head_dim` elements, of which each thread has `columns` columns.
    #[track_caller]
    fn declare(b: &'k Builder, head_dim: u32, columns: u32) -> Groups<'k> {
        let of_row = FastDiv::new(head_dim / columns).map(|number| b.value(number));
        let (group, place) = of_row.div_rem(b.tid());
        Groups {
            builder: b,
            head_dim,
            slots: b.region("spans", 4 * KINDS * GROUPS * head_dim, 16),
            met: b.barrier("spans", GROUPS * head_dim / columns),
            group,
            col: place * columns,
        }
    }

    /// The address of statistic `kind` of a column, in a group.
    #[track_caller]
    fn at(&self, kind: u32, group: U32<'k>, col: U32<'k>) -> U32<'k> {
        let base = self.builder.address(self.slots) + 4 * kind * GROUPS * self.head_dim;
        group.mad(self.head_dim, col).mad(4, base)
    }

    /// Adds up the statistics of all groups, in the order of groups, and calls `then` with the statistics of column t
    /// in thread t. Each thread passes the statistics of its columns, whose number is a multiple of four.
    #[track_caller]
    fn put_together(&self, spans: &[ChannelStats<'k>], then: impl FnOnce(U32<'k>, ChannelStats<'k>)) {
        let b = self.builder;
        for kind in 0..KINDS {
            let at = self.at(kind, self.group, self.col);
            for (quad, spans) in (0..).zip(spans.chunks_exact(4)) {
                let numbers: [_; 4] = from_fn(|col| spans[col].0[kind as usize]);
                b.store_vector(at.at(16 * quad), numbers);
            }
        }
        b.sync(self.met);
        let col = b.tid();
        b.if_lanes(col.lt(self.head_dim), || {
            let groups = (0..GROUPS).map(|group| {
                ChannelStats(from_fn(|kind| {
                    let at = self.at(kind as u32, b.value(0), col);
                    b.load(at.at((4 * group * self.head_dim) as i32))
                }))
            });
            then(col, groups.reduce(ChannelStats::and).expect("there are groups"));
        });
    }
}
