//! Completion of truncations: the chunks are cut, then the `TRIM` row is removed.

use std::sync::{Arc, PoisonError};

use fabric::deadline::Deadline;
use threefs_core::ids::InodeId;

use crate::chunk_trimmer::Pending;
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
        let trim = self.store.transact(deadline, &ops::ReadTrim(inode)).await?;
        let Some((trim, layout, end)) = trim else { return Ok(()) };
        let (range, version) = (trim.length..end, trim.truncate_version);
        let pending = self.pending_trim(inode, version, deadline);
        if let Err(detail) = self.trimmer.trim(inode, &layout, range, pending, deadline).await {
            let trim = self.store.transact(deadline, &ops::ReadTrim(inode)).await?;
            return match trim {
                Some((trim, ..)) if trim.truncate_version == version => {
                    let detail =
                        format!("cannot truncate {inode} to {} bytes: {detail}", trim.length);
                    Err(MetaError::Unavailable { detail }.into())
                }
                // Another service has completed it.
                _ => Ok(()),
            };
        }
        let finish = ops::FinishTrim { inode, truncate_version: version };
        self.store.transact(deadline, &finish).await
    }

    fn pending_trim(&self, inode: InodeId, version: u64, deadline: Deadline) -> Pending {
        let store = self.store.clone();
        Arc::new(move || {
            let store = store.clone();
            Box::pin(async move {
                let trim = store.transact(deadline, &ops::ReadTrim(inode)).await;
                match trim.map_err(|error| error.to_string())? {
                    Some((trim, ..)) if trim.truncate_version == version => Ok(()),
                    _ => Err("another service has completed it".into()),
                }
            })
        })
    }
}
