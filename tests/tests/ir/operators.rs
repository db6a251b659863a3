//! Each row of the table of lane operations has an operator or a method.

use fa3_ir::LaneOp::*;
use fa3_ir::lang::*;
use fa3_ir::*;

/// Operands of every class, each in a register of its own.
struct Given<'k> {
    b: &'k Builder,
    h: [V<'k, B16>; 2],
    r: [V<'k, B32>; 3],
    d: [V<'k, B64>; 2],
    f: [V<'k, F32>; 3],
    p: [V<'k, Pred>; 2],
}

/// A function that computes a row's operation. It takes its operands of each class in order.
type Expression = fn(&Given);

const EXPRESSIONS: &[(LaneOp, Expression)] = &[
    (AddU32, |g| _ = g.r[0] + g.r[1]),
    (SubU32, |g| _ = g.r[0] - g.r[1]),
    (MulU32, |g| _ = g.r[0] * g.r[1]),
    (MulHiU32, |g| _ = g.r[0].mul_hi(g.r[1])),
    (MulHiS32, |g| _ = g.r[0].mul_hi_s32(g.r[1])),
    (MadU32, |g| _ = g.r[0].mad(g.r[1], g.r[2])),
    (MinU32, |g| _ = g.r[0].min(g.r[1])),
    (MaxU32, |g| _ = g.r[0].max(g.r[1])),
    (MinS32, |g| _ = g.r[0].min_s32(g.r[1])),
    (MaxS32, |g| _ = g.r[0].max_s32(g.r[1])),
    (NegS32, |g| _ = -g.r[0]),
    (AbsS32, |g| _ = g.r[0].abs_s32()),
    (PopcB32, |g| _ = g.r[0].popc()),
    (ClzB32, |g| _ = g.r[0].clz()),
    (AndB32, |g| _ = g.r[0] & g.r[1]),
    (OrB32, |g| _ = g.r[0] | g.r[1]),
    (XorB32, |g| _ = g.r[0] ^ g.r[1]),
    (NotB32, |g| _ = !g.r[0]),
    (ShlB32, |g| _ = g.r[0] << g.r[1]),
    (ShrU32, |g| _ = g.r[0] >> g.r[1]),
    (ShrS32, |g| _ = g.r[0].shr_s32(g.r[1])),
    (BfeU32, |g| _ = g.r[0].bfe(g.r[1], g.r[2])),
    (BfeS32, |g| _ = g.r[0].bfe_s32(g.r[1], g.r[2])),
    (PrmtB32, |g| _ = g.r[0].prmt(g.r[1], g.r[2])),
    (AddU64, |g| _ = g.d[0] + g.d[1]),
    (SubU64, |g| _ = g.d[0] - g.d[1]),
    (MulU64, |g| _ = g.d[0] * g.d[1]),
    (MulWideU32, |g| _ = g.r[0].mul_wide(g.r[1])),
    (MulWideS32, |g| _ = g.r[0].mul_wide_s32(g.r[1])),
    (MadWideU32, |g| _ = g.r[0].mad_wide(g.r[1], g.d[0])),
    (MadWideS32, |g| _ = g.r[0].mad_wide_s32(g.r[1], g.d[0])),
    (AndB64, |g| _ = g.d[0] & g.d[1]),
    (OrB64, |g| _ = g.d[0] | g.d[1]),
    (XorB64, |g| _ = g.d[0] ^ g.d[1]),
    (NotB64, |g| _ = !g.d[0]),
    (ShlB64, |g| _ = g.d[0] << g.r[0]),
    (ShrU64, |g| _ = g.d[0] >> g.r[0]),
    (ShrS64, |g| _ = g.d[0].shr_s64(g.r[0])),
    (AddF32, |g| _ = g.f[0] + g.f[1]),
    (SubF32, |g| _ = g.f[0] - g.f[1]),
    (MulF32, |g| _ = g.f[0] * g.f[1]),
    (DivF32, |g| _ = g.f[0] / g.f[1]),
    (FmaF32, |g| _ = g.f[0].fma(g.f[1], g.f[2])),
    (MinF32, |g| _ = g.f[0].min(g.f[1])),
    (MaxF32, |g| _ = g.f[0].max(g.f[1])),
    (MinNanF32, |g| _ = g.f[0].min_nan(g.f[1])),
    (MaxNanF32, |g| _ = g.f[0].max_nan(g.f[1])),
    (NegF32, |g| _ = -g.f[0]),
    (AbsF32, |g| _ = g.f[0].abs()),
    (Ex2, |g| _ = g.f[0].ex2()),
    (Lg2, |g| _ = g.f[0].lg2()),
    (Rcp, |g| _ = g.f[0].rcp()),
    (Rsqrt, |g| _ = g.f[0].rsqrt()),
    (Sqrt, |g| _ = g.f[0].sqrt()),
    (Tanh, |g| _ = g.f[0].tanh_approx()),
    (AddF16x2, |g| _ = g.r[0].add_f16x2(g.r[1])),
    (SubF16x2, |g| _ = g.r[0].sub_f16x2(g.r[1])),
    (MulF16x2, |g| _ = g.r[0].mul_f16x2(g.r[1])),
    (FmaF16x2, |g| _ = g.r[0].fma_f16x2(g.r[1], g.r[2])),
    (MinF16x2, |g| _ = g.r[0].min_f16x2(g.r[1])),
    (MaxF16x2, |g| _ = g.r[0].max_f16x2(g.r[1])),
    (MaxNanF16x2, |g| _ = g.r[0].max_nan_f16x2(g.r[1])),
    (NegF16x2, |g| _ = g.r[0].neg_f16x2()),
    (AbsF16x2, |g| _ = g.r[0].abs_f16x2()),
    (AddBf16x2, |g| _ = g.r[0].add_bf16x2(g.r[1])),
    (SubBf16x2, |g| _ = g.r[0].sub_bf16x2(g.r[1])),
    (MulBf16x2, |g| _ = g.r[0].mul_bf16x2(g.r[1])),
    (FmaBf16x2, |g| _ = g.r[0].fma_bf16x2(g.r[1], g.r[2])),
    (MinBf16x2, |g| _ = g.r[0].min_bf16x2(g.r[1])),
    (MaxBf16x2, |g| _ = g.r[0].max_bf16x2(g.r[1])),
    (MaxNanBf16x2, |g| _ = g.r[0].max_nan_bf16x2(g.r[1])),
    (NegBf16x2, |g| _ = g.r[0].neg_bf16x2()),
    (AbsBf16x2, |g| _ = g.r[0].abs_bf16x2()),
    (EqB32, |g| _ = g.r[0].eq(g.r[1])),
    (NeB32, |g| _ = g.r[0].ne(g.r[1])),
    (LtU32, |g| _ = g.r[0].lt(g.r[1])),
    (LeU32, |g| _ = g.r[0].le(g.r[1])),
    (GtU32, |g| _ = g.r[0].gt(g.r[1])),
    (GeU32, |g| _ = g.r[0].ge(g.r[1])),
    (LtS32, |g| _ = g.r[0].lt_s32(g.r[1])),
    (LeS32, |g| _ = g.r[0].le_s32(g.r[1])),
    (GtS32, |g| _ = g.r[0].gt_s32(g.r[1])),
    (GeS32, |g| _ = g.r[0].ge_s32(g.r[1])),
    (EqB64, |g| _ = g.d[0].eq(g.d[1])),
    (NeB64, |g| _ = g.d[0].ne(g.d[1])),
    (LtU64, |g| _ = g.d[0].lt(g.d[1])),
    (LeU64, |g| _ = g.d[0].le(g.d[1])),
    (GtU64, |g| _ = g.d[0].gt(g.d[1])),
    (GeU64, |g| _ = g.d[0].ge(g.d[1])),
    (LtS64, |g| _ = g.d[0].lt_s64(g.d[1])),
    (LeS64, |g| _ = g.d[0].le_s64(g.d[1])),
    (GtS64, |g| _ = g.d[0].gt_s64(g.d[1])),
    (GeS64, |g| _ = g.d[0].ge_s64(g.d[1])),
    (EqB16, |g| _ = g.h[0].eq(g.h[1])),
    (NeB16, |g| _ = g.h[0].ne(g.h[1])),
    (EqF32, |g| _ = g.f[0].eq(g.f[1])),
    (NeF32, |g| _ = g.f[0].ne(g.f[1])),
    (LtF32, |g| _ = g.f[0].lt(g.f[1])),
    (LeF32, |g| _ = g.f[0].le(g.f[1])),
    (GtF32, |g| _ = g.f[0].gt(g.f[1])),
    (GeF32, |g| _ = g.f[0].ge(g.f[1])),
    (EquF32, |g| _ = g.f[0].equ(g.f[1])),
    (NeuF32, |g| _ = g.f[0].neu(g.f[1])),
    (LtuF32, |g| _ = g.f[0].ltu(g.f[1])),
    (LeuF32, |g| _ = g.f[0].leu(g.f[1])),
    (GtuF32, |g| _ = g.f[0].gtu(g.f[1])),
    (GeuF32, |g| _ = g.f[0].geu(g.f[1])),
    (OrderedF32, |g| _ = g.f[0].ordered(g.f[1])),
    (UnorderedF32, |g| _ = g.f[0].unordered(g.f[1])),
    (AndPred, |g| _ = g.p[0] & g.p[1]),
    (OrPred, |g| _ = g.p[0] | g.p[1]),
    (XorPred, |g| _ = g.p[0] ^ g.p[1]),
    (NotPred, |g| _ = g.p[0].negated()),
    (SelectB16, |g| _ = g.p[0].select(g.h[0], g.h[1])),
    (SelectB32, |g| _ = g.p[0].select(g.r[0], g.r[1])),
    (SelectB64, |g| _ = g.p[0].select(g.d[0], g.d[1])),
    (SelectF32, |g| _ = g.p[0].select(g.f[0], g.f[1])),
    (MovPred, |g| _ = g.b.copy(g.p[0])),
    (MovB16, |g| _ = g.b.copy(g.h[0])),
    (MovB32, |g| _ = g.b.copy(g.r[0])),
    (MovB64, |g| _ = g.b.copy(g.d[0])),
    (MovF32, |g| _ = g.b.copy(g.f[0])),
    (BitsOfF32, |g| _ = g.f[0].as_bits()),
    (F32OfBits, |g| _ = g.r[0].as_f32()),
    (PackB32, |g| _ = g.h[0].below(g.h[1])),
    (UnpackB32, |g| _ = g.r[0].halves()),
    (PackB64, |g| _ = g.r[0].below(g.r[1])),
    (UnpackB64, |g| _ = g.d[0].halves()),
    (U64OfU32, |g| _ = g.r[0].to_u64()),
    (S64OfS32, |g| _ = g.r[0].to_s64()),
    (U32OfU64, |g| _ = g.d[0].to_u32()),
    (U32OfU16, |g| _ = g.h[0].to_u32()),
    (U16OfU32, |g| _ = g.r[0].to_u16()),
    (F32OfU32, |g| _ = g.r[0].to_f32()),
    (F32OfS32, |g| _ = g.r[0].to_f32_signed()),
    (U32OfF32, |g| _ = g.f[0].to_u32()),
    (S32OfF32, |g| _ = g.f[0].to_s32()),
    (S32OfF32Nearest, |g| _ = g.f[0].to_s32_nearest()),
    (S32OfF32Down, |g| _ = g.f[0].to_s32_down()),
    (F32OfF16, |g| _ = g.h[0].f16_to_f32()),
    (F32OfBf16, |g| _ = g.h[0].bf16_to_f32()),
    (F16OfF32, |g| _ = g.f[0].to_f16()),
    (Bf16OfF32, |g| _ = g.f[0].to_bf16()),
    (F16x2OfF32, |g| _ = g.f[0].f16x2_above(g.f[1])),
    (Bf16x2OfF32, |g| _ = g.f[0].bf16x2_above(g.f[1])),
    (E4m3x2OfF32, |g| _ = g.f[0].e4m3x2_above(g.f[1])),
    (E4m3x2OfF16x2, |g| _ = g.r[0].f16x2_to_e4m3x2()),
    (F16x2OfE4m3x2, |g| _ = g.h[0].e4m3x2_to_f16x2()),
];

/// Registers of class `class` in `given`. They identify the operands of an expression.
fn registers(given: &Given, class: Ty) -> Vec<Operand> {
    match class {
        Ty::Pred => given.p.map(Arg::operand).to_vec(),
        Ty::B16 => given.h.map(Arg::operand).to_vec(),
        Ty::B32 => given.r.map(Arg::operand).to_vec(),
        Ty::B64 => given.d.map(Arg::operand).to_vec(),
        Ty::F32 => given.f.map(Arg::operand).to_vec(),
    }
}

fn lane_inst(stmt: &Stmt) -> &LaneInst {
    let Node::Inst { guard: None, inst: Inst::Lane(inst) } = &stmt.node else { panic!("{stmt:?}") };
    inst
}

/// The operation that `expression` records, and its expected operands: consecutive registers of each class.
fn recorded(op: LaneOp, expression: Expression) -> (LaneInst, Vec<Operand>) {
    let mut expected = Vec::new();
    let kernel = Kernel::build("k", Launch::threads(32), |b| {
        let given = Given {
            b,
            h: [1_u16, 2].map(|x| b.copy(x)),
            r: [1_u32, 2, 3].map(|x| b.copy(x)),
            d: [1_u64, 2].map(|x| b.copy(x)),
            f: [1.0, 2.0, 3.0].map(|x| b.copy(x)),
            p: [false, true].map(|x| b.copy(x)),
        };
        let mut taken: Vec<Ty> = Vec::new();
        for &class in op.inputs() {
            let before = taken.iter().filter(|&&other| other == class).count();
            expected.push(registers(&given, class)[before]);
            taken.push(class);
        }
        expression(&given);
    });
    assert_eq!(kernel.prologue.len(), 12 + 1, "{op:?} is one instruction");
    (lane_inst(&kernel.prologue[12]).clone(), expected)
}

#[test]
fn every_row_has_its_expression() {
    let rows: Vec<LaneOp> = EXPRESSIONS.iter().map(|&(op, _)| op).collect();
    assert_eq!(rows, LaneOp::ALL);
    for &(op, expression) in EXPRESSIONS {
        let (inst, operands) = recorded(op, expression);
        assert_eq!((inst.op, inst.src), (op, operands));
    }
}

/// Operators accept variables, which stand for their values, and constants, which stay constants.
#[test]
fn operators_take_variables_and_constants() {
    let kernel = Kernel::build("k", Launch::threads(32), |b| {
        let var = b.var("x", 1);
        _ = var + 2;
        _ = b.tid() - var;
        _ = b.value(3) * var;
        var.update(|x| x | 4);
        _ = (-var, !var, var << 5, var >> var);
    });
    let text = kernel.to_string();
    let operations = [
        "add.u32 r1, x.0, 2",
        "sub.u32 r3, r2, x.0",
        "mul.lo.u32 r4, 3, x.0",
        "or.b32 r5, x.0, 4",
        "mov.b32 x.0, r5",
        "neg.s32 r6, x.0",
        "not.b32 r7, x.0",
        "shl.b32 r8, x.0, 5",
        "shr.u32 r9, x.0, x.0",
    ];
    for line in operations {
        assert!(text.contains(line), "{line} is not in {text}");
    }
}

/// An operation on a thread's two rows is two scalar operations. The operation on the upper row comes first.
#[test]
fn rows_are_computed_in_pairs() {
    type Build = fn(Rows, Rows, Rows);
    let cases: [(LaneOp, Build); 9] = [
        (AddF32, |x, y, _| _ = x + y),
        (SubF32, |x, y, _| _ = x - y),
        (MulF32, |x, y, _| _ = x * y),
        (MulF32, |x, _, _| _ = x * 2.0),
        (NegF32, |x, _, _| _ = -x),
        (MaxF32, |x, y, _| _ = x.max(y)),
        (FmaF32, |x, y, z| _ = x.fma(y, z)),
        (Ex2, |x, _, _| _ = x.ex2()),
        (GtF32, |x, _, _| _ = x.gt(1.0)),
    ];
    for (op, build) in cases {
        let kernel = Kernel::build("k", Launch::threads(32), |b| {
            let [x, y, z] = [1.0, 2.0, 3.0].map(|number| Rows([b.copy(number), b.copy(-number)]));
            build(x, y, z);
        });
        let operations = kernel.prologue[6..].iter().map(lane_inst).map(|inst| (inst.op, inst.src[0]));
        let expected = [0, 1].map(|row| (op, Operand::Value(Value(row))));
        assert_eq!(operations.collect::<Vec<_>>(), expected, "{kernel}");
    }
    let kernel = Kernel::build("k", Launch::threads(32), |b| {
        let [x, y] = [1.0, 2.0].map(|number| Rows([b.copy(number), b.copy(-number)]));
        let greater = x.gt(1.5);
        _ = greater.select(x, y);
        _ = greater.any();
    });
    let text = kernel.to_string();
    for line in ["selp.f32 f6, f0, f2, p4", "selp.f32 f7, f1, f3, p5", "or.pred p8, p4, p5"] {
        assert!(text.contains(line), "{line} is not in {text}");
    }
}
