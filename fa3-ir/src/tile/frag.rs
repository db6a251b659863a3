//! Fragments: a warpgroup's accumulators as a matrix of 64 rows, and the A operand that one turns into.

use crate::{B32, Builder, Elem, F32, Rows, V, Var, WgmmaType};

/// 64 x [`Frag::cols`] binary32 numbers in the registers of a warpgroup: thread t has rows 16 (t / 32) + (t mod 32) / 4
/// and 8 more, and of each 8 columns 2 (t mod 4) and the next.
///
/// It belongs to one holder; a product takes it until its wait:
/// ```compile_fail,E0499
/// use fa3_ir::{AFrag, Builder, Frag, Tile, gemm_rs};
/// fn read_in_flight(b: &mut Builder, p: &AFrag, v: Tile<'_>, o: &mut Frag) {
///     let product = gemm_rs(b, p, v, &mut *o);
///     o.map(b, |b, x, _| b.mul(x, 2.0));
///     product.wait(b);
/// }
/// ```
#[derive(Debug)]
pub struct Frag {
    pub(crate) regs: Vec<Var<F32>>,
}

/// Where a register of a [`Frag`] is in the thread's part of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct At {
    /// Which of the thread's two rows.
    pub half: u32,
    /// The column, for the first thread of a quad; 2 (t mod 4) more for thread t.
    pub col: u32,
}

impl At {
    /// The place of a thread's register number `index`.
    fn of(index: u32) -> At {
        At { half: index / 2 % 2, col: 8 * (index / 4) + index % 2 }
    }
}

impl Frag {
    /// A fragment that holds nothing yet.
    pub(crate) fn uninitialised(b: &mut Builder, cols: u32) -> Frag {
        Frag { regs: b.accumulator("acc", cols / 2) }
    }

    /// A fragment of zeros.
    #[track_caller]
    pub fn zeros(b: &mut Builder, cols: u32) -> Frag {
        let frag = Frag::uninitialised(b, cols);
        b.as_one(|b| frag.regs.iter().for_each(|&reg| b.set(reg, 0.0)));
        frag
    }

    /// Columns.
    pub fn cols(&self) -> u32 {
        self.regs.len() as u32 * 2
    }

    /// The thread's registers with their places.
    pub fn elements(&self) -> impl Iterator<Item = (At, Var<F32>)> + '_ {
        self.regs.iter().zip(0..).map(|(&reg, index)| (At::of(index), reg))
    }

    /// Replaces every element.
    #[track_caller]
    pub fn map(&mut self, b: &mut Builder, mut f: impl FnMut(&mut Builder, V<F32>, At) -> V<F32>) {
        for (at, reg) in self.elements() {
            let old = b.as_one(|b| b.get(reg));
            let new = f(b, old, at);
            b.as_one(|b| b.set(reg, new));
        }
    }

    /// Replaces every element of one of the thread's two rows.
    #[track_caller]
    pub fn map_row(
        &mut self,
        b: &mut Builder,
        half: u32,
        mut f: impl FnMut(&mut Builder, V<F32>, At) -> V<F32>,
    ) {
        for (at, reg) in self.elements().filter(|(at, _)| at.half == half) {
            let old = b.as_one(|b| b.get(reg));
            let new = f(b, old, at);
            b.as_one(|b| b.set(reg, new));
        }
    }

    /// Adds another of the same width, element by element.
    #[track_caller]
    pub fn add(&mut self, b: &mut Builder, other: &Frag) {
        if other.cols() != self.cols() {
            b.misfit("columns of a fragment", other.cols(), self.cols());
        }
        b.as_one(|b| {
            for (&reg, &more) in self.regs.iter().zip(&other.regs) {
                let sum = b.add(reg, more);
                b.set(reg, sum);
            }
        });
    }

    /// Multiplies every row by its number.
    #[track_caller]
    pub fn scale_rows(&mut self, b: &mut Builder, rows: Rows) {
        b.as_one(|b| self.map(b, |b, x, at| b.mul(x, rows.0[at.half as usize])));
    }

    /// Combines the elements that the thread has of each row: in four chains, whose operations do not wait for each other's.
    #[track_caller]
    fn over_rows(&self, b: &mut Builder, f: impl Fn(&mut Builder, V<F32>, V<F32>) -> V<F32>) -> Rows {
        let rows = [0, 1].map(|half| {
            let row: Vec<Var<F32>> =
                self.elements().filter(|(at, _)| at.half == half).map(|(_, reg)| reg).collect();
            let chains: Vec<V<F32>> = (0..row.len().min(4))
                .map(|first| {
                    let start = b.get(row[first]);
                    row.iter().skip(first + 4).step_by(4).fold(start, |sum, &reg| {
                        let x = b.get(reg);
                        f(b, sum, x)
                    })
                })
                .collect();
            let pairs: Vec<V<F32>> =
                chains.chunks(2).map(|pair| if let &[x, y] = pair { f(b, x, y) } else { pair[0] }).collect();
            pairs.into_iter().reduce(|x, y| f(b, x, y)).unwrap_or_else(|| b.mov_f32(0.0))
        });
        Rows(rows)
    }

    /// The maximum of each row.
    #[track_caller]
    pub fn row_max(&self, b: &mut Builder) -> Rows {
        b.as_one(|b| self.partial_row_max(b).over_quad(b, |b, x, y| b.max_f32(x, y)))
    }

    /// The maximum of what the thread has of each row; the four threads of a quad have the parts of the whole.
    #[track_caller]
    pub fn partial_row_max(&self, b: &mut Builder) -> Rows {
        b.as_one(|b| self.over_rows(b, |b, x, y| b.max_f32(x, y)))
    }

    /// The sum of each row.
    #[track_caller]
    pub fn row_sum(&self, b: &mut Builder) -> Rows {
        b.as_one(|b| self.partial_row_sum(b).over_quad(b, |b, x, y| b.add(x, y)))
    }

    /// The sum of what the thread has of each row; the four threads of a quad have the parts of the whole.
    #[track_caller]
    pub fn partial_row_sum(&self, b: &mut Builder) -> Rows {
        b.as_one(|b| self.over_rows(b, |b, x, y| b.add(x, y)))
    }

    /// Becomes another of the same width.
    #[track_caller]
    pub fn set(&mut self, b: &mut Builder, next: &Frag) {
        if next.cols() != self.cols() {
            b.misfit("columns of a fragment", next.cols(), self.cols());
        }
        b.as_one(|b| self.regs.iter().zip(&next.regs).for_each(|(&var, &value)| b.set(var, value)));
    }

    /// The fragment, rounded, as the A operand of a product.
    ///
    /// Of 16-bit elements a thread's registers are already those that A needs. Of 8-bit elements they are not, and
    /// instead of moving them between threads the columns change places: within each 16, in the order
    /// 0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15. The rows of B must be stored in that order.
    #[track_caller]
    pub fn to_a(&self, b: &mut Builder, ty: WgmmaType) -> AFrag {
        b.as_one(|b| self.map_to_a(b, ty, |_, x, _| x))
    }

    /// What `f` makes of the elements, rounded, as the A operand of a product: see [`Frag::to_a`]. The fragment stays.
    #[track_caller]
    pub fn map_to_a(
        &self,
        b: &mut Builder,
        ty: WgmmaType,
        f: impl FnMut(&mut Builder, V<F32>, At) -> V<F32>,
    ) -> AFrag {
        if !self.cols().is_multiple_of(ty.k()) {
            b.misfit("columns of a fragment and steps along K", self.cols(), ty.k());
        }
        self.converted(b, ty, f)
    }

    fn converted(
        &self,
        b: &mut Builder,
        ty: WgmmaType,
        mut f: impl FnMut(&mut Builder, V<F32>, At) -> V<F32>,
    ) -> AFrag {
        // Registers `first` and the next one.
        let mut pair = |b: &mut Builder, first: usize| {
            let [x, y] = [first, first + 1].map(|index| {
                let x = b.get(self.regs[index]);
                f(b, x, At::of(index as u32))
            });
            match ty {
                WgmmaType::F16 => b.f16x2_of_f32(y, x),
                WgmmaType::Bf16 => b.bf16x2_of_f32(y, x),
                WgmmaType::E4m3 => {
                    let pair = b.e4m3x2_of_f32(y, x);
                    b.u32_of_u16(pair)
                }
            }
        };
        let steps = |step: usize| (0..self.regs.len() / step).map(move |index| index * step);
        let steps = match ty {
            WgmmaType::F16 | WgmmaType::Bf16 => {
                steps(8).map(|step| [0, 2, 4, 6].map(|first| pair(b, step + first))).collect()
            }
            WgmmaType::E4m3 => steps(16)
                .map(|step| {
                    // Rows l / 4 and l / 4 + 8 of the first 16 columns, then of the others.
                    [0, 2, 8, 10].map(|first| {
                        let low = pair(b, step + first);
                        let high = pair(b, step + first + 4);
                        let high = b.shl_b32(high, 16);
                        b.or(low, high)
                    })
                })
                .collect(),
        };
        AFrag::new(b, ty, steps)
    }
}

/// 64 rows of a product's A operand, in the registers of a warpgroup; a loop may carry it.
///
/// It cannot change while a product reads it:
/// ```compile_fail,E0502
/// use fa3_ir::{AFrag, Builder, Frag, Tile, gemm_rs};
/// fn overwrite_in_flight(b: &mut Builder, p: &mut AFrag, next: &AFrag, v: Tile<'_>, o: &mut Frag) {
///     let product = gemm_rs(b, p, v, o);
///     p.set(b, next);
///     product.wait(b);
/// }
/// ```
#[derive(Debug)]
pub struct AFrag {
    pub(crate) ty: WgmmaType,
    /// The registers of each step along K.
    pub(crate) steps: Vec<[Var<B32>; 4]>,
}

impl AFrag {
    #[track_caller]
    fn new(b: &mut Builder, ty: WgmmaType, steps: Vec<[V<B32>; 4]>) -> AFrag {
        let steps = steps.into_iter().map(|regs| regs.map(|reg| b.var("a", reg))).collect();
        AFrag { ty, steps }
    }

    /// Columns: its extent along K.
    pub fn cols(&self) -> u32 {
        self.steps.len() as u32 * self.ty.k()
    }

    /// The type of the products that it is for.
    pub fn product_type(&self) -> WgmmaType {
        self.ty
    }

    /// Its element type.
    pub fn elem(&self) -> Elem {
        match self.ty {
            WgmmaType::F16 => Elem::F16,
            WgmmaType::Bf16 => Elem::Bf16,
            WgmmaType::E4m3 => Elem::E4m3,
        }
    }

    /// Becomes another of the same shape.
    #[track_caller]
    pub fn set(&mut self, b: &mut Builder, next: &AFrag) {
        if (self.ty, self.cols()) != (next.ty, next.cols()) {
            let shape = |frag: &AFrag| format!("64 x {} {}", frag.cols(), frag.elem());
            b.misfit("an A operand", shape(next), shape(self));
        }
        let (to, from) = (self.steps.iter().flatten(), next.steps.iter().flatten());
        b.as_one(|b| to.zip(from).for_each(|(&var, &value)| b.set(var, value)));
    }
}

/// Where a thread's elements are in its warpgroup's 64 rows.
impl Builder {
    /// The thread's first row in its warpgroup; its second is 8 more.
    #[track_caller]
    pub fn frag_row(&mut self) -> V<B32> {
        self.as_one(|b| {
            let tid = b.tid();
            let (warp, row) = (b.bfe_u32(tid, 5, 2), b.bfe_u32(tid, 2, 3));
            b.mad_u32(warp, 16, row)
        })
    }

    /// What to add to [`At::col`] for this thread.
    #[track_caller]
    pub fn frag_col(&mut self) -> V<B32> {
        self.as_one(|b| {
            let tid = b.tid();
            let quad = b.and(tid, 3);
            b.shl_b32(quad, 1)
        })
    }
}
