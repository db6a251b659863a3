//! Measurements as bars, as in the paper's Figure 5: one panel for each head dimension and mask.

use fa3_types::Mask;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::report::{Cell, Panel, Report};
use crate::draw::{self, Area, DrawError};

/// Size of a panel in pixels.
const PANEL: (u32, u32) = (620, 330);
/// The part of a sequence length's slot on the axis that its bars fill.
const GROUP: f64 = 0.86;

const FRAME: RGBColor = RGBColor(120, 120, 120);
const OURS: RGBColor = RGBColor(214, 39, 40);

/// One bar of each group: name, color and height.
type Series = (&'static str, RGBColor, fn(&Cell) -> Option<f64>);

/// The series in the paper's order. Ours is the last.
const SERIES: [Series; 4] = [
    ("FlashAttention-2 (paper)", RGBColor(158, 202, 225), |cell| Some(cell.paper?.flash_attention_2.into())),
    ("cuDNN (paper)", RGBColor(161, 217, 155), |cell| Some(cell.paper?.cudnn.into())),
    ("FlashAttention-3 (paper)", RGBColor(117, 107, 177), |cell| Some(cell.paper?.flash_attention_3.into())),
    ("here", OURS, |cell| cell.tflops),
];

pub(super) fn draw(report: &Report) -> Result<String, DrawError> {
    let panels = report.panels();
    let of = |panel: &Panel<'_>| panel.setting.head_dims();
    let first = panels.first().map(of);
    // One panel per mask in each row.
    let columns = panels.iter().filter(|panel| Some(of(panel)) == first).count().max(1);
    let rows = panels.len().div_ceil(columns).max(1);
    draw::svg((PANEL.0 * columns as u32, PANEL.1 * rows as u32), |root| {
        let areas = root.split_evenly((rows, columns));
        panels.iter().zip(&areas).try_for_each(|(panel, area)| draw_panel(panel, area))
    })
}

fn draw_panel(panel: &Panel<'_>, area: &Area<'_>) -> Result<(), DrawError> {
    let cells = &panel.cells;
    let has_paper = cells.iter().any(|cell| cell.paper.is_some());
    let series = if has_paper { &SERIES[..] } else { &SERIES[SERIES.len() - 1..] };
    let all = cells.iter().flat_map(|cell| series.iter().filter_map(|(_, _, height)| height(cell)));
    // Leaves room for the legend above the bars.
    let most = 1.6 * all.fold(100.0, f64::max);
    let dtype = cells.first().map_or(String::new(), |cell| cell.setting.dtype.to_string());
    let mask = match panel.setting.mask {
        Mask::None => "without causal mask".to_owned(),
        Mask::Causal => "with causal mask".to_owned(),
        mask @ (Mask::Window { .. } | Mask::Chunk { .. } | Mask::Intervals { .. }) => mask.to_string(),
    };
    let cap = panel.setting.softcap.map_or_else(String::new, |cap| format!(", softcap {cap}"));
    let mut chart = ChartBuilder::on(area)
        .caption(
            format!("Attention forward, {mask}{cap}, head_dim {}", panel.setting.head_dims()),
            ("sans-serif", 16),
        )
        .margin(10)
        .x_label_area_size(34)
        .y_label_area_size(52)
        .build_cartesian_2d(-0.5..cells.len() as f64 - 0.5, 0.0..most)?;
    let label = |x: &f64| {
        let cell = (x.fract() == 0.0 && *x >= 0.0).then(|| cells.get(*x as usize)).flatten();
        cell.map_or(String::new(), |cell| cell.setting.lengths())
    };
    chart
        .configure_mesh()
        .disable_x_mesh()
        .x_labels(2 * cells.len())
        .x_label_formatter(&label)
        .x_desc("sequence length")
        .y_desc("TFLOP/s")
        .y_label_formatter(&|y| format!("{y:.0}"))
        .light_line_style(WHITE)
        .draw()?;
    let width = GROUP / series.len() as f64;
    for (index, &(name, color, height)) in series.iter().enumerate() {
        let left = move |group: usize| group as f64 - GROUP / 2.0 + index as f64 * width;
        let bars = cells.iter().enumerate().filter_map(|(group, cell)| Some((left(group), height(cell)?)));
        let bar = |(x, y)| Rectangle::new([(x, 0.0), (x + 0.94 * width, y)], color.filled());
        let name = if color == OURS { format!("{name}, {dtype}") } else { name.to_owned() };
        chart
            .draw_series(bars.clone().map(bar))?
            .label(name)
            .legend(move |(x, y)| Rectangle::new([(x + 4, y - 4), (x + 14, y + 4)], color.filled()));
        let style = ("sans-serif", 9).into_font().color(&BLACK).pos(Pos::new(HPos::Center, VPos::Bottom));
        let number = |(x, y)| Text::new(format!("{y:.0}"), (x + 0.47 * width, y), style.clone());
        chart.draw_series(bars.map(number))?;
    }
    // The reason for a missing bar of ours, written vertically in its place.
    let style = ("sans-serif", 11).into_font().transform(FontTransform::Rotate270).color(&OURS);
    let style = style.pos(Pos::new(HPos::Left, VPos::Center));
    let without = cells.iter().enumerate().filter(|(_, cell)| cell.tflops.is_none());
    chart.draw_series(without.map(|(group, cell)| {
        let middle = group as f64 + (GROUP - width) / 2.0;
        Text::new(format!(" {}", cell.outcome.cell(cell.flops)), (middle, 0.0), style.clone())
    }))?;
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

    fn count(svg: &str, what: &str) -> usize {
        svg.matches(what).count()
    }

    fn fill(color: RGBColor) -> String {
        format!("fill=\"#{:02X}{:02X}{:02X}\"", color.0, color.1, color.2)
    }

    #[test]
    fn every_number_is_a_bar() {
        let report = Report::example(16384);
        let svg = draw(&report).unwrap();
        // Each series has six bars in each of four panels, and a marker in each legend. One of our results is wrong,
        // and shows as a word.
        for (name, color, _) in SERIES {
            let rectangles =
                svg.lines().filter(|line| line.starts_with("<rect") && line.contains(&fill(color)));
            assert_eq!(rectangles.count(), 4 * 6 + 4 - usize::from(name == "here"), "{name}");
            assert_eq!(count(&svg, name), 4, "{name}");
        }
        assert_eq!(count(&svg, "WRONG"), 1);
        for text in
            ["head_dim 64", "head_dim 128", "with causal mask", "16k", "512", "648", "600", "here, bf16"]
        {
            assert!(svg.contains(text), "{text}");
        }
        assert!(
            svg.contains("width=\"1240\" height=\"660\""),
            "two masks beside each other, two head dimensions"
        );
    }

    #[test]
    fn ours_alone_where_the_paper_has_nothing() {
        let mut report = Report::example(512);
        report.cells.truncate(1);
        report.cells[0].paper = None;
        let svg = draw(&report).unwrap();
        assert_eq!((count(&svg, "paper"), count(&svg, "here, bf16")), (0, 1));
    }
}
