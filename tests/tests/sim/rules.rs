//! Each case is a kernel that keeps a rule, and the same kernel with one wrong line. With this line it breaks this
//! rule, and no other, under every schedule.

use fa3_ir::lang::*;
use fa3_ir::*;
use fa3_sim::{Memory, Outcome, Policy, Rule, Simulation};

use crate::runs::{findings, policies};

mod barriers;
mod copies;
mod lanes;
mod mbarriers;
mod memory;
mod registers;
mod scopes;
mod wgmma;

/// A kernel in two versions: correct and broken.
pub(crate) struct Case {
    name: &'static str,
    rule: Rule,
    /// A rule that the broken version violates instead under some schedules.
    other: Rule,
    threads: u32,
    cluster: u32,
    grid: u32,
    build: fn(&Builder, bool),
}

/// A case of `rule`. If its argument is true, `build` builds the kernel that breaks the rule, else a correct one.
///
/// The first letter of a parameter's name (pointer or tensor map) names its memory: x has 64 KiB of zeros, y has 64 KiB
/// that are unwritten, z has 64 KiB that the previous grid writes, and s is one word of zero.
const fn case(name: &'static str, rule: Rule, threads: u32, build: fn(&Builder, bool)) -> Case {
    Case { name, rule, other: rule, threads, cluster: 1, grid: 1, build }
}

impl Case {
    /// Adds a rule that the broken version violates instead under some schedules.
    const fn or(self, other: Rule) -> Case {
        Case { other, ..self }
    }

    /// Sets the number of CTAs.
    const fn grid(self, grid: u32) -> Case {
        Case { grid, ..self }
    }

    /// Runs as one cluster of `size` CTAs.
    const fn cluster(self, size: u32) -> Case {
        Case { cluster: size, grid: size, ..self }
    }

    fn kernel(&self, broken: bool) -> Kernel {
        Kernel::build("case", Launch::threads(self.threads).cluster(self.cluster), |b| {
            (self.build)(b, broken);
        })
    }

    fn run(&self, kernel: &Kernel, policy: Policy) -> Outcome {
        let mut memory = Memory::new();
        let x = memory.alloc_from("x", &[0; 65536]);
        let y = memory.alloc("y", 65536);
        let z = memory.alloc_from("z", &[0; 65536]);
        let s = memory.alloc_from("s", &[0; 4]);
        let args = kernel.params.iter().map(|param| {
            let buffer = match &param.name[..1] {
                "x" => x,
                "y" => y,
                "z" => z,
                _ => s,
            };
            let ParamKind::TensorMap(shape) = param.kind else {
                return ArgValue::Pointer(buffer.address());
            };
            let dims = [u64::from(128 / shape.elem.bytes()), 65536 / 128];
            ArgValue::Tensor(TensorView::contiguous(buffer.address(), &dims, shape.elem))
        });
        let simulation = Simulation::new(kernel).grid([self.grid, 1, 1]).args(args.collect()).policy(policy);
        let outcome = simulation.predecessor_writes(vec![z]).run(&mut memory);
        outcome.unwrap_or_else(|error| panic!("{}: {error}", self.name))
    }

    /// The text of the broken version's findings.
    fn report(&self, policy: Policy) -> String {
        findings(&self.run(&self.kernel(true), policy))
    }

    /// Runs both versions under every schedule. Returns what is wrong.
    fn fault(&self) -> Option<String> {
        let (right, wrong) = (self.kernel(false), self.kernel(true));
        policies().find_map(|policy| {
            let (clean, broken) = (self.run(&right, policy), self.run(&wrong, policy));
            let all = || broken.findings.iter().all(|found| [self.rule, self.other].contains(&found.rule));
            match (clean.is_clean(), broken.findings.is_empty()) {
                (false, _) => Some(format!("right, and found wrong: {}", findings(&clean))),
                (true, true) => Some(format!("{} is not found under {policy:?}", self.rule)),
                (true, false) if !all() => Some(format!("not {}, but {}", self.rule, findings(&broken))),
                (true, false) => None,
            }
        })
    }
}

/// Runs every row of a table, and reports all failures together.
fn check(cases: &[Case]) {
    let faults: Vec<String> =
        cases.iter().filter_map(|case| Some(format!("{}: {}", case.name, case.fault()?))).collect();
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

macro_rules! tables {
    ($($module:ident)+) => {$(
        #[test]
        fn $module() {
            check($module::CASES);
        }
    )+};
}

tables!(barriers copies lanes mbarriers memory registers scopes wgmma);

/// Address of the thread's 4 bytes in a global array.
pub(crate) fn own_word<'k>(b: &'k Builder, array: V<'k, B64>) -> V<'k, B64> {
    b.tid().mad_wide(4, array)
}

/// Address of the thread's 4 bytes in a region.
fn own_cell(b: &Builder, region: Region) -> V<'_, B32> {
    b.tid().mad(4, b.address(region))
}

/// Whether this is thread `number`.
fn thread(b: &Builder, number: u32) -> V<'_, Pred> {
    b.tid().eq(number)
}

/// Whether this is warp `number`.
fn warp(b: &Builder, number: u32) -> V<'_, Pred> {
    (b.tid() >> 5).eq(number)
}

/// Initializes an mbarrier for `arrivals` arrivals, and makes the initialization visible to all threads.
fn init(b: &Builder, mbarrier: Region, arrivals: u32) {
    b.guarded(thread(b, 0), || b.mbarrier_init(mbarrier, arrivals));
    b.fence(FenceInst::MbarrierInit);
    b.sync_cta();
}

/// Writes a region of 8 KiB by 128 threads, 64 bytes each.
fn fill(b: &Builder, region: Region) {
    let (tid, start) = (b.tid(), b.address(region));
    let at = tid.mad(64, start);
    for offset in [0, 16, 32, 48] {
        b.store_vector(at.at(offset), [0.0; 4]);
    }
}

/// A tile of 8 KiB, written and fenced.
fn filled(b: &Builder) -> Region {
    let tile = b.region("tile", 8192, 1024);
    fill(b, tile);
    b.fence(FenceInst::ProxyAsyncShared);
    b.sync_cta();
    tile
}

/// Expects the bytes of a copy in thread 0, and starts it. It copies the first bytes of x to a region.
fn begin_load(b: &Builder, region: Region, bytes: u32, full: Region) {
    let x = b.param_pointer("x", Elem::F32);
    b.if_lanes(thread(b, 0), || {
        b.mbarrier_arrive_expect(full, bytes);
        b.bulk_load(region, x, bytes, full, LoadOptions::default());
    });
}

/// docs/simulator-rules.md has exactly one section for every rule, with the rule's sentence and a kernel that breaks
/// the rule.
#[test]
fn the_page_has_every_rule() {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/simulator-rules.md");
    let page = std::fs::read_to_string(page).unwrap();
    let sections: Vec<&str> = page.split("\n## ").skip(1).collect();
    let mut ids: Vec<&str> = sections.iter().filter_map(|section| section.lines().next()).collect();
    assert_eq!(ids, Rule::ALL.iter().map(|rule| rule.id()).collect::<Vec<_>>());
    for (section, rule) in sections.iter().zip(Rule::ALL) {
        let words = section.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(words.contains(&rule.sentence()[1..]), "{rule}: {}", rule.sentence());
        assert!(section.contains(&format!("Rule::{rule:?},")), "{rule}: no kernel breaks it");
        assert!(rule.page().ends_with(&format!("/docs/simulator-rules.md#{}", rule.id().to_lowercase())));
    }
    ids.sort_unstable();
    assert!(ids.windows(2).all(|pair| pair[0] != pair[1]), "{ids:?}");
}

/// Threads read bytes that other threads may not have written. The report first shows the race, and then the unwritten
/// bytes as its consequence.
#[test]
fn causes_stand_before_consequences() {
    let race = case("race", Rule::Race, 64, |b, _| {
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

/// Asserts that a report contains these lines.
fn says(report: &str, lines: &[&str]) {
    for line in lines {
        assert!(report.contains(line), "{line} is not in {report}");
    }
}
