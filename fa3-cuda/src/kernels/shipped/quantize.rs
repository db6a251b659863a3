//! The shipped kernels of quantization.

use fa3_ir::Elem;
use fa3_sched::DeviceLimits;
use fa3_sched::quantize::Plan;
use fa3_types::{Dtype, Positions, QuantizeSpec, RopeStyle, Rotary, Scaling, Shape, Signs, ValueLayout};

use super::Shipped;
use crate::kernels::quantize::{self, ScaleSource, scales::ScaleSpec};

/// The problem that a kernel is for.
struct Row {
    elem: Elem,
    head_dim: usize,
    scaling: Scaling,
    rotary: Option<(RopeStyle, Positions)>,
    hadamard: bool,
    layout: ValueLayout,
    packed: bool,
}

/// Kernels for both block sizes and the head dimensions of each number of lanes, with a rotation, a transform, both and
/// neither. Other features come with both, V with neither, and packed sequences with all of these but a rotation alone.
pub(super) fn quantized() -> impl Iterator<Item = Shipped> {
    const POSITIONS: Positions = Positions::From(0);
    let styles = [None, Some(RopeStyle::Interleaved), Some(RopeStyle::HalfSplit)];
    let row = |elem, head_dim, scaling, rotary, hadamard| Row {
        elem,
        head_dim,
        scaling,
        rotary,
        hadamard,
        layout: ValueLayout::Rows,
        packed: false,
    };
    let plain = [64, 96, 128, 192, 256].into_iter().flat_map(move |head_dim| {
        [64, 128].into_iter().flat_map(move |rows| {
            styles.into_iter().flat_map(move |style| {
                let rotary = style.map(|style| (style, POSITIONS));
                [false, true]
                    .map(|hadamard| row(Elem::Bf16, head_dim, Scaling::Block { rows }, rotary, hadamard))
            })
        })
    });
    let both = move |elem, scaling, positions| {
        row(elem, 128, scaling, Some((RopeStyle::HalfSplit, positions)), true)
    };
    let blocks = Scaling::Block { rows: 128 };
    let others = [
        both(Elem::F16, blocks, POSITIONS),
        both(Elem::Bf16, blocks, Positions::Listed),
        both(Elem::Bf16, Scaling::Given(1.0), POSITIONS),
    ];
    let v = [64, 128, 256].into_iter().flat_map(move |head_dim| {
        let of = |scaling, layout| Row { layout, ..row(Elem::Bf16, head_dim, scaling, None, false) };
        [
            of(blocks, ValueLayout::Transposed),
            of(Scaling::Channel, ValueLayout::Rows),
            of(Scaling::Channel, ValueLayout::Transposed),
            of(Scaling::Tensor, ValueLayout::Transposed),
        ]
    });
    let of_heads = [64, 128, 256].into_iter().flat_map(move |head_dim| {
        let heads = Scaling::Heads { heads: 1 };
        let row = row(Elem::Bf16, head_dim, heads, Some((RopeStyle::HalfSplit, POSITIONS)), true);
        let measuring = Shipped::new(format!("{}/measured", row.name()), row.measuring());
        [Shipped::new(row.name(), row.spec()), measuring]
    });
    let packed = [64, 128, 256].into_iter().flat_map(move |head_dim| {
        let rotary = Some((RopeStyle::HalfSplit, POSITIONS));
        [(None, false), (None, true), (rotary, true)].map(|(rotary, hadamard)| Row {
            packed: true,
            ..row(Elem::Bf16, head_dim, blocks, rotary, hadamard)
        })
    });
    let rows = plain.chain(others).chain(v).chain(packed);
    rows.map(|row| Shipped::new(row.name(), row.spec())).chain(of_heads)
}

/// The kernels that compute scales in a pass of their own.
pub(super) fn scales() -> impl Iterator<Item = Shipped> {
    let channels = [64, 128, 256].into_iter().flat_map(|head_dim| {
        let elem = Elem::Bf16;
        [
            (format!("channel-parts/{elem}/d{head_dim}"), ScaleSpec::ChannelParts { elem, head_dim }),
            (format!("channels/d{head_dim}"), ScaleSpec::Channels { head_dim }),
        ]
    });
    let all = channels.chain([("heads".to_owned(), ScaleSpec::Heads)]);
    all.map(|(name, spec)| Shipped::new(format!("scales/{name}"), spec))
}

impl Row {
    /// The spec of the kernel that runs before this row's kernel, and finds the largest magnitudes of tiles.
    fn measuring(&self) -> quantize::Spec {
        quantize::Spec { scale: ScaleSource::Measured, ..self.spec() }
    }

    fn spec(&self) -> quantize::Spec {
        let Row { elem, head_dim, scaling, rotary, hadamard, layout, packed } = *self;
        let dtype = if elem == Elem::F16 { Dtype::F16 } else { Dtype::Bf16 };
        let shape = Shape { batch: 1, seqlen: 1, heads: 1, head_dim };
        let mut problem = QuantizeSpec::contiguous(dtype, shape);
        (problem.layout, problem.scaling) = (layout, scaling);
        problem.rotary =
            rotary.map(|(style, positions)| Rotary { style, rotary_dim: head_dim, table_rows: 1, positions });
        problem.packed = packed.then_some(1);
        problem.signs = hadamard.then_some(Signs { leading: [0; 8], between: [0; 8] });
        let problem = problem.validate().expect("every row can be quantized");
        let plan = Plan::new(&problem, &DeviceLimits::h100_sxm()).expect("there are few tiles");
        quantize::Spec::of(&plan)
    }

    fn name(&self) -> String {
        let Row { elem, head_dim, scaling, rotary, hadamard, layout, packed } = *self;
        let scales = match scaling {
            Scaling::Block { rows } => rows.to_string(),
            Scaling::Heads { .. } | Scaling::Tensor => "heads".to_owned(),
            Scaling::Given(_) => "given".to_owned(),
            Scaling::Channel => "channels".to_owned(),
        };
        let words = [
            rotary
                .map(|(style, _)| if style == RopeStyle::Interleaved { "interleaved" } else { "half-split" }),
            rotary.filter(|&(_, positions)| positions == Positions::Listed).map(|_| "listed"),
            hadamard.then_some("hadamard"),
            (layout == ValueLayout::Transposed).then_some("transposed"),
            packed.then_some("packed"),
        ];
        let words: String = words.into_iter().flatten().flat_map(|word| ["/", word]).collect();
        format!("quantize/{elem}/d{head_dim}/{scales}{words}")
    }
}
