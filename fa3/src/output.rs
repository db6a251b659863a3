//! Results of the forward pass, which know their call.

use fa3_types::{KnownProblem, Problem, SequenceRows, TensorName};
use ndarray::{Array3, Array4};

use crate::Error;

/// The result of attention. It remembers its call, so that [`Attention::backward`](crate::Attention::backward) can
/// refuse that of another one.
#[derive(Clone, Debug)]
pub struct Output<T> {
    /// O (batch, seqlen_q, heads_q, head_dim_v). 0 in rows that see no key or belong to no sequence.
    pub o: Array4<T>,
    /// Natural log-sum-exp of the scores, and the sink if there is one (batch, heads_q, seqlen_q). -inf in such rows,
    /// but the sink in rows of a sequence.
    pub lse: Array3<f32>,
    /// The problem that it was computed from, if that is known.
    call: Option<KnownProblem>,
}

/// Outputs are equal if O and LSE are.
impl<T: PartialEq> PartialEq for Output<T> {
    fn eq(&self, other: &Output<T>) -> bool {
        self.o == other.o && self.lse == other.lse
    }
}

impl<T> Output<T> {
    /// O and LSE from elsewhere, of the shapes that the fields say: of [`Attention::forward_into`], of another library,
    /// merged from parts. Of which call they are is unknown, and nobody checks it.
    ///
    /// [`Attention::forward_into`]: crate::Attention::forward_into
    pub fn new(o: Array4<T>, lse: Array3<f32>) -> Output<T> {
        Output { o, lse, call: None }
    }

    /// O and LSE of this problem.
    pub(crate) fn of(call: &KnownProblem, o: Array4<T>, lse: Array3<f32>) -> Output<T> {
        Output { o, lse, call: Some(call.clone()) }
    }

    /// Checks that this is the output of `call`, as far as it is known. Values of Q, K and V are not compared.
    ///
    /// # Errors
    /// [`Error::OtherCall`] with the first difference.
    pub(crate) fn check_call(&self, call: &KnownProblem) -> Result<(), Error> {
        let difference = self.call.as_ref().and_then(|of| difference(of, call));
        difference.map_or(Ok(()), |[given, expected]| Err(Error::OtherCall { given, expected }))
    }
}

/// The first thing that two problems do not have in common: what the one has, and the other.
fn difference(one: &KnownProblem, other: &KnownProblem) -> Option<[String; 2]> {
    let facts: [fn(&Problem) -> String; 8] = [
        |problem| format!("elements of {}", problem.dtype()),
        |problem| format!("q of shape {}", problem.q().shape),
        |problem| format!("k of shape {}", problem.k().shape),
        |problem| format!("v of shape {}", problem.v().shape),
        |problem| format!("mask {}", problem.mask()),
        |problem| format!("softmax scale {}", problem.softmax_scale().natural()),
        |problem| {
            problem.softcap().map_or("no soft cap".to_owned(), |cap| format!("soft cap {}", cap.bound()))
        },
        |problem| if problem.has_sink() { "sinks".to_owned() } else { "no sinks".to_owned() },
    ];
    let both = |fact: fn(&Problem) -> String| [fact(one), fact(other)];
    facts
        .into_iter()
        .map(both)
        .find(|[one, other]| one != other)
        .or_else(|| other_rows(TensorName::Q, one.rows_q(), other.rows_q()))
        .or_else(|| other_rows(TensorName::K, one.rows_k(), other.rows_k()))
        .or_else(|| other_intervals(one.intervals()?.bounds(), other.intervals()?.bounds()))
}

/// The first bound that two masks of intervals of one form do not have in common.
fn other_intervals(one: &[i32], other: &[i32]) -> Option<[String; 2]> {
    let (at, bounds) = one.iter().zip(other).enumerate().find(|(_, (one, other))| one != other)?;
    Some([bounds.0, bounds.1].map(|bound| format!("bound {bound} as number {at} of the intervals")))
}

/// The first sequence of a tensor that two lists do not have in common.
fn other_rows(tensor: TensorName, one: &SequenceRows, other: &SequenceRows) -> Option<[String; 2]> {
    if one == other {
        return None;
    }
    if one.count() != other.count() {
        return Some([one, other].map(|sequences| format!("{} sequences", sequences.count())));
    }
    let rows = |sequences: &SequenceRows, index| {
        let (_, first) = sequences.start(index);
        first..first + sequences.len(index)
    };
    let index = (0..one.count()).find(|&index| rows(one, index) != rows(other, index))?;
    Some([one, other].map(|sequences| {
        let rows = rows(sequences, index);
        format!("rows {} to {} of {tensor} in sequence {index}", rows.start, rows.end)
    }))
}

#[cfg(test)]
mod tests {
    use fa3_types::Mask;
    use half::f16;
    use ndarray::{Array1, Array4};

    use crate::{Attention, Device, Error, Output, Scalar};

    fn wave<T: Scalar>(dims: (usize, usize, usize, usize), step: f32) -> Array4<T> {
        Array4::from_shape_fn(dims, |(b, s, h, d)| {
            T::from_f32((step * (11 * b + 7 * s + 3 * h + 5 * d) as f32).sin())
        })
    }

    /// A gradient of O.
    fn ones(call: &Attention<'_, f32>) -> Array4<f32> {
        Array4::ones(call.problem().unwrap().o().shape.dims())
    }

    /// Each of these calls takes its own output and refuses those of all others.
    #[test]
    fn backward_refuses_the_output_of_another_call() {
        let wave = wave::<f32>;
        let [q, wide_q] = [8, 9].map(|head_dim| wave((2, 6, 4, head_dim), 0.3));
        let [k, wide_k] = [8, 9].map(|head_dim| wave((2, 6, 2, head_dim), 0.5));
        let (long_k, long_v) = (wave((2, 7, 2, 8), 0.5), wave((2, 7, 2, 4), 0.7));
        let (one_q, one_k, one_v) =
            (wave((1, 6, 4, 8), 0.3), wave((1, 6, 2, 8), 0.5), wave((1, 6, 2, 4), 0.7));
        let v = wave((2, 6, 2, 4), 0.7);
        let sinks = Array1::zeros(4);
        let (call, one) = (Attention::new(&q, &k, &v), Attention::new(&one_q, &one_k, &one_v));
        let calls = [
            call.clone(),
            call.clone().causal(),
            call.clone().window(Some(2), None),
            call.clone().causal().window(Some(2), None),
            call.clone().softmax_scale(0.5),
            call.clone().softcap(2.0),
            call.clone().softcap(3.0),
            call.clone().sink(&sinks),
            call.clone().seqused_q(&[6, 5]),
            call.clone().seqused_k(&[6, 5]),
            call.clone().seqused_k(&[5, 6]),
            Attention::new(&q, &long_k, &long_v),
            Attention::new(&wide_q, &wide_k, &v),
            one.clone(),
            one.clone().packed(&[0, 3, 6], &[0, 2, 6]),
            one.clone().packed(&[0, 4, 6], &[0, 2, 6]),
        ];
        let outputs = calls.each_ref().map(|call| call.forward(&Device::Cpu).unwrap());
        for (index, call) in calls.iter().enumerate() {
            let dout = ones(call);
            for (of, output) in outputs.iter().enumerate() {
                let fits = output.o.dim() == dout.dim();
                match call.backward(&Device::Cpu, output, &dout) {
                    Ok(_) => assert_eq!(of, index),
                    Err(Error::OtherCall { .. }) => assert!(of != index && fits),
                    Err(error) => assert!(!fits, "{error}"),
                }
                // Nobody knows of which call this is.
                let unknown = Output::new(output.o.clone(), output.lse.clone());
                assert_eq!(call.backward(&Device::Cpu, &unknown, &dout).is_ok(), fits);
            }
        }
        let said = |call: usize, output: usize| {
            let result = calls[call].backward(&Device::Cpu, &outputs[output], &ones(&calls[call]));
            result.unwrap_err().to_string()
        };
        assert_eq!(said(1, 0), "the output is that of a call with mask none, this call has mask causal");
        let rows = "the output is that of a call with rows 0 to 4 of q in sequence 0, this call has rows 0 to 3 \
                    of q in sequence 0";
        assert_eq!(said(14, 15), rows);
        // The same mask by another name.
        let same = call.clone().mask(Mask::Window { left: Some(100), right: Some(0) });
        same.backward(&Device::Cpu, &outputs[1], &ones(&same)).unwrap();
    }

    #[test]
    fn backward_refuses_an_output_of_8_bits() {
        let x = wave::<f16>((1, 6, 1, 16), 0.3);
        let attention = Attention::new(&x, &x, &x);
        let output = attention.clone().fp8().forward(&Device::Cpu).unwrap();
        let error = attention.backward(&Device::Cpu, &output, &x).unwrap_err().to_string();
        assert!(error.ends_with("a call with elements of e4m3, this call has elements of f16"), "{error}");
        attention.backward(&Device::Cpu, &Output::new(output.o, output.lse), &x).unwrap();
    }
}
