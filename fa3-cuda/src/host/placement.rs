//! Addresses of a call's tensors, against what its program needs.

use std::ops::Range;

use fa3_ir::{BufferId, BufferRole, Interleaved, Program};
use fa3_types::Dtype;

/// Why an operation cannot work on the memory that it was given.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message above each variant documents it and names its fields")]
pub enum PlacementError {
    #[error("{tensor} has a null address")]
    Null { tensor: &'static str },
    #[error("there is an address of {tensor}, which the problem has not")]
    Unwanted { tensor: &'static str },
    #[error("there are two addresses of {tensor}")]
    Twice { tensor: &'static str },
    #[error("{tensor} is written, and its memory was given to be read")]
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
    /// Memory of elements that are not the problem's, where its type says of which it is (feature `cudarc`).
    #[error("q, k, v and o are of {given}, the problem is of {expected}")]
    Element { given: Dtype, expected: Dtype },
    #[error("{given} is not of the device that the plan was made for")]
    OtherDevice { given: &'static str },
}

/// The buffers of a program, by their numbers, as far as addresses depend on them.
#[derive(Debug)]
pub(super) struct Interface {
    places: Vec<Place>,
    interleaved: Vec<Interleaved>,
}

/// Room for a buffer.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) tensor: &'static str,
    pub(super) bytes: u64,
    alignment: u64,
    pub(super) role: BufferRole,
}

impl Interface {
    pub(super) fn of<K>(program: &Program<K>) -> Interface {
        let place = |buffer: &fa3_ir::Buffer| Place {
            tensor: buffer.name,
            bytes: buffer.bytes() as u64,
            alignment: buffer.align.into(),
            role: buffer.role,
        };
        Interface {
            places: program.buffers.iter().map(place).collect(),
            interleaved: program.interleaved.clone(),
        }
    }

    /// The caller's tensors, with their numbers.
    pub(super) fn tensors(&self) -> impl Iterator<Item = (usize, &Place)> + Clone {
        self.places.iter().enumerate().filter(|(_, place)| !place.role.is_workspace())
    }

    /// The caller's tensor of this name, with its number.
    ///
    /// # Errors
    /// [`PlacementError::Unwanted`].
    pub(super) fn find(&self, tensor: &'static str) -> Result<(usize, &Place), PlacementError> {
        self.tensors().find(|(_, place)| place.tensor == tensor).ok_or(PlacementError::Unwanted { tensor })
    }

    /// The addresses of all buffers: those that are given by the tensors' names, and 0 for tensors that are left out
    /// and for the workspace. A tensor without elements may lie anywhere. Inputs may overlap each other (Q, K and V are
    /// often slices of one tensor); what is written must keep clear of all others, from its first to its last byte,
    /// unless they are [interleaved](Interleaved).
    ///
    /// # Errors
    /// The first tensor that lies where it cannot.
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
        let span = |(index, place): (usize, &Place)| {
            let start = addresses[index];
            if start == 0 { 0..0 } else { start..start + place.bytes }
        };
        for output in self.tensors().filter(|(_, place)| place.role.is_written()) {
            for other in self.tensors().filter(|other| other.0 != output.0) {
                let (at, other_at) = (span(output), span(other));
                let is_apart = at.end <= other_at.start || other_at.end <= at.start;
                let is_between = || self.are_between([(output.0, at.start), (other.0, other_at.start)]);
                if !is_apart && !at.is_empty() && !other_at.is_empty() && !is_between() {
                    let (output, other) = (output.1.tensor, other.1.tensor);
                    return Err(PlacementError::Overlap { output, at, other, other_at });
                }
            }
        }
        Ok(addresses)
    }

    /// Whether two buffers, with their numbers and addresses, lie between each other's elements.
    fn are_between(&self, [one, other]: [(usize, u64); 2]) -> bool {
        let in_order = |[one, other]: [(usize, u64); 2]| {
            let found =
                self.interleaved.iter().find(|pair| pair.buffers == [BufferId(one.0), BufferId(other.0)]);
            found.is_some_and(|pair| pair.are_apart([one.1, other.1]))
        };
        in_order([one, other]) || in_order([other, one])
    }
}

impl Place {
    /// Checks that the tensor may lie at an address, whatever else lies there.
    ///
    /// # Errors
    /// A null address, one that is not aligned, or too high a one.
    fn check(&self, address: u64) -> Result<(), PlacementError> {
        let &Place { tensor, bytes, alignment, .. } = self;
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
    use fa3_ir::{Elem, Program};
    use fa3_sched::{DeviceLimits, append, backward, combine, forward, fp8, quantize};
    use fa3_types::{
        AppendRotary, AppendSpec, AppendedRows, BackwardSpec, CombineSpec, Fp8Spec, Positions, ProblemSpec,
        QkRotary, QuantizeSpec, QueryPositions, RopeStyle, Rotary, RotatedQueries, Scaling, SequenceBase,
        Sequences, Shape, Strides, TensorDesc,
    };

    use super::*;
    use crate::kernels;
    use crate::kernels::Spec;

    type Given = Vec<(&'static str, Option<u64>)>;

    /// 2048 bytes of q, k and o, 64 of lse, which is optional and aligned to 4, and a workspace.
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

    /// Places tensors, of which one lies elsewhere than usual.
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

    /// Names of tensors, their bytes and their alignments, a question mark behind those that may be left out.
    fn said<K>(program: &Program<K>) -> String {
        let interface = Interface::of(program);
        let tensors = interface.tensors().map(|(_, place)| {
            let optional = if place.role.is_optional() { "?" } else { "" };
            let written = if place.role.is_written() { " w" } else { "" };
            format!("{}{optional} {} {}{written}", place.tensor, place.bytes, place.alignment)
        });
        tensors.collect::<Vec<_>>().join(", ")
    }

    const Q: Shape = Shape { batch: 2, seqlen: 100, heads: 4, head_dim: 64 };
    const KV: Shape = Shape { heads: 2, seqlen: 7, ..Q };

    fn attention(spec: ProblemSpec) -> String {
        let problem = spec.validate().unwrap();
        said(&kernels::fwd::program(&forward::Plan::new(&problem, &DeviceLimits::h100_sxm()).unwrap()))
    }

    #[test]
    fn a_forward_pass_has_scales_where_its_problem_has_them() {
        let plain = "q 102400 16, k 3584 16, v 3584 16, o 102400 16 w, lse? 3200 16 w";
        assert_eq!(attention(ProblemSpec::dense(Dtype::Bf16, Q, KV)), plain);
        let spec = ProblemSpec::dense(Dtype::E4m3, Q, KV);
        let plain = "q 51200 16, k 1792 16, v 1792 16, o 102400 16 w, lse? 3200 16 w";
        let heads = "q_descale? 16 4, k_descale? 16 4, v_descale? 16 4";
        assert_eq!(attention(spec.clone()), format!("{plain}, {heads}"));
        let blocks = "q_descale 64 4, k_descale 16 4, v_descale 16 4";
        assert_eq!(attention(spec.clone().block_scales(64)), format!("{plain}, {blocks}"));
        let channels = "q_descale? 16 4, k_descale? 16 4, v_descale 1024 16, v_mean 1024 16";
        assert_eq!(attention(spec.v_channels()), format!("{plain}, {channels}"));
    }

    #[test]
    fn gradients_are_written_and_that_of_lse_may_be_absent() {
        let problem = BackwardSpec::contiguous(ProblemSpec::dense(Dtype::Bf16, Q, KV)).validate().unwrap();
        let plan = backward::Plan::new(&problem, &DeviceLimits::h100_sxm()).unwrap();
        let inputs =
            "q 102400 16, k 3584 16, v 3584 16, o 102400 16, lse 3200 4, dout 102400 16, dlse? 3200 4";
        let gradients = "dq 102400 16 w, dk 3584 16 w, dv 3584 16 w";
        assert_eq!(said(&kernels::bwd::program(&plan)), format!("{inputs}, {gradients}"));
    }

    #[test]
    fn gradients_may_be_parts_of_one_tensor() {
        // (batch, rows, heads_q + 2 heads_kv, head_dim), of 8 heads of 128 bytes.
        let (rows, row) = (100, 8 * 128);
        let place = |dk: u64, dv: u64| {
            let mut spec = BackwardSpec::contiguous(ProblemSpec::dense(
                Dtype::Bf16,
                Q,
                Shape { seqlen: Q.seqlen, ..KV },
            ));
            for x in [&mut spec.dq, &mut spec.dk, &mut spec.dv] {
                (x.strides.batch, x.strides.seqlen) = (rows * row / 2, row / 2);
            }
            let plan = backward::Plan::new(&spec.validate().unwrap(), &DeviceLimits::h100_sxm()).unwrap();
            let given = [("q", 0x100_0000), ("k", 0x200_0000), ("v", 0x300_0000), ("o", 0x400_0000)];
            let others = [("lse", 0x500_0000), ("dout", 0x600_0000), ("dq", 0x1000)];
            let given = given.into_iter().chain(others).chain([("dk", 0x1000 + dk), ("dv", 0x1000 + dv)]);
            let given = given.map(|(tensor, address)| (tensor, Some(address)));
            Interface::of(&kernels::bwd::program(&plan)).place(given)
        };
        // Heads of Q, then of K and of V; in another order; and one row further.
        for (dk, dv) in [(4 * 128, 6 * 128), (6 * 128, 4 * 128), (12 * 128, 6 * 128)] {
            assert!(place(dk, dv).is_ok(), "{dk} {dv}");
        }
        let refused =
            [(3 * 128, 6 * 128), (4 * 128, 5 * 128), (4 * 128, 4 * 128), (4 * 128, 7 * 128), (0, 6 * 128)];
        for (dk, dv) in refused {
            assert!(matches!(place(dk, dv), Err(PlacementError::Overlap { .. })), "{dk} {dv}");
        }
    }

    #[test]
    fn attention_in_8_bits_has_tables_if_it_rotates() {
        let spec = Fp8Spec::new(ProblemSpec::dense(Dtype::Bf16, Q, KV));
        let program = |spec: Fp8Spec| {
            let plan = fp8::Plan::new(&spec.validate().unwrap(), &DeviceLimits::h100_sxm()).unwrap();
            said(&kernels::fp8::program(&plan))
        };
        let plain = "q 102400 16, k 3584 16, v 3584 16, o 102400 16 w, lse? 3200 16 w";
        assert_eq!(program(spec.clone()), plain);
        let (style, rotary_dim, table_rows) = (RopeStyle::Interleaved, 32, 100);
        let first = Positions::From(0);
        let of = |q_positions, k_positions| {
            let rotary = QkRotary { style, rotary_dim, table_rows, q_positions, k_positions };
            program(spec.clone().rotary(rotary))
        };
        let rotated = format!("{plain}, cos 6400 16, sin 6400 16");
        assert_eq!(of(first, first), rotated);
        assert_eq!(of(Positions::Listed, first), format!("{rotated}, q_positions 800 16"));
        assert_eq!(of(first, Positions::Listed), format!("{rotated}, k_positions 56 16"));
        let both = format!("{rotated}, q_positions 800 16, k_positions 56 16");
        assert_eq!(of(Positions::Listed, Positions::Listed), both);
    }

    #[test]
    fn lse_of_a_merge_may_begin_anywhere() {
        let plan = |change: fn(&mut CombineSpec)| {
            let mut spec = CombineSpec::contiguous(Dtype::F32, Dtype::F16, 3, Q);
            change(&mut spec);
            said(&kernels::combine::program(&combine::Plan::new(&spec.validate().unwrap()).unwrap()))
        };
        let merge = "out_partial 614400 16, lse_partial 9600 4, o 102400 16 w, lse 3200 4 w";
        assert_eq!(plan(|_| ()), merge);
        // Whatever lies between parts belongs to the tensor.
        let apart = plan(|spec| spec.out_partial.stride += 4);
        assert_eq!(apart, merge.replace("614400", "614432"));
    }

    #[test]
    fn a_quantization_has_the_tensors_that_its_problem_has() {
        let spec = || QuantizeSpec::contiguous(Dtype::F16, Q);
        let program = |spec: QuantizeSpec| {
            let plan = quantize::Plan::new(&spec.validate().unwrap(), &DeviceLimits::h100_sxm()).unwrap();
            said(&kernels::quantize::program(&plan))
        };
        assert_eq!(program(spec()), "x 102400 16, codes 51200 16 w, scales 32 16 w");
        assert_eq!(program(spec().scaling(Scaling::Given(0.5))), "x 102400 16, codes 51200 16 w");
        // Transposed, rows are 128 keys.
        assert_eq!(program(spec().transposed()), "x 102400 16, codes 65536 16 w, scales 32 16 w");
        let channels = "x 102400 16, codes 51200 16 w, scales 2048 16 w, mean 2048 16 w";
        assert_eq!(program(spec().scaling(Scaling::Channel)), channels);
        let rotary = |positions| {
            let (style, rotary_dim, table_rows) = (RopeStyle::Interleaved, 32, 110);
            program(spec().rotary(Rotary { style, rotary_dim, table_rows, positions }))
        };
        let rotated = "x 102400 16, codes 51200 16 w, scales 32 16 w, cos 7040 16, sin 7040 16";
        assert_eq!(rotary(Positions::From(10)), rotated);
        assert_eq!(rotary(Positions::Listed), format!("{rotated}, positions 800 16"));
    }

    /// Rows for a cache of 3 entries of 16 rows, 2 heads and 64 columns, given its strides of sequences, rows and
    /// heads.
    fn append([batch, seqlen, heads]: [i64; 3]) -> Program<Spec> {
        let shape = Shape { batch: 3, seqlen: 1, heads: 2, head_dim: 64 };
        let new = TensorDesc::contiguous(Dtype::Bf16, shape);
        let strides = Strides { batch, seqlen, heads, head_dim: 1 };
        let cache = TensorDesc { shape: Shape { seqlen: 16, ..shape }, strides, ..new };
        let rows = AppendedRows {
            k_new: new,
            v_new: new,
            new: Sequences::dense(3, 1),
            k_cache: cache,
            v_cache: cache,
            cache: Sequences::dense(3, 16).used(),
        };
        let problem = AppendSpec::new(rows).validate().unwrap();
        kernels::append::program(&append::Plan::new(&problem).unwrap())
    }

    #[test]
    fn a_cache_may_have_keys_and_values_between_each_other() {
        let place = |strides, v_cache| {
            let given = [("k_new", 0x100), ("v_new", 0x800), ("seqused_after", 0xF00), ("seqused_k", 0xF10)];
            let caches = [("k_cache", 0x10000), ("v_cache", v_cache)];
            let given = given.into_iter().chain(caches).map(|(tensor, address)| (tensor, Some(address)));
            Interface::of(&append(strides)).place(given)
        };
        // Rows of keys and values side by side, whole pages of them one after the other, and whole tensors.
        let rows = [2 * 16 * 128, 128, 16 * 128];
        let pages = [2 * 16 * 128, 128, 64];
        let tensors = [16 * 128, 128, 64];
        for (strides, distance) in [(rows, 128), (pages, 2 * 16 * 128), (tensors, 2 * 3 * 16 * 128)] {
            for v_cache in [0x10000 + distance, 0x10000 - distance] {
                assert!(place(strides, v_cache).is_ok(), "{strides:?} {distance}");
            }
            for v_cache in [0x10000, 0x10000 + distance - 16, 0x10000 - distance + 16] {
                let refused = place(strides, v_cache);
                assert!(matches!(refused, Err(PlacementError::Overlap { .. })), "{strides:?} {v_cache:#x}");
            }
        }
    }

    #[test]
    fn an_append_has_the_tensors_that_its_problem_has() {
        let text = "k_new 768 16, v_new 768 16, k_cache 12288 16 w, v_cache 12288 16 w, seqused_after 12 4 w, \
                    seqused_k 12 4";
        assert_eq!(said(&append([16 * 128, 128, 64])), text);
        let queries = RotatedQueries {
            q: TensorDesc::contiguous(Dtype::F16, Shape { batch: 1, ..Q }),
            sequences: Sequences::packed(5),
            positions: QueryPositions::Each,
        };
        let rotary = AppendRotary {
            style: RopeStyle::Interleaved,
            rotary_dim: 32,
            table: Dtype::F16,
            table_rows: 100,
            base: SequenceBase::Listed,
        };
        let problem = AppendSpec::of_queries(queries, rotary).validate().unwrap();
        let program = kernels::append::program(&append::Plan::new(&problem).unwrap());
        let text = "q 51200 16, q_rotated 51200 16 w, cu_seqlens_q 24 4, rotary_cos 3200 16, rotary_sin 3200 16, \
                    rotary_seqlens 20 4";
        assert_eq!(said(&program), text);
    }
}
