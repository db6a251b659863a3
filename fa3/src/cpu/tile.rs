//! A tile of query rows.

use std::f64::consts::LN_2;
use std::ops::Range;

use fa3_types::LseForm;
use pulp::{Arch, Simd, WithSimd};

use super::exp2::exp2;
use super::mask::{Keys, within};
use super::product::{Left, Panels, Product};
use super::unit::ScoreUnit;
use super::{LANES, TILE_N};

/// A block of keys.
pub(super) struct Block {
    pub(super) keys: Range<usize>,
    /// Kᵀ (head_dim, keys).
    pub(super) k: Panels,
    /// V (keys, head_dim_v).
    pub(super) v: Panels,
}

/// A tile of query rows.
pub(super) struct Tile {
    /// The first query position.
    pub(super) first: usize,
    /// Q (rows, head_dim).
    pub(super) q: Vec<f32>,
    /// Sequence, head and row of each row.
    pub(super) rows: Vec<[usize; 3]>,
    /// The range from the first key that some row sees to the last one.
    pub(super) keys: Range<usize>,
    /// The keys that each row sees.
    pub(super) visible: Vec<Keys>,
}

impl Tile {
    /// Adds the visible part of `block` to `seen`.
    pub(super) fn attend(&self, block: &Block, unit: ScoreUnit<'_>, scores: &mut [f32], seen: &mut Seen) {
        let columns = within(&self.keys, &block.keys);
        if columns.is_empty() {
            return;
        }
        let columns = block.k.panel_start(columns.start)..columns.end;
        let rows = self.visible.len();
        let q = Left::Rows(&self.q, self.q.len() / rows);
        let product = Product::new(rows, q, &block.k, scores);
        Product { columns: columns.clone(), stride: TILE_N, ..product }.run(); // A1:17
        let key = block.keys.start + columns.start;
        for (&row, scores) in self.rows.iter().zip(scores.chunks_exact_mut(TILE_N)) {
            unit.apply(row, key, &mut scores[columns.clone()]);
        }
        let columns_of_scores = columns.clone();
        Arch::new().dispatch(Softmax { tile: self, block, unit, columns: columns_of_scores, scores, seen });
        let p = Left::Rows(&scores[columns.start..], TILE_N);
        Product { depth: columns, add: true, ..Product::new(rows, p, &block.v, &mut seen.o) }.run(); // A1:21
    }
}

/// Running results of a tile's rows over the keys so far.
pub(super) struct Seen {
    /// O (rows, head_dim_v), before it is divided by the row sums.
    o: Vec<f32>,
    /// Row maxima.
    m: Vec<f32>,
    /// Row sums.
    l: Vec<f32>,
}

impl Seen {
    pub(super) fn nothing(rows: usize, head_dim_v: usize) -> Seen {
        let (m, l) = (vec![f32::NEG_INFINITY; rows], vec![0.0; rows]);
        Seen { o: vec![0.0; rows * head_dim_v], m, l } // A1:13
    }

    /// Adds the results of the same rows over other keys.
    pub(super) fn merge(&mut self, other: Seen, unit: ScoreUnit<'_>) {
        let columns = self.o.len() / self.m.len();
        let os = self.o.chunks_exact_mut(columns).zip(other.o.chunks_exact(columns));
        for (i, (o, other_o)) in os.enumerate() {
            let m = if other.m[i] > self.m[i] { other.m[i] } else { self.m[i] };
            let [ours, others] = [self.m[i], other.m[i]].map(|old| exp2((old - finite(m)) * unit.log2));
            self.m[i] = m;
            self.l[i] = ours * self.l[i] + others * other.l[i];
            o.iter_mut().zip(other_o).for_each(|(o, other)| *o = ours * *o + others * other);
        }
    }

    /// The largest score of each row: -inf in a row without keys.
    pub(super) fn largest(&self, unit: ScoreUnit<'_>) -> Vec<f32> {
        self.m.iter().map(|&m| natural(m, unit) as f32).collect()
    }

    /// O (rows, head_dim_v) and LSE (rows), with the sink of each row, which is -inf without sinks. A row without keys
    /// has O = 0 and LSE = sink.
    pub(super) fn finish(
        mut self,
        unit: ScoreUnit<'_>,
        sink: impl Fn(usize) -> f32,
        form: LseForm,
    ) -> (Vec<f32>, Vec<f32>) {
        let columns = self.o.len() / self.m.len();
        let rows = self.o.chunks_exact_mut(columns).zip(self.m.iter().zip(&self.l));
        let lse = rows.enumerate().map(|(row, (o, (&m, &l)))| {
            let sink = sink(row);
            if l == 0.0 {
                o.fill(0.0);
                return if form.without_sink { form.empty() } else { form.of(sink.into()) as f32 };
            }
            let [m, l, sink] = [natural(m, unit), l.into(), sink.into()];
            // The sum is relative to the larger of row maximum and sink.
            let largest = m.max(sink);
            let shrink = (m - largest).exp();
            let of_sink = if sink == largest { 1.0 } else { (sink - largest).exp() };
            let sum = shrink * l + of_sink;
            o.iter_mut().for_each(|o| *o = (f64::from(*o) * shrink / sum) as f32); // A1:24
            form.of(if form.without_sink { m + l.ln() } else { largest + sum.ln() }) as f32 // A1:24
        });
        let lse = lse.collect();
        (self.o, lse)
    }
}

/// A row maximum in natural units.
fn natural(m: f32, unit: ScoreUnit<'_>) -> f64 {
    f64::from(m) * f64::from(unit.log2) * LN_2
}

/// The number that is subtracted from a row's scores: the maximum m. If the row has seen no key, m is -inf, and 0 in
/// its place makes every exponential 0.
#[inline(always)]
fn finite(m: f32) -> f32 {
    if m == f32::NEG_INFINITY { 0.0 } else { m }
}

/// Turns scores into P and rescales O to the new maxima.
struct Softmax<'a> {
    tile: &'a Tile,
    block: &'a Block,
    unit: ScoreUnit<'a>,
    /// The columns of S that were computed.
    columns: Range<usize>,
    scores: &'a mut [f32],
    seen: &'a mut Seen,
}

impl WithSimd for Softmax<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _simd: S) {
        let Softmax { tile, block, unit, columns, scores, seen } = self;
        let head_dim_v = seen.o.len() / seen.m.len();
        let rows = scores.chunks_exact_mut(TILE_N).zip(seen.o.chunks_exact_mut(head_dim_v));
        for (i, (scores, o)) in rows.enumerate() {
            let Keys { all, gaps } = &tile.visible[i];
            let visible = within(all, &block.keys);
            if visible.is_empty() {
                scores[columns.clone()].fill(0.0);
                continue;
            }
            gaps.iter().for_each(|gap| scores[within(gap, &block.keys)].fill(f32::NEG_INFINITY));
            let scores = hide(scores, &columns, visible);
            let m_old = seen.m[i];
            let m = largest(scores, m_old); // A1:18
            let rescale = exp2((m_old - finite(m)) * unit.log2);
            seen.m[i] = m;
            seen.l[i] = rescale * seen.l[i] + exponentials(scores, finite(m), unit.log2); // A1:19
            if rescale != 1.0 {
                o.iter_mut().for_each(|o| *o *= rescale); // A1:21
            }
        }
    }
}

/// The visible scores of a row, padded with -inf to a whole number of loop iterations. The other `columns` become 0,
/// because P is 0 there.
#[inline(always)]
fn hide<'a>(row: &'a mut [f32], columns: &Range<usize>, visible: Range<usize>) -> &'a mut [[f32; LANES]] {
    let (start, end) = (visible.start / LANES * LANES, visible.end.next_multiple_of(LANES));
    row[start..visible.start].fill(f32::NEG_INFINITY);
    row[visible.end..end].fill(f32::NEG_INFINITY);
    row[columns.start..start.max(columns.start)].fill(0.0);
    row[end.min(columns.end)..columns.end].fill(0.0);
    row[start..end].as_chunks_mut().0
}

/// The largest of `first` and the numbers of `x` that are not NaN.
#[inline(always)]
fn largest(x: &[[f32; LANES]], first: f32) -> f32 {
    let larger = |max: f32, x: f32| if x > max { x } else { max };
    let mut max = [first; LANES];
    for x in x {
        for (max, &x) in max.iter_mut().zip(x) {
            *max = larger(*max, x);
        }
    }
    max.into_iter().fold(first, larger)
}

/// Replaces each x by 2^((x - reference) · log2), and returns their sum.
#[inline(always)]
fn exponentials(x: &mut [[f32; LANES]], reference: f32, log2: f32) -> f32 {
    let mut sums = [0.0; LANES];
    for x in x {
        for (x, sum) in x.iter_mut().zip(&mut sums) {
            *x = exp2((*x - reference) * log2);
            *sum += *x;
        }
    }
    sums.iter().sum()
}
