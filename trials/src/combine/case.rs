//! A combine problem with its partial results and its expected results.

use fa3_cuda::kernels::{Spec, combine};
use fa3_ref::combine::Combined;
use fa3_sched::combine::Plan;
use fa3_types::{CombineProblem, CombineSpec, Dtype, Partials, Shape, TensorDesc};
use ndarray::{Array3, Array4, Array5, Axis};

use crate::fwd::Layout;
use crate::memory::{Memory, UNWRITTEN, before, bits, put, rounded};
use crate::values::Rng;
use crate::{Bits, Trial};

/// Distribution of the splits' LSEs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spread {
    /// Normal: every split contributes.
    Normal,
    /// Normal around 10,000 for some rows, and around -10,000 for others.
    Shifted,
    /// So far apart that one split dominates, and exp(LSE) of most splits overflows or underflows.
    Far,
    /// Magnitudes as large as f32 allows, of either sign.
    Huge,
    /// Equal for all splits.
    Same,
    /// Normal, with some NaN and some infinities.
    NotFinite,
}

impl Spread {
    /// Every distribution.
    pub const ALL: [Spread; 6] =
        [Spread::Normal, Spread::Shifted, Spread::Far, Spread::Huge, Spread::Same, Spread::NotFinite];
}

/// A combine problem with the seed of its inputs.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// Types of the partial results and of O.
    pub dtypes: [Dtype; 2],
    /// Number of splits.
    pub splits: usize,
    /// The shape of O.
    pub shape: Shape,
    /// Memory layouts of partial O, partial LSE, O and LSE.
    pub layouts: [Layout; 4],
    /// Whether the splits of a row are adjacent in memory.
    pub parts_inside: bool,
    /// Distribution of LSEs.
    pub spread: Spread,
    /// Whether some splits are empty, and some rows are empty in all splits. O of an empty split is NaN.
    pub empty: bool,
    /// Seed of the inputs.
    pub seed: u64,
}

impl Case {
    /// Builds the combine problem.
    ///
    /// # Panics
    /// If the case is invalid.
    pub fn problem(&self) -> CombineProblem {
        let [of_parts, of_lse_parts, of_o, of_lse] = self.layouts;
        let ([input, output], lse) = (self.dtypes, Shape { head_dim: 1, ..self.shape });
        let spec = CombineSpec::new(
            self.partials(of_parts.tensor(input, self.shape)),
            self.partials(of_lse_parts.tensor(Dtype::F32, lse)),
            of_o.tensor(output, self.shape),
            of_lse.tensor(Dtype::F32, lse),
        );
        spec.validate().unwrap_or_else(|error| panic!("{self:?}: {error}"))
    }

    /// Describes the partial results of all splits, given the layout of the first split.
    fn partials(&self, mut first: TensorDesc) -> Partials {
        if self.parts_inside {
            let strides = &mut first.strides;
            for stride in [&mut strides.batch, &mut strides.seqlen, &mut strides.heads] {
                *stride *= self.splits as i64;
            }
            return Partials { splits: self.splits, stride: first.shape.head_dim as i64, first };
        }
        // Gaps separate the splits.
        let unit = first.dtype.row_multiple();
        let stride = (first.extent().0 as usize).next_multiple_of(unit) + unit;
        Partials { splits: self.splits, stride: stride as i64, first }
    }

    /// Builds the trial of this case.
    ///
    /// # Panics
    /// If the planner refuses the case.
    pub fn trial(self) -> Trial {
        let problem = self.problem();
        let plan = Plan::new(&problem).unwrap_or_else(|error| panic!("{self:?}: {error}"));
        let program = combine::program(&plan).map(Spec::kernel);
        let (out_partial, lse_partial) = self.inputs();
        let expected = fa3_ref::combine::combine(out_partial.view(), lse_partial.view());
        let lse_partial = lse_partial.insert_axis(Axis(4));
        let before = before(&program, |buffer| match buffer.name {
            "out_partial" => Some(bytes(problem.out_partial(), &out_partial)),
            "lse_partial" => Some(bytes(problem.lse_partial(), &lse_partial)),
            _ => None,
        });
        let name = format!("{plan}, {self:?}");
        let (output, splits) = (self.dtypes[1], self.splits);
        Trial::new(name, Bits::Approximations, program, before, move |after| {
            judge(output, splits, &expected, after)
        })
    }

    /// Partial O and partial LSE.
    fn inputs(&self) -> (Array5<f32>, Array4<f32>) {
        let mut rng = Rng::new(self.seed);
        let Shape { batch, seqlen, heads, head_dim } = self.shape;
        let rows = (batch, seqlen, heads);
        let same = Array3::from_shape_simple_fn(rows, || 3.0 * rng.normal() as f32);
        let no_part = Array3::from_shape_simple_fn(rows, || rng.below(4) == 0);
        let lse_partial =
            Array4::from_shape_fn((self.splits, batch, seqlen, heads), |(_, batch, row, head)| {
                match self.empty && (no_part[[batch, row, head]] || rng.below(3) == 0) {
                    true => f32::NEG_INFINITY,
                    false => self.lse(&mut rng, same[[batch, row, head]]),
                }
            });
        let dims = (self.splits, batch, seqlen, heads, head_dim);
        let out_partial = Array5::from_shape_fn(dims, |(split, batch, row, head, _)| {
            match lse_partial[[split, batch, row, head]] == f32::NEG_INFINITY {
                true => f32::NAN,
                false => rounded(self.dtypes[0], rng.normal() as f32),
            }
        });
        (out_partial, lse_partial)
    }

    /// A random LSE. `same` is the row's LSE under [`Spread::Same`].
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

/// Bytes of the partial results.
fn bytes(partials: &Partials, x: &Array5<f32>) -> Vec<u8> {
    let (mut bytes, first) = (vec![UNWRITTEN; partials.extent_bytes().0 as usize], &partials.first);
    let stride = first.dtype.bytes() * partials.stride as usize;
    for (split, part) in x.outer_iter().enumerate() {
        put(&mut bytes[split * stride..], first, part, |x| bits(first.dtype, x));
    }
    bytes
}

/// Compares O, of this type, and LSE with the expected results for this many splits.
fn judge(
    output: Dtype,
    splits: usize,
    Combined { o, magnitude, lse }: &Combined,
    after: Memory<'_>,
) -> Result<(), String> {
    // Exponentials are off by a few ulp, and each addition by one more ulp.
    let error = f64::powi(2.0, -19) + splits as f64 * f64::powi(2.0, -23);
    let (unit, smallest) = match output {
        Dtype::F32 => (f64::powi(2.0, -24), 1e-37),
        Dtype::F16 => (f64::powi(2.0, -11), f64::powi(2.0, -25)),
        Dtype::Bf16 | Dtype::E4m3 | Dtype::Int8 => (f64::powi(2.0, -8), 1e-37),
    };
    let (given_o, given_lse) = (after.tensor("o"), after.tensor("lse"));
    for ((at, &expected), (&given, &magnitude)) in o.indexed_iter().zip(given_o.iter().zip(magnitude)) {
        let error = error * magnitude + unit * expected.abs() + smallest;
        close(f64::from(given), expected, error).map_err(|fault| format!("o{at:?} {fault}"))?;
    }
    for ((at, &expected), &given) in lse.indexed_iter().zip(&given_lse) {
        let error = error + f64::powi(2.0, -23) * expected.abs();
        close(f64::from(given), expected, error).map_err(|fault| format!("lse{at:?} {fault}"))?;
    }
    Ok(())
}

/// Whether a number is close to the expected number. NaN must match NaN, and an infinity must match itself.
fn close(given: f64, expected: f64, error: f64) -> Result<(), String> {
    let same = given == expected || given.is_nan() && expected.is_nan();
    if same || (given - expected).abs() <= error {
        return Ok(());
    }
    Err(format!("is {given:e}, not {expected:e} +- {error:e}"))
}
