//! Tests of priorities, on a simulated clock.

use super::*;

const MS: Duration = Duration::from_millis(1);

fn turn(level: Priority) -> PriorityGate {
    PriorityGate::new(level, HELD)
}

#[test]
fn chunks_are_delayed_until_higher_operations_end() {
    let (priority_levels, now) = (Arc::new(PriorityLevels::default()), Instant::now());
    let (mut low, mut normal, mut high) =
        (turn(Priority::LOW), turn(Priority::NORMAL), turn(Priority::HIGH));
    let operation = priority_levels.start(Priority::NORMAL);
    assert_eq!(low.look(&priority_levels, now), Some(now + HELD));
    assert_eq!(normal.look(&priority_levels, now), None, "the same level");
    assert_eq!(high.look(&priority_levels, now), None);
    let higher = priority_levels.start(Priority::HIGH);
    assert_eq!(normal.look(&priority_levels, now), Some(now + HELD));
    drop(higher);
    assert_eq!(normal.look(&priority_levels, now), None);
    drop(operation);
    assert_eq!(low.look(&priority_levels, now), None);
}

#[test]
fn operations_in_a_priority_deadlock_are_delayed_only_once() {
    let (priority_levels, start) = (Arc::new(PriorityLevels::default()), Instant::now());
    let mut low = turn(Priority::LOW);
    let _stuck = priority_levels.start(Priority::HIGH);
    assert!(low.look(&priority_levels, start).is_some());
    assert!(low.look(&priority_levels, start + HELD - MS).is_some());
    for ms in 0..5000 {
        assert_eq!(low.look(&priority_levels, start + HELD + ms * MS), None, "{ms} ms");
    }
}

#[test]
fn chunks_are_delayed_as_long_as_higher_operations_make_progress() {
    let (priority_levels, start) = (Arc::new(PriorityLevels::default()), Instant::now());
    let mut low = turn(Priority::LOW);
    let operation = priority_levels.start(Priority::HIGH);
    for ms in 0..500 {
        operation.progress();
        let now = start + ms * MS;
        assert_eq!(low.look(&priority_levels, now), Some(now + HELD), "{ms} ms");
    }
    // Progress of the own level and below does not count.
    priority_levels.start(Priority::LOW).progress();
    let stalled = start + 499 * MS + HELD;
    assert_eq!(low.look(&priority_levels, stalled), None);
    operation.progress();
    assert!(low.look(&priority_levels, stalled + MS).is_some());
}

#[test]
fn a_stream_of_operations_leaves_a_window_each_time() {
    let (priority_levels, start) = (Arc::new(PriorityLevels::default()), Instant::now());
    let mut low = turn(Priority::LOW);
    let mut windows = Vec::new();
    for ms in 0..4000 {
        // One operation starts before the other ends.
        let before = priority_levels.start(Priority::HIGH);
        if low.look(&priority_levels, start + ms * MS).is_none() {
            windows.push(ms);
        }
        let _next = priority_levels.start(Priority::HIGH);
        drop(before);
    }
    assert_eq!(windows, [1000, 2001, 3002]);
}

#[test]
fn priorities_are_parsed_or_refused() {
    for (text, level) in [("low", 4), ("normal", 8), ("high", 12), ("0", 0), ("15", 15)] {
        assert_eq!(text.parse(), Ok(Priority(level)));
        assert_eq!(Priority(level).to_string(), text);
    }
    assert_eq!("4".parse(), Ok(Priority::LOW));
    for text in ["16", "256", "-1", "+1", "", "High", "1.5"] {
        assert_eq!(text.parse::<Priority>(), Err(NoPriority), "{text}");
    }
    assert!(Priority::LOW < Priority::default() && Priority::default() < Priority::HIGH);
}
