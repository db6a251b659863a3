//! Rotary position embedding (Su et al., arXiv 2104.09864).

use fa3_types::{RopeStyle, rotate};
use ndarray::Array2;

use crate::QuantError;

/// A rotation of pairs of a row's leading `rotary_dim` entries; pair i turns by position · base^(−2i / rotary_dim).
/// Scores of rotated rows depend on the distance of their positions only.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    style: RopeStyle,
    /// The angle in radians by which each pair turns from one position to the next.
    frequencies: Vec<f64>,
}

impl Rope {
    /// A rotation of the leading `rotary_dim` entries; `base` is 10 000 in most models.
    ///
    /// # Errors
    /// [`QuantError::RotaryDim`] unless `rotary_dim` is positive and even, [`QuantError::RotaryBase`] unless
    /// `base` is positive and finite.
    pub fn new(style: RopeStyle, rotary_dim: usize, base: f64) -> Result<Rope, QuantError> {
        if rotary_dim == 0 || !rotary_dim.is_multiple_of(2) {
            return Err(QuantError::RotaryDim { given: rotary_dim });
        }
        if !(base > 0.0 && base.is_finite()) {
            return Err(QuantError::RotaryBase { given: base });
        }
        let frequency = |pair: usize| base.powf(-2.0 * pair as f64 / rotary_dim as f64);
        Ok(Rope { style, frequencies: (0..rotary_dim / 2).map(frequency).collect() })
    }

    /// Number of leading entries of a row that rotate.
    pub fn rotary_dim(&self) -> usize {
        2 * self.frequencies.len()
    }

    /// Rotates a row at `position`. Angles are f64. Cosines, sines and the rotation are f32.
    ///
    /// # Panics
    /// If the row has fewer than [`Rope::rotary_dim`] entries.
    pub fn apply(&self, row: &mut [f32], position: usize) {
        for pair in 0..self.frequencies.len() {
            let (cos, sin) = self.cos_sin(position, pair);
            turn_pair(self.style, row, (pair, self.frequencies.len()), cos, sin);
        }
    }

    /// The cosines and sines of the first `positions` positions.
    pub fn table(&self, positions: usize) -> RopeTable {
        let shape = (positions, self.frequencies.len());
        let cos = Array2::from_shape_fn(shape, |(position, pair)| self.cos_sin(position, pair).0);
        let sin = Array2::from_shape_fn(shape, |(position, pair)| self.cos_sin(position, pair).1);
        RopeTable { style: self.style, cos, sin }
    }

    fn cos_sin(&self, position: usize, pair: usize) -> (f32, f32) {
        let (sin, cos) = (position as f64 * self.frequencies[pair]).sin_cos();
        (cos as f32, sin as f32)
    }
}

/// A rotation by given cosines and sines, for example of a model that scales its angles. [`Rope::table`] makes the
/// usual tables.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeTable {
    style: RopeStyle,
    /// Cosines (positions, rotary_dim / 2).
    cos: Array2<f32>,
    sin: Array2<f32>,
}

impl RopeTable {
    /// Takes tables (positions, rotary_dim / 2), whose row p is for position p.
    ///
    /// # Errors
    /// [`QuantError::RopeTable`] unless `cos` and `sin` have one shape, and [`QuantError::RotaryDim`] unless they have
    /// columns.
    pub fn new(style: RopeStyle, cos: Array2<f32>, sin: Array2<f32>) -> Result<RopeTable, QuantError> {
        if cos.dim() != sin.dim() {
            return Err(QuantError::RopeTable { cos: cos.dim(), sin: sin.dim() });
        }
        if cos.ncols() == 0 {
            return Err(QuantError::RotaryDim { given: 0 });
        }
        Ok(RopeTable { style, cos, sin })
    }

    /// The pairing of entries.
    pub fn style(&self) -> RopeStyle {
        self.style
    }

    /// Number of leading entries of a row that rotate.
    pub fn rotary_dim(&self) -> usize {
        2 * self.cos.ncols()
    }

    /// Number of positions.
    pub fn positions(&self) -> usize {
        self.cos.nrows()
    }

    /// Cosines (positions, rotary_dim / 2).
    pub fn cos(&self) -> &Array2<f32> {
        &self.cos
    }

    /// Sines (positions, rotary_dim / 2).
    pub fn sin(&self) -> &Array2<f32> {
        &self.sin
    }

    /// Rotates a row at `position`. The whole row becomes NaN if the table has no such position.
    ///
    /// # Panics
    /// If the row has fewer than [`RopeTable::rotary_dim`] entries.
    pub fn apply(&self, row: &mut [f32], position: usize) {
        if position >= self.positions() {
            return row.fill(f32::NAN);
        }
        let pairs = self.cos.ncols();
        for (pair, (&cos, &sin)) in self.cos.row(position).iter().zip(self.sin.row(position)).enumerate() {
            turn_pair(self.style, row, (pair, pairs), cos, sin);
        }
    }
}

/// Rotates pair number `pair` of `pairs`.
fn turn_pair(style: RopeStyle, row: &mut [f32], (pair, pairs): (usize, usize), cos: f32, sin: f32) {
    let (first, second) = match style {
        RopeStyle::Interleaved => (2 * pair, 2 * pair + 1),
        RopeStyle::HalfSplit => (pair, pair + pairs),
    };
    [row[first], row[second]] = rotate([row[first], row[second]], cos, sin);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::normal;

    const STYLES: [RopeStyle; 2] = [RopeStyle::Interleaved, RopeStyle::HalfSplit];

    fn rotated(rope: &Rope, row: &[f32], position: usize) -> Vec<f32> {
        let mut row = row.to_vec();
        rope.apply(&mut row, position);
        row
    }

    fn dot(x: &[f32], y: &[f32]) -> f64 {
        x.iter().zip(y).map(|(&x, &y)| f64::from(x) * f64::from(y)).sum()
    }

    #[test]
    fn the_first_pair_turns_by_the_position() {
        let rope = Rope::new(RopeStyle::Interleaved, 4, 10_000.0).unwrap();
        let row = rotated(&rope, &[1.0, 0.0, 0.0, 1.0, 5.0], 2);
        // Frequencies 1 and 10 000^(-2/4) = 1/100; the entry past rotary_dim stays.
        let expected = [2f64.cos(), 2f64.sin(), -0.02f64.sin(), 0.02f64.cos(), 5.0].map(|x| x as f32);
        assert_eq!(row, expected);
    }

    #[test]
    fn a_table_has_the_rotations_of_its_positions_and_no_others() {
        for style in STYLES {
            let rope = Rope::new(style, 32, 10_000.0).unwrap();
            let table = rope.table(50);
            assert_eq!((table.style(), table.rotary_dim(), table.positions()), (style, 32, 50));
            let given = RopeTable::new(style, table.cos().clone(), table.sin().clone()).unwrap();
            for position in [0, 7, 49] {
                let mut row = normal(40, 3);
                given.apply(&mut row, position);
                assert_eq!(row, rotated(&rope, &normal(40, 3), position));
            }
            let mut row = normal(40, 3);
            given.apply(&mut row, 50);
            assert!(row.iter().all(|x| x.is_nan()));
        }
        let zeros = |columns| Array2::zeros((5, columns));
        let refused = |cos, sin| RopeTable::new(RopeStyle::HalfSplit, cos, sin).unwrap_err();
        assert_eq!(refused(zeros(8), zeros(4)), QuantError::RopeTable { cos: (5, 8), sin: (5, 4) });
        assert_eq!(refused(zeros(0), zeros(0)), QuantError::RotaryDim { given: 0 });
    }

    #[test]
    fn norms_stay() {
        for style in STYLES {
            let rope = Rope::new(style, 96, 10_000.0).unwrap();
            for position in [0, 1, 777, 100_000] {
                let row = normal(128, position as u64);
                let after = rotated(&rope, &row, position);
                assert!((dot(&after, &after) / dot(&row, &row) - 1.0).abs() < 4.0 * f64::from(f32::EPSILON));
                assert_eq!(row[96..], after[96..]);
            }
            let row = normal(128, 5);
            assert_eq!(rotated(&rope, &row, 0), row);
        }
    }

    #[test]
    fn scores_depend_on_the_distance_only() {
        for style in STYLES {
            let rope = Rope::new(style, 64, 10_000.0).unwrap();
            let (q, k) = (normal(64, 1), normal(64, 2));
            let score = |i, j| dot(&rotated(&rope, &q, i), &rotated(&rope, &k, j));
            let size = (dot(&q, &q) * dot(&k, &k)).sqrt();
            for (i, j) in [(9, 4), (100, 95), (70_005, 70_000)] {
                assert!((score(i, j) - score(5, 0)).abs() < 8.0 * f64::from(f32::EPSILON) * size);
            }
            assert!((score(5, 0) - score(6, 0)).abs() > 1e-3 * size);
        }
    }

    #[test]
    fn the_styles_differ_by_a_permutation() {
        let of = |style| Rope::new(style, 32, 500.0).unwrap();
        let row = normal(40, 3);
        // Entry i of the half-split row is entry 2i of the interleaved one, entry i + 16 is entry 2i + 1.
        let interleaved_of = |i: usize| if i < 32 { i % 16 * 2 + i / 16 } else { i };
        let split: Vec<f32> = (0..40).map(|i| row[interleaved_of(i)]).collect();
        let expected = rotated(&of(RopeStyle::Interleaved), &row, 11);
        let after = rotated(&of(RopeStyle::HalfSplit), &split, 11);
        assert!((0..40).all(|i| after[i] == expected[interleaved_of(i)]));
    }

    #[test]
    fn bad_requests_are_rejected() {
        let new = |rotary_dim, base| Rope::new(RopeStyle::HalfSplit, rotary_dim, base).unwrap_err();
        assert_eq!(new(0, 1e4), QuantError::RotaryDim { given: 0 });
        assert_eq!(new(7, 1e4), QuantError::RotaryDim { given: 7 });
        assert_eq!(new(8, 0.0), QuantError::RotaryBase { given: 0.0 });
        assert_eq!(new(8, f64::INFINITY), QuantError::RotaryBase { given: f64::INFINITY });
    }
}
