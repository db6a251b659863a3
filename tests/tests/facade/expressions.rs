//! The examples that docs/expressions.md quotes.

use fa3::{Attention, Device, OutputGradients, ScoreFunction, ScoreTable};
use ndarray::{Array3, Array4};

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

/// The gradient of a slope is the sum of dS times the distance. Here each row has dS, because dLSE is not 0.
#[test]
fn gradients_of_tables() -> Result<(), Box<dyn std::error::Error>> {
    let x = Array4::<f32>::zeros((1, 100, 2, 64));
    let slopes = ScoreTable::new(&[2], [0.5, 0.25])?.with_gradient();
    let bias = ScoreTable::new(&[100], [0.0; 100])?;
    let values = [("slope", slopes.into()), ("bias", bias.into())];
    let alibi = ScoreFunction::parse("s + slope[h] * (k - q) + bias[k]", values)?;
    let attention = Attention::new(&x, &x, &x).causal().score(alibi);
    let output = attention.forward(&Device::Cpu)?;
    let (dout, dlse) = (Array4::ones((1, 100, 2, 64)), Array3::ones((1, 2, 100)));
    let of = OutputGradients::new(&dout).dlse(&dlse);
    let gradients = attention.backward(&Device::Cpu, &output, of)?;
    // The mean distance of the keys that each row sees.
    let expected = |slope: f64| -> f64 {
        let mean = |row: i32| {
            let weights =
                (0..=row).map(|distance| (f64::from(-distance), (-slope * f64::from(distance)).exp()));
            let [sum, weighted] = weights.fold([0.0; 2], |[sum, of], (x, w)| [sum + w, of + x * w]);
            weighted / sum
        };
        (0..100).map(mean).sum()
    };
    let [of_slopes, of_bias] = gradients.dtables.as_slice() else { panic!("two tables are read") };
    for (&found, slope) in of_slopes.iter().zip([0.5, 0.25]) {
        assert!((f64::from(found) / expected(slope) - 1.0).abs() < 1e-5, "{found} {}", expected(slope));
    }
    assert_eq!((of_slopes.len(), of_bias.len()), (2, 0));
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
