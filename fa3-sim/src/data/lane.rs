//! Pure operations of a lane: the semantics of every row of [`LaneOp`]'s table.

use fa3_ir::LaneOp;

use super::Lanes;
use super::float::{Bf16, F16, Half, canonical};
use super::{approx, convert, float};

/// Computes `op` in all lanes. `src` has [`LaneOp::inputs`] registers, and `dst` has [`LaneOp::outputs`].
///
/// # Panics
/// If `src` or `dst` has fewer registers.
#[expect(clippy::too_many_lines, reason = "one line an operation")]
pub fn eval(op: LaneOp, src: &[&Lanes], dst: &mut [Lanes]) {
    let io = (src, dst);
    match op {
        LaneOp::AddU32 => binary(io, u32::wrapping_add),
        LaneOp::SubU32 => binary(io, u32::wrapping_sub),
        LaneOp::MulU32 => binary(io, u32::wrapping_mul),
        LaneOp::MulHiU32 => binary(io, |a: u32, b: u32| ((u64::from(a) * u64::from(b)) >> 32) as u32),
        LaneOp::MulHiS32 => binary(io, |a: i32, b: i32| ((i64::from(a) * i64::from(b)) >> 32) as i32),
        LaneOp::MadU32 => ternary(io, |a: u32, b: u32, c: u32| a.wrapping_mul(b).wrapping_add(c)),
        LaneOp::MinU32 => binary(io, <u32 as Ord>::min),
        LaneOp::MaxU32 => binary(io, <u32 as Ord>::max),
        LaneOp::MinS32 => binary(io, <i32 as Ord>::min),
        LaneOp::MaxS32 => binary(io, <i32 as Ord>::max),
        LaneOp::NegS32 => unary(io, i32::wrapping_neg),
        LaneOp::AbsS32 => unary(io, i32::wrapping_abs),
        LaneOp::PopcB32 => unary(io, u32::count_ones),
        LaneOp::ClzB32 => unary(io, u32::leading_zeros),

        LaneOp::AndB32 | LaneOp::AndB64 | LaneOp::AndPred => binary(io, |a: u64, b: u64| a & b),
        LaneOp::OrB32 | LaneOp::OrB64 | LaneOp::OrPred => binary(io, |a: u64, b: u64| a | b),
        LaneOp::XorB32 | LaneOp::XorB64 | LaneOp::XorPred => binary(io, |a: u64, b: u64| a ^ b),
        LaneOp::NotB32 => unary(io, |a: u32| !a),
        LaneOp::ShlB32 => binary(io, |a: u32, b: u32| a.checked_shl(b).unwrap_or(0)),
        LaneOp::ShrU32 => binary(io, |a: u32, b: u32| a.checked_shr(b).unwrap_or(0)),
        LaneOp::ShrS32 => binary(io, |a: i32, b: u32| a >> b.min(31)),
        LaneOp::BfeU32 => ternary(io, bit_field),
        LaneOp::BfeS32 => ternary(io, signed_bit_field),
        LaneOp::PrmtB32 => ternary(io, permute),

        LaneOp::AddU64 => binary(io, u64::wrapping_add),
        LaneOp::SubU64 => binary(io, u64::wrapping_sub),
        LaneOp::MulU64 => binary(io, u64::wrapping_mul),
        LaneOp::MulWideU32 => binary(io, |a: u32, b: u32| u64::from(a) * u64::from(b)),
        LaneOp::MulWideS32 => binary(io, |a: i32, b: i32| i64::from(a) * i64::from(b)),
        LaneOp::MadWideU32 => {
            ternary(io, |a: u32, b: u32, c: u64| (u64::from(a) * u64::from(b)).wrapping_add(c));
        }
        LaneOp::MadWideS32 => {
            ternary(io, |a: i32, b: i32, c: i64| (i64::from(a) * i64::from(b)).wrapping_add(c));
        }
        LaneOp::NotB64 => unary(io, |a: u64| !a),
        LaneOp::ShlB64 => binary(io, |a: u64, b: u32| a.checked_shl(b).unwrap_or(0)),
        LaneOp::ShrU64 => binary(io, |a: u64, b: u32| a.checked_shr(b).unwrap_or(0)),
        LaneOp::ShrS64 => binary(io, |a: i64, b: u32| a >> b.min(63)),

        LaneOp::AddF32 => binary(io, |a: f32, b: f32| canonical(a + b)),
        LaneOp::SubF32 => binary(io, |a: f32, b: f32| canonical(a - b)),
        LaneOp::MulF32 => binary(io, |a: f32, b: f32| canonical(a * b)),
        LaneOp::DivF32 => binary(io, |a: f32, b: f32| canonical(a / b)),
        LaneOp::FmaF32 => ternary(io, |a: f32, b: f32, c: f32| canonical(float::fma(a, b, c))),
        LaneOp::MinF32 => binary(io, float::min),
        LaneOp::MaxF32 => binary(io, float::max),
        LaneOp::MinNanF32 => binary(io, float::min_nan),
        LaneOp::MaxNanF32 => binary(io, float::max_nan),
        LaneOp::NegF32 => unary(io, |a: f32| canonical(-a)),
        LaneOp::AbsF32 => unary(io, |a: f32| canonical(a.abs())),

        LaneOp::Ex2 => unary(io, approx::ex2),
        LaneOp::Lg2 => unary(io, approx::lg2),
        LaneOp::Rcp => unary(io, approx::rcp),
        LaneOp::Rsqrt => unary(io, approx::rsqrt),
        LaneOp::Sqrt => unary(io, approx::sqrt),
        LaneOp::Tanh => unary(io, approx::tanh),

        LaneOp::AddF16x2 => binary(io, pairs::<F16>(|a, b| a + b)),
        LaneOp::SubF16x2 => binary(io, pairs::<F16>(|a, b| a - b)),
        LaneOp::MulF16x2 => binary(io, pairs::<F16>(|a, b| a * b)),
        LaneOp::FmaF16x2 => ternary(io, fma_pairs::<F16>),
        LaneOp::MinF16x2 => binary(io, pairs::<F16>(float::min)),
        LaneOp::MaxF16x2 => binary(io, pairs::<F16>(float::max)),
        LaneOp::MaxNanF16x2 => binary(io, pairs::<F16>(float::max_nan)),
        LaneOp::NegF16x2 => unary(io, each::<F16>(|a| -a)),
        LaneOp::AbsF16x2 => unary(io, each::<F16>(f32::abs)),
        LaneOp::AddBf16x2 => binary(io, pairs::<Bf16>(|a, b| a + b)),
        LaneOp::SubBf16x2 => binary(io, pairs::<Bf16>(|a, b| a - b)),
        LaneOp::MulBf16x2 => binary(io, pairs::<Bf16>(|a, b| a * b)),
        LaneOp::FmaBf16x2 => ternary(io, fma_pairs::<Bf16>),
        LaneOp::MinBf16x2 => binary(io, pairs::<Bf16>(float::min)),
        LaneOp::MaxBf16x2 => binary(io, pairs::<Bf16>(float::max)),
        LaneOp::MaxNanBf16x2 => binary(io, pairs::<Bf16>(float::max_nan)),
        LaneOp::NegBf16x2 => unary(io, each::<Bf16>(|a| -a)),
        LaneOp::AbsBf16x2 => unary(io, each::<Bf16>(f32::abs)),

        LaneOp::EqB16 | LaneOp::EqB32 | LaneOp::EqB64 => binary(io, |a: u64, b: u64| a == b),
        LaneOp::NeB16 | LaneOp::NeB32 | LaneOp::NeB64 => binary(io, |a: u64, b: u64| a != b),
        LaneOp::LtU32 | LaneOp::LtU64 => binary(io, |a: u64, b: u64| a < b),
        LaneOp::LeU32 | LaneOp::LeU64 => binary(io, |a: u64, b: u64| a <= b),
        LaneOp::GtU32 | LaneOp::GtU64 => binary(io, |a: u64, b: u64| a > b),
        LaneOp::GeU32 | LaneOp::GeU64 => binary(io, |a: u64, b: u64| a >= b),
        LaneOp::LtS32 => binary(io, |a: i32, b: i32| a < b),
        LaneOp::LeS32 => binary(io, |a: i32, b: i32| a <= b),
        LaneOp::GtS32 => binary(io, |a: i32, b: i32| a > b),
        LaneOp::GeS32 => binary(io, |a: i32, b: i32| a >= b),
        LaneOp::LtS64 => binary(io, |a: i64, b: i64| a < b),
        LaneOp::LeS64 => binary(io, |a: i64, b: i64| a <= b),
        LaneOp::GtS64 => binary(io, |a: i64, b: i64| a > b),
        LaneOp::GeS64 => binary(io, |a: i64, b: i64| a >= b),
        LaneOp::EqF32 => binary(io, |a: f32, b: f32| a == b),
        LaneOp::NeF32 => binary(io, |a: f32, b: f32| !unordered(a, b) && a != b),
        LaneOp::LtF32 => binary(io, |a: f32, b: f32| a < b),
        LaneOp::LeF32 => binary(io, |a: f32, b: f32| a <= b),
        LaneOp::GtF32 => binary(io, |a: f32, b: f32| a > b),
        LaneOp::GeF32 => binary(io, |a: f32, b: f32| a >= b),
        LaneOp::EquF32 => binary(io, |a: f32, b: f32| unordered(a, b) || a == b),
        LaneOp::NeuF32 => binary(io, |a: f32, b: f32| a != b),
        LaneOp::LtuF32 => binary(io, |a: f32, b: f32| unordered(a, b) || a < b),
        LaneOp::LeuF32 => binary(io, |a: f32, b: f32| unordered(a, b) || a <= b),
        LaneOp::GtuF32 => binary(io, |a: f32, b: f32| unordered(a, b) || a > b),
        LaneOp::GeuF32 => binary(io, |a: f32, b: f32| unordered(a, b) || a >= b),
        LaneOp::OrderedF32 => binary(io, |a: f32, b: f32| !unordered(a, b)),
        LaneOp::UnorderedF32 => binary(io, unordered),

        LaneOp::NotPred => unary(io, |a: bool| !a),
        LaneOp::SelectB16 | LaneOp::SelectB32 | LaneOp::SelectB64 | LaneOp::SelectF32 => {
            ternary(io, |a: u64, b: u64, c: bool| if c { a } else { b });
        }

        LaneOp::MovPred
        | LaneOp::MovB16
        | LaneOp::MovB32
        | LaneOp::MovB64
        | LaneOp::MovF32
        | LaneOp::BitsOfF32
        | LaneOp::F32OfBits
        | LaneOp::U64OfU32
        | LaneOp::U32OfU16 => io.1[0] = *io.0[0],
        LaneOp::PackB32 => binary(io, |a: u16, b: u16| u32::from(a) | u32::from(b) << 16),
        LaneOp::PackB64 => binary(io, |a: u32, b: u32| u64::from(a) | u64::from(b) << 32),
        LaneOp::UnpackB32 => split(io, 16),
        LaneOp::UnpackB64 => split(io, 32),

        LaneOp::S64OfS32 => unary(io, |a: i32| i64::from(a)),
        LaneOp::U32OfU64 => unary(io, |a: u64| a as u32),
        LaneOp::U16OfU32 => unary(io, |a: u32| a as u16),
        LaneOp::F32OfU32 => unary(io, |a: u32| a as f32),
        LaneOp::F32OfS32 => unary(io, |a: i32| a as f32),
        // Rust's casts truncate, clamp, and give 0 for NaN as well.
        LaneOp::U32OfF32 => unary(io, |a: f32| a as u32),
        LaneOp::S32OfF32 => unary(io, |a: f32| a as i32),
        LaneOp::S32OfF32Nearest => unary(io, |a: f32| a.round_ties_even() as i32),
        LaneOp::S32OfF32Down => unary(io, |a: f32| a.floor() as i32),

        LaneOp::F32OfF16 => unary(io, convert::f32_of_f16),
        LaneOp::F32OfBf16 => unary(io, convert::f32_of_bf16),
        LaneOp::F16OfF32 => unary(io, convert::f16_of_f32),
        LaneOp::Bf16OfF32 => unary(io, convert::bf16_of_f32),
        LaneOp::F16x2OfF32 => {
            binary(io, |a: f32, b: f32| pair([convert::f16_of_f32(b), convert::f16_of_f32(a)]));
        }
        LaneOp::Bf16x2OfF32 => {
            binary(io, |a: f32, b: f32| pair([convert::bf16_of_f32(b), convert::bf16_of_f32(a)]));
        }
        LaneOp::E4m3x2OfF32 => binary(io, |a: f32, b: f32| e4m3_pair([b, a])),
        LaneOp::E4m3x2OfF16x2 => unary(io, |a: u32| e4m3_pair(halves(a).map(convert::f32_of_f16))),
        LaneOp::F16x2OfE4m3x2 => unary(io, |a: u16| {
            pair(a.to_le_bytes().map(|code| convert::f16_of_f32(convert::f32_of_e4m3(code))))
        }),
    }
}

/// The class of an operand as a Rust type.
trait Bits: Copy {
    fn of(bits: u64) -> Self;
    fn bits(self) -> u64;
}

macro_rules! bits {
    ($($ty:ty: |$bits:ident| $of:expr, |$x:ident| $to:expr;)+) => {$(
        impl Bits for $ty {
            #[inline]
            fn of($bits: u64) -> $ty {
                $of
            }
            #[inline]
            fn bits(self) -> u64 {
                let $x = self;
                $to
            }
        }
    )+};
}

bits! {
    bool: |bits| bits != 0, |x| x.into();
    u16: |bits| bits as u16, |x| x.into();
    u32: |bits| bits as u32, |x| x.into();
    i32: |bits| bits as i32, |x| x.cast_unsigned().into();
    u64: |bits| bits, |x| x;
    i64: |bits| bits.cast_signed(), |x| x.cast_unsigned();
    f32: |bits| f32::from_bits(bits as u32), |x| x.to_bits().into();
}

/// The operands and the results.
type Io<'a> = (&'a [&'a Lanes], &'a mut [Lanes]);

#[inline]
fn unary<A: Bits, D: Bits>((src, dst): Io<'_>, f: impl Fn(A) -> D) {
    for (d, &a) in dst[0].iter_mut().zip(src[0]) {
        *d = f(A::of(a)).bits();
    }
}

#[inline]
fn binary<A: Bits, B: Bits, D: Bits>((src, dst): Io<'_>, f: impl Fn(A, B) -> D) {
    for ((d, &a), &b) in dst[0].iter_mut().zip(src[0]).zip(src[1]) {
        *d = f(A::of(a), B::of(b)).bits();
    }
}

#[inline]
fn ternary<A: Bits, B: Bits, C: Bits, D: Bits>((src, dst): Io<'_>, f: impl Fn(A, B, C) -> D) {
    for (((d, &a), &b), &c) in dst[0].iter_mut().zip(src[0]).zip(src[1]).zip(src[2]) {
        *d = f(A::of(a), B::of(b), C::of(c)).bits();
    }
}

/// The `width` lower bits, and the bits above.
fn split((src, dst): Io<'_>, width: u32) {
    dst[0] = src[0].map(|a| a & ((1 << width) - 1));
    dst[1] = src[0].map(|a| a >> width);
}

/// The `len` bits of `a` from `pos` on, with zeros above.
fn bit_field(a: u32, pos: u32, len: u32) -> u32 {
    let [pos, len] = [pos, len].map(|x| (x & 0xFF).min(32));
    let ones = (1u64 << len) - 1;
    (u64::from(a) >> pos & ones) as u32
}

/// The `len` bits of `a` from `pos` on. The bits above are copies of the field's uppermost bit, or of the sign of `a`
/// if the field reaches beyond `a`.
fn signed_bit_field(a: i32, pos: u32, len: u32) -> i32 {
    let [pos, len] = [pos, len].map(|x| (x & 0xFF).min(32));
    let unused = 64 - len;
    if len == 0 { 0 } else { (i64::from(a) >> pos << unused >> unused) as i32 }
}

/// Four of the eight bytes of b:a. A selector of 8 or more replicates the sign of its byte.
fn permute(a: u32, b: u32, selectors: u32) -> u32 {
    let bytes = (u64::from(a) | u64::from(b) << 32).to_le_bytes();
    u32::from_le_bytes([0, 4, 8, 12].map(|shift| {
        let selector = selectors >> shift;
        let byte = bytes[(selector & 7) as usize];
        if selector & 8 == 0 { byte } else { (byte.cast_signed() >> 7).cast_unsigned() }
    }))
}

fn unordered(a: f32, b: f32) -> bool {
    a.is_nan() || b.is_nan()
}

/// The lower and the upper half.
fn halves(a: u32) -> [u16; 2] {
    [a as u16, (a >> 16) as u16]
}

fn pair([lower, upper]: [u16; 2]) -> u32 {
    u32::from(lower) | u32::from(upper) << 16
}

fn e4m3_pair(x: [f32; 2]) -> u16 {
    u16::from_le_bytes(x.map(convert::e4m3_of_f32))
}

/// Applies `f` to both halves of a word.
fn each<H: Half>(f: impl Fn(f32) -> f32 + Copy) -> impl Fn(u32) -> u32 {
    move |a| pair(halves(a).map(|a| H::narrow(f(H::widen(a)))))
}

/// Applies `f` to both halves of two words.
fn pairs<H: Half>(f: impl Fn(f32, f32) -> f32 + Copy) -> impl Fn(u32, u32) -> u32 {
    move |a, b| {
        let ([a0, a1], [b0, b1]) = (halves(a), halves(b));
        pair([H::binary(a0, b0, f), H::binary(a1, b1, f)])
    }
}

fn fma_pairs<H: Half>(a: u32, b: u32, c: u32) -> u32 {
    let ([a0, a1], [b0, b1], [c0, c1]) = (halves(a), halves(b), halves(c));
    pair([H::fma(a0, b0, c0), H::fma(a1, b1, c1)])
}
