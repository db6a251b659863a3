//! Gradients of tables.

/// The tables of a function of scores whose gradients the backward pass computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct ScoreGradients(u8);

impl ScoreGradients {
    /// The tables `t0`, `t1` and so on for which there is `true`.
    pub fn of(tables: impl IntoIterator<Item = bool>) -> ScoreGradients {
        ScoreGradients(tables.into_iter().take(8).zip(0..).map(|(has, bit)| u8::from(has) << bit).sum())
    }

    /// Whether the table `t{table}` is one of them.
    pub fn has(self, table: usize) -> bool {
        self.0 >> table & 1 == 1
    }

    /// Whether there is no such table.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }
}
