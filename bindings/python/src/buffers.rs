//! Tensors that XLA or tvm-ffi passes, by their names. None is copied.

use fa3_call::{Access, At, DIMS, Element, Error, Given, Place, Tensor};
use fa3_types::Dtype;

/// The tensors of a call in a place.
pub(crate) struct Buffers<'a> {
    pub(crate) place: Place,
    pub(crate) given: Vec<(&'a str, Buffer)>,
}

/// A tensor.
pub(crate) struct Buffer {
    /// The type of elements.
    pub(crate) element: Element,
    /// The address of the first element.
    pub(crate) address: u64,
    /// Number of dimensions.
    pub(crate) rank: usize,
    /// The extents of the dimensions.
    pub(crate) shape: [usize; DIMS],
    /// The strides of the dimensions, in elements; `None` if the tensor is contiguous.
    pub(crate) strides: Option<[i64; DIMS]>,
}

impl Buffers<'_> {
    /// The sizes of all tensors in bytes.
    pub(crate) fn bytes(&self, at: &At) -> Result<Vec<(&'static str, u64)>, Error> {
        at.iter().filter_map(|(name, _)| Some(self.find(name)?.map(|x| (*name, x.bytes())))).collect()
    }

    fn find(&self, name: &'static str) -> Option<Result<Tensor, Error>> {
        let (_, buffer) = self.given.iter().find(|(given, _)| *given == name)?;
        let Buffer { element, address, rank, shape, strides } = buffer;
        let steps = (*rank, strides.unwrap_or([0; DIMS]));
        let tensor = Tensor::new(name, element.clone(), *address, (*rank, *shape), steps);
        Some(if strides.is_none() { tensor.map(Tensor::contiguous) } else { tensor })
    }
}

impl Given for Buffers<'_> {
    fn read(&mut self, name: &'static str, access: Access) -> Result<Option<Tensor>, Error> {
        let Some(tensor) = self.find(name).transpose()? else { return Ok(None) };
        tensor.check_access(access, self.place)?;
        Ok(Some(tensor))
    }

    fn output(&mut self, name: &'static str, dtype: Dtype) -> Result<Option<u64>, Error> {
        let Some(tensor) = self.read(name, Access::Contiguous(1))? else { return Ok(None) };
        tensor.check_dtype(dtype)?;
        Ok(self.given.iter().find(|(given, _)| *given == name).map(|(_, buffer)| buffer.address))
    }

    fn other(&self, names: &[(&'static str, Option<u64>)]) -> Option<String> {
        let is_known = |name: &str| names.iter().any(|(known, _)| *known == name);
        self.given.iter().map(|(name, _)| *name).find(|name| !is_known(name)).map(Into::into)
    }
}
