//! Gives quotas back what files count for and do not need, once no capability for it is good any
//! more; see `ops::recount`.

use std::sync::Arc;
use std::time::Duration;

use fabric::deadline::Deadline;
use threefs_kv::Store;
use tokio::task::JoinSet;

use crate::background::transaction;
use crate::chunk_trimmer::ChunkTrimmer;
use crate::ops::{self, OpError, RecountEntry};
use crate::rows::Uptime;
use crate::tree::Tree;

/// Files that one look takes.
const PAGE: usize = 256;
/// Files that are counted side by side: they share the store's flushes.
const COUNTED_AT_ONCE: usize = 16;
/// How long storage may take to say where the chunks of a file end; what fails is tried again.
const ASK_TIMEOUT: Duration = Duration::from_secs(5);
/// How long one round may take; the next one goes on where it ended.
const ROUND_TIMEOUT: Duration = Duration::from_secs(60);

impl Tree {
    /// Works for ever; the caller drops it to end it.
    pub(crate) async fn run_recounts(&self) {
        let every = Duration::from_millis((self.config.recount_wait_ms / 16).clamp(100, 20_000));
        let mut after = Vec::new();
        loop {
            tokio::time::sleep(every).await;
            if let Err(error) = self.recount(&mut after).await {
                tracing::warn!(%error, "a round of recounts failed");
            }
        }
    }

    /// One round through the files that count for more than they need, from where the last one ended.
    pub(crate) async fn recount(&self, after: &mut Vec<u8>) -> Result<(), OpError> {
        let round = Deadline::after(ROUND_TIMEOUT);
        while !round.passed() {
            let (now, wait_ms) = (self.uptime(), self.config.recount_wait_ms);
            let list = ops::ListRecounts { after, limit: PAGE, now, wait_ms };
            let (page, last) = self.store.transact(transaction(), &list).await?;
            self.recount_page(page, now).await?;
            match last {
                Some(key) => *after = key,
                None => {
                    after.clear();
                    break;
                }
            }
        }
        Ok(())
    }

    async fn recount_page(&self, page: Vec<RecountEntry>, now: Uptime) -> Result<(), OpError> {
        let (due, former): (Vec<_>, Vec<_>) =
            page.into_iter().partition(|file| file.since.run_id == now.run_id);
        if !former.is_empty() {
            let anew = ops::RestartRecountWait { files: &former, now };
            self.store.transact(transaction(), &anew).await?;
        }
        let mut tasks: JoinSet<()> = JoinSet::new();
        for file in due {
            if tasks.len() >= COUNTED_AT_ONCE {
                // One that panicked says nothing of its file: it is counted in the next round.
                let _ = tasks.join_next().await;
            }
            tasks.spawn(count(self.store.clone(), Arc::clone(&self.trimmer), file));
        }
        while tasks.join_next().await.is_some() {}
        Ok(())
    }
}

/// Asks storage and counts the file again. What fails is tried again in the next round and holds no
/// other file up: its holder may be changing it all the time.
async fn count(store: Store, trimmer: Arc<dyn ChunkTrimmer>, file: RecountEntry) {
    let RecountEntry { inode, needed_end, charged_end, ref layout, .. } = file;
    let range = needed_end..charged_end;
    let asked = trimmer.stored_end(inode, layout, range, Deadline::after(ASK_TIMEOUT)).await;
    let counted = match asked {
        Ok(stored_end) => {
            let recount = ops::Recount { file: &file, stored_end };
            let counted = store.transact(transaction(), &recount).await;
            counted.map_err(|error| error.to_string())
        }
        Err(error) => Err(error),
    };
    if let Err(error) = counted {
        tracing::debug!(%inode, error, "its recount failed; it is tried again in the next round");
    }
}
