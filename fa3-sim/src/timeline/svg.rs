//! A timeline as a picture.

use std::collections::HashMap;
use std::fmt::Write;
use std::ops::Range;

use super::{Activity, Engine, EngineTrack, Span, Timeline};
use crate::Line;
use crate::trace::Factors;

/// Sizes in pixels: the width of the picture, the ends of the time axis, and the heights of a row and of the strip of
/// products above it.
const WIDTH: u32 = 1240;
const LEFT: u32 = 176;
const RIGHT: u32 = 1160;
const HEADER: u32 = 44;
const ROW: u32 = 30;
const STRIP: u32 = 9;
const GAP: u32 = 8;
const LEGEND: u32 = 20;
/// Number of columns to which spans are rounded. A column shows the activity that took most of its time.
const COLUMNS: u32 = RIGHT - LEFT;
/// Number of heights that an engine's bar can have.
const LEVELS: u64 = 8;

/// Colours of products: one for each pair of factors, then from the start again (after Okabe and Ito).
pub(super) const PRODUCTS: [&str; 5] = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#882255"];

/// The look of products of every other block, so that one can tell iterations apart.
const ODD: &str = r#" fill-opacity="0.5""#;

/// A cell of a row: columns with the same look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cell {
    columns: (u32, u32),
    span: Span,
    /// How busy it is, as one of [`LEVELS`] levels.
    level: u64,
}

struct Drawing<'a> {
    timeline: &'a Timeline,
    /// The products in the order of the source, so that a part of a timeline has the colours of the whole.
    products: Vec<Product>,
    /// The block of each product by its CTA, warpgroup and start.
    blocks: HashMap<(u32, u32, u64), usize>,
    /// The other activities.
    activities: Vec<Activity>,
    svg: String,
}

/// Products with one colour.
#[derive(Debug)]
struct Product {
    /// The factors of the products, or the line that begins them.
    name: String,
    /// The first line that begins one of the products.
    line: Line,
    activity: Activity,
}

pub(super) fn draw(timeline: &Timeline) -> String {
    let mut drawing = Drawing::new(timeline);
    let mut y = HEADER;
    for track in &timeline.roles {
        drawing.label(y, track.cta, &track.name);
        let is_core = |of: &&EngineTrack| (of.cta, of.engine) == (track.cta, Engine::TensorCore);
        let spans = timeline.engines.iter().filter(is_core).flat_map(|of| &of.spans);
        let products: Vec<Span> = spans.filter(|span| span.warpgroup == track.warpgroup).copied().collect();
        // Roles of one warpgroup share its products, which are drawn with the role that began them.
        let begins = |span: &Span| matches!(span.activity, Activity::Product(..));
        if track.spans.iter().any(begins) {
            drawing.row(track.cta, &products, y, STRIP, false);
        }
        drawing.row(track.cta, &track.spans, y + STRIP + 1, ROW - STRIP - 1, false);
        y += ROW + GAP;
    }
    for track in &timeline.engines {
        drawing.label(y, track.cta, &track.engine.to_string());
        drawing.row(track.cta, &track.spans, y, ROW, true);
        let percent = 100.0 * timeline.utilisation(track.cta, track.engine);
        drawing.text(RIGHT + 8, y + 20, "start", &format!("{percent:.1} %"));
        y += ROW + GAP;
    }
    drawing.axis(y);
    let height = drawing.legend(y + 44);
    drawing.finish(height)
}

impl<'a> Drawing<'a> {
    fn new(timeline: &'a Timeline) -> Drawing<'a> {
        let (mut products, mut activities): (Vec<Product>, _) = (Vec::new(), Vec::new());
        let roles = timeline.roles.iter().flat_map(|track| &track.spans);
        for span in timeline.engines.iter().flat_map(|track| &track.spans).chain(roles) {
            if !matches!(span.activity, Activity::Product(..)) {
                if !activities.contains(&span.activity) {
                    activities.push(span.activity);
                }
                continue;
            }
            let name = name(timeline, span);
            match products.iter_mut().find(|product| product.name == name) {
                Some(known) => known.line = known.line.min(span.line),
                None => products.push(Product { name, line: span.line, activity: span.activity }),
            }
        }
        products.sort_by_key(|product| product.line);
        activities.sort_by_key(|activity| activity.legend().0);
        Drawing { timeline, products, blocks: blocks(timeline), activities, svg: String::new() }
    }

    fn cycles(&self) -> Range<u64> {
        self.timeline.cycles.clone()
    }

    /// Draws one row of cells. If `measures`, the height of a cell shows how busy it is.
    fn row(&mut self, cta: u32, spans: &[Span], y: u32, height: u32, measures: bool) {
        let _ = write!(
            self.svg,
            r##"<rect x="{LEFT}" y="{y}" width="{COLUMNS}" height="{height}" fill="#f6f6f6"/>"##
        );
        for Cell { columns: (first, end), span, level } in cells(spans, self.cycles()) {
            let (x, width) = (LEFT + first, end - first);
            let busy = (height * level as u32).div_ceil(LEVELS as u32).max(1);
            let high = if measures { busy } else { height };
            let (top, fill) = (y + height - high, self.fill(&span));
            let block = self.blocks.get(&(cta, span.warpgroup, span.start));
            let shade = if block.is_some_and(|block| block % 2 == 1) { ODD } else { "" };
            let _ = write!(
                self.svg,
                r#"<rect x="{x}" y="{top}" width="{width}" height="{high}" fill="{fill}"{shade}>"#
            );
            let of_block = block.map_or(String::new(), |block| format!(", block {block}"));
            let what = format!("{}{of_block}", self.timeline.describe(&span));
            let title = format!("{what}, {}, cycles {} to {}", span.line, span.start, span.end);
            let _ = write!(self.svg, "<title>{}</title></rect>", escaped(&title));
        }
        self.svg.push('\n');
    }

    fn fill(&self, span: &Span) -> &'static str {
        if !matches!(span.activity, Activity::Product(..)) {
            return span.activity.legend().1;
        }
        let name = name(self.timeline, span);
        let index = self.products.iter().position(|product| product.name == name).unwrap_or(0);
        PRODUCTS[index % PRODUCTS.len()]
    }

    fn label(&mut self, y: u32, cta: u32, name: &str) {
        let several = self.timeline.engines.iter().any(|track| track.cta > 0);
        let label = if several { format!("cta {cta}, {name}") } else { name.to_owned() };
        self.text(LEFT - 8, y + 20, "end", &label);
    }

    fn text(&mut self, x: u32, y: u32, anchor: &str, text: &str) {
        let _ = write!(self.svg, r#"<text x="{x}" y="{y}" text-anchor="{anchor}">{}</text>"#, escaped(text));
    }

    fn axis(&mut self, y: u32) {
        let Range { start, end } = self.cycles();
        let step = tick(end - start);
        let mut at = start.next_multiple_of(step);
        while at <= end {
            let (x, end) = (LEFT + column(at, &self.cycles()), y + 2);
            let _ = write!(self.svg, r##"<path d="M{x} {HEADER}V{end}" stroke="#ccc" stroke-width="0.5"/>"##);
            self.text(x, y + 16, "middle", &at.to_string());
            at += step;
        }
        self.text(LEFT - 32, y + 16, "end", "cycles");
    }

    /// Draws the legend of colours. Returns the position of its end.
    fn legend(&mut self, y: u32) -> u32 {
        let of_product = |(index, product): (usize, &Product)| {
            (PRODUCTS[index % PRODUCTS.len()], format!("{}, {}", product.name, product.activity))
        };
        let of_other = |&activity: &Activity| (activity.legend().1, activity.to_string());
        let products = self.products.iter().enumerate().map(of_product);
        let odd = self.blocks.values().any(|block| block % 2 == 1);
        let odd = odd.then(|| ("none", "paler products: blocks 1, 3, 5, ...".to_owned()));
        let others = self.activities.iter().map(of_other);
        let entries: Vec<(&str, String)> = products.chain(odd).chain(others).collect();
        let (mut x, mut row) = (LEFT, y);
        for (fill, text) in &entries {
            let width = 30 + 7 * text.chars().count() as u32;
            if x + width > WIDTH {
                (x, row) = (LEFT, row + LEGEND);
            }
            let top = row - 10;
            let _ = write!(self.svg, r#"<rect x="{x}" y="{top}" width="12" height="12" fill="{fill}"/>"#);
            self.text(x + 17, row, "start", text);
            x += width;
        }
        row + 16
    }

    /// The whole picture in its frame.
    fn finish(self, height: u32) -> String {
        let Timeline { kernel, cycles, .. } = self.timeline;
        let shown = match cycles.start {
            0 => format!("{} cycles", cycles.end),
            start => format!("cycles {start} to {}", cycles.end),
        };
        let busy = 100.0 * self.timeline.utilisation(0, Engine::TensorCore);
        let title = format!("{kernel}: {shown}, tensor core busy {busy:.1} % (model, not measurement)");
        let title = escaped(&title);
        let body = self.svg;
        format!(
            r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img" aria-labelledby="title about" font-family="system-ui, sans-serif" font-size="12" fill="#222">
<title id="title">{title}</title>
<desc id="about">The work of each role of the kernel and of each engine of the SM, over time in cycles of a model.</desc>
<style>@media (prefers-color-scheme: dark) {{ svg {{ filter: invert(.9) hue-rotate(180deg); }} }}</style>
<defs>
<pattern id="wait" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><rect width="5" height="5" fill="#eee"/><path d="M0 0V5" stroke="#bbb" stroke-width="2"/></pattern>
<pattern id="stall" width="4" height="4" patternUnits="userSpaceOnUse"><rect width="4" height="4" fill="#eee"/><path d="M0 0H4" stroke="#bbb"/></pattern>
</defs>
<rect width="{WIDTH}" height="{height}" fill="#fff"/>
<text x="16" y="24" font-size="15" font-weight="600">{title}</text>
{body}
</svg>
"##
        )
    }
}

/// Name of a product: its factors, or the line that begins it.
fn name(timeline: &Timeline, span: &Span) -> String {
    timeline.factors(span).map_or_else(|| span.line.to_string(), Factors::to_string)
}

/// The block of each product, by its CTA, warpgroup and start: how often the warpgroup had come to products of this
/// name from others.
fn blocks(timeline: &Timeline) -> HashMap<(u32, u32, u64), usize> {
    let (mut blocks, mut counts) = (HashMap::new(), HashMap::new());
    let mut last: HashMap<(u32, u32), String> = HashMap::new();
    let cores = timeline.engines.iter().filter(|track| track.engine == Engine::TensorCore);
    for (track, span) in cores.flat_map(|track| track.spans.iter().map(move |span| (track, span))) {
        let (warpgroup, name) = ((track.cta, span.warpgroup), name(timeline, span));
        let count = counts.entry((warpgroup, name.clone())).or_insert(0);
        if last.insert(warpgroup, name.clone()) != Some(name) {
            *count += 1;
        }
        blocks.insert((warpgroup.0, warpgroup.1, span.start), *count - 1);
    }
    blocks
}

/// The column of a cycle.
fn column(cycle: u64, cycles: &Range<u64>) -> u32 {
    let length = (cycles.end - cycles.start).max(1);
    (u128::from(cycle - cycles.start) * u128::from(COLUMNS) / u128::from(length)) as u32
}

/// Merges spans into cells: each column shows the activity that took most of its time.
fn cells(spans: &[Span], cycles: Range<u64>) -> Vec<Cell> {
    // For each column, its activities and their parts of the time. A cycle has COLUMNS parts, so that all parts are
    // integers.
    let length = u128::from((cycles.end - cycles.start).max(1));
    let mut cells: Vec<Cell> = Vec::new();
    let mut next = 0;
    for index in 0..COLUMNS {
        let parts = |cycle: u64| u128::from(cycle - cycles.start) * u128::from(COLUMNS);
        let (first, end) = (u128::from(index) * length, u128::from(index + 1) * length);
        while next < spans.len() && parts(spans[next].end) <= first {
            next += 1;
        }
        let mut done: Vec<(Span, u128)> = Vec::new();
        for span in spans[next..].iter().take_while(|span| parts(span.start) < end) {
            let amount = parts(span.end).min(end) - parts(span.start).max(first);
            match done.iter_mut().find(|(other, _)| alike(other, span)) {
                Some((_, sum)) => *sum += amount,
                None => done.push((*span, amount)),
            }
        }
        let busy: u128 = done.iter().map(|(_, amount)| amount).sum();
        let longest = done.into_iter().reduce(|most, other| if other.1 > most.1 { other } else { most });
        let Some((span, _)) = longest else { continue };
        let level = (busy * u128::from(LEVELS)).div_ceil(length) as u64;
        match cells.last_mut() {
            Some(last) if last.columns.1 == index && last.level == level && alike(&last.span, &span) => {
                last.columns.1 += 1;
                last.span.end = last.span.end.max(span.end);
            }
            _ => cells.push(Cell { columns: (index, index + 1), span, level }),
        }
    }
    cells
}

/// Whether two spans look alike.
fn alike(one: &Span, other: &Span) -> bool {
    (one.activity, one.line) == (other.activity, other.line)
}

/// A round number of cycles that is about a tenth of `length`.
fn tick(length: u64) -> u64 {
    let tens = 10u64.pow((length / 10).max(1).ilog10());
    [1, 2, 5].map(|factor| factor * tens).into_iter().find(|step| step * 10 >= length).unwrap_or(10 * tens)
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use fa3_ir::WgmmaType;

    use super::*;

    fn span(activity: Activity, start: u64, end: u64) -> Span {
        Span { activity, line: Line { file: "kernel.rs", line: 1, column: 1 }, warpgroup: 0, start, end }
    }

    /// Ten thousand pairs of one busy cycle and one idle cycle become at most one cell per column, of half the full
    /// height.
    #[test]
    fn what_is_shorter_than_a_pixel_is_summed_up() {
        let spans: Vec<Span> = (0..10_000).map(|i| span(Activity::Special, 2 * i, 2 * i + 1)).collect();
        let cells = cells(&spans, 0..20_000);
        assert!(cells.len() <= COLUMNS as usize);
        assert!(cells.iter().all(|cell| (LEVELS / 2..=LEVELS / 2 + 1).contains(&cell.level)));
    }

    #[test]
    fn what_is_longer_is_where_it_is() {
        let columns = u64::from(COLUMNS);
        let spans =
            [span(Activity::Special, 0, 10 * columns), span(Activity::Control, 20 * columns, 40 * columns)];
        let cells = cells(&spans, 0..40 * columns);
        let places: Vec<(u32, u32)> = cells.iter().map(|cell| cell.columns).collect();
        assert_eq!(places, [(0, COLUMNS / 4), (COLUMNS / 2, COLUMNS)]);
        assert!(cells.iter().all(|cell| cell.level == LEVELS));
    }

    /// Two products in turns: each comes to its next block after the other.
    #[test]
    fn blocks_are_counted_by_what_comes_between() {
        let product = |line, start| {
            let of = span(Activity::Product(WgmmaType::F16, 128), start, start + 1);
            Span { line: Line { line, ..of.line }, ..of }
        };
        let spans = [(1, 0), (1, 5), (2, 7), (1, 10), (2, 12)].map(|(line, start)| product(line, start));
        let track = EngineTrack { cta: 0, engine: Engine::TensorCore, spans: spans.to_vec(), busy: 5 };
        let timeline = Timeline {
            kernel: "kernel".to_owned(),
            cycles: 0..13,
            roles: Vec::new(),
            engines: vec![track],
            products: BTreeMap::new(),
        };
        let blocks = blocks(&timeline);
        let of = [0, 5, 7, 10, 12].map(|start| blocks[&(0, 0, start)]);
        assert_eq!(of, [0, 0, 0, 1, 1]);
        let svg = draw(&timeline);
        // Spans of block 0 alone have no paler ones.
        assert!(svg.contains(ODD) && !draw(&timeline.between(0..9)).contains(ODD));
        for part in [", block 1, ", "paler products: blocks 1, 3", "prefers-color-scheme: dark"] {
            assert!(svg.contains(part), "{part} is not in {svg}");
        }
    }

    #[test]
    fn ticks_are_round() {
        assert_eq!([10, 95, 1000, 71_234, 123_456].map(tick), [1, 10, 100, 10_000, 20_000]);
    }
}
