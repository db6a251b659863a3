//! A cache as keys and values.

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

/// A cache, and what is done with it before. Without --cache-seqlens there is none.
#[derive(Debug, clap::Args)]
pub(crate) struct CacheArgs {
    /// K and V are a cache, of which so many rows of each sequence are in use, as kernels read it from memory. A
    /// sequence of Q has one row, if --seqlen-q says nothing else
    #[arg(
        long,
        value_name = "N,N,..",
        value_delimiter = ',',
        value_parser = size,
        conflicts_with_all = ["batch", "seqlen", "seqlen_k", "v_transposed", "block_scales", "v_channels"]
    )]
    cache_seqlens: Vec<usize>,
    /// Rows of a page of the cache, as of no order; without it, a sequence's rows lie one after the other
    #[arg(long, value_name = "N", value_parser = multiple_of(1, 1 << 20), requires = "cache_seqlens")]
    page_size: Option<u32>,
    /// Rows in use that are before each sequence's first one
    #[arg(long, value_name = "N,N,..", value_delimiter = ',', value_parser = size, requires = "cache_seqlens")]
    cache_leftpad: Vec<usize>,
    /// New rows that are appended to each sequence of the cache before
    #[arg(long, value_name = "N", value_parser = size, requires = "cache_seqlens")]
    seqlen_new: Option<usize>,
    /// Leading columns of new keys and of Q that rotate by their positions
    #[arg(long, value_name = "N", requires = "seqlen_new")]
    rotary_dim: Option<usize>,
    /// Pairs that rotate are neighbours, not halves
    #[arg(long, requires = "rotary_dim")]
    rotary_interleaved: bool,
}

/// Options of a cache that make no sense together.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[allow(missing_docs, reason = "the message above each variant documents it and names its fields")]
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
    /// Rows before each sequence's first one, if there are some.
    pub(crate) leftpad: Option<Vec<usize>>,
    call: Call,
}

/// Attention over a cache, or an append before as well.
#[derive(Clone, Debug)]
enum Call {
    Attention(Box<Problem>),
    Appending(Box<CachedProblem>),
}

/// How it is computed.
#[derive(Clone, Debug)]
pub(crate) enum CachePlan {
    /// Attention alone.
    Attention(Box<forward::Plan>),
    /// An append before.
    Appending(Box<cached::Plan>),
}

impl CacheArgs {
    /// The problem that the options describe, if they describe a cache.
    ///
    /// # Errors
    /// Options that make no sense together.
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
        let call = match self.seqlen_new {
            None => Call::Attention(Box::new(attention.validate()?)),
            Some(seqlen) => {
                let new = [attention.k, attention.v].map(|x| {
                    TensorDesc::contiguous(x.dtype, Shape { batch: layout.count(), seqlen, ..x.shape })
                });
                let mut spec = CachedSpec::new(attention, new, Sequences::dense(layout.count(), seqlen));
                spec.rotary = self.rotary(layout.longest());
                Call::Appending(Box::new(spec.validate()?))
            }
        };
        Ok(Some(CacheProblem { layout, leftpad, call }))
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

    /// A rotation by tables of so many positions.
    fn rotary(&self, table_rows: usize) -> Option<AppendRotary> {
        let style = if self.rotary_interleaved { RopeStyle::Interleaved } else { RopeStyle::HalfSplit };
        let (table, base) = (Dtype::F32, SequenceBase::Used);
        self.rotary_dim.map(|rotary_dim| AppendRotary { style, rotary_dim, table, table_rows, base })
    }
}

impl CacheProblem {
    /// The attention, after rows were appended.
    pub(crate) fn attention(&self) -> &Problem {
        match &self.call {
            Call::Attention(problem) => problem,
            Call::Appending(problem) => problem.attention(),
        }
    }

    /// The append before, if there is one.
    pub(crate) fn append(&self) -> Option<&AppendProblem> {
        match &self.call {
            Call::Attention(_) => None,
            Call::Appending(problem) => Some(problem.append()),
        }
    }

    /// Its plan.
    ///
    /// # Errors
    /// If no kernels compute it.
    pub(crate) fn plan(&self, plan: &PlanArgs) -> Result<CachePlan, cached::PlanError> {
        Ok(match &self.call {
            Call::Attention(problem) => CachePlan::Attention(Box::new(plan.plan(problem)?)),
            Call::Appending(problem) => {
                let options = plan.options(problem.attention())?;
                CachePlan::Appending(Box::new(cached::Plan::with(problem, &plan.limits(), &options)?))
            }
        })
    }
}

impl CachePlan {
    /// Its program.
    pub(crate) fn program(&self) -> Program<Spec> {
        match self {
            CachePlan::Attention(plan) => kernels::fwd::program(plan),
            CachePlan::Appending(plan) => kernels::cached::program(plan),
        }
    }
}
