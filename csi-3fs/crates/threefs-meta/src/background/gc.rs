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

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use fabric::boot_instant::BootInstant;
use fabric::deadline::Deadline;
use threefs_core::ids::ClientId;
use tokio::task::JoinSet;

use crate::background::transaction;
use crate::chunk_trimmer::{ChunkTrimmer, DeadFile};
use crate::ops::{self, ListedRemoval, OpError, RemovalState};
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

    /// One pass over all due entries. Returns the number of removals that it finished or advanced.
    pub(crate) async fn collect(&self) -> Result<u64, OpError> {
        let mut advanced = 0;
        if let Some(until) = self.due_version(rows::REMOVALS).await? {
            advanced += self.mark_removed_dead(until).await?;
        }
        for queue in [rows::DEAD, rows::TOMBSTONES] {
            if let Some(until) = self.due_version(queue).await? {
                advanced += self.drop_dead_files(queue, until).await?;
            }
        }
        Ok(advanced)
    }

    /// The version up to which the entries of a queue have waited long enough.
    async fn due_version(&self, queue: &'static [u8]) -> Result<Option<u64>, OpError> {
        let version = self.store.transact(transaction(), &ops::NewestVersion).await?;
        let mut queue_clocks =
            self.queue_clocks.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let (queue_clocks, wait_ms) = match queue {
            rows::DEAD => (&mut queue_clocks.dead, self.config.dead_grace_ms),
            rows::TOMBSTONES => (&mut queue_clocks.tombstones, self.config.recount_wait_ms),
            _ => (&mut queue_clocks.removed, self.config.gc_delay_ms),
        };
        Ok(queue_clocks.due_version(BootInstant::now(), version, Duration::from_millis(wait_ms)))
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
                let mark = ops::MarkDead { removals: &files, open_files: &self.open_files };
                advanced += self.store.transact(transaction(), &mark).await? as u64;
            }
            let uncharged: Vec<&ListedRemoval> =
                of_state(|state| *state == RemovalState::InUse { charged: false }).collect();
            if !uncharged.is_empty() {
                self.store.transact(transaction(), &ops::ChargeOpen(&uncharged)).await?;
            }
            let rows: Vec<ListedRemoval> =
                of_state(|state| *state == RemovalState::Rows).cloned().collect();
            advanced += self.finish(rows::REMOVALS, &rows).await?;
            for removal in page.iter().filter(|it| it.row.kind == EntryKind::Directory) {
                let collect =
                    ops::EmptyDirectory { removal, open_files: &self.open_files, now: now() };
                while !self.store.transact(transaction(), &collect).await? {}
                advanced += 1;
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
                        self.store.transact(transaction(), &ops::Revive(&removal)).await?;
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
        let list =
            ops::ListRemovals { queue, until, open_files: &self.open_files, after, limit: PAGE };
        self.store.transact(transaction(), &list).await
    }

    async fn finish(
        &self,
        queue: &'static [u8],
        removals: &[ListedRemoval],
    ) -> Result<u64, OpError> {
        match queue {
            _ if removals.is_empty() => {}
            rows::TOMBSTONES => {
                self.store.transact(transaction(), &ops::DropTombstones(removals)).await?
            }
            _ => self.store.transact(transaction(), &ops::FinishRemovals(removals)).await?,
        }
        Ok(removals.len() as u64)
    }

    /// Ends sessions of silent clients and drops answers that can no longer be requested. Timeouts
    /// count from the start of the service.
    pub(crate) async fn sweep(&self, uptime_ms: u64) -> Result<(), OpError> {
        if let Some(silent_since) = uptime_ms.checked_sub(self.config.session_timeout_ms) {
            self.end_sessions(silent_since).await?;
            self.clients.expire_idle(silent_since);
            self.open_files.expire_idle(silent_since);
        }
        let kept_since = uptime_ms.checked_sub(self.config.answer_keep_ms);
        let is_silent =
            |client| kept_since.is_some_and(|at| !self.clients.active_since(client, at));
        self.forget_answers(|client, sequence| {
            self.clients.has_finished(client, sequence) || is_silent(client)
        })
        .await?;
        self.forget_floors(is_silent).await
    }

    /// Ends the sessions of clients that have been silent since then, and their reservations.
    async fn end_sessions(&self, silent_since: u64) -> Result<(), OpError> {
        let mut after = Vec::new();
        loop {
            let list = ops::ListRows { prefix: rows::SESSIONS, after: &after, limit: PAGE };
            let page = self.store.transact(transaction(), &list).await?;
            for (key, value) in &page {
                let row = SessionRow::decode(key, value)?;
                if !self.clients.active_since(row.client, silent_since) {
                    self.end_session(key).await?;
                }
            }
            match page.last() {
                Some((last, _)) if page.len() == PAGE => after.clone_from(last),
                _ => return Ok(()),
            }
        }
    }

    async fn end_session(&self, key: &[u8]) -> Result<(), OpError> {
        let context = ops::RecountContext { now: self.uptime(), excess_allowed: true };
        let end = ops::EndSession { key, context };
        match self.store.transact(transaction(), &end).await {
            Err(error) if error.is_over_excess() => {
                let context = ops::RecountContext { excess_allowed: false, ..context };
                self.store.transact(transaction(), &ops::EndSession { key, context }).await
            }
            ended => ended,
        }
    }

    async fn forget_answers(&self, is_due: impl Fn(ClientId, u64) -> bool) -> Result<(), OpError> {
        let mut after = Vec::new();
        loop {
            let list = ops::ListRows { prefix: rows::ANSWERS, after: &after, limit: PAGE };
            let page = self.store.transact(transaction(), &list).await?;
            let mut of_client: BTreeMap<ClientId, Vec<u64>> = BTreeMap::new();
            for (key, _) in &page {
                let (client, sequence) = rows::answer_of_key(key)?;
                if is_due(client, sequence) {
                    of_client.entry(client).or_default().push(sequence);
                }
            }
            if !of_client.is_empty() {
                self.store.transact(transaction(), &ops::ForgetAnswers(&of_client)).await?;
            }
            match page.last() {
                Some((last, _)) if page.len() == PAGE => after.clone_from(last),
                _ => return Ok(()),
            }
        }
    }

    async fn forget_floors(&self, is_silent: impl Fn(ClientId) -> bool) -> Result<(), OpError> {
        let mut after = Vec::new();
        loop {
            let list = ops::ListRows { prefix: rows::FLOORS, after: &after, limit: PAGE };
            let page = self.store.transact(transaction(), &list).await?;
            let mut silent = Vec::new();
            for (key, _) in &page {
                silent.extend(Some(rows::client_of_key(key)?).filter(|client| is_silent(*client)));
            }
            if !silent.is_empty() {
                self.store.transact(transaction(), &ops::ForgetFloors(&silent)).await?;
            }
            match page.last() {
                Some((last, _)) if page.len() == PAGE => after.clone_from(last),
                _ => return Ok(()),
            }
        }
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
