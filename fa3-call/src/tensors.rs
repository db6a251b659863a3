//! The tensors of a call.

use std::sync::Arc;

use fa3_types::{
    AppendRotary, Dtype, ExtraCache, OpenScore, Partials, Positions, RopeStyle, Rotary, ScoreGradients,
    ScoreTable, SequenceBase, Sequences, Shape, TensorDesc,
};

use crate::error::Error;
use crate::tensor::{Access, Tensor, in_order};

/// The access to a list of integers. Kernels read one integer at a time.
const LIST: Access = Access::Contiguous(4);
/// The access to a tensor of which kernels read 16 bytes at a time.
const DENSE: Access = Access::Contiguous(16);

/// A caller's tensors, by their names.
pub trait Given {
    /// A tensor that an operation can use in this way, if it is given. The caller refuses or copies a tensor that
    /// cannot be used. A copy lives until the launch, and later work on the stream may reuse its memory.
    ///
    /// # Errors
    /// The tensor is in another place, or its description is invalid.
    fn read(&mut self, name: &'static str, access: Access) -> Result<Option<Tensor>, Error>;

    /// The address of an output, if it is given. Its shape follows from other tensors. It is contiguous, of `dtype`.
    ///
    /// # Errors
    /// The tensor is invalid.
    fn output(&mut self, name: &'static str, dtype: Dtype) -> Result<Option<u64>, Error>;

    /// The address of a tensor that is given without a description.
    ///
    /// # Errors
    /// The address is invalid.
    fn bare(&self, _name: &'static str) -> Result<Option<u64>, Error> {
        Ok(None)
    }

    /// The first tensor whose name is not among these.
    fn other(&self, names: &[(&'static str, Option<u64>)]) -> Option<String>;
}

/// The tensors of a call. An operation takes each tensor once, by one of the methods. All of them refuse a tensor that
/// does not fit.
pub struct Tensors<'a> {
    given: &'a mut dyn Given,
    at: Vec<(&'static str, Option<u64>)>,
}

impl<'a> Tensors<'a> {
    /// A call's tensors.
    pub fn new(given: &'a mut dyn Given) -> Tensors<'a> {
        Tensors { given, at: Vec::with_capacity(8) }
    }
}

impl Tensors<'_> {
    /// Takes a tensor for an operation, if it is given.
    #[inline]
    fn take(&mut self, name: &'static str, access: Access) -> Result<Option<Tensor>, Error> {
        let tensor = self.given.read(name, access)?;
        self.at.extend(tensor.as_ref().map(|tensor| (name, Some(tensor.address()))));
        Ok(tensor)
    }

    fn get(&mut self, name: &'static str, access: Access) -> Result<Tensor, Error> {
        self.take(name, access)?.ok_or(Error::NoTensor { tensor: name })
    }

    /// Whether there is an output of `dtype` whose shape follows from other tensors.
    pub(crate) fn has_output(&mut self, name: &'static str, dtype: Dtype) -> Result<bool, Error> {
        let address = self.given.output(name, dtype)?;
        self.at.extend(address.map(|address| (name, Some(address))));
        Ok(address.is_some())
    }

    /// Whether there is a contiguous input.
    pub(crate) fn has(&mut self, name: &'static str) -> Result<bool, Error> {
        Ok(self.take(name, DENSE)?.is_some())
    }

    /// Whether there is a list with a number for each of `count` sequences.
    fn has_list(&mut self, name: &'static str, count: usize) -> Result<bool, Error> {
        let Some(list) = self.take(name, LIST)? else { return Ok(false) };
        list.check_list(list.shape() == [count], format_args!("({count},): (sequences,)"))?;
        Ok(true)
    }

    /// An input (batch, seqlen, heads, head_dim), or packed sequences without a batch.
    ///
    /// # Errors
    /// The tensor is missing, its dtype is unknown, or it has another number of dimensions.
    pub(crate) fn input(&mut self, name: &'static str) -> Result<TensorDesc, Error> {
        self.get(name, Access::Rows)?.desc()
    }

    /// As [`Tensors::input`], for an optional tensor.
    pub(crate) fn optional(&mut self, name: &'static str) -> Result<Option<TensorDesc>, Error> {
        self.take(name, Access::Rows)?.map(|x| x.desc()).transpose()
    }

    /// O as an input of the backward pass, or dO, which may be expanded. Other tensors determine its dtype and shape.
    pub(crate) fn like_o(
        &mut self,
        name: &'static str,
        o: TensorDesc,
        is_packed: bool,
    ) -> Result<TensorDesc, Error> {
        let given = self.get(name, Access::Aligned { is_apart: name == "o" })?;
        let what = if is_packed {
            ": (total_q, heads_q, head_dim_v)"
        } else {
            ": (batch, seqlen_q, heads_q, head_dim_v)"
        };
        given.check(o.dtype, o.shape.dims(), is_packed, what)?;
        given.desc()
    }

    /// Checks LSE of Q, or its gradient, if it is given.
    pub(crate) fn check_lse(&mut self, name: &'static str, q: Shape, is_packed: bool) -> Result<(), Error> {
        let Some(given) = self.take(name, DENSE)? else { return Ok(()) };
        let what = if is_packed { ": (heads_q, total_q)" } else { ": (batch, heads_q, seqlen_q)" };
        given.check(Dtype::F32, [q.batch, q.heads, q.seqlen], is_packed, what)
    }

    /// A gradient of a tensor as an output.
    pub(crate) fn gradient(
        &mut self,
        name: &'static str,
        of: TensorDesc,
        is_packed: bool,
    ) -> Result<TensorDesc, Error> {
        let given = self.get(name, Access::InPlace)?;
        given.check(of.dtype, of.shape.dims(), is_packed, "")?;
        given.desc()
    }

    /// A tensor that is written, as [`Tensors::input`] describes it.
    pub(crate) fn output(&mut self, name: &'static str) -> Result<TensorDesc, Error> {
        self.get(name, Access::InPlace)?.desc()
    }

    /// As [`Tensors::output`], for an optional tensor. If only its address is given, it is a new tensor like `default`.
    pub(crate) fn output_like(
        &mut self,
        name: &'static str,
        default: TensorDesc,
    ) -> Result<TensorDesc, Error> {
        if let Some(address) = self.given.bare(name)? {
            self.at.push((name, Some(address)));
            return Ok(default);
        }
        self.take(name, Access::InPlace)?.map_or(Ok(default), |x| x.desc())
    }

    /// A tensor (batch, heads, head_dim, keys), described as (batch, seqlen, heads, head_dim).
    pub(crate) fn transposed(&mut self, name: &'static str, seqlen: usize) -> Result<TensorDesc, Error> {
        let given = self.get(name, Access::Rows)?;
        let ([batch, heads, head_dim, _], _) = given.dims(0)?;
        Ok(TensorDesc::contiguous(given.dtype()?, Shape { batch, seqlen, heads, head_dim }))
    }

    /// LSE as an output (batch, seqlen, heads), or (seqlen, heads) for packed sequences, as a tensor with head_dim 1.
    pub(crate) fn rows_of_one(&mut self, name: &'static str) -> Result<TensorDesc, Error> {
        let given = self.get(name, Access::InPlace)?;
        let ([batch, seqlen, heads], [of_batch, of_seqlen, of_heads]) = given.dims(0)?;
        let shape = Shape { batch, seqlen, heads, head_dim: 1 };
        let strides = in_order([of_batch, of_seqlen, of_heads, 1]);
        Ok(TensorDesc { dtype: given.dtype()?, shape, strides }.canonical())
    }

    /// A tensor with the results of splits: (splits, batch, seqlen, heads, head_dim), without batch for packed
    /// sequences. LSE may have any strides. It has no dimension head_dim, and is described with head_dim 1.
    pub(crate) fn partials(&mut self, name: &'static str, is_lse: bool) -> Result<Partials, Error> {
        let given = self.get(name, if is_lse { Access::Strided } else { Access::Rows })?;
        let ([splits, batch, seqlen, heads, head_dim], [stride, strides @ ..]) = if is_lse {
            let ([splits, batch, seqlen, heads], [stride, of_batch, of_seqlen, of_heads]) = given.dims(1)?;
            ([splits, batch, seqlen, heads, 1], [stride, of_batch, of_seqlen, of_heads, 1])
        } else {
            given.dims(1)?
        };
        let shape = Shape { batch, seqlen, heads, head_dim };
        let first = TensorDesc { dtype: given.dtype()?, shape, strides: in_order(strides) };
        Ok(Partials { splits, stride, first }.canonical())
    }

    /// The extents of an optional contiguous input.
    ///
    /// # Errors
    /// The tensor has another number of dimensions.
    pub(crate) fn extents<const N: usize>(
        &mut self,
        name: &'static str,
    ) -> Result<Option<[usize; N]>, Error> {
        self.take(name, DENSE)?.map(|given| given.extents()).transpose()
    }

    /// The extents of the tables of a function of scores, in the order of its expression. Given tables are counted as
    /// in the function's text, and get the names of this order.
    ///
    /// # Errors
    /// A table is missing, or not f32.
    pub(crate) fn score_tables(&mut self, score: Option<&OpenScore>) -> Result<Vec<Arc<[usize]>>, Error> {
        let order = score.map_or(&[][..], |score| score.tables());
        let tables = order.iter().zip(ScoreTable::NAMES).map(|(&number, name)| {
            let given = ScoreTable::NAMES[usize::from(number)];
            let table = self.given.read(given, DENSE)?.ok_or(Error::NoTensor { tensor: given })?;
            self.at.push((name, Some(table.address())));
            let (found, expected) = (table.dtype()?, Dtype::F32);
            if found != expected {
                let [found, expected] = [found, expected].map(|dtype| dtype.to_string());
                return Err(Error::Tensor { tensor: given, found, expected });
            }
            Ok(table.shape().into())
        });
        tables.collect()
    }

    /// The tables of a function of scores for whose gradients there are outputs. They are counted as
    /// [`Tensors::score_tables`] counts tables.
    ///
    /// # Errors
    /// An output is invalid.
    pub(crate) fn score_gradients(&mut self, score: Option<&OpenScore>) -> Result<ScoreGradients, Error> {
        let order = score.map_or(&[][..], |score| score.tables());
        let (mut has, mut names) = (Vec::new(), Vec::new());
        for (&number, name) in order.iter().zip(ScoreTable::OF_GRADIENTS) {
            let given = ScoreTable::OF_GRADIENTS[usize::from(number)];
            let address = self.given.output(given, Dtype::F32)?;
            self.at.extend(address.map(|address| (name, Some(address))));
            has.push(address.is_some());
            names.push(given);
        }
        // The names in the text's order are known, too; each name's first address counts.
        self.at.extend(names.into_iter().map(|name| (name, None)));
        Ok(ScoreGradients::of(has))
    }

    /// The number of sequences of a list `cu_seqlens`, if it is given.
    pub(crate) fn ends(&mut self, name: &'static str) -> Result<Option<usize>, Error> {
        let Some(list) = self.take(name, LIST)? else { return Ok(None) };
        let count = match list.shape() {
            [numbers] => numbers.checked_sub(1),
            _ => None,
        };
        list.check_list(count.is_some(), format_args!("(sequences + 1,)"))?;
        Ok(count)
    }

    /// The sequences of Q, and of K and V, for tensors of these shapes, with hints of the longest sequences. `None` if
    /// all sequences are dense and all their rows are in use.
    ///
    /// # Errors
    /// A list does not fit.
    pub(crate) fn sequences(
        &mut self,
        [longest_q, longest_k]: [Option<usize>; 2],
        [q, k]: [Shape; 2],
    ) -> Result<Option<[Sequences; 2]>, Error> {
        let (packed_q, packed_k) = (self.ends("cu_seqlens_q")?, self.ends("cu_seqlens_k")?);
        if let (Some(of_q), Some(of_k)) = (packed_q, packed_k)
            && of_q != of_k
        {
            return Err(Error::Sequences { of_q, of_k });
        }
        let of_q = packed_q.map_or(Sequences::dense(q.batch, q.seqlen), Sequences::packed);
        let count = of_q.count();
        let of_k = match (packed_k, self.take("page_table", Access::Slices)?) {
            (Some(count), _) => Sequences::packed(count),
            (None, Some(table)) => {
                let is_indexed = self.has_list("cache_batch_idx", count)?;
                if is_indexed {
                    let expected = format_args!("(rows, pages), as there is cache_batch_idx");
                    table.check_list(table.shape().len() == 2, expected)?;
                } else {
                    let fits = table.shape().len() == 2 && table.shape()[0] == count;
                    table.check_list(fits, format_args!("({count}, pages): (sequences, pages)"))?;
                }
                let ([rows, pages], [stride, _]) = table.dims(0)?;
                // The stride of a single row is meaningless.
                let stride = if rows > 1 { stride as usize } else { pages };
                let paged = if is_indexed {
                    Sequences::indexed(count, [rows, pages])
                } else {
                    Sequences::paged(count, pages)
                };
                paged.table_stride(stride)
            }
            (None, None) => {
                let listed = self.listed("indices", count)?;
                listed.unwrap_or(Sequences::dense(k.batch, k.seqlen))
            }
        };
        let of_q = longest_q.map_or(of_q, |rows| of_q.longest(rows));
        let of_k = longest_k.map_or(of_k, |rows| of_k.longest(rows));
        let of_q = if self.has_list("seqused_q", count)? { of_q.used() } else { of_q };
        let of_k = if self.has_list("leftpad_k", count)? { of_k.left_padded() } else { of_k };
        let of_k = if self.has_list("seqused_k", count)? { of_k.used() } else { of_k };
        let dense = Sequences::dense;
        let are_plain = [of_q, of_k] == [dense(q.batch, q.seqlen), dense(k.batch, k.seqlen)];
        Ok((!are_plain).then_some([of_q, of_k]))
    }

    /// Sequences that list their keys, if they do.
    fn listed(&mut self, name: &'static str, count: usize) -> Result<Option<Sequences>, Error> {
        let Some(lists) = self.take(name, Access::Slices)? else { return Ok(None) };
        let fits = lists.shape().len() == 2 && lists.shape()[0] == count;
        lists.check_list(fits, format_args!("({count}, keys): (sequences, keys)"))?;
        let ([_, keys], [stride, _]) = lists.dims(0)?;
        // The stride of a single list is meaningless.
        Ok(Some(Sequences::listed(count, keys).table_stride(if count > 1 { stride as usize } else { keys })))
    }

    /// The second cache of `count` sequences that list their keys, if it is given.
    ///
    /// # Errors
    /// A tensor is missing, or a list does not fit.
    pub(crate) fn extra_cache(&mut self, count: usize) -> Result<Option<ExtraCache>, Error> {
        let Some(sequences) = self.listed("extra_indices", count)? else { return Ok(None) };
        let is_used = self.has_list("extra_seqused_k", count)?;
        let sequences = if is_used { sequences.used() } else { sequences };
        Ok(Some(ExtraCache { k: self.input("extra_k")?, v: self.input("extra_v")?, sequences }))
    }

    /// The extents and the dtype of the tables of cosines and sines. `None` without tables.
    ///
    /// # Errors
    /// The tables have other dimensions.
    fn tables(&mut self, cos: &'static str, sin: &'static str) -> Result<Option<([usize; 2], Dtype)>, Error> {
        let table = self.take(cos, DENSE)?;
        self.extents::<2>(sin)?;
        table.map(|table| Ok((table.extents()?, table.dtype()?))).transpose()
    }

    /// The rotation of N tensors, given the name of each tensor's list of positions, and its first position for the
    /// case that there is no list.
    pub(crate) fn rotary<const N: usize>(
        &mut self,
        style: RopeStyle,
        places: [(&'static str, usize); N],
    ) -> Result<Option<[Rotary; N]>, Error> {
        let mut positions = places.map(|(_, first)| Positions::From(first));
        for (positions, (listed, _)) in positions.iter_mut().zip(places) {
            if self.has(listed)? {
                *positions = Positions::Listed;
            }
        }
        let tables = self.tables("cos", "sin")?;
        Ok(tables.map(|([table_rows, pairs], _)| {
            positions.map(|positions| Rotary { style, rotary_dim: 2 * pairs, table_rows, positions })
        }))
    }

    /// The rotation of new keys and of queries, of `count` sequences.
    pub(crate) fn append_rotary(
        &mut self,
        style: RopeStyle,
        count: usize,
    ) -> Result<Option<AppendRotary>, Error> {
        let base =
            if self.has_list("rotary_seqlens", count)? { SequenceBase::Listed } else { SequenceBase::Used };
        let tables = self.tables("rotary_cos", "rotary_sin")?;
        Ok(tables.map(|([table_rows, pairs], table)| AppendRotary {
            style,
            rotary_dim: 2 * pairs,
            table,
            table_rows,
            base,
        }))
    }

    /// The addresses of the tensors, by their names.
    ///
    /// # Errors
    /// The operation does not know a tensor.
    pub fn at(self) -> Result<Vec<(&'static str, Option<u64>)>, Error> {
        match self.given.other(&self.at) {
            Some(name) => Err(Error::UnknownTensor { name }),
            None => Ok(self.at),
        }
    }
}
