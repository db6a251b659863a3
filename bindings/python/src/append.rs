//! A call that appends rows to a cache.

use std::num::NonZeroU32;
use std::sync::LazyLock;

use fa3_cuda::host::{Compiled, OperationError};
use fa3_sched::append::Plan;
use fa3_types::{
    AppendProblem, AppendRotary, AppendSpec, AppendedRows, Mask, QueryPositions, RotatedQueries, Sequences,
    TensorDesc,
};

use crate::call::{At, Call};
use crate::cpu;
use crate::error::Error;
use crate::kept::Kept;

/// New rows of a cache, and queries that are rotated with them.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Append {
    /// New keys and values.
    pub(crate) new: [TensorDesc; 2],
    /// Their sequences.
    pub(crate) sequences: Sequences,
    /// Keys and values of the cache.
    pub(crate) cache: [TensorDesc; 2],
    /// The cache's sequences.
    pub(crate) cached: Sequences,
    /// Queries that are rotated, if any.
    pub(crate) queries: Option<Queries>,
    /// The rotation of new keys and of queries, if any.
    pub(crate) rotary: Option<AppendRotary>,
}

/// Queries that are rotated.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Queries {
    /// The tensor.
    pub(crate) q: TensorDesc,
    /// Its sequences.
    pub(crate) sequences: Sequences,
    /// The window of the attention that they are for, which says their positions.
    pub(crate) window: (i64, i64),
}

impl Append {
    /// The same call of contiguous tensors.
    fn contiguous(&self) -> Append {
        let contiguous = |x: TensorDesc| TensorDesc::contiguous(x.dtype, x.shape);
        let queries = self.queries.clone().map(|queries| Queries { q: contiguous(queries.q), ..queries });
        Append { new: self.new.map(contiguous), cache: self.cache.map(contiguous), queries, ..self.clone() }
    }
}

impl Call for Append {
    type Plan = Plan;

    fn kept() -> &'static Kept<(u32, Append), Compiled<Plan>> {
        static KEPT: LazyLock<Kept<(u32, Append), Compiled<Plan>>> = LazyLock::new(Kept::default);
        &KEPT
    }

    fn problem(&self) -> Result<AppendProblem, Error> {
        let ([k_new, v_new], [k_cache, v_cache]) = (self.new, self.cache);
        let (new, cache) = (self.sequences, self.cached);
        let mut spec = AppendSpec::new(AppendedRows { k_new, v_new, new, k_cache, v_cache, cache });
        if let Some(rotary) = self.rotary {
            spec = spec.rotary(rotary);
        }
        if let Some(Queries { q, sequences, window: (left, right) }) = self.queries {
            let positions = QueryPositions::under(Mask::from_window(left, right)?);
            spec = spec.queries(RotatedQueries { q, sequences, positions });
        }
        Ok(spec.validate().map_err(OperationError::from)?)
    }

    fn options(&self, _sms: NonZeroU32) -> Result<(), Error> {
        Ok(())
    }

    fn check_for_cpu(&self) -> Result<(), Error> {
        // Any strides will do.
        self.contiguous().problem().map(drop)
    }

    fn compute(&self, at: &At) -> Result<(), Error> {
        cpu::append(self, &self.contiguous().problem()?, at)
    }
}
