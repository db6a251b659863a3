//! Partial results of a problem, and what must come out.

use fa3_cuda::kernels::{Spec, combine};
use fa3_ir::BufferId;
use fa3_ref::combine::Combined;
use fa3_sched::combine::Plan;
use fa3_types::{CombineProblem, CombineSpec, Dtype, Partials, Shape, TensorDesc};
use ndarray::{Array4, Array5};

use crate::family::{Bits, Trial};
use crate::fwd::{Layout, decode, encode, rounded};
use crate::values::Rng;

/// A byte that nobody has written.
const UNWRITTEN: u8 = 0xFF;

/// The distribution of LSEs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spread {
    /// Normal: all parts count.
    Normal,
    /// Normal, around 10,000 and around -10,000.
    Shifted,
    /// So far apart that one part counts, and exp(LSE) of most is no number.
    Far,
    /// As large as f32 goes, of either sign.
    Huge,
    /// The same for all parts.
    Same,
    /// Normal with NaN and infinities among them.
    NotFinite,
}

/// A merge, its seed among it.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// Types of parts and of O.
    pub dtypes: [Dtype; 2],
    /// Parts.
    pub splits: usize,
    /// The shape of O.
    pub shape: Shape,
    /// How parts, their LSEs, O and LSE lie in memory.
    pub layouts: [Layout; 4],
    /// Whether all parts of a row lie behind one another.
    pub parts_inside: bool,
    /// The distribution of LSEs.
    pub spread: Spread,
    /// Whether some parts are empty, and all parts of some rows. Their O is NaN.
    pub empty: bool,
    /// The seed of numbers.
    pub seed: u64,
}

/// Inputs of a case.
struct Inputs {
    out_partial: Array5<f32>,
    lse_partial: Array4<f32>,
}

impl Case {
    /// The problem.
    ///
    /// # Panics
    /// If it makes no sense.
    pub fn problem(&self) -> CombineProblem {
        let [of_parts, of_lse_parts, of_o, of_lse] = self.layouts;
        let ([input, output], lse) = (self.dtypes, Shape { head_dim: 1, ..self.shape });
        let spec = CombineSpec::new(
            self.partials(strided(input, self.shape, of_parts)),
            self.partials(strided(Dtype::F32, lse, of_lse_parts)),
            strided(output, self.shape, of_o),
            strided(Dtype::F32, lse, of_lse),
        );
        spec.validate().unwrap_or_else(|error| panic!("{self:?}: {error}"))
    }

    /// Parts of which the first one would lie so if it were alone.
    fn partials(&self, mut first: TensorDesc) -> Partials {
        if self.parts_inside {
            let strides = &mut first.strides;
            for stride in [&mut strides.batch, &mut strides.seqlen, &mut strides.heads] {
                *stride *= self.splits as i64;
            }
            return Partials { splits: self.splits, stride: first.shape.head_dim as i64, first };
        }
        // Something of others lies between parts.
        let unit = first.dtype.row_multiple();
        let stride = (first.extent().0 as usize).next_multiple_of(unit) + unit;
        Partials { splits: self.splits, stride: stride as i64, first }
    }

    /// As a trial.
    ///
    /// # Panics
    /// If it cannot be planned.
    pub fn trial(self) -> Trial {
        let problem = self.problem();
        let plan = Plan::new(&problem).unwrap_or_else(|error| panic!("{self:?}: {error}"));
        let program = combine::program(&plan).map(Spec::kernel);
        let inputs = self.inputs();
        let before = program.buffers.iter().map(|buffer| match buffer.name {
            "out_partial" => bytes(problem.out_partial(), &inputs.out_partial),
            "lse_partial" => {
                let shape = Shape { head_dim: 1, ..self.shape }.dims();
                let with_rows = inputs.lse_partial.to_shape((self.splits, shape[0], shape[1], shape[2], 1));
                bytes(problem.lse_partial(), &with_rows.expect("an element a row").to_owned())
            }
            _ => vec![UNWRITTEN; buffer.bytes()],
        });
        let before = before.collect();
        let [o, lse] = ["o", "lse"].map(|name| program.find(name).expect("it is an output"));
        let expected = fa3_ref::combine::combine(inputs.out_partial.view(), inputs.lse_partial.view());
        Trial {
            name: format!("{plan}, {self:?}"),
            program,
            before,
            bits: Bits::Approximations,
            judge: Box::new(move |_, after| {
                let [BufferId(o), BufferId(lse)] = [o, lse];
                judge(&problem, &expected, [&after[o], &after[lse]])
            }),
        }
    }

    fn inputs(&self) -> Inputs {
        let mut rng = Rng::new(self.seed);
        let Shape { batch, seqlen, heads, head_dim } = self.shape;
        let rows = (batch, seqlen, heads);
        let same = Array4::from_shape_simple_fn((1, rows.0, rows.1, rows.2), || 3.0 * rng.normal() as f32);
        let no_part = Array4::from_shape_simple_fn((1, rows.0, rows.1, rows.2), || rng.below(4) == 0);
        let lse_partial =
            Array4::from_shape_fn((self.splits, rows.0, rows.1, rows.2), |(_, batch, row, head)| {
                match self.empty && (no_part[[0, batch, row, head]] || rng.below(3) == 0) {
                    true => f32::NEG_INFINITY,
                    false => self.lse(&mut rng, same[[0, batch, row, head]]),
                }
            });
        let dims = (self.splits, rows.0, rows.1, rows.2, head_dim);
        let out_partial = Array5::from_shape_fn(dims, |(split, batch, row, head, _)| {
            match lse_partial[[split, batch, row, head]] == f32::NEG_INFINITY {
                true => f32::NAN,
                false => round(self.dtypes[0], rng.normal() as f32),
            }
        });
        Inputs { out_partial, lse_partial }
    }

    /// An LSE of a row that has `same` for all parts, where they have the same.
    fn lse(&self, rng: &mut Rng, same: f32) -> f32 {
        let normal = 3.0 * rng.normal() as f32;
        match self.spread {
            Spread::Normal => normal,
            Spread::Shifted => normal + 1e4_f32.copysign(same),
            Spread::Far => 300.0 * normal,
            Spread::Huge => (1e38 * normal).clamp(-3e38, 3e38),
            Spread::Same => same,
            Spread::NotFinite => match rng.below(20) {
                0 => f32::NAN,
                1 => f32::INFINITY,
                _ => normal,
            },
        }
    }
}

/// A tensor in this layout.
fn strided(dtype: Dtype, shape: Shape, layout: Layout) -> TensorDesc {
    let mut desc = TensorDesc::contiguous(dtype, shape);
    desc.strides = layout.strides(&desc);
    desc
}

/// The nearest number of a type.
fn round(dtype: Dtype, x: f32) -> f32 {
    if dtype == Dtype::F32 { x } else { rounded(dtype, x) }
}

/// The bytes of parts.
fn bytes(partials: &Partials, x: &Array5<f32>) -> Vec<u8> {
    let (mut bytes, dtype) = (vec![UNWRITTEN; partials.extent_bytes().0 as usize], partials.first.dtype);
    for ((split, batch, row, head, element), &x) in x.indexed_iter() {
        let at = dtype.bytes() * partials.offset(split, [batch, row, head, element]).0 as usize;
        match dtype {
            Dtype::F32 => bytes[at..][..4].copy_from_slice(&x.to_le_bytes()),
            Dtype::F16 | Dtype::Bf16 | Dtype::E4m3 => {
                bytes[at..][..2].copy_from_slice(&encode(dtype, x).to_le_bytes())
            }
        }
    }
    bytes
}

/// Compares O and LSE with what is expected, and gaps with what was there.
fn judge(
    problem: &CombineProblem,
    Combined { o, magnitude, lse }: &Combined,
    [o_bytes, lse_bytes]: [&[u8]; 2],
) -> Result<(), String> {
    // Exponentials are off by some units in the last place, and each addition by one more.
    let error = f64::powi(2.0, -19) + problem.splits() as f64 * f64::powi(2.0, -23);
    let (unit, smallest) = match problem.o().dtype {
        Dtype::F32 => (f64::powi(2.0, -24), 1e-37),
        Dtype::F16 => (f64::powi(2.0, -11), f64::powi(2.0, -25)),
        Dtype::Bf16 | Dtype::E4m3 => (f64::powi(2.0, -8), 1e-37),
    };
    let (mut gap_o, mut gap_lse) = (vec![true; o_bytes.len()], vec![true; lse_bytes.len()]);
    for ((batch, row, head, element), &expected) in o.indexed_iter() {
        let given = taken(problem.o(), [batch, row, head, element], o_bytes, &mut gap_o);
        let error = error * magnitude[[batch, row, head, element]] + unit * expected.abs() + smallest;
        close(f64::from(given), expected, error)
            .map_err(|fault| format!("o[{batch}, {row}, {head}, {element}] {fault}"))?;
    }
    for ((batch, row, head), &expected) in lse.indexed_iter() {
        let given = taken(problem.lse(), [batch, row, head, 0], lse_bytes, &mut gap_lse);
        close(f64::from(given), expected, error + f64::powi(2.0, -23) * expected.abs())
            .map_err(|fault| format!("lse[{batch}, {row}, {head}] {fault}"))?;
    }
    for (name, gap, bytes) in [("o", gap_o, o_bytes), ("lse", gap_lse, lse_bytes)] {
        if let Some(at) = (0..bytes.len()).find(|&at| gap[at] && bytes[at] != UNWRITTEN) {
            return Err(format!("byte {at} of {name} is none of its own, and was written"));
        }
    }
    Ok(())
}

/// An element, whose bytes are no gap.
fn taken(tensor: &TensorDesc, [batch, row, head, element]: [usize; 4], from: &[u8], gap: &mut [bool]) -> f32 {
    let width = tensor.dtype.bytes();
    let at = width * tensor.offset(batch, row, head, element).0 as usize;
    gap[at..][..width].fill(false);
    match from[at..][..width] {
        [a, b, c, d] => f32::from_le_bytes([a, b, c, d]),
        [a, b] => decode(tensor.dtype, u16::from_le_bytes([a, b])),
        _ => unreachable!("elements have 2 or 4 bytes"),
    }
}

/// Whether a number is close to another; NaN is only to NaN, and an infinity to itself.
fn close(given: f64, expected: f64, error: f64) -> Result<(), String> {
    let same = given == expected || given.is_nan() && expected.is_nan();
    if same || (given - expected).abs() <= error {
        return Ok(());
    }
    Err(format!("is {given:e}, not {expected:e} +- {error:e}"))
}
