//! Matrix products: one wgmma a kernel, of every element type, operand form, width, sign, and kind of number.

mod numbers;
mod operand;

use fa3_ir::{
    Arg, B32, B64, F32, Launch, Major, Mma, Reg, Region, ScaleD, Swizzle, V, Var, WgmmaA, WgmmaType,
};

use self::operand::Stored;
use super::bench::Bench;
use super::values::{Stream, words};
use super::{Micro, Rule};

/// Where A is.
#[derive(Clone, Copy, Debug, PartialEq)]
enum A {
    Shared(Stored),
    Registers,
}

/// A product.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Case {
    ty: WgmmaType,
    n: u32,
    a: A,
    b: Stored,
    scale_d: Scale,
    negate_a: bool,
    negate_b: bool,
}

/// What becomes of D; the predicate is known when the kernel runs.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Scale {
    Overwrite,
    Accumulate,
    AccumulateIf(bool),
}

const TYPES: [WgmmaType; 3] = [WgmmaType::Bf16, WgmmaType::F16, WgmmaType::E4m3];

pub(super) fn tests() -> Vec<Micro> {
    let mut cases: Vec<Case> = Vec::new();
    for case in widths().into_iter().chain(signs()).chain(layouts()).chain(predicates()) {
        if !cases.contains(&case) {
            cases.push(case);
        }
    }
    cases.into_iter().map(Case::test).collect()
}

impl Case {
    /// Both operands K-major with 128-byte swizzle, D overwritten.
    fn new(ty: WgmmaType, n: u32) -> Case {
        let k_major = Stored { major: Major::K, swizzle: Swizzle::B128, step: 0 };
        let (negate_a, negate_b) = (false, false);
        Case { ty, n, a: A::Shared(k_major), b: k_major, scale_d: Scale::Overwrite, negate_a, negate_b }
    }

    /// The sign of each operand and whether D is read, by the bits of `choice`.
    fn signed(self, choice: usize) -> Case {
        let bit = |index: usize| choice >> index & 1 == 1;
        let scale_d = if bit(0) { Scale::Accumulate } else { Scale::Overwrite };
        Case { scale_d, negate_a: bit(1), negate_b: bit(2), ..self }
    }
}

/// Every type and form of operands, from the narrowest product to the widest.
fn widths() -> Vec<Case> {
    let mn_major = Stored { major: Major::Mn, swizzle: Swizzle::B128, step: 0 };
    let mut cases = Vec::new();
    for ty in TYPES {
        for (index, n) in [8, 16, 24, 64, 128, 176, 256].into_iter().enumerate() {
            let shared = Case::new(ty, n);
            let registers = Case { a: A::Registers, ..shared };
            cases.push(shared.signed(index + 1));
            if ty == WgmmaType::E4m3 {
                cases.push(registers.signed(index + 1));
            } else {
                cases.push(Case { b: mn_major, ..registers }.signed(index + 1));
                cases.push(Case { a: A::Shared(mn_major), b: mn_major, ..shared }.signed(index + 1));
            }
        }
    }
    cases
}

/// Every combination of signs, with and without D.
fn signs() -> Vec<Case> {
    let both = |ty| [Case::new(ty, 8), Case { a: A::Registers, ..Case::new(ty, 8) }];
    TYPES.into_iter().flat_map(both).flat_map(|case| (0..8).map(move |choice| case.signed(choice))).collect()
}

/// Every layout of A and of B, at every step of the depth within a row.
fn layouts() -> Vec<Case> {
    let mut cases = Vec::new();
    for (ty, major) in [(WgmmaType::F16, Major::K), (WgmmaType::F16, Major::Mn), (WgmmaType::E4m3, Major::K)]
    {
        for swizzle in Swizzle::ALL {
            for step in 0..(swizzle.row_bytes() / 32).max(1) {
                let stored = Stored { major, swizzle, step };
                let case = Case { scale_d: Scale::Accumulate, ..Case::new(ty, 40) };
                cases.push(Case { a: A::Shared(stored), ..case });
                cases.push(Case { b: stored, ..case });
            }
        }
    }
    cases
}

fn predicates() -> Vec<Case> {
    let case = |holds| Case { scale_d: Scale::AccumulateIf(holds), ..Case::new(WgmmaType::Bf16, 8) };
    [false, true].map(case).into()
}

impl Case {
    fn name(&self) -> String {
        let Case { ty, n, a, b, scale_d, negate_a, negate_b } = self;
        let a = match a {
            A::Shared(stored) => stored.name(),
            A::Registers => "registers".to_owned(),
        };
        let sign = |negate: &bool| if *negate { "minus" } else { "plus" };
        let (sign_a, sign_b, b) = (sign(negate_a), sign(negate_b), b.name());
        format!("{ty:?} {n} {sign_a} {a} {sign_b} {b} {scale_d:?}").to_lowercase()
    }

    fn test(self) -> Micro {
        let name = self.name();
        let stream = |operand: &str| Stream::new(&format!("{name} {operand}"));
        let (ty, n) = (self.ty, self.n);
        let codes_a = numbers::codes(ty, 64, stream("a"), false);
        let codes_b = numbers::codes(ty, n, stream("b"), true);
        let mut bench = Bench::new(&name, Launch::threads(128));

        // Operands.
        let mut loads = vec![bench.load(ty, self.b, &codes_b, n)];
        let a = match self.a {
            A::Shared(stored) => {
                loads.push(bench.load(ty, stored, &codes_a, 64));
                None
            }
            A::Registers => {
                let array = bench.input(words(operand::registers(ty, &codes_a)));
                let mine = bench.mine(array, 16);
                Some(bench.b.load_vector::<B32, 4>(mine))
            }
        };
        bench.bulk_fill(&loads);
        let desc_b = descriptor(&mut bench, loads[0].0, self.b);
        let d = bench.b.accumulator("d", n / 2);
        let mma = match (self.a, a) {
            (A::Shared(stored), _) => {
                let desc_a = descriptor(&mut bench, loads[1].0, stored);
                let mma = Mma::new(ty, &d, desc_a, desc_b);
                Mma { a: WgmmaA::Shared { desc: desc_a.operand(), major: stored.major }, ..mma }
            }
            (A::Registers, Some(a)) => Mma::with_registers(ty, &d, a, desc_b),
            (A::Registers, None) => unreachable!("loaded above"),
        };

        // The product.
        let before = bench.input(words(numbers::accumulators(64 * n, stream("d"))));
        let after = bench.output(4 * 64 * n);
        let places = places(&mut bench, n);
        each_pair(&d, n, |offset, [x, y]| {
            let at = bench.b.add(before, places);
            let [first, second] = bench.b.load_vector::<F32, 2>(at.at(offset));
            bench.b.set(x, first);
            bench.b.set(y, second);
        });
        let scale_d = match self.scale_d {
            Scale::Overwrite => ScaleD::Overwrite,
            Scale::Accumulate => ScaleD::Accumulate,
            Scale::AccumulateIf(holds) => {
                let flag = bench.input(words([u32::from(holds)]));
                let flag = bench.b.load::<B32>(flag);
                ScaleD::AccumulateIf(bench.b.ne_b32(flag, 0).value())
            }
        };
        bench.b.wgmma_fence();
        let (negate_a, negate_b, b_major) = (self.negate_a, self.negate_b, self.b.major);
        bench.b.wgmma(Mma { scale_d, negate_a, negate_b, b_major, ..mma });
        bench.b.wgmma_commit();
        bench.b.wgmma_wait(0);
        let at = bench.b.add(after, places);
        each_pair(&d, n, |offset, pair| bench.b.store_vector(at.at(offset), pair));
        // Wide results are kept as a digest of each row.
        bench.finish(if n <= 24 { Rule::Bits } else { Rule::Digests(4 * n as usize) })
    }
}

impl Bench {
    /// Declares an operand's tile and the array that it is loaded from.
    fn load(&mut self, ty: WgmmaType, stored: Stored, codes: &[u16], rows: u32) -> (Region, V<B64>, u32) {
        let bytes = stored.bytes(rows);
        let region = self.b.region("tile", bytes, 1024);
        (region, self.input(stored.image(ty, codes, rows)), bytes)
    }
}

fn descriptor(bench: &mut Bench, tile: Region, stored: Stored) -> V<B64> {
    let layout = stored.layout();
    let constant = layout.descriptor() + u64::from(stored.step) * layout.k_step(stored.major);
    let address = bench.b.address(tile);
    let field = bench.b.bfe_u32(address, 4, 14);
    let field = bench.b.u64_of_u32(field);
    bench.b.add(field, constant)
}

/// The byte of this thread's first element of D in an array of 64 x `n`.
fn places(bench: &mut Bench, n: u32) -> V<B64> {
    let b = &mut bench.b;
    let (warp, lane) = (b.shr_u32(bench.tid, 5), b.and(bench.tid, 31));
    let (warp_row, lane_row) = (b.shl_b32(warp, 4), b.shr_u32(lane, 2));
    let row = b.add(warp_row, lane_row);
    let quad = b.and(lane, 3);
    let column = b.shl_b32(quad, 1);
    let first = b.mad_u32(row, n, column);
    b.mul_wide_u32(first, 4)
}

/// Pairs of neighbours, with how many bytes they are from the thread's first.
fn each_pair(d: &[Var<F32>], n: u32, mut visit: impl FnMut(i32, [Var<F32>; 2])) {
    for (index, pair) in (0..).zip(d.as_chunks().0) {
        let (columns, rows) = (8 * (index / 2), 8 * (index % 2));
        visit((4 * (rows * n + columns)).cast_signed(), *pair);
    }
}
