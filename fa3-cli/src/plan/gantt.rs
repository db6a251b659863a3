//! Schedules as a Gantt chart: one row per CTA and one bar per tile, which is darker the more blocks the tile visits.

use std::fmt::Display;
use std::num::NonZeroU32;
use std::ops::Range;

use fa3_sched::forward::DensePlan;
use fa3_sched::{Makespan, Schedule, SeqLens, Span, Splits, TILE_COST, Tiling, certified_bound};
use plotters::coord::ranged1d::{DefaultFormatting, KeyPointHint, Ranged};
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;

use crate::draw::{self, Area, DrawError};

const SIZE: (u32, u32) = (1200, 660);
const HEADER: i32 = 56;
/// The most bars per panel. A bar takes about 85 bytes, so the SVG stays below half a megabyte.
const MOST_BARS: usize = 2500;
/// The least distance between two rows in pixels.
const ROW: u32 = 3;

const LIGHT: RGBColor = RGBColor(190, 215, 240);
const DARK: RGBColor = RGBColor(10, 50, 110);
const BOUND: RGBColor = RGBColor(210, 50, 30);

type Chart<'a> = ChartContext<'a, SVGBackend<'a>, Cartesian2d<Axis, Axis>>;

/// The schedule of one kernel.
pub(super) struct Panel {
    name: &'static str,
    makespan: Makespan,
    /// The number of blocks of each tile.
    blocks: Vec<u32>,
    /// A lower bound on the length of any schedule.
    bound: u64,
}

/// The position of a tile in the chart.
#[derive(Debug, PartialEq)]
struct Bar {
    cta: u32,
    /// The first pixel, and the pixel after the last.
    x: (i32, i32),
    blocks: u32,
}

impl Panel {
    pub(super) fn new(name: &'static str, tiles: &DensePlan) -> Panel {
        let blocks = tiles.works().map(|work| work.kv.blocks()).collect();
        let costs: Vec<u64> = tiles.works().map(|work| work.cost()).collect();
        let bound = certified_bound(&costs, tiles.schedule().sms());
        Panel { name, makespan: tiles.simulate(), blocks, bound }
    }

    /// The schedule of a backward kernel in the forward pass's cost model, which has no waits of tiles for each other.
    pub(super) fn of_part(
        name: &'static str,
        schedule: &Schedule,
        tiling: Tiling<u32>,
        lens: SeqLens<u32>,
    ) -> Panel {
        let blocks: Vec<u32> =
            schedule.tiles().map(|tile| tiling.kv_range(tile.m_block, lens).blocks()).collect();
        let costs: Vec<u64> = blocks.iter().map(|&blocks| u64::from(blocks) + TILE_COST).collect();
        let bound = certified_bound(&costs, schedule.sms());
        Panel { name, makespan: schedule.simulate(&costs), blocks, bound }
    }

    /// The splits of split-KV, and whole work tiles, each of which the next free CTA takes. A work tile counts as many
    /// blocks as the longest one of its sequence.
    pub(super) fn split_kv(splits: &Splits, ctas: NonZeroU32) -> [Panel; 2] {
        let cost = |blocks: u32| u64::from(blocks) + TILE_COST;
        let blocks: Vec<u32> = splits.splits.iter().map(|of| of.split.end - of.split.first).collect();
        let assigned = splits.splits.iter().map(|of| of.cta).zip(blocks.iter().map(|&blocks| cost(blocks)));
        let makespan = Makespan::assigned(assigned, ctas);
        let whole = splits.units.iter().flat_map(|units| vec![units.blocks; units.count as usize]);
        let whole: Vec<u32> = whole.collect();
        let costs: Vec<u64> = whole.iter().map(|&blocks| cost(blocks)).collect();
        // Splitting is free in this bound.
        let share = costs.iter().sum::<u64>().div_ceil(ctas.get().into());
        let of_whole = Makespan::greedy(&costs, ctas);
        [
            Panel { name: "split-KV", makespan, blocks, bound: share },
            Panel { name: "whole tiles", makespan: of_whole, blocks: whole, bound: share },
        ]
    }

    /// The bars from left to right. A tile is left out if it ends in the same pixel as the previous tile of its CTA.
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

    /// The number of CTAs that have a tile. CTAs are used in order, so these are the first ones.
    fn used(&self) -> u32 {
        self.makespan.spans().iter().map(|span| span.cta + 1).max().unwrap_or(0)
    }

    fn caption(&self) -> String {
        if self.blocks.is_empty() {
            return format!("{}: no tiles", self.name);
        }
        let length = self.makespan.length();
        let (ratio, busy) = (length as f64 / self.bound.max(1) as f64, 100.0 * self.makespan.utilisation());
        format!("{}: {}, {ratio:.3} of the bound, CTAs busy {busy:.1} %", self.name, counted(length))
    }
}

/// An SVG of schedules side by side on one scale, with the bounds on their lengths as lines. Tiles visit blocks named
/// `unit`.
pub(super) fn draw(problem: &dyn Display, unit: &str, panels: &[Panel]) -> Result<String, DrawError> {
    draw::svg(SIZE, |root| {
        let (header, body) = root.split_vertically(HEADER);
        let blocks = || panels.iter().flat_map(|panel| &panel.blocks).copied();
        let shades = Shades { least: blocks().min().unwrap_or(0), most: blocks().max().unwrap_or(0) };
        draw_header(&header, problem, unit, &shades)?;
        let longest = panels.iter().map(|panel| panel.makespan.length()).max().unwrap_or(0);
        for (panel, area) in panels.iter().zip(body.split_evenly((1, panels.len()))) {
            draw_panel(&area, panel, unit, longest.max(1), &shades)?;
        }
        Ok(())
    })
}

fn draw_header(area: &Area<'_>, problem: &dyn Display, unit: &str, shades: &Shades) -> Result<(), DrawError> {
    let text = |text: String, at| {
        area.draw(&Text::new(text, at, ("sans-serif", 15).into_font())).map_err(DrawError::from)
    };
    text(problem.to_string(), (14, 10))?;
    let Shades { least, most } = *shades;
    if least == most {
        let visits = counted(most.into());
        return text(format!("each tile visits {visits}; the line is the bound on the makespan"), (14, 32));
    }
    text(format!("{unit} a tile"), (14, 32))?;
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
    unit: &str,
    longest: u64,
    shades: &Shades,
) -> Result<(), DrawError> {
    let (all, ctas) = (panel.makespan.ctas(), panel.used().max(1));
    let mut chart: Chart<'_> = ChartBuilder::on(area)
        .caption(panel.caption(), ("sans-serif", 17))
        .margin(10)
        .x_label_area_size(38)
        .y_label_area_size(48)
        .build_cartesian_2d(Axis { end: longest }, Axis { end: ctas.into() })?;
    let bars = panel.bars(|time| chart.backend_coord(&(time as f64, 0.0)).0);
    let height = chart.plotting_area().dim_in_pixel().1;
    let every = bars.len().div_ceil(MOST_BARS).max(ctas.div_ceil(height / ROW) as usize).max(1) as u32;
    let rows = match every {
        1 if ctas < all.get() => format!("CTA, {ctas} of {all} used"),
        1 => "CTA".to_owned(),
        _ => format!("CTA, one in {every} drawn"),
    };
    chart
        .configure_mesh()
        .disable_mesh()
        .x_desc(format!("time in {unit}"))
        .y_desc(rows)
        .x_label_formatter(&whole)
        .y_label_formatter(&whole)
        .draw()?;
    for Bar { cta, x, blocks } in bars.iter().filter(|bar| bar.cta % every == 0) {
        let [bottom, top] =
            [*cta, ctas.min(cta + every)].map(|row| chart.backend_coord(&(0.0, f64::from(row))).1);
        // One pixel between bars, if there is room.
        let gap = i32::from(x.1 - x.0 > 2);
        let corners = [(x.0, top + 1), (x.1 - gap, bottom)];
        area.use_screen_coord().draw(&Rectangle::new(corners, shades.of(*blocks).filled()))?;
    }
    if panel.bound > 0 {
        let line = [0.0, f64::from(ctas)].map(|y| (panel.bound as f64, y));
        chart.draw_series([PathElement::new(line, BOUND.stroke_width(1))])?;
    }
    Ok(())
}

/// The integers from 0 to `end`.
#[derive(Clone, Copy, Debug)]
struct Axis {
    end: u64,
}

impl Axis {
    /// Labels at 0, at up to ten round numbers, and at the end.
    fn labels(self) -> Vec<f64> {
        let Axis { end } = self;
        let tens = 10u64.pow((end / 10).max(1).ilog10());
        let step = [1, 2, 5, 10].into_iter().map(|factor| factor * tens).find(|step| end / step < 10);
        let step = step.unwrap_or(end);
        // Labels too near to the end would overlap with it.
        let round = (0..end).step_by(step as usize).filter(|at| *at == 0 || end - at > step / 2);
        round.chain([end]).map(|at| at as f64).collect()
    }
}

impl Ranged for Axis {
    type FormatOption = DefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, limit: (i32, i32)) -> i32 {
        RangedCoordf64::from(self.range()).map(value, limit)
    }

    fn key_points<Hint: KeyPointHint>(&self, hint: Hint) -> Vec<f64> {
        if hint.weight().allow_light_points() { Vec::new() } else { self.labels() }
    }

    fn range(&self) -> Range<f64> {
        0.0..self.end as f64
    }
}

fn whole(x: &f64) -> String {
    format!("{x:.0}")
}

/// The text for a number of blocks.
fn counted(blocks: u64) -> String {
    format!("{blocks} block{}", if blocks == 1 { "" } else { "s" })
}

/// Maps block counts to colours.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_have_round_labels_and_their_end() {
        let labels = |end| Axis { end }.labels();
        assert_eq!(labels(1), [0.0, 1.0]);
        assert_eq!(labels(7), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]);
        assert_eq!(labels(142), [0.0, 20.0, 40.0, 60.0, 80.0, 100.0, 120.0, 142.0]);
        assert!(labels(u64::MAX).len() <= 11);
    }
}
