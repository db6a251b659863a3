//! The element-wise part of the dK/dV and dQ kernels: P and dS of an element, given the product of Q and K, dP, and the
//! statistics of its row.
//!
//! ```text
//! P = exp(S - LSE)     weight = P · slope of the soft cap and of the function of scores     dS = (dP - D) · weight
//! ```

use fa3_ir::lang::*;
use fa3_types::softcap;

use super::hidden::Hidden;
use super::params::Inputs;
use crate::kernels::params::InKernel;
use crate::kernels::parts::score::{BlockFunction, Slope};

/// The element-wise functions for the elements of a block.
pub(super) struct Elements<'t, 'k> {
    /// The factor that turns a score into an exponent of 2.
    scale_log2: V<'k, F32>,
    /// The factor that turns a product into units of the soft cap, if scores are capped.
    into_cap: Option<V<'k, F32>>,
    /// The function of scores, if there is one.
    function: Option<BlockFunction<'t, 'k>>,
    /// The elements that the mask hides; `None` in a block without hidden elements.
    hidden: Option<Hidden<'k>>,
}

/// An element of P.
#[derive(Clone, Copy)]
pub(super) struct Element<'k> {
    /// P: 0 where the mask hides the element.
    pub(super) p: V<'k, F32>,
    /// The product of Q and K, or the capped score in units of the cap.
    capped: V<'k, F32>,
    /// The slope of the soft cap and of the function of scores, if it is not 1.
    slope: Option<Slope<'k>>,
}

impl<'t, 'k> Elements<'t, 'k> {
    /// The functions for a block whose hidden elements are `hidden`.
    pub(super) fn new(
        inputs: &Inputs<InKernel<'k>>,
        function: Option<BlockFunction<'t, 'k>>,
        hidden: Option<Hidden<'k>>,
    ) -> Elements<'t, 'k> {
        Elements { scale_log2: inputs.scale_log2, into_cap: inputs.into_cap, function, hidden }
    }

    /// Whether weights are not P.
    pub(super) fn have_slope(&self) -> bool {
        self.into_cap.is_some() || self.function.as_ref().is_some_and(BlockFunction::has_slope)
    }

    /// The element at `at`, given the product of Q and K, and `shift`: -LSE of the element's query row in base 2.
    #[track_caller]
    pub(super) fn of(&self, product: V<'k, F32>, shift: V<'k, F32>, at: At) -> Element<'k> {
        let capped = self.into_cap.map_or(product, |into_cap| softcap(product, into_cap));
        let score = self.function.as_ref().map_or(capped, |function| function.value(capped, at));
        let p = score.fma(self.scale_log2, shift).ex2();
        // d tanh(x) = 1 - tanh²(x)
        let of_cap = self.into_cap.map(|_| (-capped).fma(capped, capped.constant(1.0)));
        let of_function = self.function.as_ref().and_then(|function| function.slope(capped, at));
        let slope = match (of_cap, of_function) {
            (Some(of_cap), Some(slope)) => Some(Slope { factor: slope.of(of_cap), ..slope }),
            (Some(factor), None) => Some(Slope { factor, is_finite: true }),
            (None, slope) => slope,
        };
        Element { p: self.hidden.as_ref().map_or(p, |hidden| hidden.hide(p, at)), capped, slope }
    }

    /// The derivatives of the function of scores by the elements of tables that it reads for an element, `None` for 1.
    #[track_caller]
    pub(super) fn slopes_by_reads(&self, element: Element<'k>, at: At) -> Vec<Option<Slope<'k>>> {
        let function = self.function.as_ref();
        function.map_or_else(Vec::new, |function| function.slopes_by_reads(element.capped, at))
    }
}

impl<'k> Element<'k> {
    /// The weight by which dP - D is multiplied.
    #[track_caller]
    pub(super) fn weight(self) -> V<'k, F32> {
        self.slope.map_or(self.p, |slope| slope.of(self.p))
    }

    /// dS, given dP and -D. With a finite slope, this takes one register less than keeping the weight and dP - D.
    #[track_caller]
    pub(super) fn ds(self, dp: V<'k, F32>, minus_delta: V<'k, F32>) -> V<'k, F32> {
        match self.slope {
            Some(Slope { factor, is_finite: true }) => self.p * dp.fma(factor, minus_delta * factor),
            _ => ds(dp + minus_delta, self.weight()),
        }
    }
}

/// dS of an element, given dP - D and its weight.
#[track_caller]
pub(super) fn ds<'k>(dp_minus_delta: V<'k, F32>, weight: V<'k, F32>) -> V<'k, F32> {
    dp_minus_delta * weight
}
