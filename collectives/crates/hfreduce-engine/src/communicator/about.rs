//! Properties of a communicator.

use std::sync::atomic::Ordering;

use std::sync::Arc;

use fabric::arena::{Arena, Block};

use super::{Communicator, Session};
use crate::driver::{Counters, PeerBytes};
use hfreduce_core::error::{CollectiveError, ErrorKind};
use hfreduce_shm::flight::Snapshot;

impl Communicator {
    /// False in a forked child, which has no threads and must not use the connections.
    pub fn is_ours(&self) -> bool {
        self.inner.is_ours()
    }

    /// Counters of this rank.
    pub fn counters(&self) -> &Counters {
        let counters = &self.inner.shared.counters;
        let refused = self.session.as_ref().and_then(|session| session.refused_connections());
        if let Some(refused) = refused {
            counters.refused.store(refused, Ordering::Relaxed);
        }
        counters
    }

    /// Bytes between this rank and each other rank. Zero where a daemon moves them.
    pub fn peer_bytes(&self) -> &PeerBytes {
        &self.inner.shared.peer_bytes
    }

    /// Allocates zeroed memory that the ranks of the node access in place: buffers in it are not
    /// copied. It may outlive the communicator.
    ///
    /// # Errors
    /// Registered memory is exhausted (`HFREDUCE_REGISTERED_BYTES`), or a system call failed.
    pub fn allocate(&self, bytes: usize) -> Result<Block, CollectiveError> {
        let refuse = |detail: String| self.refused(ErrorKind::Invalid, "allocate", detail);
        let arena = self.arena().map_err(refuse)?;
        arena.allocate(bytes).map_err(|error| refuse(error.to_string()))
    }

    /// Bytes of registered memory in use.
    pub fn registered_bytes(&self) -> usize {
        self.arena().map_or(0, |arena| arena.used())
    }

    /// Interface and address that other nodes try first to reach this one, `eth0 10.0.0.5`.
    pub fn reached_at(&self) -> &str {
        &self.inner.shared.identity.reached_at
    }

    /// Number of membership changes.
    pub fn epoch(&self) -> u32 {
        self.session.as_ref().map_or(0, |session| session.epoch())
    }

    /// Number of collective operations that completed here, each after all before it. The barrier
    /// of `connect` is the first.
    pub fn completed(&self) -> u64 {
        let inner = &self.inner;
        inner.next.load(Ordering::SeqCst).min(inner.shared.first_unended.load(Ordering::SeqCst))
    }

    /// By rank: the epoch from which each member joined, and the operations it completed there.
    /// None for newcomers, and for all members in the first epoch.
    pub fn previous_epochs(&self) -> Vec<Option<(u32, u64)>> {
        match &self.session {
            Some(session) => session.previous_epochs(),
            None => vec![None; self.world_size()],
        }
    }

    /// The session of the communicator.
    ///
    /// # Errors
    /// This is a forked child.
    pub fn session(&self) -> Result<&dyn Session, String> {
        let session = self.session.as_deref().filter(|_| self.inner.is_ours());
        session.ok_or_else(|| "this is a forked child: connect after forking".to_owned())
    }

    /// Registered memory of this rank.
    ///
    /// # Errors
    /// This is a forked child, or a system call failed.
    pub fn arena(&self) -> Result<Arc<Arena>, String> {
        self.session()?.arena().map_err(|error| error.to_string())
    }

    /// The flight record.
    pub fn flight(&self) -> Option<Snapshot> {
        self.inner.shared.recorder.snapshot()
    }
}
