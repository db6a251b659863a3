//! Every kernel that is shipped, by a name that stays: for whatever looks at all of them.
//!
//! A forward kernel is called after what it computes and how, `fwd/bf16/d128/128x128x3/causal/cap/dynamic`: elements,
//! head dimension, tile (rows x keys x stages), sides of the mask, soft cap, scheduler, and then words for what differs
//! from the tile table. A kernel of the ladder is called by its name and its elements, `ladder/gemm/bf16`.

mod backward;
mod quantize;

use std::collections::HashSet;

use fa3_ir::{Elem, Kernel};
use fa3_sched::forward::{CtaTile, Fp8Inputs, Loads, MaskClass, Overlap, Precision, Rescale, TileRow};
use fa3_sched::{Longest, Order, Scheduler};
use fa3_types::{Mask, ValueLayout};

use super::fwd::FwdSpec;
use super::transpose_v::TransposeSpec;
use super::{Spec, ladder};

const NO_SIDE: Mask = Mask::None;
const LEFT: Mask = Mask::Window { left: Some(0), right: None };
const BOTH_SIDES: Mask = Mask::Window { left: Some(0), right: Some(0) };

/// A kernel that is shipped.
#[derive(Clone, Debug)]
pub struct Shipped {
    /// Its name, which no other has.
    pub name: String,
    /// What it is made from.
    pub spec: Spec,
}

impl Shipped {
    /// Builds it.
    pub fn kernel(&self) -> Kernel {
        self.spec.kernel()
    }

    /// Whether it stands for others in slow tests, as of ptxas. Element types take the same registers, a CTA of one
    /// tile takes no more than one of many, and a soft cap's own matter where the mask takes most: on its left side.
    pub fn stands_for_others(&self) -> bool {
        if let Spec::Backward(spec) = &self.spec {
            return backward::stands_for_others(spec);
        }
        self.forward().is_none_or(|spec| {
            let has_left = spec.mask.reach().0.is_some();
            spec.output == Elem::Bf16
                && spec.scheduler != Scheduler::OneTile
                && (has_left || !spec.softcap)
                && (spec.mask == NO_SIDE || stands_for_inputs(spec.tile.precision))
        })
    }

    /// What it is made from, if it is a forward kernel.
    pub fn forward(&self) -> Option<&FwdSpec> {
        match &self.spec {
            Spec::Forward(spec) => Some(spec),
            Spec::ForwardTiles(_)
            | Spec::TransposeV(_)
            | Spec::Backward(_)
            | Spec::Quantize(_)
            | Spec::Scales(_)
            | Spec::Ladder(_) => None,
        }
    }
}

/// Every kernel that is shipped, once: the ladder, quantization, the backward pass, what plans of the forward pass
/// choose, what the ablation measures.
pub fn shipped() -> impl Iterator<Item = Shipped> {
    let mut seen = HashSet::new();
    let specs = planned().chain(ablated()).filter(move |spec| seen.insert(*spec));
    ladder()
        .chain(quantize::quantized())
        .chain(quantize::scales())
        .chain(backward::backward())
        .chain(transposed_v())
        .chain(specs.map(|spec| Shipped { name: name(&spec), spec: Spec::Forward(spec) }))
}

/// The ladder's kernels, for every type of elements that they take.
fn ladder() -> impl Iterator<Item = Shipped> {
    ladder::Spec::ALL.into_iter().map(|spec| Shipped {
        name: format!("ladder/{}/{}", spec.name(), spec.elem()),
        spec: Spec::Ladder(spec),
    })
}

/// What transposes V of e4m3 before, where plans have that done.
fn transposed_v() -> impl Iterator<Item = Shipped> {
    [128, 256].into_iter().map(|head_dim| Shipped {
        name: format!("transpose-v/d{head_dim}"),
        spec: Spec::TransposeV(TransposeSpec { head_dim }),
    })
}

/// What plans choose: a row of the tile table, with all inputs of e4m3 that it takes, with every mask that it serves,
/// with a soft cap and without, with the schedulers of few tiles and of many, in clusters and without.
fn planned() -> impl Iterator<Item = FwdSpec> {
    let rows = TileRow::table()
        .iter()
        .flat_map(|row| of_all_inputs(row.tile).into_iter().map(move |tile| (row, tile)));
    rows.flat_map(|(row, tile)| {
        let masks = row.masks.iter().flat_map(|&class| sides(class));
        masks.flat_map(move |&mask| {
            ways(row, mask).into_iter().flat_map(move |(scheduler, cluster)| {
                [false, true].into_iter().flat_map(move |softcap| {
                    elements(tile.precision).map(|(elem, output)| FwdSpec {
                        elem,
                        output,
                        softcap,
                        cluster,
                        ..spec(tile, mask, scheduler)
                    })
                })
            })
        })
    })
}

/// A tile of the table for all inputs that it takes.
fn of_all_inputs(tile: CtaTile) -> Vec<CtaTile> {
    if tile.precision == Precision::Half {
        return vec![tile];
    }
    let layouts = [ValueLayout::Rows, ValueLayout::Transposed];
    let inputs = layouts.into_iter().flat_map(|v_layout| {
        let scales = [(false, false), (true, false), (false, true), (true, true)];
        scales.map(|(block_scales, v_channels)| Fp8Inputs { v_layout, block_scales, v_channels })
    });
    inputs.map(|inputs| tile.of_inputs(inputs)).collect()
}

/// Whether it is of 16 bits, or of e4m3 with V in rows and scales of heads, or with neither. Under a mask, one of
/// these differences takes the registers that both take together, or fewer. Channels of V are looked at after all
/// blocks.
fn stands_for_inputs(precision: Precision) -> bool {
    match precision {
        Precision::Half => true,
        Precision::Fp8(Fp8Inputs { v_layout, block_scales, v_channels }) => {
            (v_layout == ValueLayout::Transposed) == block_scales && !v_channels
        }
    }
}

/// Of Q, K and V, and of O.
fn elements(precision: Precision) -> [(Elem, Elem); 2] {
    [Elem::Bf16, Elem::F16].map(|output| match precision {
        Precision::Half => (output, output),
        Precision::Fp8(_) => (Elem::E4m3, output),
    })
}

/// The masks of a class, by their bounded sides. A window without a left side has the code of the causal mask.
fn sides(class: MaskClass) -> &'static [Mask] {
    match class {
        MaskClass::Dense => &[NO_SIDE],
        MaskClass::Causal => &[Mask::Causal],
        MaskClass::Window => &[BOTH_SIDES, LEFT, Mask::Causal],
    }
}

/// How tiles reach CTAs, few of them and many, and in clusters of how many CTAs. There are none of rows that are for a
/// single tile a head.
fn ways(row: &TileRow, mask: Mask) -> Vec<(Scheduler, u32)> {
    let many = if mask == NO_SIDE { Scheduler::StaticPersistent } else { Scheduler::DynamicPersistent };
    let half = row.tile.precision == Precision::Half;
    let few = if half { Scheduler::OneTile } else { Scheduler::StaticPersistent };
    let pairs = half && mask == NO_SIDE && row.max_rows.is_none_or(|rows| rows > row.tile.tile_m);
    let mut ways = vec![(few, 1), (many, 1)];
    ways.extend(pairs.then_some((many, 2)));
    ways
}

/// In bf16, without a soft cap, with the order that plans have for this mask.
fn spec(tile: CtaTile, mask: Mask, scheduler: Scheduler) -> FwdSpec {
    let order = match mask {
        NO_SIDE => Order::Linear,
        Mask::Causal | Mask::Window { .. } => {
            Order::LongestFirst { section: 1, longest: Longest::from(mask) }
        }
    };
    let [(elem, output), _] = elements(tile.precision);
    let head_dim_v = tile.head_dim_v;
    FwdSpec { elem, output, tile, head_dim_v, mask, softcap: false, order, scheduler, cluster: 1 }
}

/// What the ablation measures, at head_dim 128 with the tile of the longest sequences: other pipelines, with fewer keys
/// where one needs more registers, and other orders of tiles.
fn ablated() -> impl Iterator<Item = FwdSpec> {
    let is_measured = |row: &&TileRow| row.tile.head_dim == 128 && row.masks == [MaskClass::Dense];
    let tile = TileRow::table().iter().find(is_measured).expect("the table has the tile").tile;
    let rescale = Rescale::EveryBlock;
    let tiles = [
        CtaTile { overlap: Overlap::None, rescale, ..tile },
        CtaTile { rescale, ..tile },
        CtaTile { overlap: Overlap::ThreeStage, rescale, tile_n: 48, ..tile },
        CtaTile { overlap: Overlap::None, rescale, ping_pong: false, ..tile },
        CtaTile { rescale, ping_pong: false, ..tile },
        CtaTile { loads: Loads::Consumers, rescale, ..tile },
    ];
    let causal = |scheduler| spec(tile, Mask::Causal, scheduler);
    let [dealt, drawn] = [Scheduler::StaticPersistent, Scheduler::DynamicPersistent].map(causal);
    let linear = [dealt, drawn].map(|spec| FwdSpec { order: Order::Linear, ..spec });
    let pipelines = tiles.map(|tile| spec(tile, NO_SIDE, Scheduler::StaticPersistent));
    pipelines.into_iter().chain([dealt]).chain(linear)
}

/// The name of a forward kernel.
fn name(spec: &FwdSpec) -> String {
    let FwdSpec { elem, output, tile, mask, softcap, order, scheduler, cluster, .. } = *spec;
    let CtaTile { head_dim, head_dim_v, tile_m, tile_n, stages, .. } = tile;
    let dims = if head_dim == head_dim_v { head_dim.to_string() } else { format!("{head_dim}-{head_dim_v}") };
    let mut words = vec![format!("fwd/{elem}/d{dims}/{tile_m}x{tile_n}x{stages}")];
    let mut word = |word: &str| words.push(word.to_owned());
    word(sides_word(mask));
    if softcap {
        word("cap");
    }
    word(scheduler_word(scheduler));
    if elem == Elem::E4m3 && output == Elem::F16 {
        word("to-f16");
    }
    if let Precision::Fp8(Fp8Inputs { v_layout, block_scales, v_channels }) = tile.precision {
        if v_layout == ValueLayout::Transposed {
            word("v-transposed");
        }
        if block_scales {
            word("block-scales");
        }
        if v_channels {
            word("v-channels");
        }
    }
    match tile.overlap {
        Overlap::None => word("no-overlap"),
        Overlap::TwoStage => {}
        Overlap::ThreeStage => word("three-stage"),
    }
    let differs = [
        (tile.rescale == Rescale::EveryBlock && tile.precision == Precision::Half, "every-block"),
        (tile.consumers > 1 && !tile.ping_pong, "no-turns"),
        (tile.loads == Loads::Consumers, "no-producer"),
        (mask != NO_SIDE && order == Order::Linear, "linear"),
        (cluster > 1, "clusters"),
    ];
    differs.iter().filter(|(differs, _)| *differs).for_each(|(_, what)| word(what));
    words.join("/")
}

/// The sides of a mask that are bounded.
fn sides_word(mask: Mask) -> &'static str {
    match mask.reach() {
        (None, None) => "none",
        (None, Some(_)) => "causal",
        (Some(_), None) => "left",
        (Some(_), Some(_)) => "window",
    }
}

fn scheduler_word(scheduler: Scheduler) -> &'static str {
    match scheduler {
        Scheduler::OneTile => "one",
        Scheduler::StaticPersistent => "static",
        Scheduler::DynamicPersistent => "dynamic",
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use fa3_sched::DeviceLimits;
    use fa3_sched::forward::Plan;
    use fa3_types::{Dtype, ProblemSpec, Shape};

    use super::*;

    #[test]
    fn names_are_unique() {
        let mut names = HashMap::new();
        for shipped in shipped() {
            let twin = names.insert(shipped.name.clone(), shipped.clone());
            assert!(twin.is_none(), "{twin:?} and {shipped:?}");
        }
        assert!(names.len() > 400, "{}", names.len());
        assert!(names.contains_key("ladder/gemm/f16"));
        assert!(names.contains_key("fwd/bf16/d128/128x128x3/causal/cap/dynamic"));
        assert!(names.contains_key("fwd/bf16/d128/192x80x3/none/static/every-block/no-producer"));
        assert!(names.contains_key("fwd/e4m3/d128/128x128x2/causal/cap/dynamic"));
        assert!(names.contains_key("fwd/e4m3/d256/128x128x2/none/static/to-f16/no-overlap"));
    }

    /// Whatever plans choose is shipped.
    #[test]
    fn planned_kernels_are_shipped() {
        let known: HashSet<FwdSpec> = shipped().filter_map(|shipped| shipped.forward().copied()).collect();
        let windows = [(Some(7), Some(3)), (Some(7), None), (None, Some(3))];
        let windows = windows.map(|(left, right)| Mask::window(left, right));
        let masks = || [Mask::None, Mask::Causal].into_iter().chain(windows);
        let dims = [(64, 64), (64, 256), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)];
        let dims_of_fp8 = [(64, 64), (128, 128), (256, 256)];
        let halves = [(1, None, Dtype::F16), (200, None, Dtype::Bf16), (200, Some(30.0), Dtype::F16)];
        type Inputs = fn(ProblemSpec) -> ProblemSpec;
        let half =
            halves.map(|(heads, cap, dtype)| (&dims[..], heads, cap, dtype, dtype, (|spec| spec) as Inputs));
        let inputs: [Inputs; 8] = [
            |spec| spec,
            |spec| spec.transposed_v(),
            |spec| spec.block_scales(64),
            |spec| spec.transposed_v().block_scales(128),
            |spec| spec.v_channels(),
            |spec| spec.transposed_v().v_channels(),
            |spec| spec.block_scales(64).v_channels(),
            |spec| spec.transposed_v().block_scales(128).v_channels(),
        ];
        let fp8 = inputs.into_iter().flat_map(|inputs| {
            halves.map(|(heads, cap, output)| (&dims_of_fp8[..], heads, cap, Dtype::E4m3, output, inputs))
        });
        // Types of 16 bits, and soft caps, make no difference to the choice.
        let plain = |spec: FwdSpec| {
            let elem = if spec.elem == Elem::E4m3 { Elem::E4m3 } else { Elem::Bf16 };
            FwdSpec { elem, output: Elem::Bf16, softcap: false, ..spec }
        };
        let mut found = HashSet::new();
        for (dims, heads, cap, dtype, output, inputs) in half.into_iter().chain(fp8) {
            for (mask, seqlen) in
                masks().flat_map(|mask| [50, 100, 1024, 1100, 2000, 3000, 8192].map(|len| (mask, len)))
            {
                for &(head_dim, head_dim_v) in dims {
                    let shape = Shape { batch: 1, seqlen, heads, head_dim };
                    let problem = ProblemSpec::dense(dtype, shape, shape).head_dim_v(head_dim_v).mask(mask);
                    let mut problem = match cap {
                        Some(cap) => problem.softcap(cap),
                        None => problem,
                    };
                    problem.o.dtype = output;
                    let plan =
                        Plan::new(&inputs(problem).validate().unwrap(), &DeviceLimits::h100_sxm()).unwrap();
                    let spec = FwdSpec::of(&plan);
                    assert!(known.contains(&spec), "{plan}\n{spec:?}");
                    found.insert(plain(spec));
                }
            }
        }
        // Few rows, of several query heads for each head of K and V.
        for (rows, (head_dim, head_dim_v)) in
            [1, 100].into_iter().flat_map(|rows| dims.map(|dims| (rows, dims)))
        {
            let q = Shape { batch: 64, seqlen: rows, heads: 32, head_dim };
            let problem = ProblemSpec::dense(Dtype::Bf16, q, Shape { seqlen: 4096, heads: 8, ..q });
            let problem = problem.head_dim_v(head_dim_v).validate().unwrap();
            let plan = Plan::new(&problem, &DeviceLimits::h100_sxm()).unwrap();
            assert!(known.contains(&FwdSpec::of(&plan)), "{plan}");
        }
        let planned: HashSet<FwdSpec> = planned().map(plain).collect();
        let unplanned: Vec<String> = planned.difference(&found).map(name).collect();
        assert_eq!(unplanned, [""; 0]);
    }
}
