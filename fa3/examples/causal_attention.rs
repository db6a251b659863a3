//! Causal attention with grouped heads, on the GPU if available:
//! `cargo run --release -p fa3 --example causal_attention`.

use fa3::half::bf16;
use fa3::ndarray::Array4;
use fa3::{Attention, Device, Error};

fn main() -> Result<(), Error> {
    // (batch, seqlen, heads, head_dim); four query heads share one key/value head.
    let q = random((2, 200, 8, 64), 1);
    let k = random((2, 300, 2, 64), 2);
    let v = random((2, 300, 2, 64), 3);

    let (device, no_gpu) = Device::best();
    if let Some(why) = no_gpu {
        println!("skipped: the gpu: {why}");
    }
    let output = Attention::new(&q, &k, &v).causal().forward(&device)?;
    println!("on {device}: O {:?}, LSE {:?}", output.o.dim(), output.lse.dim());
    println!("O of the first row of head 0 begins with {}", output.o[[0, 0, 0, 0]]);

    // Invalid arguments give an error with the offending numbers.
    let three_heads = random((2, 300, 3, 64), 4);
    let refused = Attention::new(&q, &three_heads, &three_heads).forward(&device);
    println!("refused: {}", refused.unwrap_err());
    Ok(())
}

/// Numbers between -1 and 1.
fn random(shape: (usize, usize, usize, usize), seed: u32) -> Array4<bf16> {
    let mut state = seed;
    Array4::from_shape_simple_fn(shape, || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        bf16::from_f32((state >> 8) as f32 / (1 << 23) as f32 - 1.0)
    })
}
