//! Outputs record the call that made them.

use fa3::{Attention, Device, Error, Mask, Output, ScoreFunction};
use half::f16;
use ndarray::{Array1, Array4};

use crate::wave;

/// A gradient of O.
fn ones(call: &Attention<'_, f32>) -> Array4<f32> {
    Array4::ones(call.problem().unwrap().o().shape.dims())
}

/// Scores times a factor, which is a number of the function.
fn times(factor: f32) -> ScoreFunction {
    ScoreFunction::parse("factor * s", [("factor", factor.into())]).unwrap()
}

/// Each of these calls accepts its own output and refuses the outputs of all other calls.
#[test]
fn backward_refuses_the_output_of_another_call() {
    let wave = wave::<f32>;
    let [q, wide_q] = [8, 9].map(|head_dim| wave((2, 6, 4, head_dim), 0.3));
    let [k, wide_k] = [8, 9].map(|head_dim| wave((2, 6, 2, head_dim), 0.5));
    let (long_k, long_v) = (wave((2, 7, 2, 8), 0.5), wave((2, 7, 2, 4), 0.7));
    let (one_q, one_k, one_v) = (wave((1, 6, 4, 8), 0.3), wave((1, 6, 2, 8), 0.5), wave((1, 6, 2, 4), 0.7));
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
        call.clone().score(times(2.5)),
        call.clone().score(times(3.5)),
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
            // An output without a record of its call.
            let unknown = Output::new(output.o.clone(), output.lse.clone());
            assert_eq!(call.backward(&Device::Cpu, &unknown, &dout).is_ok(), fits);
        }
    }
    let said = |call: usize, output: usize| {
        let result = calls[call].backward(&Device::Cpu, &outputs[output], &ones(&calls[call]));
        result.unwrap_err().to_string()
    };
    assert_eq!(said(1, 0), "the output belongs to a call with mask none, this call has mask causal");
    let rows = "the output belongs to a call with rows 0 to 4 of q in sequence 0, this call has rows 0 to 3 \
                of q in sequence 0";
    assert_eq!(said(14, 15), rows);
    let features = "the output belongs to a call with sinks, this call has no features";
    assert_eq!(said(0, 7), features);
    // The same mask in another form.
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
