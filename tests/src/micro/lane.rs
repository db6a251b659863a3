//! Lane operations: for every row of the table, a kernel that is built from its signature.

use std::panic::Location;

use fa3_ir::lang::{B32, B64, Reg, V};
use fa3_ir::{
    Address, Cache, Condition, GlobalAddr, Imm, Inst, Kernel, LaneInst, LaneOp, Launch, MemInst, Node,
    Operand, Stmt, Ty, Value, ValueInfo, WarpInst,
};

use super::bench::micro;
use super::values::{BRAINS, FLOATS, HALVES, INTEGERS, LONG_INTEGERS, Stream};
use super::{Micro, Rule};

/// Threads of a CTA.
const THREADS: u32 = 256;

pub(super) fn tests() -> Vec<Micro> {
    let exact = LaneOp::ALL.iter().filter(|op| !super::approximate::APPROXIMATIONS.contains(op));
    exact.map(|&op| test(op)).collect()
}

fn test(op: LaneOp) -> Micro {
    let domain = Domain::of(op);
    if let Some(operands) = domain.every_code(op) {
        return kernel(op, &operands, Rule::Digests(1024));
    }
    let cases = if domain == Domain::Integer { THREADS } else { 2 * THREADS };
    let operands = (0..op.inputs().len()).map(|operand| {
        let stream = Stream::new(&format!("{op:?} {operand}"));
        (0..u64::from(cases)).map(|case| domain.case(op, operand, case, stream)).collect()
    });
    kernel(op, &operands.collect::<Vec<_>>(), Rule::Bits)
}

/// The number type of an operand, from the last type of the mnemonic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Domain {
    Integer,
    F32,
    F16,
    Bf16,
    E4m3,
    PairOfF16,
    PairOfBf16,
}

impl Domain {
    fn of(op: LaneOp) -> Domain {
        let mnemonic = op.ptx().split(' ').next().unwrap_or_default();
        match mnemonic.rsplit('.').next().unwrap_or_default() {
            "f32" => Domain::F32,
            "f16" => Domain::F16,
            "bf16" => Domain::Bf16,
            "e4m3x2" => Domain::E4m3,
            "f16x2" => Domain::PairOfF16,
            "bf16x2" => Domain::PairOfBf16,
            _ => Domain::Integer,
        }
    }

    /// All possible inputs of a conversion whose operand is a 16-bit number or a pair of f16 numbers.
    fn every_code(self, op: LaneOp) -> Option<Vec<Vec<u64>>> {
        match (self, op.inputs().len()) {
            (Domain::F16 | Domain::Bf16 | Domain::E4m3, 1) => Some(vec![(0..1 << 16).collect()]),
            (Domain::PairOfF16, 1) => {
                Some(vec![(0..1 << 15).map(|low| low | (low + (1 << 15)) << 16).collect()])
            }
            _ => None,
        }
    }

    /// One case of an operand: random bits in a quarter of the cases, and a special value in the others.
    fn case(self, op: LaneOp, operand: usize, case: u64, stream: Stream) -> u64 {
        let ty = op.inputs()[operand];
        let special: &[u64] = match (self, ty) {
            (_, Ty::Pred) => return stream.bits(case) & 1,
            (Domain::F16 | Domain::PairOfF16, _) => &HALVES,
            (Domain::Bf16 | Domain::PairOfBf16, _) => &BRAINS,
            (_, Ty::F32) => &FLOATS,
            (_, Ty::B64) => &LONG_INTEGERS,
            (_, Ty::B16 | Ty::B32) => &INTEGERS,
        };
        let pair = matches!(self, Domain::PairOfF16 | Domain::PairOfBf16);
        let one = |half: u64| {
            let index = 4 * case + 2 * half;
            if stream.bits(index).is_multiple_of(4) {
                self.random(ty, op, stream.bits(index + 1))
            } else {
                stream.pick(index + 1, special)
            }
        };
        let bits = if pair { one(0) & 0xFFFF | (one(1) & 0xFFFF) << 16 } else { one(0) };
        bits & ty_mask(ty)
    }

    /// Random bits. A number that the operation rounds to fewer bits is often near a tie.
    fn random(self, ty: Ty, op: LaneOp, bits: u64) -> u64 {
        let narrows = ty == Ty::F32 && matches!(op.outputs(), [Ty::B16] | [Ty::B32]);
        if !narrows {
            return bits;
        }
        let dropped = [13, 14, 15, 16, 17, 20, 21, 22][(bits >> 60) as usize % 8];
        let middle = 1 << (dropped - 1);
        let tail = [0, middle - 1, middle, middle + 1][(bits >> 56) as usize % 4];
        let exponent = 127 - 28 + (bits >> 48) % 46;
        (bits & 0x8000_0000) | exponent << 23 | (bits >> dropped << dropped | tail) & 0x7F_FFFF
    }
}

fn ty_mask(ty: Ty) -> u64 {
    match ty {
        Ty::Pred => 1,
        Ty::B16 => 0xFFFF,
        Ty::B32 | Ty::F32 => 0xFFFF_FFFF,
        Ty::B64 => u64::MAX,
    }
}

/// The name under which results are recorded, such as `add_u32` for `AddU32`. It also seeds the inputs.
pub(super) fn recorded_name(op: LaneOp) -> String {
    let mut name = String::new();
    for letter in op.name().chars() {
        if letter.is_ascii_uppercase() && !name.is_empty() {
            name.push('_');
        }
        name.push(letter.to_ascii_lowercase());
    }
    name
}

/// A kernel with one case per thread. `operands` has all cases of each operand.
pub(super) fn kernel(op: LaneOp, operands: &[Vec<u64>], rule: Rule) -> Micro {
    let cases = operands[0].len() as u32;
    let mut places = Places::default();
    let mut micro = micro(&recorded_name(op), Launch::threads(THREADS), rule, |bench| {
        bench.grid(cases / THREADS);
        let (cta, lane) = (bench.b.cta_x(), bench.b.lane_id());
        let index = cta.mad(THREADS, bench.tid);
        places.leader = Some(lane.eq(0).into());
        let warp = index >> 5;
        for (&ty, bits) in op.inputs().iter().zip(operands) {
            let bytes = bits.iter().flat_map(|x| x.to_le_bytes()[..stored(ty).bytes() as usize].to_vec());
            let array = bench.input(bytes.collect());
            places.from.push(Place::new(array, ty, index));
        }
        for &ty in op.outputs() {
            // A predicate takes one bit, so each warp stores a word.
            let (count, by) = if ty == Ty::Pred { (cases / 32, warp) } else { (cases, index) };
            let array = bench.output(count * stored(ty).bytes());
            places.to.push(Place::new(array, ty, by));
        }
    });
    Body { kernel: &mut micro.program.steps[0].kernel }.operation(op, &places);
    micro
}

/// The class that a value of class `ty` has in memory.
fn stored(ty: Ty) -> Ty {
    if ty == Ty::Pred { Ty::B32 } else { ty }
}

/// Memory locations of a case's operands and results.
#[derive(Default)]
struct Places {
    from: Vec<Place>,
    to: Vec<Place>,
    /// The lanes that store the predicates of their warp.
    leader: Option<Condition>,
}

/// Memory location of an operand or a result.
struct Place {
    at: Value,
    ty: Ty,
}

impl Place {
    /// The location of element number `by` of an array.
    fn new<'k>(array: V<'k, B64>, ty: Ty, by: V<'k, B32>) -> Place {
        Place { at: by.mad_wide(stored(ty).bytes(), array).register(), ty }
    }
}

/// Untyped access to the builder, whose methods are typed. Here the types are data.
struct Body<'k> {
    kernel: &'k mut Kernel,
}

impl Body<'_> {
    fn value(&mut self, ty: Ty) -> Value {
        self.kernel.values.push(ValueInfo { ty, name: None, mutable: false });
        Value(self.kernel.values.len() as u32 - 1)
    }

    fn push(&mut self, inst: Inst) {
        self.kernel
            .prologue
            .push(Stmt { node: Node::Inst { guard: None, inst }, source: Location::caller() });
    }

    fn load(&mut self, Place { at, ty }: &Place) -> Value {
        let addr = Address::Global(GlobalAddr { base: *at, offset: 0 });
        let dst = self.value(stored(*ty));
        self.push(Inst::Mem(MemInst::Load { dst: vec![dst], ty: stored(*ty), addr, cache: Cache::Coherent }));
        if *ty != Ty::Pred {
            return dst;
        }
        let pred = self.value(Ty::Pred);
        let src = vec![Operand::Value(dst), Operand::Imm(Imm::B32(0))];
        self.push(Inst::Lane(LaneInst { op: LaneOp::NeB32, dst: vec![pred], src }));
        pred
    }

    fn store(&mut self, value: Value, Place { at, ty }: &Place, leader: Option<Condition>) {
        let addr = Address::Global(GlobalAddr { base: *at, offset: 0 });
        let store = |src| Inst::Mem(MemInst::Store { src: vec![Operand::Value(src)], ty: stored(*ty), addr });
        if *ty != Ty::Pred {
            return self.push(store(value));
        }
        let dst = self.value(Ty::B32);
        self.push(Inst::Warp(WarpInst::Ballot { dst, src: value }));
        let node = Node::Inst { guard: leader, inst: store(dst) };
        self.kernel.prologue.push(Stmt { node, source: Location::caller() });
    }

    fn operation(&mut self, op: LaneOp, places: &Places) {
        let src = places.from.iter().map(|place| Operand::Value(self.load(place))).collect();
        let dst: Vec<Value> = op.outputs().iter().map(|&ty| self.value(ty)).collect();
        self.push(Inst::Lane(LaneInst { op, dst: dst.clone(), src }));
        for (value, place) in dst.into_iter().zip(&places.to) {
            self.store(value, place, places.leader);
        }
    }
}
