//! Charts as SVG.

use std::io;

use plotters::coord::Shift;
use plotters::prelude::*;

/// Swaps light and dark for a reader's dark mode, and keeps hues.
const STYLE: &str =
    "<style>@media (prefers-color-scheme: dark) { svg { filter: invert(.9) hue-rotate(180deg); } }</style>";

/// Why a chart cannot be drawn.
#[derive(Debug, thiserror::Error)]
#[error("cannot draw: {0}")]
pub(crate) struct DrawError(#[from] DrawingAreaErrorKind<io::Error>);

/// A part of an SVG.
pub(crate) type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// An SVG of `size` pixels, drawn by `draw` on a white background, which is dark in dark mode.
pub(crate) fn svg(
    size: (u32, u32),
    draw: impl FnOnce(&Area<'_>) -> Result<(), DrawError>,
) -> Result<String, DrawError> {
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, size).into_drawing_area();
        root.fill(&WHITE)?;
        draw(&root)?;
        root.present()?;
    }
    let head = svg.find('>').map_or(0, |end| end + 1);
    svg.insert_str(head, STYLE);
    Ok(svg)
}
