//! The tensors that programs take: names, bytes, alignments, and which tensors may interleave in memory.

use fa3_cuda::kernels::{self, Spec};
use fa3_ir::{BufferId, Program};
use fa3_sched::{DeviceLimits, append, backward, combine, forward, fp8, quantize};
use fa3_types::{
    AppendRotary, AppendSpec, AppendedRows, BackwardSpec, CombineSpec, Dtype, Fp8Spec, Positions,
    ProblemSpec, QkRotary, QuantizeSpec, QueryPositions, RopeStyle, Rotary, RotatedQueries, Scaling,
    SequenceBase, Sequences, Shape, Strides, TensorDesc,
};

/// A program's tensors as text: name, bytes and alignment of each. A question mark follows optional tensors.
fn said<K>(program: &Program<K>) -> String {
    let tensors = program.buffers.iter().filter(|buffer| !buffer.role.is_workspace()).map(|buffer| {
        let optional = if buffer.role.is_optional() { "?" } else { "" };
        let written = if buffer.role.is_written() { " w" } else { "" };
        format!("{}{optional} {} {}{written}", buffer.name, buffer.bytes(), buffer.align)
    });
    tensors.collect::<Vec<_>>().join(", ")
}

/// Whether no two of these buffers of a program, each at its address, share a byte.
fn are_apart<K>(program: &Program<K>, given: &[(&str, u64)]) -> bool {
    let tensor = |name| program.find(name).and_then(|BufferId(at)| program.buffers[at].tensor).unwrap();
    given.iter().enumerate().all(|(index, &(name, at))| {
        let x = tensor(name);
        given[..index]
            .iter()
            .all(|&(other, other_at)| fa3_types::are_apart([&x, &tensor(other)], [at, other_at]))
    })
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
    let inputs = "q 102400 16, k 3584 16, v 3584 16, o 102400 16, lse 3200 4, dout 102400 16, dlse? 3200 4";
    let gradients = "dq 102400 16 w, dk 3584 16 w, dv 3584 16 w";
    assert_eq!(said(&kernels::bwd::program(&plan)), format!("{inputs}, {gradients}"));
}

#[test]
fn o_may_be_a_part_of_the_tensor_that_the_inputs_are_parts_of() {
    // The tensor is (batch, rows, 4, heads, head_dim), with 4 heads of 128 bytes.
    let (part, row) = (4 * 128, 4 * 4 * 128);
    let strides = Strides { batch: 100 * row / 2, seqlen: row / 2, heads: 64, head_dim: 1 };
    let tensor = TensorDesc { dtype: Dtype::Bf16, shape: Q, strides };
    let problem = ProblemSpec::new(tensor, tensor, tensor, tensor).validate().unwrap();
    let program = kernels::fwd::program(&forward::Plan::new(&problem, &DeviceLimits::h100_sxm()).unwrap());
    let place = |o: i64| {
        let [k, v, o] = [part, 2 * part, o].map(|at| (0x10000 + at) as u64);
        are_apart(&program, &[("q", 0x10000), ("k", k), ("v", v), ("o", o)])
    };
    assert!([3 * part, -part, 7 * part].into_iter().all(place));
    assert!(![0, part, 2 * part, 3 * part + 16, 3 * part - 16].into_iter().any(place));
}

#[test]
fn gradients_may_be_parts_of_one_tensor() {
    // The tensor is (batch, rows, heads_q + 2 heads_kv, head_dim), with 8 heads of 128 bytes.
    let (rows, row) = (100, 8 * 128);
    let place = |dk: u64, dv: u64| {
        let mut spec =
            BackwardSpec::contiguous(ProblemSpec::dense(Dtype::Bf16, Q, Shape { seqlen: Q.seqlen, ..KV }));
        for x in [&mut spec.dq, &mut spec.dk, &mut spec.dv] {
            (x.strides.batch, x.strides.seqlen) = (rows * row / 2, row / 2);
        }
        let plan = backward::Plan::new(&spec.validate().unwrap(), &DeviceLimits::h100_sxm()).unwrap();
        let given = [("dq", 0x1000), ("dk", 0x1000 + dk), ("dv", 0x1000 + dv)];
        are_apart(&kernels::bwd::program(&plan), &given)
    };
    // Heads of Q, K and V follow each other in this order, or in another order, or K is one row further on.
    for (dk, dv) in [(4 * 128, 6 * 128), (6 * 128, 4 * 128), (12 * 128, 6 * 128)] {
        assert!(place(dk, dv), "{dk} {dv}");
    }
    let refused =
        [(3 * 128, 6 * 128), (4 * 128, 5 * 128), (4 * 128, 4 * 128), (4 * 128, 7 * 128), (0, 6 * 128)];
    for (dk, dv) in refused {
        assert!(!place(dk, dv), "{dk} {dv}");
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
    // Bytes between parts belong to the tensor.
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
    // A row of a transposed tensor has 128 keys.
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

/// An append of one row for each sequence to a cache of 3 entries of 16 rows, 2 heads and 64 columns. The strides of
/// sequences, rows and heads are given.
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
    let place = |strides, v_cache| are_apart(&append(strides), &[("k_cache", 0x10000), ("v_cache", v_cache)]);
    // The strides with which keys and values alternate row by row, page by page, or as whole tensors.
    let rows = [2 * 16 * 128, 128, 16 * 128];
    let pages = [2 * 16 * 128, 128, 64];
    let tensors = [16 * 128, 128, 64];
    for (strides, distance) in [(rows, 128), (pages, 2 * 16 * 128), (tensors, 2 * 3 * 16 * 128)] {
        for v_cache in [0x10000 + distance, 0x10000 - distance] {
            assert!(place(strides, v_cache), "{strides:?} {distance}");
        }
        for v_cache in [0x10000, 0x10000 + distance - 16, 0x10000 - distance + 16] {
            assert!(!place(strides, v_cache), "{strides:?} {v_cache:#x}");
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
