//! Scales of e4m3 tensors in files.

use fa3::Quantized;
use fa3_quant::E4m3;
use fa3_types::{Dtype, QuantizeSpec, Scaling, Shape};
use ndarray::Array4;

use super::error::Error;
use super::tensor::Tensor;

/// The scales of a tensor and the means of its channels, if any.
#[derive(Debug, Default)]
pub(super) struct Scales {
    pub(super) scales: Option<Tensor>,
    pub(super) mean: Option<Tensor>,
}

/// How names of scales and means end.
const ENDINGS: [&str; 4] = ["scale", "scales", "scale_inv", "mean"];

/// Whether a tensor with this name probably holds scales or means of channels.
pub(super) fn is_named_so(name: &str) -> bool {
    ENDINGS.iter().any(|ending| name.ends_with(ending))
}

impl Scales {
    /// Whether there are scales or means.
    pub(super) fn are_there(&self) -> bool {
        self.scales.is_some() || self.mean.is_some()
    }

    /// The codes with these scales, or with scale 1 if there are none.
    pub(super) fn of(self, codes: Array4<E4m3>) -> Result<Quantized, Error> {
        let (batch, seqlen, heads, head_dim) = codes.dim();
        let Scales { scales, mean } = self;
        let shape = scales.as_ref().map_or(vec![], |scales| scales.shape.clone());
        let blocks = |rows: &usize| shape == [batch, heads, seqlen.div_ceil(*rows)];
        let scaling = match (shape.as_slice(), &mean) {
            (shape, Some(_)) => (shape == [batch, heads, head_dim]).then_some(Scaling::Channel),
            (shape, None) if shape.iter().all(|&extent| extent == 1) => Some(Scaling::Tensor),
            (&[of_batch, groups] | &[of_batch, groups, 1], None)
                if of_batch == batch && groups != 0 && heads.is_multiple_of(groups) =>
            {
                Some(Scaling::Heads { heads: heads / groups })
            }
            (_, None) => [128, 64].iter().find(|rows| blocks(rows)).map(|&rows| Scaling::Block { rows }),
        };
        let Some(scaling) = scaling else {
            let tensor = scales.or(mean).map_or_else(String::new, |tensor| tensor.name);
            let expected = format!(
                "scales of heads ({batch}, {heads} or a part of them), of blocks of 64 or 128 rows ({batch}, {heads}, \
                 blocks), one of all, or with means scales of channels ({batch}, {heads}, {head_dim})"
            );
            return Err(Error::Shape { tensor, given: shape, expected });
        };
        let mut spec = QuantizeSpec::contiguous(Dtype::Bf16, Shape { batch, seqlen, heads, head_dim });
        spec.scaling = scaling;
        let problem = spec.validate().map_err(|error| Error::compute("", error.into()))?;
        let numbers = |tensor: Option<Tensor>, shape: Option<[usize; 3]>| match (tensor, shape) {
            (Some(tensor), Some(shape)) => tensor.flat(&shape),
            _ => Ok::<Vec<f32>, Error>(vec![1.0; shape.map_or(0, |shape| shape.iter().product())]),
        };
        let (scales, mean) = (numbers(scales, problem.scales_shape())?, numbers(mean, problem.mean_shape())?);
        Ok(Quantized::new(&problem, codes.into_iter().collect(), scales, mean))
    }
}
