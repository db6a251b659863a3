use std::f64::consts::LOG2_E;
use std::num::Wrapping;

use super::*;
use crate::{Dtype, ProblemSpec, Shape};

const LEN: Lengths = Lengths { q: 3, k: 5 };

fn slope(values: [f32; 2]) -> (&'static str, ScoreValue) {
    ("slope", ScoreTable::new(&[2], values).unwrap().into())
}

fn parsed(text: &str) -> Result<ScoreFunction, ScoreError> {
    let table = ScoreTable::new(&[2, 3], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]).unwrap();
    ScoreFunction::parse(text, [slope([-0.5, -0.25]), ("c", 30.0.into()), ("bias", table.into())])
}

/// The value at score 1.5 of row 1 (position 3) of head 1 of sequence 4, and key 2.
fn value(text: &str) -> f64 {
    parsed(text).unwrap().row::<f64>([4, 1, 1], LEN).at(1.5, 2)
}

#[test]
fn values_of_texts() {
    for (text, expected) in [
        ("s", 1.5),
        ("b * 1000 + h * 100 + row * 10 + k", 4112.0),
        ("s + slope[h] * (q - k)", 1.25),
        ("30 * tanh(s / 30)", 30.0 * (1.5_f64 / 30.0).tanh()),
        ("1 - 2 - 3", -4.0),
        ("1 - (2 - 3)", 2.0),
        ("8 / 2 / 2", 2.0),
        ("k / 4", 0.5),
        ("-k + 2 * -s", -5.0),
        ("if q >= k && !(k == 1) then s else -inf", 1.5),
        ("if q < k || k != 2 then s else -inf", f64::NEG_INFINITY),
        ("max(min(s, 1), abs(-4)) + floor(-0.5) + sqrt(4) + log2(8) + exp2(3)", 16.0),
        ("bias[h, k - 3] + bias[k - 100, 99]", 9.0),
        ("2147483647 + h", -2147483648.0),
        ("1.5e+1 + 25e-2", 15.25),
        ("(k - 9) // 3 + (k - 10) // 4 * 10 + (k - 9) // 1 * 100", -723.0),
        ("(k - 9) // -3 + (9 - k) // -q * 10 + k // (k - 2) * 100", -28.0),
        ("(k - 9) % -5 + (9 - k) % -q * 10 + k % (k - 2) * 100", 178.0),
        ("(k - 9) % 3 + (k - 10) % 4 * 10 + k % 1", 2.0),
        ("12 & 10 | 1 ^ 3 << 1 + 1", 13.0),
        ("-9 >> k", -3.0),
        ("(1 << 32) + (1 << -1) + (-1 >> 40)", -1.0),
        ("int(-1.5 * s) + int(1e30) // 4 + int(0 / 0 * s)", 536870909.0),
        ("bias[int(slope[1] * k), int(bias[1, 0]) - 2]", 3.0),
    ] {
        assert_eq!(value(text), expected, "{text}");
    }
}

#[test]
fn texts_that_are_refused() {
    for (text, error) in [
        ("s +", "the score expression has its end at column 4, expected a value"),
        ("s s", "the score expression has 's' at column 3, expected the end or an operator"),
        ("s $ 1", "the score expression has '$' at column 3, expected the end or an operator"),
        ("min(s)", "the score expression has ')' at column 6, expected `,`"),
        ("(s", "the score expression has its end at column 3, expected `)`"),
        ("if s < 1 then s", "the score expression has its end at column 16, expected else"),
        ("1 + then", "the score expression has 't' at column 5, expected a value"),
        ("s * z", "the score expression names z, which has no value; s, b, h, row, q and k need none"),
        ("slope + s", "slope in the score expression is a table, expected a number"),
        ("c[h] + s", "c in the score expression is a number, expected a table"),
        ("slope[h, k]", "the table slope of the score expression has 1 axes and is read by 2 indices"),
        ("slope[s]", "an index of a table in the score expression takes an index, not a real number"),
        ("s + (s < 1)", "+ in the score expression takes numbers, not a condition"),
        ("s // 2", "// in the score expression takes indices, not a real number"),
        ("k % 2.5", "% in the score expression takes indices, not a real number"),
        ("int(k < q)", "int in the score expression takes a number, not a condition"),
        ("if s then s else s", "if in the score expression takes a condition, not a real number"),
        ("s < 1", "the root in the score expression takes numbers, not a condition"),
        ("!s", "! in the score expression takes a condition, not a real number"),
    ] {
        assert_eq!(parsed(text).unwrap_err().to_string(), error, "{text}");
    }
    let deep = |levels: usize| parsed(&format!("{}s{}", "(".repeat(levels), ")".repeat(levels)));
    assert!(deep(60).is_ok());
    assert_eq!(deep(100_000), Err(ScoreError::TooLarge { what: "levels", limit: 64 }));
    let long =
        |terms: usize| parsed(&format!("s{}", (3..terms).map(|i| format!(" + s * {i}")).collect::<String>()));
    assert!(long(20).is_ok());
    assert_eq!(long(60), Err(ScoreError::TooLarge { what: "nodes", limit: 96 }));
    let infinite = ScoreFunction::parse("s * x", [("x", f32::INFINITY.into())]);
    assert_eq!(infinite, Err(ScoreError::Number { value: f32::INFINITY }));
    assert!(matches!(ScoreFunction::parse("s", [("k", 1.0.into())]), Err(ScoreError::ReservedName { .. })));
    assert!(matches!(ScoreFunction::parse("s", [("min", 1.0.into())]), Err(ScoreError::ReservedName { .. })));
    for extents in [&[][..], &[0], &[1; 5], &[3], &[usize::MAX, 2]] {
        assert!(ScoreTable::new(extents, vec![0.0]).is_err() || extents == [1], "{extents:?}");
    }
}

#[test]
fn equal_functions_are_equal() {
    let expr = |text| parsed(text).unwrap().expr().clone();
    for (a, b) in [
        ("s + slope[h] * (q - k)", "(q - k) * slope[h] + s"),
        ("if q > k && h == 1 then s else -inf", "if 1 == h && k < q then s else -inf"),
        ("s / 30", "s / 50"),
        ("c * tanh(s / c)", "8 * tanh(s / 8)"),
        ("c * s + 7", "7 + s * c"),
        ("s", "1.0 * (s + 0.0) / 1.0 - 0.0"),
        ("s", "if q < k then s else - -s"),
    ] {
        assert_eq!(expr(a), expr(b));
    }
    for (a, b) in
        [("s - k", "k - s"), ("s / 2", "s / 30"), ("c * tanh(s / 8)", "c * tanh(s / c)"), ("s", "-s")]
    {
        assert_ne!(expr(a), expr(b));
    }
    assert_eq!(parsed("c * s + 7").unwrap().numbers().len(), 2);
}

#[test]
fn a_slope_is_a_derivative() {
    let slope = |text, score| {
        let function = parsed(text).unwrap();
        function.row([0, 1, 1], LEN).at(Dual { value: score, slope: 1.0 }, 0).slope
    };
    // Where a function has a kink, one side counts; constants have the slope 0, even if they are infinite.
    for (text, score, expected) in [
        ("abs(s)", 0.0, 0.0),
        ("max(s, 2)", 2.0, 1.0),
        ("s + sqrt(k) + log2(k)", 1.0, 1.0),
        ("s + floor(s)", 1.0, 1.0),
        ("if q < k then s * s else 3 * s", 1.0, 3.0),
        ("s / (s + 1)", 1.0, 0.25),
    ] {
        assert_eq!(slope(text, score), expected, "{text}");
    }
}

#[test]
fn what_is_known_of_slopes() {
    for (text, slope) in [
        ("s", ScoreSlope::One),
        ("s + slope[h] * (q - k)", ScoreSlope::One),
        ("if q < k then -inf else bias[h, k] + s - floor(s)", ScoreSlope::One),
        ("if q < k then s / 2 else s", ScoreSlope::Finite),
        ("c * tanh(s / c) - abs(s) * min(s, 0.0)", ScoreSlope::Finite),
        ("slope[h]", ScoreSlope::Finite),
        ("s * slope[h]", ScoreSlope::Any),
        ("s * sqrt(1.0 + s)", ScoreSlope::Any),
    ] {
        assert_eq!(parsed(text).unwrap().expr().slope(), slope, "{text}");
    }
}

#[test]
fn what_takes_registers() {
    for (text, takes) in [
        ("s + slope[h] * (k - q)", false),
        ("c * tanh(s / c) + bias[h, k]", false),
        ("s + bias[h, q - k]", true),
        ("s / (c + abs(s))", true),
        ("s + sqrt(row)", true),
    ] {
        assert_eq!(parsed(text).unwrap().expr().takes_registers(), takes, "{text}");
    }
}

/// A tile evaluates nodes in another order, and some products without rounding. Its derivatives are nodes.
#[test]
fn a_tile_has_the_values_of_its_rows() {
    for text in [
        "if row == 2 then -inf else c * tanh(s / c) - abs(s - 1.0) * sqrt(s) + exp2(-s) * log2(s + k)",
        "s / (1 + abs(s)) + max(s * k, min(s * s, bias[h, row])) / slope[h - k]",
        "s + slope[h] * (k - q)",
        "s - (q - k) * slope[h] / c",
        "if 2 * k - q * 3 < 4 && !(k == 3) then c * s - s * s else bias[k - row, min(k, q)]",
        "c - s * (row + 1) + sqrt(k) * (k * k - k)",
        "bias[h, k - 3] - slope[0 - k] * abs(3 - k * 2)",
        "h + 2147483647 + k",
        "s + (k // 3 + (q | 1) - (k >> 1)) * c + bias[(k ^ row) & 1, int(s * k)] + (k << 30 | 3)",
        "(k - k) * c + slope[h]",
    ] {
        let function = parsed(text).unwrap();
        for row in 0..3 {
            let at = [4, 1, row];
            let inputs = row::RowInputs::new(&function, at, LEN);
            let rows = if row == 1 { ScoreRows::OfHeads } else { ScoreRows::OfHead };
            let tile = ScoreTile::with_slopes(function.expr(), ScoreGradients::default(), inputs, rows);
            for (first, count) in [(0, 5), (2, 3)] {
                let mut block = tile.block(Wrapping(first));
                (0..count).for_each(|column| {
                    check(text, &mut block, column, (row, first as usize + column as usize))
                });
            }
        }
        // The tile's only row is the key.
        for key in 0..5 {
            let inputs = row::RowInputs::new(&function, [4, 1, key], LEN);
            let tile =
                ScoreTile::with_slopes(function.expr(), ScoreGradients::default(), inputs, ScoreRows::Keys);
            for (first, count) in [(0, 3), (1, 2)] {
                let mut block = tile.block(Wrapping(first));
                (0..count).for_each(|column| {
                    check(text, &mut block, column, (first as usize + column as usize, key))
                });
            }
        }
    }
}

/// Compares the value and the slope in a block's column with the function of the row.
fn check<'a>(
    text: &str,
    block: &mut ScoreBlock<'_, f64, row::RowInputs<'a>>,
    column: u32,
    (row, key): (usize, usize),
) {
    let score = ScoreProduct { product: 3.0, unit: 0.5 };
    let got = (block.at(score, 0, column), block.slope_at(score, 0, column).unwrap_or(1.0));
    let kept = block.kept(score, 0, column);
    let first = block.first_shift(score, 0.25, 0);
    let shift = block.shift(score, first, 0, column);
    let exponent = kept * block.tile.scale_log2(score.unit * LOG2_E) + shift;
    let function = parsed(text).unwrap();
    let Dual { value, slope } = function.row([4, 1, row], LEN).at(Dual { value: 1.5, slope: 1.0 }, key);
    let is_near =
        |x: f64, y: f64, error: f64| x == y || x.is_nan() && y.is_nan() || (x - y).abs() <= error * y.abs();
    // The constants of derivatives are f32. Where the value is -inf, the derivative is any number.
    let is_slope = is_near(got.1, slope, 1e-7) || value == f64::NEG_INFINITY;
    assert!(is_near(got.0, value, 1e-14) && is_slope, "{text}: {got:?}, {value}, {slope}");
    assert!(is_near(exponent, value * LOG2_E + 0.25, 1e-13), "{text}: {exponent}, {value}");
}

/// Its values are data: a problem alone is not enough to compute it.
#[test]
fn a_problem_with_a_score_needs_values() {
    let shape = Shape { batch: 1, seqlen: 5, heads: 2, head_dim: 8 };
    let spec = ProblemSpec::dense(Dtype::F16, shape, shape);
    let function = parsed("s + slope[h] * (q - k)").unwrap();
    let scored = spec.clone().known().unwrap().with_score(&function);
    assert_eq!(*scored, spec.clone().score(function.form().clone()).validate().unwrap());
    assert_eq!(scored.score_row([0, 1, 4]).unwrap().at(1.5, 2), 1.0);
    assert_eq!(scored.spec().known().unwrap_err(), crate::ProblemError::UnknownScore);
}

/// Tables that are given later have the order of the expression, and its numbers of axes.
#[test]
fn tables_of_open_functions() {
    let open = OpenScore::parse("s + t3[h] + t1[h, k] * 0.3").unwrap();
    let extents: Vec<Arc<[usize]>> =
        open.tables().iter().map(|&table| if table == 3 { [2].into() } else { [2, 5].into() }).collect();
    let form = open.form(&extents).unwrap();
    let elements = |rank: usize| if rank == 1 { vec![0.5; 2] } else { vec![2.0; 10] };
    let tables = || extents.iter().map(|extents| Arc::from(elements(extents.len())));
    let function = form.with_tables(tables()).unwrap();
    assert!((function.row::<f64>([0, 1, 0], LEN).at(1.0, 3) - 2.1).abs() < 1e-6);
    let named = [("x", ScoreTable::new(&[2], elements(1))), ("y", ScoreTable::new(&[2, 5], elements(2)))];
    let named = named.map(|(name, table)| (name, table.unwrap().into()));
    assert_eq!(ScoreFunction::parse("s + x[h] + 0.3 * y[h, k]", named).unwrap(), function);

    let empty: Vec<Arc<[usize]>> = extents.iter().map(|extents| vec![0; extents.len()].into()).collect();
    for wrong in [&extents[..1], &[extents[1].clone(), extents[0].clone()], &empty] {
        assert!(matches!(open.form(wrong), Err(ScoreError::Extents { .. })));
    }
    assert!(matches!(form.with_tables(tables().take(1)), Err(ScoreError::Extents { .. })));
    let short = form.with_tables(tables().map(|table| table[1..].into()));
    assert!(matches!(short, Err(ScoreError::TableShape { .. })));
    let error = OpenScore::parse("t0[h] + t0[h, k]").unwrap_err();
    assert_eq!(error, ScoreError::Indices { name: "t0".to_owned(), given: 2, expected: 1 });
    assert!(matches!(OpenScore::parse("t0[h, h, h, h, h]"), Err(ScoreError::Indices { expected: 4, .. })));
    assert!(matches!(OpenScore::parse("s + t8[h]"), Err(ScoreError::UnknownName { .. })));
}
