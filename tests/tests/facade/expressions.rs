//! The examples that docs/expressions.md quotes.

use fa3::{Attention, Device, ScoreFunction, ScoreTable};
use ndarray::Array4;

#[test]
fn alibi() -> Result<(), Box<dyn std::error::Error>> {
    let x = Array4::<f32>::zeros((1, 100, 2, 64));
    let slopes = ScoreTable::new(&[2], [0.5, 0.25])?;
    let alibi = ScoreFunction::parse("s + slope[h] * (k - q)", [("slope", slopes.into())])?;

    let attention = Attention::new(&x, &x, &x).causal().score(alibi);
    let output = attention.forward(&Device::Cpu)?;
    let sum: f32 = (0..100).map(|distance| (-0.25 * distance as f32).exp()).sum();
    assert!((output.lse[[0, 1, 99]] - sum.ln()).abs() < 1e-5);
    let gradients = attention.backward(&Device::Cpu, &output, &Array4::ones((1, 100, 2, 64)))?;
    assert_eq!(gradients.dq.dim(), (1, 100, 2, 64));
    Ok(())
}

#[test]
fn a_cap_and_a_bias_by_distance() -> Result<(), fa3::ScoreError> {
    let text = "if k == 1 && q > 8 then -inf else cap * tanh(s / cap) + near[min(abs(q - k), 2)]";
    let with = |cap: f32| {
        let near = ScoreTable::new(&[3], [0.0, -0.5, -1.0])?;
        ScoreFunction::parse(text, [("cap", cap.into()), ("near", near.into())])
    };
    assert_eq!(with(30.0)?.expr(), with(50.0)?.expr());
    assert_eq!(with(30.0)?.numbers(), [30.0]);
    Ok(())
}
