//! A thousand seeded faults: every survivor fails in time.

use hfreduce_sim::faults::try_seeds;
use hfreduce_sim::scenario::{Bug, Scenario};

#[test]
fn every_survivor_of_a_thousand_faults_reports_the_culprit_in_time() {
    let kinds = try_seeds(0..1000, None).unwrap();
    assert_eq!(kinds.len(), 7, "{kinds:?}");
    assert!(kinds.values().all(|count| *count > 50), "{kinds:?}");
}

#[test]
fn a_driver_that_drops_aborts_is_detected() {
    let error = try_seeds(0..1000, Some(Bug::DropsAborts)).unwrap_err();
    assert!(error.contains("reports") || error.contains("fails"), "{error}");
}

#[test]
fn a_driver_that_ignores_heartbeats_is_detected() {
    let error = try_seeds(0..1000, Some(Bug::IgnoresHeartbeats)).unwrap_err();
    assert!(error.contains("rank"), "{error}");
}

#[test]
fn a_seed_defines_one_scenario() {
    for seed in [1, 17, 400] {
        let runs = [0, 1].map(|_| Scenario::of(seed).unwrap().run());
        assert_eq!(runs[0].events, runs[1].events);
        let ends =
            |run: usize| -> Vec<_> { runs[run].endings.iter().map(|e| e.failed.clone()).collect() };
        assert_eq!(ends(0), ends(1));
    }
}
