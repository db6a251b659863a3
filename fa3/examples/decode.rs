//! Attention of one layer with rotary embedding over a paged cache: all tokens of a sequence at once, and then one by
//! one, on the CPU and, if available, on the GPU: `cargo run --release -p fa3 --example decode`.
//!
//! The cache is copied at each call; in `decode_on_device.rs` it stays on the GPU.
//!
//! The error law judges both results against attention in f64. The exit code is 1 if a result is wrong.

use std::error::Error;
use std::ops::Range;

use fa3::half::bf16;
use fa3::ndarray::{Array2, Array3, Array4, ArrayView4, Axis, Slice};
use fa3::{Attention, CachedAttention, Device, KvCache, NewRows, Output, Rope, RopeStyle, RopeTable};
use fa3_ref::law::ForwardLaw;
use fa3_ref::{Forward, Inputs, Precision};

const TOKENS: usize = 200;
const PAGE_SIZE: usize = 16;
/// Numbers of query heads and of key/value heads.
const HEADS: [usize; 2] = [4, 2];
const HEAD_DIM: usize = 64;

fn main() -> Result<(), Box<dyn Error>> {
    let q = random((1, TOKENS, HEADS[0], HEAD_DIM), 1);
    let [k, v] = [2, 3].map(|seed| random((1, TOKENS, HEADS[1], HEAD_DIM), seed));
    let table = Rope::new(RopeStyle::HalfSplit, HEAD_DIM, 10_000.0)?.table(TOKENS);

    let (rotated_q, rotated_k) = (rotated(&q, &table), rotated(&k, &table));
    let problem = Attention::new(&rotated_q, &rotated_k, &v).causal().problem()?;
    let inputs = Inputs::new(&problem, rotated_q.view(), rotated_k.view(), v.view())?;
    let law = ForwardLaw::new(&inputs, Precision::Bf16);

    let gpu = Device::gpu();
    if let Err(why) = &gpu {
        println!("skipped: the gpu: {why}");
    }
    for device in [Device::Cpu].into_iter().chain(gpu) {
        for (name, step) in [("all tokens at once", TOKENS), ("one by one", 1)] {
            let output = decode(&device, [&q, &k, &v], &table, step)?;
            let result = Forward { o: output.o.mapv(bf16::to_f32), lse: output.lse };
            let parts = law.check(&result, name)?;
            let ratio = parts.iter().map(|part| part.ratio).fold(0.0, f64::max);
            println!("on {device}, {name}: off by at most {:.0} % of the error law's bound", 100.0 * ratio);
        }
    }
    Ok(())
}

/// O and LSE of all tokens, appended `step` at a time.
fn decode(
    device: &Device,
    [q, k, v]: [&Array4<bf16>; 3],
    table: &RopeTable,
    step: usize,
) -> Result<Output<bf16>, fa3::Error> {
    // The pages of the sequence lie in reverse order, with an unused page between each two.
    let pages = TOKENS.div_ceil(PAGE_SIZE);
    let page_table = Array2::from_shape_fn((1, pages), |(_, page)| (2 * (pages - page) - 1) as i32);
    let pool = Array4::from_elem((2 * pages, PAGE_SIZE, HEADS[1], HEAD_DIM), bf16::NAN);
    let mut cache = KvCache::paged(pool.clone(), pool, page_table);

    let mut o = Array4::from_elem((1, TOKENS, HEADS[0], HEAD_DIM), bf16::NAN);
    let mut lse = Array3::from_elem((1, HEADS[0], TOKENS), f32::NAN);
    for first in (0..TOKENS).step_by(step) {
        let tokens = first..first + step;
        let new = NewRows::new(rows(k, &tokens), rows(v, &tokens)).rotary(table);
        let call = CachedAttention::new(rows(q, &tokens)).causal();
        let output = call.append_forward(device, &mut cache, &new)?;
        o.slice_axis_mut(Axis(1), Slice::from(tokens.clone())).assign(&output.o);
        lse.slice_axis_mut(Axis(2), Slice::from(tokens)).assign(&output.lse);
    }
    Ok(Output::new(o, lse))
}

fn rows<'a>(x: &'a Array4<bf16>, tokens: &Range<usize>) -> ArrayView4<'a, bf16> {
    x.slice_axis(Axis(1), Slice::from(tokens.clone()))
}

/// Rotates each row by its position, as an append does.
fn rotated(x: &Array4<bf16>, table: &RopeTable) -> Array4<bf16> {
    let mut rotated = x.mapv(bf16::to_f32);
    for (position, mut heads) in rotated.axis_iter_mut(Axis(1)).enumerate() {
        for mut row in heads.rows_mut() {
            table.apply(row.as_slice_mut().expect("rows of a new array have no gaps"), position);
        }
    }
    rotated.mapv(bf16::from_f32)
}

/// Numbers between -1 and 1.
fn random(shape: (usize, usize, usize, usize), seed: u32) -> Array4<bf16> {
    let mut state = seed;
    Array4::from_shape_simple_fn(shape, || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        bf16::from_f32((state >> 8) as f32 / (1 << 23) as f32 - 1.0)
    })
}
