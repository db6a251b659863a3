//! Attention of 16-bit tensors, computed in 8 bits.

use fa3_quant::{Accumulation, Channels, Fp8Attention, Granularity, Incoherent, RopeTable};
use fa3_types::{Fp8Problem, Fp8Spec, KnownProblem, QkRotary, Scaling, SequenceRows};
use ndarray::ArrayView4;

#[cfg(feature = "cuda")]
use crate::cuda;
use crate::{Attention, Device, Error, Output, Quantize, Quantized, Scalar};

/// Rows that share a scale.
const ROWS: usize = 128;

/// An [`Attention`] call of f16 or bf16 tensors, computed in e4m3 (§3.3): a builder, which [`Attention::fp8`] makes.
///
/// ```text
/// q, k = e4m3(Q M / scales), e4m3(K M / scales)       M = diag(±1) · Hadamard, if wanted
/// v    = e4m3(V / scales)                             a scale for each 128 rows of a head
/// ```
///
/// with head dimensions that are multiples of 16 up to 256, and Q and K rotated before if wanted, or, with
/// [`Fp8::v_channels`], v = e4m3((V - means) / scales) with a mean and a scale for each channel.
///
/// ```
/// use fa3::half::bf16;
/// use fa3::ndarray::Array4;
/// use fa3::{Attention, Device};
///
/// let wave = |step: usize| {
///     Array4::from_shape_fn((1, 200, 2, 64), |(_, s, h, d)| bf16::from_f32(((s * step + 5 * h + 3 * d) as f32).sin()))
/// };
/// let [q, k, v] = [3, 5, 7].map(wave);
/// let attention = Attention::new(&q, &k, &v).causal();
/// let exact = attention.forward(&Device::Cpu)?;
/// let fp8 = attention.fp8().hadamard(1).forward(&Device::Cpu)?;
/// let error = exact.o.iter().zip(&fp8.o).map(|(x, y)| (x.to_f32() - y.to_f32()).abs()).fold(0.0, f32::max);
/// assert!(error < 0.1);
/// # Ok::<(), fa3::Error>(())
/// ```
#[derive(Clone, Debug)]
#[must_use = "nothing is computed before `forward`"]
pub struct Fp8<'a, T> {
    attention: Attention<'a, T>,
    table: Option<&'a RopeTable>,
    first_positions: [usize; 2],
    seed: Option<u64>,
    v_channels: bool,
}

impl<'a, T: Scalar<Output = T>> Fp8<'a, T> {
    pub(crate) fn new(attention: Attention<'a, T>) -> Fp8<'a, T> {
        Fp8 { attention, table: None, first_positions: [0; 2], seed: None, v_channels: false }
    }

    /// Rotates the rows of Q and K by their positions before anything else. Rows of a sequence are at positions 0, 1, …
    pub fn rotary(mut self, table: &'a RopeTable) -> Fp8<'a, T> {
        self.table = Some(table);
        self
    }

    /// Lets the rows of Q of each sequence be at positions `q`, `q + 1`, … and its keys at `k`, `k + 1`, …
    pub fn first_positions(mut self, q: usize, k: usize) -> Fp8<'a, T> {
        self.first_positions = [q, k];
        self
    }

    /// Multiplies Q and K by an orthogonal matrix with random signs before they are quantized (incoherent processing).
    /// It spreads outliers, and leaves the scores what they are.
    pub fn hadamard(mut self, seed: u64) -> Fp8<'a, T> {
        self.seed = Some(seed);
        self
    }

    /// Gives each channel of V, a column of a head, a mean and a scale, in place of a scale for each 128 keys. What the
    /// rows of V have in common is not rounded then, which O has at the end. It takes another pass over V.
    pub fn v_channels(mut self) -> Fp8<'a, T> {
        self.v_channels = true;
        self
    }

    /// Computes O and LSE. Without [`Fp8::hadamard`] there is no such matrix. The CPU emulates the tensor core's
    /// arithmetic. [`Attention::backward`] refuses the output, which is that of other tensors; an [`Output::new`] of
    /// its arrays passes. On a GPU, arrays are copied there and results back;
    /// [`cuda::Fp8Forward`](crate::cuda::Fp8Forward) is the same for tensors that are there.
    ///
    /// # Errors
    /// [`Error`] with the first thing that is wrong: also for other types than f16 and bf16, a head_dim or head_dim_v
    /// that is no multiple of 16 up to 256, and sequences that are packed or used in part.
    pub fn forward(&self, device: &Device) -> Result<Output<T>, Error> {
        let problem = self.problem()?;
        match device {
            Device::Cpu => self.on_cpu(&problem.codes().known()?),
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => Ok(cuda::fp8(device, &problem, self.attention.tensors(), self.table)?),
        }
    }

    /// The problem, validated, of contiguous tensors: the strides of the views are not part of it.
    ///
    /// # Errors
    /// [`Error`] with the first thing that is wrong.
    pub fn problem(&self) -> Result<Fp8Problem, Error> {
        let mut spec = Fp8Spec::new(self.attention.spec()?);
        spec.v_channels = self.v_channels;
        let [q_position, k_position] = self.first_positions;
        spec.rotary = self.table.map(|table| QkRotary {
            style: table.style(),
            rotary_dim: table.rotary_dim(),
            table_rows: table.positions(),
            q_position,
            k_position,
        });
        if spec.rotary.is_none() && self.first_positions != [0; 2] {
            return Err(Error::PositionsWithoutRotary);
        }
        let problem = spec.clone().validate()?;
        let Some(seed) = self.seed else { return Ok(problem) };
        // Only now is head_dim known to be one that signs may be drawn for.
        spec.signs = Incoherent::new(problem.attention().head_dim(), seed).signs();
        Ok(spec.validate()?)
    }

    fn on_cpu(&self, problem: &KnownProblem) -> Result<Output<T>, Error> {
        let [q, k, v] = self.attention.tensors();
        let [q_position, k_position] = self.first_positions;
        let transformed = |x: ArrayView4<'a, T>, first| {
            let quantize = Quantize::new(x);
            let quantize = match self.table {
                Some(table) => quantize.rotary(table).first_position(first),
                None => quantize,
            };
            match self.seed {
                Some(seed) => quantize.hadamard(seed),
                None => quantize,
            }
        };
        let v = Quantize::new(v);
        let v = if self.v_channels { v.scaling(Scaling::Channel) } else { v };
        let [q, k, v] = [transformed(q, q_position), transformed(k, k_position), v]
            .map(|quantize| quantize.run(&Device::Cpu));
        Ok(emulated(problem, &[q?, k?, v?]))
    }
}

/// The emulator's results.
fn emulated<T: Scalar>(problem: &KnownProblem, qkv: &[Quantized; 3]) -> Output<T> {
    let [q, k, v] = qkv.each_ref().map(|x| {
        let (batch, seqlen, _, _) = x.codes.dim();
        let rows = SequenceRows::dense(batch, seqlen);
        let (granularity, scales) = match x.mean {
            None => (Granularity::Block { rows: ROWS }, x.scales.iter().copied().collect()),
            // Scales of channels are O's.
            Some(_) => (Granularity::Tensor, vec![1.0]),
        };
        let quantized = fa3_quant::Quantized::new(x.codes.clone(), &rows, granularity, scales);
        quantized.expect("it was quantized so")
    });
    let attention = Fp8Attention::new(Accumulation::TwoLevel { keys: ROWS }, ROWS);
    let mut output = attention.forward(problem, &q, &k, &v).expect("a valid problem can be computed");
    let [.., v] = qkv;
    if let Some(mean) = &v.mean {
        let channels = Channels::new(mean.clone(), v.scales.clone()).expect("they were made so");
        channels.restore(problem, &mut output).expect("they are the channels of V");
    }
    Output::of(problem, output.o.mapv(T::from_f32), output.lse)
}

#[cfg(test)]
mod tests {
    use fa3_quant::{Rope, RopeStyle};
    use half::bf16;
    use ndarray::Array4;

    use super::*;

    fn wave(dims: (usize, usize, usize, usize), step: usize) -> Array4<bf16> {
        Array4::from_shape_fn(dims, |(b, s, h, d)| {
            bf16::from_f32(((7 * b + step * s + 5 * h + 3 * d) as f32).sin())
        })
    }

    #[test]
    fn eight_bits_are_near_sixteen() {
        let (q, k) = (wave((2, 300, 4, 64), 3), wave((2, 260, 2, 64), 5));
        let v = wave((2, 260, 2, 32), 11);
        let attention = Attention::new(q.view(), k.view(), v.view()).causal().softcap(20.0);
        let exact = attention.forward(&Device::Cpu).unwrap();
        let norm = |x: &Array4<f32>| x.iter().map(|x| x * x).sum::<f32>().sqrt();
        let of = |output: &Output<bf16>| output.o.mapv(|x| x.to_f32());
        let plain = attention.clone().fp8().forward(&Device::Cpu).unwrap();
        let mixed = attention.clone().fp8().hadamard(3).forward(&Device::Cpu).unwrap();
        for fp8 in [&plain, &mixed] {
            let error = norm(&(of(fp8) - of(&exact))) / norm(&of(&exact));
            assert!((0.001..0.1).contains(&error), "{error}");
            assert!((&fp8.lse - &exact.lse).iter().all(|error| error.abs() < 0.1 || error.is_nan()));
        }
        assert_ne!(plain.o, mixed.o);
        assert_ne!(mixed, attention.fp8().hadamard(4).forward(&Device::Cpu).unwrap());
    }

    /// V around 4: a scale for each block leaves 2 bits for what differs, that of a channel about its mean 4.
    #[test]
    fn channels_of_v_keep_what_it_has_in_common() {
        let (q, k) = (wave((2, 300, 4, 64), 3), wave((2, 260, 2, 64), 5));
        let v = wave((2, 260, 2, 32), 11).mapv(|x| bf16::from_f32(4.0 + x.to_f32()));
        let attention = Attention::new(q.view(), k.view(), v.view()).causal();
        let exact = attention.forward(&Device::Cpu).unwrap();
        let error = |fp8: Fp8<'_, bf16>| {
            let output = fp8.forward(&Device::Cpu).unwrap();
            let squares = output.o.iter().zip(&exact.o).map(|(x, y)| (x.to_f32() - y.to_f32()).powi(2));
            (squares.sum::<f32>() / exact.o.len() as f32).sqrt()
        };
        let [blocks, channels] = [error(attention.clone().fp8()), error(attention.fp8().v_channels())];
        assert!(channels < blocks / 2.0, "{channels} {blocks}");
    }

    /// Scores do not change where all positions are moved, and O changes where those of K alone are.
    #[test]
    fn rows_are_rotated_by_their_positions() {
        let (q, kv) = (wave((1, 100, 2, 64), 3), wave((1, 120, 2, 64), 5));
        let table = Rope::new(RopeStyle::HalfSplit, 64, 10_000.0).unwrap().table(200);
        let fp8 = Attention::new(q.view(), kv.view(), kv.view()).fp8();
        let of = |fp8: Fp8<'_, bf16>| fp8.forward(&Device::Cpu).unwrap().o.mapv(|x| x.to_f32());
        let norm = |x: &Array4<f32>| x.iter().map(|x| x * x).sum::<f32>().sqrt();
        let rotated = of(fp8.clone().rotary(&table).first_positions(20, 0));
        let moved = of(fp8.clone().rotary(&table).first_positions(60, 40));
        let apart = of(fp8.clone().rotary(&table));
        let [moved, apart] = [moved, apart].map(|o| norm(&(o - &rotated)) / norm(&rotated));
        assert!(moved < 0.05 && apart > 3.0 * moved, "{moved} {apart}");
        let error = fp8.first_positions(1, 0).problem().unwrap_err();
        assert_eq!(error, Error::PositionsWithoutRotary);
    }

    #[test]
    fn what_has_no_codes_is_refused() {
        let x = wave((1, 8, 1, 24), 3);
        let error = Attention::new(x.view(), x.view(), x.view()).fp8().forward(&Device::Cpu).unwrap_err();
        assert_eq!(error.to_string(), "q: x has head_dim 24, not a multiple of 16 up to 256");
        let x = Array4::<f32>::zeros((1, 8, 1, 32));
        let error = Attention::new(x.view(), x.view(), x.view()).fp8().forward(&Device::Cpu).unwrap_err();
        assert_eq!(error.to_string(), "q: x is f32, expected f16 or bf16");
        let x = wave((1, 8, 1, 32), 3);
        let attention = Attention::new(&x, &x, &x);
        for used in [attention.clone().seqused_q(&[5]), attention.clone().seqused_k(&[5])] {
            let error = used.fp8().forward(&Device::Cpu).unwrap_err();
            assert!(matches!(error, Error::Fp8(fa3_types::Fp8ProblemError::Used { .. })), "{error}");
        }
        attention.seqused_k(&[8]).fp8().forward(&Device::Cpu).unwrap();
        let packed = Attention::new(x.view(), x.view(), x.view()).packed(&[0, 8], &[0, 8]);
        let error = packed.fp8().forward(&Device::Cpu).unwrap_err();
        assert!(error.to_string().contains("dense batches, not e4m3 of packed sequences"), "{error}");
    }

    #[test]
    fn tensors_without_elements_are_legal() {
        for (seqlen_q, seqlen_k) in [(0, 4), (4, 0)] {
            let (q, kv) = (wave((2, seqlen_q, 2, 32), 3), wave((2, seqlen_k, 1, 32), 5));
            let output = Attention::new(q.view(), kv.view(), kv.view()).fp8().forward(&Device::Cpu).unwrap();
            assert!(output.o.iter().all(|o| o.to_f32() == 0.0) && output.o.dim() == q.dim());
        }
    }
}
