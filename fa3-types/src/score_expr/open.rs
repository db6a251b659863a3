//! Functions of a score whose tables are given later.

use std::sync::Arc;

use super::{ScoreError, ScoreExpr, ScoreForm, ScoreFunction, ScoreGradients, ScoreTable};

/// A function of a score whose tables are given later: an expression and its numbers.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct OpenScore {
    pub(super) expr: ScoreExpr,
    /// The bits of the numbers `x0`, `x1` and so on.
    pub(super) numbers: Arc<[u32]>,
    /// For each table of the expression, its number in the order in which tables were named.
    pub(super) tables: Arc<[u8]>,
}

impl OpenScore {
    /// For each table of the expression, its number in the text.
    pub fn tables(&self) -> &[u8] {
        &self.tables
    }

    /// The function over tables of these extents, in the expression's order.
    ///
    /// # Errors
    /// [`ScoreError::Extents`] if the number of tables or of their axes differs from the expression's, or an extent is
    /// 0.
    pub fn form(&self, extents: &[Arc<[usize]>]) -> Result<ScoreForm, ScoreError> {
        let (axes, are_empty) = (self.expr.axes(), extents.iter().any(|extents| extents.contains(&0)));
        if are_empty || !extents.iter().map(|extents| extents.len()).eq(axes.iter().copied()) {
            let given = extents.iter().map(|extents| extents.to_vec()).collect();
            return Err(ScoreError::Extents { given, axes });
        }
        Ok(ScoreForm {
            expr: self.expr.clone(),
            numbers: self.numbers.iter().map(|&bits| f32::from_bits(bits)).collect(),
            extents: extents.into(),
            gradients: ScoreGradients::default(),
        })
    }
}

impl ScoreForm {
    /// The function with the elements of its tables, each in row-major order.
    ///
    /// # Errors
    /// [`ScoreError::TableShape`] for the first table of another size, [`ScoreError::Extents`] for another number of
    /// tables.
    pub fn with_tables(
        &self,
        elements: impl IntoIterator<Item = Arc<[f32]>>,
    ) -> Result<ScoreFunction, ScoreError> {
        let tables = self.extents.iter().zip(elements).enumerate().map(|(number, (extents, x))| {
            let table = ScoreTable::new(extents, x)?;
            Ok(if self.gradients.has(number) { table.with_gradient() } else { table })
        });
        let tables: Arc<[ScoreTable]> = tables.collect::<Result<_, _>>()?;
        if tables.len() != self.extents.len() {
            let given = tables.iter().map(|table| table.extents().to_vec()).collect();
            return Err(ScoreError::Extents { given, axes: self.expr.axes() });
        }
        Ok(ScoreFunction { form: self.clone(), tables })
    }
}
