//! Claims of the paper, and how this machine's numbers compare.

use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::Report;
use crate::args::number::size_label;
use crate::paper::{self, CUDNN, FA3, PANELS, SEQLENS};

/// A statement of the paper's, with its number.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Claim {
    /// The section of the page.
    section: String,
    /// Where the paper states it.
    place: String,
    claim: String,
    paper: String,
    origin: Origin,
    figures: Option<Figures>,
    here: Here,
}

/// Where a number of the paper comes from.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Origin {
    /// The text of the paper.
    Text,
    /// The labels of its figures.
    Figure,
    /// The tests and documents of this project.
    Project,
    /// The talk of its authors.
    Talk,
}

/// A computation from the labels of the paper's own figures. Its result does not always support the text.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Figures {
    /// The most TFLOP/s of FlashAttention-3 in a figure.
    Most(u32),
    /// The ratios to another implementation in a figure.
    Ratios(u32, String),
    /// The cells from 1k keys on in which FlashAttention-3 is ahead of cuDNN.
    Ahead,
    /// The ratios of FP8 to fp16 at head_dim 256.
    Doubled,
}

/// How a claim is compared with the parts of a report.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Here {
    /// No part has it; the text says why.
    NotRun(String),
    /// The results of this part are right.
    Right(String),
    /// In the model, the first part takes fewer cycles than the second.
    Faster(String, String),
    /// Exponentials take this part of the products' cycles, in the model.
    Exponentials(f64),
    /// Whether exponentials run under this product of the main loop that a part shows.
    Under(String, usize, bool),
    /// One group of the main loop's instructions has exponentials, sums, conversions and multiplications.
    Mixed,
    /// The main loop has no spills.
    Spills,
    /// TFLOP/s of all cells of this figure.
    Figure(u32),
    /// The most TFLOP/s of this figure.
    Fastest(u32, f64),
    /// The most that FP8 is faster than fp16 at head_dim 256.
    Doubled(f64),
    /// TFLOP/s of this form in a group of the ablation.
    Form(usize, String, f64),
    /// The first form's TFLOP/s divided by the second's, in a group of the ablation.
    Gain(usize, String, String, f64),
    /// The error of this row of Table 3.
    Rmse(String, f64),
    /// The error of standard attention divided by FlashAttention-3's, with this type of elements.
    Improvement(String, f64),
    /// The number of tiles of the talk's example.
    Tiles(f64),
    /// The makespan of tiles in turn divided by the plan's.
    Balance(f64),
}

/// A number of this machine, and whether it is the paper's.
type Found = Result<(String, bool), String>;

/// A claim with its verdict.
#[derive(Debug, Serialize)]
pub(super) struct Judged {
    pub(super) section: String,
    pub(super) place: String,
    pub(super) claim: String,
    pub(super) paper: String,
    pub(super) origin: Origin,
    pub(super) figures: Option<String>,
    pub(super) here: Option<String>,
    pub(super) verdict: Verdict,
}

/// Whether this machine has the paper's number.
#[derive(Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Verdict {
    Agrees,
    Differs,
    /// There is no number; the text says why.
    NotRun(String),
}

/// Judges all claims by a report, in the order of the page.
pub(super) fn judge(report: &Report) -> Vec<Judged> {
    let claims: Vec<Claim> =
        serde_json::from_str(include_str!("claims.json")).expect("a test reads the file of claims");
    claims.into_iter().map(|claim| claim.judge(report)).collect()
}

impl Claim {
    fn judge(self, report: &Report) -> Judged {
        let Claim { section, place, claim, paper, origin, figures, here } = self;
        let (here, verdict) = match here.find(report) {
            Ok((here, true)) => (Some(here), Verdict::Agrees),
            Ok((here, false)) => (Some(here), Verdict::Differs),
            Err(why) => (None, Verdict::NotRun(why)),
        };
        let figures = figures.map(|figures| figures.to_string());
        Judged { section, place, claim, paper, origin, figures, here, verdict }
    }
}

impl Here {
    fn find(&self, report: &Report) -> Found {
        match self {
            Here::NotRun(why) => Err(why.clone()),
            Here::Right(part) => {
                let (_, right) = report.data(part)?;
                Ok((if right { "right" } else { "wrong" }.to_owned(), right))
            }
            Here::Faster(fast, slow) => {
                let cycles = |part| report.number(part, "/model/cycles");
                let ratio = cycles(slow)? / cycles(fast)?;
                Ok((format!("model: {ratio:.2}"), ratio > 1.0))
            }
            Here::Exponentials(paper) => {
                let busy = |engine: usize| {
                    report.number("two-stage-ping-pong", &format!("/model/engines/{engine}/busy"))
                };
                let part = busy(1)? / busy(0)?;
                Ok((format!("model: {:.0} %", 100.0 * part), within(part, *paper, 0.1)))
            }
            Here::Under(part, product, paper) => {
                let under =
                    report.number(part, &format!("/loops/0/products/{product}/under/exponentials"))?;
                let all = report.number(part, "/loops/0/counts/exponentials")?;
                Ok((format!("{under:.0} of {all:.0}"), (under > 0.0) == *paper))
            }
            Here::Mixed => {
                let order = report.data("sass")?.0.pointer("/loops/0/order").and_then(Value::as_array);
                let steps = order.into_iter().flatten().filter_map(Value::as_str);
                let kinds = ["MUFU.EX2", "FADD", "F2FP", "FMUL"];
                let mixed =
                    |step: &str| kinds.into_iter().filter(|kind| step.contains(kind)).collect::<Vec<_>>();
                let most = steps.map(mixed).max_by_key(Vec::len).unwrap_or_default();
                Ok((format!("at most {} together", most.join(", ")), most.len() == kinds.len()))
            }
            Here::Spills => {
                let spills = report.number("sass", "/spill_bytes")?;
                Ok((format!("{spills:.0} bytes"), spills == 0.0))
            }
            Here::Figure(figure) => {
                let cells = cells(*figure).filter_map(|(panel, seqlen)| {
                    let paper = f64::from(*panel.tflops(FA3).get(seqlen)?);
                    Some(report.tflops(panel, SEQLENS[seqlen])? >= 0.9 * paper)
                });
                let here: Vec<bool> = cells.collect();
                report.data(&part_of(*figure))?;
                let good = here.iter().filter(|good| **good).count();
                Ok((format!("at least 0.9 of it in {good} of {} cells", here.len()), good == here.len()))
            }
            Here::Fastest(figure, paper) => {
                let cells = report.data(&part_of(*figure))?.0["cells"].as_array();
                let all = cells.into_iter().flatten().filter_map(|cell| cell["tflops"].as_f64());
                speed(all.fold(0.0, f64::max), *paper)
            }
            Here::Doubled(paper) => {
                let (_, _) = (report.data(&part_of(5))?, report.data(&part_of(7))?);
                let ratios = cells(7).filter_map(|(fp8, seqlen)| {
                    let is_beside =
                        |panel: &&paper::Panel| (panel.head_dim, panel.mask) == (fp8.head_dim, fp8.mask);
                    let fp16 = PANELS.iter().filter(|panel| panel.figure == 5).find(is_beside)?;
                    let [fp8, fp16] = [fp8, fp16].map(|panel| report.tflops(panel, SEQLENS[seqlen]));
                    Some(fp8? / fp16?)
                });
                let most = ratios.fold(0.0, f64::max);
                Ok((format!("up to {most:.2}"), within(most, *paper, 0.05)))
            }
            Here::Form(group, name, paper) => speed(report.form(*group, name)?, *paper),
            Here::Gain(group, fast, slow, paper) => {
                let ratio = report.form(*group, fast)? / report.form(*group, slow)?;
                Ok((format!("{ratio:.2}"), within(ratio, *paper, 0.05)))
            }
            Here::Rmse(name, paper) => {
                let rmse = report.rmse(name)?;
                Ok((format!("{rmse:.1e}"), within(rmse, *paper, 0.25)))
            }
            Here::Improvement(dtype, paper) => {
                let rmse = |method| report.rmse(&format!("{dtype}, {method}"));
                let ratio = rmse("standard attention")? / rmse("FlashAttention-3")?;
                Ok((format!("{ratio:.1}"), within(ratio, *paper, 0.25)))
            }
            Here::Tiles(paper) => {
                let tiles = report.number("schedule", "/tiles")?;
                Ok((tiles.to_string(), tiles == *paper))
            }
            Here::Balance(paper) => {
                let makespan = |order| report.number("schedule", &format!("/makespan/{order}"));
                let ratio = makespan("in_turn")? / makespan("planned")?;
                Ok((format!("model: {ratio:.2}"), within(ratio, *paper, 0.05)))
            }
        }
    }
}

/// The part of the report that measures a figure.
fn part_of(figure: u32) -> String {
    format!("figure-{figure}")
}

/// The panels of a figure, each with the index of each sequence length.
fn cells(figure: u32) -> impl Iterator<Item = (&'static paper::Panel, usize)> {
    let panels = PANELS.iter().filter(move |panel| panel.figure == figure);
    panels.flat_map(|panel| (0..SEQLENS.len()).map(move |seqlen| (panel, seqlen)))
}

/// A speed agrees from 0.9 of the paper's on.
fn speed(here: f64, paper: f64) -> Found {
    Ok((format!("{here:.0}"), here >= 0.9 * paper))
}

fn within(here: f64, paper: f64, part: f64) -> bool {
    (here / paper - 1.0).abs() <= part
}

impl Report {
    /// TFLOP/s here of a cell of a figure, if it was measured.
    pub(super) fn tflops(&self, panel: &paper::Panel, seqlen: usize) -> Option<f64> {
        let cells = self.data(&part_of(panel.figure)).ok()?.0["cells"].as_array()?;
        let mask = panel.mask.to_string();
        let is_cell = |cell: &&Value| {
            cell["head_dim"] == panel.head_dim && cell["mask"] == mask.as_str() && cell["seqlen"] == seqlen
        };
        cells.iter().find(is_cell).and_then(|cell| cell["tflops"].as_f64())
    }

    /// TFLOP/s of a form in a group of the ablation.
    fn form(&self, group: usize, name: &str) -> Result<f64, String> {
        let forms = self.data("table-2")?.0["groups"][group]["forms"].as_array();
        let form = forms.into_iter().flatten().find(|form| form["name"] == name);
        form.and_then(|form| form["tflops"].as_f64()).ok_or_else(|| format!("no time of the form {name}"))
    }

    /// The median error of a row of Table 3, if it was measured at the paper's length.
    fn rmse(&self, name: &str) -> Result<f64, String> {
        let (data, _) = self.data("table-3")?;
        if self.quick {
            return Err(format!("the number is not for {} keys: run it without --quick", data["seqlen"]));
        }
        let row = data["table"].as_array().into_iter().flatten().find(|row| row["name"] == name);
        row.and_then(|row| row["median"].as_f64()).ok_or_else(|| format!("no row {name}"))
    }
}

impl fmt::Display for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let of = |figure: u32| PANELS.iter().filter(move |panel| panel.figure == figure);
        let span = |ratios: &[f64]| {
            let [least, most] =
                [f64::min, f64::max].map(|pick| ratios.iter().copied().reduce(pick).unwrap_or(1.0));
            format!("{least:.2}-{most:.2}")
        };
        match self {
            Figures::Most(figure) => {
                let most = of(*figure).flat_map(|panel| panel.tflops(FA3)).max().unwrap_or(&0);
                write!(f, "up to {most}")
            }
            Figures::Ratios(figure, other) => f.write_str(&span(&paper::ratios(*figure, other))),
            Figures::Ahead => {
                let ratios = paper::ratios(5, CUDNN);
                // The first cell of each panel has 512 keys.
                let cells: Vec<&f64> = ratios.chunks(SEQLENS.len()).flat_map(|panel| &panel[1..]).collect();
                let ahead = cells.iter().filter(|ratio| ***ratio > 1.0).count();
                write!(f, "{ahead} of {} cells from {} on", cells.len(), size_label(SEQLENS[1]))
            }
            Figures::Doubled => {
                let fp16 = of(5).filter(|panel| panel.head_dim == 256).flat_map(|panel| panel.tflops(FA3));
                let fp8 = of(7).flat_map(|panel| panel.tflops(FA3));
                let ratios: Vec<f64> = fp8.zip(fp16).map(|(x, y)| f64::from(*x) / f64::from(*y)).collect();
                f.write_str(&span(&ratios))
            }
        }
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Origin::Text => "text",
            Origin::Figure => "figure",
            Origin::Project => "project",
            Origin::Talk => "talk",
        })
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Verdict::Agrees => f.write_str("agrees"),
            Verdict::Differs => f.write_str("differs"),
            Verdict::NotRun(why) => write!(f, "not run: {why}"),
        }
    }
}
