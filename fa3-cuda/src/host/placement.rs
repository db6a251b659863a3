//! Checks of the addresses of a call's tensors against the program's buffers.

use std::ops::Range;

use fa3_ir::{BufferRole, Program};
use fa3_types::{Dtype, TensorDesc, are_apart};

/// The errors of the memory that is given to an operation.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message above each variant documents it and names its fields")]
pub enum PlacementError {
    #[error("{tensor} has a null address")]
    Null { tensor: &'static str },
    #[error("an address is given for {tensor}, which the problem does not have")]
    Unwanted { tensor: &'static str },
    #[error("two addresses are given for {tensor}")]
    Twice { tensor: &'static str },
    #[error("{tensor} is an output, and its memory was given as an input")]
    ReadOnly { tensor: &'static str },
    #[error("{tensor} lies at {address:#x}, not a multiple of {alignment} bytes")]
    Misaligned { tensor: &'static str, address: u64, alignment: u64 },
    #[error("{tensor} at {address:#x} with {bytes} bytes runs past the end of the address space")]
    Overflow { tensor: &'static str, address: u64, bytes: u64 },
    #[error(
        "output {output} [{:#x}, {:#x}) overlaps {other} [{:#x}, {:#x})",
        at.start, at.end, other_at.start, other_at.end
    )]
    Overlap { output: &'static str, at: Range<u64>, other: &'static str, other_at: Range<u64> },
    #[error("{tensor} takes {needed} bytes, its memory has {given}")]
    BufferSize { tensor: &'static str, given: u64, needed: u64 },
    #[error("the workspace has {given} bytes, {needed} are needed")]
    WorkspaceSize { given: usize, needed: usize },
    /// Elements of a typed memory (feature `cudarc`) have another type than the problem's.
    #[error("q, k, v and o have elements {given}, the problem has {expected}")]
    Element { given: Dtype, expected: Dtype },
    #[error("{given} belongs to another device than the plan")]
    OtherDevice { given: &'static str },
}

/// For each buffer of a program, by its index: the properties on which the validity of its address depends.
#[derive(Debug)]
pub(super) struct Interface {
    places: Vec<BufferDemand>,
}

/// The memory demand of a buffer.
#[derive(Debug)]
pub(super) struct BufferDemand {
    pub(super) tensor: &'static str,
    pub(super) bytes: u64,
    alignment: u64,
    pub(super) role: BufferRole,
    /// The layout of its elements, if other tensors may be interleaved with them.
    desc: Option<TensorDesc>,
}

impl Interface {
    pub(super) fn of<K>(program: &Program<K>) -> Interface {
        let place = |buffer: &fa3_ir::Buffer| BufferDemand {
            tensor: buffer.name,
            bytes: buffer.bytes() as u64,
            alignment: buffer.align.into(),
            role: buffer.role,
            desc: buffer.tensor,
        };
        Interface { places: program.buffers.iter().map(place).collect() }
    }

    /// The caller's tensors, with their indices.
    pub(super) fn tensors(&self) -> impl Iterator<Item = (usize, &BufferDemand)> + Clone {
        self.places.iter().enumerate().filter(|(_, place)| !place.role.is_workspace())
    }

    /// The caller's tensor of this name, with its index.
    ///
    /// # Errors
    /// [`PlacementError::Unwanted`].
    pub(super) fn find(&self, tensor: &'static str) -> Result<(usize, &BufferDemand), PlacementError> {
        self.tensors().find(|(_, place)| place.tensor == tensor).ok_or(PlacementError::Unwanted { tensor })
    }

    /// The addresses of all buffers: the given ones by the tensors' names, and 0 for tensors that are left out and for
    /// the workspace. A tensor without elements may have any address. Inputs may overlap each other (Q, K and V are
    /// often slices of one tensor). An output has no byte in common with any other tensor. Tensors may be interleaved.
    ///
    /// # Errors
    /// The first tensor with an invalid address.
    pub(super) fn place(
        &self,
        given: impl IntoIterator<Item = (&'static str, Option<u64>)>,
    ) -> Result<Vec<u64>, PlacementError> {
        let mut addresses = vec![0; self.places.len()];
        for (tensor, address) in given {
            let Some(address) = address else { continue };
            let (index, place) = self.find(tensor)?;
            if addresses[index] != 0 {
                return Err(PlacementError::Twice { tensor });
            }
            place.check(address)?;
            addresses[index] = address;
        }
        for (index, place) in self.tensors() {
            if addresses[index] == 0 && !place.role.is_optional() {
                place.check(0)?;
            }
        }
        let span = |(index, place): (usize, &BufferDemand)| {
            let start = addresses[index];
            if start == 0 { 0..0 } else { start..start + place.bytes }
        };
        for output in self.tensors().filter(|(_, place)| place.role.is_written()) {
            for other in self.tensors().filter(|other| other.0 != output.0) {
                let (at, other_at) = (span(output), span(other));
                let is_apart = at.end <= other_at.start || other_at.end <= at.start;
                let is_between = || match (&output.1.desc, &other.1.desc) {
                    (Some(x), Some(y)) => are_apart([x, y], [at.start, other_at.start]),
                    _ => false,
                };
                if !is_apart && !at.is_empty() && !other_at.is_empty() && !is_between() {
                    let (output, other) = (output.1.tensor, other.1.tensor);
                    return Err(PlacementError::Overlap { output, at, other, other_at });
                }
            }
        }
        Ok(addresses)
    }
}

impl BufferDemand {
    /// Checks the address of the tensor alone.
    ///
    /// # Errors
    /// The address is null, misaligned or too high.
    fn check(&self, address: u64) -> Result<(), PlacementError> {
        let &BufferDemand { tensor, bytes, alignment, .. } = self;
        match address {
            _ if bytes == 0 => Ok(()),
            0 => Err(PlacementError::Null { tensor }),
            _ if !address.is_multiple_of(alignment) => {
                Err(PlacementError::Misaligned { tensor, address, alignment })
            }
            _ if address.checked_add(bytes).is_none() => {
                Err(PlacementError::Overflow { tensor, address, bytes })
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use fa3_ir::{Buffer, Elem, Program};
    use fa3_types::{Shape, Strides, TensorDesc};

    use super::*;
    use crate::kernels::Spec;

    type Given = Vec<(&'static str, Option<u64>)>;

    /// An interface with q, k and o of 2048 bytes, lse of 64 bytes, which is optional and aligned to 4, and a
    /// workspace.
    fn interface() -> Interface {
        let mut program = Program::<Spec>::new();
        program.buffer("q", Elem::F16, &[16, 64], BufferRole::Input);
        program.buffer("k", Elem::F16, &[16, 64], BufferRole::Input);
        program.buffer("o", Elem::F16, &[16, 64], BufferRole::Output);
        program.buffer("sums", Elem::F32, &[16], BufferRole::Scratch);
        let lse = program.buffer("lse", Elem::F32, &[16], BufferRole::OptionalOutput);
        program.align(lse, 4);
        program.buffer("none", Elem::F32, &[0], BufferRole::Input);
        Interface::of(&program)
    }

    /// Places q, k, o and lse at their usual addresses, except `tensor`, which lies at `address`.
    fn place(tensor: &'static str, address: Option<u64>) -> Result<Vec<u64>, PlacementError> {
        let mut given: Given = [("q", 0x1000), ("k", 0x2000), ("o", 0x3000), ("lse", 0x4004)]
            .map(|(tensor, address)| (tensor, Some(address)))
            .into();
        given.retain(|(usual, _)| *usual != tensor);
        given.push((tensor, address));
        interface().place(given)
    }

    #[test]
    fn tensors_lie_where_they_are_given() {
        assert_eq!(place("q", Some(0x1000)), Ok(vec![0x1000, 0x2000, 0x3000, 0, 0x4004, 0]));
        assert_eq!(
            place("q", Some(0x2000)),
            Ok(vec![0x2000, 0x2000, 0x3000, 0, 0x4004, 0]),
            "inputs may overlap"
        );
        assert_eq!(place("lse", None), Ok(vec![0x1000, 0x2000, 0x3000, 0, 0, 0]), "it is optional");
        assert!(place("o", Some(0x2800)).is_ok(), "touching is not overlapping");
        assert!(place("none", Some(0x3008)).is_ok(), "empty tensors may lie anywhere");
    }

    #[test]
    fn a_tensor_that_cannot_lie_there_is_refused() {
        let tensor = "k";
        assert_eq!(place(tensor, None), Err(PlacementError::Null { tensor }));
        assert_eq!(place(tensor, Some(0)), Err(PlacementError::Null { tensor }));
        assert_eq!(place("lse", Some(0)), Err(PlacementError::Null { tensor: "lse" }));
        let misaligned = PlacementError::Misaligned { tensor, address: 0x2008, alignment: 16 };
        assert_eq!(place(tensor, Some(0x2008)), Err(misaligned));
        let misaligned = PlacementError::Misaligned { tensor: "lse", address: 0x4002, alignment: 4 };
        assert_eq!(place("lse", Some(0x4002)), Err(misaligned));
        let address = u64::MAX - 15;
        let overflow = PlacementError::Overflow { tensor, address, bytes: 2048 };
        assert_eq!(place(tensor, Some(address)), Err(overflow));
        for tensor in ["v", "sums"] {
            assert_eq!(place(tensor, Some(0x5000)), Err(PlacementError::Unwanted { tensor }));
        }
        let twice = interface().place([("q", Some(0x1000)), ("q", Some(0x5000))]);
        assert_eq!(twice, Err(PlacementError::Twice { tensor: "q" }));
    }

    #[test]
    fn outputs_must_keep_clear() {
        let overlap =
            |output, at, other, other_at| Err(PlacementError::Overlap { output, at, other, other_at });
        let o_on_q = overlap("o", 0x1010..0x1810, "q", 0x1000..0x1800);
        assert_eq!(place("o", Some(0x1010)), o_on_q);
        let lse_in_k = overlap("lse", 0x2100..0x2140, "k", 0x2000..0x2800);
        assert_eq!(place("lse", Some(0x2100)), lse_in_k);
        let o_on_lse = overlap("o", 0x3000..0x3800, "lse", 0x3000..0x3040);
        assert_eq!(place("lse", Some(0x3000)), o_on_lse);
        let sentence = "output o [0x1010, 0x1810) overlaps q [0x1000, 0x1800)";
        assert_eq!(place("o", Some(0x1010)).unwrap_err().to_string(), sentence);
    }

    /// q, k and o are parts of one tensor of 3 rows, (3, 2, 32).
    #[test]
    fn tensors_may_lie_between_each_others_elements() {
        let shape = Shape { batch: 1, seqlen: 3, heads: 1, head_dim: 32 };
        let strides = Strides { batch: 0, seqlen: 64, heads: 32, head_dim: 1 };
        let tensor = Some(TensorDesc { dtype: Dtype::F16, shape, strides });
        let place = |tensor, other: BufferRole, at: u64| {
            let mut program = Program::<Spec>::new();
            for (name, role) in [("o", BufferRole::InOut), ("q", other)] {
                program.add(Buffer { name, elem: Elem::F16, shape: vec![160], role, align: 16, tensor });
            }
            Interface::of(&program).place([("o", Some(0x1000)), ("q", Some(at))])
        };
        for role in [BufferRole::Input, BufferRole::InOut] {
            assert!(matches!(place(None, role, 0x1040), Err(PlacementError::Overlap { .. })));
            for q in [0x1040, 0xFC0] {
                assert_eq!(place(tensor, role, q), Ok(vec![0x1000, q]));
            }
            for q in [0xFD0, 0x1000, 0x1010, 0x1030, 0x1050, 0x1080] {
                assert!(matches!(place(tensor, role, q), Err(PlacementError::Overlap { .. })), "{q:#x}");
            }
        }
    }
}
