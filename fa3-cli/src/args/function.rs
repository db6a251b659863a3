//! A function of scores.

use fa3_types::{KnownProblem, ScoreError, ScoreFunction, ScoreTable};

/// A function of scores, and its tables.
#[derive(Debug, clap::Args)]
pub(crate) struct FunctionArgs {
    /// Replaces scores by a function of the score s, the sequence b, the query head h, its row, the query q and the key
    /// k, such as 's + slope[h] * (k - q)'
    #[arg(long = "score", value_name = "EXPR", allow_hyphen_values = true)]
    text: Option<String>,
    /// The numbers of a table of --score that one index reads, such as slope=0.5,0.25
    #[arg(long = "table", value_name = "NAME=X,X,..", value_parser = table, requires = "text")]
    tables: Vec<(String, ScoreTable)>,
}

impl FunctionArgs {
    /// The function, if any.
    pub(crate) fn function(&self) -> Result<Option<ScoreFunction>, ScoreError> {
        let tables = self.tables.iter().map(|(name, table)| (name.as_str(), table.clone().into()));
        self.text.as_ref().map(|text| ScoreFunction::parse(text, tables)).transpose()
    }

    /// A problem with the function, if there is one.
    pub(crate) fn of(&self, problem: KnownProblem) -> Result<KnownProblem, ScoreError> {
        Ok(match self.function()? {
            Some(function) => problem.with_score(&function),
            None => problem,
        })
    }
}

/// Reads a table such as slope=0.5,0.25.
fn table(text: &str) -> Result<(String, ScoreTable), String> {
    let (name, numbers) = text.split_once('=').ok_or("expected NAME=X,X,..")?;
    let numbers: Result<Vec<f32>, _> = numbers.split(',').map(str::parse).collect();
    let numbers = numbers.map_err(|error| error.to_string())?;
    let table = ScoreTable::new(&[numbers.len()], numbers).map_err(|error| error.to_string())?;
    Ok((name.to_owned(), table))
}
