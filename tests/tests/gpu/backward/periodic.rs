//! A problem that repeats the rows or the keys of a small problem many times. Its gradients follow from the small
//! problem's gradients, whose error law judges all copies:
//!
//! ```text
//! m times the rows    dQ is the same for each copy       dK and dV are m times as large
//! m times the keys    dK and dV are an m-th for each     dQ stays, LSE is larger by ln m
//! ```

use fa3_cuda::host::{Device, DeviceBuffer, HostError, Stream};
use fa3_ref::law::BackwardLaw;
use fa3_ref::{Gradients, OutputGradients, Precision, oracle};
use fa3_tests::fwd::{decode, dense, encode};
use fa3_tests::{Dist, Poison, Values};
use fa3_types::{BackwardProblem, Dtype};
use ndarray::{Array3, Array4};

use super::valid;
use crate::Fallible;
use crate::bench::{Memory, part};

/// With this number of keys, P is too small for f16.
const DTYPE: Dtype = Dtype::Bf16;
const HEAD_DIM: usize = 128;

/// Factor of dO. The error law's bound covers the rounding of numbers near 0.3. Without this factor, gradients would be
/// so small that the law accepts any of them.
const DOUT: f32 = 1024.0;

const REPLAY: &str = "cargo test --release -p fa3-tests --test gpu -- --include-ignored backward::large";

/// Sizes of the small problem: batch, (rows, keys), (heads of Q, heads of K and V).
pub(super) type Sizes = (usize, (usize, usize), (usize, usize));

pub(super) struct Periodic {
    sizes: Sizes,
    /// Number of copies of the rows, and of the keys.
    copies: [usize; 2],
    /// The small problem's values.
    values: Values,
    o: Array4<f32>,
    /// LSE over all copies of the keys.
    lse: Array3<f32>,
    dlse: Array3<f32>,
    law: BackwardLaw,
}

impl Periodic {
    pub(super) fn new(sizes: Sizes, copies: [usize; 2]) -> Fallible<Periodic> {
        let small = problem(sizes, [1, 1]);
        let small = &small.forward().known()?;
        let mut values = Values::new(small, Dist::Normal, Poison::None, 1);
        values.dout *= DOUT;
        let output = oracle::forward(&values.inputs(small));
        let dlse = |(b, h, i)| DOUT * ((5 * b + 3 * h + i) as f32).cos();
        let dlse = Array3::from_shape_fn(small.lse_shape(), dlse);
        let of = OutputGradients { dout: values.dout.view(), dlse: Some(dlse.view()) };
        let law = BackwardLaw::new(&values.inputs(small), of, Precision::of_output(DTYPE))?;
        let more = (copies[1] as f64).ln();
        let (o, lse) = (output.o.mapv(|x| x as f32), output.lse.mapv(|x| (x + more) as f32));
        Ok(Periodic { sizes, copies, values, o, lse, dlse, law })
    }

    /// The problem with all copies.
    pub(super) fn problem(&self) -> BackwardProblem {
        problem(self.sizes, self.copies)
    }

    /// Copies the inputs to the device.
    pub(super) fn give(&self, device: &Device, stream: &Stream, memory: &Memory) -> Result<(), HostError> {
        let (values, (batch, ..), [rows, keys]) = (&self.values, self.sizes, self.copies);
        let tensors = [
            ("q", &values.q, rows),
            ("o", &self.o, rows),
            ("dout", &values.dout, rows),
            ("k", &values.k, keys),
            ("v", &values.v, keys),
        ];
        for (name, x, copies) in tensors {
            let (to, bits) = (memory.get(name), x.iter().map(|&x| encode(DTYPE, x)));
            let bits: Vec<u16> = bits.collect();
            for (sequence, bits) in bits.chunks_exact(bits.len() / batch).enumerate() {
                for copy in 0..copies {
                    one_of(device, to, (sequence * copies + copy, batch * copies)).upload(stream, bits)?;
                }
            }
        }
        let repeated = |x: &Array3<f32>| -> Vec<f32> {
            x.rows().into_iter().flat_map(|row| row.to_vec().repeat(rows)).collect()
        };
        for (name, x) in [("lse", &self.lse), ("dlse", &self.dlse)] {
            one_of(device, memory.get(name), (0, 1)).upload(stream, &repeated(x))?;
        }
        Ok(())
    }

    /// Judges every copy of the gradients. Returns the largest ratio of an error to its bound.
    pub(super) fn judge(&self, device: &Device, stream: &Stream, memory: &Memory) -> Fallible<f64> {
        let ([dq, dk, dv], (batch, ..)) = (["dq", "dk", "dv"].map(|name| memory.get(name)), self.sizes);
        let [rows, keys] = self.copies;
        let read = |from: &DeviceBuffer, copies: usize, copy: usize| -> Result<Vec<u16>, HostError> {
            let part = |sequence| one_of(device, from, (sequence * copies + copy, batch * copies));
            let sequences = (0..batch).map(|sequence| part(sequence).download::<u16>(stream));
            Ok(sequences.collect::<Result<Vec<_>, _>>()?.concat())
        };
        let first = [read(dq, rows, 0)?, read(dk, keys, 0)?, read(dv, keys, 0)?];
        let mut ratio = self.ratio(&first)?;
        for (index, (from, copies)) in [(dq, rows), (dk, keys), (dv, keys)].into_iter().enumerate() {
            for copy in 1..copies {
                let bits = read(from, copies, copy)?;
                // Copies with the bits of the first copy need not be judged again.
                if bits != first[index] {
                    let mut others = first.clone();
                    others[index] = bits;
                    let judged = self.ratio(&others);
                    ratio = ratio.max(judged.map_err(|fault| format!("copy {copy}: {fault}"))?);
                }
            }
        }
        Ok(ratio)
    }

    /// The largest ratio of an error to its bound, for one copy of each gradient.
    fn ratio(&self, [dq, dk, dv]: &[Vec<u16>; 3]) -> Fallible<f64> {
        let [rows, keys] = self.copies.map(|copies| copies as f32);
        let array = |bits: &[u16], factor: f32, like: &Array4<f64>| {
            let numbers = bits.iter().map(|&bits| factor * decode(DTYPE, bits)).collect();
            Array4::from_shape_vec(like.raw_dim(), numbers)
        };
        let expected = self.law.oracle();
        let gradients = Gradients {
            dq: array(dq, 1.0, &expected.dq)?,
            dk: array(dk, keys / rows, &expected.dk)?,
            dv: array(dv, keys / rows, &expected.dv)?,
            dsink: None,
            dtables: vec![],
        };
        let satisfied = self.law.check(&gradients, REPLAY)?;
        Ok(satisfied.iter().map(|part| part.ratio).fold(0.0, f64::max))
    }
}

fn problem((batch, (rows, keys), heads): Sizes, copies: [usize; 2]) -> BackwardProblem {
    valid(dense(DTYPE, batch, (copies[0] * rows, copies[1] * keys), heads, HEAD_DIM))
}

/// One of `count` equal parts of a buffer.
fn one_of(device: &Device, whole: &DeviceBuffer, (index, count): (usize, usize)) -> DeviceBuffer {
    let bytes = whole.bytes() / count;
    part(device, whole, index * bytes, bytes)
}
