//! Mixed-input products: dequantizing warps convert each block of e4m3 or int8 K and V to the type of Q. They read the
//! stage that TMA has filled, and write a stage that products read. If Q is e4m3, they convert it to the type of O.
//!
//! A warp converts 32 chunks of 16 elements at a time, which are rows of a panel of 16-bit elements. Each thread reads
//! 16 bytes and writes 32. Threads that access shared memory together have rows r and r ⊕ 5. These rows differ in bit
//! 2, so reads hit different banks, and in bit 0, so writes do.
//!
//! The conversion is exact. Where rows have [scales of their own](super::token_scales), which int8 needs, a code times
//! its scale is rounded once.

use fa3_ir::lang::*;
use fa3_sched::forward::CONVERTED_SLOTS;

use super::spec::FwdSpec;
use super::state::Fwd;
use super::token_scales::{Keys, RowScales};

/// Number of warps that convert one tile together.
pub(super) const WARPS: u32 = 4;

/// Number of elements that a thread reads at once.
pub(super) const PART: u32 = 16;

/// Number of chunks that a thread converts at a time, so that their latencies overlap.
const AT_A_TIME: usize = 4;

/// Pipelines of dequantized blocks of K and of V, and of a dequantized tile of Q, if Q is e4m3.
pub(super) struct Dequantized<'k> {
    q: Option<Pipeline<'k, 1>>,
    k: Pipeline<'k, 1>,
    v: Pipeline<'k, 1>,
    elem: Elem,
    /// Number of dequantizing warpgroups: one for K and V together, or one for each.
    warpgroups: u32,
}

impl<'k> Dequantized<'k> {
    /// Declares the pipelines, with elements of the type that products take.
    #[track_caller]
    pub(super) fn declare(b: &'k Builder, spec: &FwdSpec) -> Dequantized<'k> {
        let (tile, elem) = (&spec.tile, spec.elem);
        let pipeline = |name: &str, stages, (rows, cols)| {
            let shape = TileShape::new(elem, rows, cols);
            b.stored_pipeline(name, stages, [WARPS, 4 * tile.consumers], [(name, shape)])
        };
        let keys = |name, cols| pipeline(name, CONVERTED_SLOTS, (tile.tile_n, cols));
        let q = spec.converts_q().then(|| pipeline("q dequantized", 1, (tile.tile_m, tile.head_dim)));
        let (k, v) = (keys("k dequantized", tile.head_dim), keys("v dequantized", tile.head_dim_v));
        Dequantized { q, k, v, elem, warpgroups: tile.converters() }
    }

    /// The pipeline of Q that products read, if Q is dequantized.
    pub(super) fn q(&self) -> Option<&Pipeline<'k, 1>> {
        self.q.as_ref()
    }

    /// The pipelines of K and V that products read.
    pub(super) fn pipelines(&self) -> [&Pipeline<'k, 1>; 2] {
        [&self.k, &self.v]
    }

    /// Runs the dequantizing warps: one warpgroup for all tensors, or one for Q and K and another for V.
    #[track_caller]
    pub(super) fn run(&self, fwd: &Fwd<'k>) {
        let of = |to: &Pipeline<'k, 1>, from: Consumer<'k, 1>, scales: Option<Keys>| {
            let scales = scales.and_then(|of| RowScales::declare(fwd, of));
            Dequantizer { from, to: to.producer(), elem: self.elem, scales }
        };
        let q = || self.q.as_ref().map(|to| of(to, fwd.q.consumer(), None));
        let k = || of(&self.k, fwd.k.consumer(), Some(Keys::K));
        let v = || of(&self.v, fwd.v.consumer(), Some(Keys::V));
        if self.warpgroups == 1 {
            return run(fwd, q(), &mut [k(), v()]);
        }
        let b = fwd.builder;
        let is_of_k = b.warpgroup().eq(0);
        b.if_else_uniform(is_of_k, || run(fwd, q(), &mut [k()]), || run(fwd, None, &mut [v()]));
    }
}

/// Converts Q of each work tile, if `q` is given, and then the tile's blocks of the tensors of `keys` in alternation.
#[track_caller]
fn run<'k>(fwd: &Fwd<'k>, mut q: Option<Dequantizer<'k>>, keys: &mut [Dequantizer<'k>]) {
    let b = fwd.builder;
    fwd.scheduler.consume(|work, _| {
        if let Some(q) = &mut q {
            b.if_uniform(work.kv.first.lt(work.kv.end), || q.next(b, &[]));
        }
        if fwd.spec.token_scales.is_none() {
            b.for_each((0, work.kv.end - work.kv.first), 1, |_| keys.iter_mut().for_each(|x| x.next(b, &[])));
            return;
        }
        b.if_uniform(work.kv.first.lt(work.kv.end), || {
            let of = |x: &Dequantizer<'k>| x.scales.as_ref().and_then(|scales| scales.begin(fwd, &work));
            let rows: Vec<_> = keys.iter().map(of).collect();
            b.for_each((0, work.kv.end - work.kv.first), 1, |done| {
                for (x, rows) in keys.iter_mut().zip(&rows) {
                    let scales = x.scales.as_ref().zip(rows.as_ref());
                    let scales = scales.map_or(Vec::new(), |(scales, rows)| scales.next(rows, done));
                    x.next(b, &scales);
                }
            });
        });
    });
}

/// A warp's conversion of a tensor, tile by tile.
struct Dequantizer<'k> {
    from: Consumer<'k, 1>,
    to: Producer<'k, 1>,
    elem: Elem,
    /// The scales of the tensor's rows, if rows have scales.
    scales: Option<RowScales<'k>>,
}

impl<'k> Dequantizer<'k> {
    /// Converts the next tile. This thread's rows have these scales, or none.
    #[track_caller]
    fn next(&mut self, b: &'k Builder, scales: &[V<'k, F32>]) {
        let loaded = self.from.wait();
        let free = self.to.acquire();
        let [into] = free.tiles();
        convert(b, self.elem, [loaded.tile(), into], scales);
        free.commit_stored();
        // The commit has a fence, which follows this warp's reads of the stage, too.
        loaded.release();
    }
}

/// The division of a tile of converted elements among the threads that convert it.
#[derive(Clone, Copy)]
pub(super) struct Chunks<'k> {
    /// Rows that all warps convert at once, one panel of columns at a time.
    pub(super) rows: u32,
    /// The row and the column of this thread's first chunk of 16 elements.
    pub(super) row: U32<'k>,
    pub(super) col: U32<'k>,
}

impl<'k> Chunks<'k> {
    #[track_caller]
    pub(super) fn new(b: &'k Builder, panel: u32) -> Chunks<'k> {
        let (lane, warp) = (b.lane_id(), (b.tid() >> 5) & (WARPS - 1));
        // Number of chunks in a row of a panel, and number of rows that a warp converts at once.
        let parts = panel / PART;
        let rows_at_once = 32 / parts;
        let (part, row) = match parts {
            4 => (lane & 3, (lane >> 3) ^ (((lane >> 2) & 1) * 5)),
            _ => (lane & (parts - 1), lane >> parts.ilog2()),
        };
        Chunks { rows: WARPS * rows_at_once, row: warp.mad(rows_at_once, row), col: part * PART }
    }
}

/// Converts this warp's rows of a tile, times the scales of this thread's rows, if they have scales.
#[track_caller]
fn convert<'k>(b: &'k Builder, elem: Elem, [from, to]: [Tile<'_, 'k>; 2], scales: &[V<'k, F32>]) {
    let TileShape { rows, cols, elem: codes, .. } = from.shape();
    let panel = to.shape().panel_cols();
    let chunks = Chunks::new(b, panel);
    let (from, to) = [from, to].map(|tile| tile.elements(chunks.row, chunks.col)).into();
    let steps = (0..rows)
        .step_by(chunks.rows as usize)
        .flat_map(|row| (0..cols).step_by(panel as usize).map(move |col| (row, col)));
    for some in steps.collect::<Vec<_>>().chunks(AT_A_TIME) {
        let load = |&(row, col): &(u32, u32)| b.load_vector(from.at(row, col));
        let loaded: Vec<[U32<'k>; 4]> = some.iter().map(load).collect();
        for (words, &(row, col)) in loaded.into_iter().zip(some) {
            let scale = scales.get((row / chunks.rows) as usize).copied();
            store_converted(b, (words, scale), [codes, elem], |second| to.at(row, col + second));
        }
    }
}

/// Converts a chunk of codes to numbers of another type, times its scale if it has one, and stores both halves, 8
/// columns apart, at addresses that `to` gives.
#[track_caller]
pub(super) fn store_converted<'k>(
    b: &'k Builder,
    (chunk, scale): ([U32<'k>; 4], Option<V<'k, F32>>),
    [codes, elem]: [Elem; 2],
    to: impl Fn(u32) -> SharedAddr,
) {
    let [first, second, third, fourth] = chunk.map(|word| match scale {
        Some(scale) if codes == Elem::U8 => of_int8(word, scale, elem),
        _ => of_16_bits(word, scale, elem),
    });
    for (number, [[x, y], [z, w]]) in [[first, second], [third, fourth]].into_iter().enumerate() {
        b.store_vector(to(8 * number as u32), [x, y, z, w]);
    }
}

/// Converts four int8 elements, times a scale, to two pairs of `elem`. Products are rounded once.
#[track_caller]
fn of_int8<'k>(word: U32<'k>, scale: V<'k, F32>, elem: Elem) -> [U32<'k>; 2] {
    // A byte in the lowest bits of 2^23 in binary32 is 2^23 plus the byte, which is the element plus 128.
    let above_128 = word ^ 0x8080_8080_u32;
    let product = |byte: u32| {
        let number = above_128.prmt(0x4B00_0000_u32, 0x7440 + byte).as_f32();
        (number - (8_388_608.0 + 128.0)) * scale
    };
    [0, 2].map(|first| {
        let (lower, upper) = (product(first), product(first + 1));
        if elem == Elem::F16 { upper.f16x2_above(lower) } else { upper.bf16x2_above(lower) }
    })
}

/// Converts four e4m3 elements to two pairs of `elem`. Products by a scale are rounded once.
#[track_caller]
fn of_16_bits<'k>(word: U32<'k>, scale: Option<V<'k, F32>>, elem: Elem) -> [U32<'k>; 2] {
    let (lower, upper) = word.halves();
    [lower, upper].map(|pair| {
        let pair = pair.e4m3x2_to_f16x2();
        if elem == Elem::F16 && scale.is_none() {
            return pair;
        }
        // The conversion to bf16 goes through binary32, because PTX has none from f16. NaN stays NaN.
        let (lower, upper) = pair.halves();
        let [lower, upper] = [lower, upper].map(|half| {
            let number = half.f16_to_f32();
            scale.map_or(number, |scale| number * scale)
        });
        if elem == Elem::F16 { upper.f16x2_above(lower) } else { upper.bf16x2_above(lower) }
    })
}
