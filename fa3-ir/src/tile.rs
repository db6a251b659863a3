//! Tiles of matrices in shared memory, and views of them as operands of products.
//!
//! A tile is stored as its loads bring it: in panels of columns. Each panel is as wide as the swizzle's row and as long
//! as the tile, and panels follow each other. Descriptors, steps along K, boxes and byte counts follow from that.

pub(crate) mod copy;
pub(crate) mod frag;
pub(crate) mod gemm;
mod mbarriers;
pub(crate) mod pipeline;
pub(crate) mod quad;
pub(crate) mod rows;
pub(crate) mod staging_buffer;
pub(crate) mod store;
pub(crate) mod threads;
pub(crate) mod warpgroup_barriers;

use std::fmt;
use std::marker::PhantomData;

use crate::lang::{Arg, B32, B64, Builder, V};
use crate::{Elem, Imm, Layout, Major, Operand, Region, SharedAddr, SharedBase, Swizzle};

/// A matrix of `rows` x `cols` elements in shared memory, each row along K or along N, in panels of columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TileShape {
    /// The element type.
    pub elem: Elem,
    /// Rows.
    pub rows: u32,
    /// Columns.
    pub cols: u32,
    /// The swizzle. Its row is the width of a panel.
    pub swizzle: Swizzle,
}

impl TileShape {
    /// A tile with the widest swizzle whose row length divides the length of the tile's rows.
    pub fn new(elem: Elem, rows: u32, cols: u32) -> TileShape {
        let row = cols.saturating_mul(elem.bytes());
        let widest = [Swizzle::B128, Swizzle::B64, Swizzle::B32];
        let divides = |swizzle: &Swizzle| row.is_multiple_of(swizzle.row_bytes());
        let swizzle = widest.into_iter().find(divides).unwrap_or(Swizzle::None);
        TileShape { elem, rows, cols, swizzle }
    }

    /// This tile with another swizzle.
    #[must_use]
    pub fn swizzled(self, swizzle: Swizzle) -> TileShape {
        TileShape { swizzle, ..self }
    }

    /// Columns per panel.
    pub fn panel_cols(&self) -> u32 {
        self.swizzle.row_bytes() / self.elem.bytes()
    }

    /// Number of panels.
    pub fn panels(&self) -> u32 {
        self.cols / self.panel_cols()
    }

    /// Bytes per panel.
    pub fn panel_bytes(&self) -> u32 {
        self.rows.saturating_mul(self.swizzle.row_bytes())
    }

    /// Bytes of the tile.
    pub fn bytes(&self) -> u32 {
        self.panels().saturating_mul(self.panel_bytes())
    }

    /// Alignment of the tile's address, for tensor copies and for descriptors.
    pub fn align(&self) -> u32 {
        self.swizzle.pattern_bytes().max(128)
    }

    /// Whether the tile consists of whole panels, and each panel of whole swizzle patterns (8 rows).
    fn is_whole(&self) -> bool {
        let whole = |given: u32, of: u32| given > 0 && given.is_multiple_of(of);
        whole(self.rows, 8) && whole(self.cols, self.panel_cols()) && self.bytes() < u32::MAX
    }
}

impl fmt::Display for TileShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} x {} {} with {}", self.rows, self.cols, self.elem, self.swizzle)
    }
}

/// A tile of kernel `'k` at its address. A tile of a pipeline's stage lives as long as the stage is held, `'s`.
#[derive(Clone, Copy)]
pub struct Tile<'s, 'k> {
    builder: &'k Builder,
    pub(crate) shape: TileShape,
    pub(crate) address: SharedAddr,
    /// Bytes from one panel to the next. A part of a tile may fill fewer.
    pub(crate) panel_stride: u32,
    stage: PhantomData<&'s &'k ()>,
}

impl fmt::Debug for Tile<'_, '_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at {:?}", self.shape, self.address)
    }
}

impl<'s, 'k> Tile<'s, 'k> {
    pub(crate) fn new(builder: &'k Builder, shape: TileShape, address: SharedAddr) -> Tile<'s, 'k> {
        Tile { builder, shape, address, panel_stride: shape.panel_bytes(), stage: PhantomData }
    }

    pub(crate) fn builder(&self) -> &'k Builder {
        self.builder
    }

    /// Its shape.
    pub fn shape(&self) -> TileShape {
        self.shape
    }

    /// Its transpose, as an operand.
    pub fn t(self) -> Matrix<'s, 'k> {
        Matrix { tile: self, transposed: true, skips: 0 }
    }

    /// The same bytes as elements of another type, which has as many bytes.
    #[track_caller]
    pub fn with_elem(self, elem: Elem) -> Tile<'s, 'k> {
        if elem.bytes() != self.shape.elem.bytes() {
            self.builder.misfit("elements of a tile", elem, self.shape);
            return self;
        }
        Tile { shape: TileShape { elem, ..self.shape }, ..self }
    }

    /// Block `index` of `count` rows, a multiple of 8, for one of several warpgroups. A computed index is not checked.
    #[track_caller]
    pub fn row_block(self, index: impl Arg<Ty = B32>, count: u32) -> Tile<'s, 'k> {
        let b = self.builder;
        let blocks = self.shape.rows.checked_div(count).unwrap_or(0);
        let last = index.operand().constant().unwrap_or(0);
        if !count.is_multiple_of(8) || last >= blocks {
            b.misfit("a block of rows and its tile", format!("block {last} of {count} rows"), self.shape);
            return self;
        }
        match index.operand() {
            Operand::Imm(Imm::B32(index)) => self.rows(index * count, count),
            Operand::Imm(_) | Operand::Value(_) => {
                let _one = b.as_one();
                let start = b.shared_address(self.address);
                let address = b.mad(index, count * self.shape.swizzle.row_bytes(), start).at(0);
                Tile { shape: TileShape { rows: count, ..self.shape }, address, ..self }
            }
        }
    }

    /// `count` rows from row `first` on, both multiples of 8.
    #[track_caller]
    pub fn rows(self, first: u32, count: u32) -> Tile<'s, 'k> {
        let whole = [first, count].iter().all(|rows| rows.is_multiple_of(8));
        if !whole || count == 0 || first.saturating_add(count) > self.shape.rows {
            let rows = format!("{count} rows from {first} on");
            self.builder.misfit("rows and their tile", rows, self.shape);
            return self;
        }
        let offset = first * self.shape.swizzle.row_bytes();
        let shape = TileShape { rows: count, ..self.shape };
        Tile { shape, address: self.address.plus(offset as i32), ..self }
    }

    /// `count` columns from column `first` on, both whole panels.
    #[track_caller]
    pub fn col_block(self, first: u32, count: u32) -> Tile<'s, 'k> {
        let whole = [first, count].iter().all(|cols| cols.is_multiple_of(self.shape.panel_cols()));
        if !whole || count == 0 || first.saturating_add(count) > self.shape.cols {
            let columns = format!("{count} columns from {first} on");
            self.builder.misfit("a block of columns and its tile", columns, self.shape);
            return self;
        }
        let offset = first / self.shape.panel_cols() * self.panel_stride;
        let shape = TileShape { cols: count, ..self.shape };
        Tile { shape, address: self.address.plus(offset as i32), ..self }
    }

    /// `count` columns from column `first` on, as an operand A whose rows run along K. Both are whole steps along K,
    /// which may be parts of a panel.
    #[track_caller]
    pub fn k_block(self, first: u32, count: u32) -> Matrix<'s, 'k> {
        let step = 32 / self.shape.elem.bytes();
        let whole = [first, count].iter().all(|cols| cols.is_multiple_of(step));
        if !whole || count == 0 || first.saturating_add(count) > self.shape.cols {
            let columns = format!("{count} columns from {first} on");
            self.builder.misfit("steps along K and their tile", columns, self.shape);
            return self.into();
        }
        let shape = TileShape { cols: count, ..self.shape };
        Matrix { tile: Tile { shape, ..self }, transposed: false, skips: first / step }
    }

    /// Block `index` of `count` columns, whole panels, for one of several warpgroups. A computed index is not checked.
    #[track_caller]
    pub fn nth_col_block(self, index: V<'k, B32>, count: u32) -> Tile<'s, 'k> {
        let b = self.builder;
        if !count.is_multiple_of(self.shape.panel_cols()) || count == 0 || count > self.shape.cols {
            b.misfit("a block of columns and its tile", format!("blocks of {count} columns"), self.shape);
            return self;
        }
        let _one = b.as_one();
        let stride = count / self.shape.panel_cols() * self.panel_stride;
        let address = index.mad(stride, b.shared_address(self.address)).at(0);
        Tile { shape: TileShape { cols: count, ..self.shape }, address, ..self }
    }

    /// The address of an element.
    #[track_caller]
    pub fn element(self, row: impl Arg<Ty = B32>, col: impl Arg<Ty = B32>) -> V<'k, B32> {
        let (b, TileShape { elem, swizzle, .. }) = (self.builder, self.shape);
        let span = swizzle.row_bytes();
        let _one = b.as_one();
        let byte = b.value(col) * elem.bytes();
        let (panel, within) = (byte >> span.trailing_zeros(), byte & (span - 1));
        let linear = b.mad(row, span, within);
        let mixed = linear ^ ((linear >> 3) & (span - 16));
        let start = b.shared_address(self.address);
        panel.mad(self.panel_stride, start) + mixed
    }

    /// Addresses at constant distances from the element at `row` and `col`. The caller ensures that they are in the
    /// tile, and that no distance has a bit in common with the byte offset of `col` within its panel.
    #[track_caller]
    pub fn elements(self, row: impl Arg<Ty = B32>, col: impl Arg<Ty = B32>) -> Elements<'s, 'k> {
        Elements { first: self.element(row, col), tile: self }
    }
}

/// Addresses at constant distances from an element: see [`Tile::elements`].
#[derive(Clone, Copy, Debug)]
pub struct Elements<'s, 'k> {
    tile: Tile<'s, 'k>,
    first: V<'k, B32>,
}

impl Elements<'_, '_> {
    /// The address `rows` rows below and `cols` columns to the right. `rows` is a multiple of 8, the period of a
    /// swizzle; the columns are a multiple of 16 bytes, its chunks.
    #[track_caller]
    pub fn at(&self, rows: u32, cols: u32) -> SharedAddr {
        let TileShape { elem, swizzle, .. } = self.tile.shape;
        let (span, byte) = (swizzle.row_bytes(), cols.saturating_mul(elem.bytes()));
        let is_inside = rows < self.tile.shape.rows && cols < self.tile.shape.cols;
        if !is_inside || !rows.is_multiple_of(8) || !byte.is_multiple_of(16) {
            let distance = format!("{rows} rows and {cols} columns");
            self.tile.builder.misfit("a distance and its tile", distance, self.tile.shape);
            return self.first.at(0);
        }
        let _one = self.tile.builder.as_one();
        let (panel, within) = (byte / span, byte % span);
        let chunk = if within == 0 { self.first } else { self.first ^ within };
        chunk.at((rows * span + panel * self.tile.panel_stride) as i32)
    }
}

/// A tile or its transpose as an operand of a product, rows x columns as in the formula of the product.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'s, 'k> {
    tile: Tile<'s, 'k>,
    transposed: bool,
    /// Steps along K of the tile that precede its first.
    skips: u32,
}

impl<'s, 'k> From<Tile<'s, 'k>> for Matrix<'s, 'k> {
    fn from(tile: Tile<'s, 'k>) -> Matrix<'s, 'k> {
        Matrix { tile, transposed: false, skips: 0 }
    }
}

impl<'s, 'k> From<&Tile<'s, 'k>> for Matrix<'s, 'k> {
    fn from(tile: &Tile<'s, 'k>) -> Matrix<'s, 'k> {
        (*tile).into()
    }
}

/// The side of a product that a matrix is on.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum OperandSide {
    /// M x K.
    A,
    /// K x N.
    B,
}

impl<'s, 'k> Matrix<'s, 'k> {
    pub(crate) fn builder(&self) -> &'k Builder {
        self.tile.builder
    }

    pub(crate) fn elem(&self) -> Elem {
        self.tile.shape.elem
    }

    /// Rows and columns, as in the formula of the product.
    pub(crate) fn extent(&self) -> (u32, u32) {
        let TileShape { rows, cols, .. } = self.tile.shape;
        if self.transposed { (cols, rows) } else { (rows, cols) }
    }

    /// The contiguous dimension: a row of A runs along K, a row of B along N.
    pub(crate) fn major(&self, side: OperandSide) -> Major {
        if (side == OperandSide::A) == self.transposed { Major::Mn } else { Major::K }
    }

    /// The layout for a descriptor, and a function that gives the bytes from the start of the tile to a step along K.
    fn layout(&self, major: Major) -> (Layout, impl Fn(u32) -> u32 + use<>) {
        let Tile { shape: TileShape { swizzle, .. }, panel_stride, .. } = self.tile;
        let (span, group) = (swizzle.row_bytes(), swizzle.pattern_bytes());
        let (leading, stride) = match (major, swizzle) {
            // The next group of 8 rows follows in the panel. The next columns are in the next panel.
            (Major::K, Swizzle::None) | (Major::Mn, Swizzle::B32 | Swizzle::B64 | Swizzle::B128) => {
                (panel_stride, group)
            }
            (Major::K, Swizzle::B32 | Swizzle::B64 | Swizzle::B128) => (16, group),
            (Major::Mn, Swizzle::None) => (group, panel_stride),
        };
        let offset = move |step: u32| match major {
            Major::K => (32 * step / span) * panel_stride + 32 * step % span,
            Major::Mn => 16 * step * span,
        };
        (Layout { swizzle, leading, stride }, offset)
    }

    /// The descriptors of the steps along K. Each is computed where it is needed, because all of them together would
    /// take too many registers.
    #[track_caller]
    pub(crate) fn descriptors(&self, side: OperandSide) -> impl Fn(u32) -> V<'k, B64> + use<'s, 'k> {
        let (layout, offset) = self.layout(self.major(side));
        let descriptor = layout.descriptor();
        let start = self.tile.builder.shared_address(self.tile.address);
        let low = start.bfe(4, 14) | (descriptor as u32);
        let skips = self.skips;
        move |step: u32| {
            let step = step + skips;
            let low = if step == 0 { low } else { low + (offset(step) >> 4) };
            low.below((descriptor >> 32) as u32)
        }
    }
}

impl fmt::Display for Matrix<'_, '_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let transposed = if self.transposed { ", transposed" } else { "" };
        write!(f, "{}{transposed}", self.tile.shape)
    }
}

impl SharedAddr {
    /// The address `bytes` further on.
    pub(crate) fn plus(self, bytes: i32) -> SharedAddr {
        SharedAddr { offset: self.offset + bytes, ..self }
    }
}

/// Tiles.
impl Builder {
    /// Declares a tile: whole panels of a multiple of 8 rows (V-27).
    #[track_caller]
    pub fn tile(&self, name: &str, shape: TileShape) -> Tile<'_, '_> {
        let region = self.tiles(name, 1, shape);
        Tile::new(self, shape, region.at(0))
    }

    /// Declares `count` tiles that follow each other.
    #[track_caller]
    pub(crate) fn tiles(&self, name: &str, count: u32, shape: TileShape) -> Region {
        self.whole(shape);
        self.region(name, count.saturating_mul(shape.bytes()), shape.align())
    }

    /// Records a mistake if a tile does not consist of whole panels with whole swizzle patterns.
    #[track_caller]
    pub(crate) fn whole(&self, shape: TileShape) {
        if !shape.is_whole() {
            self.misfit("a tile and its panels", shape, format!("8 rows and {} columns", shape.panel_cols()));
        }
    }

    /// Declares a tile that begins where the first of `over` does. It must never be in use while one of `over` is.
    #[track_caller]
    pub fn tile_over(&self, name: &str, shape: TileShape, over: &[Region]) -> Tile<'_, '_> {
        self.whole(shape);
        let region = self.overlay(name, over, shape.bytes(), shape.align());
        Tile::new(self, shape, region.at(0))
    }

    /// A shared-memory address in a register.
    #[track_caller]
    pub(crate) fn shared_address(&self, addr: SharedAddr) -> V<'_, B32> {
        let base = match addr.base {
            SharedBase::Region(region) => self.address(region),
            SharedBase::Value(value) => V::new(self, value),
        };
        if addr.offset == 0 { base } else { base + addr.offset }
    }

    /// The lower half of a · b, plus c: [`V::mad`] where `a` may be any operand.
    #[track_caller]
    pub(crate) fn mad(
        &self,
        a: impl Arg<Ty = B32>,
        b: impl Arg<Ty = B32>,
        c: impl Arg<Ty = B32>,
    ) -> V<'_, B32> {
        self.value(a).mad(b, c)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Kernel, Launch, descriptor_address};

    /// The byte at which a product reads element (r, k) of a 2-byte operand: the descriptor's fields in the address
    /// function of the PTX ISA's canonical layouts.
    fn element(descriptor: u64, major: Major, r: u32, k: u32) -> u32 {
        let part = |shift: u32| ((descriptor >> shift & 0x3FFF) as u32) << 4;
        let (start, leading, stride) = (part(0), part(16), part(32));
        let bits = [0, 3, 2, 1][(descriptor >> 62) as usize];
        let span = 16 << bits;
        let linear = match (major, bits) {
            (Major::K, 0) => (r / 8) * stride + (r % 8) * 16 + (2 * k / 16) * leading + 2 * k % 16,
            (Major::K, _) => (r / 8) * stride + (r % 8) * span + 2 * k,
            (Major::Mn, 0) => (r / 8) * stride + (k / 8) * leading + (k % 8) * 16 + (r % 8) * 2,
            (Major::Mn, _) => (2 * r / span) * leading + (k / 8) * stride + (k % 8) * span + 2 * r % span,
        };
        let a = start + linear;
        a ^ ((a >> 3) & ((1 << (4 + bits)) - 16))
    }

    /// Byte offset at which the copies of a tile's panels write an element. The tile begins at `start`.
    fn copied(shape: TileShape, start: u32, row: u32, col: u32) -> u32 {
        let (panel, within) = (col / shape.panel_cols(), col % shape.panel_cols());
        let start = start + panel * shape.panel_bytes();
        shape.swizzle.apply(start + row * shape.swizzle.row_bytes() + within * shape.elem.bytes())
    }

    /// The descriptors of all steps along K address the elements that the copies wrote: A and B, plain and transposed,
    /// with every swizzle, with one panel and several.
    #[test]
    fn descriptors_find_what_copies_bring() {
        let cases = Swizzle::ALL.into_iter().flat_map(|swizzle| [32, 64, 128].map(|cols| (swizzle, cols)));
        Kernel::build("k", Launch::threads(128), |b| {
            for (swizzle, cols) in cases.filter(|(swizzle, cols)| 2 * cols >= swizzle.row_bytes()) {
                let (start, shape) = (8192, TileShape::new(Elem::F16, 64, cols).swizzled(swizzle));
                let tile = Tile::new(b, shape, Region(0).at(0));
                let matrices = [Matrix::from(tile), tile.t()];
                for (matrix, side) in
                    matrices.into_iter().flat_map(|m| [(m, OperandSide::A), (m, OperandSide::B)])
                {
                    let major = matrix.major(side);
                    let (layout, offset) = matrix.layout(major);
                    let (outer, depth) = match side {
                        OperandSide::A => matrix.extent(),
                        OperandSide::B => (matrix.extent().1, matrix.extent().0),
                    };
                    for step in 0..depth / 16 {
                        let descriptor = layout.descriptor() + descriptor_address(start + offset(step));
                        for (r, k) in (0..outer).flat_map(|r| (0..16).map(move |k| (r, k))) {
                            let (row, col) =
                                if major == Major::K { (r, 16 * step + k) } else { (16 * step + k, r) };
                            let expected = copied(shape, start, row, col);
                            assert_eq!(
                                element(descriptor, major, r, k),
                                expected,
                                "{matrix} {major:?} {r} {k}"
                            );
                        }
                    }
                }
            }
        });
    }
}
