//! Order between the lanes of a warp.
//!
//! A warp's lanes do not run in lockstep: since Volta each lane may run ahead of the others. `bar.warp.sync` orders the
//! accesses of all lanes before it with all lanes' accesses after it, and so does any wider barrier. An mbarrier orders
//! the accesses that lanes made before they arrived with the accesses of lanes that have waited for that phase.
//! Shuffles and votes exchange registers and order no memory accesses, and neither do warpgroup instructions.

/// The lanes of a warp.
const LANES: usize = 32;

/// For each lane, the accesses of the other lanes that come before its next access.
#[derive(Debug, Default)]
pub(crate) struct LaneOrder {
    /// For all lanes, accesses in the log before this index are ordered.
    all: u32,
    /// For lane a, the accesses of lane b before index `pairs[a][b]` of the log are ordered, because lane a has waited
    /// for an arrival of lane b. The index is at least `all`.
    pairs: Option<Box<[[u32; LANES]; LANES]>>,
    arrivals: Vec<Arrival>,
}

/// An arrival of some lanes at an mbarrier.
#[derive(Debug)]
struct Arrival {
    /// The component that counts the mbarrier's phases.
    component: u16,
    /// The phase that the lanes arrive at.
    phase: u32,
    lanes: u32,
    /// The first index of the log whose access does not come before the arrival.
    event: u32,
}

impl LaneOrder {
    /// Orders everything that all lanes did before index `event` of the log before anything that a lane does now.
    pub(crate) fn sync(&mut self, event: u32) {
        if event > self.all {
            self.all = event;
            self.pairs = None;
            self.arrivals.retain(|arrival| arrival.event > event);
        }
    }

    /// Notes that a lane arrives at a phase, after everything that it did before index `event` of the log.
    pub(crate) fn arrive(&mut self, lane: usize, component: u16, phase: u32, event: u32) {
        let lanes = 1 << lane;
        let same = |arrival: &&mut Arrival| {
            (arrival.component, arrival.phase, arrival.event) == (component, phase, event)
        };
        if let Some(known) = self.arrivals.iter_mut().find(same) {
            known.lanes |= lanes;
            return;
        }
        // Lanes that wait now wait for this phase or the previous one.
        self.arrivals.retain(|arrival| arrival.component != component || arrival.phase + 1 >= phase);
        self.arrivals.push(Arrival { component, phase, lanes, event });
    }

    /// Notes that lanes have seen `complete` phases complete.
    pub(crate) fn wait(&mut self, lanes: u32, component: u16, complete: u32) {
        let all = self.all;
        for arrival in &self.arrivals {
            if arrival.component != component || arrival.phase >= complete {
                continue;
            }
            let pairs = self.pairs.get_or_insert_with(|| Box::new([[all; LANES]; LANES]));
            for lane in bits(lanes) {
                for other in bits(arrival.lanes) {
                    pairs[lane][other] = pairs[lane][other].max(arrival.event);
                }
            }
        }
    }

    /// Whether everything that lanes did at index `event` of the log comes before anything that a lane does now.
    pub(crate) fn is_past(&self, event: u32) -> bool {
        event < self.all
    }

    /// Whether the access of lane `other` at index `event` of the log comes before what `lane` does now. If several
    /// lanes made the access, and it is not known which, this must hold for all of them.
    pub(crate) fn orders(&self, other: Lane, event: u32, lane: Lane) -> bool {
        match (self.is_past(event), &self.pairs, other.number(), lane.number()) {
            (true, ..) => true,
            (false, _, Some(other), Some(lane)) if other == lane => true,
            (false, Some(pairs), Some(other), Some(lane)) => event < pairs[lane][other],
            (false, ..) => false,
        }
    }
}

fn bits(lanes: u32) -> impl Iterator<Item = usize> {
    (0..LANES).filter(move |lane| lanes >> lane & 1 == 1)
}

/// The lane that made an access, or a mark that several did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Lane(u8);

impl Lane {
    pub(crate) const SEVERAL: Lane = Lane(u8::MAX);

    pub(crate) fn of(number: usize) -> Lane {
        Lane(number as u8)
    }

    /// The lanes that have the 16 bytes of a row in a transfer of matrices: row `row` of a matrix, or of its transpose
    /// if `trans`.
    pub(crate) fn of_row(row: usize, trans: bool) -> Lane {
        Lane(32 + (row % 8) as u8 + if trans { 8 } else { 0 })
    }

    /// The lane that has each pair of the 16 bytes.
    #[inline]
    pub(crate) fn by_pairs(self) -> [Lane; 8] {
        match self.0 {
            row @ 32..40 => std::array::from_fn(|pair| Lane::of(4 * usize::from(row - 32) + pair / 2)),
            row @ 40..48 => std::array::from_fn(|pair| Lane::of(4 * pair + usize::from(row - 40) / 2)),
            _ => [self; 8],
        }
    }

    /// Its number, if it is a single lane.
    pub(crate) fn number(self) -> Option<usize> {
        (self.0 < 32).then_some(usize::from(self.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The lanes of a matrix row are the lanes whose registers hold its elements.
    #[test]
    fn rows_of_matrices_have_the_lanes_of_their_elements() {
        for (lane, trans) in (0..32u32).flat_map(|lane| [(lane, false), (lane, true)]) {
            for (row, element) in crate::data::matrix::matrix_source(lane, 0, trans) {
                let lanes = Lane::of_row(row as usize, trans).by_pairs();
                assert_eq!(lanes[element as usize], Lane::of(lane as usize), "{row}, {element}, {trans}");
            }
        }
    }

    #[test]
    fn a_barrier_orders_all_lanes_and_an_mbarrier_those_that_use_it() {
        let mut order = LaneOrder::default();
        let [a, b, c] = [0, 1, 2].map(Lane::of);
        assert!(order.orders(a, 5, a) && !order.orders(a, 5, b) && !order.orders(Lane::SEVERAL, 5, a));
        order.arrive(0, 7, 0, 6);
        order.wait(1 << 1, 7, 0);
        assert!(!order.orders(a, 5, b), "the phase was not complete");
        order.wait(1 << 1, 7, 1);
        assert!(order.orders(a, 5, b) && !order.orders(a, 6, b), "what came before the arrival");
        assert!(
            !order.orders(a, 5, c) && !order.orders(b, 5, a),
            "the others have not waited or not arrived"
        );
        order.sync(8);
        assert!(order.orders(a, 7, c) && order.orders(Lane::SEVERAL, 7, b) && !order.orders(a, 8, c));
    }
}
