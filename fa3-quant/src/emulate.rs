//! FlashAttention-3's forward pass in FP8, emulated: Algorithm 1 on e4m3 codes. `A1:17` is its line 17.

use std::f32::consts::{LN_2, LOG2_E};

use fa3_types::{KnownProblem, Problem, TensorName};

use crate::key_block::{self, KeyBlock};
use crate::tiles::{self, QueryTile, TileOutput};
use crate::{Accumulation, E4m3, Granularity, Output, QuantError, Quantized, Row};

/// log2 of the factor on P before it is rounded to e4m3: P ≤ 2⁸ uses the format's range up to 448.
const P_OFFSET: f32 = 8.0;

/// FP8 attention as Hopper computes it.
///
/// This is Algorithm 1 of the paper with key blocks of B_c = `key_block` rows. It visits the blocks from the last to
/// the first, as the kernels do, since P is rounded relative to the largest score so far. A score s is the tensor
/// core's Q Kᵀ times one factor: both block scales, softmax_scale and log2 e. The online softmax is in float, base 2. P
/// = e4m3(2⁸ · 2^(s − m)) for the row maximum m. A row sum adds the unrounded P in float, unless
/// [`Fp8Attention::rounded_row_sums`] is set. P·V uses `accumulation`.
///
/// A scale of V for the whole tensor is applied at the end. Scales of blocks are applied earlier:
///
/// - The accumulator is kept in units of the previous block's scale. The factor that rescales it for the new row max
///   also carries the ratio of the two scales.
/// - With two-level accumulation, the addition to float registers takes the block's scale, relative to the head's
///   largest, as a factor.
///
/// Neither method changes the rounding of P, as a scale multiplied into P would, and neither costs an instruction. The
/// ratio of successive scales must be representable as a float; two-level accumulation has no such limit.
///
/// Sinks are not added: [`add_sinks`](crate::add_sinks) does that.
///
/// Keys past a sequence's end count as zeros, whatever memory has there. A masked key has P = 0. As on the tensor core,
/// a NaN of V times this 0 is NaN if the key shares a block with a visible key. A NaN in a row of Q, or in a visible
/// key, makes the row's O and LSE NaN; a NaN in V makes that column of O NaN.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Fp8Attention {
    /// Accumulation of Q·Kᵀ and P·V.
    pub accumulation: Accumulation,
    /// Keys of a block, B_c: a multiple of [`Accumulation::DEPTH`]. K and V may have a scale for each such block.
    pub key_block: usize,
    /// Whether row sums add the rounded P, as the kernels' column of ones behind V does. A rounding error common to a
    /// row then cancels in O, and remains in LSE: see [`rounded_row_sum_loss`](crate::rounded_row_sum_loss).
    pub rounded_row_sums: bool,
}

impl Fp8Attention {
    /// Emulation with this accumulation, in blocks of `key_block` keys.
    pub const fn new(accumulation: Accumulation, key_block: usize) -> Fp8Attention {
        Fp8Attention { accumulation, key_block, rounded_row_sums: false }
    }

    /// Makes row sums add the rounded P.
    #[must_use]
    pub fn with_rounded_row_sums(self) -> Fp8Attention {
        Fp8Attention { rounded_row_sums: true, ..self }
    }
}

impl Default for Fp8Attention {
    /// Two-level accumulation every 128 keys, in blocks of 128 keys.
    fn default() -> Fp8Attention {
        Fp8Attention::new(Accumulation::TwoLevel { keys: 128 }, 128)
    }
}

/// The state of one query row in the loop over keys.
struct QueryRow {
    index: usize,
    q: Row,
    scale_q: f32,
    /// The largest score so far, times log2 e; -inf before the first visible key.
    max: f32,
    /// Σ 2⁸ · 2^(s − max), of rounded addends with `rounded_row_sums`.
    sum: f32,
    /// The accumulator, in units of `unit` / 2⁸.
    o: Vec<f32>,
    unit: f32,
}

impl Fp8Attention {
    /// O and LSE of the problem on these tensors, in float: the caller rounds O to its output type.
    ///
    /// # Errors
    /// If a tensor is not of the problem's shape and sequences, the key block or the number of keys of
    /// [`Accumulation::TwoLevel`] is not a positive multiple of 32, or K or V has blocks that are not whole key blocks:
    /// see [`QuantError`].
    pub fn forward(
        &self,
        problem: &KnownProblem,
        q: &Quantized,
        k: &Quantized,
        v: &Quantized,
    ) -> Result<Output, QuantError> {
        tiles::check(problem, q, k, v)?;
        self.check(TensorName::K, k)?;
        self.check(TensorName::V, v)?;
        let prepare = |sequence, head| key_block::key_blocks(problem, sequence, head, k, v, self.key_block);
        Ok(tiles::forward_tiles(problem, prepare, |blocks, tile| self.tile(problem, q, blocks, tile)))
    }

    fn check(&self, tensor: TensorName, x: &Quantized) -> Result<(), QuantError> {
        let multiple = Accumulation::DEPTH;
        let fits = |given: usize| given > 0 && given.is_multiple_of(multiple);
        let key_block = self.key_block;
        if !fits(key_block) {
            return Err(QuantError::KeyBlock { given: key_block, multiple });
        }
        match self.accumulation {
            Accumulation::TwoLevel { keys } if !fits(keys) => {
                return Err(QuantError::PromotionKeys { given: keys, multiple });
            }
            Accumulation::Fp32 | Accumulation::OneLevel | Accumulation::TwoLevel { .. } => {}
        }
        match x.scales().granularity() {
            Granularity::Block { rows } if !rows.is_multiple_of(key_block) => {
                Err(QuantError::BlockMismatch { tensor, rows, key_block })
            }
            Granularity::Tensor | Granularity::Head | Granularity::Block { .. } | Granularity::Channel => {
                Ok(())
            }
        }
    }

    fn tile(
        &self,
        problem: &KnownProblem,
        q: &Quantized,
        blocks: &[KeyBlock],
        tile: &QueryTile,
    ) -> TileOutput {
        let unit = self.first_unit(blocks);
        let mut rows: Vec<QueryRow> = tile
            .rows
            .clone()
            .map(|index| {
                let (q, scale_q) = tile.query(q, index);
                let o = vec![0.0; problem.head_dim_v()];
                QueryRow { index, q, scale_q, max: f32::NEG_INFINITY, sum: 0.0, o, unit } // A1:13
            })
            .collect();
        for block in blocks.iter().rev() {
            // A1:15, the loop over blocks of keys.
            for row in &mut rows {
                self.step(problem, tile, block, row);
            }
        }
        let (o, lse) = rows.into_iter().map(QueryRow::finish).unzip();
        TileOutput { o, lse }
    }

    /// The initial unit of the accumulator. For float registers it is the largest scale, as they take each block's
    /// scale as a factor up to 1. For an accumulator that is rescaled from block to block it is the first block's
    /// scale.
    fn first_unit(&self, blocks: &[KeyBlock]) -> f32 {
        match self.accumulation {
            Accumulation::TwoLevel { .. } => {
                blocks.iter().map(|block| block.scale_v).fold(f32::MIN_POSITIVE, f32::max)
            }
            Accumulation::Fp32 | Accumulation::OneLevel => blocks.last().map_or(1.0, |block| block.scale_v),
        }
    }

    /// One row's iteration of Algorithm 1 over one block of keys.
    fn step(&self, problem: &Problem, tile: &QueryTile, block: &KeyBlock, row: &mut QueryRow) {
        let keys = block.values.rows();
        let visible = |key: usize| problem.mask().allows(row.index, block.first + key, tile.len);
        if !(0..keys).any(visible) {
            return;
        }
        let mut scores = vec![0.0; keys];
        self.accumulation.chain(&row.q, &block.keys, 0..problem.head_dim(), &mut scores); // A1:17
        let to_log2 = log2_score(problem, row.scale_q, block.scale_k);
        for (key, score) in scores.iter_mut().enumerate() {
            *score = if visible(key) { to_log2(*score) } else { f32::NEG_INFINITY };
        }
        let max = scores.iter().copied().fold(row.max, f32::max); // A1:18
        // Before the first finite score the reference is 0: -inf - -inf would be NaN.
        let base = if max == f32::NEG_INFINITY { 0.0 } else { max };
        let alpha = (row.max - base).exp2();
        let mut p = scores;
        p.iter_mut().for_each(|score| *score = (*score - (base - P_OFFSET)).exp2()); // A1:19
        let exact: f32 = p.iter().sum();
        p.iter_mut().for_each(|p| *p = E4m3::round(*p));
        let sum = if self.rounded_row_sums { p.iter().sum() } else { exact };
        row.sum = row.sum * alpha + sum; // A1:19
        row.max = max;
        self.accumulate(&Row::of_values(p), block, alpha, row); // A1:20-21
    }

    /// Computes O ← α O + P V, including the factors of V's scales.
    fn accumulate(&self, p: &Row, block: &KeyBlock, alpha: f32, row: &mut QueryRow) {
        let keys = block.values.rows();
        match self.accumulation {
            Accumulation::Fp32 | Accumulation::OneLevel => {
                let factor = alpha * (row.unit / block.scale_v);
                row.o.iter_mut().for_each(|o| *o *= factor);
                row.unit = block.scale_v;
                self.accumulation.chain(p, &block.values, 0..keys, &mut row.o);
            }
            Accumulation::TwoLevel { keys: every } => {
                row.o.iter_mut().for_each(|o| *o *= alpha);
                let factor = block.scale_v / row.unit;
                let mut partial = vec![0.0; row.o.len()];
                for first in (0..keys).step_by(every) {
                    partial.fill(0.0);
                    self.accumulation.chain(p, &block.values, first..keys.min(first + every), &mut partial);
                    row.o.iter_mut().zip(&partial).for_each(|(o, partial)| *o += partial * factor);
                }
            }
        }
    }
}

impl QueryRow {
    /// O and LSE: zeros and -inf for a row that saw no key (or none with a score above -inf).
    fn finish(mut self) -> (Vec<f32>, f32) {
        if self.sum == 0.0 {
            return (vec![0.0; self.o.len()], f32::NEG_INFINITY);
        }
        let inverse = self.sum.recip(); // A1:24
        self.o.iter_mut().for_each(|o| *o = *o * inverse * self.unit);
        (self.o, (self.max - P_OFFSET) * LN_2 + self.sum.ln())
    }
}

/// Conversion of a sum of code products into a score times log2 e.
fn log2_score(problem: &Problem, scale_q: f32, scale_k: f32) -> impl Fn(f32) -> f32 {
    let scales = f64::from(scale_q) * f64::from(scale_k);
    let natural = (scales * problem.softmax_scale().natural()) as f32;
    let log2 = (scales * problem.softmax_scale().log2()) as f32;
    let cap = problem.softcap().map(|cap| cap.bound() as f32);
    move |sum| match cap {
        None => sum * log2,
        Some(cap) => cap * (sum * natural / cap).tanh() * LOG2_E,
    }
}
