//! Charts of bars in groups, in one or several panels.

use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::draw::{self, Area, DrawError};
use crate::paper::{CUDNN, FA2, FA3, TRITON};

/// Size of a panel in pixels.
const PANEL: (u32, u32) = (620, 330);
/// The part of a group's slot on the axis that its bars fill.
const GROUP: f64 = 0.86;
/// Entries in a line of the legend, and the line's height in pixels.
const LEGEND: (usize, i32) = (3, 18);

/// The colour of what was measured here.
pub(crate) const OURS: RGBColor = RGBColor(214, 39, 40);

/// The colour of FlashAttention-3 in the paper.
pub(crate) const PAPER: RGBColor = RGBColor(117, 107, 177);

/// The bars of one name and colour.
pub(crate) struct Series {
    pub(crate) name: String,
    pub(crate) color: RGBColor,
    /// The height of the bar in each group.
    pub(crate) heights: Vec<Option<f64>>,
    /// The least and the most of what a height is the median of, for none or for all groups.
    pub(crate) spreads: Vec<Option<[f64; 2]>>,
}

impl Series {
    /// Bars without spreads.
    pub(crate) fn new(name: impl Into<String>, color: RGBColor, heights: Vec<Option<f64>>) -> Series {
        Series { name: name.into(), color, heights, spreads: Vec::new() }
    }

    /// TFLOP/s of an implementation in the paper.
    pub(crate) fn of_paper(name: &str, heights: Vec<Option<f64>>) -> Series {
        let color = match name {
            FA2 => RGBColor(158, 202, 225),
            TRITON => RGBColor(253, 174, 97),
            CUDNN => RGBColor(161, 217, 155),
            FA3 => PAPER,
            _ => RGBColor(170, 170, 170),
        };
        Series::new(format!("{name} (paper)"), color, heights)
    }

    pub(crate) fn has_bars(&self) -> bool {
        self.heights.iter().any(Option::is_some)
    }
}

/// Groups of bars over one axis, which begins at 0.
pub(crate) struct Panel {
    pub(crate) caption: String,
    /// The titles of both axes: the property in which groups differ, and the unit of heights.
    pub(crate) axes: [&'static str; 2],
    pub(crate) groups: Vec<String>,
    pub(crate) series: Vec<Series>,
    /// Why the last series has no bar in a group, by the group's index.
    pub(crate) missing: Vec<(usize, String)>,
}

/// Draws panels in rows of `columns`.
pub(crate) fn draw(panels: &[Panel], columns: usize) -> Result<String, DrawError> {
    let rows = panels.len().div_ceil(columns).max(1);
    draw::svg((PANEL.0 * columns as u32, PANEL.1 * rows as u32), |root| {
        let areas = root.split_evenly((rows, columns));
        panels.iter().zip(&areas).try_for_each(|(panel, area)| panel.draw(area))
    })
}

impl Panel {
    fn draw(&self, area: &Area<'_>) -> Result<(), DrawError> {
        let Panel { caption, axes: [x_axis, y_axis], groups, series, missing } = self;
        let (head, body) = area
            .titled(caption, ("sans-serif", 16))?
            .split_vertically(LEGEND.1 * series.len().div_ceil(LEGEND.0) as i32);
        draw_legend(series, &head)?;
        // Leaves room for the numbers above the bars.
        let heights = series.iter().flat_map(|series| series.heights.iter().flatten());
        let ends = series.iter().flat_map(|series| series.spreads.iter().flatten().map(|[_, most]| most));
        let most = 1.13 * heights.chain(ends).copied().fold(0.0, f64::max);
        let mut chart = ChartBuilder::on(&body)
            .margin(10)
            .x_label_area_size(34)
            .y_label_area_size(52)
            .build_cartesian_2d(-0.5..groups.len() as f64 - 0.5, 0.0..if most > 0.0 { most } else { 1.0 })?;
        let label = |x: &f64| {
            let group = (x.fract() == 0.0 && *x >= 0.0).then(|| groups.get(*x as usize)).flatten();
            group.cloned().unwrap_or_default()
        };
        chart
            .configure_mesh()
            .disable_x_mesh()
            .x_labels(2 * groups.len())
            .x_label_formatter(&label)
            .x_desc(*x_axis)
            .y_desc(*y_axis)
            .y_label_formatter(&|y| format!("{y:.0}"))
            .light_line_style(WHITE)
            .draw()?;
        let width = GROUP / series.len() as f64;
        let upright = |size: u32, color: &RGBColor| {
            let style = ("sans-serif", size).into_font().transform(FontTransform::Rotate270).color(color);
            style.pos(Pos::new(HPos::Left, VPos::Center))
        };
        // Numbers stand upright above narrow bars.
        let number_style = match series.len() {
            0..=3 => ("sans-serif", 11).into_font().color(&BLACK).pos(Pos::new(HPos::Center, VPos::Bottom)),
            _ => upright(10, &BLACK),
        };
        for (index, Series { color, heights, spreads, .. }) in series.iter().enumerate() {
            let left = |group: usize| group as f64 - GROUP / 2.0 + index as f64 * width;
            let bars =
                heights.iter().enumerate().filter_map(|(group, height)| Some((left(group), (*height)?)));
            let bar = |(x, y)| Rectangle::new([(x, 0.0), (x + 0.94 * width, y)], color.filled());
            chart.draw_series(bars.clone().map(bar))?;
            let spread = |(group, spread): (usize, &Option<[f64; 2]>)| {
                let ends = (*spread)?.map(|y| (left(group) + 0.47 * width, y));
                Some(PathElement::new(ends, BLACK.stroke_width(1)))
            };
            chart.draw_series(spreads.iter().enumerate().filter_map(spread))?;
            // A number stands beside the line of a spread.
            let shift = if spreads.is_empty() { 0.47 } else { 0.7 };
            let number = |(x, y): (f64, f64)| {
                let digits = usize::from(y < 10.0);
                Text::new(format!("{y:.digits$}"), (x + shift * width, y + 0.01 * most), number_style.clone())
            };
            chart.draw_series(bars.map(number))?;
        }
        // The reason stands in place of the bar.
        let style = upright(11, &OURS);
        chart.draw_series(missing.iter().map(|(group, why)| {
            Text::new(format!(" {why}"), (*group as f64 + (GROUP - width) / 2.0, 0.0), style.clone())
        }))?;
        Ok(())
    }
}

/// Draws the legend above the chart, where it covers nothing.
fn draw_legend(series: &[Series], area: &Area<'_>) -> Result<(), DrawError> {
    for (index, Series { name, color, .. }) in series.iter().enumerate() {
        let (x, y) = (62 + 186 * (index % LEGEND.0) as i32, LEGEND.1 * (index / LEGEND.0) as i32);
        area.draw(&Rectangle::new([(x, y + 4), (x + 10, y + 14)], color.filled()))?;
        area.draw(&Text::new(name.clone(), (x + 16, y + 3), ("sans-serif", 12).into_font()))?;
    }
    Ok(())
}
