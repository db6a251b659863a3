//! For each rule a kernel that keeps it, and the same kernel with one line wrong, which breaks that rule and no other,
//! under every schedule.

use fa3_ir::lang::*;
use fa3_ir::*;
use fa3_sim::{Memory, Outcome, Policy, Rule, Simulation};

use crate::samples::{assert_clean, policies};

mod barriers;
mod copies;
mod lanes;
mod mbarriers;
mod memory;
mod registers;
mod scopes;
mod wgmma;

/// A kernel in two versions: right, and wrong.
pub(crate) struct Case {
    rule: Rule,
    launch: Launch,
    grid: u32,
    build: fn(&Builder, bool),
}

/// The kernel keeps `rule` if `build` is given false, and breaks it if true.
///
/// Its parameters are given by their names: pointers and tensor maps that begin with x are of 64 KiB that hold zeros,
/// those that begin with y of 64 KiB that hold nothing, s of one zero word. The grid before it writes those of z.
pub(crate) fn case(rule: Rule, threads: u32, build: fn(&Builder, bool)) -> Case {
    Case { rule, launch: Launch::threads(threads), grid: 1, build }
}

impl Case {
    /// With a grid.
    pub(crate) fn grid(self, grid: u32) -> Case {
        Case { grid, ..self }
    }

    /// Runs as one cluster of `size` CTAs.
    pub(crate) fn cluster(self, size: u32) -> Case {
        Case { launch: self.launch.cluster(size), grid: size, ..self }
    }

    fn kernel(&self, broken: bool) -> Kernel {
        Kernel::build("case", self.launch, |b| {
            (self.build)(b, broken);
        })
    }

    fn run(&self, kernel: &Kernel, policy: Policy) -> Outcome {
        let mut memory = Memory::new();
        let x = memory.alloc_from("x", &[0; 65536]);
        let y = memory.alloc("y", 65536);
        let z = memory.alloc_from("z", &[0; 65536]);
        let s = memory.alloc_from("s", &[0; 4]);
        let address = |name: &str| match &name[..1] {
            "x" => x.address(),
            "y" => y.address(),
            "z" => z.address(),
            _ => s.address(),
        };
        let args = kernel.params.iter().map(|param| match param.kind {
            ParamKind::TensorMap(shape) => {
                let rows = 65536 / 128;
                let columns = u64::from(128 / shape.elem.bytes());
                ArgValue::Tensor(TensorView::contiguous(address(&param.name), &[columns, rows], shape.elem))
            }
            ParamKind::U32 | ParamKind::U64 | ParamKind::F32 | ParamKind::Pointer(_) => {
                ArgValue::Pointer(address(&param.name))
            }
        });
        let simulation = Simulation::new(kernel).grid([self.grid, 1, 1]).args(args.collect()).policy(policy);
        simulation.predecessor_writes(vec![z]).run(&mut memory).unwrap()
    }

    /// The text of the broken version's findings, under the eager schedule.
    pub(crate) fn report(&self) -> String {
        let outcome = self.run(&self.kernel(true), Policy::Eager);
        outcome.findings.iter().map(ToString::to_string).collect()
    }

    /// Runs both versions under every schedule.
    pub(crate) fn check(self) {
        let rule = self.rule;
        self.check_either(rule);
    }

    /// Like [`Case::check`], where the schedule decides which of two rules is broken.
    pub(crate) fn check_either(self, other: Rule) {
        let (right, wrong) = (self.kernel(false), self.kernel(true));
        for policy in policies() {
            assert_clean(&self.run(&right, policy));
            let findings = self.run(&wrong, policy).findings;
            let text: String = findings.iter().map(ToString::to_string).collect();
            assert!(!findings.is_empty(), "{} is not found under {policy:?}", self.rule);
            assert!(
                findings.iter().all(|finding| [self.rule, other].contains(&finding.rule)),
                "expected {}:\n{text}",
                self.rule
            );
        }
    }
}

/// Each thread's 4 bytes of a global array.
pub(crate) fn own_word<'k>(b: &'k Builder, array: V<'k, B64>) -> V<'k, B64> {
    b.tid().mad_wide(4, array)
}

/// Whether this is thread `number`.
pub(crate) fn thread(b: &Builder, number: u32) -> V<'_, Pred> {
    b.tid().eq(number)
}

/// Whether this is warp `number`.
pub(crate) fn warp(b: &Builder, number: u32) -> V<'_, Pred> {
    (b.tid() >> 5).eq(number)
}

/// Initialises an mbarrier for `arrivals`, for everybody.
pub(crate) fn init(b: &Builder, mbarrier: Region, arrivals: u32) {
    let first = thread(b, 0);
    b.guarded(first, || b.mbarrier_init(mbarrier, arrivals));
    b.fence(FenceInst::MbarrierInit);
    b.sync_cta();
}

/// 128 threads write a region of 8 KiB, 64 bytes each.
pub(crate) fn fill(b: &Builder, region: Region) {
    let (tid, start) = (b.tid(), b.address(region));
    let at = tid.mad(64, start);
    for offset in [0, 16, 32, 48] {
        b.store_vector(at.at(offset), [0.0; 4]);
    }
}

/// The descriptor of a K-major tile.
pub(crate) fn descriptor(b: &Builder, region: Region) -> V<'_, B64> {
    b.address(region).bfe(4, 14).to_u64() | Layout::k_major(Swizzle::B128).descriptor()
}

/// Two tiles of 64 x 64, written and fenced, and their descriptors.
pub(crate) fn operands(b: &Builder) -> (V<'_, B64>, V<'_, B64>) {
    let tiles = [b.region("a", 8192, 1024), b.region("b", 8192, 1024)];
    tiles.iter().for_each(|&tile| fill(b, tile));
    b.fence(FenceInst::ProxyAsyncShared);
    b.sync_cta();
    (descriptor(b, tiles[0]), descriptor(b, tiles[1]))
}

/// docs/simulator-rules.md has a section for every rule, with its sentence and a kernel that breaks it, and no other.
#[test]
fn the_page_has_every_rule() {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/simulator-rules.md");
    let page = std::fs::read_to_string(page).unwrap();
    let sections: Vec<&str> = page.split("\n## ").skip(1).collect();
    let ids: Vec<&str> = sections.iter().filter_map(|section| section.lines().next()).collect();
    assert_eq!(ids, Rule::ALL.iter().map(|rule| rule.id()).collect::<Vec<_>>());
    for (section, rule) in sections.iter().zip(Rule::ALL) {
        let words = section.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(words.contains(&rule.sentence()[1..]), "{rule}: {}", rule.sentence());
        assert!(section.contains(&format!("Rule::{rule:?},")), "{rule}: no kernel breaks it");
        assert!(rule.page().ends_with(&format!("/docs/simulator-rules.md#{}", rule.id().to_lowercase())));
    }
}

/// Threads read what others may not have written yet: the race stands first, and what nobody wrote is its consequence.
#[test]
fn causes_stand_before_consequences() {
    let race = case(Rule::Race, 64, |b, _| {
        let cells = b.region("cells", 256, 16);
        let (tid, start) = (b.tid(), b.address(cells));
        let words: [V<B32>; 4] = [0, 1, 2, 3].map(|other| b.load(((tid ^ 32) ^ other).mad(4, start)));
        let sum = words.into_iter().fold(b.value(0), |sum, word| sum + word);
        b.store(tid.mad(4, start), sum);
    });
    let findings = race.run(&race.kernel(true), Policy::Eager).findings;
    let rules: Vec<Rule> = findings.iter().map(|finding| finding.rule).collect();
    assert_eq!(rules, [Rule::Race, Rule::Race, Rule::I1]);
    let text = findings[2].to_string();
    assert!(text.contains("\n  likely:  a consequence of RACE, which is broken as well\n"), "{text}");
    assert!(text.contains("\n  more:    3 other instructions of this line likewise\n"), "{text}");
    assert!(text.contains("/docs/simulator-rules.md#i1\n"), "{text}");
}

#[test]
fn a_run_ends_where_a_rule_is_broken_that_it_runs_until() {
    let kernel = Kernel::build("beyond", Launch::threads(32), |b| {
        let x = b.param_pointer("x", Elem::U32);
        let at = own_word(b, x);
        _ = b.load::<B32>(at.at(128));
        _ = b.load::<B32>(at.at(256));
    });
    let broken = |rules: &[Rule]| {
        let mut memory = Memory::new();
        let x = memory.alloc_from("x", &[0; 128]);
        let simulation = Simulation::new(&kernel).args(vec![ArgValue::Pointer(x.address())]);
        simulation.until(rules.to_vec()).run(&mut memory).unwrap().findings.len()
    };
    assert_eq!([broken(&[]), broken(&[Rule::Race]), broken(&[Rule::Race, Rule::Bounds])], [2, 2, 1]);
}
