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
        loop {
            tokio::time::sleep(INTERVAL).await;
            if let Err(error) = self.expire_trash(now()).await {
                tracing::warn!(%error, "removed files in the trash could not be expired");
            }
        }
    }

    /// One round, if this service is the collector: a page of each volume in turn, so that one with
    /// many entries does not delay others.
    pub(crate) async fn expire_trash(&self, now: Nanoseconds) -> Result<(), OpError> {
        if !self.lead().await? {
            return Ok(());
        }
        let mut pages = 0;
        let mut unfinished = true;
        while unfinished {
            unfinished = false;
            let mut after = InodeId(0);
            while let Some(volume) = self.as_collector(&ops::NextTrash { after }).await? {
                if pages == PAGES_PER_ROUND {
                    return Ok(());
                }
                let expire = ops::ExpireTrash { volume, open_files: &self.open_files, now };
                unfinished |= self.as_collector(&expire).await?;
                (pages, after) = (pages + 1, volume);
            }
        }
        Ok(())
    }
}
