//! Pictures as SVG.

use std::io;

use plotters::coord::Shift;
use plotters::prelude::*;

/// Why there is no picture.
#[derive(Debug, thiserror::Error)]
#[error("cannot draw: {0}")]
pub(crate) struct DrawError(#[from] DrawingAreaErrorKind<io::Error>);

/// A part of an SVG.
pub(crate) type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// An SVG of `size` pixels: what `draw` draws on white.
///
/// # Errors
/// A picture that the backend refuses, such as a chart without room for its labels.
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
    Ok(svg)
}
