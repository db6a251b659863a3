//! Tables of expressions.

use std::sync::Arc;

use super::ScoreError;

/// A table that an expression reads by one to four indices: f32, in row-major order.
#[derive(Clone, Debug, PartialEq)]
pub struct ScoreTable {
    pub(super) extents: Arc<[usize]>,
    elements: Arc<[f32]>,
    has_gradient: bool,
}

impl ScoreTable {
    /// The largest number of axes.
    pub const MOST_AXES: usize = 4;

    /// The names of a function's tables as tensors of a call, in order. A function has no more tables.
    pub const NAMES: [&'static str; 8] = [
        "score_table0",
        "score_table1",
        "score_table2",
        "score_table3",
        "score_table4",
        "score_table5",
        "score_table6",
        "score_table7",
    ];

    /// The names of the gradients of these tables.
    pub const OF_GRADIENTS: [&'static str; 8] = [
        "score_dtable0",
        "score_dtable1",
        "score_dtable2",
        "score_dtable3",
        "score_dtable4",
        "score_dtable5",
        "score_dtable6",
        "score_dtable7",
    ];

    /// A table with an element for each combination of indices.
    ///
    /// # Errors
    /// [`ScoreError::TableShape`] if there are no axes or more than four, an extent is 0, the product of
    /// the extents is above 2³¹ − 1, or it is not the number of elements.
    pub fn new(extents: &[usize], elements: impl Into<Arc<[f32]>>) -> Result<ScoreTable, ScoreError> {
        let elements = elements.into();
        let product = extents.iter().try_fold(1_usize, |product, &extent| product.checked_mul(extent));
        let valid = (1..=ScoreTable::MOST_AXES).contains(&extents.len())
            && product == Some(elements.len())
            && (1..=i32::MAX as usize).contains(&elements.len());
        match valid {
            true => Ok(ScoreTable { extents: extents.into(), elements, has_gradient: false }),
            false => Err(ScoreError::TableShape { extents: extents.to_vec(), elements: elements.len() }),
        }
    }

    /// The table, whose gradient the backward pass computes, too.
    #[must_use]
    pub fn with_gradient(self) -> ScoreTable {
        ScoreTable { has_gradient: true, ..self }
    }

    /// Whether the backward pass computes the table's gradient.
    pub fn has_gradient(&self) -> bool {
        self.has_gradient
    }

    /// The number of elements along each axis.
    pub fn extents(&self) -> &[usize] {
        &self.extents
    }

    /// The elements, in row-major order.
    pub fn elements(&self) -> &[f32] {
        &self.elements
    }

    /// The element at one index for each axis.
    pub(super) fn element(&self, at: impl Iterator<Item = i32>) -> f32 {
        self.elements[self.place(at)]
    }

    /// The place of an element, given one index for each axis. An index below 0 counts from the end. Beyond the ends,
    /// the first or the last element counts.
    pub(super) fn place(&self, at: impl Iterator<Item = i32>) -> usize {
        self.extents.iter().zip(at).fold(0, |place, (&extent, index)| {
            let index = if index < 0 { i64::from(index) + extent as i64 } else { i64::from(index) };
            place * extent + index.clamp(0, extent as i64 - 1) as usize
        })
    }
}
