//! Gives back what was removed, ends sessions of clients that are gone, forgets old answers.
//!
//! All of it can be done twice and in any order; what fails is tried again in the next round, and
//! keeps nothing else from being done.

use std::time::Duration;

use fabric::deadline::Deadline;

use crate::clients::milliseconds;
use crate::ops::{self, ListedRemoval, OpError, RemovalState};
use crate::protocol::EntryKind;
use crate::rows::{self, AnswerRow, SessionRow};
use crate::tree::{Tree, now};

/// Rows that one look takes.
const PAGE: usize = 256;
/// How long the chunks of one file may take; a file that takes longer is tried again.
const TRIM_TIMEOUT: Duration = Duration::from_secs(20);
/// How long one transaction may take.
const TRANSACTION_TIMEOUT: Duration = Duration::from_secs(5);

impl Tree {
    /// Works for ever; the caller drops it to end it.
    pub(crate) async fn collect_for_ever(&self) {
        let started_ms = milliseconds(now());
        let every = Duration::from_millis(self.config.collect_interval_ms.max(1));
        let sweep_every_ms = (self.config.session_timeout_ms / 4).clamp(100, 60_000);
        let mut swept_ms = started_ms;
        // A former life may have known more holders: they have this long to tell.
        tokio::time::sleep(Duration::from_millis(self.config.collect_delay_ms)).await;
        loop {
            tokio::time::sleep(every).await;
            if let Err(error) = self.collect().await {
                tracing::warn!(%error, "collecting what was removed");
            }
            let now_ms = milliseconds(now());
            if now_ms.saturating_sub(swept_ms) >= sweep_every_ms {
                swept_ms = now_ms;
                if let Err(error) = self.sweep(started_ms).await {
                    tracing::warn!(%error, "sweeping sessions and answers");
                }
            }
        }
    }

    /// Goes once through everything that is due. Returns how many removals it finished.
    pub(crate) async fn collect(&self) -> Result<u64, OpError> {
        let mut finished = 0;
        let mut after = Vec::new();
        loop {
            let list = ops::ListRemovals { holds: &self.holds, after: &after, limit: PAGE };
            let page = self.store.transact(transaction(), &list).await?;
            for removal in &page {
                let waited = milliseconds(now()).saturating_sub(milliseconds(removal.row.removed));
                if waited < self.config.collect_delay_ms {
                    continue;
                }
                match self.collect_one(removal).await {
                    Ok(true) => finished += 1,
                    Ok(false) => {}
                    Err(error) => {
                        tracing::warn!(inode = %removal.row.inode, %error, "not collected yet");
                    }
                }
            }
            match page.last() {
                Some(last) if page.len() == PAGE => after.clone_from(&last.key),
                _ => return Ok(finished),
            }
        }
    }

    async fn collect_one(&self, removal: &ListedRemoval) -> Result<bool, OpError> {
        if removal.row.kind == EntryKind::Directory {
            let (holds, now) = (&self.holds, removal.row.removed);
            let collect = ops::CollectDirectory { removal, holds, now };
            while !self.store.transact(transaction(), &collect).await? {}
            return Ok(true);
        }
        match &removal.state {
            RemovalState::InUse => return Ok(false),
            RemovalState::Rows => {}
            RemovalState::Chunks(layout) => {
                let inode = removal.row.inode;
                let trim = self.trimmer.trim(inode, layout, 0, Deadline::after(TRIM_TIMEOUT));
                if let Err(error) = trim.await {
                    tracing::info!(%inode, error, "its chunks stay for now");
                    return Ok(false);
                }
            }
        }
        self.store.transact(transaction(), &ops::FinishRemoval(removal)).await?;
        Ok(true)
    }

    /// Ends sessions of silent clients and forgets answers that nobody will ask for. Clients have
    /// had their whole time since this service began.
    pub(crate) async fn sweep(&self, started_ms: u64) -> Result<(), OpError> {
        let now_ms = milliseconds(now());
        let silent_since = now_ms.saturating_sub(self.config.session_timeout_ms);
        if started_ms <= silent_since {
            self.end_sessions(silent_since).await?;
            self.clients.forget_silent(silent_since);
            self.holds.forget_silent(silent_since);
        }
        let kept_since = now_ms.saturating_sub(self.config.answer_keep_ms);
        self.forget_rows(rows::ANSWERS, |key, value| {
            let row: AnswerRow = rows::decode(key, value)?;
            Ok(milliseconds(row.answered) < kept_since)
        })
        .await
    }

    /// Ends the sessions of clients that were not heard since, and what they had reserved.
    async fn end_sessions(&self, silent_since: u64) -> Result<(), OpError> {
        let mut after = Vec::new();
        loop {
            let list = ops::ListRows { prefix: rows::SESSIONS, after: &after, limit: PAGE };
            let page = self.store.transact(transaction(), &list).await?;
            for (key, value) in &page {
                let row: SessionRow = rows::decode(key, value)?;
                if !self.clients.heard_since(row.client, silent_since) {
                    self.store.transact(transaction(), &ops::EndSession { key }).await?;
                }
            }
            match page.last() {
                Some((last, _)) if page.len() == PAGE => after.clone_from(last),
                _ => return Ok(()),
            }
        }
    }

    async fn forget_rows(
        &self,
        prefix: &[u8],
        due: impl Fn(&[u8], &[u8]) -> Result<bool, OpError>,
    ) -> Result<(), OpError> {
        let mut after = Vec::new();
        loop {
            let list = ops::ListRows { prefix, after: &after, limit: PAGE };
            let page = self.store.transact(transaction(), &list).await?;
            let mut keys = Vec::new();
            for (key, value) in &page {
                if due(key, value)? {
                    keys.push(key.clone());
                }
            }
            if !keys.is_empty() {
                self.store.transact(transaction(), &ops::ForgetRows(&keys)).await?;
            }
            match page.last() {
                Some((last, _)) if page.len() == PAGE => after.clone_from(last),
                _ => return Ok(()),
            }
        }
    }

    /// Finishes truncations that a former life of the service began.
    pub(crate) async fn finish_all_trims(&self) -> Result<(), OpError> {
        let list = ops::ListRows { prefix: rows::TRIMS, after: &[], limit: PAGE };
        for (key, _) in self.store.transact(transaction(), &list).await? {
            let inode = rows::inode_of_key(&key)?;
            if let Err(error) = self.finish_trim(inode, Deadline::after(TRIM_TIMEOUT)).await {
                tracing::info!(%inode, %error, "a truncation stays unfinished for now");
            }
        }
        Ok(())
    }
}

fn transaction() -> Deadline {
    Deadline::after(TRANSACTION_TIMEOUT)
}
