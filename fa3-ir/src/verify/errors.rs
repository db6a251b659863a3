//! Everything that is wrong with a kernel, as one error.

use std::fmt;
use std::ops::Deref;

use super::VerifyError;

/// All violations of a kernel, at least one, in the order of its text. Prints a line for each violation.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct VerifyErrors(pub Vec<VerifyError>);

impl Deref for VerifyErrors {
    type Target = [VerifyError];
    fn deref(&self) -> &[VerifyError] {
        &self.0
    }
}

impl IntoIterator for VerifyErrors {
    type Item = VerifyError;
    type IntoIter = std::vec::IntoIter<VerifyError>;
    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter()
    }
}

impl fmt::Display for VerifyErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lines: Vec<String> = self.iter().map(VerifyError::to_string).collect();
        f.write_str(&lines.join("\n"))
    }
}

impl std::error::Error for VerifyErrors {}
