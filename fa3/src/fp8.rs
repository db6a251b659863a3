//! Attention of 16-bit tensors, computed in 8 bits.

use fa3_quant::{Accumulation, Channels, Fp8Attention, Granularity, Incoherent, RopeTable, add_sinks};
use fa3_types::{Fp8Problem, Fp8Spec, KnownProblem, QkRotary, Scaling, SequenceRows};
use ndarray::ArrayView4;

#[cfg(feature = "cuda")]
use crate::cuda;
use crate::quantize::positions;
use crate::{Attention, Device, Error, Output, Quantize, Quantized, Scalar};

/// Number of rows that share a scale.
const ROWS: usize = 128;

/// An [`Attention`] call of f16 or bf16 tensors, computed in e4m3 (§3.3 of the paper). It is a builder, which
/// [`Attention::fp8`] makes.
///
/// ```text
/// q, k = e4m3(Q M / scales), e4m3(K M / scales)       M = diag(±1) · Hadamard, if wanted
/// v    = e4m3(V / scales)                             a scale for each 128 rows of a head
/// ```
///
/// Head dimensions are multiples of 16 up to 256. Q and K may be rotated first. With [`Fp8::v_channels`], v = e4m3((V -
/// means) / scales) with a mean and a scale for each channel.
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
    q_positions: Option<&'a [i32]>,
    k_positions: Option<&'a [i32]>,
    seed: Option<u64>,
    v_channels: bool,
}

impl<'a, T: Scalar<Output = T>> Fp8<'a, T> {
    pub(crate) fn new(attention: Attention<'a, T>) -> Fp8<'a, T> {
        Fp8 {
            attention,
            table: None,
            first_positions: [0; 2],
            q_positions: None,
            k_positions: None,
            seed: None,
            v_channels: false,
        }
    }

    fa3_types::setters! {
        /// Rotates the rows of Q and K by their positions before anything else. Rows of a sequence have positions 0, 1,
        /// …
        rotary(table: &'a RopeTable) { table: Some(table) }

        /// Sets the positions of each sequence: rows of Q have `q`, `q + 1`, … and its keys `k`, `k + 1`, …
        first_positions(q: usize, k: usize) { first_positions: [q, k] }

        /// Sets the position of each row of Q, (batch, seqlen_q), row by row. A row whose position is outside of the
        /// table is NaN. This list excludes a first position of Q other than 0.
        q_positions(positions: &'a [i32]) { q_positions: Some(positions) }

        /// Sets the position of each key, (batch, seqlen_k), as [`Fp8::q_positions`] does for Q. This list excludes a
        /// first position of K other than 0.
        k_positions(positions: &'a [i32]) { k_positions: Some(positions) }

        /// Multiplies Q and K by an orthogonal matrix with random signs before they are quantized (incoherent
        /// processing). This spreads outliers, and preserves the scores.
        hadamard(seed: u64) { seed: Some(seed) }

        /// Gives each channel of V, a column of a head, a mean and a scale, in place of a scale for each 128 keys. The
        /// common part of the rows of V is then not rounded; O gets it at the end. This takes another pass over V.
        v_channels() { v_channels: true }
    }

    /// Computes O and LSE. [`Fp8::hadamard`] is off by default. The CPU emulates the tensor core's arithmetic.
    /// [`Attention::backward`] refuses the output, which belongs to the quantized tensors; it accepts an
    /// [`Output::new`] of the same arrays. On a GPU, arrays are copied to it and results back;
    /// [`cuda::Fp8Forward`](crate::cuda::Fp8Forward) takes tensors in its memory.
    ///
    /// # Errors
    /// [`Error`] with the first violation. It refuses types other than f16 and bf16, a head_dim or head_dim_v that is
    /// not a multiple of 16 up to 256, sequences with `seqused`, and scales of channels with packed sequences.
    pub fn forward(&self, device: &Device) -> Result<Output<T>, Error> {
        let problem = self.problem()?;
        let [rows_q, rows_k] = self.attention.rows()?;
        let codes = KnownProblem::new(problem.codes().clone(), rows_q, rows_k)?;
        match device {
            Device::Cpu => self.on_cpu(&codes),
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => {
                let (qkv, sinks) = (self.attention.tensors(), self.attention.sinks());
                Ok(cuda::fp8(device, (&problem, &codes), qkv, sinks, self.table, self.listed())?)
            }
        }
    }

    /// The validated problem, of contiguous tensors: the strides of the views are not part of it.
    ///
    /// # Errors
    /// [`Error`] with the first violation.
    pub fn problem(&self) -> Result<Fp8Problem, Error> {
        let mut spec = Fp8Spec::new(self.attention.spec()?);
        spec.v_channels = self.v_channels;
        spec.rotary = self.rotary_spec()?;
        let problem = spec.clone().validate()?;
        let Some(seed) = self.seed else { return Ok(problem) };
        // Signs are drawn only after head_dim has been validated.
        spec.signs = Incoherent::new(problem.attention().head_dim(), seed).signs();
        Ok(spec.validate()?)
    }

    /// The rotation, if there is a table.
    fn rotary_spec(&self) -> Result<Option<QkRotary>, Error> {
        let ([q, k, _], [listed_q, listed_k]) = (self.attention.tensors(), self.listed());
        let [first_q, first_k] = self.first_positions.map(|first| Some(first).filter(|first| *first != 0));
        let (q_positions, k_positions) =
            (positions(&q, first_q, listed_q)?, positions(&k, first_k, listed_k)?);
        let Some(table) = self.table else {
            let nowhere = self.first_positions == [0; 2] && self.listed() == [None; 2];
            return if nowhere { Ok(None) } else { Err(Error::PositionsWithoutRotary) };
        };
        let (style, rotary_dim, table_rows) = (table.style(), table.rotary_dim(), table.positions());
        Ok(Some(QkRotary { style, rotary_dim, table_rows, q_positions, k_positions }))
    }

    /// The listed positions of Q and of K.
    fn listed(&self) -> [Option<&'a [i32]>; 2] {
        [self.q_positions, self.k_positions]
    }

    fn on_cpu(&self, problem: &KnownProblem) -> Result<Output<T>, Error> {
        let [q, k, v] = self.attention.tensors();
        let transformed = |x: ArrayView4<'a, T>, index: usize| {
            let quantize = Quantize::new(x);
            let quantize = match (self.table, self.listed()[index]) {
                (Some(table), Some(each)) => quantize.rotary(table).positions(each),
                (Some(table), None) => quantize.rotary(table).first_position(self.first_positions[index]),
                (None, _) => quantize,
            };
            match self.seed {
                Some(seed) => quantize.hadamard(seed),
                None => quantize,
            }
        };
        let v = Quantize::new(v);
        let v = if self.v_channels { v.scaling(Scaling::Channel) } else { v };
        let (ends_q, ends_k) = self.attention.cu_seqlens().unzip();
        let [q, k, v] = [(transformed(q, 0), ends_q), (transformed(k, 1), ends_k), (v, ends_k)]
            .map(|(quantize, ends)| ends.map_or(quantize.clone(), |ends| quantize.packed(ends)))
            .map(|quantize| quantize.run(&Device::Cpu));
        let mut output = emulated(problem, &[q?, k?, v?]);
        if let Some(sinks) = self.attention.sinks() {
            add_sinks(problem, sinks, &mut output).expect("every query head has one");
        }
        Ok(Output::of(problem, output.o.mapv(T::from_f32), output.lse))
    }
}

/// The emulator's results, without sinks.
fn emulated(problem: &KnownProblem, qkv: &[Quantized; 3]) -> fa3_quant::Output {
    let [q, k, v] = qkv.each_ref().map(|x| {
        let (batch, seqlen, _, _) = x.codes.dim();
        let (codes, dense) = (x.codes.clone(), SequenceRows::dense(batch, seqlen));
        let rows = x.packed.as_ref().unwrap_or(&dense);
        let quantized = match x.mean {
            None => {
                let scales: Vec<f32> = x.scales.iter().copied().collect();
                fa3_quant::Quantized::of_blocks(codes, rows, ROWS, &scales)
            }
            // Scales of channels are applied to O, not to codes.
            Some(_) => fa3_quant::Quantized::new(codes, rows, Granularity::Tensor, vec![1.0]),
        };
        quantized.expect("it was quantized so")
    });
    let attention = Fp8Attention::new(Accumulation::TwoLevel { keys: ROWS }, ROWS);
    let mut output = attention.forward(problem, &q, &k, &v).expect("a valid problem can be computed");
    let [.., v] = qkv;
    if let Some(mean) = &v.mean {
        let channels = Channels::new(mean.clone(), v.scales.clone()).expect("they were made so");
        channels.restore(problem, &mut output).expect("they are the channels of V");
    }
    output
}
