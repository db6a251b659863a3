//! Rows of e4m3 K and V on their way to products of 16 bits, where shared memory has no room for blocks as they are
//! loaded: the producer's warps load codes to registers, convert them, exactly, to the type of Q, and store them to the
//! stage that products read.
//!
//! A thread has chunks of 16 codes in a few rows of each block. Chunks that are converted leave their registers, one by
//! one, to chunks that are needed later, so that loads are in flight all the time. A block of K or V has several parts,
//! each with its own pipeline. Without `qv`, K is one block ahead of V, as consumers release stages, and two arrays of
//! registers take turns:
//!
//! ```text
//! a round                 next round
//! V₁ j    K₁ j+1  K₂ j+1  V₂ j    V₁ j+1   parts that are converted
//! A       B       A       B       A        from these registers
//! K₂ j+1  V₂ j    V₁ j+1  K₁ j+2  K₂ j+2   parts that are loaded to them meanwhile
//! ```
//!
//! With `qv`, scores read K and V of one block, and each part has registers of its own.
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

/// Indices of the tensors.
const K: usize = 0;
const V_: usize = 1;

/// Columns that share a scale, where rows have their own ones.
const GROUP: u32 = SCALED_COLUMNS as u32;

/// Converts the blocks of every work tile in all warps of the producer. One thread sends work tiles and loads Q.
pub(super) fn run<'k>(fwd: &Fwd<'k>, pipelines: [&[&TmaPipeline<'k>]; 2]) {
    let b = fwd.builder;
    let scheduler = fwd.scheduler.begin();
    let (mut q, mut qv) = (fwd.q.producer(), fwd.qv.as_ref().map(|qv| qv.producer()));
    let pipelines = Converter::order(fwd, pipelines);
    let mut stages: Vec<_> = pipelines.iter().map(|(_, pipeline)| pipeline.stages().producer()).collect();
    let converter = Converter::declare(fwd, &pipelines);
    let mut seen = fwd.seen.as_ref().map(|seen| seen.producer());
    scheduler.produce_in_role(|work| {
        let visits = work.kv.first.lt(work.kv.end);
        b.if_uniform(visits, || {
            let Some((k, v)) = fwd.key_rows(&work, 1).zip(fwd.key_rows(&work, 2)) else { return };
            let keys = [k, v].map(|keys| keys.at_column(converter.chunks.col));
            converter.begin(&keys);
            b.once_per_role(|| {
                let [of_q, ..] = fwd.sequences(&work);
                q.load(work.head, work.row, of_q); // A1:4-5
                if let Some(qv) = &mut qv {
                    qv.load(work.head, work.row, fwd.latent_sequence(&work));
                }
            });
            b.warp_sync();
            converter.convert_all(&mut stages, seen.as_mut(), &keys, &work);
        });
    });
}

/// The columns of K or V that one pipeline takes.
#[derive(Clone, Copy)]
struct Part {
    /// K or V.
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
    /// Whether it is of the block before the block of K that is converted in the same round.
    is_late: bool,
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
struct Converter<'k> {
    builder: &'k Builder,
    elem: Elem,
    /// Keys of a block, and columns of a panel.
    keys: u32,
    panel: u32,
    chunks: Chunks<'k>,
    /// In the order in which a round converts them.
    parts: Vec<Part>,
    /// The chunks of one part of a block each, row by row. A chunk of 16-bit elements takes two arrays.
    registers: Vec<Vec<[Var<'k, B32>; 4]>>,
    /// The scales of one part of a block each, row by row.
    scales: Vec<Vec<Var<'k, F32>>>,
    /// The rows of K and of V of the block that is being loaded.
    rows: [BlockRows<'k>; 2],
}

impl<'k> Converter<'k> {
    /// The pipelines of K and of V, in the order in which a round converts their parts: that of `producer::load`.
    fn order<'f>(
        fwd: &Fwd<'k>,
        [of_k, of_v]: [&[&'f TmaPipeline<'k>]; 2],
    ) -> Vec<(usize, &'f TmaPipeline<'k>)> {
        let mut pipelines: Vec<_> = of_v.iter().map(|pipeline| (V_, *pipeline)).collect();
        let ahead = if fwd.spec.tile.qv { 0 } else { 1 };
        pipelines.splice(ahead..ahead, of_k.iter().map(|pipeline| (K, *pipeline)));
        pipelines
    }

    /// Declares the registers of these pipelines' parts.
    #[track_caller]
    fn declare(fwd: &Fwd<'k>, pipelines: &[(usize, &TmaPipeline<'k>)]) -> Converter<'k> {
        let (b, tile) = (fwd.builder, &fwd.spec.tile);
        let panel = TileShape::new(fwd.spec.elem, tile.tile_n, tile.head_dim).panel_cols();
        let chunks = Chunks::new(b, panel);
        let parts = pipelines.iter().enumerate().map(|(number, &(of, pipeline))| {
            let (first, cols) = (pipeline.first_col(), pipeline.cols());
            let is_scaled = of == V_ && fwd.spec.row_scales;
            let groups = if is_scaled { fwd.spec.head_dim_v.div_ceil(GROUP) } else { 0 };
            Part {
                of,
                first,
                cols,
                bytes: if of == V_ { Elem::E4m3.bytes() } else { fwd.spec.key_elem().bytes() },
                groups: [first, first + cols].map(|col| col.div_ceil(GROUP).min(groups)),
                registers: if tile.qv { number } else { number % 2 },
                is_late: of == V_ && !tile.qv,
            }
        });
        let parts: Vec<_> = parts.collect();
        let rows: Vec<_> =
            (0..tile.tile_n).step_by(chunks.rows as usize).map(|row| chunks.row + row).collect();
        let count = parts.iter().map(|part| part.registers + 1).max().unwrap_or(0);
        let registers = (0..count).map(|number| {
            let of_part = |part: &Part| part.cols / panel * part.bytes;
            let chunks = parts.iter().filter(|part| part.registers == number).map(of_part).max();
            let chunks = rows.len() * chunks.unwrap_or(0) as usize;
            (0..chunks).map(|_| [(); 4].map(|()| b.var("codes", 0))).collect()
        });
        let scales = parts.iter().map(|Part { groups: [first, end], .. }| {
            (0..rows.len() as u32 * (end - first)).map(|_| b.var("scale", 0.0)).collect()
        });
        let are_found = fwd.params.pages.is_some() || fwd.params.lists.is_some();
        Converter {
            builder: b,
            elem: fwd.spec.elem,
            keys: tile.tile_n,
            panel,
            chunks,
            registers: registers.collect(),
            scales: scales.collect(),
            parts,
            rows: [K, V_].map(|_| BlockRows::declare(b, rows.clone(), are_found)),
        }
    }

    /// Begins to load the last block of a work tile.
    #[track_caller]
    fn begin(&self, keys: &[KeyRows<'k>; 2]) {
        let tensors = || self.rows.iter().zip(keys);
        tensors().for_each(|(rows, keys)| rows.read_pages(keys, keys.begin));
        for (of, (rows, keys)) in tensors().enumerate() {
            if self.parts.iter().any(|part| part.of == of && part.is_late) {
                rows.find_none();
            } else {
                self.find(rows, keys, keys.begin, None);
            }
        }
        let parts = (0..self.registers.len()).map(|number| self.first_of(number));
        parts.filter(|part| !part.is_late).for_each(|part| self.load(part, keys));
    }

    /// The first part in a round that has these registers.
    fn first_of(&self, registers: usize) -> &Part {
        self.parts.iter().find(|part| part.registers == registers).expect("each array is some part's")
    }

    /// Finds the rows of the block that begins with row `first`, if that block `exists`, and reads the pages or indices
    /// of the block after it.
    #[track_caller]
    fn find(&self, rows: &BlockRows<'k>, keys: &KeyRows<'k>, first: U32<'k>, exists: Option<V<'k, Pred>>) {
        rows.find(keys, first, exists);
        rows.read_pages(keys, keys.after(first, self.keys));
    }

    /// Begins to load a part of the block whose rows have been found.
    #[track_caller]
    fn load(&self, part: &Part, keys: &[KeyRows<'k>; 2]) {
        self.loads(part, keys).for_each(|load| load());
        self.load_scales(part, keys);
    }

    /// Begins to load the scales of such a part, if rows have their own ones.
    #[track_caller]
    fn load_scales(&self, part: &Part, keys: &[KeyRows<'k>; 2]) {
        let rows = self.rows[part.of].scales(&keys[part.of]).into_iter();
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

    /// The loads of this thread's chunks of a part of the block whose rows have been found.
    #[track_caller]
    fn loads(&self, part: &Part, keys: &[KeyRows<'k>; 2]) -> impl Iterator<Item = impl Fn()> {
        let (b, keys, panel, col) = (self.builder, &keys[part.of], self.panel, self.chunks.col);
        let places = self.places(part.first..part.first + part.cols, part.bytes);
        let rows = self.rows[part.of].addresses(keys).into_iter();
        let chunks = rows.flat_map(move |row| places.clone().map(move |first| (row, first)));
        let registers = self.registers[part.registers].clone();
        chunks.zip(registers).map(move |(((row, is_there), first), to)| {
            let (inside, at) = (keys.cols.saturating_sub(first), (first * keys.bytes) as i32);
            move || {
                to.iter().for_each(|word| word.set(0));
                let is_whole = inside + first % panel >= panel;
                let is_there = if is_whole { is_there } else { is_there & col.lt(inside) };
                if inside > 0 {
                    b.guarded(is_there, || b.load_vector_to(to, row.at(at)));
                }
            }
        })
    }

    /// Converts the blocks of a work tile, from the last to the first. In the first round there is no V to convert yet,
    /// and in the last one no K, unless each round has K and V of one block.
    #[track_caller]
    fn convert_all(
        &self,
        stages: &mut [Producer<'k, 1>],
        mut seen: Option<&mut SeenProducer<'k>>,
        keys: &[KeyRows<'k>; 2],
        work: &WorkTile<'k>,
    ) {
        let b = self.builder;
        let all = (work.kv.end - work.kv.first) * self.keys;
        let lags = self.parts.iter().any(|part| part.is_late);
        let end = if lags { all + self.keys } else { all };
        b.for_each((0, end), self.keys, |done| {
            if let Some(seen) = seen.as_mut() {
                // One of the threads that convert a row says whether it exists.
                let says = self.chunks.col.eq(0);
                seen.store(self.rows[K].found().map(|(key, row)| (says.select(key, u32::MAX), row)));
            }
            let mut found = [false; 2];
            for (number, (&part, stages)) in self.parts.iter().zip(stages).enumerate() {
                let next = self.next(number, keys, [done, all], &mut found);
                let mut convert = || self.convert(stages, [part, next], keys);
                if !lags {
                    convert();
                    continue;
                }
                let is_there = if part.is_late { done.gt(0) } else { done.lt(all) };
                b.if_else_uniform(is_there, convert, || self.load(&next, keys));
            }
        });
    }

    /// The part that is loaded to the registers that part `number` leaves. Before this round, rounds have converted
    /// `done` keys of K, of `all`. `found` says of which tensors this round has found the rows of the next block.
    #[track_caller]
    fn next(
        &self,
        number: usize,
        keys: &[KeyRows<'k>; 2],
        [done, all]: [U32<'k>; 2],
        found: &mut [bool; 2],
    ) -> Part {
        let registers = self.parts[number].registers;
        let behind = self.parts[number + 1..].iter().find(|part| part.registers == registers);
        *behind.unwrap_or_else(|| {
            // In the next round.
            let next = self.first_of(registers);
            let before = if next.is_late { done } else { done + self.keys };
            if !std::mem::replace(&mut found[next.of], true) {
                let keys = &keys[next.of];
                let first = keys.after(keys.begin, before);
                self.find(&self.rows[next.of], keys, first, Some(before.lt(all)));
            }
            next
        })
    }

    /// Converts a part of a block, and begins to load the part that its registers hold next.
    #[track_caller]
    fn convert(&self, stages: &mut Producer<'k, 1>, [part, next]: [Part; 2], keys: &[KeyRows<'k>; 2]) {
        let free = stages.acquire();
        let [tile] = free.tiles();
        let to = tile.elements(self.chunks.row, self.chunks.col);
        let TileShape { rows, cols, .. } = tile.shape();
        let places = (0..rows)
            .step_by(self.chunks.rows as usize)
            .enumerate()
            .flat_map(|(number, row)| self.places(0..cols, part.bytes).map(move |col| (number, row, col)));
        let mut loads = self.loads(&next, keys);
        for (chunk, (number, row, col)) in self.registers[part.registers].iter().zip(places) {
            let words = chunk.map(Var::get);
            if part.bytes == self.elem.bytes() {
                self.builder.store_vector(to.at(row, col), words);
            } else {
                let scale = self.scales[part.registers].get(part.scale_at(number, col));
                let scale = scale.map(|scale| scale.get());
                store_converted(self.builder, (words, scale), self.elem, |second| to.at(row, col + second));
            }
            if let Some(load) = loads.next() {
                load();
            }
        }
        loads.for_each(|load| load());
        self.load_scales(&next, keys);
        free.commit_stored();
    }
}
