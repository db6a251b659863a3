//! A function of scores: its parameters, and its values in a thread.

use fa3_ir::lang::*;
use fa3_ir::{BufferId, BufferRole, Program};
use fa3_sched::SeqLens;
use fa3_types::{Problem, ScoreExpr, ScoreForm, ScoreInputs, ScoreProduct, ScoreTable, ScoreTile};

use super::kv_blocks::KvBlock;
use super::visible::Position;
use crate::kernels::params::{Form, Host, InKernel, Pass, Side};

/// The parameters of a function of scores.
#[derive(Clone)]
pub(crate) struct ScoreParams<S: Side> {
    /// The factor that turns a product of Q and K, or a capped score, into a score.
    unit: S::F32,
    numbers: Vec<S::F32>,
    tables: Vec<TableParams<S>>,
}

#[derive(Clone)]
struct TableParams<S: Side> {
    address: S::Pointer,
    extents: Vec<S::U32>,
}

impl<A: Side> ScoreParams<A> {
    /// Passes the parameters in the order of the kernel's signature.
    #[track_caller]
    pub(crate) fn pass<B: Side>(self, by: &mut impl Pass<A, B>) -> ScoreParams<B> {
        let unit = by.f32("score_unit", self.unit);
        let numbers = self.numbers.into_iter().enumerate();
        let numbers = numbers.map(|(number, x)| by.f32(&format!("x{number}"), x)).collect();
        let mut tables = Vec::with_capacity(self.tables.len());
        for (table, TableParams { address, extents }) in self.tables.into_iter().enumerate() {
            let address = by.pointer(&format!("t{table}"), address);
            let extents = extents.into_iter().enumerate();
            let extents = extents.map(|(axis, x)| by.u32(&format!("t{table}_extent{axis}"), x)).collect();
            tables.push(TableParams { address, extents });
        }
        ScoreParams { unit, numbers, tables }
    }
}

impl ScoreParams<Form> {
    /// The parameters of an expression.
    pub(crate) fn form(expr: &ScoreExpr) -> ScoreParams<Form> {
        let table = |axes| TableParams { address: Elem::F32, extents: vec![(); axes] };
        ScoreParams {
            unit: (),
            numbers: vec![(); expr.numbers()],
            tables: expr.axes().into_iter().map(table).collect(),
        }
    }
}

impl ScoreParams<Host> {
    /// The arguments of a launch, if the problem has a function of scores. The program has its tables.
    pub(crate) fn of<K>(problem: &Problem, program: &Program<K>) -> Option<ScoreParams<Host>> {
        let form = problem.score()?;
        let unit = problem.softcap().map_or(problem.softmax_scale().natural(), |cap| cap.bound());
        let tables = ScoreTable::NAMES.into_iter().zip(form.extents()).map(|(name, extents)| TableParams {
            address: program.find(name).expect("the program has the tables"),
            extents: extents.iter().map(|&extent| extent as u32).collect(),
        });
        Some(ScoreParams { unit: unit as f32, numbers: form.numbers().to_vec(), tables: tables.collect() })
    }
}

/// Adds the tables of a function of scores to a program.
pub(crate) fn score_tables<K>(program: &mut Program<K>, form: &ScoreForm) {
    for (name, extents) in ScoreTable::NAMES.into_iter().zip(form.extents()) {
        let dims: Vec<u32> = extents.iter().map(|&extent| extent as u32).collect();
        let table: BufferId = program.buffer(name, Elem::F32, &dims, BufferRole::Input);
        program.align(table, 4);
    }
}

/// The heads and the positions of a thread's two rows, in a sequence.
pub(crate) struct ThreadRows<'k> {
    pub(crate) sequence: U32<'k>,
    pub(crate) lens: SeqLens<U32<'k>>,
    pub(crate) head: Box<dyn Fn(Half) -> U32<'k> + 'k>,
    pub(crate) position: Box<dyn Fn(Half) -> Position<'k> + 'k>,
}

/// The function of the scores of a work tile.
pub(crate) struct TileFunction<'k> {
    unit: V<'k, F32>,
    tile: ScoreTile<V<'k, F32>, Inputs<'k>>,
}

struct Inputs<'k> {
    builder: &'k Builder,
    params: ScoreParams<InKernel<'k>>,
    rows: ThreadRows<'k>,
}

impl<'k> TileFunction<'k> {
    /// Evaluates the nodes that have one value in the tile. `heads_differ` says whether rows may have different heads.
    #[track_caller]
    pub(crate) fn new(
        builder: &'k Builder,
        (expr, params): (&ScoreExpr, &ScoreParams<InKernel<'k>>),
        rows: ThreadRows<'k>,
        heads_differ: bool,
    ) -> TileFunction<'k> {
        let inputs = Inputs { builder, params: params.clone(), rows };
        TileFunction { unit: params.unit, tile: ScoreTile::new(expr, inputs, heads_differ) }
    }

    /// Replaces the products of a block, or its capped scores, by the function's values.
    #[track_caller]
    pub(crate) fn apply(&self, s: &mut Frag<'k>, block: &KvBlock<'k>) {
        let mut block = self.tile.block(block.key + s.builder().frag_col());
        s.map_in_place(|product, at| {
            block.at(ScoreProduct { product, unit: self.unit }, at.half as usize, at.col)
        });
    }
}

impl<'k> ScoreInputs<V<'k, F32>> for Inputs<'k> {
    fn real(&self, value: f32) -> V<'k, F32> {
        self.builder.value(value)
    }

    fn index(&self, value: i32) -> U32<'k> {
        self.builder.value(value)
    }

    fn number(&self, number: usize) -> V<'k, F32> {
        self.params.numbers[number]
    }

    fn element(&self, table: usize, at: &[U32<'k>]) -> V<'k, F32> {
        let TableParams { address, extents } = &self.params.tables[table];
        let within = at.iter().zip(extents).map(|(&index, &extent)| {
            let index = index.in_register();
            let from_start = index.lt_s32(0).select(index + extent, index);
            (from_start.max_s32(0).min_s32(extent - 1), extent)
        });
        let place = within.reduce(|(place, _), (index, extent)| (place.mad(extent, index), extent));
        let (place, _) = place.expect("tables have axes");
        self.builder.load(place.mad_wide(4, *address))
    }

    fn sequence(&self) -> U32<'k> {
        self.rows.sequence
    }

    fn head(&self, row: usize) -> U32<'k> {
        (self.rows.head)(Half::BOTH[row])
    }

    fn row(&self, row: usize) -> U32<'k> {
        (self.rows.position)(Half::BOTH[row]).0
    }

    fn query(&self, row: usize) -> U32<'k> {
        self.row(row) + self.rows.lens.k - self.rows.lens.q
    }
}
