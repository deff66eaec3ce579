//! Recounts: release quota that files no longer need, once all capabilities for them have expired;
//! see `ops::volume::recount`.

use std::sync::Arc;
use std::time::Duration;

use fabric::deadline::Deadline;
use threefs_kv::Store;
use tokio::task::JoinSet;

use crate::background::transaction;
use crate::chunk_trimmer::ChunkTrimmer;
use crate::ops::{self, OpError, RecountEntry};
use crate::rows::{CollectorRow, Uptime};
use crate::tree::Tree;

/// Files per transaction.
const PAGE: usize = 256;
/// Files that are recounted concurrently: they share the store's flushes.
const COUNTED_AT_ONCE: usize = 16;
/// Timeout for storage to return the end of a file's chunks; failures are retried.
const ASK_TIMEOUT: Duration = Duration::from_secs(5);
/// Timeout of one round; the next one continues where it ended.
const ROUND_TIMEOUT: Duration = Duration::from_secs(60);

impl Tree {
    /// Runs until the future is dropped.
    pub(crate) async fn run_recounts(&self) {
        let every = Duration::from_millis((self.config.recount_wait_ms / 16).clamp(100, 20_000));
        let mut after = Vec::new();
        loop {
            tokio::time::sleep(every).await;
            if let Err(error) = self.recount(&mut after).await {
                tracing::warn!(%error, "recount round failed");
            }
        }
    }

    /// One round over the files that count for more than they need, starting where the last one
    /// ended.
    pub(crate) async fn recount(&self, after: &mut Vec<u8>) -> Result<(), OpError> {
        if !self.lead().await? {
            return Ok(());
        }
        let round = Deadline::after(ROUND_TIMEOUT);
        while !round.passed() {
            let (now, wait_ms) = (self.uptime(), self.config.recount_wait_ms);
            let list = ops::ListRecounts { after, limit: PAGE, now, wait_ms };
            let (page, last) = self.as_collector(&list).await?;
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
        let (due_files, former_files): (Vec<_>, Vec<_>) =
            page.into_iter().partition(|file| file.since.run_id == now.run_id);
        if !former_files.is_empty() {
            let anew = ops::RestartRecountWait { files: &former_files, now };
            self.as_collector(&anew).await?;
        }
        let collector = self.services.collector()?;
        let mut tasks: JoinSet<()> = JoinSet::new();
        for file in due_files {
            if tasks.len() >= COUNTED_AT_ONCE {
                // A task that panicked is retried in the next round.
                let _ = tasks.join_next().await;
            }
            tasks.spawn(count(self.store.clone(), Arc::clone(&self.trimmer), collector, file));
        }
        while tasks.join_next().await.is_some() {}
        Ok(())
    }
}

/// Queries storage and recounts the file. A failure is retried in the next round and does not block
/// other files: a client may be changing the file all the time.
async fn count(
    store: Store,
    trimmer: Arc<dyn ChunkTrimmer>,
    collector: CollectorRow,
    file: RecountEntry,
) {
    let RecountEntry { inode, needed_end, charged_end, ref layout, .. } = file;
    let range = needed_end..charged_end;
    let answer = trimmer.stored_end(inode, layout, range, Deadline::after(ASK_TIMEOUT)).await;
    let result = match answer {
        Ok(stored_end) => {
            let recount = ops::Recount { file: &file, stored_end };
            let fenced = ops::Fenced { collector, operation: &recount };
            let result = store.transact(transaction(), &fenced).await;
            result.map_err(|error| error.to_string())
        }
        Err(error) => Err(error),
    };
    if let Err(error) = result {
        tracing::debug!(%inode, error, "recount failed, will be retried in the next round");
    }
}
