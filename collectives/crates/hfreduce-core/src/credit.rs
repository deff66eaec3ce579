//! Flow control between two nodes: credit windows and the order in which chunks use them.
//!
//! Each (tree, stage) of a link has a separate window, so that one tree cannot starve the other.
//! The last credit of a window is reserved for the oldest chunk that was not sent yet. Younger chunks
//! therefore never block the oldest one, and every chunk becomes the oldest in turn.

use std::collections::VecDeque;

use super::flow::Stage;

/// A chunk of an operation: (operation's sequence number, chunk index). Ordered by age.
pub type Key = (u64, u32);

/// Windows of one link: two trees times two stages.
pub const CLASSES: usize = 4;

/// The window that a frame of `tree` and `stage` belongs to.
#[inline]
pub fn class(tree: usize, stage: Stage) -> usize {
    tree * 2 + stage as usize
}

/// The sending side of one window.
#[derive(Debug, Clone)]
pub struct SendWindow {
    credits: u32,
    limit: u32,
    /// Chunks that were not sent yet, oldest first, and whether each is ready.
    due: VecDeque<(Key, bool)>,
}

impl SendWindow {
    /// A window of `limit` slots at the receiver.
    pub fn new(limit: u32) -> Self {
        Self { credits: limit, limit, due: VecDeque::new() }
    }

    /// Registers a chunk that will be sent; called in order of age.
    #[inline]
    pub fn expect(&mut self, key: Key) {
        self.due.push_back((key, false));
    }

    /// Marks a chunk ready to be sent.
    #[inline]
    pub fn ready(&mut self, key: Key) {
        if let Ok(at) = self.due.binary_search_by_key(&key, |(due, _)| *due) {
            self.due[at].1 = true;
        }
    }

    /// Returns the next chunk that may be sent now and takes its credit.
    #[inline]
    pub fn take_next(&mut self) -> Option<Key> {
        let at = self.due.iter().position(|(_, ready)| *ready)?;
        let needed = if at == 0 { 1 } else { 2 };
        if self.credits < needed {
            return None;
        }
        self.credits -= 1;
        self.due.remove(at).map(|(key, _)| key)
    }

    /// Takes back `count` credits; false if the peer returns more than it was given.
    #[inline]
    pub fn give_back(&mut self, count: u32) -> bool {
        match self.credits.checked_add(count) {
            Some(credits) if credits <= self.limit => {
                self.credits = credits;
                true
            }
            _ => false,
        }
    }

    /// True if the oldest ready chunk waits for a credit.
    #[inline]
    pub fn blocked(&self) -> bool {
        self.credits == 0 && self.due.front().is_some_and(|(_, ready)| *ready)
    }
}

/// The receiving side: which slots are taken.
#[derive(Debug, Clone)]
pub struct ReceiveWindow {
    free: Vec<u32>,
    outstanding: u32,
    limit: u32,
}

impl ReceiveWindow {
    /// A window over slots `0..limit`.
    pub fn new(limit: u32) -> Self {
        Self { free: (0..limit).rev().collect(), outstanding: 0, limit }
    }

    /// Counts an arriving frame; false if the peer had no credit for it.
    #[inline]
    pub fn arrive(&mut self) -> bool {
        self.outstanding += 1;
        self.outstanding <= self.limit
    }

    /// Frames that have arrived and whose credits are not yet on their way back.
    #[inline]
    pub fn outstanding(&self) -> u32 {
        self.outstanding
    }

    /// Takes a free slot. There is one for every credit.
    #[inline]
    pub fn take(&mut self) -> Option<u32> {
        self.free.pop()
    }

    /// Frees the slot of a frame, so that its credit can be returned.
    #[inline]
    pub fn release(&mut self, slot: Option<u32>) {
        self.free.extend(slot);
        self.outstanding = self.outstanding.saturating_sub(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_credit_is_reserved_for_the_oldest_chunk() {
        let mut window = SendWindow::new(2);
        for index in 0..3 {
            window.expect((0, index));
        }
        window.ready((0, 1));
        window.ready((0, 2));
        assert_eq!(window.take_next(), Some((0, 1)));
        assert_eq!(window.take_next(), None, "the last credit is reserved for chunk 0");
        window.ready((0, 0));
        assert_eq!(window.take_next(), Some((0, 0)));
        assert_eq!(window.take_next(), None);
        assert!(window.give_back(2) && !window.give_back(1));
        assert_eq!(window.take_next(), Some((0, 2)));
    }

    #[test]
    fn a_frame_without_credit_is_detected() {
        let mut window = ReceiveWindow::new(1);
        assert!(window.arrive());
        let slot = window.take();
        assert!(!window.arrive());
        window.release(slot);
        window.release(None);
        assert!(window.arrive());
    }
}
