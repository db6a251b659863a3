//! Candidates for a problem, ranked by speed.

use std::fmt;

use serde::Serialize;

use super::candidates::Candidate;
use crate::grid::Setting;
use crate::measure::{Outcome, in_clusters};
use crate::table::Table;

/// The outcomes of all candidates for a setting.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Ranking {
    #[serde(flatten)]
    setting: Setting,
    /// Floating-point operations as the paper counts them.
    flops: f64,
    rows: Vec<Row>,
}

/// A candidate and its outcome.
#[derive(Clone, Debug, Serialize)]
struct Row {
    /// Whether this is the planned candidate.
    planned: bool,
    tile: String,
    /// The tile order, and the cluster size if there are clusters.
    order: String,
    outcome: Outcome,
    tflops: Option<f64>,
    /// The candidate's speed, relative to the planned candidate's speed.
    ratio: Option<f64>,
}

impl Ranking {
    /// Ranks candidates by speed. The first in `outcomes` is the planned one.
    pub(super) fn new(setting: Setting, flops: f64, outcomes: Vec<(Candidate, Outcome)>) -> Ranking {
        let planned = outcomes.first().and_then(|(_, outcome)| outcome.tflops(flops));
        let row =
            |(index, (Candidate { tile, order, cluster, .. }, outcome)): (usize, (Candidate, Outcome))| {
                let tflops = outcome.tflops(flops);
                let ratio = tflops.zip(planned).map(|(tflops, planned)| tflops / planned);
                let (tile, order) = (tile.to_string(), order.to_string() + &in_clusters(cluster));
                Row { planned: index == 0, tile, order, outcome, tflops, ratio }
            };
        let mut rows: Vec<Row> = outcomes.into_iter().enumerate().map(row).collect();
        // Candidates without a time come last.
        let speed = |row: &Row| row.tflops.unwrap_or(f64::NEG_INFINITY);
        rows.sort_by(|a, b| speed(b).total_cmp(&speed(a)));
        Ranking { setting, flops, rows }
    }

    /// Whether every candidate has a time.
    pub(super) fn is_whole(&self) -> bool {
        self.rows.iter().all(|row| row.tflops.is_some())
    }

    fn table(&self) -> Table {
        let rows = self.rows.iter().enumerate().map(|(index, row)| {
            let Row { planned, tile, order, outcome, ratio, .. } = row;
            let ratio = ratio.map_or("-".to_owned(), |ratio| format!("{ratio:.3}"));
            let (place, mark) = (format!("{}.", index + 1), if *planned { "planned" } else { "" });
            vec![place, tile.clone(), order.clone(), outcome.cell(self.flops), ratio, mark.to_owned()]
        });
        Table::new(["", "tile", "order", "TFLOP/s", "ratio", ""], rows, 3)
    }
}

impl fmt::Display for Ranking {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Setting { dtype, batch, heads, heads_kv, .. } = self.setting;
        writeln!(
            f,
            "{}, {dtype}, batch {batch}, {heads} query and {heads_kv} key/value heads",
            self.setting
        )?;
        write!(f, "{}", self.table())?;
        let faults = self.rows.iter().zip(1..).filter_map(|(row, place)| Some((place, row.outcome.fault()?)));
        faults.into_iter().try_for_each(|(place, fault)| write!(f, "\n{place}. {fault}"))
    }
}

/// A table of the fastest candidate for each setting.
pub(super) fn winners(rankings: &[Ranking]) -> Table {
    let heads = ["head_dim", "mask", "seqlen", "fastest tile", "order", "TFLOP/s", "planned", "ratio"];
    let line = |Ranking { setting, flops, rows }: &Ranking| {
        let planned =
            rows.iter().find(|row| row.planned).map_or("-".to_owned(), |row| row.outcome.cell(*flops));
        let setting = [setting.head_dims(), setting.scores(), setting.lengths()];
        let dash = || "-".to_owned();
        let winner = match rows.first() {
            Some(Row { tile, order, outcome: outcome @ Outcome::Checked(_), ratio, .. }) => {
                let ratio = ratio.map_or_else(dash, |ratio| format!("{ratio:.3}"));
                [tile.clone(), order.clone(), outcome.cell(*flops), planned, ratio]
            }
            _ => [dash(), dash(), dash(), planned, dash()],
        };
        setting.into_iter().chain(winner).collect()
    };
    Table::new(heads, rankings.iter().map(line), 5)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tune::candidates::candidates;
    use fa3_sched::DeviceLimits;
    use fa3_types::{Dtype, Mask};

    fn ranking(outcomes: [Outcome; 4]) -> Ranking {
        let mask = Mask::Causal;
        let setting = Setting::plain(Dtype::Bf16, 256, mask, (16, 1024, 8));
        let problem = setting.problem().unwrap();
        let candidates = candidates(&problem, &DeviceLimits::h100_sxm()).unwrap();
        Ranking::new(setting, problem.forward_flops(), candidates.into_iter().zip(outcomes).collect())
    }

    #[test]
    fn the_fastest_comes_first_and_what_is_wrong_last() {
        let times = [2.0, 4.0, 1.0].map(|millis| Outcome::checked(&[millis]));
        let [planned, slow, fast] = times;
        let ranking = ranking([planned, Outcome::Wrong("o is off".to_owned()), slow, fast]);
        let ratios: Vec<Option<f64>> = ranking.rows.iter().map(|row| row.ratio).collect();
        assert_eq!(ratios, [Some(2.0), Some(1.0), Some(0.5), None]);
        let planned: Vec<bool> = ranking.rows.iter().map(|row| row.planned).collect();
        assert_eq!(planned, [false, true, false, false]);
        assert!(!ranking.is_whole());

        // 4 · 1024² · 256 · 8 · 16 / 2 FLOP in 1 ms are 69 TFLOP/s.
        let text = ranking.to_string();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines[0],
            "head_dim 256, mask causal, seqlen 1k, bf16, batch 16, 8 query and 8 key/value heads"
        );
        assert!(lines[2].starts_with("1.  128 x ") && lines[2].ends_with("       69  2.000"), "{text}");
        assert!(lines[3].ends_with("       34  1.000  planned"), "{text}");
        assert!(lines[5].ends_with("    WRONG      -"), "{text}");
        assert_eq!(lines[6..], ["4. WRONG: o is off"]);

        let winners = winners(&[ranking]).to_string();
        let line = winners.lines().nth(1).unwrap();
        assert!(line.starts_with("256       causal  1k      128 x "), "{winners}");
        assert!(line.ends_with("       69       34  2.000"), "{winners}");
    }

    #[test]
    fn nothing_is_compared_with_a_plan_that_failed() {
        let failed = || Outcome::Failed("out of memory".to_owned());
        let ranking = ranking([failed(), failed(), Outcome::checked(&[1.0]), failed()]);
        assert_eq!((ranking.rows[0].ratio, ranking.rows[0].tflops.is_some()), (None, true));
        let winners = winners(&[ranking]).to_string();
        assert!(winners.ends_with("       69   failed      -"), "{winners}");
    }
}
