//! The element-wise part of the dK/dV and dQ kernels: P and dS of an element, given the product of Q and K, dP, and the
//! statistics of its row.
//!
//! ```text
//! P = exp(S - LSE)        weight = P · slope of the soft cap        dS = (dP - D) · weight
//! ```

use fa3_ir::lang::*;
use fa3_types::softcap;

use super::hidden::Hidden;
use super::params::Inputs;
use crate::kernels::params::InKernel;

/// The element-wise functions for the elements of a block.
pub(super) struct Elements<'k> {
    /// The factor that turns a score into an exponent of 2.
    scale_log2: V<'k, F32>,
    /// The factor that turns a product into units of the soft cap, if scores are capped.
    into_cap: Option<V<'k, F32>>,
    /// The elements that the mask hides; `None` in a block without hidden elements.
    hidden: Option<Hidden<'k>>,
}

/// An element of P.
#[derive(Clone, Copy)]
pub(super) struct Element<'k> {
    /// P: 0 where the mask hides the element.
    pub(super) p: V<'k, F32>,
    /// The slope of the soft cap, if scores are capped.
    slope: Option<V<'k, F32>>,
}

impl<'k> Elements<'k> {
    /// The functions for a block whose hidden elements are `hidden`.
    pub(super) fn new(inputs: &Inputs<InKernel<'k>>, hidden: Option<Hidden<'k>>) -> Elements<'k> {
        Elements { scale_log2: inputs.scale_log2, into_cap: inputs.into_cap, hidden }
    }

    /// The element at `at`, given the product of Q and K, and `shift`: -LSE of the element's query row in base 2.
    #[track_caller]
    pub(super) fn of(&self, product: V<'k, F32>, shift: V<'k, F32>, at: At) -> Element<'k> {
        let score = self.into_cap.map_or(product, |into_cap| softcap(product, into_cap));
        let p = score.fma(self.scale_log2, shift).ex2();
        // d tanh(x) = 1 - tanh²(x)
        let slope = self.into_cap.map(|_| (-score).fma(score, score.constant(1.0)));
        Element { p: self.hidden.as_ref().map_or(p, |hidden| hidden.hide(p, at)), slope }
    }
}

impl<'k> Element<'k> {
    /// The weight by which dP - D is multiplied.
    #[track_caller]
    pub(super) fn weight(self) -> V<'k, F32> {
        self.slope.map_or(self.p, |slope| self.p * slope)
    }

    /// dS, given dP and -D. With a soft cap, this takes one register less than keeping the weight and dP - D.
    #[track_caller]
    pub(super) fn ds(self, dp: V<'k, F32>, minus_delta: V<'k, F32>) -> V<'k, F32> {
        match self.slope {
            None => ds(dp + minus_delta, self.p),
            Some(slope) => self.p * dp.fma(slope, minus_delta * slope),
        }
    }
}

/// dS of an element, given dP - D and its weight.
#[track_caller]
pub(super) fn ds<'k>(dp_minus_delta: V<'k, F32>, weight: V<'k, F32>) -> V<'k, F32> {
    dp_minus_delta * weight
}
