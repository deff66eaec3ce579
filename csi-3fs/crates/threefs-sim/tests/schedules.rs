//! Schedules without violations, and detection of each mutation by the same schedules.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::time::Instant;

use threefs_sim::{Mutation, Outcome, run};

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().expect("a number"))
}

/// `THREEFS_SIM_SCHEDULES` sets the number of schedules and `THREEFS_SIM_FIRST` the first seed.
#[test]
fn ten_thousand_schedules_without_a_violation() {
    let first = number("THREEFS_SIM_FIRST", 0);
    let count = number("THREEFS_SIM_SCHEDULES", 10_000);
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get() as u64);
    let started = Instant::now();
    let workers: Vec<_> = (0..threads)
        .map(|worker| {
            std::thread::spawn(move || {
                let seeds = (first..first + count).filter(move |seed| seed % threads == worker);
                let mut all = Outcome::default();
                for seed in seeds {
                    let one =
                        run(seed, Mutation::None).map_err(|violation| violation.to_string())?;
                    all.events += one.events;
                    all.answers += one.answers;
                    all.chain_versions += one.chain_versions;
                    all.promotions += one.promotions;
                    all.overloads += one.overloads;
                    all.takeovers += one.takeovers;
                    all.converged_after_us = all.converged_after_us.max(one.converged_after_us);
                }
                Ok::<Outcome, String>(all)
            })
        })
        .collect();
    let mut all = Outcome::default();
    for worker in workers {
        match worker.join().unwrap() {
            Ok(one) => {
                all.events += one.events;
                all.answers += one.answers;
                all.chain_versions += one.chain_versions;
                all.promotions += one.promotions;
                all.overloads += one.overloads;
                all.takeovers += one.takeovers;
                all.converged_after_us = all.converged_after_us.max(one.converged_after_us);
            }
            Err(violation) => panic!("{violation}"),
        }
    }
    println!(
        "{count} schedules in {:.1} s: {} events, {} answers, {} chain versions, {} promotions, \
         {} overloads, {} takeovers, settled after at most {} ms",
        started.elapsed().as_secs_f64(),
        all.events,
        all.answers,
        all.chain_versions,
        all.promotions,
        all.overloads,
        all.takeovers,
        all.converged_after_us / 1_000
    );
    // The schedules must make progress and have effective faults.
    assert!(all.answers > 20 * count, "clients hardly got an answer");
    assert!(u64::from(all.chain_versions) > 6 * count, "hardly a fault had an effect");
    assert!(all.takeovers > count / 10, "mgmtd hardly failed over");
}

#[test]
fn one_seed() {
    if let Ok(seed) = std::env::var("THREEFS_SIM_SEED") {
        let outcome = run(seed.parse().expect("a number"), Mutation::None);
        match outcome {
            Ok(outcome) => println!("{outcome:?}"),
            Err(violation) => panic!("{violation}"),
        }
    }
}

#[test]
fn a_seed_is_deterministic() {
    for seed in 0..5 {
        let (a, b) = (run(seed, Mutation::None).unwrap(), run(seed, Mutation::None).unwrap());
        assert_eq!((a.events, a.answers), (b.events, b.answers));
    }
}

/// `THREEFS_SIM_MUTATION` selects one mutation.
#[test]
fn each_seeded_bug_is_detected() {
    let only = std::env::var("THREEFS_SIM_MUTATION").ok();
    let is_chosen = |it: &Mutation| only.as_ref().is_none_or(|name| *name == format!("{it:?}"));
    let mut survivors = Vec::new();
    for mutation in Mutation::ALL.into_iter().filter(is_chosen) {
        match (0..10_000).find_map(|seed| run(seed, mutation).err()) {
            Some(violation) => {
                println!("{mutation:?}: seed {}: {}", violation.seed, violation.what)
            }
            None => survivors.push(mutation),
        }
    }
    assert!(survivors.is_empty(), "not found: {survivors:?}");
}
