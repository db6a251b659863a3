//! One number a row of a fragment: row maxima, row sums, scales.

use crate::{Builder, F32, V, Var};

/// A number for each of the two rows that a thread has in a [`crate::Frag`]: rows l / 4 and l / 4 + 8 of its warp's 16.
#[derive(Clone, Copy, Debug)]
pub struct Rows(pub [V<F32>; 2]);

/// [`Rows`] that a loop carries.
#[derive(Clone, Copy, Debug)]
pub struct RowsVar([Var<F32>; 2]);

impl Rows {
    /// The same operation for both rows.
    #[track_caller]
    pub fn map(self, b: &mut Builder, mut f: impl FnMut(&mut Builder, V<F32>) -> V<F32>) -> Rows {
        Rows(self.0.map(|row| f(b, row)))
    }

    /// The same operation for both rows of two.
    #[track_caller]
    pub fn zip(
        self,
        b: &mut Builder,
        other: Rows,
        mut f: impl FnMut(&mut Builder, V<F32>, V<F32>) -> V<F32>,
    ) -> Rows {
        let ([x0, x1], [y0, y1]) = (self.0, other.0);
        Rows([f(b, x0, y0), f(b, x1, y1)])
    }

    /// Combines the four threads of a quad, which have the same rows.
    #[track_caller]
    pub fn over_quad(self, b: &mut Builder, f: impl Fn(&mut Builder, V<F32>, V<F32>) -> V<F32>) -> Rows {
        let combine = |b: &mut Builder, row| {
            [1, 2].into_iter().fold(row, |row, mask| {
                let other = b.shfl_bfly(row, mask);
                f(b, row, other)
            })
        };
        b.as_one(|b| self.map(b, combine))
    }
}

impl RowsVar {
    /// What they are now.
    #[track_caller]
    pub fn get(self, b: &mut Builder) -> Rows {
        b.as_one(|b| Rows(self.0.map(|row| b.get(row))))
    }

    /// What they become.
    #[track_caller]
    pub fn set(self, b: &mut Builder, rows: Rows) {
        b.as_one(|b| self.0.into_iter().zip(rows.0).for_each(|(var, row)| b.set(var, row)));
    }
}

/// Numbers of rows.
impl Builder {
    /// Variables, one a row, that begin as `initial`.
    #[track_caller]
    pub fn rows_var(&mut self, name: &str, initial: f32) -> RowsVar {
        self.as_one(|b| RowsVar([(); 2].map(|()| b.var(name, initial))))
    }
}
