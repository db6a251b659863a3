//! Measurements over caches as lines by the number of keys, a panel for each number of heads and for each of the
//! figure's numbers.

use plotters::prelude::*;

use super::report::{Cell, Group, Number, Report};
use crate::args::number::size_label;
use crate::draw::{self, Area, DrawError};

/// Pixels of a panel.
const PANEL: (u32, u32) = (620, 380);
const FRAME: RGBColor = RGBColor(120, 120, 120);
/// Colors of lines, in turn.
const COLORS: [RGBColor; 6] = [
    RGBColor(31, 119, 180),
    RGBColor(214, 39, 40),
    RGBColor(44, 160, 44),
    RGBColor(148, 103, 189),
    RGBColor(255, 127, 14),
    RGBColor(23, 190, 207),
];

pub(super) fn draw(report: &Report) -> Result<String, DrawError> {
    let (groups, panels) = (report.groups(), report.figure.panels);
    let size = (PANEL.0 * panels.len() as u32, PANEL.1 * groups.len() as u32);
    draw::svg(size, |root| {
        let areas = root.split_evenly((groups.len(), panels.len()));
        let panels = groups.iter().flat_map(|group| panels.iter().map(move |number| (group, number)));
        panels.zip(&areas).try_for_each(|((group, number), area)| draw_panel(group, number, area))
    })
}

fn draw_panel(group: &Group<'_>, number: &Number, area: &Area<'_>) -> Result<(), DrawError> {
    let mut keys: Vec<usize> = group.cells.iter().map(|cell| cell.setting.seqlen_k).collect();
    keys.sort_unstable();
    keys.dedup();
    let numbers = || group.cells.iter().filter_map(|cell| (number.of)(cell));
    // Times differ by orders of magnitude, and above the lines there is room for the legend.
    let least = numbers().reduce(f64::min).unwrap_or(1.0);
    let most = numbers().reduce(f64::max).unwrap_or(10.0);
    let mut chart = ChartBuilder::on(area);
    let chart = chart
        .caption(group.title(), ("sans-serif", 14))
        .margin(10)
        .x_label_area_size(34)
        .y_label_area_size(56);
    let mut chart =
        chart.build_cartesian_2d(-0.3..keys.len() as f64 - 0.7, (0.7 * least..4.0 * most).log_scale())?;
    let label = |x: &f64| {
        let key = (x.fract() == 0.0 && *x >= 0.0).then(|| keys.get(*x as usize)).flatten();
        key.map_or(String::new(), |&keys| size_label(keys))
    };
    chart
        .configure_mesh()
        .disable_x_mesh()
        .x_labels(2 * keys.len())
        .x_label_formatter(&label)
        .x_desc("keys of a sequence")
        .y_desc(number.name)
        .y_label_formatter(&|y| format!("{y:.0}"))
        .light_line_style(WHITE)
        .draw()?;
    for (line, color) in group.lines().iter().zip(COLORS.into_iter().cycle()) {
        let place = |cell: &&Cell| keys.binary_search(&cell.setting.seqlen_k).ok();
        let mut points: Vec<(f64, f64)> =
            line.cells.iter().filter_map(|cell| Some((place(cell)? as f64, (number.of)(cell)?))).collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        let points = LineSeries::new(points, color.stroke_width(2)).point_size(3);
        chart
            .draw_series(points)?
            .label(format!("batch {}", line.batch))
            .legend(move |(x, y)| PathElement::new([(x + 2, y), (x + 16, y)], color.stroke_width(2)));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE)
        .border_style(FRAME)
        .draw()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_is_a_point() {
        let svg = draw(&Report::example()).unwrap();
        // Two panels of three points: one of the four cells failed.
        assert_eq!(svg.matches("<circle ").count(), 2 * 3, "{svg}");
        for text in ["\nus\n", "GB/s", "batch 4", "batch 16", "1k", "4k", "pages of 64 rows"] {
            assert!(svg.contains(text), "{text}");
        }
    }

    #[test]
    fn every_number_of_heads_has_a_panel() {
        let svg = draw(&Report::latent_example()).unwrap();
        // Two panels of three points, of TFLOP/s alone.
        assert_eq!(svg.matches("<circle ").count(), 2 * 3, "{svg}");
        assert!(svg.contains("width=\"620\" height=\"760\"") && !svg.contains("TB/s"), "{svg}");
        for text in ["TFLOP/s", "heads 128/1", "heads 16/1", "batch 1", "batch 128", "Latent attention"] {
            assert!(svg.contains(text), "{text}");
        }
    }
}
