//! The order of a tensor's dimensions in a file.

use clap::ValueEnum;

use super::error::Error;
use super::tensor::Tensor;

/// A hint at the most common other layout.
pub(super) const HINT: &str = "if heads come before rows, --layout bhsd says so";

/// Whether Q and K have fewer rows than heads, which suggests that their heads come before rows.
pub(super) fn may_be_other(q: &[usize], k: &[usize]) -> bool {
    [q, k].iter().all(|shape| matches!(**shape, [_, rows, heads, _] if 0 < rows && rows < heads))
}

/// The order of dimensions given on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Layout {
    /// (batch, seqlen, heads, head_dim)
    Bshd,
    /// (batch, heads, seqlen, head_dim), the order in torch's scaled_dot_product_attention
    Bhsd,
    /// (seqlen, heads, head_dim): one sequence, or packed sequences
    Shd,
    /// (heads, seqlen, head_dim): one sequence, or packed sequences
    Hsd,
    /// (batch, seqlen, heads * head_dim), as a model's projections have it, or (total, heads * head_dim) if sequences
    /// are packed; with --heads or --head-dim
    Fused,
}

/// How the columns of a fused row are cut into heads.
#[derive(Clone, Copy, Debug)]
pub(super) enum Columns {
    /// This many heads of Q. Heads of K have the head_dim that follows.
    Heads(usize),
    /// Heads of this head_dim.
    HeadDim(usize),
}

impl Columns {
    /// How the command line cuts the columns of `layout`, if they are fused.
    pub(super) fn of(
        layout: Option<Layout>,
        heads: Option<usize>,
        head_dim: Option<usize>,
    ) -> Result<Option<Columns>, Error> {
        match (layout == Some(Layout::Fused), heads, head_dim) {
            (true, None, None) => Err(Error::FusedHeads),
            (false, Some(_), _) => Err(Error::NotFused { option: "--heads" }),
            (false, _, Some(_)) => Err(Error::NotFused { option: "--head-dim" }),
            (_, heads, head_dim) => Ok(heads.map(Columns::Heads).or(head_dim.map(Columns::HeadDim))),
        }
    }

    /// The numbers of heads of Q, and of K and V.
    pub(super) fn heads(self, q: &Tensor, k: &Tensor) -> Result<[usize; 2], Error> {
        let head_dim = match self {
            Columns::Heads(heads) => divide(q, heads, "heads")?,
            Columns::HeadDim(head_dim) => head_dim,
        };
        Ok([divide(q, head_dim, "head_dim")?, divide(k, head_dim, "head_dim")?])
    }
}

/// The columns of a fused tensor divided by a number of heads or by a head_dim.
fn divide(tensor: &Tensor, by: usize, what: &'static str) -> Result<usize, Error> {
    let columns = tensor.shape.last().copied().unwrap_or(0);
    match columns.checked_rem(by) {
        Some(0) => Ok(columns / by),
        _ => Err(Error::Columns { tensor: tensor.name.clone(), columns, by, what }),
    }
}

impl Layout {
    /// The dimensions in their order, and their number.
    fn dims(self, packed: bool) -> (&'static str, usize) {
        match self {
            Layout::Bshd => ("(batch, seqlen, heads, head_dim)", 4),
            Layout::Bhsd => ("(batch, heads, seqlen, head_dim)", 4),
            Layout::Shd => ("(seqlen, heads, head_dim)", 3),
            Layout::Hsd => ("(heads, seqlen, head_dim)", 3),
            Layout::Fused if packed => ("(total, heads * head_dim)", 2),
            Layout::Fused => ("(batch, seqlen, heads * head_dim)", 3),
        }
    }

    fn has_batch(self) -> bool {
        matches!(self, Layout::Bshd | Layout::Bhsd | Layout::Fused)
    }

    /// A tensor of a file as (batch, seqlen, heads, head_dim), or (total, heads, head_dim) if sequences are packed.
    /// Fused columns are cut into `heads`.
    pub(super) fn read(self, tensor: Tensor, packed: bool, heads: Option<usize>) -> Result<Tensor, Error> {
        let (dims, rank) = self.dims(packed);
        if tensor.shape.len() != rank {
            return Err(Error::shape(&tensor, dims));
        }
        if let Some(heads) = heads {
            let head_dim = divide(&tensor, heads, "heads")?;
            let mut tensor = tensor;
            tensor.shape.splice(rank - 1.., [heads, head_dim]);
            return Ok(tensor);
        }
        let mut tensor = self.swap(tensor);
        if !packed && !self.has_batch() {
            tensor.shape.insert(0, 1);
        }
        Ok(tensor)
    }

    /// A result in the layout of the inputs.
    pub(super) fn write(self, mut tensor: Tensor, packed: bool) -> Tensor {
        if !packed && !self.has_batch() {
            tensor = tensor.without_batch();
        }
        self.swap(tensor)
    }

    /// Swaps rows and heads if this layout has heads before rows; a second swap undoes the first. In the layout
    /// `Fused`, which only results have, makes one dimension of heads and head_dim.
    fn swap(self, tensor: Tensor) -> Tensor {
        match self {
            Layout::Bshd | Layout::Shd => tensor,
            Layout::Bhsd => tensor.permuted(&[0, 2, 1, 3]),
            Layout::Hsd => tensor.permuted(&[1, 0, 2]),
            Layout::Fused => tensor.with_fused_columns(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::Array;

    /// A tensor with elements 100 · row + 10 · head + column.
    fn tensor(shape: &[usize], heads_first: bool) -> Tensor {
        let x =
            Array::from_shape_fn((3, 2, 2), |(row, head, column)| (100 * row + 10 * head + column) as f32);
        let x = if heads_first { x.permuted_axes([1, 0, 2]) } else { x };
        Tensor { shape: shape.to_vec(), ..Tensor::new("x", x) }
    }

    #[test]
    fn layouts_are_read_and_written() {
        let cases = [
            (Layout::Bshd, tensor(&[1, 3, 2, 2], false), false, None),
            (Layout::Bhsd, tensor(&[1, 2, 3, 2], true), false, None),
            (Layout::Shd, tensor(&[3, 2, 2], false), false, None),
            (Layout::Hsd, tensor(&[2, 3, 2], true), false, None),
            (Layout::Shd, tensor(&[3, 2, 2], false), true, None),
            (Layout::Hsd, tensor(&[2, 3, 2], true), true, None),
            (Layout::Fused, tensor(&[1, 3, 4], false), false, Some(2)),
            (Layout::Fused, tensor(&[3, 4], false), true, Some(2)),
        ];
        for (layout, given, packed, heads) in cases {
            let expected: &[usize] = if packed { &[3, 2, 2] } else { &[1, 3, 2, 2] };
            let read = layout.read(given.clone(), packed, heads).unwrap();
            assert_eq!(read, tensor(expected, false), "{layout:?}");
            assert_eq!(layout.write(read, packed), given, "{layout:?}");
        }
        let error = Layout::Bhsd.read(tensor(&[3, 2, 2], false), false, None).unwrap_err();
        assert_eq!(error.to_string(), "x has shape [3, 2, 2], expected (batch, heads, seqlen, head_dim)");
    }
}
