//! Some rows as a problem.

use super::Problem;
use crate::{Granularity, Heads, Mask, Sequences, Shape, TensorDesc, TokenScales, ValueLayout};

impl Problem {
    /// Rows of one query head that see the same keys, as a problem of its own: one dense sequence of these `rows` and
    /// these `keys`, without a mask, of contiguous tensors.
    ///
    /// # Panics
    /// If there are no rows or no keys, or the problem has a function of scores, which depends on positions.
    #[must_use]
    pub fn of_rows(&self, rows: usize, keys: usize) -> Problem {
        // No `..` here: a feature that depends on positions must not be copied to a problem of other rows.
        let Problem {
            q,
            k,
            v,
            v_layout: _,
            scales: _,
            token_scales,
            qv,
            o,
            seqs_q: _,
            seqs_k: _,
            heads: _,
            mask: _,
            softmax_scale,
            softcap,
            score,
            sink,
            extra: _,
            lse,
            max_logits,
        } = self;
        assert!(score.is_none(), "a function of scores depends on positions");
        let some = |x: &TensorDesc, seqlen| {
            TensorDesc::contiguous(x.dtype, Shape { batch: 1, seqlen, heads: 1, ..x.shape })
        };
        Problem {
            q: some(q, rows),
            k: some(k, keys),
            v: some(v, keys),
            v_layout: ValueLayout::Rows,
            scales: [Granularity::Head; 3],
            token_scales: token_scales.map(|_| TokenScales::contiguous(some(k, keys).shape)),
            qv: qv.as_ref().map(|qv| some(qv, rows)),
            o: some(o, rows),
            seqs_q: Sequences::dense(1, rows),
            seqs_k: Sequences::dense(1, keys),
            heads: Heads::new(1, 1).expect("a head has a head"),
            mask: Mask::None,
            softmax_scale: *softmax_scale,
            softcap: *softcap,
            score: None,
            sink: *sink,
            extra: None,
            lse: *lse,
            max_logits: *max_logits,
        }
    }
}
