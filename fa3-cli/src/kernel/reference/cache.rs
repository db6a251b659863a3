//! Attention over a cache: its page table and other lists, and the expected result.

use fa3_ir::{BufferId, BufferRole, Elem, Kernel, Program};
use fa3_quant::{Rope, RopeTable};
use fa3_ref::plain::{Expected, Mismatch};
use fa3_ref::{AppendedTo, CachedRows, Forward, RotatedRows};
use fa3_types::{AppendRotary, KnownProblem, QueryPositions, SequenceRows, Shape, TensorDesc};
use half::{bf16, f16};
use ndarray::{Array2, Array4};
use rand::SeedableRng;
use rand_xoshiro::Xoshiro256PlusPlus;

use super::{Contents, Wrong, hold};
use crate::args::cache::CacheProblem;
use crate::sim::buffers::{BufferError, random};

/// The base of the rotary frequencies.
const BASE: f64 = 10_000.0;

/// Writes a cache with its lists and tables. Rows in use are random numbers; all other rows are NaN.
pub(super) fn write(
    problem: &CacheProblem,
    program: &Program<Kernel>,
    before: &mut [Vec<u8>],
    seed: u64,
) -> Result<(), BufferError> {
    let lists = Lists::of(problem);
    // K and V get another seed than Q.
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(!seed);
    for name in ["k", "v"] {
        let BufferId(at) = program.find(name).expect("attention has keys and values");
        before[at] = lists.with_nan(problem, &random(&program.buffers[at], &mut rng)?);
    }
    let table = problem.append().and_then(|append| append.rotary()).map(table);
    let of_table = |numbers: fn(&RopeTable) -> &Array2<f32>| {
        table.iter().flat_map(|table| numbers(table).iter().flat_map(|x| x.to_le_bytes())).collect()
    };
    let of_list = |list: &[i32]| list.iter().flat_map(|number| number.to_le_bytes()).collect();
    let page_table: Vec<i32> = lists.page_table.iter().copied().collect();
    let given: [(&str, Vec<u8>); 5] = [
        ("page_table", of_list(&page_table)),
        ("seqused_k", of_list(&lists.seqused)),
        ("leftpad_k", of_list(&lists.leftpad)),
        ("rotary_cos", of_table(RopeTable::cos)),
        ("rotary_sin", of_table(RopeTable::sin)),
    ];
    for (name, bytes) in given {
        // A program reads only the lists and tables that its problem has.
        if let Some(BufferId(at)) = program.find(name).filter(|&BufferId(at)| is_read(program, at)) {
            before[at] = bytes;
        }
    }
    Ok(())
}

/// Whether a buffer is an input.
fn is_read(program: &Program<Kernel>, at: usize) -> bool {
    program.buffers[at].role == BufferRole::Input
}

/// Checks O and LSE by the error law, and appended rows by plain loops.
pub(super) fn judge(
    problem: &CacheProblem,
    before: &Contents<'_>,
    after: &Contents<'_>,
) -> Result<f64, Wrong> {
    let (attention, lists) = (problem.attention(), Lists::of(problem));
    let tensor = |name: &str, shape: Shape| before.tensor(before.find(name), shape);
    let mut q = tensor("q", attention.q().shape);
    let [mut k, mut v] =
        [("k", attention.k()), ("v", attention.v())].map(|(name, desc)| tensor(name, desc.shape));
    let mut seqused = lists.seqused.clone();
    if let Some((append, rows)) = problem.append().and_then(|append| Some((append, append.rows()?))) {
        let [mut k_new, v_new] =
            [("k_new", rows.k_new), ("v_new", rows.v_new)].map(|(name, desc)| tensor(name, desc.shape));
        let rows_new = SequenceRows::dense(append.count(), rows.k_new.shape.seqlen);
        if let Some((rotary, queries)) = append.rotary().zip(append.queries()) {
            let (table, elem) = (table(rotary), before.program.buffers[0].elem);
            let rows_q = SequenceRows::dense(append.count(), queries.q.shape.seqlen);
            lists.rotate(&table, elem, &mut k_new, &rows_new, QueryPositions::Each);
            lists.rotate(&table, elem, &mut q, &rows_q, queries.positions);
        }
        let to = AppendedTo { seqused: &lists.seqused, page_table: Some(lists.page_table.view().into()) };
        to.append(k_new.view(), &rows_new, &mut k.view_mut());
        to.append(v_new.view(), &rows_new, &mut v.view_mut());
        seqused = to.seqused_after(&rows_new, k.dim().1);
        same("k", &after.tensor(after.find("k"), attention.k().shape), &k)?;
        same("v", &after.tensor(after.find("v"), attention.v().shape), &v)?;
    }
    let cached =
        CachedRows { page_table: lists.page_table.view().into(), leftpad: &lists.leftpad, seqused: &seqused };
    let rows_k = cached.rows(k.dim().1).expect("there is a length of each sequence");
    let [k, v] = [k, v].map(|x| cached.gather(x.view(), 0.0));
    let known = gathered(problem, [&k, &v], rows_k);
    let o = after.tensor(after.find("o"), attention.o().shape).mapv(|x| x as f32);
    let lse = after.floats(after.find("lse"), attention.lse_shape());
    let qv = attention.qv().map(|qv| tensor("qv", qv.shape));
    hold(&known, [q, k, v], qv, None, Forward { o, lse })
}

/// `problem` with contiguous keys and values.
fn gathered(problem: &CacheProblem, kv: [&Array4<f64>; 2], rows_k: SequenceRows) -> KnownProblem {
    let attention = problem.attention();
    let [k, v] = kv.map(|x| {
        let (batch, seqlen, heads, head_dim) = x.dim();
        TensorDesc::contiguous(attention.dtype(), Shape { batch, seqlen, heads, head_dim })
    });
    let mut spec = attention.spec();
    (spec.q, spec.k, spec.v) = (TensorDesc::contiguous(spec.q.dtype, spec.q.shape), k, v);
    let rows_q = SequenceRows::dense(attention.batch(), spec.q.shape.seqlen);
    spec.with_rows(rows_q, rows_k).expect("it was valid with its keys in a cache")
}

/// Compares the elements of a cache after an append; NaN equals NaN.
fn same(array: &'static str, given: &Array4<f64>, expected: &Array4<f64>) -> Result<(), Wrong> {
    let differ = |(x, y): (&f64, &f64)| x != y && !(x.is_nan() && y.is_nan());
    let Some(index) = given.iter().zip(expected).position(differ) else { return Ok(()) };
    let number = |x: &Array4<f64>| x.iter().nth(index).copied().unwrap_or(f64::NAN);
    let mismatch = Mismatch { index, given: number(given), expected: Expected::exactly(number(expected)) };
    Err(Wrong::Element { array, mismatch })
}

/// The cos and sin tables of a rotation.
fn table(rotary: AppendRotary) -> RopeTable {
    let rope = Rope::new(rotary.style, rotary.rotary_dim, BASE).expect("a valid problem rotates whole pairs");
    rope.table(rotary.table_rows)
}

/// The lists that a kernel reads to find the rows of a cache.
struct Lists {
    page_table: Array2<i32>,
    seqused: Vec<i32>,
    leftpad: Vec<i32>,
}

impl Lists {
    fn of(problem: &CacheProblem) -> Lists {
        let CacheProblem { layout, leftpad, .. } = problem;
        // Without pages, sequence i is entry i.
        let own = || Array2::from_shape_fn((layout.count(), 1), |(entry, _)| entry as i32);
        let list = |rows: &[usize]| rows.iter().map(|&rows| rows as i32).collect();
        Lists {
            page_table: layout.page_table(0).unwrap_or_else(own),
            seqused: list(&layout.seqlens),
            leftpad: list(leftpad.as_deref().unwrap_or_default()),
        }
    }

    /// The bytes of K or V, with NaN in all rows that are not in use.
    fn with_nan(&self, problem: &CacheProblem, bytes: &[u8]) -> Vec<u8> {
        let [entries, rows] = problem.layout.extent();
        let row_bytes = bytes.len() / (entries * rows).max(1);
        let mut with_nan = vec![0xFF; bytes.len()];
        for (sequence, &used) in self.seqused.iter().enumerate() {
            let first = self.leftpad.get(sequence).copied().unwrap_or(0);
            for at in first as usize..used as usize {
                let entry = self.page_table[[sequence, at / rows]] as usize;
                let place = (entry * rows + at % rows) * row_bytes;
                with_nan[place..][..row_bytes].copy_from_slice(&bytes[place..][..row_bytes]);
            }
        }
        with_nan
    }

    /// Rotates rows of 16-bit numbers at positions after the rows in use.
    fn rotate(
        &self,
        table: &RopeTable,
        elem: Elem,
        x: &mut Array4<f64>,
        rows: &SequenceRows,
        positions: QueryPositions,
    ) {
        let (cos, sin) = (table.cos().view(), table.sin().view());
        let rotation = RotatedRows { style: table.style(), cos, sin, base: &self.seqused, positions };
        let round =
            |x: f32| if elem == Elem::F16 { f16::from_f32(x).to_f64() } else { bf16::from_f32(x).to_f64() };
        rotation.rotate(&mut x.view_mut(), rows, |x| x as f32, round);
    }
}
