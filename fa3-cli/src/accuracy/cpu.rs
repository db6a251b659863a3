//! O on the CPU: the paper's algorithms as pseudocode, and emulated FP8 attention.

use fa3_quant::{Accumulation, Fp8Attention, Granularity, Preparation, QuantError, StandardFp8};
use fa3_ref::tiled::{self, Algorithm, Tiles};
use fa3_ref::{Inputs, Precision, standard};
use half::f16;
use ndarray::Array4;

use super::method::Method;
use super::recipe::{BLOCK, Recipe};
use super::sample::Sample;

/// Computes O by `method`, with the random signs of `seed`.
pub(super) fn output(method: Method, sample: &Sample, seed: u64) -> Result<Array4<f32>, QuantError> {
    let flash =
        |algorithm| fp16(sample, |inputs| tiled::forward(inputs, algorithm, tiles(), Precision::F16).o);
    let fp8 = |recipe, accumulation| fp8(sample, recipe, seed, accumulation);
    let one_level = Accumulation::OneLevel;
    match method {
        Method::StandardFp16 => Ok(fp16(sample, |inputs| standard::forward(inputs, Precision::F16).o)),
        Method::Flash2Fp16 => Ok(flash(Algorithm::Basic)),
        Method::Flash3Fp16 => Ok(flash(Algorithm::TwoStage)),
        Method::StandardFp8 => standard_fp8(sample),
        Method::Flash3Fp8 => fp8(Recipe::PAPER, one_level),
        Method::NoBlockQuantization => fp8(Recipe::ONE_SCALE, one_level),
        Method::NoIncoherentProcessing => fp8(Recipe::AS_IT_IS, one_level),
        Method::TwoLevel => fp8(Recipe::PAPER, Accumulation::TwoLevel { keys: BLOCK }),
        Method::VChannels => fp8(Recipe::V_CHANNELS, Accumulation::TwoLevel { keys: BLOCK }),
    }
}

/// Computes FP8 attention of exact e4m3 inputs.
pub(super) fn e4m3(sample: &Sample, accumulation: Accumulation) -> Result<Array4<f32>, QuantError> {
    let [q, k, v] = sample.codes()?;
    Ok(Fp8Attention::new(accumulation, BLOCK).forward(&sample.problem, &q, &k, &v)?.o)
}

fn tiles() -> Tiles {
    Tiles::new(128, 128).expect("128 is not 0")
}

fn fp16(sample: &Sample, attention: impl Fn(&Inputs<'_, f16>) -> Array4<f32>) -> Array4<f32> {
    let [q, k, v] = sample.fp16();
    attention(&Inputs::new(&sample.problem, q.view(), k.view(), v.view()).expect("the sample's own shapes"))
}

/// FlashAttention-3 in FP8. Q, K and V are quantized separately.
fn fp8(
    sample: &Sample,
    recipe: Recipe,
    seed: u64,
    accumulation: Accumulation,
) -> Result<Array4<f32>, QuantError> {
    let transform = recipe.transform(sample.problem.head_dim(), seed);
    let (qk, v) = (recipe.preparation(transform.as_ref()), recipe.preparation(None));
    let [q, k, v] = sample.quantize(&qk, &v)?;
    let attention = Fp8Attention::new(accumulation, BLOCK);
    if !recipe.v_channels {
        return Ok(attention.forward(&sample.problem, &q, &k, &v)?.o);
    }
    let (channels, v) = sample.v_by_channels()?;
    let mut output = attention.forward(&sample.problem, &q, &k, &v)?;
    channels.restore(&sample.problem, &mut output)?;
    Ok(output.o)
}

/// The paper's baseline: per-tensor scales, f32 accumulators, intermediates in fp16.
fn standard_fp8(sample: &Sample) -> Result<Array4<f32>, QuantError> {
    let tensor = Preparation::new(Granularity::Tensor);
    let [q, k, v] = sample.quantize(&tensor, &tensor)?;
    Ok(StandardFp8.forward(&sample.problem, &q, &k, &v)?.o)
}
