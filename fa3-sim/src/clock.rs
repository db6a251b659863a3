//! Vector clocks (happens-before): the events that come before a warp's next accesses, and before the asynchronous
//! operations that it issues.
//!
//! Every agent of a cluster has a component. It counts the releases of a warp, the phases of an mbarrier, the groups of
//! a warp's products, or the groups of a thread's bulk copies. All copies that complete in a phase of an mbarrier
//! become visible with the phase. The [`Epoch`] of every access is recorded. An access happens before the events of a
//! clock that has reached the access's epoch.

use std::rc::Rc;

/// An agent's cluster, its component there, and that component's value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Epoch {
    pub(crate) cluster: u32,
    pub(crate) component: u16,
    pub(crate) value: u32,
}

impl Epoch {
    /// The work of the previous grid, which clocks include after `griddepcontrol.wait`.
    pub(crate) const PREDECESSOR: Epoch = Epoch { cluster: u32::MAX, component: 0, value: 1 };
}

/// The progress of each agent that happens before an event. Progress of another cluster is known from acquiring what
/// that cluster released; such entries are few, and clocks share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Clock {
    own: Vec<u32>,
    others: Option<Rc<Others>>,
}

/// Progress by cluster.
pub(crate) type Others = Vec<(u32, Vec<u32>)>;

impl Clock {
    pub(crate) fn get(&self, component: u16) -> u32 {
        self.own.get(usize::from(component)).copied().unwrap_or(0)
    }

    pub(crate) fn raise(&mut self, component: u16, value: u32) {
        let index = usize::from(component);
        if self.own.len() <= index {
            self.own.resize(index + 1, 0);
        }
        self.own[index] = self.own[index].max(value);
    }

    /// Limits a component to `value`.
    pub(crate) fn lower(&mut self, component: u16, value: u32) {
        if let Some(known) = self.own.get_mut(usize::from(component)) {
            *known = value.min(*known);
        }
    }

    /// Whether events at `epoch` happen before the events of this clock's owner, in `cluster`.
    pub(crate) fn knows(&self, cluster: u32, epoch: Epoch) -> bool {
        if epoch.cluster == cluster {
            return self.get(epoch.component) >= epoch.value;
        }
        let Some(others) = &self.others else { return false };
        let Ok(index) = others.binary_search_by_key(&epoch.cluster, |(cluster, _)| *cluster) else {
            return false;
        };
        others[index].1.get(usize::from(epoch.component)).is_some_and(|&value| value >= epoch.value)
    }

    /// Joins another clock of the same cluster into this one.
    pub(crate) fn join(&mut self, other: &Clock) {
        raise_all(&mut self.own, &other.own);
        match (&mut self.others, &other.others) {
            (_, None) => {}
            (mine @ None, Some(theirs)) => *mine = Some(Rc::clone(theirs)),
            (Some(mine), Some(theirs)) if Rc::ptr_eq(mine, theirs) => {}
            (Some(mine), Some(theirs)) => join_others(Rc::make_mut(mine), theirs),
        }
    }

    /// Joins this clock into `to`, for other clusters.
    fn export(&self, cluster: u32, to: &mut Others) {
        join_one(to, cluster, &self.own);
        if let Some(others) = &self.others {
            join_others(to, others);
        }
    }

    /// Joins into this clock what another cluster exported.
    fn import(&mut self, cluster: u32, from: &Others) {
        for (other, known) in from {
            if *other == cluster {
                raise_all(&mut self.own, known);
            } else {
                join_one(Rc::make_mut(self.others.get_or_insert_default()), *other, known);
            }
        }
    }
}

fn raise_all(mine: &mut Vec<u32>, theirs: &[u32]) {
    if mine.len() < theirs.len() {
        mine.resize(theirs.len(), 0);
    }
    for (mine, theirs) in mine.iter_mut().zip(theirs) {
        *mine = (*mine).max(*theirs);
    }
}

fn join_others(mine: &mut Others, theirs: &Others) {
    theirs.iter().for_each(|(cluster, known)| join_one(mine, *cluster, known));
}

fn join_one(mine: &mut Others, cluster: u32, known: &[u32]) {
    match mine.binary_search_by_key(&cluster, |(cluster, _)| *cluster) {
        Ok(index) => raise_all(&mut mine[index].1, known),
        Err(index) => mine.insert(index, (cluster, known.to_vec())),
    }
}

/// The memory that a fence or an asynchronous access concerns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Space {
    Shared,
    Global,
}

/// The events that a warp's next accesses come after, by proxy.
#[derive(Clone, Debug, Default)]
pub(crate) struct Bundle {
    /// Events before the warp's generic accesses.
    pub(crate) generic: Clock,
    /// Events before accesses to shared memory by asynchronous operations that the warp issues.
    pub(crate) shared: Clock,
    /// Events before accesses to global memory by asynchronous operations that the warp issues.
    pub(crate) global: Clock,
}

impl Bundle {
    fn clocks(&mut self) -> [&mut Clock; 3] {
        [&mut self.generic, &mut self.shared, &mut self.global]
    }

    pub(crate) fn join(&mut self, other: &Bundle) {
        self.generic.join(&other.generic);
        self.shared.join(&other.shared);
        self.global.join(&other.global);
    }

    /// Adds a completed asynchronous operation, whose completion is a fence between the proxies.
    pub(crate) fn complete(&mut self, component: u16, value: u32) {
        self.clocks().into_iter().for_each(|clock| clock.raise(component, value));
    }

    /// Orders the proxies in one space.
    pub(crate) fn fence(&mut self, space: Space) {
        let asynchronous = match space {
            Space::Shared => &mut self.shared,
            Space::Global => &mut self.global,
        };
        asynchronous.join(&self.generic);
        self.generic.join(asynchronous);
    }

    /// Adds the work of the previous grid.
    pub(crate) fn after_predecessor(&mut self) {
        let known = vec![(Epoch::PREDECESSOR.cluster, vec![Epoch::PREDECESSOR.value])];
        self.clocks().into_iter().for_each(|clock| clock.import(0, &known));
    }

    /// Limits a component to `value`, in the clocks of all proxies.
    pub(crate) fn lower(&mut self, component: u16, value: u32) {
        self.clocks().into_iter().for_each(|clock| clock.lower(component, value));
    }

    pub(crate) fn async_clock(&self, space: Space) -> &Clock {
        match space {
            Space::Shared => &self.shared,
            Space::Global => &self.global,
        }
    }
}

/// A bundle that leaves its cluster: the clocks that a release in global memory carries.
#[derive(Clone, Debug, Default)]
pub(crate) struct Exported([Others; 3]);

impl Exported {
    pub(crate) fn add(&mut self, cluster: u32, bundle: &Bundle) {
        let Bundle { generic, shared, global } = bundle;
        [generic, shared, global]
            .into_iter()
            .zip(&mut self.0)
            .for_each(|(from, to)| from.export(cluster, to));
    }

    pub(crate) fn join(&mut self, other: &Exported) {
        self.0.iter_mut().zip(&other.0).for_each(|(mine, theirs)| join_others(mine, theirs));
    }

    pub(crate) fn acquire(&self, cluster: u32, bundle: &mut Bundle) {
        bundle.clocks().into_iter().zip(&self.0).for_each(|(to, from)| to.import(cluster, from));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn knowledge_travels_between_clusters() {
        let written = Epoch { cluster: 3, component: 2, value: 5 };
        let mut writer = Bundle::default();
        writer.generic.raise(2, 5);
        let mut flag = Exported::default();
        flag.add(3, &writer);
        let mut reader = Bundle::default();
        assert!(!reader.generic.knows(7, written));
        flag.acquire(7, &mut reader);
        assert!(reader.generic.knows(7, written));
        assert!(!reader.shared.knows(7, written), "a release orders no proxies");
        reader.fence(Space::Shared);
        assert!(reader.shared.knows(7, written) && !reader.global.knows(7, written));
    }
}
