//! An attention problem.

use fa3_types::{Dtype, ProblemSpec, SequenceRows, Sequences, Shape, TensorDesc};

use super::number::size;
use super::score::ScoreArgs;

/// A problem. The default sizes are small, so that the simulator computes them quickly.
#[derive(Debug, clap::Args)]
pub(crate) struct ProblemArgs {
    /// Sequences
    #[arg(long, value_name = "N", default_value_t = 1)]
    batch: usize,
    /// Rows of Q and keys of each sequence; k is 1024
    #[arg(long, value_name = "N", default_value = "200", value_parser = size)]
    seqlen: Option<usize>,
    /// Rows of Q of each sequence, if other than --seqlen
    #[arg(long, value_name = "N", value_parser = size)]
    seqlen_q: Option<usize>,
    /// Keys of each sequence, if other than --seqlen
    #[arg(long, value_name = "N", value_parser = size)]
    seqlen_k: Option<usize>,
    /// Query heads
    #[arg(long, value_name = "N", default_value_t = 2)]
    heads: usize,
    /// Key/value heads, as many as query heads if absent
    #[arg(long, value_name = "N")]
    heads_kv: Option<usize>,
    /// Head dimension of Q and K
    #[arg(long, value_name = "N", default_value_t = 128)]
    head_dim: usize,
    /// Head dimension of V and O; the head dimension of Q and K if absent
    #[arg(long, value_name = "N")]
    head_dim_v: Option<usize>,
    /// Latent attention: Q has a second part, whose product with V is added to the scores
    #[arg(long)]
    qv: bool,
    /// f16, bf16 or e4m3; the CPU also computes f32
    #[arg(long, value_name = "TYPE", default_value_t = Dtype::Bf16)]
    dtype: Dtype,
    /// V is transposed in memory, in e4m3
    #[arg(long)]
    v_transposed: bool,
    /// e4m3 scales per block of ROWS rows of Q, 64 or 128, and 128 rows of K and V; per head if absent
    #[arg(long, value_name = "ROWS")]
    block_scales: Option<usize>,
    /// e4m3 V has a scale and a mean per channel, instead of a scale per head or block
    #[arg(long)]
    v_channels: bool,
    #[command(flatten)]
    score: ScoreArgs,
}

impl ProblemArgs {
    /// A dense batch.
    pub(crate) fn dense(&self) -> ProblemSpec {
        let &ProblemArgs { batch, seqlen, seqlen_q, seqlen_k, heads, head_dim, .. } = self;
        let q = Shape { batch, seqlen: seqlen_q.or(seqlen).unwrap_or(0), heads, head_dim };
        let kv = Shape { seqlen: seqlen_k.or(seqlen).unwrap_or(0), heads: self.heads_kv(), ..q };
        self.with(ProblemSpec::dense(self.dtype, q, kv))
    }

    /// Packed sequences of the given lengths.
    pub(crate) fn packed(&self, rows_q: &SequenceRows, rows_k: &SequenceRows) -> ProblemSpec {
        let heads = (self.heads, self.heads_kv());
        self.with(ProblemSpec::packed(self.dtype, heads, self.head_dim, rows_q, rows_k))
    }

    /// `batch` sequences over a cache of `[entries, rows]`. Q has one row per sequence by default.
    pub(crate) fn cached(&self, batch: usize, [entries, rows]: [usize; 2], seqs_k: Sequences) -> ProblemSpec {
        let &ProblemArgs { seqlen_q, heads, head_dim, .. } = self;
        let q = Shape { batch, seqlen: seqlen_q.unwrap_or(1), heads, head_dim };
        let kv = Shape { batch: entries, seqlen: rows, heads: self.heads_kv(), head_dim };
        self.with(ProblemSpec::dense(self.dtype, q, kv)).seqs_k(seqs_k)
    }

    fn heads_kv(&self) -> usize {
        self.heads_kv.unwrap_or(self.heads)
    }

    fn with(&self, spec: ProblemSpec) -> ProblemSpec {
        let mut spec = self.score.of(spec.head_dim_v(self.head_dim_v.unwrap_or(self.head_dim)));
        if self.qv {
            spec.qv = Some(TensorDesc::contiguous(self.dtype, spec.o.shape));
        }
        if self.v_transposed {
            spec = spec.transposed_v();
        }
        if let Some(q_rows) = self.block_scales {
            spec = spec.block_scales(q_rows);
        }
        if self.v_channels { spec.v_channels() } else { spec }
    }
}
