//! Completion of truncations: the chunks are cut, then the `TRIM` row is removed.

use std::sync::{Arc, PoisonError};

use fabric::deadline::Deadline;
use threefs_core::ids::InodeId;

use crate::ops::{self, OpError};
use crate::protocol::MetaError;
use crate::tree::Tree;

impl Tree {
    /// Completes a pending truncation, if any.
    pub(crate) async fn finish_trim(
        &self,
        inode: InodeId,
        deadline: Deadline,
    ) -> Result<(), OpError> {
        let lock = Arc::clone(
            self.trimming.lock().unwrap_or_else(PoisonError::into_inner).entry(inode).or_default(),
        );
        let result = match tokio::time::timeout_at(deadline.instant().into(), lock.lock()).await {
            Ok(_held) => self.trim_inner(inode, deadline).await,
            Err(_) => Err(OpError::TrimPending(inode)),
        };
        drop(lock);
        let mut locks = self.trimming.lock().unwrap_or_else(PoisonError::into_inner);
        locks.retain(|_, lock| Arc::strong_count(lock) > 1);
        result
    }

    async fn trim_inner(&self, inode: InodeId, deadline: Deadline) -> Result<(), OpError> {
        let pending = self.store.transact(deadline, &ops::ReadTrim(inode)).await?;
        let Some((trim, layout, end)) = pending else { return Ok(()) };
        let range = trim.length..end;
        self.trimmer.trim(inode, &layout, range, deadline).await.map_err(|detail| {
            let detail = format!("cannot truncate {inode} to {} bytes: {detail}", trim.length);
            MetaError::Unavailable { detail }
        })?;
        let finish = ops::FinishTrim { inode, truncate_version: trim.truncate_version };
        self.store.transact(deadline, &finish).await
    }
}
