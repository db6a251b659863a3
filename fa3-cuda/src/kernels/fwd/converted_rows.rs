//! Rows of e4m3 K and V on their way to products of 16 bits, where shared memory has no room for blocks as they are
//! loaded: warps load codes to registers, convert them, exactly, to the type of Q, and store them to the stage that
//! products read.
//!
//! A block of K or V has several parts, each with its own pipeline. Two warpgroups convert, so that one issues
//! instructions while the other waits for memory:
//!
//! | | the producer | the second consumer |
//! |---|---|---|
//! | without `qv` | K | V |
//! | with `qv` | K and V | |
//!
//! A thread has chunks of 16 codes in a few rows of each block. In the producer, each part has registers of its own.
//! When all parts are converted, all parts of the next block are loaded: ptxas counts loads that stay in flight from
//! one round of a loop to the next with one scoreboard, so a wait for any of them is a wait for all. In the second
//! consumer, whose registers hold O, the parts take turns with one array of registers.
//!
//! V of e4m3 beside K of 16 bits has scales for each row, of [`SCALED_COLUMNS`] columns each. A code times its scale is
//! rounded once. K's elements are stored as they are.
//!
//! Zeros are stored for rows beyond the sequence's end, rows of a missing page, entries of a list that are no row, and
//! columns that the tensor does not have; nothing is read for them.

use fa3_ir::lang::*;
use fa3_types::SCALED_COLUMNS;

use super::dequantized::{Chunks, PART, store_converted};
use super::state::Fwd;
use crate::kernels::parts::geometry::WorkTile;
use crate::kernels::parts::key_rows::{BlockRows, KeyRows};
use crate::kernels::parts::seen::SeenProducer;
use crate::kernels::parts::tma_pipeline::TmaPipeline;

/// The numbers of K and of V among a problem's tensors.
const K: usize = 1;
const V_: usize = 2;

/// Columns that share a scale, where rows have their own ones.
const GROUP: u32 = SCALED_COLUMNS as u32;

/// Converts blocks of every work tile in all warps of the producer. One thread sends work tiles and loads Q.
pub(super) fn run<'k>(fwd: &Fwd<'k>, [of_k, of_v]: [&[&TmaPipeline<'k>]; 2]) {
    let b = fwd.builder;
    let scheduler = fwd.scheduler.begin();
    let (mut q, mut qv) = (fwd.q.producer(), fwd.qv.as_ref().map(|qv| qv.producer()));
    let of_v = if fwd.spec.tile.qv { of_v } else { &[] };
    let mut converter = Converter::declare(fwd, [(K, of_k), (V_, of_v)], true);
    let mut seen = fwd.seen.as_ref().map(|seen| seen.producer());
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
            b.for_each((0, all), fwd.spec.tile.tile_n, |done| {
                if let Some(seen) = &mut seen {
                    converter.say(seen);
                }
                converter.convert(&keys, [done, all], || {});
            });
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
    /// Bytes of an element.
    bytes: u32,
    /// The scales of a row: their first one, and the one behind the last. None, unless rows have their own ones.
    groups: [u32; 2],
    /// The index of its registers.
    registers: usize,
}

impl Part {
    /// The index of a column's scale among the scales of the part, in row number `row` of a thread. Columns that the
    /// tensor does not have are zeros, and take the last scale.
    fn scale_at(&self, row: usize, col: u32) -> usize {
        let [first, end] = self.groups;
        let in_row = (end - first) as usize;
        row * in_row + ((col / GROUP) as usize).min(in_row.saturating_sub(1))
    }
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
    /// The chunks of one part of a block each, row by row. A chunk of 16-bit elements takes two arrays.
    registers: Vec<Vec<[Var<'k, B32>; 4]>>,
    /// The scales of each part, row by row, if rows have their own ones. Then each part has registers of its own.
    scales: Vec<Vec<Var<'k, F32>>>,
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
        let pipelines = tensors
            .iter()
            .enumerate()
            .flat_map(|(of, (tensor, all))| all.iter().map(move |&x| (of, *tensor, x)));
        let parts = pipelines.enumerate().map(|(number, (of, tensor, pipeline))| {
            let (first, cols) = (pipeline.first_col(), pipeline.cols());
            let is_scaled = tensor == V_ && fwd.spec.row_scales;
            let groups = if is_scaled { fwd.spec.head_dim_v.div_ceil(GROUP) } else { 0 };
            let part = Part {
                of,
                first,
                cols,
                bytes: if tensor == V_ { Elem::E4m3.bytes() } else { fwd.spec.key_elem().bytes() },
                groups: [first, first + cols].map(|col| col.div_ceil(GROUP).min(groups)),
                registers: if of_each { number } else { 0 },
            };
            (part, pipeline.stages().producer())
        });
        let parts: Vec<_> = parts.collect();
        let rows: Vec<_> =
            (0..tile.tile_n).step_by(chunks.rows as usize).map(|row| chunks.row + row).collect();
        let count = if of_each { parts.len() } else { 1 };
        let registers = (0..count).map(|number| {
            let of_parts = parts.iter().filter(|(part, _)| part.registers == number);
            let chunks = of_parts.map(|(part, _)| part.cols / panel * part.bytes).max();
            let chunks = rows.len() * chunks.unwrap_or(0) as usize;
            (0..chunks).map(|_| [(); 4].map(|()| b.var("codes", 0))).collect()
        });
        let registers = registers.collect();
        let scales = parts.iter().map(|(Part { groups: [first, end], .. }, _)| {
            (0..rows.len() as u32 * (end - first)).map(|_| b.var("scale", 0.0)).collect()
        });
        let scales = scales.collect();
        let are_found = fwd.params.pages.is_some() || fwd.params.lists.is_some();
        let tensors =
            tensors.into_iter().map(|(number, _)| (number, BlockRows::declare(b, rows.clone(), are_found)));
        Converter {
            builder: b,
            elem: fwd.spec.elem,
            keys: tile.tile_n,
            panel,
            chunks,
            tensors: tensors.collect(),
            parts,
            registers,
            scales,
        }
    }

    /// Begins to load the last block of a work tile, which has blocks. Gives the keys of the work tile.
    #[track_caller]
    pub(super) fn begin(&self, fwd: &Fwd<'k>, work: &WorkTile<'k>) -> Option<Vec<KeyRows<'k>>> {
        let keys = self.tensors.iter().map(|&(number, _)| fwd.key_rows(work, number));
        let keys = keys.map(|keys| keys.map(|keys| keys.at_column(self.chunks.col)));
        let keys: Vec<_> = keys.collect::<Option<_>>()?;
        for ((_, rows), keys) in self.tensors.iter().zip(&keys) {
            rows.read_pages(keys, keys.begin);
            rows.find(keys, keys.begin, None);
        }
        self.load_first_parts(&keys, self.builder.value(0));
        Some(keys)
    }

    /// Begins to load the first part of each array of registers, of the block whose rows have been found, and reads the
    /// pages or indices of the block after it. `done` keys precede the block.
    #[track_caller]
    fn load_first_parts(&self, keys: &[KeyRows<'k>], done: U32<'k>) {
        for ((_, rows), keys) in self.tensors.iter().zip(keys) {
            rows.read_pages(keys, keys.after(keys.begin, done + self.keys));
        }
        for registers in 0..self.registers.len() {
            let mut parts = self.parts.iter().map(|(part, _)| *part);
            let first = parts.find(|part| part.registers == registers);
            self.load(first.expect("each array is some part's"), keys);
        }
    }

    /// Begins to load a part of the block whose rows have been found.
    #[track_caller]
    fn load(&self, part: Part, keys: &[KeyRows<'k>]) {
        self.load_codes(part, keys);
        self.load_scales(part, keys);
    }

    /// Begins to load the scales of a part of the block whose rows have been found, if rows have their own ones.
    #[track_caller]
    fn load_scales(&self, part: Part, keys: &[KeyRows<'k>]) {
        let rows = self.tensors[part.of].1.scales(&keys[part.of]).into_iter();
        let groups = rows.flat_map(|row| (part.groups[0]..part.groups[1]).map(move |group| (row, group)));
        for (((row, is_there), group), to) in groups.zip(&self.scales[part.registers]) {
            to.set(0.0);
            self.builder.guarded(is_there, || to.set(self.builder.load::<F32>(row.at(4 * group as i32))));
        }
    }

    /// The first columns of this thread's arrays of registers in a row, before its own column is added.
    fn places(&self, cols: std::ops::Range<u32>, bytes: u32) -> impl Iterator<Item = u32> + Clone + use<> {
        let panels = cols.step_by(self.panel as usize);
        panels.flat_map(move |first| {
            (0..PART).step_by((PART / bytes) as usize).map(move |second| first + second)
        })
    }

    /// Begins to load this thread's chunks of a part of the block whose rows have been found.
    #[track_caller]
    fn load_codes(&self, part: Part, keys: &[KeyRows<'k>]) {
        let (keys, panel, col) = (&keys[part.of], self.panel, self.chunks.col);
        let places = self.places(part.first..part.first + part.cols, part.bytes);
        let rows = self.tensors[part.of].1.addresses(keys).into_iter();
        let chunks = rows.flat_map(|row| places.clone().map(move |first| (row, first)));
        for (((row, is_there), first), &to) in chunks.zip(&self.registers[part.registers]) {
            to.iter().for_each(|word| word.set(0));
            let inside = keys.cols.saturating_sub(first);
            let is_whole = inside + first % panel >= panel;
            let is_there = if is_whole { is_there } else { is_there & col.lt(inside) };
            if inside > 0 {
                self.builder.guarded(is_there, || {
                    self.builder.load_vector_to(to, row.at((first * keys.bytes) as i32))
                });
            }
        }
    }

    /// Says which keys of the next block exist. One of the threads that convert a row says it.
    #[track_caller]
    fn say(&self, seen: &mut SeenProducer<'k>) {
        let (says, (_, rows)) = (self.chunks.col.eq(0), &self.tensors[0]);
        seen.store(rows.found().map(|(key, row)| (says.select(key, u32::MAX), row)));
    }

    /// Converts the next block of a work tile, in the order of loads. `done` keys have been converted before, of `all`.
    /// `meanwhile` runs while the last parts of the block are loaded.
    #[track_caller]
    pub(super) fn convert(
        &mut self,
        keys: &[KeyRows<'k>],
        [done, all]: [U32<'k>; 2],
        meanwhile: impl FnOnce(),
    ) {
        let mut meanwhile = Some(meanwhile);
        let before = done + self.keys;
        // The first part behind which no load of this block remains.
        let all_loaded = self.parts.len() - self.registers.len();
        for number in 0..self.parts.len() {
            if number == all_loaded {
                meanwhile.take().into_iter().for_each(|meanwhile| meanwhile());
                for ((_, rows), keys) in self.tensors.iter().zip(keys) {
                    rows.find(keys, keys.after(keys.begin, before), Some(before.lt(all)));
                }
            }
            self.convert_part(number);
            let registers = self.parts[number].0.registers;
            let mut behind = self.parts[number + 1..].iter().map(|(part, _)| *part);
            if let Some(next) = behind.find(|part| part.registers == registers) {
                self.load(next, keys);
            }
        }
        self.load_first_parts(keys, before);
    }

    /// Converts part `number` of a block.
    #[track_caller]
    fn convert_part(&mut self, number: usize) {
        let free = self.parts[number].1.acquire();
        let part = self.parts[number].0;
        let [tile] = free.tiles();
        let to = tile.elements(self.chunks.row, self.chunks.col);
        let TileShape { rows, cols, .. } = tile.shape();
        let places = (0..rows)
            .step_by(self.chunks.rows as usize)
            .enumerate()
            .flat_map(|(number, row)| self.places(0..cols, part.bytes).map(move |col| (number, row, col)));
        for (chunk, (number, row, col)) in self.registers[part.registers].iter().zip(places) {
            let words = chunk.map(Var::get);
            if part.bytes == self.elem.bytes() {
                self.builder.store_vector(to.at(row, col), words);
            } else {
                let scale = self.scales[part.registers].get(part.scale_at(number, col));
                let scale = scale.map(|scale| scale.get());
                store_converted(self.builder, (words, scale), [Elem::E4m3, self.elem], |second| {
                    to.at(row, col + second)
                });
            }
        }
        free.commit_stored();
    }
}
