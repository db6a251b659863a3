//! Fragments: a warpgroup's accumulators as a matrix of 64 rows, and the A operands that are made from them.

use std::{array, fmt};

use crate::lang::{Arg, B32, Builder, F32, Rows, V, Var};
use crate::{Elem, WgmmaType};

/// 64 x [`Frag::cols`] binary32 numbers in the registers of a warpgroup. Thread t has row 16 (t / 32) + (t mod 32) / 4
/// and the row 8 below. Of each 8 columns it has columns 2 (t mod 4) and 2 (t mod 4) + 1.
///
/// A fragment has one owner. A product borrows it until the product's wait:
/// ```compile_fail,E0499
/// use fa3_ir::lang::{AFrag, Frag, Tile, gemm};
/// fn read_in_flight(p: &AFrag, v: Tile, o: &mut Frag) {
///     let product = gemm(p, v, &mut *o);
///     o.map_in_place(|x, _| x * 2.0);
///     product.wait();
/// }
/// ```
pub struct Frag<'k> {
    builder: &'k Builder,
    pub(crate) regs: Vec<Var<'k, F32>>,
}

impl fmt::Debug for Frag<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.regs).finish()
    }
}

/// One of the two rows of a [`Frag`] that a thread has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Half {
    /// Its first row.
    Upper,
    /// The row 8 below.
    Lower,
}

impl Half {
    /// Both halves, the upper one first.
    pub const BOTH: [Half; 2] = [Half::Upper, Half::Lower];

    /// Number of rows below the thread's first row.
    pub const fn rows(self) -> u32 {
        8 * self as u32
    }
}

/// The position of one of a thread's registers in a [`Frag`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct At {
    /// The half: which of the thread's two rows.
    pub half: Half,
    /// The column for the first thread of a quad. Thread t's column is 2 (t mod 4) more.
    pub col: u32,
}

impl At {
    /// The number of the thread's register.
    pub fn index(self) -> usize {
        (4 * (self.col / 8) + 2 * self.half as u32 + self.col % 2) as usize
    }

    /// The position of a thread's register number `index`.
    fn of(index: u32) -> At {
        At { half: Half::BOTH[index as usize / 2 % 2], col: 8 * (index / 4) + index % 2 }
    }
}

impl<'k> Frag<'k> {
    /// A fragment that holds nothing yet.
    pub(crate) fn uninitialised(builder: &'k Builder, cols: u32) -> Frag<'k> {
        Frag { builder, regs: builder.accumulator("acc", cols / 2) }
    }

    /// A fragment of these registers.
    pub(crate) fn new(builder: &'k Builder, regs: Vec<Var<'k, F32>>) -> Frag<'k> {
        Frag { builder, regs }
    }

    /// A fragment of zeros.
    #[track_caller]
    pub fn zeros(builder: &'k Builder, cols: u32) -> Frag<'k> {
        let frag = Frag::uninitialised(builder, cols);
        let _one = builder.as_one();
        frag.regs.iter().for_each(|reg| reg.set(0.0));
        frag
    }

    /// The builder of the fragment's kernel.
    pub fn builder(&self) -> &'k Builder {
        self.builder
    }

    /// Columns.
    pub fn cols(&self) -> u32 {
        self.regs.len() as u32 * 2
    }

    /// The thread's registers with their positions.
    pub fn elements(&self) -> impl Iterator<Item = (At, Var<'k, F32>)> + '_ {
        self.regs.iter().zip(0..).map(|(&reg, index)| (At::of(index), reg))
    }

    /// The thread's pairs of neighbouring columns, each with the position of its first.
    pub fn pairs(&self) -> impl Iterator<Item = (At, [Var<'k, F32>; 2])> + '_ {
        let firsts = self.elements().step_by(2).map(|(at, _)| at);
        firsts.zip(self.regs.chunks_exact(2)).map(|(at, pair)| (at, [pair[0], pair[1]]))
    }

    /// Replaces every element by the result of `f`.
    #[track_caller]
    pub fn map_in_place<A: Arg<Ty = F32>>(&mut self, f: impl FnMut(V<'k, F32>, At) -> A) {
        self.replace(|_| true, f);
    }

    /// Replaces every element of one of the thread's two rows by the result of `f`.
    #[track_caller]
    pub fn map_row_in_place<A: Arg<Ty = F32>>(&mut self, half: Half, f: impl FnMut(V<'k, F32>, At) -> A) {
        self.replace(|at| at.half == half, f);
    }

    #[track_caller]
    fn replace<A: Arg<Ty = F32>>(
        &mut self,
        which: impl Fn(At) -> bool,
        mut f: impl FnMut(V<'k, F32>, At) -> A,
    ) {
        for (at, reg) in self.elements().filter(|&(at, _)| which(at)) {
            let new = f(reg.get(), at);
            reg.set(new);
        }
    }

    /// Splits the fragment into the columns before `first`, a multiple of 8, and the others.
    #[track_caller]
    pub fn split_at(mut self, first: u32) -> (Frag<'k>, Frag<'k>) {
        if !first.is_multiple_of(8) || first > self.cols() {
            self.builder.misfit("columns of a fragment", first, self.cols());
        }
        let after = self.regs.split_off((first as usize / 2).min(self.regs.len()));
        let builder = self.builder;
        (self, Frag { builder, regs: after })
    }

    /// This fragment with the columns of `right` after its own.
    #[must_use]
    pub fn beside(mut self, right: Frag<'k>) -> Frag<'k> {
        self.regs.extend(right.regs);
        self
    }

    /// Adds another fragment of the same width, element by element.
    #[track_caller]
    pub fn add(&mut self, other: &Frag<'k>) {
        if other.cols() != self.cols() {
            self.builder.misfit("columns of a fragment", other.cols(), self.cols());
        }
        let _one = self.builder.as_one();
        self.regs.iter().zip(&other.regs).for_each(|(&reg, &more)| reg.set(reg + more));
    }

    /// Multiplies every row by its number and then adds `other`, in as many columns as `other` has, from `first` on.
    #[track_caller]
    pub fn scale_rows_and_add(&mut self, first: u32, rows: Rows<'k>, other: &Frag<'k>) {
        let to = (first / 2) as usize;
        let Some(regs) = self.regs.get(to..to + other.regs.len()).filter(|_| first.is_multiple_of(8)) else {
            return self.builder.misfit(
                "columns of a fragment",
                first.saturating_add(other.cols()),
                self.cols(),
            );
        };
        let _one = self.builder.as_one();
        for (&reg, (at, more)) in regs.iter().zip(other.elements()) {
            reg.set(reg.get().fma(rows[at], more));
        }
    }

    /// Multiplies every row by its number.
    #[track_caller]
    pub fn scale_rows(&mut self, rows: Rows<'k>) {
        let _one = self.builder.as_one();
        self.map_in_place(|x, at| x * rows[at]);
    }

    /// Permutes columns: of each 16, the new order is 0 8 2 10 4 12 6 14 1 9 3 11 5 13 7 15. Each thread keeps its own
    /// columns in another order, so that the permutation takes no instruction.
    #[track_caller]
    pub fn interleaved(self) -> Frag<'k> {
        if !self.cols().is_multiple_of(16) {
            self.builder.misfit("columns of a fragment", self.cols(), 16);
        }
        let [first, second] = [0, 4];
        let of_sixteen = |regs: &[Var<'k, F32>]| {
            let places = [[0, 0], [0, 2], [1, 0], [1, 2]]
                .map(|[part, half]| [first, second].map(|of| of + half + part));
            places.concat().into_iter().map(|place| regs[place]).collect::<Vec<_>>()
        };
        Frag { regs: self.regs.chunks_exact(8).flat_map(of_sixteen).collect(), ..self }
    }

    /// Combines the thread's elements of each row in four independent chains of operations.
    #[track_caller]
    fn over_rows(&self, f: impl Fn(V<'k, F32>, V<'k, F32>) -> V<'k, F32>) -> Rows<'k> {
        Rows(Half::BOTH.map(|half| {
            let row: Vec<Var<'k, F32>> =
                self.elements().filter(|(at, _)| at.half == half).map(|(_, reg)| reg).collect();
            let chains: Vec<V<'k, F32>> = (0..row.len().min(4))
                .map(|first| {
                    let start = row[first].get();
                    row.iter().skip(first + 4).step_by(4).fold(start, |sum, reg| f(sum, reg.get()))
                })
                .collect();
            let pairs: Vec<V<'k, F32>> =
                chains.chunks(2).map(|pair| if let &[x, y] = pair { f(x, y) } else { pair[0] }).collect();
            pairs.into_iter().reduce(&f).unwrap_or_else(|| self.builder.copy(0.0))
        }))
    }

    /// The maximum of each row.
    #[track_caller]
    pub fn row_max(&self) -> Rows<'k> {
        let _one = self.builder.as_one();
        self.partial_row_max().over_quad(|x, y| x.max(y))
    }

    /// The maximum of the thread's elements of each row. The four threads of a quad have the parts of a row.
    #[track_caller]
    pub fn partial_row_max(&self) -> Rows<'k> {
        let _one = self.builder.as_one();
        self.over_rows(|x, y| x.max(y))
    }

    /// The maximum of `f` of the thread's elements of each row.
    #[track_caller]
    pub fn partial_row_max_of(&self, f: impl Fn(V<'k, F32>, At) -> V<'k, F32>) -> Rows<'k> {
        let _one = self.builder.as_one();
        Rows(Half::BOTH.map(|half| {
            let row = self.elements().filter(|(at, _)| at.half == half).map(|(at, reg)| f(reg.get(), at));
            row.reduce(|x, y| x.max(y)).unwrap_or_else(|| self.builder.copy(f32::NEG_INFINITY))
        }))
    }

    /// Like [`Frag::partial_row_max`], if the thread has no NaN in the row. It compares bits as integers, because one
    /// instruction of sm_90 takes the maximum of three integers. If all threads of the warp have a positive number in
    /// both of their rows, the row maxima take half as many instructions; otherwise equally many.
    #[track_caller]
    pub fn partial_row_max_of_bits(&self) -> Rows<'k> {
        let b = self.builder;
        let _one = b.as_one();
        let positive = self.over_rows(|x, y| x.as_bits().max_s32(y.as_bits()).as_f32());
        let largest = b.rows_var("largest", 0.0);
        largest.set(positive);
        let is_negative = positive.map(|x| x.as_bits().lt_s32(0));
        b.if_uniform(is_negative.any().vote_any(), || {
            // Among negative numbers, the largest has the smallest bits.
            let negative = self.over_rows(|x, y| x.as_bits().min(y.as_bits()).as_f32());
            largest.set(is_negative.select(negative, positive));
        });
        largest.get()
    }

    /// The sum of each row.
    #[track_caller]
    pub fn row_sum(&self) -> Rows<'k> {
        let _one = self.builder.as_one();
        self.partial_row_sum().over_quad(|x, y| x + y)
    }

    /// The sum of the thread's elements of each row. The four threads of a quad have the parts of a row.
    #[track_caller]
    pub fn partial_row_sum(&self) -> Rows<'k> {
        let _one = self.builder.as_one();
        self.over_rows(|x, y| x + y)
    }

    /// Assigns another fragment of the same width.
    #[track_caller]
    pub fn set(&mut self, next: &Frag<'k>) {
        if next.cols() != self.cols() {
            self.builder.misfit("columns of a fragment", next.cols(), self.cols());
        }
        let _one = self.builder.as_one();
        self.regs.iter().zip(&next.regs).for_each(|(var, &value)| var.set(value));
    }

    /// The fragment, rounded, as the A operand of a product.
    ///
    /// For 16-bit elements, a thread's registers already are the registers of A. For 8-bit elements they are not.
    /// Instead of exchanging registers between threads, the columns are permuted: within each 16, their order is 0 1 8
    /// 9 2 3 10 11 4 5 12 13 6 7 14 15. The rows of B must be stored in that order.
    #[track_caller]
    pub fn to_a(&self, ty: WgmmaType) -> AFrag<'k> {
        let _one = self.builder.as_one();
        self.map_to_a(ty, |x, _| x)
    }

    /// Applies `f` to each element and rounds the results to the A operand of a product: see [`Frag::to_a`]. The
    /// fragment stays as it is.
    #[track_caller]
    pub fn map_to_a(&self, ty: WgmmaType, mut f: impl FnMut(V<'k, F32>, At) -> V<'k, F32>) -> AFrag<'k> {
        let _one = self.builder.as_one();
        let [a] = self.numbers_to_a(ty, |reg, at| [f(reg.get(), at)]);
        a
    }

    /// Rounds the two numbers that `f` makes of each element to the A operands of two products: see [`Frag::to_a`]. The
    /// fragment stays as it is.
    #[track_caller]
    pub fn map_to_two_a(
        &self,
        ty: WgmmaType,
        mut f: impl FnMut(V<'k, F32>, At) -> [V<'k, F32>; 2],
    ) -> [AFrag<'k>; 2] {
        let _one = self.builder.as_one();
        self.numbers_to_a(ty, |reg, at| f(reg.get(), at))
    }

    /// Splits each element into two numbers by `f`. The first one, rounded, goes into the A operand of a product (see
    /// [`Frag::to_a`]); the second one replaces the element.
    #[track_caller]
    pub fn split_to_a(
        &mut self,
        ty: WgmmaType,
        mut f: impl FnMut(V<'k, F32>, At) -> [V<'k, F32>; 2],
    ) -> AFrag<'k> {
        let _one = self.builder.as_one();
        let [a] = self.numbers_to_a(ty, |reg, at| {
            let [of_a, stays] = f(reg.get(), at);
            reg.set(stays);
            [of_a]
        });
        a
    }

    /// Calls `numbers` for each of the thread's registers, and rounds its `N` results to `N` A operands.
    #[track_caller]
    fn numbers_to_a<const N: usize>(
        &self,
        ty: WgmmaType,
        mut numbers: impl FnMut(Var<'k, F32>, At) -> [V<'k, F32>; N],
    ) -> [AFrag<'k>; N] {
        if !self.cols().is_multiple_of(ty.k()) {
            self.builder.misfit("columns of a fragment and steps along K", self.cols(), ty.k());
        }
        // The numbers of registers `first` and `first + 1`.
        let mut pairs = |first: usize| {
            let [x, y] = [first, first + 1].map(|index| numbers(self.regs[index], At::of(index as u32)));
            array::from_fn(|of| [x[of], y[of]])
        };
        let mut words = |first: usize| -> [V<'k, B32>; N] {
            match ty {
                WgmmaType::F16 => pairs(first).map(|[x, y]| y.f16x2_above(x)),
                WgmmaType::Bf16 => pairs(first).map(|[x, y]| y.bf16x2_above(x)),
                WgmmaType::E4m3 => {
                    let [low, high] =
                        [first, first + 4].map(|first| pairs(first).map(|[x, y]| y.e4m3x2_above(x)));
                    array::from_fn(|of| low[of].below(high[of]))
                }
            }
        };
        // The first accumulator of each A register, for rows l / 4 and l / 4 + 8 of lane l: two in the first columns of
        // the step along K, then two in its other columns.
        let registers = if ty == WgmmaType::E4m3 { [0, 2, 8, 10] } else { [0, 2, 4, 6] };
        let step = (ty.k() / 2) as usize;
        let steps: Vec<[[V<'k, B32>; N]; 4]> = (0..self.regs.len() / step)
            .map(|index| registers.map(|first| words(index * step + first)))
            .collect();
        array::from_fn(|of| {
            let steps = steps.iter().map(|step| step.map(|words| words[of])).collect();
            AFrag::new(self.builder, ty, steps)
        })
    }
}

/// 64 rows of a product's A operand, in the registers of a warpgroup; a loop may carry it.
///
/// It cannot change while a product reads it:
/// ```compile_fail,E0502
/// use fa3_ir::lang::{AFrag, Frag, Tile, gemm};
/// fn overwrite_in_flight<'k>(p: &mut AFrag<'k>, next: &AFrag<'k>, v: Tile, o: &mut Frag) {
///     let product = gemm(&*p, v, o);
///     p.set(next);
///     product.wait();
/// }
/// ```
pub struct AFrag<'k> {
    builder: &'k Builder,
    pub(crate) ty: WgmmaType,
    /// The registers of each step along K.
    pub(crate) steps: Vec<[Var<'k, B32>; 4]>,
}

impl fmt::Debug for AFrag<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} {:?}", self.ty, self.steps)
    }
}

impl<'k> AFrag<'k> {
    #[track_caller]
    fn new(builder: &'k Builder, ty: WgmmaType, steps: Vec<[V<'k, B32>; 4]>) -> AFrag<'k> {
        let steps = steps.into_iter().map(|regs| regs.map(|reg| builder.var("a", reg))).collect();
        AFrag { builder, ty, steps }
    }

    /// The builder of the operand's kernel.
    pub fn builder(&self) -> &'k Builder {
        self.builder
    }

    /// Columns: its extent along K.
    pub fn cols(&self) -> u32 {
        self.steps.len() as u32 * self.ty.k()
    }

    /// The type of the products that read this operand.
    pub fn product_type(&self) -> WgmmaType {
        self.ty
    }

    /// The element type.
    pub fn elem(&self) -> Elem {
        match self.ty {
            WgmmaType::F16 => Elem::F16,
            WgmmaType::Bf16 => Elem::Bf16,
            WgmmaType::E4m3 => Elem::E4m3,
        }
    }

    /// Multiplies each row by its factor. Factors and products are rounded to the elements' type, which must have 16
    /// bits.
    #[track_caller]
    pub fn scale_rows(&mut self, factors: Rows<'k>) {
        let _one = self.builder.as_one();
        let (pair, product): (fn(_, _) -> _, fn(_, _) -> _) = match self.ty {
            WgmmaType::F16 => (V::f16x2_above, V::mul_f16x2),
            WgmmaType::Bf16 => (V::bf16x2_above, V::mul_bf16x2),
            WgmmaType::E4m3 => return self.builder.misfit("bits of an A operand's element", 8, 16),
        };
        let Rows([upper, lower]) = factors.map(|factor| pair(factor, factor));
        for [first, second, third, fourth] in &self.steps {
            for (var, factor) in [(first, upper), (second, lower), (third, upper), (fourth, lower)] {
                var.set(product(var.get(), factor));
            }
        }
    }

    /// A copy in other registers, which products that read this operand do not touch.
    #[track_caller]
    pub fn copied(&self) -> AFrag<'k> {
        let _one = self.builder.as_one();
        AFrag::new(self.builder, self.ty, self.steps.iter().map(|step| step.map(Var::get)).collect())
    }

    /// Assigns another operand of the same shape.
    #[track_caller]
    pub fn set(&mut self, next: &AFrag<'k>) {
        if (self.ty, self.cols()) != (next.ty, next.cols()) {
            let shape = |frag: &AFrag<'_>| format!("64 x {} {}", frag.cols(), frag.elem());
            self.builder.misfit("an A operand", shape(next), shape(self));
        }
        let (to, from) = (self.steps.iter().flatten(), next.steps.iter().flatten());
        let _one = self.builder.as_one();
        to.zip(from).for_each(|(var, &value)| var.set(value));
    }
}

/// Positions of a thread's elements in its warpgroup's 64 rows.
impl Builder {
    /// The thread's first row in its warpgroup; its second is 8 more.
    #[track_caller]
    pub fn frag_row(&self) -> V<'_, B32> {
        let _one = self.as_one();
        let tid = self.tid();
        let (warp, row) = (tid.bfe(5, 2), tid.bfe(2, 3));
        warp.mad(16, row)
    }

    /// The number that this thread adds to [`At::col`]: 2 (t mod 4) for thread t.
    #[track_caller]
    pub fn frag_col(&self) -> V<'_, B32> {
        let _one = self.as_one();
        (self.tid() & 3) << 1
    }
}
