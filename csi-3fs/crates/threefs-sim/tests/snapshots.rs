//! Schedules of the model of snapshots without violations, and detection of each mutation.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use threefs_sim::snapshots::{Mutation, Outcome, run};

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().expect("a number"))
}

/// `THREEFS_SIM_SCHEDULES` sets the number of schedules and `THREEFS_SIM_FIRST` the first seed.
#[test]
fn snapshots_equal_whole_tree_copies() {
    let first = number("THREEFS_SIM_FIRST", 0);
    let count = number("THREEFS_SIM_SCHEDULES", 10_000);
    let mut all = Outcome::default();
    for seed in first..first + count {
        let one = run(seed, Mutation::None).unwrap_or_else(|violation| panic!("{violation}"));
        all.steps += one.steps;
        all.writes += one.writes;
        all.snapshots += one.snapshots;
        all.clones += one.clones;
        all.creators_lost += one.creators_lost;
    }
    println!("{count} schedules: {all:?}");
    assert!(all.writes > 12 * count && all.snapshots > 2 * count, "{all:?}");
    assert!(all.clones > count / 4 && all.creators_lost > count / 4, "{all:?}");
}

/// `THREEFS_SIM_MUTATION` selects one mutation.
#[test]
fn each_removed_rule_of_snapshots_is_detected() {
    let only = std::env::var("THREEFS_SIM_MUTATION").ok();
    let is_chosen = |it: &Mutation| only.as_ref().is_none_or(|name| *name == format!("{it:?}"));
    let mut survivors = Vec::new();
    for mutation in Mutation::ALL.into_iter().filter(is_chosen) {
        match (0..10_000).find_map(|seed| run(seed, mutation).err()) {
            Some(violation) => println!("{mutation:?}: {violation}"),
            None => survivors.push(mutation),
        }
    }
    assert!(survivors.is_empty(), "not found: {survivors:?}");
}
