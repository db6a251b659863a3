//! The arguments of a call by tvm-ffi: names, each with its value behind it.

use fa3_call::{DIMS, Element, Error, Values};
use fa3_types::Dtype;

use super::abi::{Any, FLAG, INTEGER, NONE, REAL};
use super::environment::{self, Owned};
use crate::buffers::{Buffer, Buffers};
use crate::dlpack::{DlTensor, NUMBERS};
use crate::error::refused;

/// A call: its tensors, its options, and the outputs that it allocates.
pub(super) struct Given<'a> {
    pub(super) operation: &'a str,
    tensors: Vec<(&'a str, &'a DlTensor)>,
    pub(super) options: Choices<'a>,
    pub(super) wanted: Vec<&'a str>,
}

/// The options of a call, by their names.
pub(super) struct Choices<'a>(Vec<(&'a str, &'a Any)>);

impl<'a> Given<'a> {
    /// The arguments of a call.
    ///
    /// # Safety
    /// They are tvm-ffi's, and live as long as the result.
    ///
    /// # Errors
    /// A name is no text, or is there twice, or has no value.
    pub(super) unsafe fn of(arguments: &'a [Any]) -> Result<Given<'a>, Error> {
        let text = |x: &'a Any, number: usize| {
            let wrong = || refused(format!("argument {number} has {}, expected a name", x.what()));
            // SAFETY: the caller guarantees the arguments.
            unsafe { x.as_text() }?.ok_or_else(wrong)
        };
        let Some((operation, named)) = arguments.split_first() else {
            return Err(refused("there is no operation: run(operation, name, value, ...)"));
        };
        let (pairs, rest) = named.as_chunks::<2>();
        let (mut tensors, mut options, mut wanted) = (Vec::new(), Vec::new(), Vec::new());
        let mut names = Vec::with_capacity(pairs.len());
        for (i, [name, value]) in pairs.iter().enumerate() {
            let name = text(name, 2 * i + 1)?;
            if names.contains(&name) {
                return Err(refused(format!("there are two {name}")));
            }
            names.push(name);
            // SAFETY: as above.
            match unsafe { value.as_tensor() } {
                Some(tensor) => tensors.push((name, tensor)),
                None if value.kind == NONE => wanted.push(name),
                None => options.push((name, value)),
            }
        }
        if let [name] = rest {
            let name = text(name, arguments.len() - 1)?;
            return Err(refused(format!("{name} has no value: run(operation, name, value, ...)")));
        }
        Ok(Given { operation: text(operation, 0)?, tensors, options: Choices(options), wanted })
    }

    /// The device of the tensors, by DLPack's kind and number.
    ///
    /// # Errors
    /// There is no tensor.
    pub(super) fn device(&self) -> Result<(i32, i32), Error> {
        let first = self.tensors.first().ok_or_else(|| refused("there is no tensor"))?;
        Ok((first.1.device_type, first.1.device))
    }

    /// Adds the tensors to others.
    ///
    /// # Errors
    /// A tensor is on another device than the first one, or is invalid.
    pub(super) fn add_to(&self, buffers: &mut Buffers<'a>) -> Result<(), Error> {
        let expected = self.device()?;
        for &(name, tensor) in &self.tensors {
            let found = (tensor.device_type, tensor.device);
            if found != expected {
                let [found, expected] = [found, expected].map(|(kind, number)| format!("{kind}:{number}"));
                let first = self.tensors[0].0;
                let sentence = format!("{name} is on DLPack's device {found}, and {first} on {expected}");
                return Err(refused(sentence));
            }
            buffers.given.push((name, tensor.buffer(name)?));
        }
        Ok(())
    }

    fn find(&self, name: &'static str) -> Result<&'a DlTensor, Error> {
        let found = self.tensors.iter().find(|(given, _)| *given == name);
        found.map(|(_, tensor)| *tensor).ok_or(Error::NoTensor { tensor: name })
    }

    /// A new tensor for an output.
    ///
    /// # Errors
    /// It is no output of attention, a tensor on which its shape depends is missing or invalid, there is no allocator,
    /// or it reports an error.
    pub(super) fn output(&self, name: &str) -> Result<Owned, Error> {
        let like = match (self.operation, name) {
            ("forward", "o" | "lse") | ("backward", "dq") => "q",
            ("backward", "dk") => "k",
            ("backward", "dv") => "v",
            _ => return Err(refused(format!("{name} is None, and {} does not make it", self.operation))),
        };
        if !environment::has_allocator()? {
            let sentence =
                "is None, and tvm-ffi has no allocator here: give a tensor for it, or tensors of torch";
            return Err(refused(format!("{name} {sentence}")));
        }
        let given = self.find(like)?;
        let element = given.buffer(like)?.element;
        let Element::Number(mut dtype) = element else {
            return Err(Error::Dtype { given: element.to_string() });
        };
        let mut shape = given.dims()[0].to_vec();
        match name {
            "lse" => (shape, dtype) = (self.shape_of_lse()?, Dtype::F32),
            "o" => {
                shape.pop();
                shape.extend(self.find("v")?.dims()[0].last());
                dtype = dtype.default_output();
            }
            _ => {}
        }
        let kind = NUMBERS.iter().find(|(.., known)| *known == dtype).map(|&(code, bits, _)| (code, bits));
        Owned::tensor(self.device()?, kind.unwrap_or_default(), &mut shape)
    }

    /// The shape of LSE: (batch, heads, seqlen), or (heads, total) of packed sequences.
    fn shape_of_lse(&self) -> Result<Vec<i64>, Error> {
        match self.find("q")?.dims()[0] {
            &[batch, seqlen, heads, _] => Ok(vec![batch, heads, seqlen]),
            &[total, heads, _] => Ok(vec![heads, total]),
            other => Err(Error::Rank { tensor: "q", given: other.len(), expected: 4 }),
        }
    }

    /// Checks the shape of LSE, if it is an output that is given. Operations only know its size.
    ///
    /// # Errors
    /// It has another shape.
    pub(super) fn check_lse(&self) -> Result<(), Error> {
        let is_output = matches!(self.operation, "forward" | "append" | "fp8_forward");
        let Some(lse) = self.find("lse").ok().filter(|_| is_output) else { return Ok(()) };
        let (found, expected) = (lse.dims()[0], self.shape_of_lse()?);
        let wrong = || refused(format!("lse has shape {found:?}, expected {expected:?}"));
        if found == expected { Ok(()) } else { Err(wrong()) }
    }
}

impl DlTensor {
    /// The tensor as an operation takes it.
    ///
    /// # Errors
    /// It has more than [`DIMS`] dimensions.
    pub(super) fn buffer(&self, name: &str) -> Result<Buffer, Error> {
        let [extents, steps] = self.dims();
        let (rank, mut shape, mut strides) = (extents.len(), [0; DIMS], [0; DIMS]);
        if rank > DIMS {
            return Err(refused(format!("{name} has {rank} dimensions, expected up to {DIMS}")));
        }
        shape.iter_mut().zip(extents).for_each(|(to, extent)| *to = *extent as usize);
        strides.iter_mut().zip(steps).for_each(|(to, stride)| *to = *stride);
        let DlTensor { code, bits, lanes, .. } = self;
        let other = || Element::Other(format!("DLPack's type {code} of {bits} bits, {lanes} lanes"));
        let element = self.element().unwrap_or_else(other);
        let strides = (steps.len() == rank).then_some(strides);
        Ok(Buffer { element, address: self.address(), rank, shape, strides })
    }
}

impl Any {
    /// The value in words.
    fn what(&self) -> String {
        format!("tvm-ffi's type {}", self.kind)
    }
}

impl Choices<'_> {
    /// An option as a type, if it is given.
    fn get<T>(
        &self,
        name: &str,
        expected: &str,
        read: impl FnOnce(&Any) -> Option<T>,
    ) -> Result<Option<T>, Error> {
        let Some((_, value)) = self.0.iter().find(|(given, _)| *given == name) else { return Ok(None) };
        let wrong = || refused(format!("{name} has {}, expected {expected}", value.what()));
        read(value).map(Some).ok_or_else(wrong)
    }
}

impl Values for Choices<'_> {
    fn flag(&self, name: &str) -> Result<Option<bool>, Error> {
        self.get(name, "a bool", |x| (x.kind == FLAG).then_some(x.bits != 0))
    }

    fn integer(&self, name: &str) -> Result<Option<i128>, Error> {
        self.get(name, "an integer", |x| (x.kind == INTEGER).then_some(i128::from(x.bits as i64)))
    }

    fn real(&self, name: &str) -> Result<Option<f64>, Error> {
        self.get(name, "a number", |x| match x.kind {
            REAL => Some(f64::from_bits(x.bits)),
            INTEGER => Some(x.bits as i64 as f64),
            _ => None,
        })
    }

    fn integers(&self, name: &str) -> Result<Option<[i64; 3]>, Error> {
        // SAFETY: the values are tvm-ffi's.
        self.get(name, "three integers", |x| unsafe { x.as_integers() }?.try_into().ok())
    }

    fn text(&self, name: &str) -> Result<Option<String>, Error> {
        // SAFETY: the values are tvm-ffi's.
        self.get(name, "a text", |x| unsafe { x.as_text() }.ok()?.map(Into::into))
    }

    fn names(&self) -> Vec<String> {
        self.0.iter().map(|(name, _)| (*name).to_owned()).collect()
    }
}
