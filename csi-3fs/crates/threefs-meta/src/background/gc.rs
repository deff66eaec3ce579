//! Garbage collection: frees removed files, ends sessions of silent clients, drops old answers.
//!
//! A removed file passes through two queues. In the first it waits for `gc_delay_ms` and until no
//! client has it open; then one transaction marks its inode dead. In the second it waits for
//! `dead_grace_ms`, until updates of the clients that had it open have expired. Then storage
//! forgets it, one page of files per request to each chain, and its rows are removed. A chunk is
//! never removed while the inode of its file can still be read. A file in a quota passes through a
//! third queue: once all capabilities have expired, storage forgets it again, in case it was
//! written in the meantime.
//!
//! All steps are idempotent and can run in any order. A failed step is retried in the next round
//! and does not block others. No duration depends on the wall clock.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use fabric::boot_instant::BootInstant;
use fabric::deadline::Deadline;
use threefs_core::ids::ClientId;
use tokio::task::JoinSet;

use crate::background::transaction;
use crate::chunk_trimmer::{ChunkTrimmer, DeadFile};
use crate::ops::{self, DirectoryState, ListedRemoval, OpError, RemovalState};
use crate::protocol::EntryKind;
use crate::rows::{self, SessionRow};
use crate::tree::{Tree, now};

/// Rows per transaction.
const PAGE: usize = 256;
/// Pages that are sent to storage concurrently, so that a page that waits for one chain does not
/// block the next pages.
const PAGES_AT_ONCE: usize = 8;
/// Timeout for storage to forget the files of one page; failures are retried.
const FORGET_TIMEOUT: Duration = Duration::from_secs(20);
/// Timeout for a truncation that an earlier run started; it is retried in the next run.
const TRIM_TIMEOUT: Duration = Duration::from_secs(20);

impl Tree {
    /// Runs until the future is dropped.
    pub(crate) async fn run_gc(&self) {
        let every = Duration::from_millis(self.config.gc_interval_ms.max(1));
        let sweep_every_ms = (self.config.session_timeout_ms / 4).clamp(100, 60_000);
        let mut swept_ms = self.uptime_ms();
        // An earlier run may have known more clients than the removal names: they report within
        // this time.
        tokio::time::sleep(Duration::from_millis(self.config.gc_delay_ms)).await;
        loop {
            tokio::time::sleep(every).await;
            if let Err(error) = self.collect().await {
                tracing::warn!(%error, "garbage collection failed");
            }
            if self.uptime_ms().saturating_sub(swept_ms) >= sweep_every_ms {
                swept_ms = self.uptime_ms();
                if let Err(error) = self.sweep(self.uptime_ms()).await {
                    tracing::warn!(%error, "sweep of sessions and answers failed");
                }
            }
        }
    }

    /// One pass over all due entries, if this service is the collector. Returns the number of removals
    /// that it finished or advanced.
    pub(crate) async fn collect(&self) -> Result<u64, OpError> {
        if !self.lead().await? {
            return Ok(0);
        }
        let due = self.due_round(rows::REMOVALS).await?;
        self.check_removals().await?;
        if self.waits_for_clients() {
            return Ok(0);
        }
        let mut advanced = 0;
        if let Some(until) = due {
            let until = until.min(self.checked_by_all().await?);
            advanced += self.mark_removed_dead(until).await?;
        }
        for queue in [rows::DEAD, rows::TOMBSTONES] {
            if let Some(until) = self.due_round(queue).await? {
                advanced += self.drop_dead_files(queue, until).await?;
            }
        }
        Ok(advanced)
    }

    /// The round up to which the entries of a queue have waited long enough.
    async fn due_round(&self, queue: &'static [u8]) -> Result<Option<u64>, OpError> {
        let round = self.as_collector(&ops::EndRound { queue }).await?;
        let mut queue_clocks =
            self.queue_clocks.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let (queue_clocks, wait_ms) = match queue {
            rows::DEAD => (&mut queue_clocks.dead, self.config.dead_grace_ms),
            rows::TOMBSTONES => (&mut queue_clocks.tombstones, self.config.recount_wait_ms),
            _ => (&mut queue_clocks.removed, self.config.gc_delay_ms),
        };
        Ok(queue_clocks.due_round(BootInstant::now(), round, Duration::from_millis(wait_ms)))
    }

    /// First queue: marks files dead, empties directories, removes entries without chunks.
    async fn mark_removed_dead(&self, until: u64) -> Result<u64, OpError> {
        let mut advanced = 0;
        let mut after = Vec::new();
        loop {
            let page = self.removals(rows::REMOVALS, until, &after).await?;
            let of_state = |matches: fn(&RemovalState) -> bool| {
                let files = page.iter().filter(|it| it.row.kind != EntryKind::Directory);
                files.filter(move |it| matches(&it.state))
            };
            let files: Vec<&ListedRemoval> =
                of_state(|state| matches!(state, RemovalState::Chunks { .. })).collect();
            if !files.is_empty() {
                let mark = ops::MarkDead { removals: &files };
                advanced += self.as_collector(&mark).await? as u64;
            }
            let uncharged: Vec<&ListedRemoval> =
                of_state(|state| *state == RemovalState::InUse { charged: false }).collect();
            if !uncharged.is_empty() {
                self.as_collector(&ops::ChargeOpen(&uncharged)).await?;
            }
            let rows: Vec<ListedRemoval> =
                of_state(|state| *state == RemovalState::Rows).cloned().collect();
            advanced += self.finish(rows::REMOVALS, &rows).await?;
            for removal in page.iter().filter(|it| it.row.kind == EntryKind::Directory) {
                let collect =
                    ops::EmptyDirectory { removal, open_files: &self.open_files, now: now() };
                loop {
                    match self.as_collector(&collect).await? {
                        DirectoryState::HasEntries => {}
                        DirectoryState::HasSnapshots => break,
                        DirectoryState::Gone => {
                            advanced += 1;
                            break;
                        }
                    }
                }
            }
            match page.last() {
                Some(last) if page.len() == PAGE => after.clone_from(&last.key),
                _ => return Ok(advanced),
            }
        }
    }

    /// Second and third queue: storage forgets dead files, many at a time; then their rows are
    /// removed.
    async fn drop_dead_files(&self, queue: &'static [u8], until: u64) -> Result<u64, OpError> {
        let mut advanced = 0;
        let mut after = Vec::new();
        let mut tasks: JoinSet<Vec<ListedRemoval>> = JoinSet::new();
        loop {
            let page = self.removals(queue, until, &after).await?;
            let last = page.last().filter(|_| page.len() == PAGE).map(|it| it.key.clone());
            let (mut dead, mut files) = (Vec::new(), Vec::new());
            for removal in page {
                match removal.state.clone() {
                    RemovalState::InUse { .. } => {
                        self.as_collector(&ops::Revive(&removal)).await?;
                    }
                    RemovalState::Rows => advanced += self.finish(queue, &[removal]).await?,
                    RemovalState::Chunks { layout, end } => {
                        files.push(DeadFile { inode: removal.row.inode, layout, end });
                        dead.push(removal);
                    }
                }
            }
            if tasks.len() >= PAGES_AT_ONCE {
                advanced += self.finish(queue, &next_done(&mut tasks).await).await?;
            }
            if !dead.is_empty() {
                tasks.spawn(forget(Arc::clone(&self.trimmer), dead, files));
            }
            match last {
                Some(key) => after = key,
                None => break,
            }
        }
        while !tasks.is_empty() {
            advanced += self.finish(queue, &next_done(&mut tasks).await).await?;
        }
        Ok(advanced)
    }

    async fn removals(
        &self,
        queue: &'static [u8],
        until: u64,
        after: &[u8],
    ) -> Result<Vec<ListedRemoval>, OpError> {
        let list = ops::ListRemovals { queue, until, after, limit: PAGE };
        self.as_collector(&list).await
    }

    async fn finish(
        &self,
        queue: &'static [u8],
        removals: &[ListedRemoval],
    ) -> Result<u64, OpError> {
        match queue {
            _ if removals.is_empty() => {}
            rows::TOMBSTONES => self.as_collector(&ops::DropTombstones(removals)).await?,
            _ => self.as_collector(&ops::FinishRemovals(removals)).await?,
        }
        Ok(removals.len() as u64)
    }

    /// Ends sessions of silent clients and drops answers that can no longer be requested, if this
    /// service is the collector. Timeouts count from the start of the service.
    pub(crate) async fn sweep(&self, uptime_ms: u64) -> Result<(), OpError> {
        let leads = self.lead().await?;
        if let Some(silent_since) = uptime_ms.checked_sub(self.config.session_timeout_ms) {
            if leads {
                self.end_sessions(silent_since, uptime_ms).await?;
                self.expire_former(silent_since).await?;
            }
            self.clients.expire_idle(silent_since);
            self.open_files.expire_idle(silent_since);
        }
        if leads {
            let kept_since = uptime_ms.checked_sub(self.config.answer_keep_ms);
            self.forget_answers(kept_since, uptime_ms).await?;
            if let Some(kept_since) = kept_since {
                self.forget_clients(kept_since, uptime_ms).await?;
            }
            self.published_activity.retain_asked_at(uptime_ms);
        }
        Ok(())
    }

    /// Ends the sessions of clients that have been silent since then, and their reservations.
    async fn end_sessions(&self, silent_since: u64, now_ms: u64) -> Result<(), OpError> {
        let mut after = Vec::new();
        loop {
            let list = ops::ListRows { prefix: rows::SESSIONS, after: &after, limit: PAGE };
            let page = self.as_collector(&list).await?;
            let mut sessions = Vec::with_capacity(page.len());
            for (key, value) in &page {
                sessions.push((key, SessionRow::decode(key, value)?.client));
            }
            let clients = sessions.iter().map(|(_, client)| *client);
            let silent = self.silent_clients(clients, silent_since, now_ms).await?;
            for (key, _) in sessions.iter().filter(|(_, client)| silent.contains(client)) {
                self.end_session(key).await?;
            }
            match page.last() {
                Some((last, _)) if page.len() == PAGE => after.clone_from(last),
                _ => return Ok(()),
            }
        }
    }

    async fn end_session(&self, key: &[u8]) -> Result<(), OpError> {
        let context = ops::RecountContext { now: self.uptime(), excess_allowed: true };
        match self.as_collector(&ops::EndSession { key, context }).await {
            Err(error) if error.is_over_excess() => {
                let context = ops::RecountContext { excess_allowed: false, ..context };
                self.as_collector(&ops::EndSession { key, context }).await
            }
            ended => ended,
        }
    }

    async fn forget_answers(&self, kept_since: Option<u64>, now_ms: u64) -> Result<(), OpError> {
        let mut after = Vec::new();
        loop {
            let list = ops::ListRows { prefix: rows::ANSWERS, after: &after, limit: PAGE };
            let page = self.as_collector(&list).await?;
            let mut answers = Vec::with_capacity(page.len());
            for (key, _) in &page {
                answers.push(rows::answer_of_key(key)?);
            }
            let clients = answers.iter().map(|(client, _)| *client);
            let silent = match kept_since {
                Some(since) => self.silent_clients(clients, since, now_ms).await?,
                None => HashSet::new(),
            };
            let mut of_client: BTreeMap<ClientId, Vec<u64>> = BTreeMap::new();
            for (client, sequence) in answers {
                if silent.contains(&client) || self.clients.has_finished(client, sequence) {
                    of_client.entry(client).or_default().push(sequence);
                }
            }
            if !of_client.is_empty() {
                self.as_collector(&ops::ForgetAnswers(&of_client)).await?;
            }
            match page.last() {
                Some((last, _)) if page.len() == PAGE => after.clone_from(last),
                _ => return Ok(()),
            }
        }
    }

    /// Removes the floors and the published activity of silent clients: no duplicate of a change of
    /// theirs can arrive any more.
    async fn forget_clients(&self, silent_since: u64, now_ms: u64) -> Result<(), OpError> {
        for prefix in [rows::FLOORS, rows::SEEN] {
            let mut after = Vec::new();
            loop {
                let list = ops::ListRows { prefix, after: &after, limit: PAGE };
                let page = self.as_collector(&list).await?;
                let mut clients = Vec::with_capacity(page.len());
                for (key, _) in &page {
                    clients.push(rows::client_of_key(key)?);
                }
                let silent =
                    self.silent_clients(clients.iter().copied(), silent_since, now_ms).await?;
                let keys: Vec<Vec<u8>> = silent
                    .iter()
                    .map(|client| [prefix, &client.0.to_be_bytes()].concat())
                    .collect();
                if !keys.is_empty() {
                    self.as_collector(&ops::ClearRows(&keys)).await?;
                }
                match page.last() {
                    Some((last, _)) if page.len() == PAGE => after.clone_from(last),
                    _ => break,
                }
            }
        }
        Ok(())
    }

    /// Completes truncations that an earlier run of the service started.
    pub(crate) async fn finish_all_trims(&self) -> Result<(), OpError> {
        let list = ops::ListRows { prefix: rows::TRIMS, after: &[], limit: PAGE };
        for (key, _) in self.store.transact(transaction(), &list).await? {
            let inode = rows::inode_of_key(&key)?;
            if let Err(error) = self.finish_trim(inode, Deadline::after(TRIM_TIMEOUT)).await {
                tracing::info!(%inode, %error, "truncation not finished, will be retried");
            }
        }
        Ok(())
    }
}

/// The removals of the next completed page whose chunks are gone.
async fn next_done(tasks: &mut JoinSet<Vec<ListedRemoval>>) -> Vec<ListedRemoval> {
    tasks.join_next().await.and_then(Result::ok).unwrap_or_default()
}

async fn forget(
    trimmer: Arc<dyn ChunkTrimmer>,
    dead: Vec<ListedRemoval>,
    files: Vec<DeadFile>,
) -> Vec<ListedRemoval> {
    let results = trimmer.forget(&files, Deadline::after(FORGET_TIMEOUT)).await;
    let mut trimmed = Vec::with_capacity(dead.len());
    let mut failure: Option<(String, usize)> = None;
    for (removal, result) in dead.into_iter().zip(results) {
        match result {
            Ok(()) => trimmed.push(removal),
            Err(error) => {
                let (_, count) = failure.get_or_insert((error, 0));
                *count += 1;
            }
        }
    }
    if let Some((error, files)) = failure {
        tracing::info!(
            files,
            error,
            "chunks of removed files could not be dropped, will be retried"
        );
    }
    trimmed
}
