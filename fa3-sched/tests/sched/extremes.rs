//! Plans of extreme problems: each is made or refused, without a panic.

use std::num::NonZeroU32;

use fa3_sched::{DeviceLimits, backward, forward, fp8, quantize};
use fa3_types::{BackwardSpec, Dtype, Fp8Spec, Mask, ProblemSpec, QuantizeSpec, Scaling, Shape};
use proptest::option;
use proptest::prelude::*;
use proptest::sample::select;

/// Extents up to the largest extent of a tensor. The product of a few such extents does not fit 32 bits. Most tensors
/// of such extents are valid only because another extent is 0.
fn extent() -> impl Strategy<Value = usize> {
    let powers = (0u32..31).prop_map(|power| 1 << power);
    prop_oneof![Just(0), Just(1), 1usize..300, powers, Just((1 << 31) - 1), 1usize..1 << 31]
}

fn shape() -> impl Strategy<Value = Shape> {
    let head_dim = select(vec![16, 64, 128, 192, 256]);
    (extent(), extent(), extent(), head_dim).prop_map(|(batch, seqlen, heads, head_dim)| Shape {
        batch,
        seqlen,
        heads: heads.max(1),
        head_dim,
    })
}

fn mask() -> impl Strategy<Value = Mask> {
    let side = || option::of(prop_oneof![0u32..300, Just(u32::MAX), any::<u32>()]);
    let chunk = prop_oneof![2 => Just(0), 1 => 1..300_i64, 1 => Just(i64::from(u32::MAX))];
    (side(), side(), chunk).prop_map(|(left, right, chunk)| {
        Mask::window(left, right).and(Mask::from_chunk(chunk).unwrap()).unwrap()
    })
}

fn limits() -> impl Strategy<Value = DeviceLimits> {
    let sms = prop_oneof![Just(1), Just(132), Just(u32::MAX), 1u32..=u32::MAX];
    sms.prop_map(|sms| DeviceLimits::h100_sxm().sms(NonZeroU32::new(sms).expect("it is 1 or more")))
}

prop_compose! {
    /// Attention with several query heads for each KV head, if the number of heads allows it.
    fn attention()(
        q in shape(),
        seqlen_k in extent(),
        group in prop_oneof![1usize..5, extent()],
        head_dim_v in select(vec![16, 64, 128, 256]),
        dtype in select(vec![Dtype::F16, Dtype::Bf16, Dtype::E4m3]),
        mask in mask(),
    ) -> ProblemSpec {
        let heads = if group > 0 && q.heads.is_multiple_of(group) { q.heads / group } else { q.heads };
        let kv = Shape { seqlen: seqlen_k, heads, ..q };
        ProblemSpec::dense(dtype, q, kv).head_dim_v(head_dim_v).mask(mask)
    }
}

fn scaling(heads: usize) -> impl Strategy<Value = Scaling> {
    let of_heads = prop_oneof![Just(1), Just(heads)].prop_map(|heads| Scaling::Heads { heads });
    let of_rows = select(vec![64, 128]).prop_map(|rows| Scaling::Block { rows });
    prop_oneof![of_heads, of_rows, Just(Scaling::Tensor), Just(Scaling::Given(1.0)), Just(Scaling::Channel)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn attention_is_planned_or_refused(spec in attention(), limits in limits(), deterministic in any::<bool>()) {
        if let Ok(problem) = spec.clone().validate()
            && let Ok(plan) = forward::Plan::new(&problem, &limits)
        {
            prop_assert!(plan.dense().unwrap().schedule().grid() <= plan.dense().unwrap().schedule().num_tiles());
        }
        let options = backward::PlanOptions::default();
        let options = if deterministic { options.deterministic() } else { options };
        if let Ok(problem) = BackwardSpec::contiguous(spec.clone()).validate()
            && let Ok(plan) = backward::Plan::with(&problem, &limits, &options)
        {
            prop_assert!(plan.dense().unwrap().unvisited_rows() as usize <= problem.dq().shape.seqlen);
        }
        if let Ok(problem) = Fp8Spec::new(spec).validate() {
            let _ = fp8::Plan::new(&problem, &limits);
        }
    }

    #[test]
    fn quantization_is_planned_or_refused(
        (shape, scaling) in shape().prop_flat_map(|shape| (Just(shape), scaling(shape.heads))),
        transposed in any::<bool>(),
        limits in limits(),
    ) {
        let spec = QuantizeSpec::contiguous(Dtype::F16, shape).scaling(scaling);
        let spec = if transposed { spec.transposed() } else { spec };
        if let Ok(problem) = spec.validate()
            && let Ok(plan) = quantize::Plan::new(&problem, &limits)
        {
            prop_assert!(!plan.to_string().is_empty());
            prop_assert_eq!(plan.decoder().is_some(), plan.grid() > 0);
        }
    }
}

/// 2²⁰ heads share a scale over 2²³ blocks each, with 0 sequences.
#[test]
fn maxima_that_32_bits_do_not_count() {
    let (batch, seqlen, heads, head_dim) = (0, 1 << 30, 1 << 20, 16);
    let spec = QuantizeSpec::contiguous(Dtype::F16, Shape { batch, seqlen, heads, head_dim });
    let problem = spec.scaling(Scaling::Heads { heads }).validate().unwrap();
    let plan = quantize::Plan::new(&problem, &DeviceLimits::h100_sxm()).unwrap();
    let quantize::Scales::Maxima(quantize::MaximaPlan { maxima, .. }) = plan.scales() else {
        panic!("heads have maxima");
    };
    assert_eq!((plan.grid(), maxima), (0, 0));
}
