//! Judges an implementation of attention: `cargo run --release -p fa3-ref --example error_law`.

use std::error::Error;

use fa3_ref::half::bf16;
use fa3_ref::law::ForwardLaw;
use fa3_ref::ndarray::Array4;
use fa3_ref::tiled::{self, Algorithm, Tiles};
use fa3_ref::{Inputs, Precision};
use fa3_types::{Dtype, ProblemSpec, Shape};

fn main() -> Result<(), Box<dyn Error>> {
    let shape = Shape { batch: 1, seqlen: 200, heads: 2, head_dim: 64 };
    let problem = ProblemSpec::dense(Dtype::Bf16, shape, shape).causal().known()?;
    let wave = |step: f32| {
        Array4::from_shape_fn(shape.dims(), |(_, s, h, d)| {
            bf16::from_f32((step * (s * 7 + h * 5 + d * 3) as f32).sin())
        })
    };
    let [q, k, v] = [0.3, 0.5, 0.7].map(wave);
    let inputs = Inputs::new(&problem, q.view(), k.view(), v.view())?;

    // The result to judge; put your own O and LSE here. This is Algorithm 2 of the paper in tiles of 64 rows by 64
    // keys.
    let mut given = tiled::forward(&inputs, Algorithm::TwoStage, Tiles::new(64, 64)?, Precision::Bf16);

    // The oracle in f64 gives the expected result, and standard attention in bf16 the allowed error.
    let law = ForwardLaw::new(&inputs, Precision::Bf16);
    let [o, lse] = law.check(&given, "cargo run -p fa3-ref --example error_law")?;
    println!("O   errs by {:.1e}, {:.1e} is allowed", o.norms.max, o.bound);
    println!("LSE errs by {:.1e}, {:.0} % of what is allowed", lse.norms.max, 100.0 * lse.ratio);

    given.o[[0, 150, 1, 3]] += 0.05;
    let violation = law.check(&given, "cargo run -p fa3-ref --example error_law").unwrap_err();
    println!("\nwith one element changed: {violation}");
    Ok(())
}
