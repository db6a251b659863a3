//! Every operator of [`fa3_tests::mutate`] on every kernel of the ladder; and the kernels themselves are clean.

use fa3_tests::ladder::small_rungs;
use fa3_tests::mutate::{Fate, Mutant, Operator, Prey, Score, hunt, operators};
use rayon::prelude::*;

/// Hunts at most `limit` mutants of each operator and kernel.
fn hunted(limit: usize) -> Score {
    let preys: Vec<Prey> = small_rungs().iter().map(Prey::new).collect();
    let pairs: Vec<(&Prey, &'static Operator)> =
        operators().flat_map(|operator| preys.iter().map(move |prey| (prey, operator))).collect();
    let fates: Vec<Vec<(&'static Operator, Mutant, Fate)>> = pairs
        .into_par_iter()
        .map(|(prey, operator)| {
            let mutants = operator.mutants(prey.kernel(), limit);
            let hunt = |mutant: Mutant| {
                let fate = hunt(prey, operator, &mutant);
                (operator, mutant, fate)
            };
            mutants.into_iter().map(hunt).collect()
        })
        .collect();
    let mut score = Score::default();
    fates.iter().flatten().for_each(|(operator, mutant, fate)| score.note(operator, mutant, fate));
    score
}

fn all_dead(limit: usize) {
    let score = hunted(limit);
    println!("{score}");
    assert!(score.total() > 200, "{} mutants: are there operators that find nothing?", score.total());
    assert!(score.failures.is_empty(), "{}", score.failures.join("\n"));
}

/// At most 6 mutants of an operator and a kernel.
#[test]
fn mutants_die_by_the_rule_they_break() {
    all_dead(6);
}

#[test]
#[ignore = "takes minutes; the test above takes a sample"]
fn every_single_mutant_dies_by_the_rule_it_breaks() {
    all_dead(usize::MAX);
}

// TEMPORARY
#[test]
#[ignore]
fn tmp_show() {
    for rung in small_rungs() {
        let prey = Prey::new(&rung);
        let original = prey.kernel().to_string();
        for operator in operators() {
            for mutant in operator.mutants(prey.kernel(), 2) {
                println!(
                    "=== {} | {} | {} | {:?}",
                    mutant.kernel.name, operator.name, mutant.site, mutant.equivalent
                );
                std::fs::write("/tmp/mut-a", &original).unwrap();
                std::fs::write("/tmp/mut-b", mutant.kernel.to_string()).unwrap();
                let out = std::process::Command::new("diff")
                    .args(["-U1", "/tmp/mut-a", "/tmp/mut-b"])
                    .output()
                    .unwrap();
                for line in String::from_utf8_lossy(&out.stdout).lines().skip(2) {
                    println!("{}", line.chars().take(130).collect::<String>().trim_end());
                }
                if let Err(errors) = fa3_ir::verify(&mutant.kernel) {
                    println!("VERIFY {}", errors[0]);
                }
            }
        }
    }
}

#[test]
#[ignore]
fn tmp_time() {
    use fa3_sim::{Mode, Policy};
    for rung in small_rungs() {
        let initial = rung.initial(1);
        for mode in [Mode::Exact, Mode::Fast, Mode::Skeleton] {
            for policy in [Policy::Eager, Policy::Lazy, Policy::Random(1)] {
                let start = std::time::Instant::now();
                match fa3_tests::ladder::simulate(&rung.job, &initial, policy, mode) {
                    Ok(simulated) => {
                        let t = start.elapsed();
                        let c = std::time::Instant::now();
                        let check = if mode == Mode::Skeleton {
                            Ok(())
                        } else {
                            rung.check(&initial, &simulated.arrays)
                        };
                        println!(
                            "{} {mode:?} {policy:?} {t:?} check {:?} {:?} findings {}",
                            rung.name,
                            c.elapsed(),
                            check,
                            simulated.outcome.findings.len()
                        );
                        for f in simulated.outcome.findings.iter().take(2) {
                            println!("{f}");
                        }
                    }
                    Err(e) => println!("{} {mode:?} {policy:?} ERR {e}", rung.name),
                }
            }
        }
    }
}

#[test]
#[ignore]
fn tmp_one() {
    use fa3_sim::Policy;
    let var = |name: &str| std::env::var(name).unwrap_or_default();
    for rung in small_rungs() {
        if rung.job.kernel.name != var("K") {
            continue;
        }
        let initial = rung.initial(1);
        let job = rung.job.clone();
        let prey = Prey::new(&rung);
        for operator in operators().filter(|operator| operator.name == var("O")) {
            for mutant in
                operator.mutants(prey.kernel(), 1000).into_iter().filter(|m| m.site.contains(&var("S")))
            {
                println!("######## {} {:?}", mutant.site, mutant.equivalent);
                let job = fa3_cuda::kernels::Job { kernel: mutant.kernel.clone(), ..job.clone() };
                for policy in [Policy::Eager, Policy::Lazy, Policy::Random(0), Policy::Random(1)] {
                    println!("---- {policy:?}");
                    let simulated =
                        fa3_tests::ladder::simulate(&job, &initial, policy, fa3_sim::Mode::Skeleton);
                    match simulated {
                        Ok(s) => s.outcome.findings.iter().take(12).for_each(|f| println!("{f}")),
                        Err(e) => println!("{e}"),
                    }
                }
            }
        }
    }
}
