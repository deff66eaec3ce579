//! Payload bytes between this rank and each other rank, counted by the rank that moves them:
//! - the sender counts what it sends, along the trees and in messages between two ranks. This
//!   includes messages to ranks of its node, over a socket or through the segment;
//! - inside a node, the reader counts the inputs and results of collective operations that it takes
//!   from memory that another rank has filled. A result that an owner writes to the registered
//!   memory of a rank counts as taken by that rank.
//!
//! So each byte that moves from one rank to another is in one counter of one of the two. Heads of
//! frames, credits and heartbeats are not counted: the numbers depend on the operations alone.

use std::sync::atomic::{AtomicU64, Ordering};

/// See the module's text. The counters never decrease.
#[derive(Debug)]
pub struct PeerBytes {
    sent: Box<[AtomicU64]>,
    taken: Box<[AtomicU64]>,
}

impl PeerBytes {
    /// Counters for a group of this many ranks.
    pub fn new(world_size: usize) -> Self {
        let counters = || (0..world_size).map(|_| AtomicU64::new(0)).collect();
        Self { sent: counters(), taken: counters() }
    }

    /// Counts bytes that this rank sends to `peer`.
    #[inline]
    pub fn count_sent(&self, peer: u32, bytes: usize) {
        add(&self.sent, peer, bytes);
    }

    /// Counts bytes that this rank takes from the memory of `peer`.
    #[inline]
    pub fn count_taken(&self, peer: u32, bytes: usize) {
        add(&self.taken, peer, bytes);
    }

    /// By rank: bytes that this rank has sent to it.
    pub fn sent(&self) -> Vec<u64> {
        load(&self.sent)
    }

    /// By rank: bytes that this rank has taken from its memory.
    pub fn taken(&self) -> Vec<u64> {
        load(&self.taken)
    }
}

#[inline]
fn add(counters: &[AtomicU64], peer: u32, bytes: usize) {
    if let Some(counter) = counters.get(peer as usize) {
        counter.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

fn load(counters: &[AtomicU64]) -> Vec<u64> {
    counters.iter().map(|counter| counter.load(Ordering::Relaxed)).collect()
}
