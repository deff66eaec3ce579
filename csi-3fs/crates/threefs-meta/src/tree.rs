//! The tree as a service: requests in, answers out, without sockets.
//!
//! Each request becomes one operation on the store, with what it needs from outside (time, fresh
//! inodes, chains) drawn before. The answer is given when the store says that it is durable.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fabric::BoxFuture;
use fabric::boot_instant::BootInstant;
use fabric::deadline::Deadline;
use threefs_core::ids::InodeId;
use threefs_core::routing::RoutingInfo;
use threefs_kv::{KvError, Operation, Room, Store};
use tokio::sync::watch;

use crate::chunks::ChunkTrimmer;
use crate::clients::{Client, Clients};
use crate::collector::QueueAges;
use crate::config::TreeConfig;
use crate::holds::Holds;
use crate::identity::{GROUPS_MAX, Identity};
use crate::layouts::RoundRobin;
use crate::ops::{self, AnswerRoom, Given, OpError};
use crate::protocol::{
    BATCH_MAX, LengthReport, MetaChange, MetaError, MetaQuery, MetaReply, MetaRequest, MetaResult,
    MetaStatus, Nanoseconds, REPORT_RANGES_MAX, RequestId, SessionId,
};
use crate::rows::{self, Uptime};

/// The longest that one request may take, whatever its caller would wait.
pub(crate) const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);
/// Inodes that are taken from the store at once.
const INODES_PER_BLOCK: u64 = 4096;
/// Truncations that one request waits for, one after the other.
const TRIMS_MAX: usize = 16;
/// `MetaStatus` counts no further.
const COUNT_MAX: usize = 100_000;

/// The tree.
pub struct Tree {
    pub(crate) store: Store,
    pub(crate) config: TreeConfig,
    pub(crate) trimmer: Arc<dyn ChunkTrimmer>,
    pub(crate) clients: Clients,
    pub(crate) holds: Holds,
    /// How long the collector's queues have waited.
    pub(crate) ages: Mutex<QueueAges>,
    started: BootInstant,
    layouts: RoundRobin,
    inodes: tokio::sync::Mutex<Range<u64>>,
    /// Set when the store fails in a way from which only a restart recovers.
    failed: watch::Sender<Option<KvError>>,
    /// One truncation of a file at a time: see `ops::length`.
    trimming: Mutex<HashMap<InodeId, Arc<tokio::sync::Mutex<()>>>>,
}

/// A change on its way: who asks, when, with which inodes.
struct Ask<'a> {
    id: RequestId,
    who: &'a Identity,
    client: &'a Client,
    /// Changes whose answers it forgets along the way.
    finished: Range<u64>,
    room: AnswerRoom,
    given: Given,
    session: SessionId,
    deadline: Deadline,
}

impl Ask<'_> {
    fn once<O>(&self, operation: O) -> ops::AnswerOnce<'_, O> {
        ops::AnswerOnce {
            id: self.id,
            now: self.given.now,
            floor: &self.client.floor,
            finished: self.finished.clone(),
            volume: self.who.scope,
            room: self.room,
            operation,
        }
    }
}

impl Tree {
    /// Opens the tree in a store; makes the root if it is not there.
    ///
    /// # Errors
    /// When the store fails or holds a tree of another version.
    pub async fn open(
        store: Store,
        config: TreeConfig,
        routing: watch::Receiver<Arc<RoutingInfo>>,
        trimmer: Arc<dyn ChunkTrimmer>,
    ) -> Result<Self, MetaError> {
        store.transact(Deadline::after(REQUEST_TIMEOUT), &ops::InitTree(now())).await?;
        Ok(Self {
            store,
            config,
            trimmer,
            clients: Clients::default(),
            holds: Holds::new(rand::random()),
            ages: Mutex::default(),
            started: BootInstant::now(),
            layouts: RoundRobin::new(routing, config.layout, rand::random()),
            inodes: tokio::sync::Mutex::new(0..0),
            failed: watch::channel(None).0,
            trimming: Mutex::default(),
        })
    }

    /// Milliseconds since the service began, suspended time included.
    pub(crate) fn uptime_ms(&self) -> u64 {
        let uptime = BootInstant::now().since(self.started);
        u64::try_from(uptime.as_millis()).unwrap_or(u64::MAX)
    }

    /// Now, for what is compared in this life of the service alone.
    pub(crate) fn uptime(&self) -> Uptime {
        Uptime { life: self.holds.life(), ms: self.uptime_ms() }
    }

    /// Answers one request.
    ///
    /// # Errors
    /// Any [`MetaError`].
    pub fn answer(&self, request: MetaRequest, deadline: Deadline) -> BoxFuture<'_, MetaResult> {
        Box::pin(self.answer_now(request, deadline))
    }

    async fn answer_now(&self, request: MetaRequest, deadline: Deadline) -> MetaResult {
        let deadline = deadline.within(REQUEST_TIMEOUT);
        let answered = match request {
            MetaRequest::Query { who, query } => self.query(&who, &query, deadline).await,
            MetaRequest::Change { id, who, change } => {
                self.change(id, &who, &change, deadline).await
            }
        };
        if let Err(OpError::Kv(error @ (KvError::Broken { .. } | KvError::CommitUnknown { .. }))) =
            &answered
        {
            self.failed.send_replace(Some(error.clone()));
        }
        Ok(answered?)
    }

    /// Runs an operation that only reads.
    pub(crate) async fn transact<O>(
        &self,
        deadline: Deadline,
        read: &O,
    ) -> Result<O::Output, OpError>
    where
        O: Operation<Error = OpError>,
    {
        self.store.transact(deadline.within(REQUEST_TIMEOUT), read).await
    }

    /// Ends when the store has failed in a way from which only a restart recovers.
    pub async fn store_failed(&self) -> KvError {
        let mut failed = self.failed.subscribe();
        loop {
            if let Some(error) = failed.borrow_and_update().clone() {
                return error;
            }
            if failed.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }

    async fn query(
        &self,
        who: &Identity,
        query: &MetaQuery,
        deadline: Deadline,
    ) -> Result<MetaReply, OpError> {
        check_identity(who)?;
        let store = &self.store;
        match query {
            MetaQuery::Stat { at, follow } => {
                store.transact(deadline, &ops::Stat { who, at, follow: *follow }).await
            }
            MetaQuery::StatMany { at } => {
                check_batch("at", at.len())?;
                store.transact(deadline, &ops::StatMany { who, at }).await
            }
            MetaQuery::StatChunks { at, chunks } => {
                check_batch("chunks", chunks.len())?;
                store.transact(deadline, &ops::StatChunks { who, at, chunks }).await
            }
            MetaQuery::List { at, after, limit } => {
                store.transact(deadline, &ops::List { who, at, after, limit: *limit }).await
            }
            MetaQuery::Open { at, access, client } => {
                let open = ops::OpenInode { who, at, access: *access };
                // Noted twice where the path leads on: before the read for what is named by its
                // inode, and after it for everything.
                if at.path.is_empty() {
                    self.holds.hold(*client, who.scope, at.directory, self.uptime_ms());
                }
                let opened = self.store.transact(deadline, &open).await;
                match &opened {
                    Ok(MetaReply::Inode(inode)) => {
                        self.holds.hold(*client, who.scope, inode.id, self.uptime_ms());
                    }
                    _ if at.path.is_empty() => {
                        self.holds.update(*client, who.scope, &[], &[at.directory], false, 0);
                    }
                    _ => {}
                }
                opened
            }
            MetaQuery::Hold { client, add, release, all } => {
                self.clients.hear_of(*client, who.scope, self.uptime_ms());
                let now = self.uptime_ms();
                let update = |add: &[InodeId], release: &[InodeId], all| {
                    self.holds.update(*client, who.scope, add, release, all, now)
                };
                for part in add.chunks(BATCH_MAX) {
                    update(part, &[], false);
                    tokio::task::yield_now().await;
                }
                for part in release.chunks(BATCH_MAX) {
                    update(&[], part, false);
                    tokio::task::yield_now().await;
                }
                Ok(MetaReply::Held { complete: update(&[], &[], *all) })
            }
            MetaQuery::Quotas { at } => store.transact(deadline, &ops::Quotas { who, at }).await,
            MetaQuery::GetAttribute { at, name } => {
                store.transact(deadline, &ops::GetAttribute { who, at, name }).await
            }
            MetaQuery::ListAttributes { at } => {
                store.transact(deadline, &ops::ListAttributes { who, at }).await
            }
            // Answered by the service, which has the keys.
            MetaQuery::Capabilities { .. } => Err(MetaError::NotSupported {
                path: String::new(),
                reason: "the cluster's key needs no capabilities".into(),
            }
            .into()),
            MetaQuery::PathOf { directory } => {
                store.transact(deadline, &ops::PathOf(*directory)).await
            }
            MetaQuery::Status => Ok(MetaReply::Status(MetaStatus {
                store_used_bytes: self.store.room()?.map(|room| room.used_bytes),
                store_max_bytes: self.store.room()?.map(|room| room.max_bytes),
                removals_pending: self.count(rows::REMOVALS, deadline).await?
                    + self.count(rows::DEAD, deadline).await?,
                sessions: self.count(rows::SESSIONS, deadline).await?,
            })),
        }
    }

    async fn count(&self, prefix: &'static [u8], deadline: Deadline) -> Result<u64, OpError> {
        self.store.transact(deadline, &ops::CountRows { prefix, limit: COUNT_MAX }).await
    }

    async fn change(
        &self,
        id: RequestId,
        who: &Identity,
        change: &MetaChange,
        deadline: Deadline,
    ) -> Result<MetaReply, OpError> {
        check_identity(who)?;
        let room = self.store.room()?;
        // What the control plane does goes on; further rows of written chunks are for nobody.
        let spared = who.is_control_plane() && !reports(change);
        let full = if spared { None } else { full(room) };
        if let Some(full) = &full
            && grows(change)
        {
            return Err(full.clone().into());
        }
        let client = self.clients.hear(id, who.scope, self.uptime_ms());
        let names = match change {
            MetaChange::MakeDirectory { at, parents: true, .. } => ops::names_of(&at.path),
            MetaChange::Create { .. }
            | MetaChange::MakeDirectory { .. }
            | MetaChange::MakeSymlink { .. }
            | MetaChange::MakeSpecial { .. } => 1,
            _ => 0,
        };
        let first_inode = self.fresh_inodes(names, deadline).await?;
        let (uptime, excess_allowed) = (self.uptime(), true);
        let given = Given { now: now(), uptime, excess_allowed, first_inode, full };
        let session = SessionId(rand::random());
        let (finished, room) = (client.take_finished(id), AnswerRoom::of(room));
        let ask = Ask { id, who, client: &client, finished, room, given, session, deadline };
        let result = self.apply_after_trims(&ask, change).await;
        if result.is_err() {
            client.queue_recount(&ask.finished);
        }
        result
    }

    async fn apply_after_trims(
        &self,
        ask: &Ask<'_>,
        change: &MetaChange,
    ) -> Result<MetaReply, OpError> {
        let mut given = ask.given.clone();
        for _ in 0..TRIMS_MAX {
            match self.apply(ask, change, given.clone()).await {
                Err(OpError::TrimPending(inode)) => self.finish_trim(inode, ask.deadline).await?,
                Err(error) if given.excess_allowed && error.is_over_excess() => {
                    given.excess_allowed = false
                }
                result => return result,
            }
        }
        let detail = "the file is truncated again and again".into();
        Err(MetaError::Unavailable { detail }.into())
    }

    async fn apply(
        &self,
        ask: &Ask<'_>,
        change: &MetaChange,
        given: Given,
    ) -> Result<MetaReply, OpError> {
        let (who, holds) = (ask.who, &self.holds);
        let wanted = |write: &bool| {
            write.then_some(ops::Wanted { session: ask.session, client: ask.id.client })
        };
        match change {
            MetaChange::Create { at, mode, exclusive, layout, write, hold } => {
                let (mode, exclusive, layout, write) = (*mode, *exclusive, *layout, wanted(write));
                let layouts = &self.layouts;
                let create =
                    ops::Create { who, at, mode, exclusive, layout, layouts, write, given };
                let created = self.once(ask, create).await?;
                if let (true, MetaReply::Opened { inode, .. }) = (*hold, &created) {
                    self.holds.hold(ask.id.client, who.scope, inode.id, self.uptime_ms());
                }
                Ok(created)
            }
            MetaChange::Open { at, write } => {
                self.once(ask, ops::Open { who, at, write: wanted(write), full: given.full }).await
            }
            MetaChange::Close { inode, session, report } => {
                check_ranges(report.iter())?;
                let (inode, session, report) = (*inode, *session, report.as_ref());
                self.once(ask, ops::Close { inode, session, report, given }).await
            }
            MetaChange::ReportLengths { reports, ends } => {
                check_batch("reports", reports.len().max(ends.len()))?;
                check_ranges(reports.iter())?;
                self.once(ask, ops::ReportLengths { reports, ends, given }).await
            }
            MetaChange::Reserve { reservations } => {
                check_batch("reservations", reservations.len())?;
                let (client, full) = (ask.id.client, given.full);
                self.once(ask, ops::Reserve { reservations, client, full }).await
            }
            MetaChange::SetLength { at, length } => {
                let begin = ops::BeginTrim { who, at, length: *length, given };
                self.set_length(ask, begin).await
            }
            MetaChange::MakeDirectory { at, mode, parents, defaults } => {
                let (mode, parents, defaults) = (*mode, *parents, *defaults);
                self.once(ask, ops::MakeDirectory { who, at, mode, parents, defaults, given }).await
            }
            MetaChange::MakeSymlink { at, target } => {
                self.once(ask, ops::Symlink { who, at, target, given }).await
            }
            MetaChange::MakeSpecial { at, mode, kind, device } => {
                let (mode, kind, device) = (*mode, *kind, *device);
                self.once(ask, ops::MakeSpecial { who, at, mode, kind, device, given }).await
            }
            MetaChange::Link { from, to } => {
                self.once(ask, ops::Link { who, from, to, given }).await
            }
            MetaChange::Rename { from, to, mode } => {
                self.once(ask, ops::Rename { who, from, to, mode: *mode, holds, given }).await
            }
            MetaChange::Unlink { at } => {
                self.once(ask, ops::Unlink { who, at, holds, given }).await
            }
            MetaChange::RemoveDirectory { at } => {
                self.once(ask, ops::RemoveDirectory { who, at, given }).await
            }
            MetaChange::RemoveTree { at } => {
                self.once(ask, ops::RemoveTree { who, at, holds, given }).await
            }
            MetaChange::SetAttributes { at, follow, mode, uid, gid, accessed, modified } => {
                let (follow, mode, uid, gid) = (*follow, *mode, *uid, *gid);
                let (accessed, modified) = (*accessed, *modified);
                let set = ops::SetAttributes {
                    who,
                    at,
                    follow,
                    mode,
                    uid,
                    gid,
                    accessed,
                    modified,
                    given,
                };
                self.once(ask, set).await
            }
            MetaChange::SetAttribute { at, name, value, mode } => {
                let value = value.as_deref();
                self.once(ask, ops::SetAttribute { who, at, name, value, mode, given }).await
            }
            MetaChange::SetQuota { at, bytes_max, inodes_max } => {
                let (bytes_max, inodes_max) = (*bytes_max, *inodes_max);
                self.once(ask, ops::SetQuota { who, at, bytes_max, inodes_max, given }).await
            }
        }
    }

    /// Boxed: all operations in one state machine take the compiler minutes.
    fn once<'a, O>(
        &'a self,
        ask: &'a Ask<'a>,
        operation: O,
    ) -> BoxFuture<'a, Result<MetaReply, OpError>>
    where
        O: Operation<Output = MetaReply, Error = OpError> + Send + 'a,
    {
        Box::pin(self.once_now(ask, operation))
    }

    async fn once_now<O>(&self, ask: &Ask<'_>, operation: O) -> Result<MetaReply, OpError>
    where
        O: Operation<Output = MetaReply, Error = OpError>,
    {
        self.store.transact(ask.deadline, &ask.once(operation)).await
    }

    /// The change is made, and has its answer, with its first step: sent again, after others have
    /// gone on with the file, it cuts what is left to cut of a begun truncation and nothing else.
    async fn set_length(
        &self,
        ask: &Ask<'_>,
        begin: ops::BeginTrim<'_>,
    ) -> Result<MetaReply, OpError> {
        let reply = self.once(ask, begin).await?;
        if let MetaReply::Inode(inode) = &reply {
            self.finish_trim(inode.id, ask.deadline).await?;
        }
        Ok(reply)
    }

    /// Cuts what a truncation has left to cut, if anything.
    pub(crate) async fn finish_trim(
        &self,
        inode: InodeId,
        deadline: Deadline,
    ) -> Result<(), OpError> {
        let lock = Arc::clone(
            self.trimming.lock().unwrap_or_else(PoisonError::into_inner).entry(inode).or_default(),
        );
        let result = match tokio::time::timeout_at(deadline.instant().into(), lock.lock()).await {
            Ok(_held) => self.trim_now(inode, deadline).await,
            Err(_) => Err(OpError::TrimPending(inode)),
        };
        drop(lock);
        let mut locks = self.trimming.lock().unwrap_or_else(PoisonError::into_inner);
        locks.retain(|_, lock| Arc::strong_count(lock) > 1);
        result
    }

    async fn trim_now(&self, inode: InodeId, deadline: Deadline) -> Result<(), OpError> {
        let pending = self.store.transact(deadline, &ops::ReadTrim(inode)).await?;
        let Some((trim, layout, end)) = pending else { return Ok(()) };
        let range = trim.length..end;
        self.trimmer.trim(inode, &layout, range, deadline).await.map_err(|detail| {
            let detail = format!("{inode} cannot be cut to {} bytes: {detail}", trim.length);
            MetaError::Unavailable { detail }
        })?;
        let finish = ops::FinishTrim { inode, truncate_version: trim.truncate_version };
        self.store.transact(deadline, &finish).await
    }

    async fn fresh_inodes(&self, count: u64, deadline: Deadline) -> Result<InodeId, OpError> {
        if count == 0 {
            return Ok(InodeId(0));
        }
        let mut free = self.inodes.lock().await;
        if free.end - free.start < count {
            let block = INODES_PER_BLOCK.max(count);
            let first = self.store.transact(deadline, &ops::ReserveInodes(block)).await?.0;
            *free = first..first + block;
        }
        let first = free.start;
        free.start += count;
        Ok(InodeId(first))
    }
}

fn check_identity(who: &Identity) -> Result<(), MetaError> {
    if who.groups.len() <= GROUPS_MAX {
        return Ok(());
    }
    Err(MetaError::Invalid {
        field: "who.groups".into(),
        value: who.groups.len().to_string(),
        reason: format!("a caller has at most {GROUPS_MAX} groups"),
    })
}

/// Why nothing may grow: the rest of a store that is nearly full is kept for removals.
fn full(room: Option<Room>) -> Option<MetaError> {
    let room = room.filter(Room::is_low)?;
    let detail = format!(
        "{} of {} bytes are in use and the rest is kept for removals; remove files, or give the \
         metadata service a larger volume and `map_bytes_max`",
        room.used_bytes, room.max_bytes
    );
    Some(MetaError::NoSpace { detail })
}

/// Whether a change makes something that stays.
fn grows(change: &MetaChange) -> bool {
    matches!(
        change,
        MetaChange::Create { .. }
            | MetaChange::MakeDirectory { .. }
            | MetaChange::MakeSymlink { .. }
            | MetaChange::MakeSpecial { .. }
            | MetaChange::Link { .. }
            | MetaChange::SetAttribute { value: Some(_), .. }
    )
}

/// Whether a change reports written chunks, for which there may have to be further rows.
fn reports(change: &MetaChange) -> bool {
    matches!(change, MetaChange::ReportLengths { .. } | MetaChange::Close { report: Some(_), .. })
}

pub(crate) fn check_batch(field: &str, length: usize) -> Result<(), MetaError> {
    if length <= BATCH_MAX {
        return Ok(());
    }
    Err(MetaError::Invalid {
        field: field.into(),
        value: length.to_string(),
        reason: format!("a batch holds at most {BATCH_MAX}; send several"),
    })
}

fn check_ranges<'a>(reports: impl Iterator<Item = &'a LengthReport>) -> Result<(), MetaError> {
    let ranges: usize = reports.map(|report| report.written.ranges()).sum();
    if ranges <= REPORT_RANGES_MAX {
        return Ok(());
    }
    Err(MetaError::Invalid {
        field: "written".into(),
        value: ranges.to_string(),
        reason: format!("a change reports at most {REPORT_RANGES_MAX} ranges; send several"),
    })
}

/// Wall-clock time, for people: nothing depends on its steadiness.
pub(crate) fn now() -> Nanoseconds {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Nanoseconds(i64::try_from(since.as_nanos()).unwrap_or(i64::MAX))
}

#[cfg(test)]
#[path = "tree_test.rs"]
mod tests;
