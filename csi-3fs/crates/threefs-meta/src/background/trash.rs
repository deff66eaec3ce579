//! Expiry of removed files in the trash of volumes.

use std::time::Duration;

use threefs_core::ids::InodeId;

use crate::ops::{self, OpError};
use crate::protocol::Nanoseconds;
use crate::tree::{Tree, now};

/// Time between two rounds.
const INTERVAL: Duration = Duration::from_secs(10);
/// Pages of all volumes in one round.
const PAGES_PER_ROUND: usize = 64;

impl Tree {
    /// Runs until the future is dropped.
    pub(crate) async fn run_trash_expiry(&self) {
        let mut after = InodeId(0);
        loop {
            tokio::time::sleep(INTERVAL).await;
            match self.expire_trash(now(), after).await {
                Ok(last) => after = last,
                Err(error) => {
                    tracing::warn!(%error, "removed files in the trash could not be expired");
                }
            }
        }
    }

    /// One round, if this service is the collector: a page of each volume in turn, from the one that
    /// follows `after`, so that one with many entries does not delay others. Returns the last one:
    /// the next round continues there, so that every volume has its turn.
    pub(crate) async fn expire_trash(
        &self,
        now: Nanoseconds,
        mut after: InodeId,
    ) -> Result<InodeId, OpError> {
        if !self.lead().await? {
            return Ok(after);
        }
        let (mut pages, mut unfinished) = (0, false);
        while pages < PAGES_PER_ROUND {
            match self.as_collector(&ops::NextTrash { after }).await? {
                Some(volume) => {
                    let expire = ops::ExpireTrash { volume, open_files: &self.open_files, now };
                    unfinished |= self.as_collector(&expire).await?;
                    (pages, after) = (pages + 1, volume);
                }
                None if unfinished => (after, unfinished) = (InodeId(0), false),
                None => return Ok(InodeId(0)),
            }
        }
        Ok(after)
    }
}
