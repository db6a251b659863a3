//! Trains a transformer to repeat a sequence, with this crate's attention and candle's gradients: `cargo run --release
//! --example train`. On a GPU, add `--features cuda`.
//!
//! Each sample is a sequence of random tokens, followed by the same sequence. The model predicts the next token at each
//! position. It can predict the tokens of the second half if it attends to the first half. If the model does not learn
//! this, the exit code is 1.

use candle_core::{D, DType, Device, Result, Tensor};
use candle_nn::ops::rms_norm_slow;
use candle_nn::{AdamW, Embedding, Linear, Module, Optimizer, ParamsAdamW, VarBuilder, VarMap};
use candle_nn::{embedding, linear_no_bias, loss::cross_entropy};
use fa3_candle::flash_attn;

const TOKENS: usize = 16;
/// Number of tokens in each half of a sample.
const HALF: usize = 8;
const BATCH: usize = 16;
const HEADS: usize = 4;
const HEADS_KV: usize = 2;
const HEAD_DIM: usize = 16;
const WIDTH: usize = HEADS * HEAD_DIM;
const STEPS: usize = 80;

fn main() -> Result<()> {
    let device = Device::cuda_if_available(0)?;
    let variables = VarMap::new();
    let model = Model::new(VarBuilder::from_varmap(&variables, DType::F32, &device))?;
    let params = ParamsAdamW { lr: 3e-3, ..ParamsAdamW::default() };
    let mut optimizer = AdamW::new(variables.all_vars(), params)?;
    let (mut first, mut last) = (None, f32::INFINITY);
    for step in 0..STEPS {
        let tokens = sample(&device)?;
        // Rows from HALF - 1 on predict the second half.
        let logits = model.forward(&tokens.narrow(1, 0, 2 * HALF - 1)?)?.narrow(1, HALF - 1, HALF)?;
        let loss = cross_entropy(&logits.flatten_to(1)?, &tokens.narrow(1, HALF, HALF)?.flatten_all()?)?;
        optimizer.backward_step(&loss)?;
        last = loss.to_scalar()?;
        first.get_or_insert(last);
        if step % 20 == 0 {
            println!("step {step:3}  loss {last:.3}");
        }
    }
    let first = first.unwrap_or(last);
    println!("step {STEPS:3}  loss {last:.3}, of {first:.3}");
    assert!(last < 0.5 * first, "the loss did not fall");
    Ok(())
}

/// Random tokens (BATCH, 2 · HALF), in which the second half equals the first half.
fn sample(device: &Device) -> Result<Tensor> {
    let half = Tensor::rand(0f32, TOKENS as f32, (BATCH, HALF), &Device::Cpu)?;
    Tensor::cat(&[&half, &half], 1)?.to_dtype(DType::U32)?.to_device(device)
}

/// Two layers after the embeddings of tokens and of positions, and a projection to logits.
struct Model {
    tokens: Embedding,
    positions: Embedding,
    layers: Vec<Layer>,
    logits: Linear,
}

impl Model {
    fn new(variables: VarBuilder<'_>) -> Result<Model> {
        Ok(Model {
            tokens: embedding(TOKENS, WIDTH, variables.pp("tokens"))?,
            positions: embedding(2 * HALF, WIDTH, variables.pp("positions"))?,
            layers: (0..2).map(|layer| Layer::new(variables.pp(layer))).collect::<Result<_>>()?,
            logits: linear_no_bias(WIDTH, TOKENS, variables.pp("logits"))?,
        })
    }

    /// Logits (batch, rows, TOKENS) of tokens (batch, rows).
    fn forward(&self, tokens: &Tensor) -> Result<Tensor> {
        let positions = Tensor::arange(0, tokens.dim(1)? as u32, tokens.device())?;
        let x = self.tokens.forward(tokens)?.broadcast_add(&self.positions.forward(&positions)?)?;
        let x = self.layers.iter().try_fold(x, |x, layer| layer.forward(&x))?;
        self.logits.forward(&normalized(&x)?)
    }
}

/// Attention and a multilayer perceptron, each beside a residual connection.
struct Layer {
    qkv: Linear,
    o: Linear,
    up: Linear,
    down: Linear,
}

impl Layer {
    fn new(variables: VarBuilder<'_>) -> Result<Layer> {
        Ok(Layer {
            qkv: linear_no_bias(WIDTH, (HEADS + 2 * HEADS_KV) * HEAD_DIM, variables.pp("qkv"))?,
            o: linear_no_bias(WIDTH, WIDTH, variables.pp("o"))?,
            up: linear_no_bias(WIDTH, 2 * WIDTH, variables.pp("up"))?,
            down: linear_no_bias(2 * WIDTH, WIDTH, variables.pp("down"))?,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = (x + self.attention(&normalized(x)?)?)?;
        let up = self.up.forward(&normalized(&x)?)?.gelu()?;
        x + self.down.forward(&up)?
    }

    fn attention(&self, x: &Tensor) -> Result<Tensor> {
        let (batch, rows, _) = x.dims3()?;
        // On a GPU, attention takes 16-bit inputs.
        let dtype = if x.device().is_cuda() { DType::BF16 } else { DType::F32 };
        let qkv = self.qkv.forward(x)?.to_dtype(dtype)?.reshape((batch, rows, (), HEAD_DIM))?;
        // Q, K and V are views of one tensor, and are not copied.
        let q = qkv.narrow(2, 0, HEADS)?;
        let k = qkv.narrow(2, HEADS, HEADS_KV)?;
        let v = qkv.narrow(2, HEADS + HEADS_KV, HEADS_KV)?;
        let o = flash_attn(&q, &k, &v, (HEAD_DIM as f32).powf(-0.5), true)?;
        self.o.forward(&o.flatten_from(D::Minus2)?.to_dtype(DType::F32)?)
    }
}

fn normalized(x: &Tensor) -> Result<Tensor> {
    let ones = Tensor::ones(x.dim(D::Minus1)?, x.dtype(), x.device())?;
    rms_norm_slow(x, &ones, 1e-5)
}
