//! `fa3 plan`: how a problem would be computed on a GPU.

mod gantt;
mod report;

use std::error::Error;
use std::num::{NonZeroU32, TryFromIntError};
use std::path::PathBuf;

use clap::Arg;
use fa3_sched::backward::DqBy;
use fa3_sched::forward::{DensePlan, Loads, OrderComparison, OrderTable, Plan, PlanError, PlanKind};
use fa3_sched::{Order, Scheduler, SeqLens, backward, cached};
use fa3_types::{BackwardSpec, Problem, ProblemSpec, SequenceRows};
use serde_json::{Value, json};

use crate::args::cache::{CacheArgs, CachePlan, CacheProblem};
use crate::args::json::JsonArgs;
use crate::args::plan::PlanArgs;
use crate::args::problem::ProblemArgs;
use crate::write;
use gantt::Panel;

/// The most tiles to simulate: a schedule takes 24 bytes per tile, and there are four schedules.
const MOST_TILES: u32 = 1 << 22;

/// Explains the columns of the table of orders.
const COLUMNS: &str = "
Makespan by order of tiles, relative to the lower bound. A tile costs its KV blocks plus one.
in turn: tiles by number, assigned to the CTAs in turn; linear: tiles by number, each drawn by the next free CTA;
planned: the plan above; longest: all tiles sorted by cost, the longest drawn first.
";

pub(crate) const ABOUT: &str = "\
Shows how a problem would be computed on a GPU: the kernel's tile with its registers and shared memory, the order of \
tiles, and how they are assigned to CTAs. For a forward plan without options that change it, also shows what other \
orders would cost. With --backward, shows the plan of the kernels that compute gradients.

Nothing is computed, and no GPU is needed. By default the GPU is an H100 SXM with 132 SMs. If only the CPU computes \
the problem, the reason is shown.";

#[derive(Debug, clap::Args)]
#[command(mut_args(demand))]
#[command(after_help = "\
Examples:
  fa3 plan --batch 4 --seqlen 4096 --heads 8 --head-dim 128 --causal --svg plan.svg
  fa3 plan --seqlen 1 --seqlen-k 32768 --heads 32 --heads-kv 4 --head-dim 128
  fa3 plan --batch 2 --seqlen 1100 --heads 16 --head-dim 64 --window 256,0
  fa3 plan --cache-seqlens 32k,1k,1k,64 --heads 32 --heads-kv 8 --head-dim 128 --split-keys --svg plan.svg
  fa3 plan --cache-seqlens 4k,4k --seqlen-new 1 --rotary-dim 128 --heads 16 --head-dim 128 --causal
  fa3 plan --seqlen 8k --heads 16 --head-dim 128 --pipeline serial --ping-pong off
  fa3 plan --seqlen 8k --heads 16 --head-dim 128 --causal --backward --deterministic")]
pub(crate) struct Options {
    #[command(flatten)]
    problem: ProblemArgs,
    #[command(flatten, next_help_heading = "Cache")]
    cache: CacheArgs,
    /// Packed sequences: the first row of Q of each sequence, from 0, and the end of the last sequence
    #[arg(long, value_name = "N,N,..", value_delimiter = ',', allow_hyphen_values = true)]
    #[arg(conflicts_with_all = ["batch", "seqlen", "seqlen_q", "seqlen_k", "cache_seqlens"])]
    cu_seqlens_q: Option<Vec<i32>>,
    /// The first rows of K and V of each sequence, and the end of the last; cu_seqlens_q if absent
    #[arg(long, value_name = "N,N,..", value_delimiter = ',', allow_hyphen_values = true)]
    #[arg(requires = "cu_seqlens_q")]
    cu_seqlens_k: Option<Vec<i32>>,
    /// Plans the backward pass, dQ, dK and dV, instead of the forward pass
    #[arg(
        long,
        conflicts_with_all =
            ["pipeline", "ping_pong", "loads", "scheduler", "clusters", "split_keys", "cache_seqlens"]
    )]
    backward: bool,
    /// Computes gradients that are the same bits in every run, however many keys rows see
    #[arg(long, requires = "backward")]
    deterministic: bool,
    /// Draws the plan's schedule next to the linear order's; of split-KV, the splits of the given lengths next to whole
    /// tiles; with --backward, the schedules of the kernels with matrix products, without their waits for each other
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    #[command(flatten)]
    json: JsonArgs,
    #[command(flatten, next_help_heading = "Plan")]
    plan: PlanArgs,
}

/// Makes the sizes required: a plan is for a real problem, so they have no defaults.
fn demand(arg: Arg) -> Arg {
    match arg.get_id().as_str() {
        "heads" | "head_dim" => arg.default_value(None).required(true),
        "seqlen" => {
            let arg = arg.default_value(None);
            let arg = arg.required_unless_present_any(["cu_seqlens_q", "cache_seqlens"]);
            arg.required_unless_present_all(["seqlen_q", "seqlen_k"])
        }
        _ => arg,
    }
}

/// Why a schedule cannot be drawn.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NoPicture {
    #[error("there is no schedule to draw: {0}")]
    NoSchedule(Box<dyn Error>),
    #[error("there is no schedule to draw: lengths are data, which kernels find on the device")]
    Varlen,
    #[error("{given} tiles are more than the {limit} that are simulated")]
    Tiles { given: u32, limit: u32 },
    #[error("there is no schedule to draw: the KV blocks of all tiles are 2^31 or more")]
    Iterations,
}

/// Plans, prints and draws. Always true, since nothing is checked.
pub(crate) fn run(options: &Options) -> Result<bool> {
    let json = options.json.file(options.svg.is_some())?;
    let [json, svg] = write::open([json, options.svg.as_deref()], &[])?;
    let mut files = Vec::new();
    let Planned { text, json: report, picture } = report(options, svg.is_some())?;
    files.extend(svg.zip(picture).map(|(file, picture)| (file, picture.into_bytes())));
    options.json.print(&text, &report);
    files.extend(json.map(|file| (file, write::json(&report))));
    write::write_below(files)?;
    Ok(true)
}

/// A plan as text, as JSON, and as a chart if it is drawn.
pub(crate) struct Planned {
    text: String,
    json: Value,
    picture: Option<String>,
}

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// The plan, with a chart if `draws`.
pub(crate) fn report(options: &Options, draws: bool) -> Result<Planned> {
    if options.backward { options.backward(draws) } else { options.forward(draws) }
}

/// Checks that `given` tiles can be simulated.
fn check_tiles(given: u32) -> std::result::Result<(), NoPicture> {
    if given > MOST_TILES { Err(NoPicture::Tiles { given, limit: MOST_TILES }) } else { Ok(()) }
}

/// Draws the splits that CTAs compute of sequences with these rows of Q and keys.
fn draw_split_kv(plan: &Plan, sequences: impl IntoIterator<Item = (usize, usize)>) -> Result<String> {
    let PlanKind::SplitKv(split_kv) = plan.kind() else { return Err(NoPicture::Varlen.into()) };
    let sequences = sequences.into_iter();
    let lengths = sequences.map(|(q, k)| Ok(SeqLens { q: q.try_into()?, k: k.try_into()? }));
    let lengths: Vec<SeqLens<u32>> = lengths.collect::<std::result::Result<_, TryFromIntError>>()?;
    let ctas = NonZeroU32::new(split_kv.ctas()).unwrap_or(NonZeroU32::MIN);
    let decomposition = split_kv.decomposition();
    let tiles = lengths.iter().map(|&len| decomposition.units(len.q, len).count);
    check_tiles(tiles.fold(0, u32::saturating_add))?;
    let splits = decomposition.splits(&lengths).ok_or(NoPicture::Iterations)?;
    Ok(gantt::draw(plan.problem(), "KV blocks", &Panel::split_kv(&splits, ctas))?)
}

/// Draws the schedules of the kernels with matrix products.
fn draw_backward(plan: &backward::Plan) -> Result<String> {
    let tiles = plan.dense().ok_or(NoPicture::Varlen)?;
    check_tiles(tiles.dkv().num_tiles())?;
    let (dkv, lens) = (plan.dkv(), tiles.lens());
    let mut panels = vec![Panel::of_part("dK, dV", tiles.dkv(), dkv.tiling, lens.transposed())];
    if let (DqBy::Kernel(dq), Some(schedule)) = (plan.dq(), tiles.dq()) {
        check_tiles(schedule.num_tiles())?;
        panels.push(Panel::of_part("dQ", schedule, dq.tiling, lens));
    }
    Ok(gantt::draw(plan.problem(), "blocks", &panels)?)
}

/// The report on a problem that no kernel computes. It has no chart.
fn cpu_only(problem: &Problem, why: impl Error + 'static, draws: bool) -> Result<Planned> {
    if draws {
        return Err(NoPicture::NoSchedule(why.into()).into());
    }
    let text = format!("computed on the CPU only, because {why}");
    let json = json!({ "problem": problem.to_string(), "cpu_only": why.to_string() });
    Ok(Planned { text, json, picture: None })
}

impl Options {
    /// The forward plan, with a chart if `draws`.
    fn forward(&self, draws: bool) -> Result<Planned> {
        if let Some(problem) = self.cache.problem(&self.problem)? {
            return self.cached(&problem, draws);
        }
        let (problem, note) = self.on_a_gpu(self.spec()?.validate()?);
        let plan = match self.plan.plan(&problem) {
            Err(why) if why.is_cpu_only() => return cpu_only(&problem, why, draws),
            plan => plan?,
        };
        let tiles = match plan.kind() {
            PlanKind::Dense(tiles) => tiles,
            PlanKind::Varlen(_) | PlanKind::SplitKv(_) => {
                let draw = || draw_split_kv(&plan, self.lengths(plan.problem()));
                let picture = draws.then(draw).transpose()?;
                let (text, json) = (note + &plan.to_string(), report::of_lengths(&plan));
                return Ok(Planned { text, json, picture });
            }
        };
        let num_tiles = tiles.schedule().num_tiles();
        if draws {
            check_tiles(num_tiles)?;
        }
        // Orders are compared only if all decisions are the library's own.
        let compares = !self.plan.decides() && (1..=MOST_TILES).contains(&num_tiles);
        let compare = || OrderComparison::new(&problem, &self.plan.limits());
        let orders = if compares { compare()? } else { None };
        let picture = draws.then(|| self.draw(&plan, tiles)).transpose()?;
        let json = report::json(&plan, tiles, orders.as_ref());
        let compared = orders.map(|orders| format!("\n{COLUMNS}\n{}", OrderTable(vec![orders])));
        Ok(Planned { text: format!("{note}{plan}{}", compared.unwrap_or_default()), json, picture })
    }

    /// The problem that a GPU computes for host arrays, and a line of text if it differs from `problem`: host arrays
    /// are padded if the kernels do not take their rows.
    fn on_a_gpu(&self, problem: Problem) -> (Problem, String) {
        let padded = problem.padded();
        match self.plan.plan(&problem) {
            Err(PlanError::Rows(why)) if self.plan.plan(&padded).is_ok() => {
                (padded, format!("padded     {why}: arrays of the host are padded for a GPU\n"))
            }
            _ => (problem, String::new()),
        }
    }

    /// The plan of attention over a cache, with a chart of split-KV if `draws`.
    fn cached(&self, problem: &CacheProblem, draws: bool) -> Result<Planned> {
        let plan = match problem.plan(&self.plan) {
            Err(cached::PlanError::Forward(why)) if why.is_cpu_only() => {
                return cpu_only(problem.attention(), why, draws);
            }
            plan => plan?,
        };
        let (attention, text, json) = match &plan {
            CachePlan::Attention(plan) => (plan.as_ref(), plan.to_string(), report::of_lengths(plan)),
            CachePlan::Appending(plan) => (plan.forward(), plan.to_string(), report::cached(plan)),
        };
        let rows = attention.problem().q().shape.seqlen;
        let draw = || draw_split_kv(attention, problem.keys().map(|keys| (rows, keys)));
        let picture = draws.then(draw).transpose()?;
        Ok(Planned { text, json, picture })
    }

    /// The backward plan, with a chart if `draws`.
    fn backward(&self, draws: bool) -> Result<Planned> {
        let problem = BackwardSpec::contiguous(self.spec()?).validate()?;
        let options = backward::PlanOptions::default();
        let options = if self.deterministic { options.deterministic() } else { options };
        let plan = match backward::Plan::with(&problem, &self.plan.limits(), &options) {
            Err(why) if why.is_cpu_only() => return cpu_only(problem.forward(), why, draws),
            plan => plan?,
        };
        let picture = draws.then(|| draw_backward(&plan)).transpose()?;
        Ok(Planned { text: plan.to_string(), json: report::backward(&plan), picture })
    }

    /// Draws the plan's schedule next to the linear order's. The linear order is scheduled dynamically if the
    /// tile has a producer.
    fn draw(&self, plan: &Plan, tiles: &DensePlan) -> Result<String> {
        let (problem, limits) = (plan.problem(), self.plan.limits());
        let scheduler = match plan.tile().loads {
            Loads::Producer => Scheduler::DynamicPersistent,
            Loads::Consumers => Scheduler::StaticPersistent,
        };
        let linear = self.plan.options(problem)?.order(Order::Linear).scheduler(scheduler);
        let linear = Plan::with(problem, &limits, &linear)?;
        let linear = linear.dense().ok_or(NoPicture::Varlen)?;
        let schedules = [Panel::new("planned", tiles), Panel::new("linear", linear)];
        Ok(gantt::draw(problem, "KV blocks", &schedules)?)
    }

    /// The rows of Q and the keys of each sequence of a problem without a cache.
    fn lengths(&self, problem: &Problem) -> Vec<(usize, usize)> {
        let Some(starts_q) = &self.cu_seqlens_q else {
            let [q, k] = [problem.q(), problem.k()].map(|x| x.shape);
            return vec![(q.seqlen, k.seqlen); q.batch];
        };
        let starts_k = self.cu_seqlens_k.as_ref().unwrap_or(starts_q);
        let rows = |starts: &[i32]| (starts[1] - starts[0]) as usize;
        starts_q.windows(2).map(rows).zip(starts_k.windows(2).map(rows)).collect()
    }

    fn spec(&self) -> Result<ProblemSpec> {
        let Some(cu_seqlens_q) = &self.cu_seqlens_q else { return Ok(self.problem.dense()) };
        let rows_q = SequenceRows::packed(cu_seqlens_q)?;
        let rows_k = SequenceRows::packed(self.cu_seqlens_k.as_ref().unwrap_or(cu_seqlens_q))?;
        Ok(self.problem.packed(&rows_q, &rows_k))
    }
}
