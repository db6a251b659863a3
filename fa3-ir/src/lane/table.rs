//! The table of lane operations. A row is a sentence, a signature and a line of PTX; it is the only place to add one.

use super::{Results, lane_ops};
use crate::Ty;
use crate::lang::{Arg, B16, B32, B64, F32, Pred, V};

lane_ops! {
    // 32-bit integers. Without a sign in the name the result is the same for both readings.
    /// a + b.
    AddU32: (a: B32, b: B32) -> B32 = "add.u32 d, a, b";
    /// a − b.
    SubU32: (a: B32, b: B32) -> B32 = "sub.u32 d, a, b";
    /// The lower half of a · b.
    MulU32: (a: B32, b: B32) -> B32 = "mul.lo.u32 d, a, b";
    /// The upper half of the unsigned a · b.
    MulHiU32: fn mul_hi(a: B32, b: B32) -> B32 = "mul.hi.u32 d, a, b";
    /// The upper half of the signed a · b.
    MulHiS32: fn mul_hi_s32(a: B32, b: B32) -> B32 = "mul.hi.s32 d, a, b";
    /// The lower half of a · b, plus c.
    MadU32: fn mad(a: B32, b: B32, c: B32) -> B32 = "mad.lo.u32 d, a, b, c";
    /// The unsigned minimum.
    MinU32: fn min(a: B32, b: B32) -> B32 = "min.u32 d, a, b";
    /// The unsigned maximum.
    MaxU32: fn max(a: B32, b: B32) -> B32 = "max.u32 d, a, b";
    /// The signed minimum.
    MinS32: fn min_s32(a: B32, b: B32) -> B32 = "min.s32 d, a, b";
    /// The signed maximum.
    MaxS32: fn max_s32(a: B32, b: B32) -> B32 = "max.s32 d, a, b";
    /// −a.
    NegS32: (a: B32) -> B32 = "neg.s32 d, a";
    /// |a|; −2³¹ stays itself.
    AbsS32: fn abs_s32(a: B32) -> B32 = "abs.s32 d, a";
    /// The number of ones.
    PopcB32: fn popc(a: B32) -> B32 = "popc.b32 d, a";
    /// The number of zeros above the highest one; 32 if there is none.
    ClzB32: fn clz(a: B32) -> B32 = "clz.b32 d, a";

    // 32-bit logic. A shift by 32 or more shifts everything out.
    /// a ∧ b.
    AndB32: (a: B32, b: B32) -> B32 = "and.b32 d, a, b";
    /// a ∨ b.
    OrB32: (a: B32, b: B32) -> B32 = "or.b32 d, a, b";
    /// a ⊕ b.
    XorB32: (a: B32, b: B32) -> B32 = "xor.b32 d, a, b";
    /// ¬a.
    NotB32: (a: B32) -> B32 = "not.b32 d, a";
    /// a · 2^b.
    ShlB32: (a: B32, b: B32) -> B32 = "shl.b32 d, a, b";
    /// a / 2^b of an unsigned a, rounded down.
    ShrU32: (a: B32, b: B32) -> B32 = "shr.u32 d, a, b";
    /// a / 2^b of a signed a, rounded down.
    ShrS32: fn shr_s32(a: B32, b: B32) -> B32 = "shr.s32 d, a, b";
    /// The c bits of a from bit b on, with zeros above.
    BfeU32: fn bfe(a: B32, b: B32, c: B32) -> B32 = "bfe.u32 d, a, b, c";
    /// The c bits of a from bit b on, with copies of the uppermost above.
    BfeS32: fn bfe_s32(a: B32, b: B32, c: B32) -> B32 = "bfe.s32 d, a, b, c";
    /// Four bytes out of the eight of b:a, chosen by the four lower nibbles of c; a nibble of 8 or more
    /// spreads the byte's sign.
    PrmtB32: fn prmt(a: B32, b: B32, c: B32) -> B32 = "prmt.b32 d, a, b, c";

    // 64-bit integers.
    /// a + b.
    AddU64: (a: B64, b: B64) -> B64 = "add.u64 d, a, b";
    /// a − b.
    SubU64: (a: B64, b: B64) -> B64 = "sub.u64 d, a, b";
    /// The lower half of a · b.
    MulU64: (a: B64, b: B64) -> B64 = "mul.lo.u64 d, a, b";
    /// The 64 bits of the unsigned a · b.
    MulWideU32: fn mul_wide(a: B32, b: B32) -> B64 = "mul.wide.u32 d, a, b";
    /// The 64 bits of the signed a · b.
    MulWideS32: fn mul_wide_s32(a: B32, b: B32) -> B64 = "mul.wide.s32 d, a, b";
    /// The 64 bits of the unsigned a · b, plus c.
    MadWideU32: fn mad_wide(a: B32, b: B32, c: B64) -> B64 = "mad.wide.u32 d, a, b, c";
    /// The 64 bits of the signed a · b, plus c.
    MadWideS32: fn mad_wide_s32(a: B32, b: B32, c: B64) -> B64 = "mad.wide.s32 d, a, b, c";
    /// a ∧ b.
    AndB64: (a: B64, b: B64) -> B64 = "and.b64 d, a, b";
    /// a ∨ b.
    OrB64: (a: B64, b: B64) -> B64 = "or.b64 d, a, b";
    /// a ⊕ b.
    XorB64: (a: B64, b: B64) -> B64 = "xor.b64 d, a, b";
    /// ¬a.
    NotB64: (a: B64) -> B64 = "not.b64 d, a";
    /// a · 2^b.
    ShlB64: (a: B64, b: B32) -> B64 = "shl.b64 d, a, b";
    /// a / 2^b of an unsigned a, rounded down.
    ShrU64: (a: B64, b: B32) -> B64 = "shr.u64 d, a, b";
    /// a / 2^b of a signed a, rounded down.
    ShrS64: fn shr_s64(a: B64, b: B32) -> B64 = "shr.s64 d, a, b";

    // binary32, rounded to nearest even, subnormals kept.
    /// a + b.
    AddF32: (a: F32, b: F32) -> F32 = "add.rn.f32 d, a, b";
    /// a − b.
    SubF32: (a: F32, b: F32) -> F32 = "sub.rn.f32 d, a, b";
    /// a · b.
    MulF32: (a: F32, b: F32) -> F32 = "mul.rn.f32 d, a, b";
    /// a / b.
    DivF32: (a: F32, b: F32) -> F32 = "div.rn.f32 d, a, b";
    /// a · b + c, rounded once.
    FmaF32: fn fma(a: F32, b: F32, c: F32) -> F32 = "fma.rn.f32 d, a, b, c";
    /// The smaller; if one is NaN, the other.
    MinF32: fn min(a: F32, b: F32) -> F32 = "min.f32 d, a, b";
    /// The larger; if one is NaN, the other.
    MaxF32: fn max(a: F32, b: F32) -> F32 = "max.f32 d, a, b";
    /// The smaller; NaN if either is.
    MinNanF32: fn min_nan(a: F32, b: F32) -> F32 = "min.NaN.f32 d, a, b";
    /// The larger; NaN if either is.
    MaxNanF32: fn max_nan(a: F32, b: F32) -> F32 = "max.NaN.f32 d, a, b";
    /// −a.
    NegF32: (a: F32) -> F32 = "neg.f32 d, a";
    /// |a|.
    AbsF32: fn abs(a: F32) -> F32 = "abs.f32 d, a";

    // Approximations by the special-function unit; subnormals count as zero.
    /// 2^a.
    Ex2: fn ex2(a: F32) -> F32 = "ex2.approx.ftz.f32 d, a";
    /// log₂ a.
    Lg2: fn lg2(a: F32) -> F32 = "lg2.approx.ftz.f32 d, a";
    /// 1 / a.
    Rcp: fn rcp(a: F32) -> F32 = "rcp.approx.ftz.f32 d, a";
    /// 1 / √a.
    Rsqrt: fn rsqrt(a: F32) -> F32 = "rsqrt.approx.ftz.f32 d, a";
    /// √a.
    Sqrt: fn sqrt(a: F32) -> F32 = "sqrt.approx.ftz.f32 d, a";
    /// tanh a, subnormals kept.
    Tanh: fn tanh_approx(a: F32) -> F32 = "tanh.approx.f32 d, a";

    // Pairs of f16 in 32 bits, rounded to nearest even.
    /// a + b.
    AddF16x2: fn add_f16x2(a: B32, b: B32) -> B32 = "add.rn.f16x2 d, a, b";
    /// a − b.
    SubF16x2: fn sub_f16x2(a: B32, b: B32) -> B32 = "sub.rn.f16x2 d, a, b";
    /// a · b.
    MulF16x2: fn mul_f16x2(a: B32, b: B32) -> B32 = "mul.rn.f16x2 d, a, b";
    /// a · b + c, rounded once.
    FmaF16x2: fn fma_f16x2(a: B32, b: B32, c: B32) -> B32 = "fma.rn.f16x2 d, a, b, c";
    /// The smaller; if one is NaN, the other.
    MinF16x2: fn min_f16x2(a: B32, b: B32) -> B32 = "min.f16x2 d, a, b";
    /// The larger; if one is NaN, the other.
    MaxF16x2: fn max_f16x2(a: B32, b: B32) -> B32 = "max.f16x2 d, a, b";
    /// The larger; NaN if either is.
    MaxNanF16x2: fn max_nan_f16x2(a: B32, b: B32) -> B32 = "max.NaN.f16x2 d, a, b";
    /// −a.
    NegF16x2: fn neg_f16x2(a: B32) -> B32 = "neg.f16x2 d, a";
    /// |a|.
    AbsF16x2: fn abs_f16x2(a: B32) -> B32 = "abs.f16x2 d, a";

    // Pairs of bf16 in 32 bits, rounded to nearest even.
    /// a + b.
    AddBf16x2: fn add_bf16x2(a: B32, b: B32) -> B32 = "add.rn.bf16x2 d, a, b";
    /// a − b.
    SubBf16x2: fn sub_bf16x2(a: B32, b: B32) -> B32 = "sub.rn.bf16x2 d, a, b";
    /// a · b.
    MulBf16x2: fn mul_bf16x2(a: B32, b: B32) -> B32 = "mul.rn.bf16x2 d, a, b";
    /// a · b + c, rounded once.
    FmaBf16x2: fn fma_bf16x2(a: B32, b: B32, c: B32) -> B32 = "fma.rn.bf16x2 d, a, b, c";
    /// The smaller; if one is NaN, the other.
    MinBf16x2: fn min_bf16x2(a: B32, b: B32) -> B32 = "min.bf16x2 d, a, b";
    /// The larger; if one is NaN, the other.
    MaxBf16x2: fn max_bf16x2(a: B32, b: B32) -> B32 = "max.bf16x2 d, a, b";
    /// The larger; NaN if either is.
    MaxNanBf16x2: fn max_nan_bf16x2(a: B32, b: B32) -> B32 = "max.NaN.bf16x2 d, a, b";
    /// −a.
    NegBf16x2: fn neg_bf16x2(a: B32) -> B32 = "neg.bf16x2 d, a";
    /// |a|.
    AbsBf16x2: fn abs_bf16x2(a: B32) -> B32 = "abs.bf16x2 d, a";

    // Comparisons.
    /// a = b.
    EqB32: fn eq(a: B32, b: B32) -> Pred = "setp.eq.b32 d, a, b";
    /// a ≠ b.
    NeB32: fn ne(a: B32, b: B32) -> Pred = "setp.ne.b32 d, a, b";
    /// a < b as unsigned numbers.
    LtU32: fn lt(a: B32, b: B32) -> Pred = "setp.lt.u32 d, a, b";
    /// a ≤ b as unsigned numbers.
    LeU32: fn le(a: B32, b: B32) -> Pred = "setp.le.u32 d, a, b";
    /// a > b as unsigned numbers.
    GtU32: fn gt(a: B32, b: B32) -> Pred = "setp.gt.u32 d, a, b";
    /// a ≥ b as unsigned numbers.
    GeU32: fn ge(a: B32, b: B32) -> Pred = "setp.ge.u32 d, a, b";
    /// a < b as signed numbers.
    LtS32: fn lt_s32(a: B32, b: B32) -> Pred = "setp.lt.s32 d, a, b";
    /// a ≤ b as signed numbers.
    LeS32: fn le_s32(a: B32, b: B32) -> Pred = "setp.le.s32 d, a, b";
    /// a > b as signed numbers.
    GtS32: fn gt_s32(a: B32, b: B32) -> Pred = "setp.gt.s32 d, a, b";
    /// a ≥ b as signed numbers.
    GeS32: fn ge_s32(a: B32, b: B32) -> Pred = "setp.ge.s32 d, a, b";
    /// a = b.
    EqB64: fn eq(a: B64, b: B64) -> Pred = "setp.eq.b64 d, a, b";
    /// a ≠ b.
    NeB64: fn ne(a: B64, b: B64) -> Pred = "setp.ne.b64 d, a, b";
    /// a < b as unsigned numbers.
    LtU64: fn lt(a: B64, b: B64) -> Pred = "setp.lt.u64 d, a, b";
    /// a ≤ b as unsigned numbers.
    LeU64: fn le(a: B64, b: B64) -> Pred = "setp.le.u64 d, a, b";
    /// a > b as unsigned numbers.
    GtU64: fn gt(a: B64, b: B64) -> Pred = "setp.gt.u64 d, a, b";
    /// a ≥ b as unsigned numbers.
    GeU64: fn ge(a: B64, b: B64) -> Pred = "setp.ge.u64 d, a, b";
    /// a < b as signed numbers.
    LtS64: fn lt_s64(a: B64, b: B64) -> Pred = "setp.lt.s64 d, a, b";
    /// a ≤ b as signed numbers.
    LeS64: fn le_s64(a: B64, b: B64) -> Pred = "setp.le.s64 d, a, b";
    /// a > b as signed numbers.
    GtS64: fn gt_s64(a: B64, b: B64) -> Pred = "setp.gt.s64 d, a, b";
    /// a ≥ b as signed numbers.
    GeS64: fn ge_s64(a: B64, b: B64) -> Pred = "setp.ge.s64 d, a, b";
    /// a = b.
    EqB16: fn eq(a: B16, b: B16) -> Pred = "setp.eq.b16 d, a, b";
    /// a ≠ b.
    NeB16: fn ne(a: B16, b: B16) -> Pred = "setp.ne.b16 d, a, b";
    /// a = b; false if either is NaN.
    EqF32: fn eq(a: F32, b: F32) -> Pred = "setp.eq.f32 d, a, b";
    /// a ≠ b; false if either is NaN.
    NeF32: fn ne(a: F32, b: F32) -> Pred = "setp.ne.f32 d, a, b";
    /// a < b; false if either is NaN.
    LtF32: fn lt(a: F32, b: F32) -> Pred = "setp.lt.f32 d, a, b";
    /// a ≤ b; false if either is NaN.
    LeF32: fn le(a: F32, b: F32) -> Pred = "setp.le.f32 d, a, b";
    /// a > b; false if either is NaN.
    GtF32: fn gt(a: F32, b: F32) -> Pred = "setp.gt.f32 d, a, b";
    /// a ≥ b; false if either is NaN.
    GeF32: fn ge(a: F32, b: F32) -> Pred = "setp.ge.f32 d, a, b";
    /// a = b; true if either is NaN.
    EquF32: fn equ(a: F32, b: F32) -> Pred = "setp.equ.f32 d, a, b";
    /// a ≠ b; true if either is NaN.
    NeuF32: fn neu(a: F32, b: F32) -> Pred = "setp.neu.f32 d, a, b";
    /// a < b; true if either is NaN.
    LtuF32: fn ltu(a: F32, b: F32) -> Pred = "setp.ltu.f32 d, a, b";
    /// a ≤ b; true if either is NaN.
    LeuF32: fn leu(a: F32, b: F32) -> Pred = "setp.leu.f32 d, a, b";
    /// a > b; true if either is NaN.
    GtuF32: fn gtu(a: F32, b: F32) -> Pred = "setp.gtu.f32 d, a, b";
    /// a ≥ b; true if either is NaN.
    GeuF32: fn geu(a: F32, b: F32) -> Pred = "setp.geu.f32 d, a, b";
    /// Neither is NaN.
    OrderedF32: fn ordered(a: F32, b: F32) -> Pred = "setp.num.f32 d, a, b";
    /// Either is NaN.
    UnorderedF32: fn unordered(a: F32, b: F32) -> Pred = "setp.nan.f32 d, a, b";

    // Predicates.
    /// a ∧ b.
    AndPred: (a: Pred, b: Pred) -> Pred = "and.pred d, a, b";
    /// a ∨ b.
    OrPred: (a: Pred, b: Pred) -> Pred = "or.pred d, a, b";
    /// a ⊕ b.
    XorPred: (a: Pred, b: Pred) -> Pred = "xor.pred d, a, b";
    /// ¬a.
    NotPred: fn negated(a: Pred) -> Pred = "not.pred d, a";
    /// a where c holds, b elsewhere.
    SelectB16: (a: B16, b: B16, c: Pred) -> B16 = "selp.b16 d, a, b, c";
    /// a where c holds, b elsewhere.
    SelectB32: (a: B32, b: B32, c: Pred) -> B32 = "selp.b32 d, a, b, c";
    /// a where c holds, b elsewhere.
    SelectB64: (a: B64, b: B64, c: Pred) -> B64 = "selp.b64 d, a, b, c";
    /// a where c holds, b elsewhere.
    SelectF32: (a: F32, b: F32, c: Pred) -> F32 = "selp.f32 d, a, b, c";

    // Copies, and reinterpretations of bits.
    /// a.
    MovPred: (a: Pred) -> Pred = "mov.pred d, a";
    /// a.
    MovB16: (a: B16) -> B16 = "mov.b16 d, a";
    /// a.
    MovB32: (a: B32) -> B32 = "mov.b32 d, a";
    /// a.
    MovB64: (a: B64) -> B64 = "mov.b64 d, a";
    /// a.
    MovF32: (a: F32) -> F32 = "mov.f32 d, a";
    /// The bits of a binary32.
    BitsOfF32: fn as_bits(a: F32) -> B32 = "mov.b32 d, a";
    /// The binary32 with these bits.
    F32OfBits: fn as_f32(a: B32) -> F32 = "mov.b32 d, a";
    /// a as the lower half, b as the upper half.
    PackB32: fn below(a: B16, b: B16) -> B32 = "mov.b32 d, {a, b}";
    /// The lower and the upper half.
    UnpackB32: fn halves(a: B32) -> (B16, B16) = "mov.b32 {d, e}, a";
    /// a as the lower half, b as the upper half.
    PackB64: fn below(a: B32, b: B32) -> B64 = "mov.b64 d, {a, b}";
    /// The lower and the upper half.
    UnpackB64: fn halves(a: B64) -> (B32, B32) = "mov.b64 {d, e}, a";

    // Conversions of integers.
    /// a with zeros above.
    U64OfU32: fn to_u64(a: B32) -> B64 = "cvt.u64.u32 d, a";
    /// a with copies of its sign above.
    S64OfS32: fn to_s64(a: B32) -> B64 = "cvt.s64.s32 d, a";
    /// The lower half.
    U32OfU64: fn to_u32(a: B64) -> B32 = "cvt.u32.u64 d, a";
    /// a with zeros above.
    U32OfU16: fn to_u32(a: B16) -> B32 = "cvt.u32.u16 d, a";
    /// The lower half.
    U16OfU32: fn to_u16(a: B32) -> B16 = "cvt.u16.u32 d, a";
    /// The nearest binary32, ties to even.
    F32OfU32: fn to_f32(a: B32) -> F32 = "cvt.rn.f32.u32 d, a";
    /// The nearest binary32, ties to even.
    F32OfS32: fn to_f32_signed(a: B32) -> F32 = "cvt.rn.f32.s32 d, a";
    /// a rounded to zero, clamped; 0 for NaN.
    U32OfF32: fn to_u32(a: F32) -> B32 = "cvt.rzi.u32.f32 d, a";
    /// a rounded to zero, clamped; 0 for NaN.
    S32OfF32: fn to_s32(a: F32) -> B32 = "cvt.rzi.s32.f32 d, a";
    /// a rounded to nearest even, clamped; 0 for NaN.
    S32OfF32Nearest: fn to_s32_nearest(a: F32) -> B32 = "cvt.rni.s32.f32 d, a";
    /// a rounded down, clamped; 0 for NaN.
    S32OfF32Down: fn to_s32_down(a: F32) -> B32 = "cvt.rmi.s32.f32 d, a";

    // Conversions of floating-point numbers, rounded to nearest even. The first operand of a pair is the upper half.
    /// a, exactly.
    F32OfF16: fn f16_to_f32(a: B16) -> F32 = "cvt.f32.f16 d, a";
    /// a, exactly.
    F32OfBf16: fn bf16_to_f32(a: B16) -> F32 = "cvt.f32.bf16 d, a";
    /// The nearest f16.
    F16OfF32: fn to_f16(a: F32) -> B16 = "cvt.rn.f16.f32 d, a";
    /// The nearest bf16.
    Bf16OfF32: fn to_bf16(a: F32) -> B16 = "cvt.rn.bf16.f32 d, a";
    /// The nearest f16 of a as the upper half, of b as the lower half.
    F16x2OfF32: fn f16x2_above(a: F32, b: F32) -> B32 = "cvt.rn.f16x2.f32 d, a, b";
    /// The nearest bf16 of a as the upper half, of b as the lower half.
    Bf16x2OfF32: fn bf16x2_above(a: F32, b: F32) -> B32 = "cvt.rn.bf16x2.f32 d, a, b";
    /// The nearest e4m3 of a as the upper half, of b as the lower half; clamped to ±448.
    E4m3x2OfF32: fn e4m3x2_above(a: F32, b: F32) -> B16 = "cvt.rn.satfinite.e4m3x2.f32 d, a, b";
    /// The nearest e4m3 of both halves; clamped to ±448.
    E4m3x2OfF16x2: fn f16x2_to_e4m3x2(a: B32) -> B16 = "cvt.rn.satfinite.e4m3x2.f16x2 d, a";
    /// Both halves, exactly.
    F16x2OfE4m3x2: fn e4m3x2_to_f16x2(a: B16) -> B32 = "cvt.rn.f16x2.e4m3x2 d, a";
}
