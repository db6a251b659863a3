//! New rows of a cache and rotary embedding of rows, as plain loops: the reference for appends.

use fa3_types::{QueryPositions, RopeStyle, SequenceRows, rotate};
use ndarray::{Array3, Array4, ArrayView2, ArrayView4, ArrayViewMut4};

use crate::PageTable;

/// The state of a cache before an append: the values of `seqused`, `page_table` and `cache_batch_idx`.
#[derive(Clone, Copy, Debug)]
pub struct AppendedTo<'a> {
    /// Number of rows of each sequence's memory that are in use, left padding included.
    pub seqused: &'a [i32],
    /// The pages of sequences. Without it, a sequence is an entry of the cache's batch.
    pub page_table: Option<PageTable<'a>>,
}

impl AppendedTo<'_> {
    /// Appends rows of `new` (batch, seqlen, heads, columns) to the cache (entries, rows, heads, columns). A row is
    /// dropped if its sequence has a negative length, if it lies beyond the sequence's last page, or if the cache does
    /// not have its page.
    pub fn append<T: Copy>(
        &self,
        new: ArrayView4<'_, T>,
        rows: &SequenceRows,
        cache: &mut ArrayViewMut4<'_, T>,
    ) {
        let (entries, page_rows, heads, columns) = cache.dim();
        for (i, t) in (0..rows.count()).flat_map(|i| (0..rows.len(i)).map(move |t| (i, t))) {
            let Some((entry, row)) = self.place(i, t, [entries, page_rows]) else { continue };
            let (batch, first) = rows.start(i);
            for (head, column) in (0..heads).flat_map(|head| (0..columns).map(move |column| (head, column))) {
                cache[[entry, row, head, column]] = new[[batch, first + t, head, column]];
            }
        }
    }

    /// The number of rows in use of each sequence after the append: 0 for a negative length, and at most the capacity
    /// of the sequence's pages.
    pub fn seqused_after(&self, rows: &SequenceRows, page_rows: usize) -> Vec<i32> {
        let capacity = page_rows * self.page_table.map_or(1, |table| table.dim().1);
        let after = |(i, &used): (usize, &i32)| match usize::try_from(used) {
            Ok(used) => (used + rows.len(i)).min(capacity) as i32,
            Err(_) => 0,
        };
        self.seqused.iter().enumerate().map(after).collect()
    }

    /// The cache entry, and the row in it, of new row `t` of sequence `i`.
    fn place(&self, i: usize, t: usize, [entries, page_rows]: [usize; 2]) -> Option<(usize, usize)> {
        let position = usize::try_from(self.seqused[i]).ok()? + t;
        match self.page_table {
            None => (position < page_rows).then_some((i, position)),
            Some(table) => {
                let page = table.page(i, position.checked_div(page_rows)?)?;
                let page = usize::try_from(page).ok().filter(|&page| page < entries)?;
                Some((page, position % page_rows))
            }
        }
    }
}

/// Passes each element of x (batch, seqlen, heads, columns) to `f`, with the scale of its sequence's head. `scales` are
/// (sequences, heads). Without them, and in rows outside every sequence, the scale is 1.
pub fn with_scales<T: Copy, U>(
    x: ArrayView4<'_, T>,
    rows: &SequenceRows,
    scales: Option<&[f32]>,
    f: impl Fn(T, f32) -> U,
) -> Array4<U> {
    let heads = x.dim().2;
    let mut of_rows = Array3::from_elem((x.dim().0, x.dim().1, heads), 1.0_f32);
    for (index, &scale) in scales.unwrap_or_default().iter().enumerate() {
        let (sequence, head) = (index / heads, index % heads);
        let (batch, first) = rows.start(sequence);
        (first..first + rows.len(sequence)).for_each(|row| of_rows[[batch, row, head]] = scale);
    }
    Array4::from_shape_fn(x.dim(), |at| f(x[at], of_rows[[at.0, at.1, at.2]]))
}

/// Rotary embedding of rows with consecutive positions, or with one position for all rows of a sequence.
#[derive(Clone, Copy, Debug)]
pub struct RotatedRows<'a> {
    /// The pairing of entries.
    pub style: RopeStyle,
    /// The cosines (positions, rotary_dim / 2). Positions are clamped to the table.
    pub cos: ArrayView2<'a, f32>,
    /// The sines, in the same layout.
    pub sin: ArrayView2<'a, f32>,
    /// The position of each sequence's first row. A negative one counts as 0.
    pub base: &'a [i32],
    /// The positions of the other rows.
    pub positions: QueryPositions,
}

impl RotatedRows<'_> {
    /// Rotates the rows of sequences in x (batch, seqlen, heads, columns). `number` converts an element to f32, `round`
    /// converts it back.
    pub fn rotate<T: Copy>(
        &self,
        x: &mut ArrayViewMut4<'_, T>,
        rows: &SequenceRows,
        number: impl Fn(T) -> f32,
        round: impl Fn(f32) -> T,
    ) {
        let pairs = self.cos.ncols();
        for (i, t) in (0..rows.count()).flat_map(|i| (0..rows.len(i)).map(move |t| (i, t))) {
            let (batch, first) = rows.start(i);
            let position = self.position(i, t);
            for (head, pair) in (0..x.dim().2).flat_map(|head| (0..pairs).map(move |pair| (head, pair))) {
                let columns = match self.style {
                    RopeStyle::Interleaved => [2 * pair, 2 * pair + 1],
                    RopeStyle::HalfSplit => [pair, pair + pairs],
                };
                let at = columns.map(|column| [batch, first + t, head, column]);
                let (cos, sin) = (self.cos[[position, pair]], self.sin[[position, pair]]);
                let rotated = rotate(at.map(|at| number(x[at])), cos, sin);
                at.into_iter().zip(rotated).for_each(|(at, rotated)| x[at] = round(rotated));
            }
        }
    }

    /// The row of the tables for row `t` of sequence `i`.
    fn position(&self, i: usize, t: usize) -> usize {
        let t = if self.positions == QueryPositions::Each { t } else { 0 };
        (self.base[i].max(0) as usize + t).min(self.cos.nrows() - 1)
    }
}

#[cfg(test)]
mod tests {
    use ndarray::{Array2, arr2};

    use super::*;

    /// New rows with the elements 10, 11, ... in order.
    fn new() -> (Array4<i32>, SequenceRows) {
        let rows = SequenceRows::packed(&[0, 2, 2, 5, 6]).unwrap();
        (Array4::from_shape_fn((1, 7, 1, 1), |(_, row, ..)| 10 + row as i32), rows)
    }

    #[test]
    fn rows_come_behind_those_that_are_there() {
        let ((new, rows), mut cache) = (new(), Array4::zeros((4, 3, 1, 1)));
        let to = AppendedTo { seqused: &[0, 1, 2, -1], page_table: None };
        to.append(new.view(), &rows, &mut cache.view_mut());
        // The third sequence has room for one more row, and the last one has a negative length.
        assert_eq!(cache.into_raw_vec_and_offset().0, [10, 11, 0, 0, 0, 0, 0, 0, 12, 0, 0, 0]);
        assert_eq!(to.seqused_after(&rows, 3), [2, 1, 3, 0]);
    }

    #[test]
    fn pages_that_are_not_there_get_nothing() {
        let ((new, rows), mut cache) = (new(), Array4::zeros((3, 2, 1, 1)));
        let table = arr2(&[[2, -1], [7, 7], [-1, 0], [1, 9]]);
        let page_table = PageTable { pages: table.view(), index: None };
        let to = AppendedTo { seqused: &[1, 0, 1, 2], page_table: Some(page_table) };
        to.append(new.view(), &rows, &mut cache.view_mut());
        assert_eq!(cache.into_raw_vec_and_offset().0, [13, 14, 0, 0, 0, 10]);
        assert_eq!(to.seqused_after(&rows, 2), [3, 0, 4, 3]);

        // An index selects other rows of the page table. One index is out of range.
        let page_table = PageTable { index: Some(&[2, 1, 4, 3]), ..page_table };
        let (to, mut cache) =
            (AppendedTo { page_table: Some(page_table), ..to }, Array4::zeros((3, 2, 1, 1)));
        to.append(new.view(), &rows, &mut cache.view_mut());
        assert_eq!(cache.into_raw_vec_and_offset().0, [11, 0, 0, 0, 0, 0]);
        assert_eq!(to.seqused_after(&rows, 2), [3, 0, 4, 3]);
    }

    #[test]
    fn rows_have_the_scales_of_their_sequences() {
        let (new, rows) = new();
        let scaled = |scales| {
            let scaled = with_scales(new.view(), &rows, scales, |x, scale| x as f32 * scale);
            scaled.into_raw_vec_and_offset().0
        };
        // The last row belongs to no sequence, and the second sequence has no row.
        let expected = [20.0, 22.0, 6.0, 6.5, 7.0, 15.0, 16.0];
        assert_eq!(scaled(Some(&[2.0, 9.0, 0.5, 1.0])), expected);
        assert_eq!(scaled(None), [10.0, 11.0, 12.0, 13.0, 14.0, 15.0, 16.0]);
    }

    #[test]
    fn rows_rotate_by_their_positions() {
        let ((_, rows), ones) = (new(), Array4::<f32>::ones((1, 7, 1, 3)));
        // The rotation angle is a quarter turn times the position.
        let cos = Array2::from_shape_fn((4, 1), |(p, _)| [1.0, 0.0, -1.0, 0.0][p]);
        let sin = Array2::from_shape_fn((4, 1), |(p, _)| [0.0, 1.0, 0.0, -1.0][p]);
        let each = RotatedRows {
            style: RopeStyle::HalfSplit,
            cos: cos.view(),
            sin: sin.view(),
            base: &[1, 0, -5, 9],
            positions: QueryPositions::Each,
        };
        let rotated = |how: RotatedRows<'_>| {
            let mut x = ones.clone();
            how.rotate(&mut x.view_mut(), &rows, |x| x, |x| x);
            x.rows().into_iter().map(|row| [row[0], row[1], row[2]]).collect::<Vec<_>>()
        };
        let turned = [[1.0, 1.0, 1.0], [-1.0, 1.0, 1.0], [-1.0, -1.0, 1.0], [1.0, -1.0, 1.0]];
        let of = |positions: [usize; 7]| positions.map(|position| turned[position]);
        assert_eq!(rotated(each), of([1, 2, 0, 1, 2, 3, 0]));
        assert_eq!(
            rotated(RotatedRows { positions: QueryPositions::First, ..each }),
            of([1, 1, 0, 0, 0, 3, 0])
        );
        assert_eq!(rotated(RotatedRows { style: RopeStyle::Interleaved, ..each }), of([1, 2, 0, 1, 2, 3, 0]));
    }
}
