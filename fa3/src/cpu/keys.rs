//! Keys and values: rows of contiguous sequences, or of paged ones.

use std::slice;

use ndarray::{ArrayView2, ArrayView4, Axis};

use super::rows::widen;
use crate::Scalar;

/// K and V of a forward pass, of any element type.
#[derive(Clone, Copy)]
pub struct Keys<'a> {
    k: &'a dyn KeyTensor,
    v: &'a dyn KeyTensor,
    /// Factors on the elements of K and of V (sequences, heads_kv).
    pub(crate) scales: [Option<ArrayView2<'a, f32>>; 2],
    /// Factors on the rows of K and of V, one for each head, if rows have some.
    pub(crate) of_tokens: Option<TokenScales<'a>>,
    /// The pages of rows, if K and V are not contiguous sequences.
    pub(crate) pages: Option<&'a Pages>,
}

impl<'a> Keys<'a> {
    /// K and V without scales, as contiguous sequences of the problem.
    pub(crate) fn new(k: &'a dyn KeyTensor, v: &'a dyn KeyTensor) -> Keys<'a> {
        Keys { k, v, scales: [None; 2], of_tokens: None, pages: None }
    }

    /// Reborrows the arrays.
    pub(super) fn view(&self) -> Keys<'_> {
        let scales = self.scales.each_ref().map(|scales| scales.as_ref().map(|scales| scales.view()));
        Keys { scales, ..*self }
    }

    /// The rows of K and of V of one head of a sequence. Without pages, the sequence begins at row `first` of entry
    /// `batch`.
    pub(super) fn rows<'b>(
        &'b self,
        sequence: usize,
        head: usize,
        (batch, first): &'b (usize, usize),
    ) -> [KeyRows<'b>; 2] {
        let place = match self.pages {
            Some(pages) => pages.of(sequence),
            None => (slice::from_ref(batch), *first),
        };
        [(self.k, 0), (self.v, 1)].map(|(tensor, of)| KeyRows {
            columns: tensor.columns(),
            scale: self.scales[of].map(|scales| scales[[sequence, head]]),
            read: match self.of_tokens {
                None => tensor.reader(place, head),
                Some(TokenScales { factors, round }) => {
                    times(tensor.reader(place, head), factors[of].reader(place, head), round)
                }
            },
        })
    }
}

/// A factor on each row and head of K, and one of V.
#[derive(Clone, Copy)]
pub(crate) struct TokenScales<'a> {
    /// The factors, as tensors of one column.
    pub(crate) factors: [&'a dyn KeyTensor; 2],
    /// The rounding of products.
    pub(crate) round: fn(f32) -> f32,
}

/// A function that reads rows times their factors, rounded.
fn times<'a>(read: Reader<'a>, factor: Reader<'a>, round: fn(f32) -> f32) -> Reader<'a> {
    Box::new(move |row, to| {
        let mut of_row = [1.0];
        factor(row, &mut of_row);
        read(row, to);
        to.iter_mut().for_each(|x| *x = round(*x * of_row[0]));
    })
}

/// The pages of each sequence of K and V. Row r of a sequence is row first + r of the sequence's pages, laid end to
/// end.
#[derive(Clone, Debug)]
pub(crate) struct Pages {
    /// The pages of all sequences, in order: entries of the tensor's batch.
    pub(crate) entries: Vec<usize>,
    /// Index of each sequence's first page in `entries`, and the number of all entries.
    pub(crate) starts: Vec<usize>,
    /// Number of rows of the first page before each sequence's first row.
    pub(crate) first: Vec<usize>,
}

impl Pages {
    /// The pages of a sequence, and the number of rows before its first row.
    pub(crate) fn of(&self, sequence: usize) -> (&[usize], usize) {
        (&self.entries[self.starts[sequence]..self.starts[sequence + 1]], self.first[sequence])
    }
}

/// K or V (entries, rows, heads, columns), of any element type.
pub(crate) trait KeyTensor: Sync {
    fn columns(&self) -> usize;

    /// A function that reads a row of a head. `place` is the pages, and the number of rows in them before row 0.
    fn reader<'b>(&'b self, place: (&'b [usize], usize), head: usize) -> Reader<'b>;
}

/// A function that writes a row, by its index, to a slice.
type Reader<'a> = Box<dyn Fn(usize, &mut [f32]) + 'a>;

impl<T: Scalar> KeyTensor for ArrayView4<'_, T> {
    fn columns(&self) -> usize {
        self.len_of(Axis(3))
    }

    fn reader<'b>(&'b self, (pages, first): (&'b [usize], usize), head: usize) -> Reader<'b> {
        let head = self.index_axis(Axis(2), head);
        match *pages {
            [page] => {
                // Rows of a single page need no page lookup.
                let rows = head.index_axis_move(Axis(0), page);
                Box::new(move |row, to| widen(rows.row(first + row), to))
            }
            _ => Box::new(move |row, to| {
                let (at, rows) = (first + row, head.len_of(Axis(1)));
                let page = head.index_axis(Axis(0), pages[at / rows]);
                widen(page.index_axis(Axis(0), at % rows), to);
            }),
        }
    }
}

/// Listed rows of K or of V of one or two caches. Rows are numbered through both, so that an entry of [`Pages`] is a
/// row.
pub(crate) struct ListedRows<'a, T>(pub(crate) [Option<ArrayView4<'a, T>>; 2]);

impl<T: Scalar> KeyTensor for ListedRows<'_, T> {
    fn columns(&self) -> usize {
        self.0[0].as_ref().map_or(0, |cache| cache.len_of(Axis(3)))
    }

    fn reader<'b>(&'b self, (listed, _): (&'b [usize], usize), head: usize) -> Reader<'b> {
        let caches: Vec<_> = self.0.iter().flatten().map(|cache| cache.index_axis(Axis(2), head)).collect();
        Box::new(move |row, to| {
            let mut at = listed[row];
            for cache in &caches {
                let (pages, rows, _) = cache.dim();
                if at < pages * rows {
                    let page = cache.index_axis(Axis(0), at / rows);
                    return widen(page.index_axis(Axis(0), at % rows), to);
                }
                at -= pages * rows;
            }
        })
    }
}

/// Rows of one head of one sequence of K or V.
pub(super) struct KeyRows<'a> {
    columns: usize,
    scale: Option<f32>,
    read: Reader<'a>,
}

impl KeyRows<'_> {
    pub(super) fn columns(&self) -> usize {
        self.columns
    }

    /// Writes row `row` to `to`.
    pub(super) fn read(&self, row: usize, to: &mut [f32]) {
        self.read_with_scale_of(self, row, to);
    }

    /// Writes row `row` to `to`, times the scale of another tensor.
    pub(super) fn read_with_scale_of(&self, other: &KeyRows<'_>, row: usize, to: &mut [f32]) {
        (self.read)(row, to);
        if let Some(scale) = other.scale {
            to.iter_mut().for_each(|x| *x *= scale);
        }
    }
}
