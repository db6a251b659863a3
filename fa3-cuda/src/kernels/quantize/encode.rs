//! Computes scales, and the codes of numbers in units of scales.

use fa3_ir::lang::*;
use fa3_sched::quantize::CHUNK;
use fa3_types::Real;

use super::block_max::largest;
use super::{HeadBlock, Quantize};

/// The codes of a chunk of eight numbers.
pub(super) type Codes<'k> = [U32<'k>; 2];

/// Four codes of NaN.
const NAN: u32 = u32::from_ne_bytes([0x7F; 4]);

/// The largest finite e4m3 number.
const LARGEST: f32 = 448.0;

/// The largest magnitude among the finite numbers of `x`. It is 0 if none is finite, or if the row has no position.
/// Infinities in `x` become NaN, because e4m3 has none.
#[track_caller]
pub(super) fn amax<'k>(
    b: &'k Builder,
    x: &mut [V<'k, F32>],
    has_position: Option<V<'k, Pred>>,
) -> V<'k, F32> {
    let numbers: Vec<_> = x.iter().map(|&x| b.var("x", x)).collect();
    let amax = b.var("amax", magnitude(x));
    b.if_lanes(amax.now().eq(f32::INFINITY), || {
        let is_finite = |x: Var<'k, F32>| x.now().abs().lt(f32::INFINITY);
        numbers.iter().for_each(|&x| x.set(is_finite(x).select::<F32>(x, f32::NAN)));
        amax.set(magnitude(&numbers.iter().map(|x| x.now()).collect::<Vec<_>>()));
    });
    x.iter_mut().zip(numbers).for_each(|(x, number)| *x = number.get());
    // The largest of numbers that are all NaN is NaN.
    let amax = amax.now().max(0.0);
    // The codes of a row without a position are NaN, so its numbers do not count.
    has_position.map_or(amax, |has_position| has_position.select(amax, 0.0))
}

/// The largest magnitude of the numbers `x`.
#[track_caller]
fn magnitude<'k>(x: &[V<'k, F32>]) -> V<'k, F32> {
    largest(&x.iter().map(|x| x.abs()).collect::<Vec<_>>())
}

/// The scale of numbers of magnitudes up to `amax`: amax / 448, but 1 for zeros, and never subnormal.
#[track_caller]
pub(super) fn scale_of(amax: V<'_, F32>) -> V<'_, F32> {
    amax.eq(0.0).select(1.0, over_448(amax).max(f32::MIN_POSITIVE))
}

/// amax / 448, rounded to nearest if the quotient is normal: a product with the inverse, corrected by its remainder
/// (Markstein 1990). It takes three instructions, where a division takes ten while all threads wait.
fn over_448<T: Real>(amax: T) -> T {
    let (inverse, divisor) = (amax.lit(f64::from(1.0 / LARGEST)), amax.lit(f64::from(LARGEST)));
    let near = amax * inverse;
    near.fma(divisor, -amax).fma(-inverse, near)
}

/// The codes of a thread's chunks. They are NaN if the row has no position.
#[track_caller]
pub(super) fn chunks<'k>(x: &[V<'k, F32>], has_position: Option<V<'k, Pred>>) -> Vec<Codes<'k>> {
    let chunks = x.chunks_exact(CHUNK as usize).map(|x| match has_position {
        Some(has_position) => codes(x).map(|word| has_position.select(word, NAN)),
        None => codes(x),
    });
    chunks.collect()
}

/// The codes of eight numbers.
#[track_caller]
fn codes<'k>(x: &[V<'k, F32>]) -> Codes<'k> {
    let pair = |at: usize| x[at + 1].e4m3x2_above(x[at]);
    [pair(0).below(pair(2)), pair(4).below(pair(6))]
}

impl<'k> Quantize<'k> {
    /// Subtracts the means of columns from a thread's part of a row, and multiplies by the inverses of the columns'
    /// scales. Infinities become NaN.
    #[track_caller]
    pub(super) fn centre(&self, x: &mut [V<'k, F32>], place: &HeadBlock<'k>, [mean, inverse]: [U64<'k>; 2]) {
        let (b, (lane, lanes), head_dim) = (self.builder, self.lane, self.spec.tile.head_dim);
        let head = place.batch.mad(self.params.heads, place.head);
        let first = head.mad(head_dim, lane * CHUNK);
        let [mean, inverse] = [mean, inverse].map(|pointer| first.mad_wide(4, pointer));
        for (chunk, x) in (0..).zip(x.chunks_exact_mut(CHUNK as usize)) {
            for (quad, x) in (0..).zip(x.chunks_exact_mut(4)) {
                let at = (4 * CHUNK * lanes * chunk + 16 * quad) as i32;
                let mean: [_; 4] = b.load_vector(mean.at(at));
                let inverse: [_; 4] = b.load_vector(inverse.at(at));
                for (x, (mean, inverse)) in x.iter_mut().zip(mean.into_iter().zip(inverse)) {
                    // This makes an infinity NaN, because an infinity times 0 is NaN.
                    *x = (x.fma(0.0, *x) - mean) * inverse;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks every mantissa with exponents of both parities, and quotients near the smallest normal number.
    #[test]
    fn over_448_is_the_quotient() {
        let exponents = [(127, 1), (9, 3), (10, 3), (200, 97), (254, 97)];
        for (exponent, step) in exponents {
            for mantissa in (0..1 << 23).step_by(step) {
                let amax = f32::from_bits(mantissa | (exponent << 23));
                let expected = (amax / LARGEST).max(f32::MIN_POSITIVE);
                assert_eq!(over_448(amax).max(f32::MIN_POSITIVE), expected, "{amax:e}");
            }
        }
    }
}
