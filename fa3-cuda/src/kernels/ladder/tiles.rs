//! The order in which a persistent grid walks over the tiles of C.

use fa3_ir::Passed;
use fa3_ir::lang::*;
use fa3_sched::{FastDiv, Int};

use crate::kernels::params::{Declare, Fill, Filled, Host, Pass, Side};

/// Rows of tiles that are walked together, column by column, so that CTAs that run at one time share A and B in L2.
const GROUP: u32 = 16;

/// The tiles of C in groups of [`GROUP`] rows, for the host (`u32`) and in a kernel.
#[derive(Clone, Copy, Debug)]
pub(super) struct TileOrder<T> {
    tiles: T,
    /// Number of tiles of a complete group, as a divisor.
    group: FastDiv<T>,
    /// The index of the incomplete group at the end, and the group's number of rows.
    last: T,
    last_rows: FastDiv<T>,
}

impl TileOrder<u32> {
    /// The order of `rows` x `cols` tiles. Their number is clamped to `u32::MAX`, more than any GPU has memory for.
    pub(super) fn new(rows: u32, cols: u32) -> TileOrder<u32> {
        TileOrder {
            tiles: rows.saturating_mul(cols),
            group: FastDiv::new(GROUP.saturating_mul(cols.max(1))),
            last: rows / GROUP,
            last_rows: FastDiv::new((rows % GROUP).max(1)),
        }
    }

    /// Number of tiles.
    pub(super) fn tiles(self) -> u32 {
        self.tiles
    }

    /// The numbers of the order, as named arguments.
    pub(super) fn args(self) -> Vec<(String, Passed)> {
        Fill::args(|by| _ = self.pass::<Host, Filled>(by))
    }
}

impl<T> TileOrder<T> {
    #[track_caller]
    fn pass<A: Side<U32 = T>, B: Side>(self, by: &mut impl Pass<A, B>) -> TileOrder<B::U32> {
        self.map_named(|name, x| by.u32(name, x))
    }

    /// Applies `f` to each number, in a fixed order.
    fn map_named<U>(self, mut f: impl FnMut(&str, T) -> U) -> TileOrder<U> {
        TileOrder {
            tiles: f("tiles", self.tiles),
            group: self.group.map_named("group", &mut f),
            last: f("last_group", self.last),
            last_rows: self.last_rows.map_named("last_rows", &mut f),
        }
    }
}

impl<T: Int> TileOrder<T> {
    /// The row and the column of tile `index`.
    fn decode(self, index: T) -> (T, T) {
        let (group, within) = self.group.div_rem(index);
        let whole = FastDiv::new(GROUP).map(|number| index.lit(number));
        let rows = FastDiv::select(group.eq(self.last), self.last_rows, whole);
        let (col, row) = rows.div_rem(within);
        (group * index.lit(GROUP) + row, col)
    }
}

impl<'k> TileOrder<U32<'k>> {
    /// Declares the numbers of the order as parameters.
    #[track_caller]
    pub(super) fn declare(b: &'k Builder) -> TileOrder<U32<'k>> {
        TileOrder::new(1, 1).map_named(|_, _| ()).pass(&mut Declare(b))
    }

    /// Runs `body` with the row and the column of every tile of this CTA. With clusters, a tile of the order belongs to
    /// a cluster and has a row for each CTA of it; `body` gets the row of this CTA.
    pub(super) fn for_each(self, b: &'k Builder, body: impl FnOnce(U32<'k>, U32<'k>)) {
        let cluster = b.launch().cluster;
        let (cta, ctas) = (b.cta_x(), b.grid_x());
        let shift = cluster.trailing_zeros();
        let (first, step) = (cta >> shift, ctas >> shift);
        let next = b.var("tile", first);
        b.repeat(|| {
            b.break_if(next.now().ge(self.tiles));
            let index = next.get();
            let (row, col) = self.decode(index);
            let row = if cluster == 1 { row } else { row.mad(cluster, b.cluster_cta_rank()) };
            body(row, col);
            next.set(index + step);
        });
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_tile_comes_once() {
        for (rows, cols) in [(1, 1), (16, 3), (17, 5), (5, 7), (64, 32), (33, 1)] {
            let order = TileOrder::new(rows, cols);
            let tiles: BTreeSet<(u32, u32)> = (0..order.tiles).map(|index| order.decode(index)).collect();
            let all = (0..rows).flat_map(|row| (0..cols).map(move |col| (row, col))).collect();
            assert_eq!(tiles, all, "{rows} x {cols}");
        }
    }
}
