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
        (turn(Priority::Low), turn(Priority::Normal), turn(Priority::High));
    let operation = priority_levels.start(Priority::Normal);
    assert_eq!(low.look(&priority_levels, now), Some(now + HELD));
    assert_eq!(normal.look(&priority_levels, now), None, "the same level");
    assert_eq!(high.look(&priority_levels, now), None);
    let higher = priority_levels.start(Priority::High);
    assert_eq!(normal.look(&priority_levels, now), Some(now + HELD));
    drop(higher);
    assert_eq!(normal.look(&priority_levels, now), None);
    drop(operation);
    assert_eq!(low.look(&priority_levels, now), None);
}

#[test]
fn operations_in_a_priority_deadlock_are_delayed_only_once() {
    let (priority_levels, start) = (Arc::new(PriorityLevels::default()), Instant::now());
    let mut low = turn(Priority::Low);
    let _stuck = priority_levels.start(Priority::High);
    assert!(low.look(&priority_levels, start).is_some());
    assert!(low.look(&priority_levels, start + HELD - MS).is_some());
    for ms in 10..100 {
        assert_eq!(low.look(&priority_levels, start + ms * MS), None, "{ms} ms");
    }
}

#[test]
fn a_stream_of_short_operations_leaves_a_window_each_time() {
    let (priority_levels, start) = (Arc::new(PriorityLevels::default()), Instant::now());
    let (mut low, mut through) = (turn(Priority::Low), 0);
    for ms in 0..100 {
        // One operation starts before the other ends.
        let before = priority_levels.start(Priority::High);
        through += u32::from(low.look(&priority_levels, start + ms * MS).is_none());
        let _next = priority_levels.start(Priority::High);
        drop(before);
    }
    assert_eq!(through, 9);
}

#[test]
fn priority_names_are_parsed_or_refused() {
    for level in Priority::ALL {
        assert_eq!(level.to_string().parse::<Priority>(), Ok(level));
    }
    assert!("1".parse::<Priority>().is_err() && Priority::Low < Priority::High);
}
