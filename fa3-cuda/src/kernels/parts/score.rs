//! A function of scores: its parameters, and its values in a thread.

use std::cell::RefCell;

use fa3_ir::lang::*;
use fa3_ir::{BufferId, BufferRole, Program};
use fa3_sched::SeqLens;
use fa3_types::{
    Problem, ReadBy, ScoreBlock, ScoreExpr, ScoreForm, ScoreGradients, ScoreInputs, ScoreProduct, ScoreReal,
    ScoreRows, ScoreSlope, ScoreTable, ScoreTile, TableRead,
};

use super::kv_blocks::KvBlock;
use super::visible::{Position, Visible};
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

impl<'k> ScoreParams<InKernel<'k>> {
    /// The extents of a table.
    pub(crate) fn extents(&self, table: usize) -> &[U32<'k>] {
        &self.tables[table].extents
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

/// A thread's two rows, in a sequence.
pub(crate) struct ThreadRows<'k> {
    pub(crate) sequence: U32<'k>,
    pub(crate) lens: SeqLens<U32<'k>>,
    pub(crate) head: Box<dyn Fn(Half) -> U32<'k> + 'k>,
    /// The positions of the rows among the sequence's queries, or among its keys if rows are keys.
    pub(crate) position: Box<dyn Fn(Half) -> Position<'k> + 'k>,
}

/// The function of the scores of a work tile.
pub(crate) struct TileFunction<'k> {
    builder: &'k Builder,
    unit: V<'k, F32>,
    slope: ScoreSlope,
    tile: ScoreTile<V<'k, F32>, Inputs<'k>>,
}

struct Inputs<'k> {
    builder: &'k Builder,
    params: ScoreParams<InKernel<'k>>,
    rows: ThreadRows<'k>,
}

impl<'k> TileFunction<'k> {
    /// Evaluates the nodes that have one value in the tile.
    #[track_caller]
    pub(crate) fn new(
        builder: &'k Builder,
        (expr, params): (&ScoreExpr, &ScoreParams<InKernel<'k>>),
        rows: ThreadRows<'k>,
        are: ScoreRows,
    ) -> TileFunction<'k> {
        let inputs = Inputs { builder, params: params.clone(), rows };
        let tile = ScoreTile::new(expr, inputs, are);
        TileFunction { builder, unit: params.unit, slope: ScoreSlope::One, tile }
    }

    /// Like [`TileFunction::new`], of a function with its derivatives by the score and by elements of tables with
    /// gradients.
    #[track_caller]
    pub(crate) fn with_slopes(
        builder: &'k Builder,
        (expr, params): (&ScoreExpr, &ScoreParams<InKernel<'k>>),
        gradients: ScoreGradients,
        rows: ThreadRows<'k>,
        are: ScoreRows,
    ) -> TileFunction<'k> {
        let inputs = Inputs { builder, params: params.clone(), rows };
        let tile = ScoreTile::with_slopes(expr, gradients, inputs, are);
        TileFunction { builder, unit: params.unit, slope: expr.slope(), tile }
    }

    /// The function in a block whose first column is `first`.
    #[track_caller]
    pub(crate) fn block(&self, first: U32<'k>) -> BlockFunction<'_, 'k> {
        BlockFunction { tile: self, block: RefCell::new(self.tile.block(first + self.builder.frag_col())) }
    }

    /// Replaces the products of a block, or its capped scores, by the function's values.
    #[track_caller]
    pub(crate) fn apply(&self, s: &mut Frag<'k>, block: &KvBlock<'k>) {
        let block = self.block(block.key);
        s.map_in_place(|product, at| block.value(product, at));
    }

    /// Replaces the products of a block, or its capped scores, by what their exponents are computed of. `scale_log2` is
    /// the unit of products, times log2 e.
    #[track_caller]
    pub(crate) fn begin(
        &self,
        s: &mut Frag<'k>,
        block: &KvBlock<'k>,
        scale_log2: V<'k, F32>,
    ) -> Exponents<'_, 'k> {
        let function = self.block(block.key);
        if !self.tile.keeps_products() {
            s.map_in_place(|product, at| {
                let product = ScoreProduct { product, unit: self.unit };
                function.block.borrow_mut().kept(product, at.half as usize, at.col)
            });
        }
        function.block.borrow_mut().prepare_shifts(function.no_score());
        let scale_log2 = self.tile.scale_log2(scale_log2);
        Exponents { function, scale_log2, hides: self.tile.hides(), visible: None }
    }
}

/// The function of the scores of a block.
pub(crate) struct BlockFunction<'t, 'k> {
    tile: &'t TileFunction<'k>,
    block: RefCell<ScoreBlock<'t, V<'k, F32>, Inputs<'k>>>,
}

/// The exponents of 2 of a block: log2 e times the function's values.
pub(crate) struct Exponents<'t, 'k> {
    function: BlockFunction<'t, 'k>,
    /// The factor of what [`TileFunction::begin`] leaves in a fragment.
    scale_log2: V<'k, F32>,
    /// Whether scores may be hidden already.
    hides: bool,
    /// The keys that the thread's rows see, counted from a key, if scores are still to be hidden.
    visible: Option<(&'t VisibleOfRow<'k>, U32<'k>)>,
}

/// The keys that each of the thread's rows may see.
pub(crate) type VisibleOfRow<'k> = dyn Fn(Half) -> Visible<'k> + 'k;

impl<'t, 'k> Exponents<'t, 'k> {
    /// Whether what is added to hidden scores may be infinite or NaN.
    pub(crate) fn change_hidden(&self) -> bool {
        self.function.tile.tile.must_hide_again()
    }

    /// These exponents, of scores of which some may be -inf, because they are hidden.
    pub(crate) fn hidden_if(self, hides: bool) -> Self {
        Exponents { hides: self.hides || hides, ..self }
    }

    /// These exponents, without keys that rows do not see. The thread's first column is key `first`.
    pub(crate) fn seen(self, visible: &'t VisibleOfRow<'k>, first: U32<'k>) -> Self {
        Exponents { visible: Some((visible, first)), ..self }
    }

    /// The exponents plus the rows' `shift`: a function of what [`TileFunction::begin`] left, and of its place. Hidden
    /// scores stay -inf, whatever the function adds to them.
    #[track_caller]
    pub(crate) fn plus(&self, shift: Rows<'k>) -> impl Fn(V<'k, F32>, At) -> V<'k, F32> {
        let Exponents { function, scale_log2, hides, visible } = self;
        let (block, tile) = (&function.block, &function.tile.tile);
        let no_score = function.no_score();
        let firsts =
            Half::BOTH.map(|half| block.borrow_mut().first_shift(no_score, shift[half], half as usize));
        let hides = *hides && tile.must_hide_again();
        let visible = visible.map(|(visible, first)| Half::BOTH.map(|half| visible(half).from(first)));
        move |kept, at| {
            let half = at.half as usize;
            let shift = block.borrow_mut().shift(no_score, firsts[half], half, at.col);
            let exponent = kept.fma(*scale_log2, shift);
            let exponent =
                if hides { kept.eq(f32::NEG_INFINITY).select(f32::NEG_INFINITY, exponent) } else { exponent };
            let Some(visible) = &visible else { return exponent };
            visible[half].hide(exponent, at.col, f32::NEG_INFINITY)
        }
    }
}

/// A factor of derivatives that is not 1.
#[derive(Clone, Copy)]
pub(crate) struct Slope<'k> {
    pub(crate) factor: V<'k, F32>,
    pub(crate) is_finite: bool,
}

impl<'k> Slope<'k> {
    /// A weight times the slope: 0 where the weight is 0.
    #[track_caller]
    pub(crate) fn of(self, weight: V<'k, F32>) -> V<'k, F32> {
        if self.is_finite { weight * self.factor } else { weight.scaled(self.factor) }
    }
}

impl<'k> BlockFunction<'_, 'k> {
    /// A score for terms that read none.
    fn no_score(&self) -> ScoreProduct<V<'k, F32>> {
        ScoreProduct { product: self.tile.unit, unit: self.tile.unit }
    }

    /// The value at `at`, given a product or a capped score.
    #[track_caller]
    pub(crate) fn value(&self, product: V<'k, F32>, at: At) -> V<'k, F32> {
        let product = ScoreProduct { product, unit: self.tile.unit };
        self.block.borrow_mut().at(product, at.half as usize, at.col)
    }

    /// The derivative at `at` by the score, unless it is 1.
    #[track_caller]
    pub(crate) fn slope(&self, product: V<'k, F32>, at: At) -> Option<Slope<'k>> {
        let product = ScoreProduct { product, unit: self.tile.unit };
        let factor = self.block.borrow_mut().slope_at(product, at.half as usize, at.col)?;
        Some(Slope { factor, is_finite: self.tile.slope == ScoreSlope::Finite })
    }

    /// The derivatives at `at` by the elements of [`ScoreExpr::table_reads`], `None` for 1.
    #[track_caller]
    pub(crate) fn slopes_by_reads(&self, product: V<'k, F32>, at: At) -> Vec<Option<Slope<'k>>> {
        let product = ScoreProduct { product, unit: self.tile.unit };
        let slopes = self.block.borrow_mut().slopes_by_reads(product, at.half as usize, at.col).into_iter();
        slopes.map(|(factor, is_finite)| factor.map(|factor| Slope { factor, is_finite })).collect()
    }

    /// Whether the derivative is not 1 everywhere.
    pub(crate) fn has_slope(&self) -> bool {
        self.tile.slope != ScoreSlope::One
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
        let within = at.iter().zip(extents).map(|(&index, &extent)| (within(index, extent), extent));
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

    fn position(&self, query: U32<'k>) -> U32<'k> {
        query + self.rows.lens.k - self.rows.lens.q
    }
}

/// The place along an axis of `extent` elements to which an index leads.
#[track_caller]
fn within<'k>(index: U32<'k>, extent: U32<'k>) -> U32<'k> {
    let index = index.in_register();
    let from_start = index.lt_s32(0).select(index + extent, index);
    from_start.max_s32(0).min_s32(extent - 1)
}

/// The lines of a sequence's and a head's scores that read one element each: rows, keys, or diagonals.
pub(crate) struct ReadLines<'t, 'k> {
    pub(crate) builder: &'k Builder,
    pub(crate) function: (&'t ScoreExpr, &'t ScoreParams<InKernel<'k>>),
    pub(crate) read: &'t TableRead,
    pub(crate) sequence: U32<'k>,
    pub(crate) head: U32<'k>,
    pub(crate) lens: SeqLens<U32<'k>>,
}

impl<'k> ReadLines<'_, 'k> {
    /// The indices in a line, each with the extent of its axis.
    #[track_caller]
    fn indices(&self, line: U32<'k>) -> Vec<(U32<'k>, U32<'k>)> {
        let &ReadLines { builder, function: (expr, params), read, sequence, head, lens } = self;
        let zero = builder.value(0);
        let (row, key) = match read.by {
            ReadBy::Head | ReadBy::Row | ReadBy::QueryAndKey { .. } | ReadBy::Score => (line, zero),
            ReadBy::Key => (zero, line),
            // Diagonals are counted from the last key of the first row.
            ReadBy::Distance => ((line - lens.k).max_s32(0), (lens.k - line).max_s32(0)),
        };
        let (head, position) = (Box::new(move |_| head), Box::new(move |_| Position(row)));
        let rows = ThreadRows { sequence, lens, head, position };
        let indices = expr.indices(read, &Inputs { builder, params: params.clone(), rows }, key);
        indices.into_iter().zip(params.tables[read.table].extents.iter().copied()).collect()
    }

    /// Whether a line of the range reads `element`, which has a place along each axis.
    #[track_caller]
    pub(crate) fn is_read(&self, line: U32<'k>, element: &[U32<'k>]) -> V<'k, Pred> {
        let axes = self.indices(line).into_iter().zip(element).zip(&self.read.steps);
        let axes = axes.filter(|(_, step)| **step != Some(0));
        let is_read = axes.map(|(((index, extent), &at), _)| within(index, extent).eq(at));
        is_read.reduce(|all, axis| all & axis).expect("an index depends on the line")
    }

    /// Whether the sequence and the head read elements with the places of `element` along the axes whose indices depend
    /// on neither query nor key.
    #[track_caller]
    pub(crate) fn of_head(&self, element: &[U32<'k>]) -> Option<V<'k, Pred>> {
        let axes = self.indices(self.builder.value(0)).into_iter().zip(element).zip(&self.read.steps);
        let axes = axes.filter(|(_, step)| **step == Some(0));
        let are_equal = axes.map(|(((index, extent), &at), _)| within(index, extent).eq(at));
        are_equal.reduce(|all, axis| all & axis)
    }

    /// The first and the end of a range of lines, of the first `lines` lines, outside of which no line reads `element`.
    #[track_caller]
    pub(crate) fn range(&self, element: &[U32<'k>], lines: U32<'k>) -> [U32<'k>; 2] {
        let zero = self.builder.value(0);
        let (mut first, mut end) = (zero, lines);
        let axes = self.indices(zero).into_iter().zip(element).zip(&self.read.steps);
        for (((index, extent), &at), step) in axes {
            match step {
                Some(0) => end = within(index, extent).eq(at).select(end, 0),
                Some(1) => {
                    // Neither do indices count from the end, nor do they wrap. The last element has all lines from one.
                    let counts = index.lt(1 << 30);
                    let line = at - index;
                    let behind = at.eq(extent - 1).select(end, end.min((line + 1).max_s32(0)));
                    first = counts.select(first.max(line.max_s32(0)), first);
                    end = counts.select(behind, end);
                }
                _ => {}
            }
        }
        [first, end]
    }
}
