//! The reduction of a row of partial results of attention (split-KV combine), by a team of warps.
//!
//! ```text
//! LSE = ln Σ_s exp(LSE_s)        O = Σ_s exp(LSE_s - LSE) O_s        s over the parts
//! ```
//!
//! Warp w of a team of W warps has the parts w, w + W, w + 2W, … It loads several of them at once, each with its LSE,
//! and keeps sums relative to the largest LSE so far. Then the sums of all warps are added in the order of warps,
//! through shared memory and behind one barrier. So the order of additions depends only on the indices of parts. A team
//! that merges in order ([`Team::in_order`]) has one warp, whose parts change the reference one after the other.
//!
//! A part whose LSE is -inf is empty. Its row is read, but its numbers do not count, even if they are NaN.

use std::f32::consts::{LN_2, LOG2_E};

use fa3_ir::lang::*;
use fa3_sched::combine::{CHUNK, Team};

use super::lse_form::StoredLse;
use super::unpack::unpacked;
use crate::kernels::params::InKernel;

/// The elements of a chunk of columns.
type Columns<T> = [T; CHUNK as usize];

/// A part of a row: the addresses of its LSE (f32) and its O.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part<'k> {
    pub(crate) lse: U64<'k>,
    pub(crate) o: U64<'k>,
}

/// The destination of a reduced row: the addresses of LSE (f32) and of O. At address 0, LSE is not written.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Combined<'k> {
    pub(crate) lse: U64<'k>,
    pub(crate) o: U64<'k>,
    /// The element type of O: f32, f16 or bf16.
    pub(crate) elem: Elem,
    /// Whether the row exists; if not, nothing is written.
    pub(crate) is_there: V<'k, Pred>,
    /// The form in which LSE is stored; `None` for the default.
    pub(crate) stored_lse: Option<StoredLse<InKernel<'k>>>,
    /// Whether LSE leaves out the sink.
    pub(crate) lse_without_sink: bool,
}

/// The reduction in a kernel whose CTAs have [`Team::cta_warps`] warps.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Combine<'k> {
    builder: &'k Builder,
    /// The element type of the parts' O: f32, f16 or bf16.
    elem: Elem,
    /// Number of columns of a row, a multiple of [`CHUNK`] with which a row has a multiple of 16 bytes.
    cols: u32,
    team: Team,
    exchange: Option<Exchange<'k>>,
}

/// The shared memory through which the warps of a team exchange their sums.
#[derive(Clone, Copy, Debug)]
struct Exchange<'k> {
    /// A row of f32 for each warp of the CTA.
    rows: U32<'k>,
    /// The largest LSE and the sum of each warp of the CTA.
    sums: U32<'k>,
    /// The barrier at which all threads of the CTA meet.
    met: fa3_ir::Barrier,
}

/// Sums over some parts of a row.
struct Sums<'k> {
    /// The largest LSE: -inf if all parts are empty.
    max: V<'k, F32>,
    /// Σ exp(LSE_s - max).
    sum: V<'k, F32>,
    /// Σ exp(LSE_s - max) O_s, for the thread's chunks.
    o: Vec<Columns<V<'k, F32>>>,
}

/// A part that has been loaded.
struct Loaded<'k> {
    /// The part's LSE; -inf if the row has no such part.
    lse: V<'k, F32>,
    /// The words of the thread's chunks.
    o: Vec<Vec<U32<'k>>>,
}

impl<'k> Combine<'k> {
    /// Declares the shared memory and the barrier of the reduction. Rows have `cols` elements, at most 512, of type
    /// `elem`: f32, f16 or bf16.
    #[track_caller]
    pub(crate) fn declare(b: &'k Builder, elem: Elem, cols: u32, team: Team) -> Combine<'k> {
        let warps = team.cta_warps();
        let exchange = (team.warps > 1).then(|| Exchange {
            rows: b.address(b.region("combine_rows", 4 * warps * cols, 16)),
            sums: b.address(b.region("combine_sums", 8 * warps, 16)),
            met: b.barrier("combine", 32 * warps),
        });
        Combine { builder: b, elem, cols, team, exchange }
    }

    /// The kernel's builder.
    pub(crate) fn builder(&self) -> &'k Builder {
        self.builder
    }

    /// The index, below [`Team::rows`], of the row of the CTA that the calling thread's team reduces.
    #[track_caller]
    pub(crate) fn row_of_cta(&self) -> U32<'k> {
        self.warp() >> self.team.warps.ilog2()
    }

    /// Reduces `parts` parts of a row, 0 or more, and writes O and LSE. All threads of the CTA must call this, each
    /// team with its row. They must meet at a barrier before they call it again.
    ///
    /// `part` gives the addresses of a part; its argument is below `parts`. A `sink` adds exp(sink) to the denominator,
    /// and nothing to O; -inf adds nothing.
    #[track_caller]
    pub(crate) fn row(
        &self,
        parts: U32<'k>,
        part: impl Fn(U32<'k>) -> Part<'k>,
        sink: Option<V<'k, F32>>,
        to: Combined<'k>,
    ) {
        let (b, sums) = (self.builder, self.sums_of_warp(parts, part));
        let Some(exchange) = &self.exchange else {
            return self.write(sums, sink, to, b.lane_id());
        };
        self.leave(exchange, &sums);
        b.sync(exchange.met);
        let thread = b.tid() & (32 * self.team.warps - 1);
        b.if_lanes(thread.lt(self.chunks()), || {
            self.write(self.sums_of_team(exchange, thread), sink, to, thread);
        });
    }

    /// The index of the calling thread's warp in the CTA.
    #[track_caller]
    fn warp(&self) -> U32<'k> {
        // All threads of a warp have one index. The compiler knows this only if the index is taken from one lane.
        (self.builder.tid() >> 5).shfl_idx(0)
    }

    /// Number of chunks of a row.
    fn chunks(&self) -> u32 {
        self.cols / CHUNK
    }

    /// The indices of the chunks of thread `thread` of `threads`. Indices behind the last chunk become the last chunk,
    /// which then belongs to another thread.
    #[track_caller]
    fn chunks_of(&self, thread: U32<'k>, threads: u32) -> Vec<U32<'k>> {
        let turns = 0..self.chunks().div_ceil(threads);
        turns.map(|turn| (thread + turn * threads).min(self.chunks() - 1)).collect()
    }

    /// The sums over the parts of the calling warp.
    #[track_caller]
    fn sums_of_warp(&self, parts: U32<'k>, part: impl Fn(U32<'k>) -> Part<'k>) -> Sums<'k> {
        let (b, Team { warps, at_once, in_order }) = (self.builder, self.team);
        let chunks = self.chunks_of(b.lane_id(), 32);
        let (max, sum) = (b.var("max", f32::NEG_INFINITY), b.var("sum", 0.0));
        let o: Vec<_> = chunks.iter().map(|_| [(); CHUNK as usize].map(|()| b.var("o", 0.0))).collect();
        let first = self.warp() & (warps - 1);
        b.for_each((first, parts), warps * at_once, |first| {
            let numbers = (0..at_once).map(|turn| first + turn * warps);
            let loaded: Vec<_> = numbers.map(|number| self.load(number, parts, &chunks, &part)).collect();
            for parts in loaded.chunks(if in_order { 1 } else { loaded.len() }) {
                let highest = parts.iter().fold(max.get(), |max, part| max.max(part.lse));
                let reference = reference(highest);
                let scale = weight(max.get(), reference);
                max.set(highest);
                sum.update(|sum| sum * scale);
                o.as_flattened().iter().for_each(|o| o.update(|o| o * scale));
                for part in parts {
                    let weight = weight(part.lse, reference);
                    sum.update(|sum| sum + weight);
                    self.add(weight, part, &o);
                }
            }
        });
        let o = o.iter().map(|o| o.map(Var::get)).collect();
        Sums { max: max.get(), sum: sum.get(), o }
    }

    /// Begins to load part `number` of `parts`, which is not 0. If there is no such part, loads the last part, which is
    /// in a cache, with an LSE of -inf: predicated loads would keep twice as many registers.
    #[track_caller]
    fn load(
        &self,
        number: U32<'k>,
        parts: U32<'k>,
        chunks: &[U32<'k>],
        part: impl Fn(U32<'k>) -> Part<'k>,
    ) -> Loaded<'k> {
        let b = self.builder;
        let Part { lse, o } = part(number.min(parts - 1));
        let lse = number.lt(parts).select(b.load::<F32>(lse), f32::NEG_INFINITY);
        let bytes = CHUNK * self.elem.bytes();
        let load = |chunk: &U32<'k>| -> Vec<U32<'k>> {
            let at = chunk.mad_wide(bytes, o);
            match bytes {
                8 => b.load_vector::<B32, 2>(at).into(),
                _ => b.load_vector::<B32, 4>(at).into(),
            }
        };
        Loaded { lse, o: chunks.iter().map(load).collect() }
    }

    /// Adds O of a part times `weight` to `o`.
    #[track_caller]
    fn add(&self, weight: V<'k, F32>, part: &Loaded<'k>, o: &[Columns<Var<'k, F32>>]) {
        // The words of an empty part become zeros, because its O may be NaN. A weight that is NaN is not 0, and makes
        // the result NaN.
        let counts = weight.neu(0.0).select(u32::MAX, 0);
        for (words, o) in part.o.iter().zip(o) {
            let words = words.iter().map(|&word| word & counts);
            let numbers: Vec<V<'k, F32>> = if self.elem == Elem::F32 {
                words.map(|word| word.as_f32()).collect()
            } else {
                words.flat_map(|word| unpacked(self.elem, word)).collect()
            };
            o.iter().zip(numbers).for_each(|(o, x)| o.update(|o| weight.fma(x, o)));
        }
    }

    /// Leaves a warp's sums in shared memory, for the other warps of its team.
    #[track_caller]
    fn leave(&self, exchange: &Exchange<'k>, sums: &Sums<'k>) {
        let (b, warp) = (self.builder, self.warp());
        b.once_per_warp(|| b.store_vector(warp.mad(8, exchange.sums), [sums.max, sums.sum]));
        let row = warp.mad(4 * self.cols, exchange.rows);
        for (turn, o) in sums.o.iter().enumerate() {
            let chunk = b.lane_id() + 32 * turn as u32;
            let at = chunk.mad(4 * CHUNK, row);
            b.guarded(chunk.lt(self.chunks()), || b.store_vector(at, *o));
        }
    }

    /// The sums over all parts, for the chunks of thread `thread` of the team.
    #[track_caller]
    fn sums_of_team(&self, exchange: &Exchange<'k>, thread: U32<'k>) -> Sums<'k> {
        let (b, warps) = (self.builder, self.team.warps);
        let first = self.builder.tid() >> 5 & !(warps - 1);
        let sums = first.mad(8, exchange.sums);
        let sums: Vec<[V<'k, F32>; 2]> =
            (0..warps).map(|warp| b.load_vector(sums.at(8 * warp as i32))).collect();
        let max = sums[1..].iter().fold(sums[0][0], |max, [other, _]| max.max(*other));
        let reference = reference(max);
        let scales: Vec<_> = sums.iter().map(|[max, _]| weight(*max, reference)).collect();
        let zero = b.copy(0.0);
        let sum = sums.iter().zip(&scales).fold(zero, |total, ([_, sum], scale)| scale.fma(*sum, total));
        let row = first.mad(4 * self.cols, exchange.rows);
        let of_chunk = |chunk: U32<'k>| {
            let at = chunk.mad(4 * CHUNK, row);
            let rows = (0..warps).map(|warp| at.at((4 * self.cols * warp) as i32));
            rows.zip(&scales).fold([zero; CHUNK as usize], |total, (at, scale)| {
                let mut of_warp = b.load_vector::<F32, { CHUNK as usize }>(at).into_iter();
                total.map(|total| of_warp.next().map_or(total, |x| scale.fma(x, total)))
            })
        };
        let o = self.chunks_of(thread, 32 * warps).into_iter().map(of_chunk).collect();
        Sums { max, sum, o }
    }

    /// Adds `sink` to the denominator, divides, and writes the chunks of thread `thread` of the team.
    #[track_caller]
    fn write(&self, sums: Sums<'k>, sink: Option<V<'k, F32>>, to: Combined<'k>, thread: U32<'k>) {
        let b = self.builder;
        let (scale, lse) = end((sums.max, sums.sum), sink, to.lse_without_sink);
        let lse = to.stored_lse.map_or(lse, |stored| stored.stored(lse));
        let writes_lse = to.lse.ne(0u64) & to.is_there & thread.eq(0);
        b.guarded(writes_lse, || b.store(to.lse, lse));
        let threads = 32 * self.team.warps;
        for (turn, o) in sums.o.into_iter().enumerate() {
            let chunk = thread + threads * turn as u32;
            let (at, o) = (chunk.mad_wide(CHUNK * to.elem.bytes(), to.o), o.map(|o| o * scale));
            b.guarded(to.is_there & chunk.lt(self.chunks()), || store(b, at, to.elem, o));
        }
    }
}

/// The factor of O, and LSE, of a row at the end of a reduction. A `sink` adds exp(sink) to the denominator of O, and
/// to LSE unless LSE leaves it out.
#[track_caller]
pub(crate) fn end<'k>(
    (max, sum): (V<'k, F32>, V<'k, F32>),
    sink: Option<V<'k, F32>>,
    lse_without_sink: bool,
) -> (V<'k, F32>, V<'k, F32>) {
    let of_keys = (sum, reference(max));
    let (reference, sum, scale) = match sink {
        None => (of_keys.1, of_keys.0, None),
        Some(sink) => {
            let reference = reference(max.max(sink));
            let scale = weight(max, reference);
            let of_sink = sink.eq(reference).select(1.0, weight(sink, reference));
            (reference, sum.fma(scale, of_sink), Some(scale))
        }
    };
    // Apart from rounding, the sum is at least 1, or it is 0 and then O is 0, too.
    let inverse = sum.eq(0.0).select(0.0, sum.rcp());
    let scale = scale.map_or(inverse, |scale| scale * inverse);
    let (lse_sum, lse_reference) = if lse_without_sink { of_keys } else { (sum, reference) };
    (scale, lse_sum.lg2().fma(LN_2, lse_reference))
}

/// Stores a chunk of columns in elements of type `elem`.
#[track_caller]
fn store<'k>(b: &'k Builder, at: U64<'k>, elem: Elem, [x, y, z, w]: Columns<V<'k, F32>>) {
    if elem == Elem::F32 {
        return b.store_vector(at, [x, y, z, w]);
    }
    let above = if elem == Elem::F16 { V::f16x2_above } else { V::bf16x2_above };
    b.store_vector(at, [above(y, x), above(w, z)]);
}

/// The reference that is subtracted from LSEs: the largest LSE, or 0 if that is -inf.
#[track_caller]
pub(crate) fn reference(max: V<'_, F32>) -> V<'_, F32> {
    max.eq(f32::NEG_INFINITY).select(0.0, max)
}

/// The factor exp(lse - reference).
#[track_caller]
pub(crate) fn weight<'k>(lse: V<'k, F32>, reference: V<'k, F32>) -> V<'k, F32> {
    // LSEs are subtracted before the multiplication, because their difference is exact where it matters.
    ((lse - reference) * LOG2_E).ex2()
}

#[cfg(test)]
mod tests {
    use fa3_ir::{BufferRole, Passed, Program};
    use fa3_sim::ProgramSimulation;
    use fa3_types::{Dtype, LseForm};

    use super::*;

    const COLS: u32 = 16;
    const ROWS: u32 = 10;
    /// Number of parts for which each row has memory.
    const MOST: u32 = 40;
    const FORM: LseForm = LseForm { base_two: true, without_sink: false, empty_is_infinite: true };

    /// A program that reduces rows. Memory has each row's number of parts, its sink, and its parts in reverse order.
    fn program(team: Team) -> Program<Kernel> {
        let kernel = Kernel::build("merge", Launch::threads(32 * team.cta_warps()), |b| {
            let [o, lse, counts, sinks, to_o, to_lse] = ["o", "lse", "counts", "sinks", "to_o", "to_lse"]
                .map(|name| b.param_pointer(name, if name == "counts" { Elem::U32 } else { Elem::F32 }));
            let combine = Combine::declare(b, Elem::F32, COLS, team);
            let row = b.cta_x().mad(team.rows(), combine.row_of_cta());
            let is_there = row.lt(ROWS);
            let row = row.min(ROWS - 1);
            let [count, sink] = [counts, sinks].map(|array| row.mad_wide(4, array));
            let last = row.mad(MOST, MOST - 1);
            let part = |part| {
                let number = last - part;
                Part { lse: number.mad_wide(4, lse), o: number.mad_wide(4 * COLS, o) }
            };
            let [to_lse, to_o] = [row.mad_wide(4, to_lse), row.mad_wide(4 * COLS, to_o)];
            let stored_lse =
                Some(StoredLse { unit: b.value(FORM.unit() as f32), empty: b.value(FORM.empty()) });
            let lse_without_sink = false;
            let to =
                Combined { lse: to_lse, o: to_o, elem: Elem::F32, is_there, stored_lse, lse_without_sink };
            combine.row(b.load(count), part, Some(b.load(sink)), to);
        });
        let mut program = Program::new();
        let mut args = Vec::new();
        for (name, elem, shape, role) in [
            ("o", Elem::F32, &[ROWS, MOST, COLS][..], BufferRole::Input),
            ("lse", Elem::F32, &[ROWS, MOST], BufferRole::Input),
            ("counts", Elem::U32, &[ROWS], BufferRole::Input),
            ("sinks", Elem::F32, &[ROWS], BufferRole::Input),
            ("to_o", Elem::F32, &[ROWS, COLS], BufferRole::Output),
            ("to_lse", Elem::F32, &[ROWS], BufferRole::Output),
        ] {
            args.push((name.to_owned(), Passed::Pointer(program.buffer(name, elem, shape, role))));
        }
        program.step(kernel, [ROWS.div_ceil(team.rows()), 1, 1], args);
        program
    }

    #[test]
    fn counts_are_data_and_sinks_have_no_value() {
        let counts = [0, 1, 3, 8, 29, 40_u32, 0, 8, 8, 0];
        let none = f32::NEG_INFINITY;
        let sinks = [1.5, none, -2.0, 30.0, 0.5, none, f32::INFINITY, f32::INFINITY, f32::NAN, none];
        let number = |index: usize| (index as f32 * 0.7).sin();
        let (rows, most, cols) = (ROWS as usize, MOST as usize, COLS as usize);
        // Memory behind a row's parts is NaN.
        let is_part = |index: usize| most - 1 - index % most < counts[index / most] as usize;
        let lse: Vec<f32> = (0..rows * most)
            .map(|index| if is_part(index) { 3.0 * number(index) } else { f32::NAN })
            .collect();
        let o: Vec<f32> = (0..rows * most * cols)
            .map(|index| if is_part(index / cols) { number(index) } else { f32::NAN })
            .collect();
        let bytes = |numbers: &[f32]| numbers.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
        for splits in [2, 8, 12, 40] {
            let program = program(Team::new(splits, COLS, Dtype::F32));
            let count_bytes = counts.iter().flat_map(|x| x.to_le_bytes()).collect();
            let unwritten = [vec![0xFF; 4 * rows * cols], vec![0xFF; 4 * rows]];
            let [to_o, to_lse] = unwritten;
            let before = [bytes(&o), bytes(&lse), count_bytes, bytes(&sinks), to_o, to_lse];
            let outcome = ProgramSimulation::new(&program).run(&before).unwrap();
            assert_eq!(outcome.findings().count(), 0, "{splits} parts");
            let numbers = |buffer: usize| -> Vec<f64> {
                let (words, _) = outcome.buffers[buffer].as_chunks();
                words.iter().map(|word| f32::from_le_bytes(*word).into()).collect()
            };
            let (given_o, given_lse) = (numbers(4), numbers(5));
            for row in 0..rows {
                let parts = (most * (row + 1) - counts[row] as usize)..most * (row + 1);
                let weights: Vec<f64> = parts.clone().map(|part| f64::from(lse[part]).exp()).collect();
                let sum = weights.iter().sum::<f64>() + f64::from(sinks[row]).exp();
                let is_near = |x: f64, y: f64| x == y || (x - y).abs() < 1e-5 || x.is_nan() && y.is_nan();
                assert!(is_near(given_lse[row], FORM.of(sum.ln())), "row {row} of {splits} parts");
                for col in 0..cols {
                    let values = parts.clone().map(|part| f64::from(o[part * cols + col]));
                    let expected = values.zip(&weights).map(|(x, weight)| x * weight).sum::<f64>();
                    let expected = if sum == 0.0 { 0.0 } else { expected / sum };
                    let given = given_o[row * cols + col];
                    assert!(is_near(given, expected), "{row}, {col} of {splits} parts: {given}");
                }
            }
        }
    }
}
