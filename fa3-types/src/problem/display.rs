//! A problem as a line of text.

use std::fmt;

use crate::score::Number;
use crate::{Granularity, Lengths, LseForm, Problem, Sequences, Shape, ValueLayout};

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.describe(f, None)
    }
}

impl Problem {
    /// Writes the problem, with the lengths of its one sequence if they are `known`.
    pub(crate) fn describe(&self, f: &mut fmt::Formatter<'_>, known: Option<Lengths>) -> fmt::Result {
        let lengths = |seqs: Sequences, longest: usize| match seqs.is_packed() || seqs.pages().is_some() {
            true if known.is_none() => format!("about {longest}"),
            _ => longest.to_string(),
        };
        let Lengths { q, k } = known.unwrap_or_else(|| self.longest());
        let over = match (self.k.dtype, self.v.dtype) {
            (k, _) if self.converts_keys() => format!(" over {k}"),
            (k, v) if k != v => format!(" over v of {v}"),
            _ => String::new(),
        };
        write!(
            f,
            "{}{over} batch {} seqlen {} x {} heads {}/{} head_dim {}",
            self.dtype(),
            self.batch(),
            lengths(self.seqs_q, q),
            lengths(self.seqs_k, k),
            self.heads.q(),
            self.heads.kv(),
            self.head_dim(),
        )?;
        if self.head_dim_v() != self.head_dim() {
            write!(f, "/{}", self.head_dim_v())?;
        }
        if self.qv.is_some() {
            write!(f, " with qv")?;
        }
        if let Some(pages) = self.seqs_k.pages() {
            write!(f, " in {pages} pages of {} rows", self.k.shape.seqlen)?;
        }
        if let Some((keys, _)) = self.seqs_k.list() {
            write!(f, " in lists of {keys} of {} rows", self.k.shape.batch * self.k.shape.seqlen)?;
        }
        if let Some(extra) = &self.extra {
            let (keys, Shape { batch, seqlen, .. }) = (extra.sequences.capacity(0), extra.k.shape);
            write!(f, " and of {keys} of {} rows", batch * seqlen)?;
        }
        if self.seqs_k.has_index() {
            write!(f, " indexed")?;
        }
        if self.seqs_k.has_leftpad() {
            write!(f, " left padded")?;
        }
        if self.v_layout == ValueLayout::Transposed {
            write!(f, " v transposed")?;
        }
        if self.scales != [Granularity::Head; 3] {
            let [q, k, v] = self.scales;
            write!(f, " scales for {q}/{k}/{v}")?;
        }
        if self.token_scales.is_some() {
            write!(f, " scales of tokens")?;
        }
        write!(f, " mask {} scale {:.6}", self.mask, Number(self.softmax_scale.natural()))?;
        if let Some(cap) = self.softcap {
            write!(f, " softcap {}", Number(cap.bound()))?;
        }
        if let Some(score) = &self.score {
            write!(f, " score {}", score.expr())?;
        }
        if self.sink {
            write!(f, " sink")?;
        }
        let LseForm { base_two, without_sink, empty_is_infinite } = self.lse;
        let of_lse =
            [(base_two, "in base 2"), (without_sink, "without sink"), (empty_is_infinite, "inf if empty")];
        for (_, word) in of_lse.into_iter().filter(|(is_there, _)| *is_there) {
            write!(f, " lse {word}")?;
        }
        if self.max_logits { write!(f, " max_logits") } else { Ok(()) }
    }
}
