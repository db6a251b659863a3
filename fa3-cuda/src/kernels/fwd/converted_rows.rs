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
//! Zeros are stored for rows beyond the sequence's end, rows of a missing page, and columns that the tensor does not
//! have; nothing is read for them.

use fa3_ir::lang::*;

use super::dequantized::{Chunks, store_converted};
use super::state::Fwd;
use crate::kernels::parts::geometry::WorkTile;
use crate::kernels::parts::key_rows::{BlockRows, KeyRows};
use crate::kernels::parts::tma_pipeline::TmaPipeline;

/// Indices of the tensors.
const K: usize = 0;
const V_: usize = 1;

/// Converts the blocks of every work tile in all warps of the producer. One thread sends work tiles and loads Q.
pub(super) fn run<'k>(fwd: &Fwd<'k>, pipelines: [&[&TmaPipeline<'k>]; 2]) {
    let b = fwd.builder;
    let scheduler = fwd.scheduler.begin();
    let (mut q, mut qv) = (fwd.q.producer(), fwd.qv.as_ref().map(|qv| qv.producer()));
    let pipelines = Converter::order(fwd, pipelines);
    let mut stages: Vec<_> = pipelines.iter().map(|(_, pipeline)| pipeline.stages().producer()).collect();
    let converter = Converter::declare(fwd, &pipelines);
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
            converter.convert_all(&mut stages, &keys, &work);
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
    /// The index of its registers.
    registers: usize,
    /// Whether it is of the block before the block of K that is converted in the same round.
    is_late: bool,
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
    /// The chunks of one part of a block each, row by row.
    registers: Vec<Vec<[Var<'k, B32>; 4]>>,
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
        let parts = pipelines.iter().enumerate().map(|(number, &(of, pipeline))| Part {
            of,
            first: pipeline.first_col(),
            cols: pipeline.cols(),
            registers: if tile.qv { number } else { number % 2 },
            is_late: of == V_ && !tile.qv,
        });
        let parts: Vec<_> = parts.collect();
        let rows: Vec<_> =
            (0..tile.tile_n).step_by(chunks.rows as usize).map(|row| chunks.row + row).collect();
        let count = parts.iter().map(|part| part.registers + 1).max().unwrap_or(0);
        let registers = (0..count).map(|number| {
            let cols = parts.iter().filter(|part| part.registers == number).map(|part| part.cols).max();
            let chunks = rows.len() * (cols.unwrap_or(0) / panel) as usize;
            (0..chunks).map(|_| [(); 4].map(|()| b.var("codes", 0))).collect()
        });
        let in_pages = fwd.params.pages.is_some();
        Converter {
            builder: b,
            elem: fwd.spec.elem,
            keys: tile.tile_n,
            panel,
            chunks,
            registers: registers.collect(),
            parts,
            rows: [K, V_].map(|_| BlockRows::declare(b, rows.clone(), in_pages)),
        }
    }

    /// Begins to load the last block of a work tile.
    #[track_caller]
    fn begin(&self, keys: &[KeyRows<'k>; 2]) {
        let tensors = || self.rows.iter().zip(keys);
        tensors().for_each(|(rows, keys)| rows.read_pages(keys, keys.last));
        for (of, (rows, keys)) in tensors().enumerate() {
            if self.parts.iter().any(|part| part.of == of && part.is_late) {
                rows.find_none();
            } else {
                self.find(rows, keys, keys.last, None);
            }
        }
        let parts = (0..self.registers.len()).map(|number| self.first_of(number));
        parts.filter(|part| !part.is_late).for_each(|part| self.loads(part, keys).for_each(|load| load()));
    }

    /// The first part in a round that has these registers.
    fn first_of(&self, registers: usize) -> &Part {
        self.parts.iter().find(|part| part.registers == registers).expect("each array is some part's")
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
    fn loads(&self, part: &Part, keys: &[KeyRows<'k>; 2]) -> impl Iterator<Item = impl Fn()> {
        let (b, keys, panel, col) = (self.builder, &keys[part.of], self.panel, self.chunks.col);
        let panels = (part.first..part.first + part.cols).step_by(panel as usize);
        let rows = self.rows[part.of].addresses(keys).into_iter();
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

    /// Converts the blocks of a work tile, from the last to the first. In the first round there is no V to convert yet,
    /// and in the last one no K, unless each round has K and V of one block.
    #[track_caller]
    fn convert_all(&self, stages: &mut [Producer<'k, 1>], keys: &[KeyRows<'k>; 2], work: &WorkTile<'k>) {
        let b = self.builder;
        let all = (work.kv.end - work.kv.first) * self.keys;
        let lags = self.parts.iter().any(|part| part.is_late);
        let end = if lags { all + self.keys } else { all };
        b.for_each((0, end), self.keys, |done| {
            let mut found = [false; 2];
            for (number, (&part, stages)) in self.parts.iter().zip(stages).enumerate() {
                let next = self.next(number, keys, [done, all], &mut found);
                let mut convert = || self.convert(stages, [part, next], keys);
                if !lags {
                    convert();
                    continue;
                }
                let is_there = if part.is_late { done.gt(0) } else { done.lt(all) };
                b.if_else_uniform(is_there, convert, || self.loads(&next, keys).for_each(|load| load()));
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
                self.find(&self.rows[next.of], keys, keys.last - before, Some(before.lt(all)));
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
            .flat_map(|row| (0..cols).step_by(self.panel as usize).map(move |col| (row, col)));
        let mut loads = self.loads(&next, keys);
        for (chunk, (row, col)) in self.registers[part.registers].iter().zip(places) {
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
