//! Probes show the contents of registers, with their source line and lanes.

use fa3_ir::Ty;
use fa3_ir::lang::*;
use fa3_sim::{Memory, Mode, Outcome, Policy, Probe, Simulation};

use crate::runs::assert_clean;

fn run(threads: u32, grid: u32, mode: Mode, build: impl FnOnce(&Builder)) -> Outcome {
    let kernel = Kernel::build("probed", Launch::threads(threads), build);
    let simulation = Simulation::new(&kernel).grid([grid, 1, 1]).mode(mode).policy(Policy::Random(3));
    let outcome = simulation.run(&mut Memory::new()).unwrap();
    assert_clean(&outcome);
    outcome
}

fn lines(probe: &Probe) -> Vec<String> {
    probe.to_string().lines().skip(1).map(|line| line.trim().to_owned()).collect()
}

/// Probes show a value of each class, a variable, a constant, and the two rows of a thread.
#[test]
fn every_class_is_shown() {
    let outcome = run(32, 1, Mode::Exact, |b| {
        let lane = b.lane_id();
        b.probe("pred", lane.lt(2));
        b.probe("b16", b.copy(0x3f80_u16));
        b.probe("b32", lane);
        b.probe("b64", lane.to_u64() << 32);
        b.probe("f32", lane.to_f32() * 0.5);
        b.probe("var", b.var("var", -1.25));
        b.probe("constant", 7);
        b.probe("rows", Rows([b.copy(1.0), b.copy(2.0)]));
    });
    let each = |text: fn(u32) -> String| (0..32).map(text).collect::<Vec<_>>().join(" ");
    let expected = [
        ("pred", Ty::Pred, vec![each(|lane| (lane < 2).to_string())]),
        ("b16", Ty::B16, vec!["0x3f80".to_owned()]),
        ("b32", Ty::B32, vec![each(|lane| lane.to_string())]),
        ("b64", Ty::B64, vec![each(|lane| format!("{:#x}", u64::from(lane) << 32))]),
        ("f32", Ty::F32, vec![each(|lane| (lane as f32 * 0.5).to_string())]),
        ("var", Ty::F32, vec!["-1.25".to_owned()]),
        ("constant", Ty::B32, vec!["7".to_owned()]),
        ("rows", Ty::F32, vec!["1".to_owned(), "2".to_owned()]),
    ];
    let seen: Vec<_> = outcome.probes.iter().map(|probe| (&*probe.name, probe.ty, lines(probe))).collect();
    assert_eq!(seen, expected);
    assert_eq!(outcome.probes[7].f32().unwrap()[1], [2.0; 32]);
    assert_eq!(outcome.probes[2].f32(), None);
}

/// A probe prints once per warp that reaches it, with the CTA, the iteration and the lanes.
#[test]
fn a_probe_says_whose_it_is() {
    let outcome = run(64, 2, Mode::Exact, |b| {
        let (lane, cta) = (b.lane_id(), b.cta_x());
        b.for_each((0, 3), 1, |round| b.guarded(lane.ge(30), || b.probe("x", round * 100 + lane + cta)));
    });
    let mut seen: Vec<_> = outcome.probes.iter().map(|probe| (probe.site.cta[0], probe.site.warp)).collect();
    seen.sort_unstable();
    assert_eq!(seen, [(0, 0), (0, 1), (1, 0), (1, 1)].map(|whose| [whose; 3]).concat());
    for probe in &outcome.probes {
        let round = probe.site.iteration[1];
        assert_eq!(probe.lanes, 3 << 30);
        let number = u64::from((round - 1) * 100 + 31 + probe.site.cta[0]);
        assert_eq!(probe.registers[0][31], number);
        assert_eq!(lines(probe), [format!("{}{} {number}", "- ".repeat(30), number - 1)]);
    }
    let text = outcome.probes[0].to_string();
    assert!(text.contains("probes.rs:") && text.contains(" probe by probed.w"), "{text}");
}

/// A probe shows a fragment as a matrix. Here element (r, c) of the warpgroup's 64 rows is 100 r + c.
#[test]
fn fragments_are_shown_by_rows() {
    let outcome = run(128, 1, Mode::Exact, |b| {
        let mut frag = Frag::zeros(b, 24);
        let (row, col) = (b.frag_row(), b.frag_col());
        frag.map_in_place(|_, at| (row + at.half.rows()).mad(100, col + at.col).to_f32());
        b.probe("frag", &frag);
    });
    for probe in &outcome.probes {
        let first = 16 * probe.site.warp;
        let row = |row: u32| (0..24).map(|col| (100 * (first + row) + col) as f32).collect::<Vec<_>>();
        assert_eq!(probe.rows().unwrap(), (0..16).map(row).collect::<Vec<_>>());
    }
    assert_eq!(lines(&outcome.probes[0]).len(), 16);
}

/// Runs without arithmetic show no values and have no findings.
#[test]
fn skeletons_show_nothing() {
    let outcome = run(32, 1, Mode::Skeleton, |b| {
        let x = b.lane_id().to_f32() + 1.0;
        b.probe("x", x);
        b.assert(x.gt(0.0), "x is positive");
    });
    assert_eq!(outcome.probes, []);
}
