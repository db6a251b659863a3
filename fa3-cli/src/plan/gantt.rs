//! Schedules as a picture: one row a CTA, one bar a tile, darker the more KV blocks it visits.

use fa3_sched::forward::Plan;
use fa3_sched::{Makespan, Span};
use fa3_types::Problem;
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;

use crate::draw::{self, Area, DrawError};

const SIZE: (u32, u32) = (1200, 660);
const HEADER: i32 = 56;
/// Bars a panel. A bar takes about 85 bytes, so that a picture stays below half a megabyte.
const MOST_BARS: usize = 2500;
/// Pixels between two rows, at least.
const ROW: u32 = 3;

const LIGHT: RGBColor = RGBColor(190, 215, 240);
const DARK: RGBColor = RGBColor(10, 50, 110);
const BOUND: RGBColor = RGBColor(210, 50, 30);

type Chart<'a> = ChartContext<'a, SVGBackend<'a>, Cartesian2d<RangedCoordf64, RangedCoordf64>>;

/// The schedule of one plan.
pub(super) struct Panel {
    name: &'static str,
    makespan: Makespan,
    /// KV blocks of each tile.
    blocks: Vec<u32>,
}

/// Where a tile is drawn.
#[derive(Debug, PartialEq)]
struct Bar {
    cta: u32,
    /// First and one past the last pixel.
    x: (i32, i32),
    blocks: u32,
}

impl Panel {
    pub(super) fn new(name: &'static str, plan: &Plan) -> Panel {
        let blocks = plan.works().map(|work| work.kv.blocks()).collect();
        Panel { name, makespan: plan.simulate(), blocks }
    }

    /// The bars, left to right. A tile that ends in the pixel in which the one before it on its CTA did is left out.
    fn bars(&self, pixel: impl Fn(u64) -> i32) -> Vec<Bar> {
        let mut free = vec![pixel(0); self.makespan.ctas().get() as usize];
        let bar = |(span, &blocks): (&Span, &u32)| {
            let start = &mut free[span.cta as usize];
            let x = (*start, pixel(span.end));
            *start = x.1;
            (x.1 > x.0).then_some(Bar { cta: span.cta, x, blocks })
        };
        self.makespan.spans().iter().zip(&self.blocks).filter_map(bar).collect()
    }

    fn caption(&self, bound: u64) -> String {
        let length = self.makespan.length();
        let (ratio, busy) = (length as f64 / bound.max(1) as f64, 100.0 * self.makespan.utilisation());
        format!("{}: {length} blocks, {ratio:.3} of the bound, CTAs busy {busy:.1} %", self.name)
    }
}

/// An SVG with both schedules side by side on one scale, and the `bound` on their length as a line.
pub(super) fn draw(problem: &Problem, panels: &[Panel; 2], bound: u64) -> Result<String, DrawError> {
    draw::svg(SIZE, |root| {
        let (header, body) = root.split_vertically(HEADER);
        let blocks = || panels.iter().flat_map(|panel| &panel.blocks).copied();
        let shades = Shades { least: blocks().min().unwrap_or(0), most: blocks().max().unwrap_or(0) };
        draw_header(&header, problem, &shades)?;
        let longest = panels.iter().map(|panel| panel.makespan.length()).max().unwrap_or(0);
        for (panel, area) in panels.iter().zip(body.split_evenly((1, 2))) {
            draw_panel(&area, panel, longest.max(1), bound, &shades)?;
        }
        Ok(())
    })
}

fn draw_header(area: &Area<'_>, problem: &Problem, shades: &Shades) -> Result<(), DrawError> {
    let text = |text: String, at| {
        area.draw(&Text::new(text, at, ("sans-serif", 15).into_font())).map_err(DrawError::from)
    };
    text(problem.to_string(), (14, 10))?;
    let Shades { least, most } = *shades;
    if least == most {
        return text(
            format!("each tile visits {most} KV blocks; the line is the bound on the makespan"),
            (14, 32),
        );
    }
    text("KV blocks a tile".to_owned(), (14, 32))?;
    text(least.to_string(), (140, 32))?;
    const STEPS: i32 = 32;
    for step in 0..STEPS {
        let color = Shades::mix(f64::from(step) / f64::from(STEPS - 1));
        let x = 175 + 5 * step;
        area.draw(&Rectangle::new([(x, 33), (x + 5, 45)], color.filled()))?;
    }
    text(format!("{most}; the line is the bound on the makespan"), (345, 32))
}

fn draw_panel(
    area: &Area<'_>,
    panel: &Panel,
    longest: u64,
    bound: u64,
    shades: &Shades,
) -> Result<(), DrawError> {
    let ctas = panel.makespan.ctas().get();
    let mut chart: Chart<'_> = ChartBuilder::on(area)
        .caption(panel.caption(bound), ("sans-serif", 17))
        .margin(10)
        .x_label_area_size(38)
        .y_label_area_size(48)
        .build_cartesian_2d(0.0..longest as f64, 0.0..f64::from(ctas))?;
    let bars = panel.bars(|time| chart.backend_coord(&(time as f64, 0.0)).0);
    let height = chart.plotting_area().dim_in_pixel().1;
    let every = bars.len().div_ceil(MOST_BARS).max(ctas.div_ceil(height / ROW) as usize).max(1) as u32;
    let rows = if every == 1 { "CTA".to_owned() } else { format!("CTA, one in {every} drawn") };
    chart
        .configure_mesh()
        .disable_mesh()
        .x_desc("time in KV blocks")
        .y_desc(rows)
        .x_label_formatter(&whole)
        .y_label_formatter(&whole)
        .draw()?;
    for Bar { cta, x, blocks } in bars.iter().filter(|bar| bar.cta % every == 0) {
        let [bottom, top] =
            [*cta, ctas.min(cta + every)].map(|row| chart.backend_coord(&(0.0, f64::from(row))).1);
        // A pixel between bars, where there is room for it.
        let gap = i32::from(x.1 - x.0 > 2);
        let corners = [(x.0, top + 1), (x.1 - gap, bottom)];
        area.use_screen_coord().draw(&Rectangle::new(corners, shades.of(*blocks).filled()))?;
    }
    let line = [0.0, f64::from(ctas)].map(|y| (bound as f64, y));
    chart.draw_series([PathElement::new(line, BOUND.stroke_width(1))])?;
    Ok(())
}

/// Labels whole numbers only.
fn whole(x: &f64) -> String {
    if x.fract() == 0.0 { x.to_string() } else { String::new() }
}

/// The colours of block counts.
struct Shades {
    least: u32,
    most: u32,
}

impl Shades {
    fn of(&self, blocks: u32) -> RGBColor {
        let range = self.most.saturating_sub(self.least).max(1);
        Shades::mix(f64::from(blocks.saturating_sub(self.least)) / f64::from(range))
    }

    fn mix(dark: f64) -> RGBColor {
        let part =
            |from: u8, to: u8| (f64::from(from) + dark * (f64::from(to) - f64::from(from))).round() as u8;
        RGBColor(part(LIGHT.0, DARK.0), part(LIGHT.1, DARK.1), part(LIGHT.2, DARK.2))
    }
}
