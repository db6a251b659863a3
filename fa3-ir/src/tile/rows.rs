//! One number per row of a fragment: row_max, row_sum, scales.

use std::ops::{Add, Index, Mul, Neg, Sub};

use crate::lang::{Arg, At, Builder, Class, F32, Half, Pred, V, Var};

/// A value for each of the two rows that a thread has in a [`crate::lang::Frag`]: in lane l, rows l / 4 and l / 4 + 8
/// of the 16 rows of its warp.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'k, T = F32>(pub [V<'k, T>; 2]);

/// [`Rows`] that a loop carries.
#[derive(Clone, Copy, Debug)]
pub struct RowsVar<'k>([Var<'k, F32>; 2]);

impl<'k, T> Index<Half> for Rows<'k, T> {
    type Output = V<'k, T>;
    fn index(&self, half: Half) -> &V<'k, T> {
        &self.0[half as usize]
    }
}

impl<'k, T> Index<At> for Rows<'k, T> {
    type Output = V<'k, T>;
    fn index(&self, at: At) -> &V<'k, T> {
        &self[at.half]
    }
}

impl<'k, T: Class> Rows<'k, T> {
    /// Applies `f` to both rows.
    pub fn map<U>(self, f: impl FnMut(V<'k, T>) -> V<'k, U>) -> Rows<'k, U> {
        Rows(self.0.map(f))
    }

    /// Applies `f` to both rows of two [`Rows`].
    pub fn zip<U: Class, W>(
        self,
        other: Rows<'k, U>,
        mut f: impl FnMut(V<'k, T>, V<'k, U>) -> V<'k, W>,
    ) -> Rows<'k, W> {
        let ([x0, x1], [y0, y1]) = (self.0, other.0);
        Rows([f(x0, y0), f(x1, y1)])
    }
}

impl<'k> Rows<'k> {
    /// Combines the values of the four threads of a quad, which have the same rows.
    #[track_caller]
    pub fn over_quad(self, f: impl Fn(V<'k, F32>, V<'k, F32>) -> V<'k, F32>) -> Rows<'k> {
        let _one = self.0[0].builder().as_one();
        self.map(|row| [1, 2].into_iter().fold(row, |row, mask| f(row, row.shfl_bfly(mask))))
    }

    /// 2^x.
    #[track_caller]
    pub fn ex2(self) -> Rows<'k> {
        let _one = self.0[0].builder().as_one();
        self.map(V::ex2)
    }

    /// The larger of two numbers, row by row.
    #[track_caller]
    pub fn max(self, other: Rows<'k>) -> Rows<'k> {
        let _one = self.0[0].builder().as_one();
        self.zip(other, |x, y| x.max(y))
    }

    /// self · factor + addend, rounded once.
    #[track_caller]
    pub fn fma(self, factor: Rows<'k>, addend: Rows<'k>) -> Rows<'k> {
        let _one = self.0[0].builder().as_one();
        let [upper, lower] = Half::BOTH.map(|half| self[half].fma(factor[half], addend[half]));
        Rows([upper, lower])
    }

    /// For each row, whether its value is greater than `limit`.
    #[track_caller]
    pub fn gt(self, limit: impl Arg<Ty = F32>) -> Rows<'k, Pred> {
        let _one = self.0[0].builder().as_one();
        self.map(|x| x.gt(limit))
    }
}

impl<'k> Rows<'k, Pred> {
    /// Whether the predicate holds in either row.
    #[track_caller]
    pub fn any(self) -> V<'k, Pred> {
        self.0[0] | self.0[1]
    }

    /// `yes` in the rows where the predicate holds, `no` in the others.
    #[track_caller]
    pub fn select(self, yes: Rows<'k>, no: Rows<'k>) -> Rows<'k> {
        let _one = self.0[0].builder().as_one();
        let [upper, lower] = Half::BOTH.map(|half| self[half].select(yes[half], no[half]));
        Rows([upper, lower])
    }
}

macro_rules! operators {
    ($($trait:ident::$method:ident;)+) => {$(
        /// Applies the operator row by row.
        impl<'k> $trait for Rows<'k> {
            type Output = Rows<'k>;
            #[track_caller]
            fn $method(self, other: Rows<'k>) -> Rows<'k> {
                let _one = self.0[0].builder().as_one();
                self.zip(other, |x, y| x.$method(y))
            }
        }
    )+};
}

operators! {
    Add::add;
    Sub::sub;
    Mul::mul;
}

/// Multiplies both rows by the same number.
impl<'k, A: Arg<Ty = F32>> Mul<A> for Rows<'k> {
    type Output = Rows<'k>;
    #[track_caller]
    fn mul(self, factor: A) -> Rows<'k> {
        let _one = self.0[0].builder().as_one();
        self.map(|x| x * factor)
    }
}

impl<'k> Neg for Rows<'k> {
    type Output = Rows<'k>;
    #[track_caller]
    fn neg(self) -> Rows<'k> {
        let _one = self.0[0].builder().as_one();
        self.map(|x| -x)
    }
}

impl<'k> RowsVar<'k> {
    /// The rows as they are now.
    #[track_caller]
    pub fn get(self) -> Rows<'k> {
        let _one = self.0[0].now().builder().as_one();
        Rows(self.0.map(Var::get))
    }

    /// Assigns the rows.
    #[track_caller]
    pub fn set(self, rows: Rows<'k>) {
        let _one = rows.0[0].builder().as_one();
        self.0.into_iter().zip(rows.0).for_each(|(var, row)| var.set(row));
    }
}

/// Variables of rows.
impl Builder {
    /// Variables, one per row, that begin as `initial`.
    #[track_caller]
    pub fn rows_var(&self, name: &str, initial: f32) -> RowsVar<'_> {
        let _one = self.as_one();
        RowsVar([(); 2].map(|()| self.var(name, initial)))
    }
}
