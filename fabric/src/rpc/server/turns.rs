//! Order of turns: the waiting item that holds the least is next, and of several the one that has
//! waited longest. Pure.

use std::collections::BTreeMap;
use std::ops::Bound::{Excluded, Unbounded};

/// Position of an item: what it holds, then its place in the queue.
pub(super) type Turn = (usize, u64);

/// Items with waiting requests, each with one turn.
#[derive(Debug)]
pub(super) struct Turns<T> {
    items: BTreeMap<Turn, T>,
    next_place: u64,
}

impl<T> Default for Turns<T> {
    fn default() -> Self {
        Self { items: BTreeMap::new(), next_place: 0 }
    }
}

impl<T: Copy> Turns<T> {
    /// Adds an item behind those that hold as much as it does.
    pub(super) fn push(&mut self, item: T, held: usize) -> Turn {
        self.next_place += 1;
        let turn = (held, self.next_place);
        self.items.insert(turn, item);
        turn
    }

    /// Changes what an item holds; it keeps its place among equals.
    pub(super) fn move_to(&mut self, turn: Turn, held: usize) -> Turn {
        let moved = (held, turn.1);
        if let Some(item) = self.items.remove(&turn) {
            self.items.insert(moved, item);
        }
        moved
    }

    pub(super) fn remove(&mut self, turn: Turn) {
        self.items.remove(&turn);
    }

    /// The next item.
    pub(super) fn first(&self) -> Option<(Turn, T)> {
        self.items.first_key_value().map(|(turn, item)| (*turn, *item))
    }

    /// The item after this turn, which may have been removed.
    pub(super) fn after(&self, turn: Turn) -> Option<(Turn, T)> {
        let mut later = self.items.range((Excluded(turn), Unbounded));
        later.next().map(|(turn, item)| (*turn, *item))
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = T> {
        self.items.values().copied()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.items.is_empty()
    }
}
