//! Accumulation of e4m3 products as Hopper's tensor cores do it, bit by bit.

use std::ops::Range;

use pulp::{Arch, Simd, WithSimd};

use crate::E4m3;

/// The accumulator of FP8 attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Accumulation {
    /// One float multiply-add after the other, the common assumption about tensor cores.
    Fp32,
    /// The tensor core's accumulator for the whole row, as in FlashAttention-3.
    OneLevel,
    /// The tensor core's accumulator for `keys` keys of P·V at a time, never across key blocks. Each such sum is added
    /// to float registers.
    TwoLevel {
        /// Number of keys between two additions, a multiple of [`Accumulation::DEPTH`].
        keys: usize,
    },
}

impl Accumulation {
    /// Products that one tensor-core instruction sums: the k of `wgmma.m64nNk32`.
    pub const DEPTH: usize = 32;

    /// Computes d ← d + a · B over the indices `k`, chained through d [`Accumulation::DEPTH`] indices at a time.
    ///
    /// `Fp32` rounds to nearest after every product. The other variants are the tensor core, which sums d and 32
    /// products at once, by the model of MMA-Sim (arXiv 2511.10909) and of Khattak and Mikaitis (arXiv 2512.07004).
    /// `tests/hopper.rs` compares it with an H100 bit by bit.
    ///
    /// 1. An addend's exponent is the sum of its factors' exponents, so that its significand lies in [0, 4); d has its
    ///    own exponent, and zero has exponent −126. Let e be the largest exponent.
    /// 2. Every addend is truncated toward zero to a multiple of 2^(e − 13).
    /// 3. The exact sum of the truncated addends is truncated toward zero to 13 fraction bits.
    ///
    /// A NaN addend gives the NaN 0x7FFFFFFF, and a zero sum gives +0.
    ///
    /// # Panics
    /// If `k` reaches beyond a or B, or d does not have one entry for each column of B.
    pub fn chain(self, a: &Row, b: &Operand, k: Range<usize>, d: &mut [f32]) {
        assert_eq!(d.len(), b.columns, "d has another number of columns than b");
        // Uses the widest vectors of this machine. The bits do not depend on them.
        Arch::new().dispatch(Chain { accumulation: self, a, b, k, d });
    }
}

/// The sum that [`Accumulation::chain`] computes.
struct Chain<'a> {
    accumulation: Accumulation,
    a: &'a Row,
    b: &'a Operand,
    k: Range<usize>,
    d: &'a mut [f32],
}

impl WithSimd for Chain<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _simd: S) {
        let Chain { accumulation, a, b, k, d } = self;
        for first in k.clone().step_by(Accumulation::DEPTH) {
            let depth = first..k.end.min(first + Accumulation::DEPTH);
            let (values, exponents) = (&a.values[depth.clone()], &a.exponents[depth.clone()]);
            for (i, chunk) in d.chunks_mut(LANES).enumerate() {
                let mut lanes = [0.0; LANES];
                lanes[..chunk.len()].copy_from_slice(chunk);
                let tile = b.tile(depth.clone(), i * LANES);
                match accumulation {
                    Accumulation::Fp32 => multiply_add(values, tile, &mut lanes),
                    Accumulation::OneLevel | Accumulation::TwoLevel { .. } => {
                        fused_dot_add(values, exponents, tile, &mut lanes);
                    }
                }
                chunk.copy_from_slice(&lanes[..chunk.len()]);
            }
        }
    }
}

/// Bounds the error of the logarithm of a row sum over `keys` keys, if the row sum is the product of P and a column of
/// ones. The tensor core adds e4m3 numbers up to 2⁸, at most 128 keys at a time.
///
/// An element of P is off by up to 2⁻⁴ of itself, or by half a subnormal step, 2⁻¹⁰, while the sum is at least 2⁸. The
/// tensor core adds 33 numbers at once. Each of them, and their sum, may lose 2⁻¹³ of the largest number.
pub fn rounded_row_sum_loss(keys: usize) -> f64 {
    let rounding = f64::powi(2.0, -4) + keys as f64 * f64::powi(2.0, -18);
    let truncation = 128.0 / Accumulation::DEPTH as f64 * 34.0 * f64::powi(2.0, -13);
    -(-(rounding + truncation).min(1.0)).ln_1p()
}

/// One row of the left factor.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    values: Vec<f32>,
    exponents: Vec<i16>,
}

impl Row {
    /// The row of these numbers.
    pub fn new(codes: impl IntoIterator<Item = E4m3>) -> Row {
        Row::of_values(codes.into_iter().map(E4m3::to_f32).collect())
    }

    /// The row of these values, each an e4m3 number.
    pub(crate) fn of_values(values: Vec<f32>) -> Row {
        let exponents = values.iter().map(|&x| exponent(x)).collect();
        Row { values, exponents }
    }
}

/// The right factor B, row by row, prepared for [`Accumulation::chain`].
#[derive(Clone, Debug, PartialEq)]
pub struct Operand {
    rows: usize,
    columns: usize,
    /// `columns` rounded up to a multiple of the lanes; the padding is zero.
    stride: usize,
    values: Vec<f32>,
    exponents: Vec<i16>,
}

impl Operand {
    /// The matrix of `rows` × `columns` numbers that `code(row, column)` gives.
    pub fn new(rows: usize, columns: usize, code: impl Fn(usize, usize) -> E4m3) -> Operand {
        let stride = columns.next_multiple_of(LANES);
        let mut values = vec![0.0; rows * stride];
        for row in 0..rows {
            let place = &mut values[row * stride..][..columns];
            place.iter_mut().enumerate().for_each(|(column, x)| *x = code(row, column).to_f32());
        }
        let exponents = values.iter().map(|&x| exponent(x)).collect();
        Operand { rows, columns, stride, values, exponents }
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// The rows `k` of LANES columns from `column` on.
    fn tile(&self, k: Range<usize>, column: usize) -> Tile<'_> {
        let place = k.start * self.stride + column..k.end * self.stride;
        Tile { stride: self.stride, values: &self.values[place.clone()], exponents: &self.exponents[place] }
    }
}

/// Columns that are computed together: enough for vector code, few enough for registers.
const LANES: usize = 16;
type Lanes<T> = [T; LANES];

/// LANES columns of an operand, whose rows lie `stride` apart.
#[derive(Clone, Copy)]
struct Tile<'a> {
    stride: usize,
    values: &'a [f32],
    exponents: &'a [i16],
}

impl<'a> Tile<'a> {
    /// The first LANES elements of each row of `numbers`.
    fn rows<T>(self, numbers: &'a [T]) -> impl Iterator<Item = &'a Lanes<T>> {
        numbers.chunks(self.stride).filter_map(|row| row.first_chunk())
    }
}

/// The exponent that stands for a factor of zero: any product with zero has a smaller exponent than all other products.
const ZERO: i16 = -1000;
/// The smallest exponent of a product of finite nonzero numbers: 2 · −6.
const SMALLEST: i16 = -12;
/// Fraction bits that the tensor core keeps of e4m3 products.
const FRACTION_BITS: i32 = 13;
/// If d has at least this exponent, all products vanish beside it: a product's exponent is at most 16, and its
/// significand is below 2².
const DOMINANT: i32 = 16 + 2 + FRACTION_BITS;
const SIGN: u32 = 1 << 31;

/// The exponent e of an e4m3 number ±1.mmm · 2^e; −6 for a subnormal.
fn exponent(x: f32) -> i16 {
    let field = (x.to_bits() >> 23 & 0xFF) as i16;
    if x == 0.0 { ZERO } else { (field - 127).max(-6) }
}

/// Computes d ← d + Σ a_k b_k in float arithmetic. Products of e4m3 numbers are exact in float, so this is a chain of
/// fused multiply-adds.
#[inline(always)]
fn multiply_add(a: &[f32], b: Tile<'_>, d: &mut Lanes<f32>) {
    for (&a, b) in a.iter().zip(b.rows(b.values)) {
        for (d, &b) in d.iter_mut().zip(b) {
            *d += a * b;
        }
    }
}

/// Computes d ← d + Σ a_k b_k as one instruction of the tensor core does: see [`Accumulation::chain`].
///
/// Let q = 2^(e − 13). One float addition for each product both truncates it to a multiple of q and adds it. The sum is
/// kept at 1.5 · 2²³ q, where its last bit is worth q. The product is first moved toward zero by (½ − 2⁻⁹) q; rounding
/// to nearest then gives what truncation would. This is exact. A product's significand has 8 bits, so a product above q
/// is a multiple of 2⁻⁷ q. After the move it still fits in a float, and is no tie. A smaller product is no tie either.
/// The sum of 33 addends below 4 · 2¹³ q never reaches 2²² q, where the last bit would change its worth.
#[inline(always)]
fn fused_dot_add(a: &[f32], a_exponents: &[i16], b: Tile<'_>, d: &mut Lanes<f32>) {
    let mut largest = [ZERO; LANES];
    for (&a, b) in a_exponents.iter().zip(b.rows(b.exponents)) {
        for (largest, &b) in largest.iter_mut().zip(b) {
            // Exponents are far from the limits. A check of overflow would prevent vector code.
            *largest = (*largest).max(a.wrapping_add(b));
        }
    }

    let (mut sum, mut origin, mut toward_zero, mut alone) =
        ([0.0f32; LANES], [0.0f32; LANES], [0.0f32; LANES], [0.0f32; LANES]);
    for i in 0..LANES {
        let products = i32::from(largest[i]);
        let own = ((d[i].to_bits() >> 23 & 0xFF) as i32).max(1) - 127;
        let e = products.max(own).clamp(i32::from(SMALLEST), DOMINANT);
        let q = power_of_two(e - FRACTION_BITS);
        origin[i] = 1.5 * (1 << 23) as f32 * q;
        toward_zero[i] = -(0.5 - 1.0 / 512.0) * q;
        // If there are no products, or all products vanish beside d, the result is d itself.
        let is_alone = own >= DOMINANT || products < i32::from(SMALLEST);
        alone[i] = if is_alone { d[i] } else { 0.0 };
        let addend = if is_alone { 0.0 } else { (d[i] * power_of_two(FRACTION_BITS - e)) as i32 as f32 * q };
        sum[i] = origin[i] + addend;
    }

    for (&a, b) in a.iter().zip(b.rows(b.values)) {
        for i in 0..LANES {
            let product = a * b[i];
            let sign = product.to_bits() & SIGN;
            sum[i] += product + f32::from_bits(toward_zero[i].to_bits() ^ sign);
        }
    }

    for i in 0..LANES {
        let products = sum[i] - origin[i];
        let result = keep_fraction_bits(products) + keep_fraction_bits(alone[i]);
        let is_nan = products.is_nan() || d[i].is_nan();
        d[i] = if is_nan { f32::from_bits(0x7FFF_FFFF) } else { result };
    }
}

/// 2^e for a normal result.
fn power_of_two(e: i32) -> f32 {
    f32::from_bits(((e + 127) as u32) << 23)
}

/// Truncates x toward zero to 13 fraction bits of its own exponent.
fn keep_fraction_bits(x: f32) -> f32 {
    f32::from_bits(x.to_bits() & (u32::MAX << (23 - FRACTION_BITS)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Logarithm of the sum of these numbers as the tensor core accumulates them, minus the logarithm of their exact
    /// sum.
    fn loss_of(p: &[f32]) -> f64 {
        let ones = Operand::new(p.len(), 1, |_, _| E4m3::from_f32(1.0));
        let row = Row::new(p.iter().map(|&p| E4m3::from_f32(p)));
        let blocks = (0..p.len()).step_by(128).map(|first| {
            let mut sum = [0.0];
            let keys = first..p.len().min(first + 128);
            Accumulation::TwoLevel { keys: 128 }.chain(&row, &ones, keys, &mut sum);
            f64::from(sum[0])
        });
        let exact: f64 = p.iter().map(|&p| f64::from(p)).sum();
        (blocks.sum::<f64>() / exact).ln()
    }

    proptest! {
        /// The largest number is 2⁸, and the others reach down to numbers that round to 0.
        #[test]
        fn rounded_row_sums_keep_their_bound(exponents in proptest::collection::vec(0.0f32..20.0, 0..700)) {
            let p: Vec<f32> = [0.0].into_iter().chain(exponents).map(|x| (8.0 - x).exp2()).collect();
            prop_assert!(loss_of(&p).abs() <= rounded_row_sum_loss(p.len()));
        }
    }

    /// Ties that all round in the same direction come close to the bound.
    #[test]
    fn the_bound_of_rounded_row_sums_is_tight() {
        let p: Vec<f32> = [256.0].into_iter().chain([136.0; 1000]).collect();
        assert!(loss_of(&p).abs() > 0.6 * rounded_row_sum_loss(p.len()), "{}", loss_of(&p));
    }

    /// Significand in units of 2⁻³ and exponent of a code, from the format's definition.
    fn split(code: u8) -> (i128, i32) {
        let (field, mantissa) = (i32::from(code >> 3 & 0xF), i128::from(code & 7));
        let (significand, exponent) = if field == 0 { (mantissa, -6) } else { (8 + mantissa, field - 7) };
        (if code < 0x80 { significand } else { -significand }, exponent)
    }

    /// significand · 2^shift, truncated toward zero.
    fn shifted(significand: i128, shift: i32) -> i128 {
        let size = significand.unsigned_abs();
        let size =
            if shift >= 0 { size << shift } else { size.checked_shr(shift.unsigned_abs()).unwrap_or(0) };
        size as i128 * significand.signum()
    }

    /// One instruction as the model defines it, in integers: D = C + Σ a b.
    fn model(a: &[u8], b: &[u8], c: f32) -> f32 {
        if c.is_nan() || a.iter().chain(b).any(|code| code & 0x7F == 0x7F) {
            return f32::from_bits(0x7FFF_FFFF);
        }
        if c.is_infinite() {
            return c;
        }
        // (significand, its fraction bits, exponent) of every addend; zero has exponent -126.
        let field = (c.to_bits() >> 23 & 0xFF) as i32;
        let significand = i128::from(c.to_bits() & 0x7F_FFFF) + if field == 0 { 0 } else { 1 << 23 };
        let signed = if c.is_sign_negative() { -significand } else { significand };
        let mut addends = vec![(signed, 23, field.max(1) - 127)];
        for ((sa, ea), (sb, eb)) in a.iter().map(|&a| split(a)).zip(b.iter().map(|&b| split(b))) {
            addends.push((sa * sb, 6, if sa * sb == 0 { -126 } else { ea + eb }));
        }
        let largest = addends.iter().map(|addend| addend.2).max().unwrap();
        let sum: i128 = addends.iter().map(|&(s, bits, e)| shifted(s, 13 - bits + e - largest)).sum();
        // The sum is in units of 2^unit: 14 bits of it are kept, and none below the last bit of a subnormal float.
        let unit = largest - 13;
        let length = 128 - sum.unsigned_abs().leading_zeros() as i32;
        let last = (unit + length - 1).max(-126) - 13;
        let kept = shifted(sum, unit - last) as f64 * f64::from(last).exp2();
        assert_eq!(f64::from(kept as f32), kept, "14 bits fit in a float");
        kept as f32
    }

    fn operand(b: &[Vec<u8>]) -> Operand {
        Operand::new(b.len(), b[0].len(), |k, column| E4m3::from_bits(b[k][column]))
    }

    fn row(a: &[u8]) -> Row {
        Row::new(a.iter().map(|&code| E4m3::from_bits(code)))
    }

    /// Codes of several kinds: random, small, large, powers of two, mostly ±0, and NaN.
    fn codes(len: usize) -> impl Strategy<Value = Vec<u8>> {
        let finite = any::<u8>().prop_map(|code| if code & 0x7F == 0x7F { 0x38 } else { code });
        let subnormal = (0u8..16).prop_map(|x| x >> 3 << 7 | x & 7);
        let large = (0x70u8..0x7F).prop_flat_map(|x| prop_oneof![Just(x), Just(x | 0x80)]);
        let power = (0u8..32).prop_map(|x| x >> 4 << 7 | (x & 0xF) << 3);
        let sparse = prop_oneof![9 => Just(0u8), 1 => Just(0x80), 2 => any::<u8>()];
        let of = |strategy: BoxedStrategy<u8>| prop::collection::vec(strategy, len).boxed();
        prop_oneof![
            of(finite.boxed()),
            of(subnormal.boxed()),
            of(large.boxed()),
            of(power.boxed()),
            of(sparse.boxed())
        ]
    }

    fn accumulators(len: usize) -> impl Strategy<Value = Vec<f32>> {
        let near = (-1e6..1e6f32).prop_flat_map(|x| prop_oneof![Just(x), Just(x / 1e6), Just(x / 1e12)]);
        let special = prop_oneof![
            Just(0.0),
            Just(-0.0),
            Just(f32::INFINITY),
            Just(f32::NEG_INFINITY),
            Just(f32::NAN),
            Just(f32::MAX),
            Just(-f32::from_bits(1)),
            Just(f32::from_bits(0x7F80_0001))
        ];
        let any_bits = any::<u32>().prop_map(f32::from_bits);
        prop::collection::vec(prop_oneof![4 => near, 1 => special, 2 => any_bits], len)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1500))]

        #[test]
        fn the_vector_code_is_the_model(
            (a, b, c) in (1usize..=32, 1usize..=20).prop_flat_map(|(depth, columns)| {
                (codes(depth), prop::collection::vec(codes(columns), depth), accumulators(columns))
            })
        ) {
            let mut d = c.clone();
            Accumulation::OneLevel.chain(&row(&a), &operand(&b), 0..a.len(), &mut d);
            for (column, (&c, d)) in c.iter().zip(d).enumerate() {
                let b: Vec<u8> = b.iter().map(|row| row[column]).collect();
                let expected = model(&a, &b, c);
                prop_assert_eq!(d.to_bits(), expected.to_bits(), "{:?} {:?} {:e}: {:e} {:e}", a, b, c, d, expected);
            }
        }

        #[test]
        fn longer_sums_are_chained(a in codes(100), b in codes(100), first in 0usize..100, c in -100.0..100.0f32) {
            let mut d = [c];
            let column: Vec<Vec<u8>> = b.iter().map(|&code| vec![code]).collect();
            Accumulation::TwoLevel { keys: 32 }.chain(&row(&a), &operand(&column), first..100, &mut d);
            let steps = a[first..].chunks(32).zip(b[first..].chunks(32));
            let expected = steps.fold(c, |c, (a, b)| model(a, b, c));
            prop_assert_eq!(d[0].to_bits(), expected.to_bits());
        }

        #[test]
        fn float_sums_round_every_product(a in codes(40), b in codes(40)) {
            let mut d = [0.0];
            let column: Vec<Vec<u8>> = b.iter().map(|&code| vec![code]).collect();
            Accumulation::Fp32.chain(&row(&a), &operand(&column), 0..40, &mut d);
            let value = |code: u8| E4m3::from_bits(code).to_f32();
            let expected = a.iter().zip(&b).fold(0.0f32, |sum, (&a, &b)| value(a).mul_add(value(b), sum));
            prop_assert!(d[0] == expected || (d[0].is_nan() && expected.is_nan()));
        }
    }

    #[test]
    fn every_pair_of_codes_next_to_every_binade() {
        // Each trial adds one product to an accumulator, which ranges from far below the product to far above it.
        let all: Vec<Vec<u8>> = vec![(0..=255).collect()];
        let b = operand(&all);
        for a in 0..=255u8 {
            for exponent in (-30..40).step_by(3) {
                let c = 1.999_999_9 * f32::exp2(exponent as f32) * if a & 1 == 0 { 1.0 } else { -1.0 };
                let mut d = vec![c; 256];
                Accumulation::OneLevel.chain(&row(&[a]), &b, 0..1, &mut d);
                for (b, d) in d.into_iter().enumerate() {
                    assert_eq!(d.to_bits(), model(&[a], &[b as u8], c).to_bits(), "{a} {b} {c:e}");
                }
            }
        }
    }

    #[test]
    fn small_products_vanish_beside_a_large_sum() {
        // 1 is 2^-14 of 16384, below the 13 fraction bits of 16384, so adding ones never changes the sum.
        let ones = vec![0x38u8; 3200];
        let b = operand(&ones.iter().map(|&one| vec![one]).collect::<Vec<_>>());
        let mut d = [16384.0];
        Accumulation::OneLevel.chain(&row(&ones), &b, 0..3200, &mut d);
        assert_eq!(d, [16384.0]);
        Accumulation::Fp32.chain(&row(&ones), &b, 0..3200, &mut d);
        assert_eq!(d, [16384.0 + 3200.0]);
    }
}
