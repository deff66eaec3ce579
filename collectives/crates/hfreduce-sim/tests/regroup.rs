//! Members that agree on a new epoch while things go wrong.

use hfreduce_sim::regroup::{Bug, try_regroups};

#[test]
fn all_who_can_run_are_together_after_every_story() {
    let attempts = try_regroups(0..2000, None).unwrap();
    assert!(attempts > 20_000, "{attempts}: too little happened");
}

#[test]
fn a_rank_that_never_looks_at_the_time_is_caught() {
    let error = try_regroups(0..2000, Some(Bug::NeverLate)).unwrap_err();
    assert!(error.contains("not in one group at the end"), "{error}");
}

#[test]
fn attempts_without_a_number_of_their_own_are_caught() {
    let error = try_regroups(0..2000, Some(Bug::NoChance)).unwrap_err();
    assert!(error.contains("two groups are named"), "{error}");
}

#[test]
fn calls_that_are_dropped_with_the_attempt_before_are_caught() {
    let error = try_regroups(0..2000, Some(Bug::DropsCalls)).unwrap_err();
    assert!(error.contains("although all run"), "{error}");
}
