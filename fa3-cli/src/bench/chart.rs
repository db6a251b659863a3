//! Measurements as bars, as in the paper's Figure 5: one panel for each head dimension and mask.

use fa3_types::Mask;

use super::report::{Cell, Panel, Report};
use crate::bars::{self, OURS, Series};
use crate::draw::DrawError;
use crate::grid::Pass;
use crate::paper::{CUDNN, FA2, FA3, Published, STANDARD, TRITON};

/// An implementation of the paper's, and its number.
type Number = (&'static str, fn(&Published) -> Option<u32>);

/// The paper's series in its order.
const PAPER: [Number; 5] = [
    (STANDARD, |paper| paper.standard),
    (FA2, |paper| paper.flash_attention_2),
    (TRITON, |paper| paper.triton),
    (CUDNN, |paper| Some(paper.cudnn)),
    (FA3, |paper| Some(paper.flash_attention_3)),
];

pub(super) fn draw(report: &Report) -> Result<String, DrawError> {
    let panels = report.panels();
    let of = |panel: &Panel<'_>| panel.setting.head_dims();
    let first = panels.first().map(of);
    // One panel per mask in each row.
    let columns = panels.iter().filter(|panel| Some(of(panel)) == first).count().max(1);
    bars::draw(&panels.iter().map(bars_of).collect::<Vec<_>>(), columns)
}

fn bars_of(panel: &Panel<'_>) -> bars::Panel {
    let cells = &panel.cells;
    let dtype = cells.first().map_or(String::new(), |cell| cell.setting.dtype.to_string());
    let mask = match panel.setting.mask {
        Mask::None => "without causal mask".to_owned(),
        Mask::Causal => "with causal mask".to_owned(),
        mask @ (Mask::Window { .. } | Mask::Chunk { .. } | Mask::Intervals { .. }) => mask.to_string(),
    };
    let pass = match panel.setting.pass {
        Pass::Forward => "forward",
        Pass::Backward => "backward",
    };
    let cap = panel.setting.softcap.map_or_else(String::new, |cap| format!(", softcap {cap}"));
    let paper = PAPER.iter().map(|(name, number)| {
        let height = |cell: &&Cell| cell.paper.as_ref().and_then(number).map(f64::from);
        Series::of_paper(name, cells.iter().map(height).collect())
    });
    let heights = cells.iter().map(|cell| cell.tflops).collect();
    let ours = Series::new(format!("here, {dtype}"), OURS, heights);
    let without = cells.iter().enumerate().filter(|(_, cell)| cell.tflops.is_none());
    bars::Panel {
        caption: format!("Attention {pass}, {mask}{cap}, head_dim {}", panel.setting.head_dims()),
        axes: ["sequence length", "TFLOP/s"],
        groups: cells.iter().map(|cell| cell.setting.lengths()).collect(),
        series: paper.filter(Series::has_bars).chain([ours]).collect(),
        missing: without.map(|(group, cell)| (group, cell.outcome.cell(cell.flops))).collect(),
    }
}

#[cfg(test)]
mod tests {
    use plotters::style::RGBColor;

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
        // Each series has six bars in each of four panels, and a marker in each legend. Standard attention has five,
        // and one of our results is wrong, and shows as a word.
        let less = [("standard attention (paper)", 4), ("here, bf16", 1)];
        let panel = bars_of(&report.panels()[0]);
        assert_eq!(panel.series.len(), 6);
        for Series { name, color, .. } in panel.series {
            let rectangles =
                svg.lines().filter(|line| line.starts_with("<rect") && line.contains(&fill(color)));
            let less = less.iter().find(|(less, _)| *less == name).map_or(0, |(_, count)| *count);
            assert_eq!((rectangles.count(), count(&svg, &name)), (4 * 6 + 4 - less, 4), "{name}");
        }
        assert_eq!(count(&svg, "WRONG"), 1);
        for text in ["head_dim 64", "head_dim 128", "with causal mask", "16k", "512", "648", "600"] {
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
