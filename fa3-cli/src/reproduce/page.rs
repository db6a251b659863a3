//! The page: all claims in one table, and a section for each figure, table and listing.

use std::fmt::Write;

use serde_json::Value;

use super::Report;
use super::claim::{Judged, Verdict};
use super::part::{Outcome, Ran};
use crate::args::number::size_label;
use crate::bars::{self, OURS, PAPER, Panel, Series};
use crate::draw::DrawError;
use crate::paper::{PANELS, SEQLENS};

/// A section: its id, title, text, and the parts whose commands and pictures it shows.
type Section = (&'static str, &'static str, &'static str, &'static [&'static str]);

const SECTIONS: [Section; 13] = [
    (
        "table-1",
        "Table 1: the GPU",
        "Rates of an H100 that the paper's arguments need.",
        &["two-stage-ping-pong"],
    ),
    (
        "figure-1",
        "Figure 1: ping-pong of two warpgroups",
        "Serial consumers that take turns. All timelines are of the simulator's model of an H100, which shows the order \
         of events and no speed. A timeline of a few blocks has a long beginning and end beside its steady state.",
        &["figure-1", "serial", "serial-ping-pong"],
    ),
    (
        "figure-2",
        "Figure 2: products and softmax within a warpgroup",
        "Two stages, without turns.",
        &["figure-2", "two-stage-ping-pong"],
    ),
    (
        "figure-8",
        "Figure 8: 3-stage pipelining",
        "Three stages, without turns.",
        &["figure-8", "two-stage", "three-stage"],
    ),
    (
        "algorithms",
        "Algorithms 1 to 4",
        "The kernels run on the CPU under random schedules, and their results are compared with f64 arithmetic.",
        &["algorithm-1", "algorithm-2", "algorithm-3", "algorithm-4"],
    ),
    (
        "figure-3",
        "Figures 3 and 4: registers in FP8",
        "The kernel's results are compared with f64 arithmetic.",
        &["fp8"],
    ),
    (
        "listing-b2",
        "Listing B.2: machine code of the main loop",
        "What ptxas makes of this library's kernels. A product hides what runs between its start and the wait for it.",
        &["sass", "sass-three-stage"],
    ),
    ("figure-5", "Figure 5: forward pass, fp16", "16k tokens, hidden size 2048.", &["figure-5"]),
    (
        "figure-6",
        "Figure 6: backward pass, fp16",
        "16k tokens, hidden size 2048, without a mask.",
        &["figure-6"],
    ),
    ("figure-7", "Figure 7: forward pass, FP8", "16k tokens, hidden size 2048, head_dim 256.", &["figure-7"]),
    (
        "table-2",
        "Table 2: what each technique gains",
        "This library's table of tiles has three consumer warpgroups here. The second group has two, as the paper's kernel.",
        &["table-2"],
    ),
    (
        "table-3",
        "Table 3: errors",
        "RMSE against f64 arithmetic on data with outliers. The paper states no length; 8448 is assumed.",
        &TABLE_3,
    ),
    ("talk", "The authors' talk: tiles and decoding", "Schedules of causal tiles on 132 SMs.", &["schedule"]),
];

/// The parts with Table 3: at the paper's length, or at 1024 keys with `--quick`, and at other lengths.
const TABLE_3: [&str; 3] = ["table-3", "table-3-1k", "table-3-4k"];

const STYLE: &str = "\
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1240px; margin: 2em auto; padding: 0 1em; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .25em .6em; border-bottom: 1px solid #8886; }
td.agrees { color: #00794f; } td.differs { color: #c1440e; font-weight: 600; } td.not { color: #777; }
figure { margin: 1em 0; overflow-x: auto; } svg { max-width: 100%; height: auto; }
pre, code { font-size: 13px; } pre { overflow-x: auto; }
@media (prefers-color-scheme: dark) {
  td.agrees { color: #4fd1a1; } td.differs { color: #ff9a6b; } td.not { color: #aaa; }
}
";

/// The page as HTML, without scripts and without anything from a network.
pub(super) fn html(report: &Report, judged: &[Judged]) -> Result<String, DrawError> {
    let mut body = String::new();
    let count = |is: fn(&Verdict) -> bool| judged.iter().filter(|claim| is(&claim.verdict)).count();
    let length = if report.quick { ", with --quick" } else { "" };
    line(&mut body, "p", &format!("{}; fa3 {}{length}", report.machine, env!("CARGO_PKG_VERSION")));
    let counts = format!(
        "{} claims: {} agree, {} differ, {} not run. The paper's numbers are for an H100 80GB SXM5. Origins: the text \
         of the paper, labels of its figures, the talk of its authors, and this project, which carries numbers of the \
         paper's tables. Speeds agree from 0.9 of the paper's on, ratios within 5 %, errors within 25 %. Numbers of the \
         model are cycles of a simulated GPU, of which only the order counts.",
        judged.len(),
        count(|verdict| *verdict == Verdict::Agrees),
        count(|verdict| *verdict == Verdict::Differs),
        count(|verdict| matches!(verdict, Verdict::NotRun(_)))
    );
    line(&mut body, "p", &counts);
    body += &table(judged.iter());
    for (id, title, about, parts) in SECTIONS {
        let _ = writeln!(body, "<h2 id=\"{id}\">{}</h2>", escaped(title));
        line(&mut body, "p", about);
        body += &table(judged.iter().filter(|claim| claim.section == id));
        for svg in charts(report, id)? {
            body += &figure(id, &svg);
        }
        for ran in parts.iter().filter_map(|id| report.part(id)) {
            body += &shown(ran);
        }
    }
    Ok(format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width\">\n<title>FlashAttention-3, reproduced</title>\n\
         <style>\n{STYLE}</style>\n</head>\n<body>\n<h1>FlashAttention-3, reproduced</h1>\n{body}</body>\n</html>\n"
    ))
}

/// Appends a paragraph or another element with text.
fn line(html: &mut String, element: &str, text: &str) {
    let _ = writeln!(html, "<{element}>{}</{element}>", escaped(text));
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

fn table<'a>(claims: impl Iterator<Item = &'a Judged>) -> String {
    let heads = ["claim", "where", "paper", "origin", "its figures", "here", "verdict"];
    let heads = heads.map(|head| format!("<th>{head}</th>")).concat();
    let rows = claims.map(|claim| {
        let class = match claim.verdict {
            Verdict::Agrees => "agrees",
            Verdict::Differs => "differs",
            Verdict::NotRun(_) => "not",
        };
        let [figures, here] = [&claim.figures, &claim.here].map(|text| text.as_deref().unwrap_or_default());
        let cells = [&claim.claim, &claim.place, &claim.paper, &claim.origin.to_string(), figures, here];
        let cells = cells.map(|cell| format!("<td>{}</td>", escaped(cell))).concat();
        format!("<tr>{cells}<td class=\"{class}\">{}</td></tr>\n", escaped(&claim.verdict.to_string()))
    });
    format!("<table>\n<tr>{heads}</tr>\n{}</table>\n", rows.collect::<String>())
}

/// A picture within the page. Names within it are made its own, since the page has several pictures.
fn figure(id: &str, svg: &str) -> String {
    let svg = svg.get(svg.find("<svg").unwrap_or(0)..).unwrap_or_default();
    let svg = svg.replace(" id=\"", &format!(" id=\"{id}-")).replace("url(#", &format!("url(#{id}-"));
    let svg = svg.replace("\"title about\"", &format!("\"{id}-title {id}-about\""));
    format!("<figure>\n{svg}\n</figure>\n")
}

/// The command of a part, with what it printed.
fn shown(Ran { command, seconds, outcome, .. }: &Ran) -> String {
    let command = format!("<code>fa3 {}</code>", escaped(command));
    match outcome {
        Outcome::Skipped(why) => format!("<p>{command}: {}</p>\n", escaped(why)),
        Outcome::Done { right, text, data, .. } => {
            let wrong = if *right { "" } else { ", <strong>a check failed</strong>" };
            let text = if text.is_empty() { format!("{data:#}") } else { text.clone() };
            format!(
                "<details><summary>{command}: {seconds:.1} s{wrong}</summary>\n<pre>{}</pre></details>\n",
                escaped(&text)
            )
        }
    }
}

/// The pictures of a section.
fn charts(report: &Report, id: &str) -> Result<Vec<String>, DrawError> {
    Ok(match id {
        "figure-5" => vec![bars::draw(&panels(report, 5), 2)?],
        "figure-6" => vec![bars::draw(&panels(report, 6), 2)?],
        "figure-7" => vec![bars::draw(&panels(report, 7), 2)?],
        "table-3" => {
            let by_length = errors_by_length(report).map(|panel| bars::draw(&[panel], 1)).transpose()?;
            picture(report, id).into_iter().chain(by_length).collect()
        }
        "talk" => picture(report, "schedule"),
        id => picture(report, id),
    })
}

/// The picture that a part drew.
fn picture(report: &Report, id: &str) -> Vec<String> {
    match report.part(id).map(|ran| &ran.outcome) {
        Some(Outcome::Done { svg, .. }) => svg.clone().into_iter().collect(),
        Some(Outcome::Skipped(_)) | None => Vec::new(),
    }
}

/// The panels of one of the paper's figures with the numbers that were measured here.
fn panels(report: &Report, figure: u32) -> Vec<Panel> {
    let panels = PANELS.iter().filter(|panel| panel.figure == figure).map(|panel| {
        let papers = panel.series.iter().map(|(name, tflops)| {
            let heights = (0..SEQLENS.len()).map(|index| tflops.get(index).copied().map(f64::from));
            Series::of_paper(name, heights.collect())
        });
        let heights = SEQLENS.map(|seqlen| report.tflops(panel, seqlen)).to_vec();
        let ours = Series::new("here", OURS, heights);
        Panel {
            caption: format!("head_dim {}, mask {}: figure {figure}", panel.head_dim, panel.mask),
            axes: ["sequence length", "TFLOP/s"],
            groups: SEQLENS.map(size_label).to_vec(),
            series: papers.chain([ours]).filter(Series::has_bars).collect(),
            missing: Vec::new(),
        }
    });
    panels.collect()
}

/// Errors in FP8 by the number of keys, if they were measured at several.
fn errors_by_length(report: &Report) -> Option<Panel> {
    let mut lengths: Vec<&Value> = TABLE_3.iter().filter_map(|id| Some(report.data(id).ok()?.0)).collect();
    lengths.sort_by_key(|data| data["seqlen"].as_u64());
    let series = |name: &str, color, method: &str| {
        let height = |data: &&Value| {
            let row = data["table"].as_array()?.iter().find(|row| row["method"] == method)?;
            Some(1e4 * row["median"].as_f64()?)
        };
        Series::new(name, color, lengths.iter().map(height).collect())
    };
    let panel = Panel {
        caption: "Error of O in FP8 by the number of keys".to_owned(),
        axes: ["keys", "RMSE / 1e-4"],
        groups: lengths.iter().map(|data| data["seqlen"].to_string()).collect(),
        series: vec![
            series("standard attention", PAPER, "StandardFp8"),
            series("FlashAttention-3", OURS, "Flash3Fp8"),
        ],
        missing: Vec::new(),
    };
    (lengths.len() > 1).then_some(panel)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::json;

    use super::*;
    use crate::reproduce::claim;
    use crate::reproduce::part::PARTS;

    /// A report in which the parts without a GPU are skipped, too, but for one with this data.
    fn report(id: &str, right: bool, data: Value) -> Report {
        let parts = PARTS.iter().map(|part| {
            let (text, svg) =
                ("a < b".to_owned(), Some("<svg id=\"x\"><g fill=\"url(#x)\"/></svg>".to_owned()));
            let done = Outcome::Done { right, text, data: data.clone(), svg };
            let outcome = if part.id == id { done } else { Outcome::Skipped("no <GPU>".to_owned()) };
            Ran { id: part.id.to_owned(), command: part.command(false, false), seconds: 1.0, outcome }
        });
        Report { machine: "a machine".to_owned(), quick: false, parts: parts.collect() }
    }

    fn verdicts(report: &Report, section: &str) -> Vec<String> {
        let judged = claim::judge(report).into_iter().filter(|claim| claim.section == section);
        judged.map(|claim| claim.verdict.to_string()).collect()
    }

    /// Claims and sections fit together, and so do sections and parts.
    #[test]
    fn every_claim_and_part_has_its_section() {
        let sections: Vec<&str> = SECTIONS.iter().map(|section| section.0).collect();
        let mut claimed: Vec<String> = Vec::new();
        for claim in claim::judge(&report("", true, json!(null))) {
            let known = sections.contains(&claim.section.as_str());
            assert!(known && matches!(&claim.verdict, Verdict::NotRun(_)), "{claim:?}");
            claimed.push(claim.section);
        }
        claimed.dedup();
        assert_eq!(claimed, sections, "claims are in the order of the page");
        let shown: BTreeSet<&str> = SECTIONS.iter().flat_map(|section| section.3).copied().collect();
        assert_eq!(shown, PARTS.iter().map(|part| part.id).collect());
    }

    #[test]
    fn numbers_have_verdicts() {
        let sass = |first: u32| {
            let under = |count: u32| json!({ "under": { "exponentials": count } });
            json!({ "spill_bytes": 0, "loops": [{
                "counts": { "exponentials": 42 }, "products": [under(first), under(12)],
                "order": ["HGMMA×8", "F2FP×18+MUFU.EX2×29+FADD×34"],
            }] })
        };
        let said = verdicts(&report("sass", true, sass(0)), "listing-b2");
        assert_eq!(said[1..5], ["differs", "differs", "differs", "agrees"]);
        assert_eq!(verdicts(&report("sass", true, sass(1)), "listing-b2")[1], "agrees");
        let forms = |full: f64| json!({ "groups": [{ "forms": [{ "name": "full", "tflops": full }] }] });
        assert_eq!(verdicts(&report("table-2", true, forms(595.0)), "table-2")[0], "agrees");
        let low = verdicts(&report("table-2", true, forms(594.0)), "table-2");
        assert_eq!(low[..2], ["differs", "not run: no time of the form no GEMM-softmax pipelining"]);
        let wrong = report("fp8", false, json!({}));
        assert_eq!(verdicts(&wrong, "figure-3")[0], "differs");
        assert!(!wrong.is_right() && report("fp8", true, json!({})).is_right());
    }

    #[test]
    fn figures_have_bars_of_both() {
        let cell = json!({ "head_dim": 64, "mask": "none", "seqlen": 512, "tflops": 299.0 });
        let low = report("figure-5", true, json!({ "cells": [cell] }));
        let panels = panels(&low, 5);
        assert_eq!(panels.len(), 6);
        assert_eq!((panels[0].series.len(), panels[1].series.len(), panels[4].series.len()), (6, 5, 3));
        assert_eq!(panels[0].series[5].heights, [Some(299.0), None, None, None, None, None]);
        let judged = claim::judge(&low).into_iter().filter(|claim| claim.section == "figure-5");
        let here: Vec<_> = judged.filter_map(|claim| claim.here).collect();
        assert_eq!(here, ["at least 0.9 of it in 0 of 1 cells", "299"]);
    }

    #[test]
    fn fp8_is_compared_with_its_own_figure_and_with_fp16() {
        let at = |tflops| json!({ "cells": [{ "head_dim": 256, "mask": "none", "seqlen": 16384, "tflops": tflops }] });
        let mut both = report("figure-7", true, at(1190.0));
        both.parts
            .extend(report("figure-5", true, at(626.0)).parts.into_iter().filter(|ran| ran.id == "figure-5"));
        both.parts.retain(|ran| ran.id != "figure-5" || matches!(ran.outcome, Outcome::Done { .. }));
        let judged = claim::judge(&both).into_iter().filter(|claim| claim.section == "figure-7");
        let here: Vec<_> = judged.filter_map(|claim| claim.here).collect();
        assert_eq!(here, ["at least 0.9 of it in 1 of 1 cells", "1190", "up to 1.90", "1190"]);
        assert_eq!(panels(&both, 7)[0].series.last().unwrap().heights[5], Some(1190.0));
    }

    /// Errors have a chart by length once there are two lengths.
    #[test]
    fn errors_stand_beside_those_of_other_lengths() {
        let at = |keys: u32| json!({ "seqlen": keys, "table": [{ "method": "Flash3Fp8", "median": f64::from(keys) * 1e-4 }] });
        let mut by_length = report("table-3", true, at(8448));
        assert!(errors_by_length(&by_length).is_none());
        by_length.parts.extend(report("table-3-1k", true, at(1024)).parts.into_iter().rev().take(2));
        by_length
            .parts
            .retain(|ran| !ran.id.starts_with("table-3-") || matches!(ran.outcome, Outcome::Done { .. }));
        let panel = errors_by_length(&by_length).unwrap();
        assert_eq!(panel.groups, ["1024", "8448"]);
        assert_eq!(panel.series[1].heights, [Some(1024.0), Some(8448.0)]);
    }

    #[test]
    fn the_page_stands_alone() {
        let report = report("figure-1", true, json!(null));
        let html = html(&report, &claim::judge(&report)).unwrap();
        for text in [
            "a &lt; b",
            "no &lt;GPU&gt;",
            "id=\"figure-1-x\"",
            "url(#figure-1-x)",
            "prefers-color-scheme: dark",
        ] {
            assert!(html.contains(text), "{text}");
        }
        let links = html.replace("http://www.w3.org/2000/svg", "");
        for foreign in ["http", "<script", "<link", "src="] {
            assert!(!links.contains(foreign), "{foreign}");
        }
        assert_eq!(html.matches("<h2").count(), SECTIONS.len());
    }
}
