//! Quantization kernels in the simulator, beyond the trials of their family.

use fa3_cuda::kernels::{Spec, quantize};
use fa3_ir::BufferId;
use fa3_sched::DeviceLimits;
use fa3_sched::quantize::Plan;
use fa3_sim::{Mode, ProgramSimulation};
use fa3_tests::quantize::Case;
use fa3_types::{Dtype, QuantizeSpec, Scaling, Shape, ValueLayout};

/// Codes and scales of random problems equal fa3-quant's, bit for bit. `FA3_CASES` sets their number.
#[test]
fn random_problems_have_the_bits_of_the_reference() {
    crate::obey_of(48, |seed, kernels| Case::random(seed, kernels).trial(1 + seed as u32 % 5));
}

#[test]
fn without_rows_nothing_is_launched() {
    for (batch, seqlen) in [(0, 100), (3, 0)] {
        let shape = Shape { batch, seqlen, heads: 2, head_dim: 64 };
        let problem = QuantizeSpec::contiguous(Dtype::F16, shape).validate().unwrap();
        let plan = Plan::new(&problem, &DeviceLimits::h100_sxm()).unwrap();
        assert_eq!((plan.grid(), quantize::program(&plan).steps.len()), (0, 0));
    }
}

/// Without rows, the scale of each channel is 1, and so is the scale of the tensor.
#[test]
fn without_rows_scales_are_1() {
    let shape = Shape { batch: 3, seqlen: 0, heads: 2, head_dim: 64 };
    let spec = QuantizeSpec::contiguous(Dtype::F16, shape);
    let channels = spec.scaling(Scaling::Channel);
    for spec in [
        channels,
        channels.transposed(),
        spec.scaling(Scaling::Tensor),
        spec.scaling(Scaling::Heads { heads: 2 }),
    ] {
        let problem = spec.validate().unwrap();
        let plan = Plan::new(&problem, &DeviceLimits::h100_sxm()).unwrap();
        let program = quantize::program(&plan).map(Spec::kernel);
        let before: Vec<Vec<u8>> = program.buffers.iter().map(|buffer| vec![0xFF; buffer.bytes()]).collect();
        let outcome = ProgramSimulation::new(&program).mode(Mode::Exact).run(&before).unwrap();
        let all = |name: &str, number: f32| {
            let BufferId(at) = program.find(name).unwrap();
            outcome.buffers[at].chunks_exact(4).all(|bytes| bytes == number.to_le_bytes())
        };
        assert!(all("scales", 1.0), "{problem}");
        assert!(problem.mean_shape().is_none() || all("mean", 0.0), "{problem}");
    }
}

/// Simultaneous accesses to the tile that transposes the codes hit different banks, for any number of threads per row.
#[test]
fn codes_are_transposed_without_bank_conflicts() {
    // The shapes have 1, 2, 4 and 8 threads per row, and one panel of 64 columns, one of 128 columns, and two panels.
    for (head_dim, rows) in
        [(32, 64), (32, 128), (64, 128), (80, 64), (128, 64), (128, 128), (256, 64), (256, 128)]
    {
        let case = Case::random(head_dim as u64, u64::MAX);
        let case = Case {
            dtype: Dtype::F16,
            shape: Shape { batch: 1, seqlen: 200, heads: 1, head_dim },
            scaling: Scaling::Block { rows },
            value_layout: ValueLayout::Transposed,
            rotation: None,
            ..case
        };
        let trial = case.trial(1);
        let outcome = ProgramSimulation::new(&trial.program).run(&trial.before).unwrap();
        let lines = outcome.steps.iter().flat_map(|step| &step.counters.shared);
        let is_of_codes = |file: &str| file.ends_with("store.rs") || file.ends_with("key_rows.rs");
        let of_codes: Vec<_> = lines.filter(|(line, _)| is_of_codes(line.file)).collect();
        // One group of accesses stores the codes, and one loads them.
        assert_eq!(of_codes.len(), 2, "{of_codes:?}");
        for (line, wavefronts) in of_codes {
            assert_eq!(wavefronts.actual, wavefronts.ideal, "{line}, head_dim {head_dim}, {rows} rows");
        }
    }
}
