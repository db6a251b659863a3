//! How far a result is from the expected one, and how far it may be.

use std::fmt;
use std::time::Duration;

use fa3::{Output, Scalar};
use fa3_ref::law::{ForwardLaw, Satisfied, check_lse};
use fa3_ref::norms::{ErrorNorms, Worst};
use fa3_ref::{InputError, Inputs, Precision};
use fa3_types::Problem;
use indicatif::ProgressBar;
use ndarray::{Array3, Array4, ArrayView4, IntoDimension};

use super::error::Error;
use super::tensor::Tensor;

/// What somebody else computed.
pub(super) struct Expected {
    o: Option<Array4<f64>>,
    lse: Option<Array3<f64>>,
}

/// One array against what was expected of it.
#[derive(Debug)]
pub(super) struct Comparison {
    what: &'static str,
    norms: ErrorNorms,
    bound: f64,
    /// What the bound is multiplied with.
    unit: &'static str,
    holds: bool,
    /// What may be wrong with the expected result, if it does not hold.
    hint: Option<&'static str>,
}

impl Expected {
    /// Takes the tensors, whose shapes must be those of the problem's results.
    pub(super) fn new(problem: &Problem, o: Option<Tensor>, lse: Option<Tensor>) -> Result<Expected, Error> {
        let o = o.map(|o| o.expected(problem.o().shape.dims().into_dimension()));
        let lse = lse.map(|lse| lse.expected(problem.lse_shape().into_dimension()));
        Ok(Expected { o: o.transpose()?, lse: lse.transpose()? })
    }

    /// Judges O and LSE by the error law, as far as something is expected of them.
    ///
    /// The law's bound is the oracle's. Taken from the expected result, it would excuse everything when that belongs
    /// to another mask or scale: standard attention, which the bound is made of, would be as far from it.
    pub(super) fn compare<T: Scalar>(
        self,
        problem: &Problem,
        inputs: [ArrayView4<'_, T>; 3],
        output: &Output<T::Output>,
    ) -> Result<Vec<Comparison>, InputError> {
        let mut comparisons = Vec::new();
        if let Some(expected) = self.o {
            let [q, k, v] = inputs.map(|x| x.mapv(T::to_f32));
            let inputs = Inputs::new(problem, q.view(), k.view(), v.view())?;
            let spinner = spinner("computing how far o may be off, which takes longer than o did");
            let bound = ForwardLaw::new(&inputs, Precision::of_output(problem.dtype())).bound();
            spinner.finish_and_clear();
            let norms = ErrorNorms::of(&output.o.mapv(Scalar::to_f32), &expected);
            let holds = norms.max <= bound;
            comparisons.push(Comparison { what: "o", norms, bound, unit: "", holds, hint: None });
        }
        if let Some(expected) = self.lse {
            let (norms, bound, holds) = match check_lse(output.lse.view(), expected.view(), "") {
                Ok(Satisfied { norms, bound, .. }) => (norms, bound, true),
                Err(violation) => (violation.norms, violation.bound, false),
            };
            let hint = (!holds && holds_transposed(&output.lse, expected)).then_some(
                "read as (batch, seqlen, heads), the expected lse would hold: is its shape right?",
            );
            comparisons.push(Comparison { what: "lse", norms, bound, unit: " max(1, |lse|)", holds, hint });
        }
        Ok(comparisons)
    }
}

/// Whether the elements of `expected`, in their order, are the LSE in (batch, seqlen, heads) order.
fn holds_transposed(lse: &Array3<f32>, expected: Array3<f64>) -> bool {
    let (batch, heads, seqlen) = lse.dim();
    let Ok(expected) = expected.into_shape_with_order((batch, seqlen, heads)) else {
        return false;
    };
    check_lse(lse.view(), expected.view().permuted_axes([0, 2, 1]), "").is_ok()
}

/// Says what is being done, where stderr is a terminal, until it is cleared.
fn spinner(message: &'static str) -> ProgressBar {
    let spinner = ProgressBar::new_spinner().with_message(message);
    spinner.enable_steady_tick(Duration::from_millis(100));
    spinner
}

impl Comparison {
    /// Whether the law holds.
    pub(super) fn holds(&self) -> bool {
        self.holds
    }
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Comparison { what, norms, bound, unit, holds, hint } = self;
        let [max, rmse, bound] = [norms.max, norms.rmse, *bound].map(Number);
        write!(f, "{what:<8}max error {max}, rmse {rmse}, allowed {bound}{unit}")?;
        match &norms.worst {
            Some(Worst { index, given, expected }) if !holds => {
                write!(f, "\n          BREAKS THE ERROR LAW, ")?;
                write!(f, "worst at {index:?}: {given:?}, expected {expected:?}")?;
            }
            Some(worst) => write!(f, ", worst at {:?}", worst.index)?,
            None => {}
        }
        hint.map_or(Ok(()), |hint| write!(f, "\n          {hint}"))
    }
}

/// Three digits, in powers of ten only where zeros would have to be counted.
struct Number(f64);

impl fmt::Display for Number {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Number(x) = *self;
        match x.abs() {
            0.0 => f.write_str("0"),
            size if (1e-3..1e4).contains(&size) => {
                let digits_after_point = (2.0 - size.log10().floor()).max(0.0) as usize;
                write!(f, "{x:.digits_after_point$}")
            }
            _ => write!(f, "{x:.2e}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_plain_where_they_can_be() {
        let shown = |x| Number(x).to_string();
        assert_eq!(
            [0.001, 0.02346, 1.784, 9.996, 123.4, 9999.0].map(shown),
            ["0.00100", "0.0235", "1.78", "10.00", "123", "9999"]
        );
        assert_eq!(
            [0.0, 9.87e-4, 1e4, f64::INFINITY, f64::NAN].map(shown),
            ["0", "9.87e-4", "1.00e4", "inf", "NaN"]
        );
    }
}
