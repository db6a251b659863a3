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
}

impl Layout {
    /// The dimensions in their order.
    pub(super) fn dims(self) -> &'static str {
        match self {
            Layout::Bshd => "(batch, seqlen, heads, head_dim)",
            Layout::Bhsd => "(batch, heads, seqlen, head_dim)",
            Layout::Shd => "(seqlen, heads, head_dim)",
            Layout::Hsd => "(heads, seqlen, head_dim)",
        }
    }

    fn has_batch(self) -> bool {
        matches!(self, Layout::Bshd | Layout::Bhsd)
    }

    /// A tensor of a file as (batch, seqlen, heads, head_dim), or (total, heads, head_dim) if sequences are packed.
    ///
    /// # Errors
    /// [`Error::LayoutRank`].
    pub(super) fn read(self, tensor: Tensor, packed: bool) -> Result<Tensor, Error> {
        let rank = if self.has_batch() { 4 } else { 3 };
        if tensor.shape.len() != rank {
            return Err(Error::LayoutRank {
                tensor: tensor.name,
                given: tensor.shape,
                expected: self.dims(),
            });
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

    /// Swaps rows and heads if this layout has heads before rows, which undoes itself.
    fn swap(self, tensor: Tensor) -> Tensor {
        match self {
            Layout::Bshd | Layout::Shd => tensor,
            Layout::Bhsd => tensor.with_swapped(1, 2),
            Layout::Hsd => tensor.with_swapped(0, 1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tensor::Values;
    use super::*;

    /// The number of an element is 100 · row + 10 · head + column.
    fn tensor(shape: &[usize], heads_first: bool) -> Tensor {
        let (rows, heads) = (3, 2);
        let number = |row, head, column| (100 * row + 10 * head + column) as f32;
        let values: Vec<f32> = match heads_first {
            false => (0..rows)
                .flat_map(|r| (0..heads).flat_map(move |h| (0..2).map(move |c| number(r, h, c))))
                .collect(),
            true => (0..heads)
                .flat_map(|h| (0..rows).flat_map(move |r| (0..2).map(move |c| number(r, h, c))))
                .collect(),
        };
        Tensor { name: "x".into(), shape: shape.to_vec(), values: Values::F32(values) }
    }

    #[test]
    fn layouts_are_read_and_written() {
        let cases = [
            (Layout::Bshd, tensor(&[1, 3, 2, 2], false), false),
            (Layout::Bhsd, tensor(&[1, 2, 3, 2], true), false),
            (Layout::Shd, tensor(&[3, 2, 2], false), false),
            (Layout::Hsd, tensor(&[2, 3, 2], true), false),
            (Layout::Shd, tensor(&[3, 2, 2], false), true),
            (Layout::Hsd, tensor(&[2, 3, 2], true), true),
        ];
        for (layout, given, packed) in cases {
            let expected: &[usize] = if packed { &[3, 2, 2] } else { &[1, 3, 2, 2] };
            let read = layout.read(given.clone(), packed).unwrap();
            assert_eq!(read, tensor(expected, false), "{layout:?}");
            assert_eq!(layout.write(read, packed), given, "{layout:?}");
        }
        let error = Layout::Bhsd.read(tensor(&[3, 2, 2], false), false).unwrap_err();
        assert_eq!(error.to_string(), "x has shape [3, 2, 2], expected (batch, heads, seqlen, head_dim)");
    }
}
