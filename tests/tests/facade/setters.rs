//! Any two setters can be called in either order, and neither undoes the other.

use std::fmt::Debug;
use std::num::NonZeroU32;

use fa3::half::bf16;
use fa3::ndarray::{Array1, Array2, Array4};
use fa3::problem::{
    Dtype, Fp8Spec, Positions, ProblemSpec, QkRotary, QuantizeSpec, Rotary, Sequences, Shape, Signs,
};
use fa3::{Attention, CachedAttention, LseForm, Mask, NewRows, Quantize, Rope, RopeStyle, Scaling};
use fa3_sched::{DeviceLimits, Order, Scheduler, backward, forward};

const SHAPE: Shape = Shape { batch: 1, seqlen: 4, heads: 1, head_dim: 16 };

/// A setter with arguments.
type Set<'s, B> = &'s dyn Fn(B) -> B;

/// Any two setters give the same builder in either order. This builder differs from the builders with only one of the
/// two setters. The `Debug` output, which shows all fields, is compared.
fn nothing_is_lost<B: Clone + Debug>(new: &B, setters: &[Set<'_, B>]) {
    let text =
        |calls: &[Set<'_, B>]| format!("{:?}", calls.iter().fold(new.clone(), |builder, call| call(builder)));
    for (index, &one) in setters.iter().enumerate() {
        assert_ne!(text(&[]), text(&[one]), "setter {index} says nothing");
        for (other_index, &other) in setters.iter().enumerate().skip(index + 1) {
            let both = text(&[one, other]);
            assert_eq!(both, text(&[other, one]), "setters {index} and {other_index}");
            assert_ne!(both, text(&[one]), "setter {index} takes back {other_index}");
            assert_ne!(both, text(&[other]), "setter {other_index} takes back {index}");
        }
    }
}

#[test]
fn builders() {
    let x = Array4::from_elem((1, 4, 1, 16), bf16::ONE);
    let table = Rope::new(RopeStyle::HalfSplit, 16, 10_000.0).unwrap().table(8);
    let (sinks, scales) = (Array1::zeros(1), Array2::ones((1, 1)));
    let attention = Attention::new(&x, &x, &x);
    nothing_is_lost(
        &attention,
        &[
            &|attention| attention.mask(Mask::window(Some(9), Some(8))),
            &|attention| attention.causal(),
            &|attention| attention.window(Some(3), None),
            &|attention| attention.chunk(NonZeroU32::new(20).unwrap()),
            &|attention| attention.softmax_scale(0.5),
            &|attention| attention.softcap(2.0),
            &|attention| attention.sink(&sinks),
            &|attention| attention.lse_form(LseForm { base_two: true, ..LseForm::default() }),
            &|attention| attention.deterministic(),
            &|attention| attention.packed(&[0, 4], &[0, 4]),
            &|attention| attention.seqused_q(&[3]),
            &|attention| attention.seqused_k(&[2]),
        ],
    );
    nothing_is_lost(
        &CachedAttention::new(&x),
        &[
            &|attention| attention.cu_seqlens_q(&[0, 4]),
            &|attention| attention.seqused_q(&[3]),
            &|attention| attention.k_descale(&scales),
            &|attention| attention.v_descale(&scales),
            &|attention| attention.mask(Mask::window(Some(9), Some(8))),
            &|attention| attention.causal(),
            &|attention| attention.window(Some(3), None),
            &|attention| attention.softmax_scale(0.5),
            &|attention| attention.softcap(2.0),
            &|attention| attention.sink(&sinks),
        ],
    );
    nothing_is_lost(
        &NewRows::new(&x, &x),
        &[&|new| new.rotary(&table), &|new| new.rotary_seqlens(&[1]), &|new| new.cu_seqlens_k_new(&[0, 4])],
    );
    nothing_is_lost(
        &attention.fp8(),
        &[
            &|fp8| fp8.rotary(&table),
            &|fp8| fp8.first_positions(1, 2),
            &|fp8| fp8.q_positions(&[4, 3, 2, 1]),
            &|fp8| fp8.k_positions(&[8, 7, 6, 5]),
            &|fp8| fp8.hadamard(3),
            &|fp8| fp8.v_channels(),
        ],
    );
    nothing_is_lost(
        &Quantize::new(&x),
        &[
            &|quantize| quantize.rotary(&table),
            &|quantize| quantize.first_position(1),
            &|quantize| quantize.positions(&[4, 3, 2, 1]),
            &|quantize| quantize.hadamard(3),
            &|quantize| quantize.scaling(Scaling::Tensor),
        ],
    );
}

#[test]
fn specifications() {
    nothing_is_lost(
        &ProblemSpec::dense(Dtype::E4m3, SHAPE, SHAPE),
        &[
            &|spec| spec.seqs_q(Sequences::packed(1)),
            &|spec| spec.seqs_k(Sequences::dense(1, 4).used()),
            &|spec| spec.head_dim_v(32),
            &|spec| spec.transposed_v(),
            &|spec| spec.block_scales(64),
            &|spec| spec.v_channels(),
            &|spec| spec.mask(Mask::window(Some(3), Some(8))),
            &|spec| spec.mask(Mask::from_chunk(7).unwrap()),
            &|spec| spec.causal(),
            &|spec| spec.softmax_scale(0.5),
            &|spec| spec.softcap(2.0),
            &|spec| spec.sink(),
        ],
    );
    let (style, rotary_dim, table_rows) = (RopeStyle::HalfSplit, 16, 8);
    let signs = Signs { leading: [1; 8], between: [2; 8] };
    let rotary = Rotary { style, rotary_dim, table_rows, positions: Positions::From(0) };
    nothing_is_lost(
        &QuantizeSpec::contiguous(Dtype::F16, SHAPE),
        &[&|spec| spec.transposed(), &|spec| spec.rotary(rotary), &|spec| spec.signs(signs), &|spec| {
            spec.scaling(Scaling::Tensor)
        }],
    );
    let (q_positions, k_positions) = (Positions::From(0), Positions::Listed);
    let rotary = QkRotary { style, rotary_dim, table_rows, q_positions, k_positions };
    nothing_is_lost(
        &Fp8Spec::new(ProblemSpec::dense(Dtype::F16, SHAPE, SHAPE)),
        &[&|spec| spec.rotary(rotary), &|spec| spec.signs(signs), &|spec| spec.v_channels()],
    );
}

#[test]
fn options_of_plans() {
    let (limits, sms) = (DeviceLimits::h100_sxm(), NonZeroU32::new(7).unwrap());
    let problem = ProblemSpec::dense(Dtype::F16, SHAPE, SHAPE).validate().unwrap();
    let tile = forward::Plan::new(&problem, &limits).unwrap().tile();
    nothing_is_lost(
        &forward::PlanOptions::default(),
        &[
            &|options| options.tile(tile),
            &|options| options.order(Order::Linear),
            &|options| options.scheduler(Scheduler::OneTile),
            &|options| options.sms(sms),
            &|options| options.clusters(true),
        ],
    );
    let dkv = backward::DkvTile::choose(16, 16, &limits).unwrap();
    let dq = backward::DqTile::choose(16, 16, &limits).unwrap();
    nothing_is_lost(
        &backward::PlanOptions::default(),
        &[
            &|options| options.deterministic(),
            &|options| options.dkv(dkv),
            &|options| options.dq(dq),
            &|options| options.sms(sms),
        ],
    );
}
