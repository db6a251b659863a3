//! Memory for a call's tensors.

use super::DeviceBuffer;
use super::context::Context;
use super::placement::{Interface, PlacementError};

/// The tensors of a call by name, each in a buffer. A tensor begins at the buffer's first byte, unless an offset is
/// given. Each operation lists its tensors; an optional tensor is left out, or given as `None`.
///
/// ```no_run
/// use fa3_cuda::host::{DeviceBuffer, Forward, OperationError, Stream, Tensors, Workspace};
///
/// fn attend(
///     forward: &Forward,
///     stream: &Stream,
///     [q, k, v]: [&DeviceBuffer; 3],
///     (o, lse): (&mut DeviceBuffer, Option<&mut DeviceBuffer>),
///     workspace: &mut Workspace,
/// ) -> Result<(), OperationError> {
///     let tensors = Tensors::new([("q", q), ("k", k), ("v", v)], [("o", o)]).output("lse", lse);
///     forward.run(stream, tensors, workspace)
/// }
/// ```
#[derive(Debug, Default)]
pub struct Tensors<'a>(Vec<Given<'a>>);

#[derive(Debug)]
struct Given<'a> {
    tensor: &'static str,
    buffer: &'a DeviceBuffer,
    /// Byte offset of the tensor in the buffer.
    from: usize,
    is_writable: bool,
}

impl<'a> Tensors<'a> {
    /// Makes a set of inputs and outputs.
    pub fn new<const INPUTS: usize, const OUTPUTS: usize>(
        inputs: [(&'static str, &'a DeviceBuffer); INPUTS],
        outputs: [(&'static str, &'a mut DeviceBuffer); OUTPUTS],
    ) -> Tensors<'a> {
        let tensors = inputs.into_iter().fold(Tensors::default(), |all, (name, x)| all.input(name, x));
        outputs.into_iter().fold(tensors, |all, (name, x)| all.output(name, x))
    }

    /// Adds an input.
    #[must_use]
    pub fn input(mut self, tensor: &'static str, buffer: impl Into<Option<&'a DeviceBuffer>>) -> Tensors<'a> {
        self.0.extend(buffer.into().map(|buffer| Given { tensor, buffer, from: 0, is_writable: false }));
        self
    }

    /// Adds an input at this byte offset of the buffer: several inputs may be views of one buffer.
    #[must_use]
    pub fn input_from(mut self, tensor: &'static str, buffer: &'a DeviceBuffer, from: usize) -> Tensors<'a> {
        self.0.push(Given { tensor, buffer, from, is_writable: false });
        self
    }

    /// Adds an output.
    #[must_use]
    pub fn output(
        mut self,
        tensor: &'static str,
        buffer: impl Into<Option<&'a mut DeviceBuffer>>,
    ) -> Tensors<'a> {
        self.0.extend(buffer.into().map(|buffer| Given { tensor, buffer, from: 0, is_writable: true }));
        self
    }

    /// Adds an output, or a tensor that is both read and written, at this byte offset of the buffer.
    #[must_use]
    pub fn output_from(self, tensor: &'static str, buffer: &'a mut DeviceBuffer, from: usize) -> Tensors<'a> {
        self.all_from(buffer, [(tensor, from)])
    }

    /// Adds tensors that are read or written, each at its byte offset of one buffer, such as K and V of a cache.
    /// Outputs must not overlap any other tensor.
    #[must_use]
    pub fn all_from<const COUNT: usize>(
        mut self,
        buffer: &'a mut DeviceBuffer,
        tensors: [(&'static str, usize); COUNT],
    ) -> Tensors<'a> {
        let buffer = &*buffer;
        self.0.extend(tensors.map(|(tensor, from)| Given { tensor, buffer, from, is_writable: true }));
        self
    }

    /// The tensors' addresses.
    pub(super) fn addresses(&self) -> impl Iterator<Item = (&'static str, Option<u64>)> {
        // The sum may wrap only for tensors that `check` refuses, or that have no bytes.
        self.0
            .iter()
            .map(|given| (given.tensor, Some(given.buffer.address().wrapping_add(given.from as u64))))
    }

    /// Checks each buffer: that it belongs to the device with the context `own`, is as large as its tensor, and is
    /// writable if the tensor is an output.
    ///
    /// # Errors
    /// The first buffer that fails a check, or whose tensor is unknown.
    pub(super) fn check(&self, own: &Context, interface: &Interface) -> Result<(), PlacementError> {
        for &Given { tensor, buffer, from, is_writable } in &self.0 {
            let (_, place) = interface.find(tensor)?;
            let (given, needed) = (buffer.bytes().saturating_sub(from) as u64, place.bytes);
            if !buffer.context().is(own) {
                return Err(PlacementError::OtherDevice { given: tensor });
            }
            if given < needed {
                return Err(PlacementError::BufferSize { tensor, given, needed });
            }
            if place.role.is_written() && !is_writable {
                return Err(PlacementError::ReadOnly { tensor });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::mem::{ManuallyDrop, forget};
    use std::sync::Arc;

    use fa3_ir::{BufferRole, Elem, Program};

    use super::*;
    use crate::kernels::Spec;

    /// Buffers of contexts that no driver knows, which must not be dropped.
    #[test]
    fn buffers_are_of_the_device_large_enough_and_writable() {
        let mut program = Program::<Spec>::new();
        program.buffer("q", Elem::F16, &[8], BufferRole::Input);
        program.buffer("o", Elem::F16, &[8], BufferRole::Output);
        let interface = Interface::of(&program);
        let [here, there] = [0x10, 0x20].map(|raw| Arc::new(Context::unknown(raw)));
        [&here, &there].into_iter().for_each(|context| forget(Arc::clone(context)));
        let buffer = |context: &Arc<Context>, bytes| {
            ManuallyDrop::new(DeviceBuffer::unowned(Arc::clone(context), 0x1000, bytes))
        };
        let (q, mut o, mut small, elsewhere) =
            (buffer(&here, 16), buffer(&here, 17), buffer(&here, 15), buffer(&there, 16));
        let check = |tensors: Tensors<'_>| tensors.check(&here, &interface);
        assert_eq!(check(Tensors::new([("q", &*q)], [("o", &mut *o)])), Ok(()));
        let refused = check(Tensors::new([("q", &*elsewhere)], []));
        assert_eq!(refused, Err(PlacementError::OtherDevice { given: "q" }));
        let refused = check(Tensors::new([], [("o", &mut *small)]));
        assert_eq!(refused, Err(PlacementError::BufferSize { tensor: "o", given: 15, needed: 16 }));
        let of_q = |from| Tensors::default().input_from("q", &o, from);
        let addresses: Vec<_> = of_q(1).addresses().collect();
        assert_eq!((check(of_q(1)), addresses), (Ok(()), vec![("q", Some(0x1001))]));
        for (from, given) in [(2, 15), (17, 0), (usize::MAX, 0)] {
            let refused = PlacementError::BufferSize { tensor: "q", given, needed: 16 };
            assert_eq!(check(of_q(from)), Err(refused));
        }
        let mut pool = buffer(&here, 32);
        let both = Tensors::default().all_from(&mut pool, [("q", 0), ("o", 16)]);
        let addresses: Vec<_> = both.addresses().collect();
        assert_eq!(addresses, [("q", Some(0x1000)), ("o", Some(0x1010))]);
        assert_eq!(check(both), Ok(()));
        let refused = check(Tensors::default().output_from("o", &mut pool, 17));
        assert_eq!(refused, Err(PlacementError::BufferSize { tensor: "o", given: 15, needed: 16 }));
        let refused = check(Tensors::new([("o", &*o)], []));
        assert_eq!(refused, Err(PlacementError::ReadOnly { tensor: "o" }));
        let refused = check(Tensors::new([("lse", &*q)], []));
        assert_eq!(refused, Err(PlacementError::Unwanted { tensor: "lse" }));
    }
}
