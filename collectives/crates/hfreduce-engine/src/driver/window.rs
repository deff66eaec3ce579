//! Window of outstanding operations: how far a rank may be ahead of the others of its node.
//!
//! A caller may start any number of operations. The driver starts a collective operation once every
//! rank of the node has ended the one [`OUTSTANDING_MAX`] before it; later ones wait in `held`, in
//! order. So the fingerprints that ranks of a node compare are never overwritten by later ones, and
//! the state that an operation has in the driver and in the core is bounded. Point-to-point messages
//! are not held: a receive may be what lets another rank continue.
//!
//! Operations end oldest first along the trees, and a rank that has started the oldest operation
//! needs no later one to end it, so a held operation is always started or fails.

use super::{Driver, Submission};
use hfreduce_core::{Kind, OUTSTANDING_MAX};
use hfreduce_shm::segment::WAIT_WINDOW;

/// Ranks that wait for the window are woken once per this many operations: rarely enough to cost
/// nothing, and long before the other ranks need them.
const WAKE_EVERY: u64 = OUTSTANDING_MAX as u64 / 4;

impl Driver {
    /// Starts a call, or holds it until the window has room for it.
    pub(super) fn take(&mut self, call: Submission) {
        let collective = !matches!(call.operation.fingerprint.kind, Kind::Send | Kind::Recv);
        let ended = self.shared.broken.get().is_some(); // Then `begin` only fails it.
        let waits =
            |driver: &mut Self| !driver.held.is_empty() || !driver.has_room(call.work.sequence);
        if collective && !ended && waits(self) {
            self.held.push_back(call);
            self.fail_if_peer_closed();
            return;
        }
        self.begin(call);
    }

    /// Starts held operations that the window has room for; true if there were any.
    pub(super) fn start_held(&mut self) -> bool {
        let mut any = false;
        while let Some(sequence) = self.held.front().map(|call| call.work.sequence)
            && self.has_room(sequence)
            && let Some(call) = self.held.pop_front()
        {
            self.begin(call);
            any = true;
        }
        any
    }

    fn has_room(&mut self, sequence: u64) -> bool {
        let most = OUTSTANDING_MAX as u64;
        if sequence >= self.ended_by_all + most {
            self.ended_by_all = self.shm.ended_by_all();
        }
        sequence < self.ended_by_all + most
    }

    /// Publishes which operations have ended, after the end of a collective operation.
    pub(super) fn publish_ended(&mut self) {
        let tree = self.active.front().map(|active| active.work.sequence);
        let oldest = tree.into_iter().chain(self.p2p.oldest_collective()).min();
        let local = self.shared.identity.local();
        // Operations start in order: no later one is below the oldest that is active.
        let below = oldest.unwrap_or_else(|| self.shm.entered(local)).max(self.ended);
        let before = std::mem::replace(&mut self.ended, below);
        self.shm.end(local, below);
        if self.shm.shape().locals > 1 && before / WAKE_EVERY != below / WAKE_EVERY {
            self.wake_all(WAIT_WINDOW);
        }
    }

    /// What the oldest held operation waits for: a description, and the rank.
    pub(super) fn waiting_for_window(&self) -> Option<(String, Option<u32>)> {
        self.held.front()?;
        let identity = &self.shared.identity;
        let slowest = (0..identity.locals().len()).min_by_key(|local| self.shm.ended(*local))?;
        let (rank, ended) = (identity.locals()[slowest], self.shm.ended(slowest));
        Some((format!("waiting for rank {rank} to end operation #{ended}"), Some(rank)))
    }
}
