//! Products of tiles: many wgmma, one group, in flight until their wait.

use std::marker::PhantomData;
use std::panic::Location;

use crate::tile::Side;
use crate::watch::{DutyId, GroupId};
use crate::{
    AFrag, Arg, B32, Builder, Elem, F32, Fault, Frag, Matrix, Mma, Reg, ScaleD, Source, Var, WgmmaA,
    WgmmaType,
};

/// A result that is not there yet: only [`InFlight::wait`] gives it.
///
/// ```compile_fail,E0308
/// use fa3_ir::{Builder, Fresh, Rows, Tile, gemm_ss};
/// fn read_in_flight(b: &mut Builder, q: Tile<'_>, k: Tile<'_>) -> Rows {
///     let s: fa3_ir::Frag = gemm_ss(b, q, k.t(), Fresh);
///     s.row_max(b)
/// }
/// ```
///
/// While it is, its operands must stay: a slot that it reads cannot be released.
/// ```compile_fail,E0505
/// use fa3_ir::{Builder, Fresh, FullSlot, Tile, gemm_ss};
/// fn release_in_flight(b: &mut Builder, q: Tile<'_>, slot: FullSlot<1>) {
///     let [k] = slot.tiles();
///     let s = gemm_ss(b, q, k.t(), Fresh);
///     slot.release(b);
///     s.wait(b);
/// }
/// ```
#[must_use = "a product is complete only after `wait`"]
#[derive(Debug)]
pub struct InFlight<'s, T> {
    group: GroupId,
    result: T,
    operands: PhantomData<&'s ()>,
}

impl<T> InFlight<'_, T> {
    /// Waits until the product is complete. Younger products stay in flight. Belongs in the block that began the product
    /// (V-25), or in one around it: after a branch that may have waited, nobody could rely on the result.
    #[track_caller]
    pub fn wait(self, b: &mut Builder) -> T {
        if let Some(pending) = b.watch.wait(self.group, Location::caller()) {
            b.wgmma_wait(pending);
        }
        self.result
    }
}

/// Where a product goes: a new fragment ([`Fresh`]), or onto one that is there (`&mut` [`Frag`]).
pub trait Destination {
    /// What the wait gives.
    type Result;
    /// The registers for `cols` columns, and whether the product adds to them.
    fn registers(&self, b: &mut Builder, cols: u32) -> (Vec<Var<F32>>, ScaleD);
    /// The fragment of these registers.
    fn result(self, registers: Vec<Var<F32>>) -> Self::Result;
}

/// D = A · B in new registers.
#[derive(Clone, Copy, Debug)]
pub struct Fresh;

impl Destination for Fresh {
    type Result = Frag;
    fn registers(&self, b: &mut Builder, cols: u32) -> (Vec<Var<F32>>, ScaleD) {
        (Frag::uninitialised(b, cols).regs, ScaleD::Overwrite)
    }
    fn result(self, regs: Vec<Var<F32>>) -> Frag {
        Frag { regs }
    }
}

impl<'d> Destination for &'d mut Frag {
    type Result = &'d mut Frag;
    fn registers(&self, _: &mut Builder, _: u32) -> (Vec<Var<F32>>, ScaleD) {
        (self.regs.clone(), ScaleD::Accumulate)
    }
    fn result(self, _: Vec<Var<F32>>) -> &'d mut Frag {
        self
    }
}

/// Begins D = A · B, or D += A · B, with A (64 x K) and B (K x N) in shared memory.
#[track_caller]
pub fn gemm_ss<'s, D: Destination>(
    b: &mut Builder,
    a: impl Into<Matrix<'s>>,
    right: impl Into<Matrix<'s>>,
    d: D,
) -> InFlight<'s, D::Result> {
    gemm(b, A::Shared(a.into()), right.into(), d)
}

/// Begins D = A · B, or D += A · B, with A (64 x K) in registers and B (K x N) in shared memory.
#[track_caller]
pub fn gemm_rs<'s, D: Destination>(
    b: &mut Builder,
    a: &'s AFrag,
    right: impl Into<Matrix<'s>>,
    d: D,
) -> InFlight<'s, D::Result> {
    gemm(b, A::Registers(a), right.into(), d)
}

/// Products that are added one behind the other to one fragment, across the rounds of a loop. The first overwrites: it
/// belongs in the block of [`Chain::new`] (V-25), since in a loop it would overwrite in every round.
#[derive(Debug)]
pub struct Chain {
    frag: Frag,
    last: Option<GroupId>,
    begun: DutyId,
}

impl Chain {
    /// An empty sum of 64 x `cols`.
    #[track_caller]
    pub fn new(b: &mut Builder, cols: u32) -> Chain {
        let begun = b.watch.due("the first product of a chain is begun".to_owned(), Location::caller());
        Chain { frag: Frag::uninitialised(b, cols), last: None, begun }
    }

    /// Begins to add A · B, both in shared memory. The slots that hold them are for the caller to keep until
    /// [`Chain::wait_older`] or [`Chain::wait`] says that they have been read.
    #[track_caller]
    pub fn gemm_ss<'s>(&mut self, b: &mut Builder, a: impl Into<Matrix<'s>>, right: impl Into<Matrix<'s>>) {
        let scale = if self.last.is_none() {
            b.watch.done(self.begun, Location::caller());
            ScaleD::Overwrite
        } else {
            ScaleD::Accumulate
        };
        self.last = Some(issue(b, A::Shared(a.into()), right.into(), &self.frag.regs, scale));
    }

    /// Waits until every product before the last is complete.
    #[track_caller]
    pub fn wait_older(&self, b: &mut Builder) {
        if let Some(last) = self.last {
            let pending = b.watch.wait_older(last);
            b.wgmma_wait(pending);
        }
    }

    /// Waits for the sum.
    #[track_caller]
    pub fn wait(self, b: &mut Builder) -> Frag {
        let source = Location::caller();
        if let Some(pending) = self.last.and_then(|last| b.watch.wait(last, source)) {
            b.wgmma_wait(pending);
        }
        self.frag
    }
}

/// The A operand.
enum A<'s> {
    Shared(Matrix<'s>),
    Registers(&'s AFrag),
}

impl A<'_> {
    fn elem(&self) -> Elem {
        match self {
            A::Shared(matrix) => matrix.elem(),
            A::Registers(frag) => frag.elem(),
        }
    }

    /// Rows and columns.
    fn extent(&self) -> (u32, u32) {
        match self {
            A::Shared(matrix) => matrix.extent(),
            A::Registers(frag) => (64, frag.cols()),
        }
    }
}

#[track_caller]
fn gemm<'s, D: Destination>(b: &mut Builder, a: A<'s>, right: Matrix<'s>, d: D) -> InFlight<'s, D::Result> {
    let (registers, scale) = d.registers(b, right.extent().1);
    let group = issue(b, a, right, &registers, scale);
    InFlight { group, result: d.result(registers), operands: PhantomData }
}

/// The products of all steps along K, as one group.
#[track_caller]
fn issue(b: &mut Builder, a: A<'_>, right: Matrix<'_>, d: &[Var<F32>], scale: ScaleD) -> GroupId {
    let source = Location::caller();
    let Some(ty) = check(b, &a, &right, d.len(), source) else { return b.watch.commit(source) };
    b.as_one(|b| products(b, ty, a, right, d, scale));
    b.watch.commit(source)
}

/// What a step along K has as its A operand.
type Steps<'a> = dyn Fn(&mut Builder, u32) -> WgmmaA + 'a;

#[track_caller]
fn products(b: &mut Builder, ty: WgmmaType, a: A<'_>, right: Matrix<'_>, d: &[Var<F32>], scale: ScaleD) {
    let steps = right.extent().0 / ty.k();
    let right_of = right.descriptors(b, Side::B);
    let left_of: Box<Steps<'_>> = match a {
        A::Registers(frag) => Box::new(move |_, step| registers(&frag.steps[step as usize])),
        A::Shared(matrix) => {
            let (left_of, major) = (matrix.descriptors(b, Side::A), matrix.major(Side::A));
            Box::new(move |b, step| WgmmaA::Shared { desc: left_of(b, step).operand(), major })
        }
    };
    b.wgmma_fence();
    for step in 0..steps {
        let left = left_of(b, step);
        let right_desc = right_of(b, step);
        let scale_d = if step == 0 { scale } else { ScaleD::Accumulate };
        let mma = Mma::new(ty, d, 0u64, right_desc);
        b.wgmma(Mma { a: left, b_major: right.major(Side::B), scale_d, ..mma });
    }
    b.wgmma_commit();
}

fn registers(step: &[Var<B32>; 4]) -> WgmmaA {
    WgmmaA::Registers(step.map(Reg::value))
}

/// The type of the product, if its operands and its result fit: 64 x K, K x N, N / 2 registers.
fn check(b: &mut Builder, a: &A<'_>, right: &Matrix<'_>, d: usize, source: Source) -> Option<WgmmaType> {
    let ty = match right.elem() {
        Elem::F16 => Some(WgmmaType::F16),
        Elem::Bf16 => Some(WgmmaType::Bf16),
        Elem::E4m3 => Some(WgmmaType::E4m3),
        Elem::U8 | Elem::U32 | Elem::U64 | Elem::F32 => None,
    };
    let ((m, k), (depth, n)) = (a.extent(), right.extent());
    let whole = ty.is_some_and(|ty| depth.is_multiple_of(ty.k()) && depth > 0);
    if m == 64 && k == depth && a.elem() == right.elem() && whole && d as u32 * 2 == n {
        return ty;
    }
    let first = format!("{m} x {k} {}", a.elem());
    let second = format!("{right} with {} accumulators", 2 * d);
    b.watch.fault(Fault::Shapes { what: "a product", first, second }, source);
    None
}
