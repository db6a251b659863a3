//! Lists that give the rows of a call's sequences.

use candle_core::{DType, Device, Result, Tensor};
use fa3::ndarray::Array2;
use fa3::problem::{self, Sequences, TensorName, hint};

use crate::error::Error;

/// The lists of a call. If there are none, tensors are dense and all their rows are in use.
#[derive(Clone, Debug, Default)]
pub(crate) struct Rows {
    /// cu_seqlens of Q, if Q is packed.
    pub(crate) cu_seqlens_q: Option<List>,
    /// cu_seqlens of K and V, if they are packed.
    pub(crate) cu_seqlens_k: Option<List>,
    /// The number of rows in use of each sequence of K and V, if they are a cache.
    pub(crate) seqused_k: Option<List>,
    /// The pages of each sequence, if the cache is in pages.
    pub(crate) page_table: Option<List>,
    /// The rows of the longest sequence of Q and of K, for packed sequences and for a cache.
    pub(crate) longest: [usize; 2],
}

impl Rows {
    /// Whether K and V are a cache.
    pub(crate) fn is_cached(&self) -> bool {
        self.seqused_k.is_some()
    }

    /// The lists, by the kernels' names.
    pub(crate) fn lists(&self) -> impl Iterator<Item = (&'static str, &List)> {
        let lists = [
            ("cu_seqlens_q", &self.cu_seqlens_q),
            ("cu_seqlens_k", &self.cu_seqlens_k),
            ("seqused_k", &self.seqused_k),
            ("page_table", &self.page_table),
        ];
        lists.into_iter().filter_map(|(name, list)| Some((name, list.as_ref()?)))
    }

    /// Checks that the lists are on the device of Q.
    ///
    /// # Errors
    /// [`Error::ListDevice`].
    pub(crate) fn check_device(&self, q: &Device) -> std::result::Result<(), Error> {
        self.lists().try_for_each(|(_, list)| check_device(list.name, &list.numbers, q))
    }

    /// The sequences of Q, and of K and V, for planning. The lengths of the longest sequences are rounded, so that
    /// calls of similar lengths share a plan. A `cu_seqlens` without entries has no sequences.
    pub(crate) fn sequences(&self, q: problem::Shape, k: problem::Shape) -> [Sequences; 2] {
        let packed = |list: &List| Sequences::packed(list.numbers.elem_count().saturating_sub(1));
        let dense = |x: problem::Shape| Sequences::dense(x.batch, x.seqlen);
        let of_q = self.cu_seqlens_q.as_ref().map_or(dense(q), packed);
        let of_k = match (&self.cu_seqlens_k, &self.seqused_k, &self.page_table) {
            (Some(list), ..) => packed(list),
            (None, Some(used), Some(table)) => {
                Sequences::paged(used.numbers.elem_count(), table.numbers.dims()[1]).used()
            }
            (None, Some(used), None) => Sequences::dense(used.numbers.elem_count(), k.seqlen).used(),
            (None, None, _) => dense(k),
        };
        let [longest_q, longest_k] = self.longest;
        [of_q.longest(hint::rounded_up(longest_q)), of_k.longest(hint::rounded_down(longest_k))]
    }

    /// The numbers of lists on the CPU.
    ///
    /// # Errors
    /// [`Error::ListEntry`] or [`Error::MaxSeqlen`].
    pub(crate) fn read(&self) -> Result<Numbers> {
        let read = |list: &Option<List>| list.as_ref().map(List::read).transpose();
        let [max_q, max_k] = self.longest;
        let table = self.page_table.as_ref().map(|list| {
            let numbers = Array2::from_shape_vec(list.numbers.dims2()?, list.read()?);
            Ok::<_, candle_core::Error>(numbers.expect("a table has a number in each place"))
        });
        let numbers = Numbers {
            cu_seqlens_q: read(&self.cu_seqlens_q)?,
            cu_seqlens_k: read(&self.cu_seqlens_k)?,
            seqused_k: read(&self.seqused_k)?,
            page_table: table.transpose()?,
        };
        let lens = |ends: &Option<Vec<i32>>| ends.as_deref().map(lengths).unwrap_or_default();
        check_longest(TensorName::Q, &lens(&numbers.cu_seqlens_q), max_q)?;
        check_longest(TensorName::K, &lens(&numbers.cu_seqlens_k), max_k)?;
        check_longest(TensorName::K, numbers.seqused_k.as_deref().unwrap_or_default(), max_k)?;
        Ok(numbers)
    }
}

/// The numbers of a call's lists, on the host.
pub(crate) struct Numbers {
    pub(crate) cu_seqlens_q: Option<Vec<i32>>,
    pub(crate) cu_seqlens_k: Option<Vec<i32>>,
    pub(crate) seqused_k: Option<Vec<i32>>,
    pub(crate) page_table: Option<Array2<i32>>,
}

/// A list of numbers, u32 or i32, contiguous.
#[derive(Clone, Debug)]
pub(crate) struct List {
    name: &'static str,
    pub(crate) numbers: Tensor,
}

impl List {
    /// Makes a list. `fits` says whether it has the expected shape.
    ///
    /// # Errors
    /// The list has another shape or type.
    pub(crate) fn new(
        name: &'static str,
        numbers: &Tensor,
        fits: bool,
        expected: impl Into<String>,
    ) -> Result<List> {
        if !fits {
            let (shape, expected) = (numbers.shape().clone(), expected.into());
            return Err(Error::ListShape { list: name, shape, expected }.into());
        }
        if ![DType::U32, DType::I32].contains(&numbers.dtype()) {
            return Err(Error::ListDtype { list: name, given: numbers.dtype() }.into());
        }
        Ok(List { name, numbers: numbers.contiguous()? })
    }

    /// A list `cu_seqlens` (sequences + 1): the first row of each sequence, and one past the last row.
    ///
    /// # Errors
    /// The errors of [`List::new`].
    pub(crate) fn ends(name: &'static str, numbers: &Tensor) -> Result<List> {
        List::new(name, numbers, numbers.rank() == 1, "(sequences + 1)")
    }

    /// The number of rows of each sequence, u32 or i32 (sequences), computed from `cu_seqlens` on its device. The host
    /// reads the list, unless it is u32 on a GPU.
    ///
    /// # Errors
    /// [`Error::ListEntry`], or the driver's errors.
    pub(crate) fn lengths(&self) -> Result<Tensor> {
        let ends = &self.numbers;
        let count = ends.elem_count().saturating_sub(1);
        if ends.device().is_cuda() && ends.dtype() == DType::U32 && count > 0 {
            return ends.narrow(0, 1, count)? - ends.narrow(0, 0, count)?;
        }
        Tensor::from_vec(lengths(&self.read()?), count, ends.device())
    }

    fn read(&self) -> Result<Vec<i32>> {
        let (list, numbers) = (self.name, self.numbers.flatten_all()?);
        if numbers.dtype() == DType::I32 {
            return numbers.to_vec1();
        }
        let entry =
            |(index, given)| i32::try_from(given).map_err(|_| Error::ListEntry { list, index, given }.into());
        numbers.to_vec1::<u32>()?.into_iter().enumerate().map(entry).collect()
    }
}

/// Checks that a tensor of a call is on the device of Q.
///
/// # Errors
/// [`Error::ListDevice`].
pub(crate) fn check_device(list: &'static str, x: &Tensor, q: &Device) -> std::result::Result<(), Error> {
    if x.device().same_device(q) {
        return Ok(());
    }
    Err(Error::ListDevice { list, given: x.device().location(), expected: q.location() })
}

/// The lengths of the sequences: the differences of successive entries, negative where the list decreases.
fn lengths(ends: &[i32]) -> Vec<i32> {
    ends.windows(2).map(|pair| pair[1].saturating_sub(pair[0])).collect()
}

fn check_longest(tensor: TensorName, lengths: &[i32], max: usize) -> Result<()> {
    let is_longer = |rows: &i32| usize::try_from(*rows).is_ok_and(|rows| rows > max);
    match lengths.iter().enumerate().find(|(_, rows)| is_longer(rows)) {
        Some((index, &rows)) => Err(Error::MaxSeqlen { tensor, index, rows, max }.into()),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Cached, Packed};

    #[test]
    fn calls_of_about_equal_lengths_are_planned_once() {
        let list = Tensor::new(&[0_u32, 60, 1060], &Device::Cpu).unwrap();
        let shape = problem::Shape { batch: 1, seqlen: 2000, heads: 1, head_dim: 8 };
        let packed = |q, k| Packed::new(&list, &list, q, k).unwrap().0.sequences(shape, shape);
        assert_eq!(packed(1000, 1030), packed(1020, 1100));
        assert_ne!(packed(1000, 1030), packed(1030, 1030));
        let table = Tensor::zeros((3, 70), DType::U32, &Device::Cpu).unwrap();
        let cached = |longest| {
            let cached = Cached::new(&list, longest).unwrap().page_table(&table).unwrap();
            cached.0.sequences(shape, shape)
        };
        assert_eq!(cached(1030), cached(1100));
        assert_ne!(cached(1030), cached(1000));
    }

    #[test]
    fn lengths_are_those_of_the_list() {
        for dtype in [DType::U32, DType::I32] {
            let list = Tensor::new(&[0_u32, 60, 60, 1060], &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
            let lengths = List::ends("cu_seqlens_k", &list).unwrap().lengths().unwrap();
            assert_eq!(lengths.to_vec1::<i32>().unwrap(), [60, 0, 1000]);
        }
    }
}
