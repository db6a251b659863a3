//! The builder's watch over a kernel under construction: stages that must be given back, products in flight.

use std::collections::BTreeSet;
use std::ops::Range;

use crate::{Fault, Source, VerifyError};

/// A block under construction. Blocks are numbered as they are begun.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct BlockId(u32);

/// Something that must be done in the same block in which this duty was noted.
#[derive(Debug)]
struct Duty {
    what: String,
    source: Source,
    block: BlockId,
    done: bool,
}

/// The number of a [`Duty`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DutyId(usize);

/// The number of a group of products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GroupId(usize);

/// A group of products.
#[derive(Debug)]
struct Group {
    source: Source,
    /// The block that commits the group.
    block: BlockId,
    /// Whether some wait finishes the group.
    waited: bool,
}

/// Groups of the same age that may be unfinished. `wait_group` counts them as one group if they are `certain`, and does
/// not count them if a branch or a loop may have skipped them.
#[derive(Clone, Debug)]
struct Open {
    groups: Vec<GroupId>,
    certain: bool,
}

/// A pipeline, and the warps that release its stages.
#[derive(Debug)]
struct Emptied {
    pipeline: String,
    /// Number of warps for which the pipeline was declared.
    declared: u32,
    warps: BTreeSet<u32>,
    /// The source line where one of these warps releases a stage.
    source: Option<Source>,
    /// Whether some of these warps may release only some stages, or none.
    partly: bool,
}

/// The number of a pipeline among [`Watch::pipelines`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PipelineId(usize);

/// The watch over one kernel under construction.
#[derive(Debug, Default)]
pub(crate) struct Watch {
    duties: Vec<Duty>,
    groups: Vec<Group>,
    pipelines: Vec<Emptied>,
    /// Number of branches around the statement that is built next.
    branches: u32,
    /// Groups that may be unfinished, oldest first.
    open: Vec<Open>,
    block: BlockId,
    /// The number of the last block.
    blocks: u32,
    misuse: Vec<VerifyError>,
}

/// State of the enclosing block, which [`Watch::enter`] hands to [`Watch::leave`].
pub(crate) struct Outer {
    block: BlockId,
    open: Vec<Open>,
}

impl Watch {
    /// Notes a mistake, for the verifier to report.
    pub(crate) fn fault(&mut self, fault: Fault, source: Source) {
        self.misuse.push(VerifyError { fault, source: Some(source) });
    }

    /// All mistakes that were noted, once nothing more will be built.
    pub(crate) fn finish(mut self) -> Vec<VerifyError> {
        for Duty { what, source, .. } in self.duties.into_iter().filter(|duty| !duty.done) {
            self.misuse.push(VerifyError { fault: Fault::NotDone { what }, source: Some(source) });
        }
        for Group { source, .. } in self.groups.into_iter().filter(|group| !group.waited) {
            self.misuse.push(VerifyError { fault: Fault::NeverWaited, source: Some(source) });
        }
        for Emptied { pipeline, declared, warps, source, partly } in self.pipelines {
            let given = warps.len() as u32;
            if !partly && source.is_some() && given != declared {
                self.misuse
                    .push(VerifyError { fault: Fault::PipelineWarps { pipeline, declared, given }, source });
            }
        }
        self.misuse
    }
}

/// Notes on pipelines.
impl Watch {
    /// Notes a declared pipeline, whose stages `declared` warps release.
    pub(crate) fn pipeline(&mut self, pipeline: String, declared: u32) -> PipelineId {
        let warps = BTreeSet::new();
        self.pipelines.push(Emptied { pipeline, declared, warps, source: None, partly: false });
        PipelineId(self.pipelines.len() - 1)
    }

    /// Notes that these warps release a stage of the pipeline.
    pub(crate) fn release(&mut self, PipelineId(pipeline): PipelineId, warps: Range<u32>, source: Source) {
        let in_branch = self.branches > 0;
        // The list has no pipeline of another kernel.
        let Some(pipeline) = self.pipelines.get_mut(pipeline) else { return };
        pipeline.warps.extend(warps);
        pipeline.source.get_or_insert(source);
        pipeline.partly |= in_branch;
    }

    /// Notes that each stage of the pipeline is released by only some of its warps.
    pub(crate) fn divide(&mut self, PipelineId(pipeline): PipelineId) {
        if let Some(pipeline) = self.pipelines.get_mut(pipeline) {
            pipeline.partly = true;
        }
    }

    pub(crate) fn begin_branch(&mut self) {
        self.branches += 1;
    }

    pub(crate) fn end_branch(&mut self) {
        self.branches -= 1;
    }
}

/// Entry and exit of blocks.
impl Watch {
    /// Begins the block of a branch or a loop.
    pub(crate) fn enter(&mut self) -> Outer {
        let outer = Outer { block: self.block, open: self.open.clone() };
        self.blocks += 1;
        self.block = BlockId(self.blocks);
        outer
    }

    /// Ends a branch's or a loop's block and goes back to `outer`. As the block may not have run, groups that it waited
    /// for may still be open, and groups that it left open may not exist.
    pub(crate) fn leave(&mut self, outer: Outer) {
        let inside = std::mem::replace(&mut self.open, outer.open);
        let known: Vec<GroupId> = self.open.iter().flat_map(|open| open.groups.clone()).collect();
        let groups = inside.into_iter().flat_map(|open| open.groups);
        let left: Vec<GroupId> = groups.filter(|group| !known.contains(group)).collect();
        if !left.is_empty() {
            self.open.push(Open { groups: left, certain: false });
        }
        self.block = outer.block;
    }
}

/// Notes on duties.
impl Watch {
    /// Notes that `what` (such as `stage of pipeline kv is released`) must happen in this block.
    pub(crate) fn due(&mut self, what: String, source: Source) -> DutyId {
        self.duties.push(Duty { what, source, block: self.block, done: false });
        DutyId(self.duties.len() - 1)
    }

    /// Marks a duty as done in the current block.
    pub(crate) fn done(&mut self, DutyId(duty): DutyId, source: Source) {
        let block = self.block;
        // The list has no duty of another kernel.
        let Some(duty) = self.duties.get_mut(duty) else {
            let what = "a token of another kernel is given back".to_owned();
            return self.fault(Fault::DoneElsewhere { what }, source);
        };
        duty.done = true;
        if duty.block != block {
            let what = duty.what.clone();
            self.fault(Fault::DoneElsewhere { what }, source);
        }
    }

    /// Notes a mistake if `what`, a part of the duty, happens outside the duty's block, because a branch may leave it
    /// out and a loop may repeat it.
    pub(crate) fn part(&mut self, DutyId(duty): DutyId, what: String, source: Source) {
        if self.duties.get(duty).is_none_or(|duty| duty.block != self.block) {
            self.fault(Fault::DoneElsewhere { what }, source);
        }
    }
}

/// Notes on products, and the waits that they need.
impl Watch {
    /// Notes that a group of products has been committed.
    pub(crate) fn commit(&mut self, source: Source) -> GroupId {
        let group = GroupId(self.groups.len());
        self.groups.push(Group { source, block: self.block, waited: false });
        self.open.push(Open { groups: vec![group], certain: true });
        group
    }

    /// The operand of the `wait_group` that finishes `group`: the number of younger groups that may stay unfinished.
    /// `None` if another wait has finished it.
    pub(crate) fn wait(&mut self, group: GroupId, source: Source) -> Option<u32> {
        let index = self.open.iter().position(|open| open.groups.contains(&group))?;
        if self.is_outer(group) {
            let what = "a product is waited for".to_owned();
            self.fault(Fault::DoneElsewhere { what }, source);
        }
        self.finished(index + 1);
        Some(self.pending())
    }

    /// The operand of the `wait_group` that finishes everything older than `group`, the last of its chain so far.
    pub(crate) fn wait_older(&mut self, group: GroupId) -> u32 {
        let index = self.open.iter().position(|open| open.groups.contains(&group));
        self.finished(index.unwrap_or(self.open.len()));
        if !self.is_outer(group) {
            return self.pending();
        }
        // If the loop has added to the chain, products of outer blocks are older than the chain's last product.
        let own = |open: &&Open| open.groups.iter().all(|&group| !self.is_outer(group));
        let own = self.open.iter().filter(own).filter(|open| open.certain).count() as u32;
        self.pending().min(own + 1)
    }

    /// Whether `group` was committed in a block around this one, or in one that has ended; this block may run without
    /// it, or more than once after it.
    fn is_outer(&self, GroupId(group): GroupId) -> bool {
        self.groups[group].block.0 < self.block.0
    }

    /// Marks the `count` oldest entries as finished.
    fn finished(&mut self, count: usize) {
        for group in self.open.drain(..count).flat_map(|open| open.groups) {
            self.groups[group.0].waited = true;
        }
    }

    /// Number of groups that may stay unfinished. The hardware counts to 7; waiting for more groups than necessary is
    /// no mistake.
    fn pending(&self) -> u32 {
        (self.open.iter().filter(|open| open.certain).count() as u32).min(7)
    }
}

#[cfg(test)]
mod tests {
    use std::panic::Location;

    use super::*;

    fn commit(watch: &mut Watch) -> GroupId {
        watch.commit(Location::caller())
    }

    fn wait(watch: &mut Watch, group: GroupId) -> Option<u32> {
        watch.wait(group, Location::caller())
    }

    #[test]
    fn a_wait_leaves_younger_groups_in_flight() {
        let mut watch = Watch::default();
        let [s, pv] = [commit(&mut watch), commit(&mut watch)];
        assert_eq!(wait(&mut watch, s), Some(1));
        assert_eq!(wait(&mut watch, pv), Some(0));
    }

    #[test]
    fn a_wait_for_the_younger_finishes_the_older() {
        let mut watch = Watch::default();
        let [s, pv] = [commit(&mut watch), commit(&mut watch)];
        assert_eq!(wait(&mut watch, pv), Some(0));
        assert_eq!(wait(&mut watch, s), None);
        assert_eq!(watch.finish(), []);
    }

    /// A branch may be skipped, so that groups committed in it do not count.
    #[test]
    fn groups_of_a_branch_do_not_count() {
        let mut watch = Watch::default();
        let before = commit(&mut watch);
        let outer = watch.enter();
        let inside = commit(&mut watch);
        watch.leave(outer);
        let after = commit(&mut watch);
        assert_eq!(wait(&mut watch, before), Some(1), "only `after` is certain to be younger");
        assert_eq!(wait(&mut watch, inside), Some(1));
        assert_eq!(wait(&mut watch, after), Some(0));
    }

    /// A loop may run zero times: a wait in it does not count, and its results must not be used after it.
    #[test]
    fn waits_in_a_loop_do_not_count() {
        let mut watch = Watch::default();
        let group = commit(&mut watch);
        let outer = watch.enter();
        assert_eq!(wait(&mut watch, group), Some(0));
        watch.leave(outer);
        assert_eq!(wait(&mut watch, group), Some(0));
        let what = "a product is waited for".to_owned();
        let faults: Vec<Fault> = watch.finish().into_iter().map(|error| error.fault).collect();
        assert_eq!(faults, [Fault::DoneElsewhere { what }]);
    }

    /// A loop waits for all but the last product of a chain, and then adds a product to the chain. In the first round,
    /// both products from before the loop may stay in flight. In later rounds the chain's last product is the youngest,
    /// and only that product may stay.
    #[test]
    fn all_but_the_last_of_a_loop() {
        let mut watch = Watch::default();
        let [last, _other] = [commit(&mut watch), commit(&mut watch)];
        let outer = watch.enter();
        assert_eq!(watch.wait_older(last), 1);
        commit(&mut watch);
        assert_eq!(watch.wait_older(last), 2, "what this round has committed is younger in every round");
        watch.leave(outer);
    }

    #[test]
    fn all_but_the_last() {
        let mut watch = Watch::default();
        let [_, last] = [commit(&mut watch), commit(&mut watch)];
        assert_eq!(watch.wait_older(last), 1);
        assert_eq!(wait(&mut watch, last), Some(0));
    }

    #[test]
    fn what_is_due_is_done_in_its_block() {
        let mut watch = Watch::default();
        let here = Location::caller();
        let [stage, other] = ["stage", "other"].map(|what| watch.due(what.to_owned(), here));
        watch.done(stage, here);
        let outer = watch.enter();
        watch.done(other, here);
        watch.leave(outer);
        _ = watch.due("forgotten".to_owned(), here);
        let faults: Vec<Fault> = watch.finish().into_iter().map(|error| error.fault).collect();
        let elsewhere = Fault::DoneElsewhere { what: "other".to_owned() };
        assert_eq!(faults, [elsewhere, Fault::NotDone { what: "forgotten".to_owned() }]);
    }
}
