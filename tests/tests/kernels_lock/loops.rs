//! Checks of a forward kernel's main loops in machine code. The order of instructions must give the paper's overlap
//! (§3.2). A new compiler or a change of the kernel could lose the overlap without a wrong result.

use fa3_cuda::kernels::fwd::FwdSpec;
use fa3_cuda::sass::{Class, Listing, Product, Round, product_loops};
use fa3_sched::forward::{CtaTile, Fp8Inputs, Pipeline, Precision, ROW_SUM_COLS};

/// Smallest percentage of exponentials between the start of PV and the wait for it, in the loop without a mask, if the
/// softmax overlaps PV. It is far below 100, because PTX does not tie exponentials to the wait, and ptxas 13.5 moves
/// the wait ahead of most of them.
const UNDER_PV: usize = 12;

/// Largest number of moves to uniform registers in an iteration. Today there are at most two. A serialized loop needs
/// addresses in these registers, and may have two moves for every HGMMA.
const TO_UNIFORM: usize = 4;

/// Columns of a 16-bit panel.
const PANEL: u32 = 64;

/// Number of additional moves with block scales, for the addresses of two scales and for their values.
const SCALES_TO_UNIFORM: usize = 5;

/// Number of additional moves if halves of V have stages of their own.
const HALVES_TO_UNIFORM: usize = 2;

/// Largest number of loads and stores of spilled registers in a loop with `qv` whose Q is rewritten. Other loops have
/// none.
const SPILLS_OF_REWRITTEN_Q: usize = 5;

/// A fault of a main loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Fault {
    #[error("no loop has products")]
    NoLoop,
    #[error("{found} products a round, not Q K^T and P V")]
    Products { found: usize },
    #[error(
        "{parts} instructions of {columns} columns for {name}, not {expected_parts} of {expected_columns}"
    )]
    Shape { name: &'static str, parts: usize, columns: u32, expected_parts: usize, expected_columns: u32 },
    #[error("{count} waits or barriers within {name}")]
    Interrupted { name: &'static str, count: usize },
    #[error("{count} loads and stores of spilled registers")]
    Spills { count: usize },
    #[error("{count} moves to uniform registers")]
    ToUniform { count: usize },
    #[error("{count} waits for products, not one for each")]
    Waits { count: usize },
    #[error("P V is not complete before the scores, or does not begin before them")]
    ScoresFirst,
    #[error("P V does not begin before the wait for Q K^T: only one product is in flight")]
    OneInFlight,
    #[error("P V begins before the wait for Q K^T, although nothing is to overlap")]
    TwoInFlight,
    #[error("the wait for Q K^T waits for P V, too")]
    OneWait,
    #[error("{count} exponentials are not between the wait for Q K^T and P V")]
    Astray { count: usize },
    #[error("{under} of {all} exponentials under P V, less than {UNDER_PV} %")]
    Exposed { under: usize, all: usize },
}

/// The faults of a forward kernel's main loops, each with the start address of its loop.
pub(crate) fn faults(spec: &FwdSpec, listing: &Listing) -> Vec<(u32, Fault)> {
    let rounds = product_loops(listing);
    // The loop without a mask is the shortest. The other loops run only a few times per tile.
    let Some(main) = rounds.iter().map(|round| round.instructions.len()).min() else {
        return vec![(0, Fault::NoLoop)];
    };
    let faults = rounds.iter().flat_map(|round| {
        let is_main = round.instructions.len() == main;
        of_round(spec, round, is_main).into_iter().map(|fault| (round.instructions[0].address, fault))
    });
    faults.collect()
}

/// Whether the kernel has block scales.
fn has_block_scales(spec: &FwdSpec) -> bool {
    matches!(spec.tile.precision, Precision::Fp8(Fp8Inputs { block_scales: true, .. }))
}

fn of_round(spec: &FwdSpec, round: &Round<'_>, is_main: bool) -> Vec<Fault> {
    let mut faults = Vec::new();
    let most = if spec.tile.qv && spec.rewrites_q() { SPILLS_OF_REWRITTEN_Q } else { 0 };
    match round.count(Class::Spill) {
        count if count <= most => {}
        count => faults.push(Fault::Spills { count }),
    }
    let of_scales = if has_block_scales(spec) { SCALES_TO_UNIFORM } else { 0 };
    let of_halves = if spec.tile.column_groups() > 1 { HALVES_TO_UNIFORM } else { 0 };
    match round.count(Class::ToUniform) {
        count if count <= TO_UNIFORM + of_scales + of_halves => {}
        count => faults.push(Fault::ToUniform { count }),
    }
    if spec.tile.column_groups() > 1 {
        faults.extend(of_shared_columns(spec, &round.products(), round.count(Class::Wait)));
        return faults;
    }
    let CtaTile { head_dim, head_dim_v, tile_n, precision, qv, .. } = spec.tile;
    let step = 32 / precision.bytes();
    let products = round.products();
    let (scores, sums) = match (&products[..], qv) {
        ([scores, sums], false) => {
            faults.extend(of_product("Q K^T", scores, (head_dim, step), tile_n));
            (scores, sums)
        }
        ([of_k, of_v, sums], true) => {
            faults.extend(of_product("Q K^T", of_k, (head_dim, step), tile_n));
            faults.extend(of_product("Qv V^T", of_v, (head_dim_v, step), tile_n));
            (of_v, sums)
        }
        _ => {
            faults.push(Fault::Products { found: products.len() });
            return faults;
        }
    };
    let of_row_sums = if precision.is_fp8() { ROW_SUM_COLS } else { 0 };
    faults.extend(of_product("P V", sums, (tile_n, step), spec.tile.columns() + of_row_sums));
    match round.count(Class::Wait) {
        2 => faults.extend(overlap(spec, round, (scores, sums), is_main)),
        count => faults.push(Fault::Waits { count }),
    }
    faults
}

/// Checks the products of a warpgroup that computes part of O's columns. In the second warpgroup PV has two parts if
/// there is `qv`. In the first warpgroup, the scores of the next block follow PV, and the last panel of these scores
/// has its own wait.
fn of_shared_columns(spec: &FwdSpec, products: &[Product], waits: usize) -> Vec<Fault> {
    let CtaTile { head_dim, tile_n, precision, qv, .. } = spec.tile;
    let step = 32 / precision.bytes();
    let (columns, of_k) = (spec.tile.columns(), (head_dim / PANEL).div_ceil(2) * PANEL);
    let half = columns / PANEL / 2 * PANEL;
    // If rows are gathered, the second half of V has two parts of rows, not of columns.
    let has_two = qv && spec.gathered_cols.is_none();
    let parts = match spec.first_rows_of_second_half() {
        Some(first) => vec![(first, columns), (tile_n - first, columns)],
        None if has_two => vec![(tile_n, columns - half), (tile_n, half)],
        None => vec![(tile_n, columns)],
    };
    let is_second = products.len() == parts.len();
    let (sums, scores) = products.split_at(if is_second { parts.len() } else { products.len().min(1) });
    // The first warpgroup waits for PV, for the last panel, for the product before that panel, and for the first
    // columns of K.
    let (of_v, depths, expected) = match (is_second, qv) {
        (true, _) => (parts, vec![], sums.len()),
        (false, false) => (vec![(tile_n, columns)], vec![of_k, head_dim - of_k - PANEL, PANEL], 4),
        (false, true) if has_two => {
            (vec![(tile_n, columns)], vec![head_dim, columns, columns - half, half - PANEL, PANEL], 3)
        }
        (false, true) => (vec![(tile_n, columns)], vec![head_dim, columns, columns - PANEL, PANEL], 3),
    };
    let mut faults = Vec::new();
    if (sums.len(), scores.len()) != (of_v.len(), depths.len()) {
        faults.push(Fault::Products { found: products.len() });
    }
    for (product, (keys, columns)) in sums.iter().zip(of_v) {
        faults.extend(of_product("P V", product, (keys, step), columns));
    }
    for (product, depth) in scores.iter().zip(depths) {
        faults.extend(of_product("Q K^T", product, (depth, step), tile_n));
    }
    if waits != expected {
        faults.push(Fault::Waits { count: waits });
    }
    if sums.iter().any(|sums| scores.iter().any(|product| product.wait <= sums.wait)) {
        faults.push(Fault::ScoresFirst);
    }
    faults
}

/// Checks that the instructions of a product of this depth, of `step` elements each, form one uninterrupted sequence.
fn of_product(name: &'static str, product: &Product, (depth, step): (u32, u32), columns: u32) -> Vec<Fault> {
    let mut faults = Vec::new();
    let expected_parts = depth.div_ceil(step) as usize;
    if (product.parts, product.n) != (expected_parts, columns) {
        let Product { parts, n, .. } = *product;
        faults.push(Fault::Shape { name, parts, columns: n, expected_parts, expected_columns: columns });
    }
    match product.interruptions {
        0 => {}
        count => faults.push(Fault::Interrupted { name, count }),
    }
    faults
}

/// Checks the instructions between the start of the products and their waits.
fn overlap(
    spec: &FwdSpec,
    round: &Round<'_>,
    (scores, sums): (&Product, &Product),
    is_main: bool,
) -> Option<Fault> {
    let (all, under) = (round.count(Class::Exp), round.under(sums, Class::Exp));
    let both_in_flight = scores.wait.is_none_or(|wait| sums.first < wait);
    let shared_wait = scores.wait >= sums.wait;
    let is_hidden = 100 * under >= UNDER_PV * all;
    match spec.tile.pipeline {
        Pipeline::Serial if both_in_flight => Some(Fault::TwoInFlight),
        Pipeline::Serial => {
            let between = round.instructions[scores.wait.unwrap_or(0)..sums.first].iter();
            let between = between.filter(|instruction| instruction.class() == Class::Exp).count();
            (between < all).then_some(Fault::Astray { count: all - between })
        }
        Pipeline::Paired | Pipeline::TwoStage | Pipeline::ThreeStage if !both_in_flight => {
            Some(Fault::OneInFlight)
        }
        Pipeline::Paired | Pipeline::TwoStage | Pipeline::ThreeStage if shared_wait => Some(Fault::OneWait),
        Pipeline::Paired => None,
        Pipeline::TwoStage | Pipeline::ThreeStage => {
            (is_main && !is_hidden).then_some(Fault::Exposed { under, all })
        }
    }
}

#[cfg(test)]
mod tests {
    use fa3_cuda::kernels::fwd::SequenceForm;
    use fa3_ir::Elem;
    use fa3_sched::forward::TileRow;
    use fa3_sched::{Order, Scheduler};
    use fa3_types::Mask;

    use super::*;

    /// A tile of 32 keys and 32 columns, whose products have two instructions each.
    fn spec(pipeline: Pipeline) -> FwdSpec {
        let row = TileRow::table()[0].tile;
        let tile = CtaTile { head_dim: 32, head_dim_v: 32, tile_m: 128, tile_n: 32, pipeline, ..row };
        FwdSpec {
            elem: Elem::Bf16,
            output: Elem::Bf16,
            tile,
            head_dim_v: 32,
            mask: Mask::None,
            softcap: false,
            score: None,
            sink: false,
            lse_without_sink: false,
            max_logits: false,
            stored_lse: false,
            order: Order::Linear,
            scheduler: Scheduler::StaticPersistent,
            cluster: 1,
            sequences: SequenceForm::Dense,
            given_table: false,
            shares: None,
            merges: None,
            per_sm: 1,
            pack: 1,
            page_block: None,
            gathered_cols: None,
            row_scales: false,
            token_scales: None,
            indexed: false,
        }
    }

    const SCORES: &str = "HGMMA.64x32x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT";
    const MORE_SCORES: &str = "HGMMA.64x32x16.F32.BF16 R24, gdesc[UR4], R24, gsb0";
    const SUMS: &str = "HGMMA.64x32x16.F32.BF16 R64, R48, gdesc[UR4].tnspB, R64";
    const MORE_SUMS: &str = "HGMMA.64x32x16.F32.BF16 R64, R52, gdesc[UR4].tnspB, R64, gsb0";
    const ONE: &str = "WARPGROUP.DEPBAR.LE gsb0, 0x1";
    const ALL: &str = "WARPGROUP.DEPBAR.LE gsb0, 0x0";
    const EXP: &str = "MUFU.EX2 R24, R24";

    const TWO_STAGE: [&str; 10] = [
        SCORES,
        MORE_SCORES,
        SUMS,
        MORE_SUMS,
        ONE,
        "FMNMX R2, R2, R24, !PT",
        EXP,
        EXP,
        ALL,
        "F2FP R4, R5, R6",
    ];
    const ONE_AFTER_THE_OTHER: [&str; 8] = [SCORES, MORE_SCORES, ALL, EXP, EXP, SUMS, MORE_SUMS, ALL];

    /// A loop of these instructions.
    fn listing(instructions: &[&str]) -> Listing {
        let lines = instructions.iter().map(|text| format!("/*0010*/ {text} ;\n")).collect::<String>();
        let text = format!(".L_x_0:\n{lines}/*0010*/ @P0 BRA `(.L_x_0) ;\n/*0020*/ EXIT ;\n");
        Listing::parse(&text).unwrap()
    }

    /// The faults of a loop of these instructions.
    fn found(pipeline: Pipeline, instructions: &[&str]) -> Vec<Fault> {
        let faults = faults(&spec(pipeline), &listing(instructions));
        faults.into_iter().map(|(_, fault)| fault).collect()
    }

    /// The instructions with one of them moved.
    fn moved<const N: usize>(mut instructions: [&str; N], from: usize, to: usize) -> [&str; N] {
        if from < to {
            instructions[from..=to].rotate_left(1);
        } else {
            instructions[to..=from].rotate_right(1);
        }
        instructions
    }

    #[test]
    fn good_loops() {
        assert_eq!(found(Pipeline::TwoStage, &TWO_STAGE), []);
        assert_eq!(found(Pipeline::ThreeStage, &TWO_STAGE), []);
        assert_eq!(found(Pipeline::Serial, &ONE_AFTER_THE_OTHER), []);
    }

    #[test]
    fn a_wait_before_the_softmax() {
        for pipeline in [Pipeline::TwoStage, Pipeline::ThreeStage] {
            let early = moved(TWO_STAGE, 8, 5);
            assert_eq!(found(pipeline, &early), [Fault::Exposed { under: 0, all: 2 }]);
            let half = moved(TWO_STAGE, 8, 7);
            assert_eq!(found(pipeline, &half), []);
        }
    }

    #[test]
    fn a_wait_before_the_softmax_that_is_meant() {
        let spec = spec(Pipeline::Paired);
        assert_eq!(faults(&spec, &listing(&moved(TWO_STAGE, 8, 5))), []);
        let mut both = TWO_STAGE;
        both[4] = ALL;
        assert_eq!(faults(&spec, &listing(&both)).len(), 1);
        assert_eq!(faults(&spec, &listing(&ONE_AFTER_THE_OTHER)).len(), 1);
    }

    #[test]
    fn products_one_after_the_other() {
        assert_eq!(found(Pipeline::TwoStage, &ONE_AFTER_THE_OTHER), [Fault::OneInFlight]);
        assert_eq!(found(Pipeline::Serial, &TWO_STAGE), [Fault::TwoInFlight]);
        let mut both = TWO_STAGE;
        both[4] = ALL;
        assert_eq!(found(Pipeline::TwoStage, &both), [Fault::OneWait]);
        let late = moved(ONE_AFTER_THE_OTHER, 4, 7);
        assert_eq!(found(Pipeline::Serial, &late), [Fault::Astray { count: 1 }]);
    }

    /// Serialization, which ptxas reports as C7510, puts a wait after every instruction.
    #[test]
    fn a_wait_after_every_instruction() {
        let parts = [SCORES, MORE_SCORES, SUMS, MORE_SUMS]
            .map(|part| if part.ends_with("gsb0") { part.to_owned() } else { format!("{part}, gsb0") });
        let serial: Vec<&str> =
            parts.iter().flat_map(|part| [part.as_str(), ALL]).chain([EXP, EXP]).collect();
        assert_eq!(found(Pipeline::TwoStage, &serial), [Fault::Products { found: 4 }]);
    }

    #[test]
    fn what_stops_a_product() {
        let mut barrier = TWO_STAGE.to_vec();
        barrier.insert(3, "BAR.SYNC.DEFER_BLOCKING R2, 0x100");
        assert_eq!(found(Pipeline::TwoStage, &barrier), [Fault::Interrupted { name: "P V", count: 1 }]);
        let mut wait = TWO_STAGE.to_vec();
        wait.insert(6, ONE);
        assert_eq!(found(Pipeline::TwoStage, &wait), [Fault::Waits { count: 3 }]);
        let mut spill = TWO_STAGE.to_vec();
        spill.insert(6, "LDL R7, [R1+0x4]");
        assert_eq!(found(Pipeline::TwoStage, &spill), [Fault::Spills { count: 1 }]);
        let uniform = TWO_STAGE.into_iter().chain(["R2UR UR4, R3"; TO_UNIFORM + 1]).collect::<Vec<_>>();
        assert_eq!(found(Pipeline::TwoStage, &uniform), [Fault::ToUniform { count: 5 }]);
    }

    #[test]
    fn products_of_another_shape() {
        let mut less = TWO_STAGE.to_vec();
        less.remove(2);
        let shape =
            Fault::Shape { name: "P V", parts: 1, columns: 32, expected_parts: 2, expected_columns: 32 };
        assert_eq!(found(Pipeline::TwoStage, &less), [shape]);
        assert_eq!(found(Pipeline::TwoStage, &["NOP"]), [Fault::NoLoop]);
    }
}
