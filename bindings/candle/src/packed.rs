//! Where packed sequences begin and end.

use candle_core::{DType, Device, Result, Tensor};
use fa3::problem::{Sequences, TensorName, hint};

use crate::error::Error;

/// Packed sequences: where those of Q, and those of K and V, begin and end, and how long the longest ones are.
///
/// Sequence i is rows `cu_seqlens_q[i] .. cu_seqlens_q[i + 1]` of Q and rows `cu_seqlens_k[i] .. cu_seqlens_k[i + 1]`
/// of K and V. The lists begin with 0 and never fall.
#[derive(Clone, Debug)]
pub struct Packed {
    lists: [List; 2],
}

#[derive(Clone, Debug)]
struct List {
    name: &'static str,
    tensor: TensorName,
    cu_seqlens: Tensor,
    max_seqlen: usize,
}

impl Packed {
    /// Lists (sequences + 1) of u32 or i32, on the device of the tensors, and the rows of the longest sequences.
    ///
    /// On the CPU the lists are read, and a sequence that is longer than `max_seqlen` is refused. On a GPU nobody reads
    /// them before the kernels do: lists that make no sense give wrong numbers and no error, and `max_seqlen` is a hint
    /// that decides how fast the result is computed.
    ///
    /// # Errors
    /// A list of another shape or type.
    pub fn new(
        cu_seqlens_q: &Tensor,
        cu_seqlens_k: &Tensor,
        max_seqlen_q: usize,
        max_seqlen_k: usize,
    ) -> Result<Packed> {
        let list = |name, tensor, cu_seqlens: &Tensor, max_seqlen| {
            let (shape, given) = (cu_seqlens.shape(), cu_seqlens.dtype());
            if shape.rank() != 1 {
                return Err(Error::ListShape { list: name, shape: shape.clone() }.into());
            }
            if ![DType::U32, DType::I32].contains(&given) {
                return Err(Error::ListDtype { list: name, given }.into());
            }
            Ok::<_, candle_core::Error>(List {
                name,
                tensor,
                cu_seqlens: cu_seqlens.contiguous()?,
                max_seqlen,
            })
        };
        Ok(Packed {
            lists: [
                list("cu_seqlens_q", TensorName::Q, cu_seqlens_q, max_seqlen_q)?,
                list("cu_seqlens_k", TensorName::K, cu_seqlens_k, max_seqlen_k)?,
            ],
        })
    }

    /// Checks that the lists are where Q is.
    ///
    /// # Errors
    /// [`Error::ListDevice`].
    pub(crate) fn check_device(&self, q: &Device) -> std::result::Result<(), Error> {
        for List { name, cu_seqlens, .. } in &self.lists {
            if !cu_seqlens.device().same_device(q) {
                let (given, expected) = (cu_seqlens.device().location(), q.location());
                return Err(Error::ListDevice { list: name, given, expected });
            }
        }
        Ok(())
    }

    /// The sequences of Q and those of K and V, as planning knows them, with hints of the longest ones that are
    /// rounded: calls of about such lengths share a plan. A list without entries has no sequences.
    pub(crate) fn sequences(&self) -> [Sequences; 2] {
        let [q, k] = &self.lists;
        [(q, hint::rounded_up(q.max_seqlen)), (k, hint::rounded_down(k.max_seqlen))].map(|(list, longest)| {
            Sequences::packed(list.cu_seqlens.elem_count().saturating_sub(1)).longest(longest)
        })
    }

    /// The lists, with their names.
    #[cfg(feature = "cuda")]
    pub(crate) fn tensors(&self) -> [(&'static str, &Tensor); 2] {
        self.lists.each_ref().map(|list| (list.name, &list.cu_seqlens))
    }

    /// The lists' entries, of lists on the CPU.
    ///
    /// # Errors
    /// [`Error::ListEntry`] or [`Error::MaxSeqlen`].
    pub(crate) fn read(&self) -> Result<[Vec<i32>; 2]> {
        let [q, k] = self.lists.each_ref().map(List::read);
        Ok([q?, k?])
    }
}

impl List {
    fn read(&self) -> Result<Vec<i32>> {
        let &List { name, tensor, ref cu_seqlens, max_seqlen } = self;
        let entries = if cu_seqlens.dtype() == DType::I32 {
            cu_seqlens.to_vec1::<i32>()?
        } else {
            let entry = |(index, given)| {
                i32::try_from(given).map_err(|_| Error::ListEntry { list: name, index, given })
            };
            let entries = cu_seqlens.to_vec1::<u32>()?;
            entries.into_iter().enumerate().map(entry).collect::<std::result::Result<_, _>>()?
        };
        for (index, pair) in entries.windows(2).enumerate() {
            let rows = i64::from(pair[1]) - i64::from(pair[0]);
            if usize::try_from(rows).is_ok_and(|rows| rows > max_seqlen) {
                return Err(Error::MaxSeqlen { tensor, index, rows, max: max_seqlen }.into());
            }
        }
        Ok(entries)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_of_about_such_lengths_are_planned_once() {
        let list = Tensor::new(&[0_u32, 60, 1060], &Device::Cpu).unwrap();
        let sequences = |q, k| Packed::new(&list, &list, q, k).unwrap().sequences();
        assert_eq!(sequences(1000, 1030), sequences(1020, 1100));
        assert_ne!(sequences(1000, 1030), sequences(1030, 1030));
    }
}
