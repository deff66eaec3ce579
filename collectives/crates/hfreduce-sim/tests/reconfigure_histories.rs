//! Agreement on a new epoch under faults.

use hfreduce_sim::reconfigure::{Bug, try_regroups};

#[test]
fn all_running_members_form_one_group_after_every_scenario() {
    let attempts = try_regroups(0..2000, None).unwrap();
    assert!(attempts > 20_000, "{attempts}: too little happened");
}

#[test]
fn a_member_that_ignores_deadlines_is_detected() {
    let error = try_regroups(0..2000, Some(Bug::IgnoresDeadlines)).unwrap_err();
    assert!(error.contains("not in one group at the end"), "{error}");
}

#[test]
fn attempts_without_a_nonce_are_detected() {
    let error = try_regroups(0..2000, Some(Bug::NoNonce)).unwrap_err();
    assert!(error.contains("two groups are named"), "{error}");
}

#[test]
fn connections_that_are_dropped_with_the_previous_attempt_are_detected() {
    let error = try_regroups(0..2000, Some(Bug::DropsConnections)).unwrap_err();
    assert!(error.contains("although all run"), "{error}");
}
