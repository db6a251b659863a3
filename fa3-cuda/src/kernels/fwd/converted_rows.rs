//! Rows of e4m3 K and V on their way to products of 16 bits, where shared memory has no room for blocks as they are
//! loaded: warps load codes to registers, convert them, exactly, to the type of Q, and store them to the stage that
//! products read.
//!
//! A block of K or V has several parts, each with its own pipeline. Two warpgroups convert, so that one issues
//! instructions while the other waits for memory:
//!
//! | | the producer | the second consumer, before it multiplies a block |
//! |---|---|---|
//! | without `qv` | K | V |
//! | with `qv` | K and V | |
//!
//! A thread has chunks of 16 codes in a few rows of each block. Chunks that are converted leave their registers, one by
//! one, to chunks that are needed later, so that loads are in flight all the time. In the producer, each part has
//! registers of its own, to which the same part of the next block is loaded. In the second consumer, whose registers
//! hold O, the parts take turns with one array of registers.
//!
//! Zeros are stored for rows beyond the sequence's end, rows of a missing page, and columns that the tensor does not
//! have; nothing is read for them.

use fa3_ir::lang::*;

use super::dequantized::{Chunks, store_converted};
use super::state::Fwd;
use crate::kernels::parts::geometry::WorkTile;
use crate::kernels::parts::key_rows::{BlockRows, KeyRows};
use crate::kernels::parts::tma_pipeline::TmaPipeline;

/// The numbers of K and of V among a problem's tensors.
const K: usize = 1;
const V_: usize = 2;

/// Converts blocks of every work tile in all warps of the producer. One thread sends work tiles and loads Q.
pub(super) fn run<'k>(fwd: &Fwd<'k>, [of_k, of_v]: [&[&TmaPipeline<'k>]; 2]) {
    let b = fwd.builder;
    let scheduler = fwd.scheduler.begin();
    let (mut q, mut qv) = (fwd.q.producer(), fwd.qv.as_ref().map(|qv| qv.producer()));
    let of_v = if fwd.spec.tile.qv { of_v } else { &[] };
    let mut converter = Converter::declare(fwd, [(K, of_k), (V_, of_v)], true);
    scheduler.produce_in_role(|work| {
        let visits = work.kv.first.lt(work.kv.end);
        b.if_uniform(visits, || {
            let Some(keys) = converter.begin(fwd, &work) else { return };
            b.once_per_role(|| {
                let [of_q, ..] = fwd.sequences(&work);
                q.load(work.head, work.row, of_q); // A1:4-5
                if let Some(qv) = &mut qv {
                    qv.load(work.head, work.row, fwd.latent_sequence(&work));
                }
            });
            b.warp_sync();
            let all = (work.kv.end - work.kv.first) * fwd.spec.tile.tile_n;
            b.for_each((0, all), fwd.spec.tile.tile_n, |done| converter.convert(&keys, [done, all]));
        });
    });
}

/// The columns of K or V that one pipeline takes.
#[derive(Clone, Copy)]
struct Part {
    /// The index of its tensor.
    of: usize,
    /// Its first column, and its number of columns.
    first: u32,
    cols: u32,
    /// The index of its registers.
    registers: usize,
}

/// A thread's conversion of its chunks.
pub(super) struct Converter<'k> {
    builder: &'k Builder,
    elem: Elem,
    /// Keys of a block, and columns of a panel.
    keys: u32,
    panel: u32,
    chunks: Chunks<'k>,
    /// The number of each tensor, and its rows of the block that is being loaded.
    tensors: Vec<(usize, BlockRows<'k>)>,
    /// In the order in which they are converted, with their pipelines' stages.
    parts: Vec<(Part, Producer<'k, 1>)>,
    /// The chunks of one part of a block each, row by row.
    registers: Vec<Vec<[Var<'k, B32>; 4]>>,
}

impl<'k> Converter<'k> {
    /// The conversion of V in the second consumer, if it is one of two warpgroups that convert.
    #[track_caller]
    pub(super) fn of_second(fwd: &Fwd<'k>) -> Option<Converter<'k>> {
        let of_v: Vec<_> = std::iter::once(&fwd.v).chain(&fwd.v_second).collect();
        let tile = &fwd.spec.tile;
        (tile.converts_rows() && !tile.qv).then(|| Converter::declare(fwd, [(V_, &of_v[..])], false))
    }

    /// Declares the registers of the parts of these tensors: of each part, or of all in turn.
    #[track_caller]
    fn declare<'f, const N: usize>(
        fwd: &Fwd<'k>,
        tensors: [(usize, &[&'f TmaPipeline<'k>]); N],
        of_each: bool,
    ) -> Converter<'k> {
        let (b, tile) = (fwd.builder, &fwd.spec.tile);
        let panel = TileShape::new(fwd.spec.elem, tile.tile_n, tile.head_dim).panel_cols();
        let chunks = Chunks::new(b, panel);
        let tensors = tensors.into_iter().filter(|(_, pipelines)| !pipelines.is_empty());
        let tensors: Vec<_> = tensors.collect();
        let pipelines =
            tensors.iter().enumerate().flat_map(|(of, (_, all))| all.iter().map(move |&x| (of, x)));
        let parts = pipelines.enumerate().map(|(number, (of, pipeline))| {
            let registers = if of_each { number } else { 0 };
            let part = Part { of, first: pipeline.first_col(), cols: pipeline.cols(), registers };
            (part, pipeline.stages().producer())
        });
        let parts: Vec<_> = parts.collect();
        let rows: Vec<_> =
            (0..tile.tile_n).step_by(chunks.rows as usize).map(|row| chunks.row + row).collect();
        let count = if of_each { parts.len() } else { 1 };
        let registers = (0..count).map(|number| {
            let of_parts = parts.iter().filter(|(part, _)| part.registers == number);
            let cols = of_parts.map(|(part, _)| part.cols).max();
            let chunks = rows.len() * (cols.unwrap_or(0) / panel) as usize;
            (0..chunks).map(|_| [(); 4].map(|()| b.var("codes", 0))).collect()
        });
        let registers = registers.collect();
        let in_pages = fwd.params.pages.is_some();
        let tensors =
            tensors.into_iter().map(|(number, _)| (number, BlockRows::declare(b, rows.clone(), in_pages)));
        Converter {
            builder: b,
            elem: fwd.spec.elem,
            keys: tile.tile_n,
            panel,
            chunks,
            tensors: tensors.collect(),
            parts,
            registers,
        }
    }

    /// Begins to load the last block of a work tile, which has blocks. Gives the keys of the work tile.
    #[track_caller]
    pub(super) fn begin(&self, fwd: &Fwd<'k>, work: &WorkTile<'k>) -> Option<Vec<KeyRows<'k>>> {
        let keys = self.tensors.iter().map(|&(number, _)| fwd.key_rows(work, number));
        let keys = keys.map(|keys| keys.map(|keys| keys.at_column(self.chunks.col)));
        let keys: Vec<_> = keys.collect::<Option<_>>()?;
        let tensors = || self.tensors.iter().map(|(_, rows)| rows).zip(&keys);
        tensors().for_each(|(rows, keys)| rows.read_pages(keys, keys.last));
        tensors().for_each(|(rows, keys)| self.find(rows, keys, keys.last, None));
        for number in 0..self.registers.len() {
            self.loads(self.first_of(number), &keys).for_each(|load| load());
        }
        Some(keys)
    }

    /// The first part of a block that has these registers.
    fn first_of(&self, registers: usize) -> Part {
        let mut parts = self.parts.iter().map(|(part, _)| *part);
        parts.find(|part| part.registers == registers).expect("each array is some part's")
    }

    /// Finds the rows of the block that begins with row `first`, if that block `exists`, and reads the pages of the
    /// block below.
    #[track_caller]
    fn find(&self, rows: &BlockRows<'k>, keys: &KeyRows<'k>, first: U32<'k>, exists: Option<V<'k, Pred>>) {
        rows.find(keys, first, exists);
        rows.read_pages(keys, first - self.keys);
    }

    /// The loads of this thread's chunks of a part of the block whose rows have been found.
    #[track_caller]
    fn loads(&self, part: Part, keys: &[KeyRows<'k>]) -> impl Iterator<Item = impl Fn()> {
        let (b, keys, panel, col) = (self.builder, &keys[part.of], self.panel, self.chunks.col);
        let panels = (part.first..part.first + part.cols).step_by(panel as usize);
        let rows = self.tensors[part.of].1.addresses(keys).into_iter();
        let chunks = rows.flat_map(move |row| panels.clone().map(move |first| (row, first)));
        let registers = self.registers[part.registers].clone();
        chunks.zip(registers).map(move |(((row, is_there), first), to)| {
            let inside = keys.cols.saturating_sub(first);
            move || {
                to.iter().for_each(|word| word.set(0));
                let is_there = if inside < panel { is_there & col.lt(inside) } else { is_there };
                if inside > 0 {
                    b.guarded(is_there, || b.load_vector_to(to, row.at(first as i32)));
                }
            }
        })
    }

    /// Converts the next block of a work tile; blocks go from the last to the first. `done` keys have been converted
    /// before, of `all`.
    #[track_caller]
    pub(super) fn convert(&mut self, keys: &[KeyRows<'k>], [done, all]: [U32<'k>; 2]) {
        let mut found = vec![false; keys.len()];
        for number in 0..self.parts.len() {
            let next = self.next(number, keys, [done, all], &mut found);
            self.convert_part(number, next, keys);
        }
    }

    /// The part that is loaded to the registers that part `number` leaves, of this block or of the next one. `found`
    /// says of which tensors the rows of the next block have been found.
    #[track_caller]
    fn next(
        &self,
        number: usize,
        keys: &[KeyRows<'k>],
        [done, all]: [U32<'k>; 2],
        found: &mut [bool],
    ) -> Part {
        let registers = self.parts[number].0.registers;
        let mut behind = self.parts[number + 1..].iter().map(|(part, _)| *part);
        behind.find(|part| part.registers == registers).unwrap_or_else(|| {
            let next = self.first_of(registers);
            let before = done + self.keys;
            if !std::mem::replace(&mut found[next.of], true) {
                let keys = &keys[next.of];
                self.find(&self.tensors[next.of].1, keys, keys.last - before, Some(before.lt(all)));
            }
            next
        })
    }

    /// Converts part `number` of a block, and begins to load the part that its registers hold next.
    #[track_caller]
    fn convert_part(&mut self, number: usize, next: Part, keys: &[KeyRows<'k>]) {
        let free = self.parts[number].1.acquire();
        let registers = self.parts[number].0.registers;
        let [tile] = free.tiles();
        let to = tile.elements(self.chunks.row, self.chunks.col);
        let TileShape { rows, cols, .. } = tile.shape();
        let places = (0..rows)
            .step_by(self.chunks.rows as usize)
            .flat_map(|row| (0..cols).step_by(self.panel as usize).map(move |col| (row, col)));
        let mut loads = self.loads(next, keys);
        for (chunk, (row, col)) in self.registers[registers].iter().zip(places) {
            let codes = chunk.map(Var::get);
            store_converted(self.builder, codes, self.elem, |second| to.at(row, col + second));
            if let Some(load) = loads.next() {
                load();
            }
        }
        loads.for_each(|load| load());
        free.commit_stored();
    }
}
