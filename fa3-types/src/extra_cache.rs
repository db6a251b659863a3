//! A second cache of keys and values, beside the one that K and V are.

use crate::problem::check_sequences;
use crate::{ProblemError, Sequences, Shape, TensorDesc, TensorName};

/// A second cache of keys and values, with its own list of rows for each sequence. A sequence's keys are the listed
/// rows of K, and behind them the listed rows of this cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ExtraCache {
    /// Keys (pages, page_rows, heads_kv, head_dim), of K's type.
    pub k: TensorDesc,
    /// Values (pages, page_rows, heads_kv, head_dim_v), of V's type.
    pub v: TensorDesc,
    /// The lists, [`Sequences::listed`], of as many sequences as K has. `seqused` of them belongs to them alone.
    pub sequences: Sequences,
}

impl ExtraCache {
    /// The tensors, by their names.
    pub(crate) fn tensors(&self) -> [(TensorName, &TensorDesc); 2] {
        [(TensorName::ExtraK, &self.k), (TensorName::ExtraV, &self.v)]
    }

    /// Checks that the rows are like the ones of K and V, and that both caches are listed.
    pub(crate) fn check(&self, kv: [&TensorDesc; 2], seqs_k: Sequences) -> Result<(), ProblemError> {
        let Shape { batch, seqlen, .. } = self.k.shape;
        for ((tensor, given), like) in self.tensors().into_iter().zip(kv) {
            given.check(tensor)?;
            given.shape.check(tensor, Shape { batch, seqlen, ..like.shape })?;
            if given.dtype != like.dtype {
                let (given, expected) = (given.dtype, like.dtype);
                return Err(ProblemError::ExtraDtype { tensor, given, expected });
            }
        }
        let of_lists = |sequences: Sequences| sequences.list().map(|_| sequences.count());
        match (of_lists(self.sequences), of_lists(seqs_k)) {
            (Some(given), Some(expected)) if given == expected => {}
            _ => {
                let (given, expected) = (self.sequences.count(), seqs_k.count());
                return Err(ProblemError::ExtraLists { given, expected });
            }
        }
        check_sequences(TensorName::ExtraK, &self.k, self.sequences)
    }

    /// [`TensorDesc::padded`] keys and values.
    pub(crate) fn padded(self) -> ExtraCache {
        ExtraCache { k: self.k.padded(), v: self.v.padded(), ..self }
    }

    pub(crate) fn canonical(self) -> ExtraCache {
        ExtraCache { k: self.k.canonical(), v: self.v.canonical(), ..self }
    }
}
