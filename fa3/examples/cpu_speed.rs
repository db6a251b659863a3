//! Times attention on the CPU, for `bench/cpu.py`: `cargo run --release -p fa3 --example cpu_speed`.
//!
//! Each line of the input requests one call, such as `forward f32 seqlen_q seqlen_k heads_q heads_kv head_dim causal`.
//! The answer is a line with the milliseconds. `backward` is the backward pass alone, and `dense` means no mask.

use std::io::{Error, Write, stdin, stdout};
use std::time::Instant;

use fa3::half::{bf16, f16};
use fa3::ndarray::Array4;
use fa3::{Attention, Device, Scalar};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    for line in stdin().lines() {
        let line = line?;
        let words: Vec<&str> = line.split(' ').collect();
        let &[pass, dtype, ref sizes @ .., mask] = words.as_slice() else { return Err(unknown(&line)) };
        let sizes: Vec<usize> = sizes.iter().map(|size| size.parse()).collect::<Result<_, _>>()?;
        let &[q, k, heads_q, heads_kv, head_dim] = sizes.as_slice() else { return Err(unknown(&line)) };
        let dims = [(1, q, heads_q, head_dim), (1, k, heads_kv, head_dim), (1, k, heads_kv, head_dim)];
        let (backward, causal) = (pass == "backward", mask == "causal");
        let ms = match dtype {
            "f32" => milliseconds::<f32>(dims, backward, causal),
            "bf16" => milliseconds::<bf16>(dims, backward, causal),
            "f16" => milliseconds::<f16>(dims, backward, causal),
            _ => return Err(unknown(&line)),
        }?;
        println!("{ms}");
        stdout().flush()?;
    }
    Ok(())
}

fn unknown(line: &str) -> Box<dyn std::error::Error> {
    Error::other(format!("not a call: {line}")).into()
}

/// The time of one call on numbers between -1 and 1.
fn milliseconds<T: Scalar<Output = T> + Copy>(
    dims: [(usize, usize, usize, usize); 3],
    backward: bool,
    causal: bool,
) -> Result<f64, fa3::Error> {
    let mut state = 1u32;
    let [q, k, v] = dims.map(|dims| {
        Array4::from_shape_simple_fn(dims, || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            T::from_f32(state as f32 / (1u32 << 31) as f32 - 1.0)
        })
    });
    let attention = Attention::new(q.view(), k.view(), v.view());
    let attention = if causal { attention.causal() } else { attention };
    if !backward {
        let start = Instant::now();
        attention.forward(&Device::Cpu)?;
        return Ok(start.elapsed().as_secs_f64() * 1e3);
    }
    let output = attention.forward(&Device::Cpu)?;
    let start = Instant::now();
    attention.backward(&Device::Cpu, &output, &q)?;
    Ok(start.elapsed().as_secs_f64() * 1e3)
}
