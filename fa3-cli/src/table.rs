//! Text in columns.

use std::{fmt, iter};

/// Rows of equal length. The first row has the column heads.
#[derive(Debug)]
pub(crate) struct Table {
    pub(crate) rows: Vec<Vec<String>>,
    /// The number of columns, from the first, that are left-aligned; the others are right-aligned.
    pub(crate) left: usize,
}

impl Table {
    /// A table with these column heads.
    pub(crate) fn new<const N: usize>(
        heads: [&str; N],
        rows: impl IntoIterator<Item = Vec<String>>,
        left: usize,
    ) -> Table {
        let heads = heads.map(str::to_owned).to_vec();
        Table { rows: iter::once(heads).chain(rows).collect(), left }
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(column));
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..columns).map(width).collect();
        for (index, row) in self.rows.iter().enumerate() {
            let cells = row.iter().zip(&widths).enumerate().map(|(column, (cell, width))| {
                if column < self.left { format!("{cell:<width$}") } else { format!("{cell:>width$}") }
            });
            let line = cells.collect::<Vec<_>>().join("  ");
            write!(f, "{}{}", if index == 0 { "" } else { "\n" }, line.trim_end())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let rows = [["a", "b", "c"], ["word", "1", "123"], ["x", "22", "-"]];
        let table = Table { rows: rows.map(|row| row.map(str::to_owned).to_vec()).to_vec(), left: 1 };
        assert_eq!(table.to_string(), "a      b    c\nword   1  123\nx     22    -");
    }
}
