//! Cases whose O and LSE have the bits of another case.

use std::ops::Range;

use fa3_ir::{Kernel, Program};
use fa3_ref::Forward;
use fa3_types::SequenceRows;
use ndarray::Axis;

use super::{Case, Laid};
use crate::Trial;
use crate::fwd::outputs;
use crate::memory::Memory;

/// The buffers after a run, or its error.
type Ran = Result<Vec<Vec<u8>>, String>;

impl Case {
    /// Computes the case by `run`, and then each sequence as a batch of its own on a device of `sms` SMs. The bits of O
    /// and LSE must match.
    ///
    /// # Errors
    /// The error of `run`, or the sequence that differs.
    ///
    /// # Panics
    /// If the planner refuses the case.
    pub fn check_alone(
        &self,
        sms: u32,
        run: impl Fn(&Program<Kernel>, &[Vec<u8>]) -> Ran,
    ) -> Result<(), String> {
        self.check_chunks(usize::MAX, sms, run)
    }

    /// Like [`Case::check_alone`], but each sequence's rows are computed in chunks of at most `most` rows, with the
    /// keys that precede a chunk's end.
    ///
    /// # Errors
    /// The error of `run`, or the rows that differ.
    ///
    /// # Panics
    /// If the planner refuses the case, or rows see keys behind their own and a chunk is not the whole sequence.
    pub fn check_chunks(
        &self,
        most: usize,
        sms: u32,
        run: impl Fn(&Program<Kernel>, &[Vec<u8>]) -> Ran,
    ) -> Result<(), String> {
        let answer = |case: &Case, laid: Laid| case.answer(laid, &run);
        let together = answer(self, self.laid())?;
        let all = self.laid();
        for index in 0..self.lengths.len() {
            let used = all.rows_q.len(index);
            let rows = if used <= most { all.rows_q.capacity(index) } else { used };
            assert!(used <= most || self.mask.reach().1 == Some(0), "keys behind a chunk's last row");
            let most = if used <= most { rows.max(1) } else { most };
            let chunks = (0..rows.max(1)).step_by(most);
            let chunks = chunks.map(|first| first..rows.min(first + most));
            for rows in chunks {
                let (case, laid) = self.alone(&all, (index, rows.clone()), sms);
                let (rows_q, alone) = (laid.rows_q.clone(), answer(&case, laid)?);
                if bits(&all.rows_q, (index, rows.clone()), &together)
                    != bits(&rows_q, (0, 0..rows.len()), &alone)
                {
                    return Err(format!(
                        "rows {rows:?} of sequence {index} of {self:?} have other bits alone, on {sms} SMs"
                    ));
                }
            }
        }
        Ok(())
    }

    /// Computes this case and another case with its problem. The bits of O and LSE must match.
    ///
    /// # Errors
    /// The error of `run`, or that bits differ.
    ///
    /// # Panics
    /// If the planner refuses a case.
    pub fn check_against(
        &self,
        other: &Case,
        run: impl Fn(&Program<Kernel>, &[Vec<u8>]) -> Ran,
    ) -> Result<(), String> {
        let rows = self.laid().rows_q;
        let [one, other] = [self, other].map(|case| case.answer(case.laid(), &run));
        let (one, other) = (one?, other?);
        let of = |answer, index| bits(&rows, (index, 0..rows.capacity(index)), answer);
        match (0..rows.count()).find(|&index| of(&one, index) != of(&other, index)) {
            Some(index) => Err(format!("sequence {index} of {self:?} has other bits")),
            None => Ok(()),
        }
    }

    /// O and LSE of this case, laid out.
    fn answer(
        &self,
        laid: Laid,
        run: &impl Fn(&Program<Kernel>, &[Vec<u8>]) -> Ran,
    ) -> Result<Forward<f32>, String> {
        let problem = laid.sequences.problem.clone();
        let Trial { program, before, .. } = self.trial_of(laid);
        let after = run(&program, &before)?;
        let memory = Memory::new(&program, &after);
        memory.check_rest(&before).map(|()| outputs(&problem, memory))
    }
}

/// Bits of O and LSE of some rows of a sequence.
fn bits(rows: &SequenceRows, (index, of_sequence): (usize, Range<usize>), answer: &Forward<f32>) -> Vec<u32> {
    let (batch, first) = rows.start(index);
    let of_index = first + of_sequence.start..first + of_sequence.end;
    let o = answer.o.index_axis(Axis(0), batch).slice_axis_move(Axis(0), of_index.clone().into());
    let lse = answer.lse.index_axis(Axis(0), batch).slice_axis_move(Axis(1), of_index.into());
    o.iter().chain(&lse).map(|x| x.to_bits()).collect()
}
