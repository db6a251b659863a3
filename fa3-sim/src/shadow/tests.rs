use super::*;

fn access(component: u16, event: u32, kind: Kind) -> Access {
    let epoch = Epoch { cluster: 0, component, value: 1 };
    Access { epoch, event, kind, origin: Origin::Thread, warp: component, lane: Lane::of(0) }
}

fn after<'a>(clock: &'a Clock, lanes: &'a LaneOrder) -> After<'a> {
    After { cluster: 0, clock, lanes }
}

impl Shadow {
    fn once(&mut self, start: usize, bytes: usize, access: Access, after: &After<'_>) -> Option<Conflict> {
        let mut batch = self.batch(access, after);
        self.access(start, bytes, &mut batch)
    }
}

#[test]
fn only_overlapping_unordered_conflicts_are_found() {
    let mut shadow = Shadow::new(64, 8);
    let (nothing, lanes) = (Clock::default(), LaneOrder::default());
    let nothing = after(&nothing, &lanes);
    assert!(shadow.once(4, 8, access(0, 0, Kind::Write), &nothing).is_none());
    assert!(shadow.once(12, 8, access(1, 1, Kind::Write), &nothing).is_none(), "other bytes");
    assert_eq!(shadow.once(8, 4, access(2, 2, Kind::Read), &nothing).unwrap().old.event, 0);
    let mut knows = Clock::default();
    knows.raise(0, 1);
    assert!(shadow.once(4, 8, access(2, 3, Kind::Read), &after(&knows, &lanes)).is_none(), "ordered");
    let early = shadow.once(16, 1, access(3, 4, Kind::Write), &after(&knows, &lanes));
    assert_eq!(early.unwrap().old.event, 1);
    knows.raise(1, 1);
    let late = shadow.once(0, 16, access(4, 5, Kind::Write), &after(&knows, &lanes));
    assert_eq!(late.unwrap().old.kind, Kind::Read, "a read must be over before its bytes are overwritten");
}

/// A history counts the cells that share it, whether the cells changed one by one or together after equal accesses.
#[test]
fn histories_count_their_cells() {
    let mut shadow = Shadow::new(16 * 12, 8);
    let (nothing, lanes) = (Clock::default(), LaneOrder::default());
    let nothing = after(&nothing, &lanes);
    let accesses: [(&[u32], usize, Kind); 6] = [
        (&[0], 192, Kind::Write),
        (&[32, 48, 16, 96], 16, Kind::Read),
        (&[0, 64, 72], 40, Kind::Write),
        (&[16, 16, 80], 32, Kind::Read),
        (&[4], 150, Kind::Strong),
        (&[0], 192, Kind::Write),
    ];
    let mut conflicts = Vec::new();
    for (event, (starts, bytes, kind)) in accesses.into_iter().enumerate() {
        let access = access(event as u16, event as u32, kind);
        let mut batch = shadow.batch(access, &nothing);
        shadow.access_each(starts, bytes, &mut batch, |start, _| conflicts.push((event, start)));
        let histories = shadow.histories.iter().enumerate();
        for (number, history) in histories.filter(|(number, _)| !shadow.free.contains(&(*number as u32))) {
            let having = shadow.cells.iter().filter(|&&cell| cell as usize == number).count();
            assert_eq!(history.cells as usize, having, "history {number} after access {event}");
        }
    }
    let expected = [(1, 32), (1, 48), (1, 16), (1, 96), (2, 0), (2, 64), (3, 16), (3, 80), (4, 4), (5, 0)];
    assert_eq!(conflicts, expected);
}

#[test]
fn atomics_do_not_race_with_each_other() {
    let mut shadow = Shadow::new(16, 8);
    let (nothing, lanes) = (Clock::default(), LaneOrder::default());
    let nothing = after(&nothing, &lanes);
    assert!(shadow.once(0, 4, access(0, 0, Kind::Strong), &nothing).is_none());
    assert!(shadow.once(0, 4, access(1, 1, Kind::Strong), &nothing).is_none());
    assert!(shadow.once(0, 4, access(2, 2, Kind::Read), &nothing).is_some());
}

/// Lanes are distinguished byte by byte, even if one record covers an instruction of several lanes.
#[test]
fn lanes_of_a_warp_are_told_apart_by_bytes() {
    let mut shadow = Shadow::new(16, 8);
    let (mut clock, mut lanes) = (Clock::default(), LaneOrder::default());
    clock.raise(0, 1);
    let by = |lane, event, kind| Access { lane: Lane::of(lane), ..access(0, event, kind) };
    let mut found = |start, access, lanes: &LaneOrder| {
        let conflict = shadow.once(start, 2, access, &after(&clock, lanes));
        conflict.map(|conflict| (conflict.old.lane.number(), conflict.of_lanes))
    };
    assert_eq!(found(0, by(0, 0, Kind::Write), &lanes), None);
    assert_eq!(found(2, by(1, 0, Kind::Write), &lanes), None, "the neighbour's bytes");
    assert_eq!(found(0, by(0, 1, Kind::Write), &lanes), None, "its own");
    assert_eq!(found(2, by(0, 2, Kind::Read), &lanes), Some((Some(1), true)));
    assert_eq!(found(0, by(0, 3, Kind::Read), &lanes), None);
    assert_eq!(found(0, by(1, 4, Kind::Read), &lanes), Some((Some(0), true)));
    lanes.sync(5);
    assert_eq!(found(2, by(0, 5, Kind::Read), &lanes), None);
    assert_eq!(found(2, by(3, 6, Kind::Read), &lanes), None, "reads do not conflict");
    assert_eq!(found(2, by(3, 7, Kind::Write), &lanes), Some((None, true)), "several have read");
}
