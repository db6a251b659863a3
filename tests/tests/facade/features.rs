//! Each plan and each reference computes a feature of a problem, or refuses the feature by its name. The test compares
//! the answers with the table of docs/what-works-where.md.

use std::fs;
use std::path::Path;

use fa3::half::f16;
use fa3::{Attention, CachedAttention, Device, Error, KvCache};
use fa3_quant::{Fp8Attention, Granularity, Preparation, QuantError};
use fa3_ref::{InputError, Inputs};
use fa3_sched::forward::{PlanKind, PlanOptions, SplitKeys};
use fa3_sched::{DeviceLimits, backward, forward, fp8};
use fa3_types::{
    BackwardSpec, Dtype, ExtraCache, Feature, Fp8Spec, Intervals, KnownProblem, LseForm, Mask, Problem,
    ProblemSpec, ScoreFunction, SequenceRows, Sequences, Shape, TensorDesc, TokenScales,
};
use ndarray::{Array1, Array4, ArrayView4};

const H100: DeviceLimits = DeviceLimits::h100_sxm();

/// Shape of K and V. If split-KV applies, Q has fewer rows.
const KV: Shape = Shape { batch: 1, seqlen: 512, heads: 2, head_dim: 64 };

/// Answer to a problem with a feature.
#[derive(Clone, Copy, PartialEq)]
enum Answer {
    Computed,
    Refused,
    /// This plan refuses the problem, and another plan computes it.
    OfOthers,
}

/// Requests a plan or a result of a problem. A refusal must name a feature of the problem.
type Ask = fn(ProblemSpec) -> Answer;

fn dense() -> ProblemSpec {
    ProblemSpec::dense(Dtype::F16, KV, KV)
}

fn packed() -> ProblemSpec {
    dense().seqs_q(Sequences::packed(2)).seqs_k(Sequences::packed(2))
}

fn decoding() -> ProblemSpec {
    ProblemSpec::dense(Dtype::F16, Shape { seqlen: 4, ..KV }, KV)
}

/// A column of the table: its title, the problem to which features are added, and the request.
type Column = (&'static str, fn() -> ProblemSpec, Ask);

/// The columns of the table.
const ALL: [Column; 8] = [
    ("dense", dense, |spec| planned(spec, &PlanOptions::default(), "dense")),
    ("packed", packed, |spec| planned(spec, &PlanOptions::default(), "varlen")),
    ("split keys", decoding, |spec| {
        let pieces = PlanOptions::default().split_keys(SplitKeys::FixedSize { keys: 128 });
        planned(spec, &pieces, "split-KV")
    }),
    ("gradients, dense", dense, |spec| gradients(spec, true)),
    ("gradients, packed", packed, |spec| gradients(spec, false)),
    ("in 8 bits", dense, in_8_bits),
    ("emulation", dense, emulated),
    ("reference", dense, referred),
];

/// Adds a feature to the problem. Returns an error if they are incompatible.
fn with(feature: Feature, spec: ProblemSpec) -> Result<ProblemSpec, fa3_types::ProblemError> {
    let e4m3 = |spec: &ProblemSpec| {
        let codes = |x: &TensorDesc| TensorDesc::contiguous(Dtype::E4m3, x.shape);
        let mut spec = spec.clone();
        spec.o = TensorDesc::contiguous(Dtype::Bf16, spec.o.shape);
        [spec.q, spec.k, spec.v] = [&spec.q, &spec.k, &spec.v].map(codes);
        spec
    };
    let count = spec.seqs_k.count();
    let seqlen = spec.q.shape.seqlen;
    #[allow(clippy::wildcard_enum_match_arm, reason = "what is new has no problem here until it is added")]
    let spec = match feature {
        Feature::Window => spec.causal(),
        Feature::Chunks => spec.mask(Mask::from_chunk(100)?),
        Feature::Intervals => {
            let form = Intervals::of_shape([1, 1, seqlen, 2], spec.q.shape)?;
            spec.mask(Mask::of_intervals(form))
        }
        Feature::Tree => {
            let form = Intervals::of_shape([spec.q.shape.batch, seqlen, 2, 1], spec.q.shape)?;
            spec.mask(Mask::of_intervals(form))
        }
        Feature::Blocks => {
            let form = Intervals::of_shape([1, 1, seqlen.div_ceil(128), 3], spec.q.shape)?;
            spec.mask(Mask::of_intervals(form))
        }
        Feature::SoftCap => spec.softcap(30.0),
        Feature::Score => spec.score(twice().form().clone()),
        Feature::Sinks => spec.sink(),
        Feature::MaxLogits => spec.max_logits(),
        Feature::LseForm => spec.lse_form(LseForm { base_two: true, ..LseForm::default() }),
        Feature::Qv => {
            let qv = spec.o;
            spec.qv(qv)
        }
        Feature::E4m3 => e4m3(&spec),
        Feature::E4m3Keys => spec.e4m3_keys(),
        Feature::Int8Keys => spec.int8_keys(),
        Feature::TokenScales => {
            let scales = TokenScales::contiguous(spec.k.shape);
            spec.e4m3_keys().token_scales(scales)
        }
        Feature::BlockScales => e4m3(&spec).block_scales(128),
        Feature::VChannels => e4m3(&spec).v_channels(),
        Feature::TransposedV => e4m3(&spec).transposed_v(),
        Feature::Packed => {
            let sequences = Sequences::packed(count);
            spec.seqs_q(sequences).seqs_k(sequences)
        }
        Feature::Used => {
            let sequences = spec.seqs_k.used();
            spec.seqs_k(sequences)
        }
        Feature::Pages => spec.seqs_k(Sequences::paged(count, 1).used()),
        Feature::Index => spec.seqs_k(Sequences::indexed(count, [3, 1]).used()),
        Feature::Leftpad => spec.seqs_k(Sequences::paged(count, 1).used().left_padded()),
        Feature::Lists | Feature::Extra => {
            // A list belongs to one row of Q.
            let mut spec = spec.seqs_q(Sequences::dense(count, 1)).seqs_k(Sequences::listed(count, 100));
            let extra = ExtraCache { k: spec.k, v: spec.v, sequences: spec.seqs_k };
            for x in [&mut spec.q, &mut spec.o] {
                *x = TensorDesc::contiguous(x.dtype, Shape { batch: count, seqlen: 1, ..x.shape });
            }
            if feature == Feature::Extra { spec.extra(extra) } else { spec }
        }
        Feature::RowScales => {
            let mut spec = with(Feature::Lists, spec)?;
            let of =
                |x: &TensorDesc, head_dim| TensorDesc::contiguous(Dtype::Bf16, Shape { head_dim, ..x.shape });
            [spec.q, spec.k] = [&spec.q, &spec.k].map(|x| of(x, 64));
            spec.o = of(&spec.o, 512);
            spec.v = TensorDesc::contiguous(Dtype::E4m3, Shape { head_dim: 512, ..spec.v.shape });
            let qv = spec.o;
            spec.qv(qv)
        }
        other => panic!("there is no problem with {other} here"),
    };
    let problem = spec.clone().validate()?;
    assert!(problem.features().any(|of| of == feature), "{problem} has no {feature}");
    Ok(spec)
}

/// A function of scores.
fn twice() -> ScoreFunction {
    ScoreFunction::parse("2 * s", []).unwrap()
}

fn answer<T, E: ToString>(result: Result<T, E>, problem: &Problem) -> Answer {
    let Err(error) = result.map_err(|error| error.to_string()) else { return Answer::Computed };
    assert!(problem.features().any(|feature| error.contains(&feature.to_string())), "{problem}: {error}");
    Answer::Refused
}

fn planned(spec: ProblemSpec, options: &PlanOptions, way: &str) -> Answer {
    let problem = spec.validate().unwrap();
    let plan = forward::Plan::with(&problem, &H100, options);
    let of = plan.as_ref().ok().map(|plan| match plan.kind() {
        PlanKind::Dense(_) => "dense",
        PlanKind::Varlen(_) => "varlen",
        PlanKind::SplitKv(_) => "split-KV",
    });
    if of.is_some_and(|of| of != way) { Answer::OfOthers } else { answer(plan, &problem) }
}

fn gradients(spec: ProblemSpec, dense: bool) -> Answer {
    let forward = spec.clone().validate().unwrap();
    let problem = match BackwardSpec::contiguous(spec).validate() {
        Ok(problem) => problem,
        Err(error) => return answer::<(), _>(Err(error), &forward),
    };
    let plan = backward::Plan::new(&problem, &H100);
    let is_dense = plan.as_ref().map(|plan| plan.dense().is_some());
    if is_dense.is_ok_and(|is_dense| is_dense != dense) { Answer::OfOthers } else { answer(plan, &forward) }
}

fn in_8_bits(spec: ProblemSpec) -> Answer {
    let attention = spec.clone().validate().unwrap();
    match Fp8Spec::new(spec).validate() {
        Ok(problem) => answer(fp8::Plan::new(&problem, &H100), &attention),
        Err(error) => answer::<(), _>(Err(error), &attention),
    }
}

/// The problem with its lengths. `None` for a KV cache, whose sequences are gathered before a reference runs.
fn known(problem: &Problem) -> Option<KnownProblem> {
    let rows = |sequences: Sequences, x: &TensorDesc| {
        let (count, seqlen) = (sequences.count(), x.shape.seqlen);
        let ends: Vec<i32> = (0..=count).map(|i| (i * seqlen / count) as i32).collect();
        let rows = match sequences.is_packed() {
            true => SequenceRows::packed(&ends).unwrap(),
            false => SequenceRows::dense(count, seqlen),
        };
        if sequences.has_used() { rows.with_used(&vec![8; count]).unwrap() } else { rows }
    };
    let (q, k) = (rows(problem.seqs_q(), problem.q()), rows(problem.seqs_k(), problem.k()));
    let mut spec = problem.spec();
    let is_scored = spec.score.take().is_some();
    let problem = spec.validate().expect("it needs no function of scores");
    let known = match problem.mask().intervals().map(|form| form.shape(problem.q().shape)) {
        None => KnownProblem::new(problem, q, k).ok(),
        Some(shape) => KnownProblem::with_intervals(problem, q, k, vec![0; shape.iter().product()]).ok(),
    };
    known.map(|known| if is_scored { known.with_score(&twice()) } else { known })
}

fn emulated(spec: ProblemSpec) -> Answer {
    let Some(problem) = known(&spec.validate().unwrap()) else { return Answer::OfOthers };
    // The shapes do not match, but features are checked first.
    let zeros = Array4::<f32>::zeros((1, 8, 1, 32));
    let codes =
        Preparation::new(Granularity::Tensor).quantize(zeros.view(), &SequenceRows::dense(1, 8)).unwrap();
    match Fp8Attention::default().forward(&problem, &codes, &codes, &codes) {
        Err(error @ QuantError::Unknown(_)) => answer::<(), _>(Err(error), &problem),
        _ => Answer::Computed,
    }
}

fn referred(spec: ProblemSpec) -> Answer {
    let Some(problem) = known(&spec.validate().unwrap()) else { return Answer::OfOthers };
    let zero = [0.0_f64];
    let zeros = |x: &TensorDesc| {
        ArrayView4::from_shape([1; 4], &zero).unwrap().broadcast(x.shape.dims()).unwrap().to_owned()
    };
    let [q, k, v] = [problem.q(), problem.k(), problem.v()].map(zeros);
    let sinks = problem.has_sink().then(|| Array1::zeros(problem.heads().q()));
    let inputs =
        Inputs::with_sink(&problem, [q.view(), k.view(), v.view()], sinks.as_ref().map(|x| x.view()));
    match inputs {
        Err(error @ InputError::Unknown(_)) => answer::<(), _>(Err(error), &problem),
        other => answer(other, &problem),
    }
}

/// Arrays of [`KV`], of f16.
fn zeros() -> Array4<f16> {
    Array4::zeros(KV.dims())
}

/// Whether a call is refused because it differs from the problem that it was made for.
fn is_other(problem: Result<KnownProblem, Error>) -> bool {
    matches!(problem, Err(Error::OtherProblem { .. }))
}

/// A call takes the mask and the soft cap of its problem. It is refused if the problem has a property that it lacks.
#[test]
fn a_call_is_the_problem_that_it_was_made_for() {
    let x = zeros();
    for &feature in Feature::ALL {
        let problem = with(feature, dense()).unwrap().validate().unwrap();
        let call = Attention::new(&x, &x, &x).for_problem(&problem);
        let taken = [Feature::Window, Feature::Chunks, Feature::SoftCap, Feature::LseForm].contains(&feature);
        assert_eq!(call.problem().is_ok(), taken, "{feature}");
        assert_eq!(is_other(call.problem()), !taken, "{feature}");
        // A property that the call has and the problem has not is refused as well.
        let call = Attention::new(&x, &x, &x).for_problem(&dense().validate().unwrap()).causal().softcap(2.0);
        assert!(is_other(call.problem()));
    }
    let (sinks, intervals) = (Array1::zeros(KV.heads), Array4::zeros((1, 1, KV.seqlen, 2)));
    let call = Attention::new(&x, &x, &x);
    for (feature, call) in [
        (Feature::Sinks, call.clone().sink(&sinks)),
        (Feature::Qv, call.clone().qv(&x)),
        (Feature::Score, call.clone().score(twice())),
        (Feature::Intervals, call.clone().intervals(&intervals)),
        (Feature::Packed, call.clone().packed(&[0, 512], &[0, 512])),
        (Feature::Used, call.seqused_k(&[512])),
    ] {
        let problem = with(feature, dense()).unwrap().validate().unwrap();
        assert_eq!(call.for_problem(&problem).problem().map(drop), Ok(()), "{feature}");
    }
}

#[test]
fn a_call_over_a_cache_is_the_problem_that_it_was_made_for() {
    let (x, sinks) = (zeros(), Array1::zeros(KV.heads));
    let mut cache = KvCache::dense(x.clone(), x.clone());
    cache.cache_seqlens = vec![3];
    let spec = || dense().seqs_k(Sequences::dense(1, KV.seqlen).used());
    let computed = |call: CachedAttention<'_, f16>| call.forward(&Device::Cpu, &cache).map(drop);
    for (feature, computes) in [
        (Feature::Window, true),
        (Feature::SoftCap, true),
        (Feature::Sinks, false),
        (Feature::Score, false),
        (Feature::Qv, false),
    ] {
        let problem = with(feature, spec()).unwrap().validate().unwrap();
        let call = CachedAttention::new(&x).for_problem(&problem);
        assert_eq!(computed(call.clone()).is_ok(), computes, "{feature}");
        assert!(feature != Feature::Sinks || computed(call.clone().sink(&sinks)).is_ok());
        assert!(feature != Feature::Score || computed(call.score(twice())).is_ok());
    }
    let pages = spec().seqs_k(Sequences::paged(1, 1).used()).validate().unwrap();
    let error = computed(CachedAttention::new(&x).for_problem(&pages)).unwrap_err();
    assert_eq!(error.to_string(), "the call is attention of k, and it was made for attention of k cached");
}

#[test]
fn every_feature_is_computed_or_refused_by_name() {
    let titles = ALL.map(|(title, ..)| title).join(" | ");
    let mut table = format!("| feature | {titles} |\n|---{}|\n", "|---".repeat(ALL.len()));
    for &feature in Feature::ALL {
        let cells = ALL.map(|(_, spec, ask)| match with(feature, spec()).map(ask) {
            Ok(Answer::Computed) => "yes",
            Ok(Answer::Refused) | Err(_) => "refused",
            Ok(Answer::OfOthers) => "",
        });
        table += &format!("| {feature} | {} |\n", cells.join(" | "));
    }
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/what-works-where.md");
    let page = fs::read_to_string(page).expect("the page can be read");
    assert!(page.contains(&table), "the page's table should be\n{table}");
}
