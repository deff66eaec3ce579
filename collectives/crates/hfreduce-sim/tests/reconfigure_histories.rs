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
    let mut errors =
        (0..2000).filter_map(|seed| try_regroups(seed..seed + 1, Some(Bug::NoNonce)).err());
    assert!(errors.any(|error| error.contains("two groups are named")));
}

#[test]
fn connections_that_are_dropped_with_the_previous_attempt_are_detected() {
    let error = try_regroups(0..2000, Some(Bug::DropsConnections)).unwrap_err();
    assert!(error.contains("although all run"), "{error}");
}

#[test]
fn coordinators_that_do_not_report_rejected_lists_are_detected() {
    let error = try_regroups(0..2000, Some(Bug::ForgetsRejections)).unwrap_err();
    assert!(error.contains("although all agree"), "{error}");
}
