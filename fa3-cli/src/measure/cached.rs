//! Times of attention over a cache on a GPU, of results that were checked.
//!
//! A call is replayed for each of several caches, which together are several times as large as L2, so that it finds
//! none of its keys and values there.

use fa3::cuda::{Device, DeviceBuffer, Forward, OperationError, Stream, Tensors, Workspace};
use fa3_ref::rows::SatisfiedRows;
use fa3_sched::forward::{Plan, PlanOptions, SplitKeys, Way};
use fa3_types::{Dtype, Problem, ProblemSpec, Shape, TensorDesc};
use indicatif::ProgressBar;

use super::cache_truth::CacheTruth;
use super::outcome::Timing;
use super::replay::Replay;
use super::truth::Wrong;
use super::{Outcome, Pace, Refusal, hash};
use crate::cache::CacheLayout;

/// The least bytes of all caches together, as a multiple of L2's.
const BEYOND_L2: usize = 8;

/// Everything that launches use.
struct Memory {
    forward: Forward,
    workspace: Workspace,
    q: DeviceBuffer,
    qv: Option<DeviceBuffer>,
    seqused_k: DeviceBuffer,
    caches: Vec<Cache>,
    o: DeviceBuffer,
    lse: DeviceBuffer,
}

/// Keys and values of a batch, and the pages of its sequences.
struct Cache {
    /// K; or both, if V is not apart.
    k: DeviceBuffer,
    v: Option<DeviceBuffer>,
    page_table: Option<DeviceBuffer>,
}

/// Latent attention over a cache whose rows have so many latent columns, which are V, then those of K.
pub(crate) fn latent(dtype: Dtype, q: Shape, k: Shape, columns: usize) -> ProblemSpec {
    let strides = Shape { head_dim: columns + k.head_dim, ..k }.contiguous_strides();
    let [k, v] =
        [k.head_dim, columns].map(|head_dim| TensorDesc { dtype, shape: Shape { head_dim, ..k }, strides });
    let o = TensorDesc::contiguous(dtype, Shape { head_dim: columns, ..q });
    ProblemSpec::new(TensorDesc::contiguous(dtype, q), k, v, o).qv(o)
}

/// Measures attention over a cache of this layout on numbers from N(0, 1), whose keys CTAs share. K and V of latent
/// attention are those of [`latent`]. `progress` steps as [`super::steps`] of one says.
pub(crate) fn measure(
    device: &Device,
    problem: &Problem,
    layout: &CacheLayout,
    pace: Pace,
    progress: &ProgressBar,
) -> Outcome {
    let end = progress.position() + super::steps(1, pace) as u64;
    let outcome = measured(device, problem, layout, pace, progress);
    progress.set_position(end);
    outcome.map_or_else(Outcome::from, Outcome::Checked)
}

fn measured(
    device: &Device,
    problem: &Problem,
    layout: &CacheLayout,
    pace: Pace,
    progress: &ProgressBar,
) -> Result<Timing, Refusal> {
    let stream = device.stream()?;
    let forward = Forward::with(device, problem, &PlanOptions::default().split_keys(SplitKeys::Equally))?;
    let plan = described(forward.plan());
    let truth = CacheTruth::new(problem, layout)?;
    let mut memory = Memory::new(device, &stream, forward, layout, &truth)?;
    let (o, lse) = memory.compute(&stream)?;
    let SatisfiedRows { rows, ratio: error } = (truth.check)(&o, &lse)?;
    progress.inc(1);
    let (calls, mut millis) = (memory.caches.len(), Vec::new());
    let replay = Replay::capture(&stream, &mut memory, |stream, memory| {
        (0..calls).try_for_each(|cache| memory.launch(stream, cache))
    })?;
    let replays = replay.fill(pace.slice_ms)?;
    replay.time(replays)?;
    for _ in 0..pace.rounds {
        millis.push(replay.time(replays)? / calls as f64);
        progress.inc(1);
    }
    drop(replay);
    let again = memory.compute(&stream)?;
    if hash(&o, &lse) != hash(&again.0, &again.1) {
        return Err(Wrong::Changed.into());
    }
    Ok(Timing::new(plan, replays * calls as u32, millis, rows, error))
}

impl Memory {
    fn new(
        device: &Device,
        stream: &Stream,
        forward: Forward,
        layout: &CacheLayout,
        truth: &CacheTruth,
    ) -> Result<Memory, OperationError> {
        let problem = forward.plan().problem();
        let bytes = |x: &TensorDesc| x.extent_bytes().0 as usize;
        let (of_k, of_v) = match problem.qv() {
            Some(_) => (before_k(problem) + bytes(problem.k()), None),
            None => (bytes(problem.k()), Some(bytes(problem.v()))),
        };
        let each = of_k + of_v.unwrap_or(0);
        let copies = (BEYOND_L2 * device.l2_bytes() as usize).div_ceil(each.max(1)).max(2);
        // The GPU says first what is too large, before as much is drawn here.
        let mut caches = (0..copies)
            .map(|_| {
                let (k, v) = (device.alloc(of_k)?, of_v.map(|bytes| device.alloc(bytes)).transpose()?);
                Ok(Cache { k, v, page_table: None })
            })
            .collect::<Result<Vec<Cache>, OperationError>>()?;
        for (number, cache) in caches.iter_mut().enumerate() {
            let (k, v) = truth.cache(number);
            cache.k.upload(stream, &k)?;
            if let Some((buffer, bits)) = cache.v.as_mut().zip(v) {
                buffer.upload(stream, &bits)?;
            }
            let pages = layout.page_table(number as u64);
            let pages = pages.map(|pages| pages.iter().copied().collect::<Vec<i32>>());
            cache.page_table = pages.map(|pages| device.upload(stream, &pages)).transpose()?;
        }
        let seqlens: Vec<i32> = layout.seqlens.iter().map(|&rows| rows as i32).collect();
        let lse_bytes = size_of::<f32>() * problem.lse_shape().iter().product::<usize>();
        Ok(Memory {
            workspace: Workspace::new(device, stream, forward.workspace_bytes())?,
            q: device.upload(stream, &truth.q)?,
            qv: truth.qv.as_ref().map(|qv| device.upload(stream, qv)).transpose()?,
            seqused_k: device.upload(stream, &seqlens)?,
            caches,
            o: device.alloc(bytes(problem.o()))?,
            lse: device.alloc(lse_bytes)?,
            forward,
        })
    }

    /// Launches the call over a cache.
    fn launch(&mut self, stream: &Stream, cache: usize) -> Result<(), OperationError> {
        let Memory { forward, workspace, q, qv, seqused_k, caches, o, lse } = self;
        let Cache { k, v, page_table } = &caches[cache];
        let tensors = Tensors::new([("q", &*q)], [("o", o), ("lse", lse)]).input("qv", qv.as_ref());
        let tensors = match v {
            Some(v) => tensors.input("k", k).input("v", v),
            None => tensors.input("v", k).input_from("k", k, before_k(forward.plan().problem())),
        };
        let tensors = tensors.input("seqused_k", &*seqused_k).input("page_table", page_table.as_ref());
        forward.run(stream, tensors, workspace)
    }

    /// The bits of O, and LSE, of the first cache, computed into memory that holds NaN.
    fn compute(&mut self, stream: &Stream) -> Result<(Vec<u16>, Vec<f32>), OperationError> {
        self.o.fill(stream, 0xFF)?;
        self.lse.fill(stream, 0xFF)?;
        self.launch(stream, 0)?;
        Ok((self.o.download(stream)?, self.lse.download(stream)?))
    }
}

/// Bytes of a row of V, which lie before those of K where both are views of one cache.
fn before_k(problem: &Problem) -> usize {
    problem.head_dim_v() * problem.v().dtype.bytes()
}

/// The tile, and how CTAs find their work.
fn described(plan: &Plan) -> String {
    match plan.way() {
        Way::Shared(shared) => format!("{}; equal shares of all keys, {} CTAs", plan.tile(), shared.ctas()),
        Way::Listed(_) | Way::Numbered(_) => {
            format!("{}; {}; {}", plan.tile(), plan.order(), plan.scheduler())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// On a machine with a Hopper GPU.
    #[test]
    fn right_results_are_timed() {
        let Ok(device) = Device::open(0) else {
            println!("skipped: no gpu");
            return;
        };
        let (pace, bar) = (Pace { rounds: 3, slice_ms: 1.0 }, ProgressBar::hidden());
        for (page_size, is_latent) in [(None, false), (Some(16), false), (Some(64), true)] {
            let layout = CacheLayout { seqlens: vec![700, 33], room: 0, page_size };
            let [batch, seqlen] = layout.extent();
            let q = Shape { batch: 2, seqlen: 4, heads: 16, head_dim: if is_latent { 64 } else { 128 } };
            let kv = Shape { batch, seqlen, heads: 1, ..q };
            let spec = if is_latent {
                latent(Dtype::Bf16, q, kv, 512)
            } else {
                ProblemSpec::dense(Dtype::Bf16, q, kv)
            };
            let problem = spec.seqs_k(layout.sequences()).causal().validate().unwrap();
            let outcome = measure(&device, &problem, &layout, pace, &bar);
            let Outcome::Checked(timing) = outcome else { panic!("{outcome:?}") };
            assert!(timing.millis.iter().all(|ms| (1e-4..10.0).contains(ms)), "{timing:?}");
            assert!(timing.rows >= 128 && timing.error < 1.0 && timing.plan.contains("shares"), "{timing:?}");
        }
        assert_eq!(bar.position(), 12);
    }
}
