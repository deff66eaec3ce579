//! The tree: executes requests on a store, without sockets.
//!
//! Each request becomes one operation on the store; its external inputs (time, fresh inodes,
//! chains) are drawn before. The reply is sent once the store reports the commit durable.

mod audit;
mod change;
mod checks;
mod layouts;
mod locks;
mod open;
pub(crate) mod snapshots;
mod trash;
mod trim;

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fabric::BoxFuture;
use fabric::boot_instant::BootInstant;
use fabric::deadline::Deadline;
use threefs_core::ids::{ClientId, InodeId};
use threefs_core::routing::RoutingInfo;
use threefs_kv::{KvError, Operation, Store};
use tokio::sync::watch;

use crate::chunk_trimmer::ChunkTrimmer;
use crate::clients::Clients;
use crate::clients::holds::Holds;
use crate::clients::open_files::OpenFiles;
use crate::clients::openings::Openings;
use crate::clients::published_activity::PublishedActivity;
use crate::config::TreeConfig;
use crate::fences::{Fences, NoFences};
use crate::identity::Identity;
use crate::ops::{self, OpError};
use crate::protocol::{
    MetaError, MetaQuery, MetaReply, MetaRequest, MetaResult, MetaStatus, ServiceRole,
};
use crate::queue_clock::QueueClocks;
use crate::rows::{self, Uptime};
use crate::services::Services;
use checks::check_identity;
pub(crate) use checks::{check_batch, now};
use layouts::RoundRobin;
use locks::Waits;

/// Maximum time of one request, whatever its caller's deadline.
pub(crate) const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);
/// Inode numbers allocated per transaction.
const INODES_PER_BLOCK: u64 = 4096;
/// Upper limit of the counts in `MetaStatus`.
const COUNT_MAX: usize = 100_000;

/// The tree of names and inodes.
pub struct Tree {
    pub(crate) store: Store,
    pub(crate) config: TreeConfig,
    pub(crate) trimmer: Arc<dyn ChunkTrimmer>,
    pub(crate) fences: Arc<dyn Fences>,
    pub(crate) clients: Clients,
    pub(crate) open_files: OpenFiles,
    pub(crate) openings: Openings,
    pub(crate) holds: Holds,
    pub(crate) services: Services,
    pub(crate) published_activity: PublishedActivity,
    /// Ages of the garbage collection queues.
    pub(crate) queue_clocks: Mutex<QueueClocks>,
    started_at: BootInstant,
    layouts: RoundRobin,
    inodes: tokio::sync::Mutex<Range<u64>>,
    pub(crate) lock_waits: Waits<InodeId>,
    pub(crate) recall_waits: Waits<ClientId>,
    /// Set when the store fails such that only a restart recovers.
    failure: watch::Sender<Option<KvError>>,
    /// Locks that allow one truncation of a file at a time: see `ops::file::trim`.
    trimming: Mutex<HashMap<InodeId, Arc<tokio::sync::Mutex<()>>>>,
}

impl Tree {
    /// Opens the tree in a store; creates the root if it is missing.
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
        let (run_id, alone) = (rand::random(), store.exclusive_opening().is_some());
        let join = ops::Join { run_id, alone };
        store.transact(Deadline::after(REQUEST_TIMEOUT), &join).await?;
        Ok(Self {
            store,
            config,
            trimmer,
            fences: Arc::new(NoFences),
            clients: Clients::default(),
            open_files: OpenFiles::new(run_id),
            openings: Openings::default(),
            holds: Holds::default(),
            services: Services::new(alone),
            published_activity: PublishedActivity::default(),
            queue_clocks: Mutex::default(),
            started_at: BootInstant::now(),
            layouts: RoundRobin::new(routing, config.layout, rand::random()),
            inodes: tokio::sync::Mutex::new(0..0),
            lock_waits: Waits::default(),
            recall_waits: Waits::default(),
            failure: watch::channel(None).0,
            trimming: Mutex::default(),
        })
    }

    /// With fences at the storage services, which snapshots need.
    #[must_use]
    pub fn with_fences(self, fences: Arc<dyn Fences>) -> Self {
        Self { fences, ..self }
    }

    /// Milliseconds since the start of the service, suspended time included.
    pub(crate) fn uptime_ms(&self) -> u64 {
        let uptime = BootInstant::now().since(self.started_at);
        u64::try_from(uptime.as_millis()).unwrap_or(u64::MAX)
    }

    /// The current time, comparable within this run of the service only.
    pub(crate) fn uptime(&self) -> Uptime {
        Uptime { run_id: self.open_files.run_id(), ms: self.uptime_ms() }
    }

    /// Answers one request.
    ///
    /// # Errors
    /// Any [`MetaError`].
    pub fn answer(&self, request: MetaRequest, deadline: Deadline) -> BoxFuture<'_, MetaResult> {
        Box::pin(self.answer_inner(request, deadline))
    }

    async fn answer_inner(&self, request: MetaRequest, deadline: Deadline) -> MetaResult {
        let deadline = deadline.within(REQUEST_TIMEOUT);
        let result = match request {
            MetaRequest::Query { caller, query } => self.query(&caller, &query, deadline).await,
            MetaRequest::Change { id, caller, change } => {
                self.change(id, &caller, &change, deadline).await
            }
        };
        match &result {
            Err(OpError::Kv(error @ KvError::Broken { .. })) => {
                self.failure.send_replace(Some(error.clone()));
            }
            // A shared store continues with other services: a restart would change nothing, and the
            // retry of the change finds its answer if it was made.
            Err(OpError::Kv(error @ KvError::CommitUnknown { .. })) if self.services.alone => {
                self.failure.send_replace(Some(error.clone()));
            }
            _ => {}
        }
        Ok(result?)
    }

    /// Runs a read-only operation.
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

    /// Completes when the store has failed such that only a restart recovers.
    pub async fn store_failed(&self) -> KvError {
        let mut failure = self.failure.subscribe();
        loop {
            if let Some(error) = failure.borrow_and_update().clone() {
                return error;
            }
            if failure.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }

    async fn query(
        &self,
        caller: &Identity,
        query: &MetaQuery,
        deadline: Deadline,
    ) -> Result<MetaReply, OpError> {
        check_identity(caller)?;
        let store = &self.store;
        match query {
            MetaQuery::Stat { at, follow } => {
                store.transact(deadline, &ops::Stat { caller, at, follow: *follow }).await
            }
            MetaQuery::StatMany { at } => {
                check_batch("at", at.len())?;
                store.transact(deadline, &ops::StatMany { caller, at }).await
            }
            MetaQuery::StatChunks { at, chunks } => {
                check_batch("chunks", chunks.len())?;
                store.transact(deadline, &ops::StatChunks { caller, at, chunks }).await
            }
            MetaQuery::List { at, after, limit } => {
                store.transact(deadline, &ops::List { caller, at, after, limit: *limit }).await
            }
            MetaQuery::Open { at, access, client } => {
                self.open_file(caller, at, *access, *client, deadline).await
            }
            MetaQuery::ReportOpenFiles { client, add, release, all } => {
                self.report_open_files(caller, *client, add, release, *all).await
            }
            MetaQuery::Quotas { at } => store.transact(deadline, &ops::Quotas { caller, at }).await,
            MetaQuery::GetAttribute { at, name } => {
                store.transact(deadline, &ops::GetAttribute { caller, at, name }).await
            }
            MetaQuery::ListAttributes { at } => {
                store.transact(deadline, &ops::ListAttributes { caller, at }).await
            }
            MetaQuery::Epochs { inodes } => {
                check_batch("inodes", inodes.len())?;
                store.transact(deadline, &ops::Epochs { inodes }).await
            }
            // Handled by the service, which has the keys.
            MetaQuery::Capabilities { .. } => Err(MetaError::NotSupported {
                path: String::new(),
                reason: "a holder of the cluster key needs no capabilities".into(),
            }
            .into()),
            MetaQuery::Lock(query) => Box::pin(self.query_locks(query, deadline)).await,
            MetaQuery::Trash(query) => Box::pin(self.query_trash(caller, query, deadline)).await,
            MetaQuery::Audit(query) => Box::pin(self.query_audit(query, deadline)).await,
            MetaQuery::Snapshot(query) => {
                Box::pin(self.query_snapshots(caller, query, deadline)).await
            }
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
            MetaQuery::Role => {
                if !self.services.alone {
                    let run_id = self.open_files.run_id();
                    store.transact(deadline, &ops::CheckService { run_id }).await?;
                }
                let collects_garbage = self.services.collector().is_ok();
                Ok(MetaReply::Role(ServiceRole { collects_garbage }))
            }
        }
    }

    async fn count(&self, prefix: &'static [u8], deadline: Deadline) -> Result<u64, OpError> {
        self.store.transact(deadline, &ops::CountRows { prefix, limit: COUNT_MAX }).await
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
