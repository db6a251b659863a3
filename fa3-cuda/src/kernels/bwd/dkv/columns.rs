//! Row statistics of a block, in a thread's registers. The query rows are columns of Sᵀ.

use std::cell::RefCell;

use fa3_ir::lang::*;

/// One of the two statistics of a row. Its value is its first index in the four numbers of a pair of rows.
#[derive(Clone, Copy)]
pub(super) enum Stat {
    /// -LSE in base 2.
    Shift = 0,
    /// -D.
    MinusDelta = 2,
}

/// A statistic of the thread's columns, which are two of each eight. The thread loads them all at once, or each pair
/// when it is first used.
pub(super) struct StatColumns<'k> {
    builder: &'k Builder,
    first: U32<'k>,
    loaded: RefCell<Vec<Option<[V<'k, F32>; 2]>>>,
}

impl<'k> StatColumns<'k> {
    /// Loads the statistic `which` of all columns from a block's tile of statistics.
    #[track_caller]
    pub(super) fn load(b: &'k Builder, stats: Tile<'_, 'k>, which: Stat) -> StatColumns<'k> {
        let columns = StatColumns::on_demand(b, stats, which);
        let groups = columns.loaded.borrow().len();
        (0..groups).for_each(|group| _ = columns.pair(group));
        columns
    }

    /// Makes a [`StatColumns`] that loads each pair of columns when it is first used.
    #[track_caller]
    pub(super) fn on_demand(b: &'k Builder, stats: Tile<'_, 'k>, which: Stat) -> StatColumns<'k> {
        let first = stats.element(b.tid() & 3, which as u32);
        // Eight columns are four pairs of query rows, whose statistics take 64 bytes.
        let groups = stats.shape().rows as usize / 4;
        StatColumns { builder: b, first, loaded: RefCell::new(vec![None; groups]) }
    }

    /// A fragment with the statistic in every row, as the accumulator to which a GEMM adds.
    #[track_caller]
    pub(super) fn frag(&self, b: &'k Builder) -> Frag<'k> {
        let mut frag = Frag::zeros(b, 8 * self.loaded.borrow().len() as u32);
        frag.map_in_place(|_, at| self.of(at));
        frag
    }

    /// The statistic of an element's column.
    #[track_caller]
    pub(super) fn of(&self, at: At) -> V<'k, F32> {
        self.pair(at.col as usize / 8)[at.col as usize % 2]
    }

    /// The statistics of the thread's pair in a group of eight columns.
    #[track_caller]
    fn pair(&self, group: usize) -> [V<'k, F32>; 2] {
        let load = || self.builder.load_vector::<F32, 2>(self.first.at(64 * group as i32));
        *self.loaded.borrow_mut()[group].get_or_insert_with(load)
    }
}
