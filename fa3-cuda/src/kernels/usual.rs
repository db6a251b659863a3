//! The kernels of usual calls, which an archive of compiled kernels has.

use std::collections::HashSet;

use fa3_ir::Program;
use fa3_sched::forward::{PlanOptions, SplitKeys};
use fa3_sched::{DeviceLimits, backward, cached, forward};
use fa3_types::{BackwardSpec, CachedSpec, Dtype, Mask, ProblemSpec, Sequences, Shape, TensorDesc};

use super::{Spec, bwd, cached as cached_kernels, fwd};

/// Pairs of head dimensions: that of Q and K, then that of V.
const DIMS: [(usize, usize); 4] = [(64, 64), (128, 128), (192, 128), (256, 256)];

/// Numbers of heads: with the first, the tiles of a short sequence do not fill a GPU; with the second, they do.
const HEADS: [usize; 2] = [8, 256];

/// Numbers of rows of the sequences, one for each set of tiles.
const LENGTHS: [usize; 3] = [512, 2048, 8192];

/// Numbers of query heads that share a key/value head in decoding.
const GROUPS: [usize; 3] = [1, 4, 8];

/// The number of sequences in decoding.
const BATCH: usize = 16;

/// The kernels of usual calls in bf16, once each: training and prefill, dense and packed, without a mask and with a
/// causal one, for head dimensions 64, 128, 256 and 192 (V: 128); prompts and decoding over a cache, for 64, 128 and
/// 256; and latent decoding.
pub fn usual() -> impl Iterator<Item = Spec> {
    let mut seen = HashSet::new();
    let programs = training().flat_map(with_gradients).chain(decoding().map(|spec| over_cache(&spec)));
    let programs = programs.chain(appended());
    programs
        .flat_map(|program| program.steps)
        .map(|step| step.kernel)
        .filter(move |spec| seen.insert(spec.clone()))
}

/// Problems of training and of prefill without a cache.
fn training() -> impl Iterator<Item = ProblemSpec> {
    let shapes = DIMS.into_iter().flat_map(|dims| LENGTHS.map(|rows| (dims, rows)));
    let shapes = shapes.flat_map(|shape| HEADS.map(|heads| (shape, heads)));
    let problems = shapes.flat_map(|shape| [Mask::None, Mask::Causal].map(|mask| (shape, mask)));
    problems.flat_map(|((((head_dim, head_dim_v), rows), heads), mask)| {
        let of = |count: usize| {
            let shape = Shape { batch: 1, seqlen: count * rows, heads, head_dim };
            ProblemSpec::dense(Dtype::Bf16, shape, shape).head_dim_v(head_dim_v).mask(mask)
        };
        let packed = |count| {
            let sequences = Sequences::packed(count).longest(rows);
            of(count).seqs_q(sequences).seqs_k(sequences)
        };
        [of(1), packed(4), packed(64), packed(256)]
    })
}

/// Both passes of a problem.
fn with_gradients(spec: ProblemSpec) -> [Program<Spec>; 2] {
    let limits = DeviceLimits::h100_sxm();
    let problem = spec.clone().validate().expect("shapes agree");
    let forward = forward::Plan::with(&problem, &limits, &PlanOptions::default()).expect("there is a tile");
    let problem = BackwardSpec::contiguous(spec).validate().expect("shapes agree");
    let backward = backward::Plan::with(&problem, &limits, &backward::PlanOptions::default());
    [fwd::program(&forward), bwd::program(&backward.expect("there are tiles"))]
}

/// Problems of decoding, over a dense cache and over pages that are copied in blocks of rows or row by row; and packed
/// prompts and steps over pages, as serving engines have them.
fn decoding() -> impl Iterator<Item = ProblemSpec> {
    let shapes = [64, 128, 256].into_iter().flat_map(|head_dim| GROUPS.map(|group| (head_dim, group)));
    let caches = shapes.flat_map(|shape| [None, Some(1), Some(16), Some(64)].map(|page| (shape, page)));
    let plain = caches.flat_map(|((head_dim, group), page)| {
        let spec = over(Shape { batch: BATCH, seqlen: 1, heads: 8 * group, head_dim }, 8, page);
        let packed = [1, 2048].map(|rows| page.map(|_| packed(spec.clone(), rows)));
        [Some(spec.clone())].into_iter().chain(packed).flatten()
    });
    let latent = [16, 64, 128].into_iter().flat_map(|heads| [1, 64].map(|page| (heads, page)));
    let latent = latent.map(|(heads, page)| {
        let q = Shape { batch: BATCH, seqlen: 1, heads, head_dim: 64 };
        let spec = over(q, 1, Some(page)).head_dim_v(512);
        let qv = TensorDesc::contiguous(Dtype::Bf16, spec.o.shape);
        spec.qv(qv)
    });
    plain.chain(latent)
}

/// The problem with packed rows of Q, of which each sequence has about this number.
fn packed(mut spec: ProblemSpec, rows: usize) -> ProblemSpec {
    for x in [&mut spec.q, &mut spec.o] {
        *x = TensorDesc::contiguous(x.dtype, Shape { batch: 1, seqlen: BATCH * rows, ..x.shape });
    }
    spec.seqs_q(Sequences::packed(BATCH).longest(rows))
}

/// A problem over a cache of 8192 rows a sequence, in pages of a number of rows or dense.
fn over(q: Shape, heads: usize, page: Option<usize>) -> ProblemSpec {
    const ROWS: usize = 8192;
    let (batch, rows, sequences) = match page {
        None => (q.batch, ROWS, Sequences::dense(q.batch, ROWS)),
        Some(rows) => (q.batch * ROWS / rows, rows, Sequences::paged(q.batch, ROWS / rows)),
    };
    let kv = Shape { batch, seqlen: rows, heads, head_dim: q.head_dim };
    ProblemSpec::dense(Dtype::Bf16, q, kv).causal().seqs_k(sequences.used())
}

/// The forward pass over a cache, in which CTAs share keys.
fn over_cache(spec: &ProblemSpec) -> Program<Spec> {
    let problem = spec.clone().validate().expect("shapes agree");
    let plan = forward::Plan::with(&problem, &DeviceLimits::h100_sxm(), &shared()).expect("there is a tile");
    fwd::program(&plan)
}

/// Decoding that appends the new rows itself.
fn appended() -> impl Iterator<Item = Program<Spec>> {
    let caches =
        [64, 128].into_iter().flat_map(|head_dim| [None, Some(16), Some(64)].map(|page| (head_dim, page)));
    caches.map(|(head_dim, page)| {
        let q = Shape { batch: BATCH, seqlen: 1, heads: 32, head_dim };
        let new = TensorDesc::contiguous(Dtype::Bf16, Shape { heads: 8, ..q });
        let spec = CachedSpec::new(over(q, 8, page), [new, new], Sequences::dense(BATCH, 1));
        let problem = spec.validate().expect("shapes agree");
        let plan =
            cached::Plan::with(&problem, &DeviceLimits::h100_sxm(), &shared()).expect("there is a tile");
        cached_kernels::program(&plan)
    })
}

fn shared() -> PlanOptions {
    PlanOptions::default().split_keys(SplitKeys::Even)
}
