//! Both tables as one SVG chart.

use plotters::coord::CoordTranslate;
use plotters::prelude::*;

use super::computer::Processor;
use super::drift;
use super::report::Report;
use crate::args::number::size_label;
use crate::draw::{self, Area, DrawError};

// The colours of the simulator's timelines, which colour-blind readers tell apart.
const ON_CPU: RGBColor = RGBColor(0x00, 0x72, 0xb2);
const ON_GPU: RGBColor = RGBColor(0x00, 0x9e, 0x73);
const ONE_LEVEL: RGBColor = RGBColor(0xd5, 0x5e, 0x00);
const PAPER: RGBColor = RGBColor(120, 120, 120);

/// Width of a legend's marks in pixels.
const LEGEND_MARKS: u32 = 18;

pub(super) fn draw(report: &Report) -> Result<String, DrawError> {
    draw::svg((1100, 420), |root| {
        let (left, right) = root.split_horizontally(620);
        draw_table(report, &left)?;
        draw_drift(report, &right)
    })
}

/// Draws one line per method: the median as a dot, the spread as a bar, and the paper's number, if it applies, as a
/// cross.
fn draw_table(report: &Report, area: &Area<'_>) -> Result<(), DrawError> {
    let rows = &report.table;
    let title = format!("RMSE against f64, seqlen {}, head_dim {}", report.seqlen, report.head_dim);
    let y = |row: usize| (rows.len() - row) as f64;
    let name = |y: &f64| {
        let row = rows.len().checked_sub(y.round() as usize).and_then(|row| rows.get(row));
        row.map_or(String::new(), |row| row.name.clone())
    };
    let mut chart = ChartBuilder::on(area)
        .caption(title, ("sans-serif", 16))
        .margin(12)
        .x_label_area_size(34)
        .y_label_area_size(210)
        .build_cartesian_2d(
            (5e-5f64..5e-2).log_scale().with_key_points(vec![1e-4, 1e-3, 1e-2]),
            0.5..rows.len() as f64 + 0.5,
        )?;
    chart
        .configure_mesh()
        .x_desc("RMSE")
        .y_labels(rows.len())
        .y_label_formatter(&name)
        .x_label_formatter(&|x| format!("{x:.0e}"))
        .disable_y_mesh()
        .draw()?;
    let places = [
        (Processor::Cpu, ON_CPU, "here: median, least to most"),
        (Processor::Gpu, ON_GPU, "the same on the GPU"),
    ];
    for (place, color, label) in places {
        let rows: Vec<_> = rows.iter().enumerate().filter(|(_, row)| row.place == place).collect();
        if rows.is_empty() {
            continue;
        }
        chart.draw_series(rows.iter().map(|(i, row)| {
            PathElement::new([(row.least(), y(*i)), (row.most(), y(*i))], color.stroke_width(2))
        }))?;
        chart
            .draw_series(rows.iter().map(|(i, row)| Circle::new((row.median, y(*i)), 4, color.filled())))?
            .label(label)
            .legend(move |(x, y)| Circle::new((x + 8, y), 4, color.filled()));
    }
    if report.is_of_papers_length() {
        let paper = rows
            .iter()
            .enumerate()
            .filter_map(|(i, row)| Some(Cross::new((row.paper?, y(i)), 5, PAPER.stroke_width(2))));
        chart
            .draw_series(paper)?
            .label("the paper")
            .legend(|(x, y)| Cross::new((x + 8, y), 5, PAPER.stroke_width(2)));
    }
    draw_legend(&mut chart, SeriesLabelPosition::UpperRight)
}

fn draw_drift(report: &Report, area: &Area<'_>) -> Result<(), DrawError> {
    let rows = &report.drift;
    let keys = |row: &drift::Row| row.keys as f64;
    let most = rows.iter().map(keys).fold(0.0, f64::max);
    let lowest = rows.iter().map(|row| 100.0 * row.one_level.bias).fold(0.0, f64::min);
    let mut chart = ChartBuilder::on(area)
        .caption("Bias of O in FP8, V around 1", ("sans-serif", 16))
        .margin(12)
        .x_label_area_size(34)
        .y_label_area_size(60)
        .build_cartesian_2d(
            (800.0..1.2 * most).log_scale().with_key_points(rows.iter().map(keys).collect()),
            1.1 * lowest..2.0,
        )?;
    chart
        .configure_mesh()
        .x_desc("keys")
        .x_label_formatter(&|&x| size_label(x as usize))
        .y_label_formatter(&|y| format!("{y:.0} %"))
        .light_line_style(WHITE)
        .draw()?;
    let line = |bias: fn(&drift::Row) -> f64| rows.iter().map(move |row| (keys(row), 100.0 * bias(row)));
    let (two_levels, color) = match report.gpu {
        None => ("two levels", ON_CPU),
        Some(_) => ("two levels, on the GPU", ON_GPU),
    };
    for (name, color, points) in [
        ("one level", ONE_LEVEL, line(|row| row.one_level.bias)),
        (two_levels, color, line(|row| row.two_level.bias)),
    ] {
        chart.draw_series(LineSeries::new(points.clone(), color.stroke_width(2)))?;
        chart
            .draw_series(points.map(|point| Circle::new(point, 4, color.filled())))?
            .label(name)
            .legend(move |(x, y)| Circle::new((x + 8, y), 4, color.filled()));
    }
    draw_legend(&mut chart, SeriesLabelPosition::LowerLeft)
}

fn draw_legend<'a, C: CoordTranslate>(
    chart: &mut ChartContext<'a, SVGBackend<'a>, C>,
    at: SeriesLabelPosition,
) -> Result<(), DrawError> {
    let mut labels = chart.configure_series_labels();
    labels.position(at).legend_area_size(LEGEND_MARKS).margin(6);
    Ok(labels.background_style(WHITE).border_style(PAPER).draw()?)
}
