//! The features that split-KV kernels compute.

use fa3_types::{Feature, Known, Problem};

/// The features that split-KV kernels compute. They dequantize e4m3 to 16 bits.
const KNOWN: Known = Known::new(
    "the split-KV forward kernels",
    &[
        Feature::Window,
        Feature::Chunks,
        Feature::Intervals,
        Feature::Tree,
        Feature::SoftCap,
        Feature::Score,
        Feature::Sinks,
        Feature::Qv,
        Feature::E4m3,
        Feature::E4m3Keys,
        Feature::Int8Keys,
        Feature::TokenScales,
        Feature::Packed,
        Feature::Used,
        Feature::Pages,
        Feature::Index,
        Feature::Leftpad,
        Feature::LseForm,
        Feature::MaxLogits,
    ],
);

/// The features that they compute over lists of keys.
const LISTED: Known = Known::new(
    "the forward kernels of listed keys",
    &[
        Feature::SoftCap,
        Feature::Sinks,
        Feature::Qv,
        Feature::Used,
        Feature::Lists,
        Feature::Extra,
        Feature::LseForm,
        Feature::MaxLogits,
    ],
);

/// The features that they compute over lists of rows with their own scales.
const SCALED: Known = Known::new(
    "the forward kernels of listed rows with their own scales",
    &[
        Feature::SoftCap,
        Feature::Sinks,
        Feature::Qv,
        Feature::RowScales,
        Feature::Used,
        Feature::Lists,
        Feature::LseForm,
        Feature::MaxLogits,
    ],
);

/// The features that the kernels of such a problem compute.
pub(super) fn known(problem: &Problem) -> Known {
    match (problem.seqs_k().list(), problem.v_scales()) {
        (Some(_), Some(_)) => SCALED,
        (Some(_), None) => LISTED,
        (None, _) => KNOWN,
    }
}
