//! Keys and values in a cache.

use fa3_cuda::kernels::{self, Spec};
use fa3_ir::Program;
use fa3_sched::{cached, forward};
use fa3_types::{
    AppendProblem, AppendRotary, CachedProblem, CachedProblemError, CachedSpec, Dtype, Problem, ProblemError,
    RopeStyle, SequenceBase, Sequences, Shape, TensorDesc,
};

use super::number::{multiple_of, size};
use super::plan::PlanArgs;
use super::problem::ProblemArgs;
use crate::cache::CacheLayout;

/// A cache, and what is appended to it before attention. Without --cache-seqlens there is no cache.
#[derive(Debug, clap::Args)]
pub(crate) struct CacheArgs {
    /// K and V are a cache in which each sequence has N rows in use; kernels read these lengths from memory. Without
    /// --seqlen-q, Q has one row per sequence
    #[arg(long, value_name = "N,N,..", value_delimiter = ',', value_parser = size)]
    #[arg(conflicts_with_all = ["batch", "seqlen", "seqlen_k", "v_transposed", "block_scales", "v_channels"])]
    cache_seqlens: Vec<usize>,
    /// Page size of the cache in rows; pages lie in random order. Without it, a sequence's rows are contiguous
    #[arg(long, value_name = "N", value_parser = multiple_of(1, 1 << 20), requires = "cache_seqlens")]
    page_size: Option<u32>,
    /// Left padding of each sequence: rows in use before its first key
    #[arg(long, value_name = "N,N,..", value_delimiter = ',', value_parser = size, requires = "cache_seqlens")]
    cache_leftpad: Vec<usize>,
    /// New rows that are appended to each sequence of the cache before attention
    #[arg(long, value_name = "N", value_parser = size, requires = "cache_seqlens")]
    seqlen_new: Option<usize>,
    /// Leading columns of the new keys and of Q that are rotated by their positions
    #[arg(long, value_name = "N", requires = "seqlen_new")]
    rotary_dim: Option<usize>,
    /// Rotates adjacent pairs of columns instead of halves
    #[arg(long, requires = "rotary_dim")]
    rotary_interleaved: bool,
}

/// Cache options that contradict each other.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub(crate) enum CacheError {
    #[error("--cache-leftpad has {given} numbers, --cache-seqlens {sequences}")]
    Count { given: usize, sequences: usize },
    #[error("--cache-leftpad has {given} rows for sequence {sequence}, of which {seqlen} are in use")]
    Leftpad { given: usize, sequence: usize, seqlen: usize },
    #[error(transparent)]
    Problem(#[from] ProblemError),
    #[error(transparent)]
    Cached(#[from] CachedProblemError),
}

/// A problem whose keys and values are a cache.
#[derive(Clone, Debug)]
pub(crate) struct CacheProblem {
    pub(crate) layout: CacheLayout,
    /// Rows of left padding before each sequence's first key, if any.
    pub(crate) leftpad: Option<Vec<usize>>,
    attention: Problem,
    /// The append and the attention after it, if rows are appended.
    appending: Option<CachedProblem>,
}

/// The plan of a [`CacheProblem`].
#[derive(Clone, Debug)]
pub(crate) enum CachePlan {
    /// Attention alone.
    Attention(Box<forward::Plan>),
    /// An append, then attention.
    Appending(Box<cached::Plan>),
}

impl CacheArgs {
    /// The problem that the options describe, if they describe a cache.
    pub(crate) fn problem(&self, problem: &ProblemArgs) -> Result<Option<CacheProblem>, CacheError> {
        if self.cache_seqlens.is_empty() {
            return Ok(None);
        }
        let room = self.seqlen_new.unwrap_or(0);
        let page_size = self.page_size.map(|rows| rows as usize);
        let layout = CacheLayout { seqlens: self.cache_seqlens.clone(), room, page_size };
        let leftpad = self.leftpad()?;
        let sequences = layout.sequences();
        let sequences = if leftpad.is_some() { sequences.left_padded() } else { sequences };
        let attention = problem.cached(layout.count(), layout.extent(), sequences);
        let Some(seqlen) = self.seqlen_new else {
            let attention = attention.validate()?;
            return Ok(Some(CacheProblem { layout, leftpad, attention, appending: None }));
        };
        let new = [attention.k, attention.v]
            .map(|x| TensorDesc::contiguous(x.dtype, Shape { batch: layout.count(), seqlen, ..x.shape }));
        let mut spec = CachedSpec::new(attention, new, Sequences::dense(layout.count(), seqlen));
        spec.rotary = self.rotary(layout.longest());
        let cached = spec.validate()?;
        let attention = cached.attention().clone();
        Ok(Some(CacheProblem { layout, leftpad, attention, appending: Some(cached) }))
    }

    fn leftpad(&self) -> Result<Option<Vec<usize>>, CacheError> {
        if self.cache_leftpad.is_empty() {
            return Ok(None);
        }
        let (given, sequences) = (self.cache_leftpad.len(), self.cache_seqlens.len());
        if given != sequences {
            return Err(CacheError::Count { given, sequences });
        }
        for (sequence, (&given, &seqlen)) in self.cache_leftpad.iter().zip(&self.cache_seqlens).enumerate() {
            if given > seqlen {
                return Err(CacheError::Leftpad { given, sequence, seqlen });
            }
        }
        Ok(Some(self.cache_leftpad.clone()))
    }

    /// Rotation by cos and sin tables of `table_rows` positions.
    fn rotary(&self, table_rows: usize) -> Option<AppendRotary> {
        let style = if self.rotary_interleaved { RopeStyle::Interleaved } else { RopeStyle::HalfSplit };
        let (table, base) = (Dtype::F32, SequenceBase::Used);
        self.rotary_dim.map(|rotary_dim| AppendRotary { style, rotary_dim, table, table_rows, base })
    }
}

impl CacheProblem {
    /// The attention, after the append.
    pub(crate) fn attention(&self) -> &Problem {
        &self.attention
    }

    /// The append that precedes the attention, if any.
    pub(crate) fn append(&self) -> Option<&AppendProblem> {
        self.appending.as_ref().map(CachedProblem::append)
    }

    /// The keys of each sequence that attention reads.
    pub(crate) fn keys(&self) -> impl Iterator<Item = usize> {
        let new = self.append().map_or(0, |_| self.layout.room);
        let leftpad = self.leftpad.iter().flatten().copied().chain(std::iter::repeat(0));
        self.layout.seqlens.iter().zip(leftpad).map(move |(&rows, leftpad)| rows + new - leftpad)
    }

    pub(crate) fn plan(&self, plan: &PlanArgs) -> Result<CachePlan, cached::PlanError> {
        let Some(cached) = &self.appending else {
            return Ok(CachePlan::Attention(Box::new(plan.plan(&self.attention)?)));
        };
        let options = plan.options(&self.attention)?;
        Ok(CachePlan::Appending(Box::new(cached::Plan::with(cached, &plan.limits(), &options)?)))
    }
}

impl CachePlan {
    pub(crate) fn program(&self) -> Program<Spec> {
        match self {
            CachePlan::Attention(plan) => kernels::fwd::program(plan),
            CachePlan::Appending(plan) => kernels::cached::program(plan),
        }
    }
}
