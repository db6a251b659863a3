//! Products of tiles: many wgmma in one group, in flight until their wait.

use std::fmt;
use std::marker::PhantomData;
use std::panic::Location;

use crate::lang::{AFrag, Arg, B32, Builder, F32, Frag, Matrix, Reg, Tile, Var};
use crate::tile::OperandSide;
use crate::watch::{DutyId, GroupId};
use crate::{Elem, Fault, Mma, ScaleD, Source, WgmmaA, WgmmaType};

/// The result of a product that may not be complete yet. Only [`InFlight::wait`] returns it.
///
/// ```compile_fail,E0308
/// use fa3_ir::lang::{Frag, Fresh, Rows, Tile, gemm};
/// fn read_in_flight<'k>(q: Tile<'_, 'k>, k: Tile<'_, 'k>) -> Rows<'k> {
///     let s: Frag<'k> = gemm(q, k.t(), Fresh);
///     s.row_max()
/// }
/// ```
///
/// Until the wait the product's operands must stay: a stage that the product reads cannot be released.
/// ```compile_fail,E0505
/// use fa3_ir::lang::{Fresh, FullStage, Tile, gemm};
/// fn release_in_flight(q: Tile, stage: FullStage<1>) {
///     let s = gemm(q, stage.tile().t(), Fresh);
///     stage.release();
///     s.wait();
/// }
/// ```
#[must_use = "a product is complete only after `wait`"]
pub struct InFlight<'s, T> {
    builder: &'s Builder,
    group: GroupId,
    result: T,
    operands: PhantomData<&'s ()>,
}

impl<T> fmt::Debug for InFlight<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} in flight", self.group)
    }
}

impl<T> InFlight<'_, T> {
    /// Waits until the product is complete. Younger products stay in flight. The wait belongs in the block that began
    /// the product (V-25) or in one around it: after a branch that may or may not have waited, the result would be
    /// uncertain.
    #[track_caller]
    pub fn wait(self) -> T {
        let pending = self.builder.watch().wait(self.group, Location::caller());
        if let Some(pending) = pending {
            self.builder.wgmma_wait(pending);
        }
        self.result
    }
}

/// Where a product goes: a new fragment ([`Fresh`]), or an existing one that it adds to (`&mut` [`Frag`]).
pub trait Destination<'k> {
    /// The result of the wait.
    type Result;
    /// The registers for `cols` columns, and whether the product adds to them.
    fn registers(&self, b: &'k Builder, cols: u32) -> (Vec<Var<'k, F32>>, ScaleD);
    /// The fragment that these registers hold, as the result of the wait.
    fn result(self, b: &'k Builder, registers: Vec<Var<'k, F32>>) -> Self::Result;
}

/// D = A · B in new registers.
#[derive(Clone, Copy, Debug)]
pub struct Fresh;

/// A fragment that a product adds to. The wait returns it.
impl<'k> Destination<'k> for Frag<'k> {
    type Result = Frag<'k>;
    fn registers(&self, _: &'k Builder, _: u32) -> (Vec<Var<'k, F32>>, ScaleD) {
        (self.regs.clone(), ScaleD::Accumulate)
    }
    fn result(self, _: &'k Builder, _: Vec<Var<'k, F32>>) -> Frag<'k> {
        self
    }
}

impl<'k> Destination<'k> for Fresh {
    type Result = Frag<'k>;
    fn registers(&self, b: &'k Builder, cols: u32) -> (Vec<Var<'k, F32>>, ScaleD) {
        (Frag::uninitialised(b, cols).regs, ScaleD::Overwrite)
    }
    fn result(self, b: &'k Builder, registers: Vec<Var<'k, F32>>) -> Frag<'k> {
        Frag::new(b, registers)
    }
}

impl<'k, 'd, 'f: 'k> Destination<'k> for &'d mut Frag<'f> {
    type Result = &'d mut Frag<'f>;
    fn registers(&self, _: &'k Builder, _: u32) -> (Vec<Var<'k, F32>>, ScaleD) {
        (self.regs.clone(), ScaleD::Accumulate)
    }
    fn result(self, _: &'k Builder, _: Vec<Var<'k, F32>>) -> &'d mut Frag<'f> {
        self
    }
}

/// The A operand of a product, 64 x K: a [`Tile`] or a [`Matrix`] in shared memory, or an [`AFrag`] in registers.
#[derive(Clone, Copy, Debug)]
pub enum Left<'s, 'k> {
    /// In shared memory.
    Shared(Matrix<'s, 'k>),
    /// In registers.
    Registers(&'s AFrag<'k>),
}

impl<'s, 'k> From<Tile<'s, 'k>> for Left<'s, 'k> {
    fn from(tile: Tile<'s, 'k>) -> Left<'s, 'k> {
        Left::Shared(tile.into())
    }
}

impl<'s, 'k> From<Matrix<'s, 'k>> for Left<'s, 'k> {
    fn from(matrix: Matrix<'s, 'k>) -> Left<'s, 'k> {
        Left::Shared(matrix)
    }
}

impl<'s, 'k> From<&'s AFrag<'k>> for Left<'s, 'k> {
    fn from(frag: &'s AFrag<'k>) -> Left<'s, 'k> {
        Left::Registers(frag)
    }
}

impl<'k> Left<'_, 'k> {
    fn builder(&self) -> &'k Builder {
        match self {
            Left::Shared(matrix) => matrix.builder(),
            Left::Registers(frag) => frag.builder(),
        }
    }

    fn elem(&self) -> Elem {
        match self {
            Left::Shared(matrix) => matrix.elem(),
            Left::Registers(frag) => frag.elem(),
        }
    }

    /// Rows and columns.
    fn extent(&self) -> (u32, u32) {
        match self {
            Left::Shared(matrix) => matrix.extent(),
            Left::Registers(frag) => (64, frag.cols()),
        }
    }
}

/// Begins D = A · B, or D += A · B, with A (64 x K) in shared memory or in registers and B (K x N) in shared memory.
#[track_caller]
pub fn gemm<'s, 'k: 's, D: Destination<'k>>(
    a: impl Into<Left<'s, 'k>>,
    right: impl Into<Matrix<'s, 'k>>,
    d: D,
) -> InFlight<'s, D::Result> {
    let (a, right) = (a.into(), right.into());
    let builder = a.builder();
    let (registers, scale) = d.registers(builder, right.extent().1);
    let group = issue(a, right, &registers, scale);
    InFlight { builder, group, result: d.result(builder, registers), operands: PhantomData }
}

/// Products that are added to one fragment, one after the other, across the rounds of a loop. After [`Chain::new`] the
/// first product overwrites the fragment. The first product belongs in the block of the call (V-25), since in a loop it
/// would overwrite in every round.
#[derive(Debug)]
pub struct Chain<'k> {
    frag: Frag<'k>,
    last: Option<GroupId>,
    /// The duty to begin the first product, which overwrites the fragment; `None` if the product adds to the fragment.
    begun: Option<DutyId>,
}

impl<'k> Chain<'k> {
    /// An empty sum of 64 x `cols`.
    #[track_caller]
    pub fn new(b: &'k Builder, cols: u32) -> Chain<'k> {
        let begun = b.watch().due("the first product of a chain is begun".to_owned(), Location::caller());
        Chain { frag: Frag::uninitialised(b, cols), last: None, begun: Some(begun) }
    }

    /// A chain that adds to `frag`.
    pub fn onto(frag: Frag<'k>) -> Chain<'k> {
        Chain { frag, last: None, begun: None }
    }

    /// Begins to add A · B. The caller must keep the stages of A and B until [`Chain::wait_older`] or [`Chain::wait`]
    /// has returned.
    #[track_caller]
    pub fn gemm<'s>(&mut self, a: impl Into<Left<'s, 'k>>, right: impl Into<Matrix<'s, 'k>>)
    where
        'k: 's,
    {
        let scale = match self.begun.take() {
            Some(begun) => {
                self.frag.builder().watch().done(begun, Location::caller());
                ScaleD::Overwrite
            }
            None => ScaleD::Accumulate,
        };
        self.last = Some(issue(a.into(), right.into(), &self.frag.regs, scale));
    }

    /// Waits until every product but the last is complete.
    #[track_caller]
    pub fn wait_older(&self) {
        if let Some(last) = self.last {
            let b = self.frag.builder();
            let pending = b.watch().wait_older(last);
            b.wgmma_wait(pending);
        }
    }

    /// Waits for all products so far.
    #[track_caller]
    pub fn wait_all(&mut self) {
        let (b, source) = (self.frag.builder(), Location::caller());
        let pending = self.last.take().and_then(|last| b.watch().wait(last, source));
        if let Some(pending) = pending {
            b.wgmma_wait(pending);
        }
    }

    /// Waits for all products, and returns the sum.
    #[track_caller]
    pub fn wait(mut self) -> Frag<'k> {
        self.wait_all();
        self.frag
    }
}

/// Issues the products of all steps along K as one group.
#[track_caller]
fn issue(a: Left<'_, '_>, right: Matrix<'_, '_>, d: &[Var<'_, F32>], scale: ScaleD) -> GroupId {
    let (b, source) = (a.builder(), Location::caller());
    if let Some(ty) = check(b, &a, &right, d.len(), source) {
        let _one = b.as_one();
        products(b, ty, a, right, d, scale);
    }
    b.watch().commit(source)
}

/// A function that gives the A operand of a step along K, by the step's number.
type Steps<'a> = dyn Fn(u32) -> WgmmaA + 'a;

#[track_caller]
fn products(
    b: &Builder,
    ty: WgmmaType,
    a: Left<'_, '_>,
    right: Matrix<'_, '_>,
    d: &[Var<'_, F32>],
    scale: ScaleD,
) {
    let steps = right.extent().0 / ty.k();
    let right_of = right.descriptors(OperandSide::B);
    let left_of: Box<Steps<'_>> = match a {
        Left::Registers(frag) => Box::new(move |step| registers(&frag.steps[step as usize])),
        Left::Shared(matrix) => {
            let (left_of, major) = (matrix.descriptors(OperandSide::A), matrix.major(OperandSide::A));
            Box::new(move |step| WgmmaA::Shared { desc: left_of(step).operand(), major })
        }
    };
    b.wgmma_fence();
    for step in 0..steps {
        let left = left_of(step);
        let right_desc = right_of(step);
        let scale_d = if step == 0 { scale } else { ScaleD::Accumulate };
        let mma = Mma::new(ty, d, 0u64, right_desc);
        b.wgmma(Mma { a: left, b_major: right.major(OperandSide::B), scale_d, ..mma });
    }
    b.wgmma_commit();
}

fn registers(step: &[Var<'_, B32>; 4]) -> WgmmaA {
    WgmmaA::Registers(step.map(Reg::register))
}

/// The type of the product, if its operands and its result fit: 64 x K, K x N, N / 2 registers.
fn check(
    b: &Builder,
    a: &Left<'_, '_>,
    right: &Matrix<'_, '_>,
    d: usize,
    source: Source,
) -> Option<WgmmaType> {
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
    b.watch().fault(Fault::Shapes { what: "a product", first, second }, source);
    None
}
