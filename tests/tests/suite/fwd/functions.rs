//! Functions of scores that hide keys, and that are no numbers.

use fa3_ref::Forward;
use fa3_sched::forward::CtaTile;
use fa3_sim::{Mode, Policy};
use fa3_tests::Case;
use fa3_tests::fwd::{dense, with_tile};
use fa3_types::{Dtype, Mask, ScoreFunction};
use ndarray::Axis;
use rayon::prelude::*;

use super::{launch, tiles};

fn run(text: &str, mask: Mask, tile: CtaTile) -> Forward<f32> {
    let function = ScoreFunction::parse(text, []).unwrap();
    let problem = dense(Dtype::Bf16, 1, (75, 90), (2, 1), 64).mask(mask).known().unwrap();
    let problem = problem.with_score(&function);
    let values = Case::normal(text, problem.clone(), 8).values();
    let launch = launch(&problem, &with_tile(tile)).expect("there is such a kernel");
    launch.simulate(&values, Policy::Random(5), Mode::Fast).unwrap_or_else(|fault| panic!("{text}: {fault}"))
}

#[test]
fn a_function_hides_keys_as_a_mask_does() {
    let window = Mask::Window { left: Some(20), right: Some(3) };
    let functions = [
        ("if q >= k then s else -inf", Mask::Causal),
        ("if k - q > 3 || q - k > 20 then -inf else s", window),
    ];
    tiles().into_par_iter().for_each(|tile| {
        for (text, mask) in functions {
            let [function, masked] =
                [(text, Mask::None), ("s", mask)].map(|(text, mask)| run(text, mask, tile));
            assert!(function.o == masked.o && function.lse == masked.lse, "{tile}: {text}");
        }
    });
}

#[test]
fn what_is_no_number_stays_in_its_row() {
    let text = "if row == 5 && k == 40 then inf else if row == 9 && k == 70 then inf - inf else \
                if row == 70 then -inf else s";
    tiles().into_par_iter().for_each(|tile| {
        let [given, other] = [text, "s"].map(|text| run(text, Mask::None, tile));
        for ((_, head, row), &lse) in given.lse.indexed_iter() {
            let of_row = |x: &Forward<f32>| {
                let of_head = x.o.index_axis(Axis(0), 0).index_axis_move(Axis(1), head);
                of_head.index_axis_move(Axis(0), row).to_vec()
            };
            let o = of_row(&given);
            match row {
                5 | 9 => assert!(lse.is_nan() && o.iter().all(|o| o.is_nan()), "{tile}: row {row}"),
                70 => assert!(lse == f32::NEG_INFINITY && o.iter().all(|&o| o == 0.0), "{tile}"),
                _ => {
                    assert_eq!(lse, other.lse[[0, head, row]], "{tile}: row {row}");
                    assert_eq!(o, of_row(&other), "{tile}: row {row}");
                }
            }
        }
    });
}
