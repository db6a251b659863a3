//! `fa3 plan`: how a problem would be computed on a GPU.

mod gantt;

use std::num::NonZeroU32;
use std::path::PathBuf;

use clap::builder::TypedValueParser;
use fa3_sched::forward::{OrderComparison, OrderTable, Plan, PlanError, PlanOptions};
use fa3_sched::{DeviceLimits, Order, Scheduler};
use fa3_types::{Dtype, Problem, ProblemError, ProblemSpec, Sequences, Shape};

use crate::args::MaskArgs;
use crate::draw::DrawError;
use crate::write::{self, WriteError};
use gantt::Panel;

/// More tiles than this are not simulated: a schedule takes 24 bytes a tile, and there are four of them.
const MOST_TILES: u32 = 1 << 22;

/// What the columns of the order table are.
const COLUMNS: &str = "
Makespan by order of tiles, as a multiple of the bound that none can beat. A tile costs its KV blocks plus one.
in turn: tiles as numbered, dealt to the CTAs in turn; linear: the same, each drawn by the next free CTA;
planned: the plan above; longest: all tiles sorted by cost, the longest drawn first.
";

/// What `fa3 plan --help` says first.
pub(crate) const ABOUT: &str = "\
Shows how the forward pass of a problem would be computed on a GPU: the kernel's tile with its registers and shared \
memory, the order of tiles, how they reach CTAs, and what other orders would cost.

Nothing is computed and no GPU is needed. Without further options the GPU is an H100 SXM with 132 SMs. Of a problem that \
only the CPU computes it says so, and why.";

/// Options of `fa3 plan`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  fa3 plan --batch 4 --seqlen 4096 --heads 8 --head-dim 128 --causal --svg plan.svg
  fa3 plan --seqlen 1 --seqlen-k 32768 --heads 32 --heads-kv 4 --head-dim 128
  fa3 plan --batch 2 --seqlen 1100 --heads 16 --head-dim 64 --window 256,0")]
pub(crate) struct Options {
    /// Sequences
    #[arg(long, value_name = "N", default_value_t = 1, conflicts_with = "cu_seqlens_q")]
    batch: usize,
    /// Query rows of a sequence
    #[arg(long, value_name = "N", required_unless_present = "cu_seqlens_q", conflicts_with = "cu_seqlens_q")]
    seqlen: Option<usize>,
    /// Keys of a sequence, as many as query rows if absent
    #[arg(long, value_name = "N", conflicts_with = "cu_seqlens_q")]
    seqlen_k: Option<usize>,
    /// Query heads
    #[arg(long, value_name = "N")]
    heads: usize,
    /// Key/value heads, as many as query heads if absent
    #[arg(long, value_name = "N")]
    heads_kv: Option<usize>,
    /// Head dimension of Q and K
    #[arg(long, value_name = "N")]
    head_dim: usize,
    /// Head dimension of V and O, as that of Q and K if absent
    #[arg(long, value_name = "N")]
    head_dim_v: Option<usize>,
    /// f16 or bf16; the CPU also computes f32 and e4m3
    #[arg(long, value_name = "TYPE", default_value_t = Dtype::Bf16)]
    dtype: Dtype,
    #[command(flatten)]
    mask: MaskArgs,
    /// Packed sequences, which the CPU computes: the rows of Q where they begin, from 0, and where the last one ends
    #[arg(long, value_name = "N,N,..", value_delimiter = ',', allow_hyphen_values = true)]
    cu_seqlens_q: Option<Vec<i32>>,
    /// The same for K and V, as for Q if absent
    #[arg(
        long,
        value_name = "N,N,..",
        value_delimiter = ',',
        allow_hyphen_values = true,
        requires = "cu_seqlens_q"
    )]
    cu_seqlens_k: Option<Vec<i32>>,
    /// Streaming multiprocessors of the GPU
    #[arg(long, value_name = "N", default_value_t = DeviceLimits::h100_sxm().sms, value_parser = sms())]
    sms: NonZeroU32,
    /// Draws the plan's schedule, beside that of the linear order
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

/// Why there is no plan.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message above each variant documents it and names its fields")]
pub(crate) enum Error {
    #[error(transparent)]
    Problem(#[from] ProblemError),
    #[error(transparent)]
    Plan(#[from] PlanError),
    #[error("there is no schedule to draw: {0}")]
    NoSchedule(PlanError),
    #[error("{given} tiles are more than the {limit} that are simulated")]
    Tiles { given: u32, limit: u32 },
    #[error(transparent)]
    Draw(#[from] DrawError),
    #[error(transparent)]
    Write(#[from] WriteError),
}

/// Plans, prints and draws. True: there is nothing to check.
///
/// # Errors
/// See [`Error`].
pub(crate) fn run(options: &Options) -> Result<bool, Error> {
    let [svg] = write::open([options.svg.as_deref()], &[])?;
    let problem = options.problem()?;
    let limits = DeviceLimits::h100_sxm().sms(options.sms);
    let plan = match Plan::new(&problem, &limits) {
        Err(why) if why.is_cpu_only() && svg.is_some() => return Err(Error::NoSchedule(why)),
        Err(why) if why.is_cpu_only() => {
            crate::print(&format_args!("computed on the CPU only, because {why}"));
            return Ok(true);
        }
        plan => plan?,
    };
    let num_tiles = plan.schedule().num_tiles();
    if num_tiles > MOST_TILES {
        return Err(Error::Tiles { given: num_tiles, limit: MOST_TILES });
    }
    crate::print(&plan);
    let orders = OrderComparison::new(&problem, &limits)?;
    crate::print(&COLUMNS);
    crate::print(&OrderTable(vec![orders.clone()]));
    if let Some(file) = svg {
        let linear = PlanOptions::default().order(Order::Linear).scheduler(Scheduler::DynamicPersistent);
        let linear = Plan::with(&problem, &limits, &linear)?;
        let schedules = [Panel::new("planned", &plan), Panel::new("linear", &linear)];
        let svg = gantt::draw(&problem, &schedules, orders.bound)?;
        crate::print(&"");
        write::write(&[(file, svg.into_bytes())])?;
    }
    Ok(true)
}

impl Options {
    fn problem(&self) -> Result<Problem, ProblemError> {
        let (heads, heads_kv) = (self.heads, self.heads_kv.unwrap_or(self.heads));
        let spec = match &self.cu_seqlens_q {
            Some(cu_seqlens_q) => {
                let seqs_q = Sequences::packed(cu_seqlens_q)?;
                let seqs_k = Sequences::packed(self.cu_seqlens_k.as_ref().unwrap_or(cu_seqlens_q))?;
                ProblemSpec::packed(self.dtype, (heads, heads_kv), self.head_dim, seqs_q, seqs_k)
            }
            None => {
                let seqlen = self.seqlen.unwrap_or(0);
                let q = Shape { batch: self.batch, seqlen, heads, head_dim: self.head_dim };
                let kv = Shape { seqlen: self.seqlen_k.unwrap_or(seqlen), heads: heads_kv, ..q };
                ProblemSpec::dense(self.dtype, q, kv)
            }
        };
        spec.head_dim_v(self.head_dim_v.unwrap_or(self.head_dim)).mask(self.mask.mask()).validate()
    }
}

/// More SMs than any GPU has would only cost memory.
fn sms() -> impl TypedValueParser<Value = NonZeroU32> {
    clap::value_parser!(u32).range(1..=4096).try_map(NonZeroU32::try_from)
}
