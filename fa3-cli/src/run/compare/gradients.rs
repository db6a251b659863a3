//! Checks of gradients.

use std::time::Instant;

use fa3::{Gradients, OutputGradients, Scalar};
use fa3_ref::law::BackwardLaw;
use fa3_ref::norms::ErrorNorms;
use fa3_ref::{InputError, Inputs, Precision};
use fa3_types::KnownProblem;
use ndarray::{Array1, Array4, ArrayView1, ArrayView4, Axis, Slice};

use super::oracle::{MOST_FLOPS, Parts, bar};
use super::{Check, Heads, Verdict};

/// The oracle and the baseline take about this many times as long for gradients as for the forward pass.
const AS_MANY_FORWARD: f64 = 8.0;

/// Checks dQ, dK, dV and dsink by the error law of each key/value head with its query heads. For large problems only
/// some heads are checked.
pub(in crate::run) fn check<T: Scalar>(
    problem: &KnownProblem,
    inputs: [ArrayView4<'_, T>; 3],
    sink: Option<ArrayView1<'_, f32>>,
    of: OutputGradients<'_, T>,
    gradients: &Gradients<T>,
) -> Result<Check, InputError> {
    let start = Instant::now();
    let all = Parts::of(problem);
    let parts = some_parts(problem, all.count);
    let part_of = |x: &ArrayView4<'_, T>, heads: Slice| x.slice_axis(Axis(2), heads).mapv(T::to_f32);

    let progress = bar(parts.len());
    let [own, shared] = [all.part.heads().q(), all.part.heads().kv()]
        .map(|heads| Vec::from_iter(parts.iter().flat_map(|part| part * heads..(part + 1) * heads)));
    let dsink = gradients.dsink.as_ref().map(|x| Judged::new("dsink", as_rows(x), own.clone()));
    let mut tensors = vec![
        Judged::new("dq", gradients.dq.view(), own),
        Judged::new("dk", gradients.dk.view(), shared.clone()),
        Judged::new("dv", gradients.dv.view(), shared),
    ];
    tensors.extend(dsink);
    for (index, &part) in parts.iter().enumerate() {
        let [own, shared] = all.heads(part);
        let [q, k, v] = &inputs;
        let [q, k, v] = [(q, own), (k, shared), (v, shared)].map(|(x, heads)| part_of(x, heads));
        let sink = sink.map(|sink| sink.slice_axis_move(Axis(0), own));
        let inputs = Inputs::with_sink(&all.part, [q.view(), k.view(), v.view()], sink)?;
        let dout = part_of(&of.dout, own);
        let dlse = of.dlse.as_ref().map(|dlse| dlse.slice_axis(Axis(1), own));
        let of = fa3_ref::OutputGradients { dout: dout.view(), dlse };
        let law = BackwardLaw::new(&inputs, of, Precision::of_output(problem.dtype()))?;
        let (oracle, [dq, dk, dv]) = (law.oracle(), law.bounds());
        let [own, shared] = all.heads(index);
        let three = [(&oracle.dq, own, dq), (&oracle.dk, shared, dk), (&oracle.dv, shared, dv)];
        let three = three.map(|(expected, heads, bound)| (expected.view(), heads, bound));
        let dsink = oracle.dsink.as_ref().map(|x| (as_rows(x), own, law.sink_bound()));
        for (tensor, (expected, heads, bound)) in tensors.iter_mut().zip(three.into_iter().chain(dsink)) {
            tensor.expected.slice_axis_mut(Axis(2), heads).assign(&expected);
            tensor.bound = tensor.bound.max(bound);
        }
        progress.inc(1);
    }
    progress.finish_and_clear();
    let of = all.count;
    let heads = (parts.len() < of).then_some(Heads { judged: parts.len(), of });
    let verdicts = tensors.into_iter().map(|tensor| tensor.verdict(heads)).collect();
    Ok(Check::Done { time: start.elapsed(), verdicts, opinions: Vec::new() })
}

/// The gradient of sinks as a tensor whose heads have one row of one column.
fn as_rows<T>(dsink: &Array1<T>) -> ArrayView4<'_, T> {
    dsink.view().insert_axis(Axis(1)).insert_axis(Axis(0)).insert_axis(Axis(0))
}

/// The parts to check, out of `all`: as many as time allows, at least one, evenly spaced.
fn some_parts(problem: &KnownProblem, all: usize) -> Vec<usize> {
    if problem.q().shape.dims().contains(&0) || problem.k().shape.dims().contains(&0) {
        return Vec::new();
    }
    let of_one = problem.forward_flops() / all as f64;
    let count = ((MOST_FLOPS / AS_MANY_FORWARD / of_one.max(1.0)) as usize).clamp(1, all);
    (0..count).map(|index| index * all / count).collect()
}

/// The checked heads of a gradient.
struct Judged {
    what: &'static str,
    /// Indices of the heads.
    heads: Vec<usize>,
    given: Array4<f32>,
    expected: Array4<f64>,
    bound: f64,
}

impl Judged {
    fn new<T: Scalar>(what: &'static str, gradient: ArrayView4<'_, T>, heads: Vec<usize>) -> Judged {
        let given = gradient.select(Axis(2), &heads).mapv(T::to_f32);
        let expected = Array4::zeros(given.dim());
        Judged { what, heads, given, expected, bound: 0.0 }
    }

    fn verdict(self, of: Option<Heads>) -> Verdict {
        let Judged { what, heads, given, expected, bound } = self;
        let mut norms = ErrorNorms::of(&given, &expected);
        if let Some(worst) = &mut norms.worst {
            worst.index[2] = heads[worst.index[2]];
        }
        let holds = norms.max <= bound;
        Verdict::Tensor { what, norms, bound, unit: "", holds, heads: of }
    }
}

#[cfg(test)]
mod tests {
    use fa3::{Attention, Device};

    use super::super::tests::qkv;
    use super::*;

    /// A wrong element is found, and named by its index in the whole tensor.
    #[test]
    fn gradients_are_judged_head_by_head() {
        let [q, k, v] = qkv();
        let dout = q.mapv(|x| x * x);
        let attention = Attention::new(q.view(), k.view(), v.view()).window(Some(5), Some(1)).softcap(3.0);
        let output = attention.forward(&Device::Cpu).unwrap();
        let mut gradients = attention.backward(&Device::Cpu, &output, dout.view()).unwrap();
        let problem = attention.problem().unwrap();
        let qkv = [q.view(), k.view(), v.view()];
        let check =
            |gradients: &Gradients<f32>| check(&problem, qkv, None, dout.view().into(), gradients).unwrap();
        assert!(check(&gradients).holds(), "{}", check(&gradients));
        gradients.dq[[0, 3, 2, 1]] += 1.0;
        let wrong = check(&gradients);
        assert!(!wrong.holds() && wrong.to_string().contains("worst at [0, 3, 2, 1]"), "{wrong}");
        gradients.dv[[0, 19, 1, 15]] = f32::NAN;
        let text = check(&gradients).to_string();
        assert_eq!(text.matches("BREAKS THE ERROR LAW").count(), 2, "{text}");
    }

    #[test]
    fn of_large_problems_some_heads_are_judged() {
        let heads = |seqlen, heads| {
            let q = fa3_types::Shape { batch: 1, seqlen, heads, head_dim: 64 };
            let problem = fa3_types::ProblemSpec::dense(fa3_types::Dtype::F32, q, q).known().unwrap();
            some_parts(&problem, Parts::of(&problem).count)
        };
        assert_eq!(heads(100, 4), [0, 1, 2, 3]);
        // The limit is 2.5 GFLOP, and a head takes 4 · 2000 · 2000 · 64 FLOP.
        assert_eq!(heads(2000, 16), [0, 8]);
        assert_eq!(heads(1 << 20, 16), [0]);
        assert!(heads(0, 16).is_empty());
    }
}
