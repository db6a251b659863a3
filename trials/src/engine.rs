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
/// An engine computes exactly the given case or says why it does not. It checks itself for everything else that it
/// needs (a device, a simulator's limits), and skips the case if that is missing.
pub trait Engine: Sync {
    /// Name in reports.
    fn name(&self) -> String;

    /// The arithmetic that decides how results of this case are judged.
    fn arithmetic(&self, _case: &Case) -> Arithmetic {
        Arithmetic::OfInputs
    }

    /// Computes O and LSE.
    ///
    /// # Errors
    /// The reason why the engine does not compute this case.
    fn forward(&self, case: &Case, values: &Values) -> Answer<Forward<f32>>;

    /// Computes dQ, dK and dV for the output gradient `values.dout`.
    ///
    /// # Errors
    /// The reason why the engine does not compute this case.
    fn backward(&self, _case: &Case, _values: &Values) -> Answer<Gradients<f32>> {
        Err(Skip::NoBackward.into())
    }

    /// An engine that always uses the tile that this engine chooses for `case`; `None` if its tile does not depend on
    /// the case. A tile decides which keys' P are rounded together, so only results of equal tiles have equal bits.
    fn with_tile_of(&self, _case: &Case) -> Option<Box<dyn Engine>> {
        None
    }
}

/// A result, or the reason for its absence.
pub type Answer<T> = Result<T, NoAnswer>;

/// Reason for the absence of a result.
#[derive(Debug)]
pub enum NoAnswer {
    /// The engine does not support the case.
    Skipped(Skip),
    /// The engine failed on a case that it should compute.
    Failed(Box<dyn Error>),
}

impl From<Skip> for NoAnswer {
    fn from(skip: Skip) -> NoAnswer {
        NoAnswer::Skipped(skip)
    }
}

/// The roundings of an engine. They select the baseline of its judge.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Arithmetic {
    /// Products are exact to f32. P and results are rounded only to the output's dtype.
    OfInputs,
    /// Like `OfInputs`, but scores are rounded to the output's dtype after the product, after the scaling and after the
    /// softcap.
    RoundedScores,
    /// FP8 arithmetic of the tensor core: limited accumulation and P in e4m3.
    Fp8,
    /// Like [`Arithmetic::Fp8`], but row sums add the rounded P. The sum of P's rounding errors is an error of LSE.
    Fp8RoundedSums,
}

impl Arithmetic {
    /// The arithmetic of the forward kernels.
    pub fn of_kernels(dtype: Dtype) -> Arithmetic {
        match dtype {
            Dtype::E4m3 => Arithmetic::Fp8RoundedSums,
            Dtype::F32 | Dtype::F16 | Dtype::Bf16 | Dtype::Int8 => Arithmetic::OfInputs,
        }
    }
}

/// The reason why an engine does not compute a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Skip {
    /// The engine has no backward pass.
    NoBackward,
    /// The engine takes other dtypes.
    Dtype(Dtype),
    /// A NaN in V lies in a row that some query does not see (see [`Case::hides_a_poisoned_value`]).
    PoisonedValue,
    /// The engine needs Q and K both packed or both dense.
    PackedAndDense,
    /// The engine needs dense batches of sequences of equal length.
    Sequences,
    /// The engine needs rows of a multiple of 16 bytes.
    Rows,
    /// The engine supports only smaller head dimensions.
    HeadDim {
        /// Head dimension of Q and K.
        head_dim: usize,
        /// Head dimension of V and O.
        head_dim_v: usize,
    },
    /// The engine does not support `qv`, or not with these head dimensions.
    Latent {
        /// Head dimension of Q and K.
        head_dim: usize,
        /// Head dimension of V, O and `qv`.
        head_dim_v: usize,
    },
    /// The case is too large for the engine.
    Size {
        /// Multiply-adds of the case.
        macs: u64,
        /// The engine's limit.
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

/// Every engine.
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
        // The kernels' usual tile, and a tile whose sizes do not divide 128.
        for (rows, keys) in [(128, 128), (48, 40)] {
            engines.push(Box::new(joined::Joined(tiled::Tiled::new(algorithm, rows, keys))));
        }
    }
    engines
}
