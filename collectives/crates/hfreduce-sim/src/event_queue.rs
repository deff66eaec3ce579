//! Simulated time, the event queue, and resources that serve one transfer after another.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// A point in time or a duration in picoseconds: fine enough for the transfer of one cache line, with a range
/// of half a year.
pub type Time = u64;

/// One second.
pub const SECOND: Time = 1_000_000_000_000;
/// One millisecond.
pub const MILLISECOND: Time = SECOND / 1_000;
/// One microsecond.
pub const MICROSECOND: Time = SECOND / 1_000_000;

/// A time in seconds.
pub fn seconds(time: Time) -> f64 {
    time as f64 / SECOND as f64
}

/// Events in order of time, and in order of insertion for equal times: runs are deterministic.
#[derive(Debug)]
pub struct EventQueue<E> {
    now: Time,
    planned: u64,
    next: BinaryHeap<Reverse<Entry<E>>>,
}

#[derive(Debug)]
struct Entry<E> {
    at: (Time, u64),
    event: E,
}

impl<E> PartialEq for Entry<E> {
    fn eq(&self, other: &Self) -> bool {
        self.at == other.at
    }
}

impl<E> Eq for Entry<E> {}

impl<E> PartialOrd for Entry<E> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl<E> Ord for Entry<E> {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.at.cmp(&other.at)
    }
}

impl<E> Default for EventQueue<E> {
    fn default() -> Self {
        Self { now: 0, planned: 0, next: BinaryHeap::new() }
    }
}

impl<E> EventQueue<E> {
    /// The time of the last event taken.
    pub fn now(&self) -> Time {
        self.now
    }

    /// Inserts an event; a time in the past counts as now.
    pub fn plan(&mut self, at: Time, event: E) {
        self.planned += 1;
        self.next.push(Reverse(Entry { at: (at.max(self.now), self.planned), event }));
    }

    /// Removes the next event and advances time to it.
    pub fn take(&mut self) -> Option<E> {
        let Reverse(entry) = self.next.pop()?;
        self.now = entry.at.0;
        Some(entry.event)
    }

    /// The time of the next event.
    pub fn next_at(&self) -> Option<Time> {
        self.next.peek().map(|Reverse(entry)| entry.at.0)
    }
}

/// A resource that carries bytes at a fixed rate, one transfer after another.
#[derive(Debug, Clone, Copy)]
pub struct Pipe {
    picoseconds_per_byte: f64,
    free_at: Time,
    busy: Time,
}

impl Pipe {
    /// A pipe with this rate.
    pub fn new(bytes_per_second: f64) -> Self {
        Self { picoseconds_per_byte: SECOND as f64 / bytes_per_second, free_at: 0, busy: 0 }
    }

    /// Queues a transfer of `bytes` from `now` on; returns the time of its end.
    pub fn carry(&mut self, now: Time, bytes: f64) -> Time {
        let span = (bytes * self.picoseconds_per_byte).ceil() as Time;
        self.free_at = self.free_at.max(now) + span;
        self.busy += span;
        self.free_at
    }

    /// The time at which all queued transfers have ended.
    pub fn free_at(&self) -> Time {
        self.free_at
    }

    /// Total time of transfers.
    pub fn busy(&self) -> Time {
        self.busy
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_ordered_by_time_and_then_by_planning() {
        let mut event_queue = EventQueue::default();
        for (at, name) in [(20, 'c'), (10, 'a'), (10, 'b'), (30, 'd')] {
            event_queue.plan(at, name);
        }
        assert_eq!(event_queue.take(), Some('a'));
        event_queue.plan(5, 'x');
        let rest: String = std::iter::from_fn(|| event_queue.take()).collect();
        assert_eq!((rest.as_str(), event_queue.now()), ("bxcd", 30));
    }

    #[test]
    fn a_pipe_serializes_transfers() {
        let mut pipe = Pipe::new(1e12);
        assert_eq!(pipe.carry(0, 100.0), 100);
        assert_eq!(pipe.carry(50, 100.0), 200);
        assert_eq!((pipe.carry(1_000, 1.0), pipe.busy()), (1_001, 201));
    }
}
