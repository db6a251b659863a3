//! Attention over a cache to which rows are appended first, in the simulator.

use fa3_cuda::kernels::cached::program;
use fa3_cuda::kernels::{Spec, append, fwd};
use fa3_ir::{BufferId, BufferRole, Program};
use fa3_sched::DeviceLimits;
use fa3_sched::cached::Plan;
use fa3_sched::forward::{PlanOptions, SplitKeys};
use fa3_sim::ProgramSimulation;
use fa3_types::{
    AppendRotary, CachedSpec, Dtype, ProblemSpec, RopeStyle, SequenceBase, Sequences, Shape, TensorDesc,
};

fn spec(rotated: bool) -> CachedSpec {
    let q = Shape { batch: 2, seqlen: 2, heads: 2, head_dim: 64 };
    let cache = Shape { batch: 9, seqlen: 16, heads: 1, head_dim: 64 };
    let attention = ProblemSpec::dense(Dtype::Bf16, q, cache).causal();
    let attention = attention.seqs_k(Sequences::paged(2, 4).used());
    let new = TensorDesc::contiguous(Dtype::Bf16, Shape { heads: 1, ..q });
    let spec = CachedSpec::new(attention, [new, new], Sequences::dense(2, 2));
    let rotary = AppendRotary {
        style: RopeStyle::HalfSplit,
        rotary_dim: 64,
        table: Dtype::Bf16,
        table_rows: 64,
        base: SequenceBase::Used,
    };
    if rotated { spec.rotary(rotary) } else { spec }
}

fn plan(rotated: bool, options: PlanOptions) -> Plan {
    let options = options.sms(3.try_into().unwrap());
    Plan::with(&spec(rotated).validate().unwrap(), &DeviceLimits::h100_sxm(), &options).unwrap()
}

fn run(program: &Program<Spec>, before: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let outcome = ProgramSimulation::new(&program.map(Spec::kernel)).run(before).unwrap();
    assert_eq!(outcome.findings().next(), None);
    outcome.buffers
}

/// Buffers that the append writes for the attention, by their names in the two programs.
const PASSED: [(&str, &str); 4] =
    [("q_rotated", "q"), ("seqused_after", "seqused_k"), ("k_cache", "k"), ("v_cache", "v")];

/// The name that a buffer of the append has in the whole program. Cache tensors have the names that attention gives.
fn name(of_append: &str) -> &str {
    match of_append {
        "k_cache" => "k",
        "v_cache" => "v",
        other => other,
    }
}

/// Initial bytes of a buffer: small integers in arrays of lengths and page tables, otherwise numbers in [-2, 2) as
/// bf16.
fn given(name: &str, bytes: usize) -> Vec<u8> {
    match name {
        "page_table" => [3_u32, 1, 8, 0, 2, 4, 5, 6].iter().flat_map(|page| page.to_le_bytes()).collect(),
        "seqused_k" => [37_u32, 15].iter().flat_map(|rows| rows.to_le_bytes()).collect(),
        _ => {
            let mut state = name.bytes().map(u32::from).sum::<u32>();
            let number = |_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                let x = (state >> 16) as f32 / 16_384.0 - 2.0;
                ((x.to_bits() >> 16) as u16).to_le_bytes()
            };
            (0..bytes / 2).flat_map(number).collect()
        }
    }
}

/// The whole program has the results of its two parts, run one after the other.
#[test]
fn both_parts_run_one_after_the_other() {
    for (rotated, options) in [
        (false, PlanOptions::default()),
        (true, PlanOptions::default()),
        (true, PlanOptions::default().split_keys(SplitKeys::Even)),
    ] {
        let plan = plan(rotated, options);
        let whole = program(&plan);
        assert_eq!(whole.map(Spec::kernel).check(), Ok(()));
        let initial = |program: &Program<Spec>| -> Vec<Vec<u8>> {
            program.buffers.iter().map(|buffer| given(name(buffer.name), buffer.bytes())).collect()
        };
        let at = |program: &Program<Spec>, buffers: &[Vec<u8>], name: &str| {
            program.find(name).map(|BufferId(at)| buffers[at].clone())
        };
        let after = run(&whole, &initial(&whole));

        let first = append::program(plan.append());
        let appended = run(&first, &initial(&first));
        let second = fwd::program(plan.forward());
        let mut before = initial(&second);
        for (of_append, of_attention) in PASSED {
            if let Some(bytes) = at(&first, &appended, of_append) {
                before[second.find(of_attention).unwrap().0] = bytes;
            }
        }
        let expected = run(&second, &before);
        for name in ["k", "v", "o", "lse"] {
            assert_eq!(at(&whole, &after, name), at(&second, &expected, name), "{name} of {plan}");
        }
        let k = whole.find("k").unwrap();
        assert_ne!(after[k.0], given("k", after[k.0].len()), "nothing was appended");
    }
}

#[test]
fn buffers_are_the_callers_or_workspace() {
    let names = |rotated| -> Vec<&str> {
        let program = program(&plan(rotated, PlanOptions::default().split_keys(SplitKeys::Even)));
        let of_caller = program.buffers.iter().filter(|buffer| !buffer.role.is_workspace());
        of_caller.map(|buffer| buffer.name).collect()
    };
    let plain = ["k_new", "v_new", "k", "v", "page_table", "seqused_k", "q", "o", "lse"];
    assert_eq!(names(false), plain);
    let rotated =
        ["k_new", "v_new", "k", "v", "page_table", "q", "rotary_cos", "rotary_sin", "seqused_k", "o", "lse"];
    assert_eq!(names(true), rotated);
    let program = program(&plan(true, PlanOptions::default()));
    let role = |name| program.buffers[program.find(name).unwrap().0].role;
    assert_eq!(["k", "v", "q"].map(role), [BufferRole::InOut, BufferRole::InOut, BufferRole::Input]);
}
