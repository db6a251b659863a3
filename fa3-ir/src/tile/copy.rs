//! Copies of tiles between global and shared memory, by tensor maps whose boxes are panels of a tile.

use crate::lang::{Arg, B32, B64, Builder, Coords, Tile, TileShape, V};
use crate::{BoxShape, Imm, LoadOptions, Operand, SharedAddr, TensorMap};

/// A tensor map that copies tiles of one shape, panel by panel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TileMap {
    pub(crate) map: TensorMap,
    pub(crate) shape: TileShape,
}

impl TileMap {
    /// The map itself, for other instructions.
    pub fn tensor_map(&self) -> TensorMap {
        self.map
    }

    /// The shape of the tiles that this map copies.
    pub fn shape(&self) -> TileShape {
        self.shape
    }

    /// This map for tiles of `cols` columns, whole panels. A copy's coordinates say where a tile begins.
    #[must_use]
    pub fn of_columns(self, cols: u32) -> TileMap {
        TileMap { shape: TileShape { cols, ..self.shape }, ..self }
    }
}

/// The boxes of a tile: for each box, its address in shared memory and its coordinates in the tensor.
#[track_caller]
fn panels(
    b: &Builder,
    map: &TileMap,
    tile: Tile<'_, '_>,
    coords: &[Operand],
) -> Vec<(SharedAddr, Vec<Operand>)> {
    if tile.shape != map.shape {
        b.misfit("a tile and its tensor map", tile.shape, map.shape);
    }
    let cols = tile.shape.panel_cols();
    let panel = |panel: u32| {
        let mut coords = coords.to_vec();
        // Without coordinates there is none to advance. V-10 reports such a copy.
        if let Some(first) = coords.first_mut().filter(|_| panel > 0) {
            *first = match *first {
                Operand::Imm(Imm::B32(first)) => first.wrapping_add(panel * cols).operand(),
                Operand::Imm(_) => *first,
                Operand::Value(first) => (V::<B32>::new(b, first) + panel * cols).operand(),
            };
        }
        (tile.address.plus((panel * tile.panel_stride) as i32), coords)
    };
    (0..tile.shape.panels()).map(panel).collect()
}

/// Tensor maps of tiles.
impl Builder {
    /// Declares a parameter that is the tensor map of a matrix, for copies of tiles of this shape. The coordinates of a
    /// copy are the tile's first column and first row.
    #[track_caller]
    pub fn tile_map(&self, name: &str, shape: TileShape) -> TileMap {
        self.tile_map_of(name, shape, 2, 1)
    }

    /// Like [`Builder::tile_map`], for a tensor of `rank` dimensions, innermost first. The tile's rows run along
    /// dimension `rows`. The other dimensions, except the innermost, are fixed for a tile.
    #[track_caller]
    pub fn tile_map_of(&self, name: &str, shape: TileShape, rank: usize, rows: usize) -> TileMap {
        self.tile_map_over(name, shape, rank, &[(rows, shape.rows)])
    }

    /// Like [`Builder::tile_map_of`], where a tile's rows run along several dimensions. Each entry of `rows` is the
    /// number of a dimension and its count of rows, in rising order. The first dimension runs fastest.
    #[track_caller]
    pub fn tile_map_over(&self, name: &str, shape: TileShape, rank: usize, rows: &[(usize, u32)]) -> TileMap {
        self.whole(shape);
        let are_dims =
            rows.iter().all(|(dim, _)| (1..rank).contains(dim)) && rows.is_sorted_by(|a, b| a.0 < b.0);
        if rank > 5 || !are_dims {
            let dims: Vec<usize> = rows.iter().map(|&(dim, _)| dim).collect();
            self.misfit("a tensor map", format!("rows in dimensions {dims:?}"), format!("{rank} dimensions"));
        }
        if rows.iter().map(|&(_, count)| count).product::<u32>() != shape.rows {
            self.misfit("a tensor map", format!("rows {rows:?}"), shape);
        }
        let mut dims = [1; 5];
        dims[0] = shape.panel_cols();
        for &(dim, count) in rows {
            if let Some(dim) = dims.get_mut(dim) {
                *dim = count;
            }
        }
        let map = self.param_tensor_map(name, BoxShape::new(shape.elem, &dims[..rank.min(5)], shape.swizzle));
        TileMap { map, shape }
    }

    /// Begins to load a tile; `mbarrier` counts its bytes.
    #[track_caller]
    pub fn load_tile(
        &self,
        tile: Tile<'_, '_>,
        map: &TileMap,
        coords: impl Coords,
        mbarrier: impl Into<SharedAddr>,
        options: LoadOptions,
    ) {
        let (coords, mbarrier) = (coords.operands(), mbarrier.into());
        let _one = self.as_one();
        for (address, coords) in panels(self, map, tile, &coords) {
            self.tma_load(address, map.map, Given(coords), mbarrier, options);
        }
    }

    /// Begins to store a tile, in this thread's open bulk group.
    #[track_caller]
    pub fn store_tile(&self, tile: Tile<'_, '_>, map: &TileMap, coords: impl Coords) {
        let _one = self.as_one();
        for (address, coords) in panels(self, map, tile, &coords.operands()) {
            self.tma_store(map.map, Given(coords), address);
        }
    }

    /// Begins to add a tile to the tensor, in this thread's open bulk group.
    #[track_caller]
    pub fn add_tile(&self, tile: Tile<'_, '_>, map: &TileMap, coords: impl Coords) {
        let _one = self.as_one();
        for (address, coords) in panels(self, map, tile, &coords.operands()) {
            self.tma_reduce_add(map.map, Given(coords), address);
        }
    }

    /// Begins to store a tile's bytes in the order in which they lie, in this thread's open bulk group.
    #[track_caller]
    pub fn store_tile_flat(&self, tile: Tile<'_, '_>, to: V<'_, B64>) {
        self.bulk_store(to, tile.address, tile.shape().bytes());
    }

    /// Begins to add a tile of binary32 to global memory, element by element in the order in which they lie, in this
    /// thread's open bulk group.
    #[track_caller]
    pub fn add_tile_flat(&self, tile: Tile<'_, '_>, to: V<'_, B64>) {
        self.bulk_reduce_add_f32(to, tile.address, tile.shape().bytes());
    }
}

/// Coordinates that are operands already.
struct Given(Vec<Operand>);

impl Coords for Given {
    fn operands(self) -> Vec<Operand> {
        self.0
    }
}
