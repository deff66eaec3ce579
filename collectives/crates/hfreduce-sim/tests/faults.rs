//! A thousand accidents, and none leaves anybody waiting.

use hfreduce_sim::faults::{Bug, Scenario, try_seeds};

#[test]
fn every_survivor_of_a_thousand_accidents_names_the_culprit_in_time() {
    let kinds = try_seeds(0..1000, None).unwrap();
    assert_eq!(kinds.len(), 7, "{kinds:?}");
    assert!(kinds.values().all(|count| *count > 50), "{kinds:?}");
}

#[test]
fn an_abort_that_is_not_passed_on_is_caught() {
    let error = try_seeds(0..1000, Some(Bug::ForwardsNoAbort)).unwrap_err();
    assert!(error.contains("blames") || error.contains("fails"), "{error}");
}

#[test]
fn nobody_who_looks_for_the_silent_is_caught() {
    let error = try_seeds(0..1000, Some(Bug::NeverLooks)).unwrap_err();
    assert!(error.contains("rank"), "{error}");
}

#[test]
fn a_seed_is_one_story() {
    for seed in [1, 17, 400] {
        let runs = [0, 1].map(|_| Scenario::of(seed).unwrap().run());
        assert_eq!(runs[0].events, runs[1].events);
        let ends =
            |run: usize| -> Vec<_> { runs[run].endings.iter().map(|e| e.failed.clone()).collect() };
        assert_eq!(ends(0), ends(1));
    }
}
