//! Memory for a reply, reserved by a handler before it produces the reply.

use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::watch;

use super::budget::{Bytes, Credit, Owner};
use crate::deadline::Deadline;
use crate::fault::Fault;

/// Memory for the reply of one call. Held until the reply is written; clones share it.
#[derive(Clone)]
pub struct ReplyMemory(Arc<Inner>);

struct Inner {
    replies: Arc<Bytes>,
    owner: Owner,
    deadline: Deadline,
    closed: watch::Receiver<bool>,
    credit: Mutex<Option<Credit>>,
}

impl ReplyMemory {
    pub(super) fn new(
        replies: Arc<Bytes>,
        owner: Owner,
        deadline: Deadline,
        closed: watch::Receiver<bool>,
    ) -> Self {
        let credit = Mutex::default();
        Self(Arc::new(Inner { replies, owner, deadline, closed, credit }))
    }

    /// Waits, in fair order, until memory for a reply of at most `bytes` is available. Call it
    /// once, before the data of the reply is read from its source.
    ///
    /// # Errors
    /// A [`Fault`] if the caller has timed out or its connection has closed: no reply is needed.
    pub async fn reserve(&self, bytes: usize) -> Result<(), Fault> {
        let Inner { replies, owner, deadline, closed, credit } = &*self.0;
        let mut closed = closed.clone();
        let reserved = tokio::select! {
            reserved = replies.acquire(*owner, bytes, *deadline) => reserved,
            _ = closed.wait_for(|closed| *closed) => None,
        };
        // The connection may have closed during the wait.
        let reserved = reserved.filter(|_| !deadline.passed()).ok_or_else(Fault::expired)?;
        *credit.lock().unwrap_or_else(PoisonError::into_inner) = Some(reserved);
        Ok(())
    }

    /// Releases the memory that a smaller reply does not need.
    pub(super) fn shrink(&self, bytes: usize) {
        let mut credit = self.0.credit.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(credit) = credit.as_mut() {
            credit.shrink(bytes);
        }
    }
}

impl std::fmt::Debug for ReplyMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ReplyMemory").field("owner", &self.0.owner).finish_non_exhaustive()
    }
}
