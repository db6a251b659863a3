//! The gain of each of the kernel's techniques: variants of the kernel without one of them, measured in turns, next to
//! the paper's Table 2 and to the steps that its authors named in a talk.

use std::error::Error;
use std::fmt;

use fa3::cuda::Device;
use fa3_sched::forward::{CtaTile, Loads, Pipeline, Plan, PlanOptions};
use fa3_sched::{Order, Scheduler};
use fa3_types::{Dtype, Mask};
use serde::Serialize;

use crate::grid::Setting;
use crate::measure::{self, Machine, Outcome, Pace};
use crate::progress;
use crate::table::Table;

/// A variant of the kernel.
struct Form {
    name: &'static str,
    options: fn(&Plan) -> PlanOptions,
    /// TFLOP/s in the paper's Table 2: 3.538, 4.021 and 4.105 ms.
    paper: Option<u32>,
    /// TFLOP/s in the talk, which does not name its setting.
    talk: Option<u32>,
}

/// Variants that compute the same problem.
struct Group {
    name: &'static str,
    mask: Mask,
    /// The others are compared with the first.
    forms: &'static [Form],
}

const GROUPS: [Group; 2] = [
    Group {
        name: "the paper's kernel",
        mask: Mask::None,
        forms: &[
            Form { name: "full", options: |plan| tile(plan, |full| full), paper: Some(661), talk: Some(670) },
            Form {
                name: "no GEMM-softmax pipelining",
                options: |plan| tile(plan, |full| CtaTile { pipeline: Pipeline::Serial, ..full }),
                paper: Some(582),
                talk: Some(640),
            },
            Form {
                name: "no warp specialisation",
                options: |plan| tile(plan, |full| CtaTile { loads: Loads::Consumers, ..full }),
                paper: Some(570),
                talk: None,
            },
            Form {
                name: "no ping-pong",
                options: |plan| tile(plan, |full| CtaTile { ping_pong: false, ..full }),
                paper: None,
                talk: None,
            },
            Form {
                name: "no pipelining and no ping-pong",
                options: |plan| {
                    tile(plan, |full| CtaTile { pipeline: Pipeline::Serial, ping_pong: false, ..full })
                },
                paper: None,
                talk: Some(580),
            },
            Form {
                name: "lazy rescaling",
                options: |plan| tile(plan, |full| CtaTile { pipeline: Pipeline::Paired, ..full }),
                paper: None,
                talk: None,
            },
            Form {
                name: "lazy rescaling, in clusters",
                options: |plan| PlanOptions::default().tile(plan.tile()).clusters(true),
                paper: None,
                talk: None,
            },
        ],
    },
    Group {
        name: "the order of tiles",
        mask: Mask::Causal,
        forms: &[
            Form {
                name: "longest first, as CTAs get free",
                options: |plan| schedule(plan.order(), Scheduler::DynamicPersistent),
                paper: None,
                talk: Some(710),
            },
            Form {
                name: "longest first, dealt in turn",
                options: |plan| schedule(plan.order(), Scheduler::StaticPersistent),
                paper: None,
                talk: None,
            },
            Form {
                name: "linear, as CTAs get free",
                options: |_| schedule(Order::Linear, Scheduler::DynamicPersistent),
                paper: None,
                talk: None,
            },
            Form {
                name: "linear, dealt in turn",
                options: |_| schedule(Order::Linear, Scheduler::StaticPersistent),
                paper: None,
                talk: Some(670),
            },
        ],
    },
];

/// The full variant's tile, changed by `change`. The full variant has the tile of the plan with all of the paper's
/// techniques: softmax overlaps GEMMs within a warpgroup and between warpgroups, and every block rescales O. Clusters
/// are off.
fn tile(plan: &Plan, change: fn(CtaTile) -> CtaTile) -> PlanOptions {
    let full = CtaTile { pipeline: Pipeline::TwoStage, ping_pong: true, ..plan.tile() };
    PlanOptions::default().tile(change(full)).clusters(false)
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

/// # Errors
/// If the GPU has no plan for the setting.
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
        self.forms.iter().map(|form| (form.options)(plan)).collect()
    }

    fn measured(&self, setting: Setting, flops: f64, outcomes: Vec<Outcome>) -> Measured {
        let row = |(form, outcome): (&Form, Outcome)| {
            let Form { name, paper, talk, .. } = *form;
            Row { name, tflops: outcome.tflops(flops), outcome, paper, talk }
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
        let heads = ["", "here", "of full", "paper", "of full", "talk", "of full"].map(str::to_owned);
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
        Table { rows: std::iter::once(heads.to_vec()).chain(rows).collect(), left: 1 }
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
                match outcome {
                    Outcome::Checked(timing) => write!(f, "\n  {name}: {}", timing.plan)?,
                    Outcome::Wrong(why) => write!(f, "\n  {name}: WRONG: {why}")?,
                    Outcome::Failed(why) => write!(f, "\n  {name}: failed: {why}")?,
                }
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
                assert!(!plans[..index].contains(plan), "{}: {plan:?}", group.forms[index].name);
            }
        }
    }

    #[test]
    fn the_full_form_overlaps_in_both_ways_and_the_planned_order_is_the_longest_first() {
        let [dense, causal] = &GROUPS;
        let full = options(dense)[0].tile.unwrap();
        assert!(full.ping_pong && full.pipeline == Pipeline::TwoStage);
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
