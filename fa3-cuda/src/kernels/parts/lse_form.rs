//! The form in which LSE is stored.

use fa3_ir::lang::*;
use fa3_types::LseForm;

use crate::kernels::params::{Form, Host, InKernel, Pass, Side};

/// The numbers of [`LseForm`]. Whether LSE includes the sink is a matter of a kernel's code.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StoredLse<S: Side> {
    /// The factor on a natural logarithm.
    pub(crate) unit: S::F32,
    /// LSE of a row that sees no key and has no sink.
    pub(crate) empty: S::F32,
}

impl<A: Side> StoredLse<A> {
    #[track_caller]
    pub(crate) fn pass<B: Side>(self, by: &mut impl Pass<A, B>) -> StoredLse<B> {
        StoredLse { unit: by.f32("lse_unit", self.unit), empty: by.f32("lse_empty", self.empty) }
    }
}

impl StoredLse<Form> {
    pub(crate) const FORM: StoredLse<Form> = StoredLse { unit: (), empty: () };
}

impl StoredLse<Host> {
    /// The numbers of a form; `None` for the default form, which takes no code.
    pub(crate) fn of(form: LseForm) -> Option<StoredLse<Host>> {
        let is_other = form.base_two || form.empty_is_infinite;
        is_other.then(|| StoredLse { unit: form.unit() as f32, empty: form.empty() })
    }
}

impl<'k> StoredLse<InKernel<'k>> {
    /// LSE in the stored form, from a natural logarithm.
    #[track_caller]
    pub(crate) fn stored(&self, lse: V<'k, F32>) -> V<'k, F32> {
        lse.eq(f32::NEG_INFINITY).select(self.empty, lse * self.unit)
    }
}
