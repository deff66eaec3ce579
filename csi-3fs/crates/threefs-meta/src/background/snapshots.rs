//! Background work of snapshots: creations that no service continues, and the history of removed
//! snapshots.

use std::collections::HashMap;
use std::time::Duration;

use fabric::boot_instant::BootInstant;
use threefs_core::ids::InodeId;

use crate::background::transaction;
use crate::ops::{self, OpError};
use crate::protocol::RequestId;
use crate::tree::snapshots::CREATION_TIMEOUT;
use crate::tree::{Tree, now};

/// Time between two rounds.
const INTERVAL: Duration = Duration::from_secs(1);

/// Creations in progress, and since when they are known.
pub(crate) type Creations = HashMap<(InodeId, RequestId), BootInstant>;

impl Tree {
    /// Runs until the future is dropped.
    pub(crate) async fn run_snapshots(&self) {
        let mut creations = Creations::new();
        loop {
            tokio::time::sleep(INTERVAL).await;
            if let Err(error) = self.abort_creations(&mut creations, CREATION_TIMEOUT).await {
                tracing::warn!(%error, "creations of snapshots could not be given up");
            }
            if let Err(error) = self.drop_history().await {
                tracing::warn!(%error, "the history of removed snapshots could not be dropped");
            }
        }
    }

    /// Gives up creations that have been known for this time, if this service is the collector.
    pub(crate) async fn abort_creations(
        &self,
        known: &mut Creations,
        older_than: Duration,
    ) -> Result<(), OpError> {
        if !self.lead().await? {
            known.clear();
            return Ok(());
        }
        let current = self.as_collector(&ops::ListCreations).await?;
        known.retain(|creation, _| current.contains(creation));
        for (volume, id) in current {
            let since = *known.entry((volume, id)).or_insert_with(BootInstant::now);
            if BootInstant::now().since(since) >= older_than {
                self.as_collector(&ops::AbortSnapshot { volume, id }).await?;
            }
        }
        Ok(())
    }

    /// Drops rows that only removed snapshots showed, if this service is the collector. Returns the
    /// number of snapshots whose rows are gone.
    pub(crate) async fn drop_history(&self) -> Result<usize, OpError> {
        if !self.lead().await? {
            return Ok(0);
        }
        let (mut place, mut finished) = ((InodeId(0), 0), 0);
        while let Some((volume, number)) =
            self.as_collector(&ops::NextRemoved { after: place }).await?
        {
            // Storage services drop versions by the list, whenever they get it.
            let fence = self.store.transact(transaction(), &ops::CurrentFence(volume)).await?;
            if let Err(error) = self.fences.raise(&fence, transaction()).await {
                tracing::info!(%volume, error, "the epochs of a volume could not be published");
            }
            let mut after = Vec::new();
            let open_files = &self.open_files;
            loop {
                let drop =
                    ops::DropHistory { volume, number, after: &after, open_files, now: now() };
                match self.as_collector(&drop).await? {
                    Some(last) => after = last,
                    None => break,
                }
            }
            finished += 1;
            place = (volume, number);
        }
        Ok(finished)
    }
}
