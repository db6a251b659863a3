//! Matrix products: kernels with one wgmma each, of every element type, operand form, width, sign, and kind of number.

mod numbers;
mod operand;

use fa3_ir::lang::{Arg, B32, B64, Builder, F32, Reg, V, Var};
use fa3_ir::{Launch, Major, Mma, Region, ScaleD, Swizzle, WgmmaA, WgmmaType};

use self::operand::Stored;
use super::bench::{Bench, micro};
use super::values::{Stream, words};
use super::{Micro, Rule};

/// Location of A.
#[derive(Clone, Copy, Debug, PartialEq)]
enum A {
    Shared(Stored),
    Registers,
}

/// A matrix product.
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

/// Whether the old value of D is added, as a predicate that is known only at run time.
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
    /// A product that overwrites D. Both operands are K-major with 128-byte swizzle.
    fn new(ty: WgmmaType, n: u32) -> Case {
        let k_major = Stored { major: Major::K, swizzle: Swizzle::B128, step: 0 };
        let (negate_a, negate_b) = (false, false);
        Case { ty, n, a: A::Shared(k_major), b: k_major, scale_d: Scale::Overwrite, negate_a, negate_b }
    }

    /// Sets the sign of each operand and the use of D from the bits of `choice`.
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

/// Every combination of signs, with and without accumulation.
fn signs() -> Vec<Case> {
    let both = |ty| [Case::new(ty, 8), Case { a: A::Registers, ..Case::new(ty, 8) }];
    TYPES.into_iter().flat_map(both).flat_map(|case| (0..8).map(move |choice| case.signed(choice))).collect()
}

/// Every layout of A and of B, at every step along K within a row.
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
        // If results are wide, a digest of each row is stored.
        let rule = if self.n <= 24 { Rule::Bits } else { Rule::Digests(4 * self.n as usize) };
        micro(&name, Launch::threads(128), rule, |bench| self.build(bench, &name))
    }

    fn build(self, bench: &mut Bench<'_>, name: &str) {
        let stream = |operand: &str| Stream::new(&format!("{name} {operand}"));
        let (b, ty, n) = (bench.b, self.ty, self.n);
        let codes_a = numbers::codes(ty, 64, stream("a"), false);
        let codes_b = numbers::codes(ty, n, stream("b"), true);

        let mut loads = vec![bench.load(ty, self.b, &codes_b, n)];
        let a = match self.a {
            A::Shared(stored) => {
                loads.push(bench.load(ty, stored, &codes_a, 64));
                None
            }
            A::Registers => {
                let array = bench.input(words(operand::registers(ty, &codes_a)));
                Some(b.load_vector::<B32, 4>(bench.mine(array, 16)))
            }
        };
        bench.bulk_fill(&loads);
        let desc_b = descriptor(b, loads[0].0, self.b);
        let d = b.accumulator("d", n / 2);
        let mma = match (self.a, a) {
            (A::Shared(stored), _) => {
                let desc_a = descriptor(b, loads[1].0, stored);
                let mma = Mma::new(ty, &d, desc_a, desc_b);
                Mma { a: WgmmaA::Shared { desc: desc_a.operand(), major: stored.major }, ..mma }
            }
            (A::Registers, Some(a)) => Mma::with_registers(ty, &d, a, desc_b),
            (A::Registers, None) => unreachable!("loaded above"),
        };

        let before = bench.input(words(numbers::accumulators(64 * n, stream("d"))));
        let after = bench.output(4 * 64 * n);
        let places = places(bench.tid, n);
        each_pair(&d, n, |offset, [x, y]| {
            let at = before + places;
            let [first, second] = b.load_vector::<F32, 2>(at.at(offset));
            x.set(first);
            y.set(second);
        });
        let scale_d = match self.scale_d {
            Scale::Overwrite => ScaleD::Overwrite,
            Scale::Accumulate => ScaleD::Accumulate,
            Scale::AccumulateIf(holds) => {
                let flag = bench.input(words([u32::from(holds)]));
                ScaleD::AccumulateIf(b.load::<B32>(flag).ne(0).register())
            }
        };
        b.wgmma_fence();
        let (negate_a, negate_b, b_major) = (self.negate_a, self.negate_b, self.b.major);
        b.wgmma(Mma { scale_d, negate_a, negate_b, b_major, ..mma });
        b.wgmma_commit();
        b.wgmma_wait(0);
        let at = after + places;
        each_pair(&d, n, |offset, pair| b.store_vector(at.at(offset), pair));
    }
}

impl<'k> Bench<'k> {
    /// Declares the tile of an operand and its input array.
    fn load(&mut self, ty: WgmmaType, stored: Stored, codes: &[u16], rows: u32) -> (Region, V<'k, B64>, u32) {
        let bytes = stored.bytes(rows);
        let region = self.b.region("tile", bytes, 1024);
        (region, self.input(stored.image(ty, codes, rows)), bytes)
    }
}

fn descriptor(b: &Builder, tile: Region, stored: Stored) -> V<'_, B64> {
    let layout = stored.layout();
    let constant = layout.descriptor() + u64::from(stored.step) * layout.k_step(stored.major);
    b.address(tile).bfe(4, 14).to_u64() + constant
}

/// Byte offset of this thread's first element of D in an array of 64 x `n`.
fn places(tid: V<'_, B32>, n: u32) -> V<'_, B64> {
    let (warp, lane) = (tid >> 5, tid & 31);
    let row = (warp << 4) + (lane >> 2);
    let column = (lane & 3) << 1;
    row.mad(n, column).mul_wide(4)
}

/// Visits pairs of adjacent elements of D, with their byte offsets from the thread's first element.
fn each_pair<'k>(d: &[Var<'k, F32>], n: u32, mut visit: impl FnMut(i32, [Var<'k, F32>; 2])) {
    for (index, pair) in (0..).zip(d.as_chunks().0) {
        let (columns, rows) = (8 * (index / 2), 8 * (index % 2));
        visit((4 * (rows * n + columns)).cast_signed(), *pair);
    }
}
