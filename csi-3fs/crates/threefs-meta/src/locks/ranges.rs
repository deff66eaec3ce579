//! Ranges that one owner holds: sorted, disjoint, and neighbors of one access merged.

use serde::{Deserialize, Serialize};

/// A locked range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Held {
    pub first: u64,
    pub last: u64,
    pub exclusive: bool,
    pub pid: u32,
}

impl Held {
    /// Whether two owners cannot hold both.
    pub(crate) fn conflicts(&self, other: &Self) -> bool {
        (self.exclusive || other.exclusive) && self.first <= other.last && other.first <= self.last
    }

    /// Whether both are one range.
    fn joins(&self, next: &Self) -> bool {
        self.exclusive == next.exclusive
            && self.pid == next.pid
            && self.last.checked_add(1) == Some(next.first)
    }
}

/// Ranges of an owner after a part of them was replaced, or released if `held` is `None`.
pub(crate) fn with(ranges: &[Held], first: u64, last: u64, held: Option<&Held>) -> Vec<Held> {
    let mut parts = Vec::with_capacity(ranges.len() + 2);
    for range in ranges {
        if let Some(end) = first.checked_sub(1)
            && range.first <= end
        {
            parts.push(Held { last: range.last.min(end), ..*range });
        }
        if let Some(start) = last.checked_add(1)
            && range.last >= start
        {
            parts.push(Held { first: range.first.max(start), ..*range });
        }
    }
    parts.extend(held);
    parts.sort_unstable_by_key(|range| range.first);
    let mut merged: Vec<Held> = Vec::with_capacity(parts.len());
    for part in parts {
        match merged.last_mut() {
            Some(before) if before.joins(&part) => before.last = part.last,
            _ => merged.push(part),
        }
    }
    merged
}

/// Whether ranges grant all that a lock does.
pub(crate) fn cover(ranges: &[Held], wanted: &Held) -> bool {
    let mut next = wanted.first;
    for range in ranges.iter().filter(|range| range.exclusive || !wanted.exclusive) {
        if range.first > next {
            return false;
        }
        if range.last >= wanted.last {
            return true;
        }
        next = next.max(range.last.saturating_add(1));
    }
    false
}
