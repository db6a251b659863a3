//! Matrix products of the tensor core, bit by bit.
//!
//! ```text
//! D = C + Σ_k a_k b_k, one sum over all k of the instruction
//! ```
//!
//! NVIDIA documents neither order nor rounding. [`Arithmetic::Exact`] is the model of MMA-Sim (arXiv 2511.10909) and of
//! Khattak and Mikaitis (arXiv 2512.07004):
//!
//! 1. The exponent of a product is the sum of its factors' exponents, so that its significand lies in [1, 4), or below
//!    1 if a factor is subnormal; the exponent of C is its own, −126 if it is zero or subnormal. Let e be the largest.
//! 2. Every addend is truncated toward zero to a multiple of q = 2^(e − F): F = 25 for f16 and bf16, 13 for e4m3.
//! 3. The exact sum of the truncated addends is truncated toward zero to binary32, or for e4m3 to 13 fraction bits.
//!
//! A product with a factor of zero has no exponent. A zero sum is +0, even if bits were truncated. Sums from 2¹²⁸ on
//! are infinite. A NaN among the addends, or infinities of both signs, give the NaN 0x7FFFFFFF. An H100 does all of
//! this: the tests compare with its results, bit by bit.

use fa3_ir::WgmmaType;
use pulp::{Arch, Simd, WithSimd};

use super::convert;
use super::float::canonical;

/// How products are summed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arithmetic {
    /// Products are summed as the hardware sums them, bit by bit.
    Exact,
    /// Products are added in binary32, one after the other: about five times faster, and closer to the exact sum.
    Fast,
}

/// One wgmma, over the rows of one warp or over other rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Product {
    /// The element type of A and B.
    pub ty: WgmmaType,
    /// Columns of D.
    pub n: usize,
    /// Whether A is negated.
    pub negate_a: bool,
    /// Whether B is negated.
    pub negate_b: bool,
    /// Whether the old D is added.
    pub accumulate: bool,
}

/// D = ± A · B, plus the old D if the product accumulates.
///
/// `a` has rows of k = [`WgmmaType::k`] codes. `b` has n rows of k codes, each a column of B. `d` has the rows of `a`,
/// with n numbers each. A code of 8 bits is the lower half of its 16 bits.
///
/// # Panics
/// If n is no multiple of 8, or a matrix has another size.
pub fn multiply(product: &Product, arithmetic: Arithmetic, a: &[u16], b: &[u16], d: &mut [f32]) {
    let (n, k) = (product.n, product.ty.k() as usize);
    assert_eq!(n % LANES, 0, "D has {n} columns, not a multiple of {LANES}");
    assert_eq!(b.len(), n * k, "b has another size than n x k");
    assert_eq!(a.len() * n, d.len() * k, "a and d have different numbers of rows");
    if !product.accumulate {
        d.fill(0.0);
    }
    // Uses the widest vectors of this machine. The bits do not depend on them.
    Arch::new().dispatch(Task { product, arithmetic, a, b, d });
}

/// The product that [`multiply`] computes.
struct Task<'a> {
    product: &'a Product,
    arithmetic: Arithmetic,
    a: &'a [u16],
    b: &'a [u16],
    d: &'a mut [f32],
}

impl WithSimd for Task<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _simd: S) {
        let Task { product, arithmetic, a, b, d } = self;
        let (ty, k) = (product.ty, product.ty.k() as usize);
        let mut a = decode(ty, a);
        if product.negate_a != product.negate_b {
            a.iter_mut().for_each(|x| *x = -*x);
        }
        let b = blocks(&decode(ty, b), k);
        match arithmetic {
            Arithmetic::Exact => exact(ty, &a, &b, d),
            Arithmetic::Fast => fast(k, &a, &b, d),
        }
    }
}

/// Number of columns that are computed together, so that the compiler emits vector code.
const LANES: usize = 8;
type Columns<T> = [T; LANES];

#[inline(always)]
fn decode(ty: WgmmaType, codes: &[u16]) -> Vec<f32> {
    match ty {
        WgmmaType::F16 => map(codes, convert::f32_of_f16),
        WgmmaType::Bf16 => map(codes, convert::f32_of_bf16),
        WgmmaType::E4m3 => map(codes, |code| convert::f32_of_e4m3(code as u8)),
    }
}

/// Applies `f` to every number. An iterator's `collect` would be compiled without this machine's widest vectors.
#[inline(always)]
fn map<X: Copy, Y: Copy + Default>(numbers: &[X], f: impl Fn(X) -> Y) -> Vec<Y> {
    let mut results = vec![Y::default(); numbers.len()];
    for (result, &x) in results.iter_mut().zip(numbers) {
        *result = f(x);
    }
    results
}

/// Arranges columns of `k` numbers, which follow each other, as blocks of [`LANES`] columns with `k` rows each.
#[inline(always)]
fn blocks(columns: &[f32], k: usize) -> Vec<Columns<f32>> {
    let mut rows = vec![[0.0; LANES]; columns.len() / LANES];
    for (block, columns) in rows.chunks_exact_mut(k).zip(columns.chunks_exact(LANES * k)) {
        for (lane, column) in columns.chunks_exact(k).enumerate() {
            block.iter_mut().zip(column).for_each(|(row, &x)| row[lane] = x);
        }
    }
    rows
}

/// Arithmetic in binary32. Products are exact in it, except the smallest and the largest products of bf16.
#[inline(always)]
fn fast(k: usize, a: &[f32], b: &[Columns<f32>], d: &mut [f32]) {
    let n = b.len() / k * LANES;
    for (a, d) in a.chunks_exact(k).zip(d.chunks_exact_mut(n)) {
        for (b, d) in b.chunks_exact(k).zip(d.as_chunks_mut::<LANES>().0) {
            let mut sums = *d;
            for (&a, b) in a.iter().zip(b) {
                sums.iter_mut().zip(b).for_each(|(sum, &b)| *sum += a * b);
            }
            *d = sums.map(canonical);
        }
    }
}

/// The hardware's arithmetic. Every factor is an f64, in which products are exact, and comes with its exponent.
#[inline(always)]
fn exact(ty: WgmmaType, a: &[f32], b: &[Columns<f32>], d: &mut [f32]) {
    let rounding = Rounding::of(ty);
    let k = ty.k() as usize;
    let n = b.len() / k * LANES;
    let a_exponents = map(a, |x| rounding.factor_exponent(x));
    let b_exponents = rows(b, k, |x| rounding.factor_exponent(x));
    let a = map(a, f64::from);
    let b = map(b.as_flattened(), f64::from);
    let b: &[Columns<f64>] = b.as_chunks().0;

    let a_rows = a.chunks_exact(k).zip(a_exponents.chunks_exact(k));
    for ((a, a_exponents), d) in a_rows.zip(d.chunks_exact_mut(n)) {
        let largest = largest_exponents(a_exponents, b_exponents.as_flattened(), d);
        let (d, largest) = (d.as_chunks_mut().0, largest.as_chunks().0);
        for ((b, largest), d) in b.chunks_exact(k).zip(largest).zip(d) {
            fused_sum(rounding, a, b, largest, d);
        }
    }
}

/// Applies `f` to the numbers of all blocks, row by row.
#[inline(always)]
fn rows(blocks: &[Columns<f32>], k: usize, f: impl Fn(f32) -> i16) -> Vec<Columns<i16>> {
    let count = blocks.len() / k;
    let mut rows = vec![[0; LANES]; blocks.len()];
    for (at, block) in blocks.chunks_exact(k).enumerate() {
        for (row, numbers) in block.iter().enumerate() {
            let row = &mut rows[row * count + at];
            (0..LANES).for_each(|lane| row[lane] = f(numbers[lane]));
        }
    }
    rows
}

/// Precision of a type's addends and of its sums.
#[derive(Clone, Copy)]
struct Rounding {
    /// The exponent of the type's subnormal numbers.
    smallest: i16,
    /// Fraction bits of an addend, relative to the largest exponent.
    fraction_bits: i16,
    /// The bits of a binary32 that a sum has.
    mask: u32,
}

impl Rounding {
    fn of(ty: WgmmaType) -> Rounding {
        match ty {
            WgmmaType::F16 => Rounding { smallest: -14, fraction_bits: 25, mask: u32::MAX },
            WgmmaType::Bf16 => Rounding { smallest: -126, fraction_bits: 25, mask: u32::MAX },
            WgmmaType::E4m3 => Rounding { smallest: -6, fraction_bits: 13, mask: u32::MAX << (23 - 13) },
        }
    }

    /// The exponent of a factor.
    #[inline(always)]
    fn factor_exponent(self, x: f32) -> i16 {
        if x == 0.0 { ZERO } else { exponent(x).max(self.smallest) }
    }
}

/// The exponent that stands for a factor of zero: a product with it lies below all others.
const ZERO: i16 = -10_000;

/// The exponent of a number: e for ±1.m · 2^e, −126 for a subnormal number or zero.
#[inline(always)]
fn exponent(x: f32) -> i16 {
    (x.to_bits() >> 23 & 0xFF).max(1) as i16 - 127
}

/// The largest exponent of the addends of every column.
#[inline(always)]
fn largest_exponents(a: &[i16], b: &[i16], d: &[f32]) -> Vec<i16> {
    let mut largest = map(d, exponent);
    for (&a, b) in a.iter().zip(b.chunks_exact(d.len())) {
        // The sum is never beyond ±20 000. A check for overflow would prevent vector code.
        largest.iter_mut().zip(b).for_each(|(largest, &b)| *largest = (*largest).max(a.wrapping_add(b)));
    }
    largest
}

/// d ← d + Σ_k a_k b_k, with the largest exponents of the addends.
///
/// With q = 2^(e − F), truncation to multiples of q and the exact sum take one f64 addition per addend. The sum is kept
/// at 1.5 · 2⁵² q, where its last bit is worth q. Each addend is moved toward zero by (½ − 2⁻²⁵) q before it is added,
/// so that rounding to nearest gives the truncated value. An addend has at most 24 bits and lies below 2²⁷ q, so that a
/// moved addend is exact, or within (−½, ½) q, and off every tie. The sum of 33 addends never reaches 2⁵¹ q, where the
/// last bit would change its worth.
#[inline(always)]
fn fused_sum(
    rounding: Rounding,
    a: &[f64],
    b: &[Columns<f64>],
    largest: &Columns<i16>,
    d: &mut Columns<f32>,
) {
    let q = largest.map(|e| power_of_two(e - rounding.fraction_bits));
    let origin = q.map(|q| 1.5 * (1u64 << 52) as f64 * q);
    let toward_zero = q.map(|q| -(0.5 - 1.0 / (1 << 25) as f64) * q);
    let mut sum = origin;
    let mut add = |lane: usize, addend: f64| {
        let sign = addend.to_bits() & 1 << 63;
        sum[lane] += addend + f64::from_bits(toward_zero[lane].to_bits() ^ sign);
    };
    (0..LANES).for_each(|lane| add(lane, d[lane].into()));
    for (&a, b) in a.iter().zip(b) {
        (0..LANES).for_each(|lane| add(lane, a * b[lane]));
    }
    for lane in 0..LANES {
        let truncated = toward_zero_f32(sum[lane] - origin[lane]).to_bits() & rounding.mask;
        // Adding zero removes the sign of a sum that is truncated to zero.
        d[lane] = canonical(f32::from_bits(truncated) + 0.0);
    }
}

/// 2^e for a normal result.
#[inline(always)]
fn power_of_two(e: i16) -> f64 {
    f64::from_bits(((i64::from(e) + 1023) as u64) << 52)
}

/// The binary32 next to `x` toward zero; from 2¹²⁸ on, infinity.
#[inline(always)]
fn toward_zero_f32(x: f64) -> f32 {
    let nearest = x as f32;
    let is_too_large = f64::from(nearest).abs() > x.abs() && x.abs() < 2f64.powi(128);
    f32::from_bits(nearest.to_bits() - u32::from(is_too_large))
}

#[cfg(test)]
mod tests;
