//! The gain of each of the kernel's techniques: variants of the kernel without one of them, measured in turns, next to
//! the paper's Table 2 and to the steps that the paper's authors named in a talk.

use std::error::Error;
use std::fmt;

use fa3::cuda::Device;
use fa3_sched::forward::Loads::{self, Consumers, Producer};
use fa3_sched::forward::Pipeline::{self, Paired, Serial, ThreeStage, TwoStage};
use fa3_sched::forward::{CtaTile, Plan, PlanOptions};
use fa3_sched::{Order, Scheduler};
use fa3_types::{Dtype, Mask};
use serde::Serialize;

use crate::grid::Setting;
use crate::measure::{self, Machine, Outcome, Pace};
use crate::progress;
use crate::table::Table;

/// A variant of the kernel: its name, its options, and TFLOP/s in the paper's Table 2 (3.538, 4.021 and 4.105 ms) and
/// in the authors' talk, which does not name the setting.
type Form = (&'static str, fn(&Plan) -> PlanOptions, Option<u32>, Option<u32>);

/// Variants that compute the same problem.
struct Group {
    name: &'static str,
    mask: Mask,
    /// The variants. All others are compared with the first.
    forms: &'static [Form],
}

const GROUPS: [Group; 3] = [
    Group {
        name: "the paper's kernel",
        mask: Mask::None,
        forms: &[
            ("full", |plan| tile(plan, TwoStage, Producer, true), Some(661), Some(670)),
            ("no GEMM-softmax pipelining", |plan| tile(plan, Serial, Producer, true), Some(582), Some(640)),
            ("no warp specialisation", |plan| tile(plan, TwoStage, Consumers, true), Some(570), None),
            ("no ping-pong", |plan| tile(plan, TwoStage, Producer, false), None, None),
            ("no pipelining and no ping-pong", |plan| tile(plan, Serial, Producer, false), None, Some(580)),
            ("lazy rescaling", |plan| tile(plan, Paired, Producer, true), None, None),
            ("lazy rescaling, in clusters", |plan| planned_tile(plan).clusters(true), None, None),
        ],
    },
    Group {
        name: "the paper's kernel with two consumer warpgroups",
        mask: Mask::None,
        forms: &[
            ("full", |plan| two(plan, TwoStage, true), Some(661), Some(670)),
            ("no GEMM-softmax pipelining", |plan| two(plan, Serial, true), Some(582), Some(640)),
            ("no ping-pong", |plan| two(plan, TwoStage, false), None, None),
            ("no pipelining and no ping-pong", |plan| two(plan, Serial, false), None, Some(580)),
            ("3-stage pipelining", |plan| tile_of_two(plan, 112, ThreeStage, false), None, None),
            (
                "2-stage pipelining with the tile of 3",
                |plan| tile_of_two(plan, 112, TwoStage, false),
                None,
                None,
            ),
        ],
    },
    Group {
        name: "the order of tiles",
        mask: Mask::Causal,
        forms: &[
            ("longest first, as CTAs get free", |plan| schedule(plan.order(), DYNAMIC), None, Some(710)),
            ("longest first, dealt in turn", |plan| schedule(plan.order(), STATIC), None, None),
            ("linear, as CTAs get free", |_| schedule(Order::Linear, DYNAMIC), None, None),
            ("linear, dealt in turn", |_| schedule(Order::Linear, STATIC), None, Some(670)),
        ],
    },
];

const DYNAMIC: Scheduler = Scheduler::DynamicPersistent;
const STATIC: Scheduler = Scheduler::StaticPersistent;

/// The plan's tile with this pipeline, loads and ping-pong. The full variant has all of the paper's techniques: softmax
/// overlaps GEMMs within a warpgroup and between warpgroups, and every block rescales O. Clusters are off.
fn tile(plan: &Plan, pipeline: Pipeline, loads: Loads, ping_pong: bool) -> PlanOptions {
    let tile = CtaTile { pipeline, loads, ping_pong, ..plan.tile() };
    PlanOptions::default().tile(tile).clusters(false)
}

/// The tile of [`tile`] with two consumer warpgroups, as in the paper, and as many keys as registers have room for.
fn two(plan: &Plan, pipeline: Pipeline, ping_pong: bool) -> PlanOptions {
    tile_of_two(plan, 176, pipeline, ping_pong)
}

/// The tile of [`two`] with `tile_n` keys: three stages leave registers for 112.
fn tile_of_two(plan: &Plan, tile_n: u32, pipeline: Pipeline, ping_pong: bool) -> PlanOptions {
    let (tile_m, stages, consumers) = (128, 2, 2);
    let tile = CtaTile { tile_m, tile_n, stages, consumers, pipeline, ping_pong, ..plan.tile() };
    PlanOptions::default().tile(tile).clusters(false)
}

fn planned_tile(plan: &Plan) -> PlanOptions {
    PlanOptions::default().tile(plan.tile())
}

fn schedule(order: Order, scheduler: Scheduler) -> PlanOptions {
    PlanOptions::default().order(order).scheduler(scheduler)
}

/// All groups.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    machine: Machine,
    #[serde(flatten)]
    pace: Pace,
    groups: Vec<Measured>,
}

/// A group and the outcomes of its variants.
#[derive(Debug, Serialize)]
struct Measured {
    name: &'static str,
    #[serde(flatten)]
    setting: Setting,
    flops: f64,
    forms: Vec<Row>,
}

#[derive(Debug, Serialize)]
struct Row {
    name: &'static str,
    outcome: Outcome,
    tflops: Option<f64>,
    paper: Option<u32>,
    talk: Option<u32>,
}

pub(super) fn measure(device: &Device, dtype: Dtype, pace: Pace) -> Result<Report, Box<dyn Error>> {
    let forms = GROUPS.iter().map(|group| group.forms.len()).sum();
    let progress = progress::bar(measure::steps(forms, pace));
    let groups = GROUPS.iter().map(|group| {
        let setting = group.setting(dtype);
        let problem = setting.problem()?;
        progress.set_message(format!("{}: {setting}", group.name));
        let options = group.options(&Plan::new(&problem, &device.limits())?);
        let outcomes = measure::race(device, &problem, &options, pace, &progress);
        Ok(group.measured(setting, problem.forward_flops(), outcomes))
    });
    let groups = groups.collect::<Result<_, Box<dyn Error>>>()?;
    progress.finish_and_clear();
    Ok(Report { machine: Machine::of(device), pace, groups })
}

impl Group {
    fn setting(&self, dtype: Dtype) -> Setting {
        Setting::plain(dtype, 128, self.mask, (4, 8448, 16))
    }

    fn options(&self, plan: &Plan) -> Vec<PlanOptions> {
        self.forms.iter().map(|(_, options, ..)| options(plan)).collect()
    }

    fn measured(&self, setting: Setting, flops: f64, outcomes: Vec<Outcome>) -> Measured {
        let row = |(&(name, _, paper, talk), outcome): (&Form, Outcome)| Row {
            name,
            tflops: outcome.tflops(flops),
            outcome,
            paper,
            talk,
        };
        let forms = self.forms.iter().zip(outcomes).map(row).collect();
        Measured { name: self.name, setting, flops, forms }
    }
}

impl Report {
    /// Whether every variant has a time.
    pub(super) fn is_whole(&self) -> bool {
        self.groups.iter().flat_map(|group| &group.forms).all(|row| row.tflops.is_some())
    }
}

impl Measured {
    fn table(&self) -> Table {
        let first = self.forms.first();
        // A number, and its ratio to the first variant's number.
        let pair = |number: fn(&Row) -> Option<f64>, row: &Row| match (number(row), first.and_then(number)) {
            (Some(number), Some(full)) => [format!("{number:.0}"), format!("{:.3}", number / full)],
            (Some(number), None) => [format!("{number:.0}"), "-".to_owned()],
            (None, _) => ["-".to_owned(), "-".to_owned()],
        };
        let rows = self.forms.iter().map(|row| {
            let [_, part] = pair(|row| row.tflops, row);
            let here = [row.outcome.cell(self.flops), part];
            let paper = pair(|row| row.paper.map(f64::from), row);
            let talk = pair(|row| row.talk.map(f64::from), row);
            std::iter::once(row.name.to_owned()).chain(here).chain(paper).chain(talk).collect()
        });
        Table::new(["", "here", "of full", "paper", "of full", "talk", "of full"], rows, 1)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Report { machine, pace, groups } = self;
        writeln!(f, "{machine}")?;
        write!(
            f,
            "TFLOP/s, {pace}, all forms in turns; the paper's Table 2 is for fp16 on an H100 80GB SXM5"
        )?;
        for group in groups {
            let Setting { dtype, batch, heads, .. } = group.setting;
            write!(f, "\n\n{}: {dtype}, batch {batch}, {heads} heads, {}", group.name, group.setting)?;
            write!(f, "\n{}", group.table())?;
            for Row { name, outcome, .. } in &group.forms {
                let plan = outcome.timing().map(|timing| timing.plan.clone());
                write!(f, "\n  {name}: {}", plan.or_else(|| outcome.fault()).unwrap_or_default())?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fa3_sched::DeviceLimits;

    fn options(group: &Group) -> Vec<PlanOptions> {
        let problem = group.setting(Dtype::F16).problem().unwrap();
        group.options(&Plan::new(&problem, &DeviceLimits::h100_sxm()).unwrap())
    }

    /// Every form can be planned, and all forms differ.
    #[test]
    fn forms_are_possible_and_differ() {
        for group in &GROUPS {
            let problem = group.setting(Dtype::F16).problem().unwrap();
            let plans: Vec<_> = options(group)
                .iter()
                .map(|options| Plan::with(&problem, &DeviceLimits::h100_sxm(), options).unwrap())
                .map(|plan| {
                    let (order, scheduler) = (plan.order(), plan.scheduler());
                    (plan.tile(), order, scheduler, plan.cluster())
                })
                .collect();
            for (index, plan) in plans.iter().enumerate() {
                assert!(!plans[..index].contains(plan), "{}: {plan:?}", group.forms[index].0);
            }
        }
    }

    #[test]
    fn the_full_form_overlaps_in_both_ways_and_the_planned_order_is_the_longest_first() {
        let [dense, two, causal] = &GROUPS;
        let full = [dense, two].map(|group| options(group)[0].tile.unwrap());
        assert!(full.iter().all(|tile| tile.ping_pong && tile.pipeline == TwoStage));
        assert_eq!(full.map(|tile| tile.consumers), [3, 2]);
        assert!(matches!(options(causal)[0].order, Some(Order::LongestFirst { .. })));
    }

    #[test]
    fn a_table() {
        let group = &GROUPS[0];
        let setting = group.setting(Dtype::F16);
        let flops = setting.problem().unwrap().forward_flops();
        let mut outcomes: Vec<_> = [3.5, 4.0, 4.1, 3.75].map(|millis| Outcome::checked(&[millis])).to_vec();
        outcomes.push(Outcome::Wrong("o is off".to_owned()));
        let measured = group.measured(setting, flops, outcomes);
        let expected = "                                 here  of full  paper  of full  talk  of full
full                              668    1.000    661    1.000   670    1.000
no GEMM-softmax pipelining        585    0.875    582    0.880   640    0.955
no warp specialisation            570    0.854    570    0.862     -        -
no ping-pong                      624    0.933      -        -     -        -
no pipelining and no ping-pong  WRONG        -      -        -   580    0.866";
        assert_eq!(measured.table().to_string(), expected);
        let report = Report {
            machine: Machine::example(),
            pace: Pace { rounds: 1, slice_ms: 2.0 },
            groups: vec![measured],
        };
        assert!(!report.is_whole());
        let text = report.to_string();
        assert!(
            text.contains(
                "the paper's kernel: f16, batch 4, 16 heads, head_dim 128, mask none, seqlen 8448\n"
            ),
            "{text}"
        );
        assert!(text.ends_with("\n  no pipelining and no ping-pong: WRONG: o is off"), "{text}");
    }
}
