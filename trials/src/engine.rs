//! Engines: the implementations of attention.

mod cpu;
mod fp8;
mod joined;
mod rearranged;
mod sim;
mod standard;
mod tiled;

use std::error::Error;
use std::fmt;

use fa3_ref::tiled::Algorithm;
use fa3_ref::{Forward, Gradients};
use fa3_types::Dtype;

use crate::{Case, Values};

pub use fp8::emulated;
pub(crate) use fp8::{codes as fp8_codes, completed};

/// One way to compute attention.
///
/// An engine computes a case or says why not; it never computes something else than it was asked for. Whatever it
/// needs beyond the case (a device, a simulator's limits) it looks for itself, and skips if it is not there.
pub trait Engine: Sync {
    /// Name in reports.
    fn name(&self) -> String;

    /// The arithmetic by which its results for a case are judged.
    fn arithmetic(&self, _case: &Case) -> Arithmetic {
        Arithmetic::OfInputs
    }

    /// O and LSE.
    ///
    /// # Errors
    /// Why the engine does not compute this case.
    fn forward(&self, case: &Case, values: &Values) -> Answer<Forward<f32>>;

    /// dQ, dK and dV for the output gradient `values.dout`.
    ///
    /// # Errors
    /// Why the engine does not compute this case.
    fn backward(&self, _case: &Case, _values: &Values) -> Answer<Gradients<f32>> {
        Err(Skip::NoBackward.into())
    }

    /// An engine that computes any case with the tile that this one has for `case`, if its tiles depend on the case.
    /// Other tiles round P of other keys together, so that only results of one tile have the same bits.
    fn with_tile_of(&self, _case: &Case) -> Option<Box<dyn Engine>> {
        None
    }
}

/// A result, or why there is none.
pub type Answer<T> = Result<T, NoAnswer>;

/// Why there is no result.
#[derive(Debug)]
pub enum NoAnswer {
    /// The engine does not compute such cases.
    Skipped(Skip),
    /// The engine should have: every case is a valid problem.
    Failed(Box<dyn Error>),
}

impl From<Skip> for NoAnswer {
    fn from(skip: Skip) -> NoAnswer {
        NoAnswer::Skipped(skip)
    }
}

/// The roundings of an engine, and so the baseline that it is judged against.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Arithmetic {
    /// Products exact to f32; P and results rounded no more than to the output's dtype.
    OfInputs,
    /// Scores as well rounded to the output's dtype: the product, the scaled and the capped one.
    RoundedScores,
    /// The tensor core's 8-bit arithmetic: short sums, P in e4m3.
    Fp8,
    /// The arithmetic of [`Arithmetic::Fp8`], with row sums of the rounded P, so that LSE is off by what rounding adds
    /// up to.
    Fp8RoundedSums,
}

impl Arithmetic {
    /// The arithmetic of the forward kernels.
    pub fn of_kernels(dtype: Dtype) -> Arithmetic {
        match dtype {
            Dtype::E4m3 => Arithmetic::Fp8RoundedSums,
            Dtype::F32 | Dtype::F16 | Dtype::Bf16 => Arithmetic::OfInputs,
        }
    }
}

/// Why an engine does not compute a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Skip {
    /// The engine has no backward pass.
    NoBackward,
    /// The engine takes other dtypes.
    Dtype(Dtype),
    /// [`Case::hides_a_poisoned_value`].
    PoisonedValue,
    /// The engine's interface packs Q and K or neither.
    PackedAndDense,
    /// The engine takes dense batches of sequences of one length.
    Sequences,
    /// The engine takes rows of a multiple of 16 bytes.
    Rows,
    /// The engine takes smaller head dimensions.
    HeadDim {
        /// Head dimension of Q and K.
        head_dim: usize,
        /// Head dimension of V and O.
        head_dim_v: usize,
    },
    /// The engine takes no `qv`, or not with these head dimensions.
    Latent {
        /// Head dimension of Q and K.
        head_dim: usize,
        /// Head dimension of V, O and `qv`.
        head_dim_v: usize,
    },
    /// The engine is too slow for it.
    Size {
        /// Multiplications and additions.
        macs: u64,
        /// The most of them.
        limit: u64,
    },
}

impl fmt::Display for Skip {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Skip::NoBackward => f.write_str("it has no backward pass"),
            Skip::Dtype(dtype) => write!(f, "it does not take {dtype}"),
            Skip::PoisonedValue => {
                f.write_str("it multiplies whole blocks of V, NaN in hidden rows included")
            }
            Skip::PackedAndDense => f.write_str("it takes Q and K packed, or neither"),
            Skip::Sequences => f.write_str("it takes dense batches of sequences of one length, used in full"),
            Skip::Rows => f.write_str("it takes rows of a multiple of 16 bytes"),
            Skip::HeadDim { head_dim, head_dim_v } => {
                write!(f, "it does not take head_dim {head_dim} with head_dim_v {head_dim_v}")
            }
            Skip::Latent { head_dim, head_dim_v } => {
                write!(f, "it does not take qv with head_dim {head_dim} and head_dim_v {head_dim_v}")
            }
            Skip::Size { macs, limit } => {
                write!(f, "it would take long over {macs} multiplications and additions, more than {limit}")
            }
        }
    }
}

/// Every engine there is.
pub fn engines() -> Vec<Box<dyn Engine>> {
    let mut engines: Vec<Box<dyn Engine>> = vec![
        Box::new(joined::Joined(rearranged::Rearranged)),
        Box::new(joined::Joined(standard::Standard)),
        Box::new(cpu::Cpu),
        Box::new(fp8::Fp8 { key_block: 128 }),
        Box::new(fp8::Fp8 { key_block: 64 }),
        Box::new(sim::Sim { tile: None }),
    ];
    for algorithm in Algorithm::ALL {
        // The kernels' usual tile, and one that divides nothing.
        for (rows, keys) in [(128, 128), (48, 40)] {
            engines.push(Box::new(joined::Joined(tiled::Tiled::new(algorithm, rows, keys))));
        }
    }
    engines
}
