//! NaN and infinities reach the rows that see them, and no others.

use fa3_ref::Forward;
use fa3_sched::forward::{CtaTile, Loads, Pipeline};
use fa3_sim::{Mode, Policy};
use fa3_tests::fwd::{Launch, Layout, dense, judged, with_tile};
use fa3_tests::{Case, Poison, Values, in_turn, pairs};
use fa3_types::{Dtype, KnownProblem, Mask};
use ndarray::{Array4, Axis};
use rayon::prelude::*;

use super::{TWO, launch};
use fa3_tests::fwd::shapes::{INPUTS, PIPELINES, TINY, TINY_FP8, dealt, dtype, laid_out};

const MASKS: [Mask; 4] = [
    Mask::None,
    Mask::Causal,
    Mask::Window { left: Some(9), right: Some(12) },
    Mask::Window { left: Some(30), right: None },
];

/// Tiles for 70 rows and up to 100 keys in blocks of 16 to 64: all forms, with and without ping-pong and a producer,
/// and e4m3.
fn tiles() -> Vec<CtaTile> {
    let fp8 = [
        TINY_FP8,
        CtaTile {
            tile_m: 128,
            consumers: 2,
            tile_n: 64,
            ping_pong: true,
            pipeline: Pipeline::Serial,
            ..TINY_FP8
        },
        CtaTile { tile_n: 64, ..TINY_FP8 }.of_inputs(INPUTS[3]),
    ];
    let tiles = pairs(PIPELINES, [TINY, TWO, CtaTile { loads: Loads::Consumers, ..TWO }]).into_iter();
    tiles.map(|(pipeline, tile)| CtaTile { pipeline, ..tile }).chain(fp8).collect()
}

fn problem(tile: &CtaTile, mask: Mask, layout: Layout, softcap: Option<f64>) -> KnownProblem {
    let mut spec = dense(dtype(tile), 1, (70, 100), (2, 1), 64).mask(mask);
    spec.softcap = softcap;
    layout.of(laid_out(tile, spec)).known().unwrap()
}

/// Checks every tile with two masks, and every mask with half of the tiles.
fn each(check: impl Fn(&Launch) + Sync) {
    in_turn(tiles(), 2, MASKS).into_par_iter().enumerate().for_each(|(index, (tile, mask))| {
        let layout = Layout::ALL[index % Layout::ALL.len()];
        let softcap = (index % 3 == 0).then_some(2.0);
        let problem = problem(&tile, mask, layout, softcap);
        check(&launch(&problem, &with_tile(tile)).unwrap());
    });
}

fn run(launch: &Launch, values: &Values) -> Forward<f32> {
    let answer = launch.simulate(values, Policy::Random(5), Mode::Fast);
    answer.unwrap_or_else(|fault| panic!("{}: {fault}", launch.plan))
}

fn values(launch: &Launch, poison: Poison) -> Values {
    Case { poison, ..Case::normal("poison", launch.plan.problem().known().unwrap(), 8) }.values()
}

/// The effect of a NaN on a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Row {
    Same,
    Nan,
    Other,
}

/// The effect on each row of O, by (sequence, row, head).
fn compare_o(clean: &Forward<f32>, dirty: &Forward<f32>) -> Vec<([usize; 3], Row)> {
    let rows = ndarray::indices((clean.o.dim().0, clean.o.dim().1, clean.o.dim().2));
    let row = |x: &Array4<f32>, [batch, row, head]: [usize; 3]| -> Vec<u32> {
        x.index_axis(Axis(0), batch)
            .index_axis(Axis(0), row)
            .index_axis(Axis(0), head)
            .mapv(f32::to_bits)
            .to_vec()
    };
    let compare = |(batch, index, head)| {
        let at = [batch, index, head];
        let (clean, dirty) = (row(&clean.o, at), row(&dirty.o, at));
        let fate = if clean == dirty {
            Row::Same
        } else if dirty.iter().all(|&x| f32::from_bits(x).is_nan()) {
            Row::Nan
        } else {
            Row::Other
        };
        (at, fate)
    };
    rows.into_iter().map(compare).collect()
}

fn lse_row(clean: &Forward<f32>, dirty: &Forward<f32>, [batch, row, head]: [usize; 3]) -> Row {
    let (clean, dirty) = (clean.lse[[batch, head, row]], dirty.lse[[batch, head, row]]);
    if clean.to_bits() == dirty.to_bits() {
        Row::Same
    } else if dirty.is_nan() {
        Row::Nan
    } else {
        Row::Other
    }
}

/// Asserts that the rows that `dirty` selects are NaN in O and LSE, and that all other rows are unchanged.
fn assert_nan_exactly(
    launch: &Launch,
    clean: &Forward<f32>,
    nan: &Forward<f32>,
    dirty: impl Fn([usize; 3]) -> bool,
) {
    for (at, o) in compare_o(clean, nan) {
        let expected = if dirty(at) { Row::Nan } else { Row::Same };
        let lse = lse_row(clean, nan, at);
        assert_eq!((o, lse), (expected, expected), "sequence, row, head {at:?} of {}", launch.plan);
    }
}

/// A NaN in Q reaches its row. A NaN in K reaches the rows that see its key. A block of V is multiplied as a whole: a
/// NaN in it reaches every row of the tiles that visit the block, but no other tile, and never LSE.
#[test]
fn a_nan_reaches_the_rows_that_see_it() {
    each(|launch| {
        let (plan, problem) = (&launch.plan, launch.plan.problem());
        let (mask, len) = (problem.mask(), problem.known().unwrap().lengths(0));
        let (tile_m, tile_n) = (plan.tile().tile_m as usize, plan.tile().tile_n as usize);
        let with = |poison| run(launch, &values(launch, poison));
        let clean = with(Poison::None);
        for row in [0, 33, 69] {
            let sees = |row| (0..len.k).any(|key| mask.allows(row, key, len));
            let nan = with(Poison::QueryRow(row));
            assert_nan_exactly(launch, &clean, &nan, |[_, at, _]| at == row && sees(row));
        }
        for key in [0, 31, 32, 64, 99] {
            let nan = with(Poison::KeyRow(key));
            assert_nan_exactly(launch, &clean, &nan, |[_, row, _]| mask.allows(row, key, len));
        }
        for key in [0, 17, 99] {
            let nan = with(Poison::ValueRow(key));
            for (at @ [batch, row, head], o) in compare_o(&clean, &nan) {
                let block = (key / tile_n) as u32;
                let visits = plan.dense().unwrap().works().any(|work| {
                    let tile = [work.tile.batch, work.tile.head, work.tile.m_block].map(|x| x as usize);
                    tile == [batch, head, row / tile_m] && (work.kv.first..work.kv.end).contains(&block)
                });
                let sees = mask.allows(row, key, len);
                let right = o == Row::Nan && visits || o == Row::Same && !sees;
                assert!(right, "{o:?} at sequence, row, head {at:?}: {plan}");
                assert_eq!(lse_row(&clean, &nan, at), Row::Same, "{at:?} {plan}");
            }
        }
    });
}

/// If one sequence, or one group of heads, is all NaN, other rows do not change, even where a tile extends beyond the
/// end of its sequence or group.
#[test]
fn neighbours_are_not_read() {
    let layouts = [Layout::Contiguous, Layout::HeadsFirst];
    in_turn(tiles(), 1, layouts).into_par_iter().for_each(|(tile, layout)| {
        let (head_dim, head_dim_v) = if tile.precision.is_fp8() { (48, 32) } else { (56, 40) };
        let spec = dense(dtype(&tile), 2, (67, 83), (4, 2), head_dim).head_dim_v(head_dim_v).causal();
        let launch = launch(&layout.of(laid_out(&tile, spec)).known().unwrap(), &with_tile(tile)).unwrap();
        let own = values(&launch, Poison::None);
        let clean = run(&launch, &own);
        for (batch, head_kv) in [(0, 0), (0, 1), (1, 0)] {
            let mut others = own.clone();
            let is_own = |(index, _, head, _): (usize, usize, usize, usize), heads: usize| {
                index == batch && head * 2 / heads == head_kv
            };
            for (x, heads) in [(&mut others.q, 4), (&mut others.k, 2), (&mut others.v, 2)] {
                x.indexed_iter_mut().filter(|(at, _)| !is_own(*at, heads)).for_each(|(_, x)| *x = f32::NAN);
            }
            let nan = run(&launch, &others);
            assert_nan_exactly(&launch, &clean, &nan, |[index, row, head]| {
                // Under this mask the last 67 keys are on the diagonal, so that every row sees some key.
                !is_own((index, row, head, 0), 4)
            });
        }
    });
}

/// Infinite elements give scores of +inf and -inf. As in the oracle, these give NaN, no effect, or a fully masked row.
#[test]
fn infinite_scores_are_as_in_the_oracle() {
    each(|launch| {
        let problem = launch.plan.problem();
        // e4m3 has no infinities.
        if problem.dtype() == Dtype::E4m3 {
            return;
        }
        let case = Case::normal("infinite", problem.known().unwrap(), 8);
        for (q, k) in
            [(f32::INFINITY, 1.0), (f32::NEG_INFINITY, 1.0), (1.0, f32::NEG_INFINITY), (1.0, f32::INFINITY)]
        {
            let mut values = case.values();
            // If one of the two first elements is infinite, the score has the sign of their product.
            values.q.index_axis_mut(Axis(3), 0).fill(1.0);
            values.k.index_axis_mut(Axis(3), 0).fill(1.0);
            values.q.index_axis_mut(Axis(3), 0).index_axis_mut(Axis(1), 41).fill(q);
            for key in [0, 50, 71] {
                values.k.index_axis_mut(Axis(3), 0).index_axis_mut(Axis(1), key).fill(k);
            }
            let answer = run(launch, &values);
            if let Err(violation) = judged(&case, &values, &answer) {
                panic!("q {q}, k {k}: {violation}\n{}", launch.plan);
            }
        }
    });
}

/// Some cases have no keys. Others have more rows than keys under a causal mask: some tiles are fully masked, and in
/// other tiles masked rows lie beside rows that see NaN in V.
#[test]
fn rows_without_keys_are_empty() {
    for (tile, scheduler) in in_turn(tiles(), 1, super::schedules::SCHEDULERS) {
        for (lengths, layout) in
            [((150, 0), Layout::Gaps), ((150, 20), Layout::HeadsFirst), ((300, 1), Layout::Contiguous)]
        {
            let spec = dense(dtype(&tile), 2, lengths, (3, 1), 64).causal();
            let problem = layout.of(laid_out(&tile, spec)).known().unwrap();
            let options = with_tile(tile).scheduler(dealt(&tile, scheduler));
            let launch = launch(&problem, &options).unwrap();
            let poison = if lengths.1 > 0 { Poison::ValueRow(0) } else { Poison::None };
            let answer = run(&launch, &values(&launch, poison));
            for row in 0..lengths.0 - lengths.1 {
                let o = answer.o.index_axis(Axis(1), row);
                assert!(o.iter().all(|x| x.to_bits() == 0), "row {row} of {}: {o}", launch.plan);
                let lse = answer.lse.index_axis(Axis(2), row);
                assert!(lse.iter().all(|&x| x == f32::NEG_INFINITY), "row {row} of {}: {lse}", launch.plan);
            }
            assert!(answer.lse.iter().filter(|lse| lse.is_finite()).count() == 6 * lengths.1);
        }
    }
}
