//! Both tables as one SVG chart: bars of errors in fp16 and in FP8, and of the bias by the number of keys.

use plotters::style::RGBColor;

use super::computer::Processor;
use super::drift;
use super::method::Method;
use super::report::Report;
use crate::args::number::size_label;
use crate::bars::{self, OURS, PAPER, Panel, Series};
use crate::draw::DrawError;

// The colours of the simulator's timelines, which colour-blind readers tell apart.
const ON_GPU: RGBColor = RGBColor(0x00, 0x9e, 0x73);
const ONE_LEVEL: RGBColor = RGBColor(0x00, 0x72, 0xb2);

/// A panel of Table 3: its elements, the unit of errors, the axis, and the methods with short names.
type Errors = (&'static str, f64, &'static str, &'static [(Method, &'static str)]);

const ERRORS: [Errors; 2] = [
    (
        "fp16",
        1e-5,
        "RMSE / 1e-5",
        &[(Method::StandardFp16, "standard"), (Method::Flash2Fp16, "FA-2"), (Method::Flash3Fp16, "FA-3")],
    ),
    (
        "FP8",
        1e-4,
        "RMSE / 1e-4",
        &[
            (Method::StandardFp8, "standard"),
            (Method::Flash3Fp8, "FA-3"),
            (Method::NoBlockQuantization, "one scale"),
            (Method::NoIncoherentProcessing, "no Hadamard"),
            (Method::TwoLevel, "two levels"),
            (Method::VChannels, "V channels"),
        ],
    ),
];

pub(super) fn draw(report: &Report) -> Result<String, DrawError> {
    let errors = ERRORS.map(|panel| errors(report, panel));
    bars::draw(&errors.into_iter().chain([bias(report)]).collect::<Vec<_>>(), 2)
}

/// The medians of a panel's methods with the spread of seeds, and the paper's numbers if they apply.
fn errors(report: &Report, (elements, unit, axis, methods): Errors) -> Panel {
    let rows: Vec<_> = methods
        .iter()
        .filter_map(|(method, _)| report.table.iter().find(|row| row.method == *method))
        .collect();
    let place = |place, name: &str, color| {
        let here = || rows.iter().map(move |row| (row.place == place).then_some(*row));
        Series {
            name: format!("{name}, {} keys", report.seqlen),
            color,
            heights: here().map(|row| Some(row?.median / unit)).collect(),
            spreads: here().map(|row| row.map(|row| [row.least() / unit, row.most() / unit])).collect(),
        }
    };
    let applies = report.is_of_papers_length();
    let paper = rows.iter().map(|row| row.paper.filter(|_| applies).map(|paper| paper / unit));
    let paper = Series::new("the paper, at no stated length", PAPER, paper.collect());
    let here = [place(Processor::Cpu, "here", OURS), place(Processor::Gpu, "here, on the GPU", ON_GPU)];
    Panel {
        caption: format!("Error of O in {elements}, head_dim {}", report.head_dim),
        axes: ["", axis],
        groups: methods.iter().map(|(_, name)| (*name).to_owned()).collect(),
        series: std::iter::once(paper).chain(here).filter(Series::has_bars).collect(),
        missing: Vec::new(),
    }
}

/// The part of O that is lost as the number of keys grows.
fn bias(report: &Report) -> Panel {
    let lost =
        |bias: fn(&drift::Row) -> f64| report.drift.iter().map(|row| Some(-100.0 * bias(row))).collect();
    let (two_levels, color) = match report.gpu {
        None => ("two levels", OURS),
        Some(_) => ("two levels, on the GPU", ON_GPU),
    };
    Panel {
        caption: "O in FP8 becomes smaller, V around 1".to_owned(),
        axes: ["keys", "percent of O"],
        groups: report.drift.iter().map(|row| size_label(row.keys)).collect(),
        series: vec![
            Series::new("one level", ONE_LEVEL, lost(|row| row.one_level.bias)),
            Series::new(two_levels, color, lost(|row| row.two_level.bias)),
        ],
        missing: Vec::new(),
    }
}
