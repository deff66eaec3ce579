//! What a communicator tells about itself.

use std::sync::atomic::Ordering;

use std::sync::Arc;

use fabric::arena::{Arena, Block};

use super::{Communicator, SessionHandle};
use crate::driver::Counters;
use crate::error::{CollectiveError, ErrorKind};
use crate::flight::Snapshot;

impl Communicator {
    /// False in a forked child: it has neither the threads nor the right to use the connections.
    pub fn is_ours(&self) -> bool {
        self.inner.is_ours()
    }

    /// What this rank did.
    pub fn counters(&self) -> &Counters {
        let counters = &self.inner.shared.counters;
        if let Some(SessionHandle::Local(origin)) = &self.session {
            counters.refused.store(origin.refused(), Ordering::Relaxed);
        }
        counters
    }

    /// Zeroed memory that the ranks of this node read and write in place when a buffer lies in it: no
    /// copy on the way in or out. It may outlive the communicator.
    ///
    /// # Errors
    /// There is no more of it (`HFREDUCE_REGISTERED_BYTES`), or what the kernel says.
    pub fn allocate(&self, bytes: usize) -> Result<Block, CollectiveError> {
        let refuse = |detail: String| self.refused(ErrorKind::Invalid, "allocate", detail);
        let arena = self.arena().map_err(refuse)?;
        arena.allocate(bytes).map_err(|error| refuse(error.to_string()))
    }

    /// Bytes of this rank's registered memory that are handed out.
    pub fn registered_bytes(&self) -> usize {
        self.arena().map_or(0, |arena| arena.used())
    }

    /// Interface and address that other nodes try first to reach this one, `eth0 10.0.0.5`.
    pub fn reached_at(&self) -> &str {
        &self.inner.shared.identity.reached_at
    }

    /// How often its members have changed.
    pub fn epoch(&self) -> u32 {
        match &self.session {
            Some(SessionHandle::Local(origin)) => origin.epoch(),
            Some(SessionHandle::Daemon(daemon_session)) => daemon_session.epoch(),
            None => 0,
        }
    }

    /// Collective operations that ended here without an error, each after all before it. The
    /// meeting of `connect` is the first.
    pub fn completed(&self) -> u64 {
        let inner = &self.inner;
        inner.next.load(Ordering::SeqCst).min(inner.shared.first_unended.load(Ordering::SeqCst))
    }

    /// By rank: the epoch that each member left for this one, and how many operations it had
    /// completed there. None for newcomers, and for all in the first epoch.
    pub fn previous_epochs(&self) -> Vec<Option<(u32, u64)>> {
        match &self.session {
            Some(SessionHandle::Local(origin)) => origin.previous_epochs().collect(),
            Some(SessionHandle::Daemon(daemon_session)) => daemon_session.previous_epochs(),
            None => vec![None; self.world_size()],
        }
    }

    /// Where the next epoch begins, or why none does.
    pub(crate) fn session(&self) -> Result<&SessionHandle, String> {
        let session = self.session.as_ref().filter(|_| self.inner.is_ours());
        session.ok_or_else(|| "this is a forked child: connect after forking".to_owned())
    }

    pub(crate) fn arena(&self) -> Result<Arc<Arena>, String> {
        match self.session()? {
            SessionHandle::Daemon(daemon_session) => Ok(daemon_session.arena()),
            SessionHandle::Local(origin) => origin.arena().map_err(|error| error.to_string()),
        }
    }

    /// What this rank did last.
    pub fn flight(&self) -> Option<Snapshot> {
        self.inner.shared.recorder.snapshot()
    }
}
