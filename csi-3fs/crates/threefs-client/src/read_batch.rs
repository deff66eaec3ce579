//! Small reads of one file that share requests, for callers with many of them.
//!
//! A batch is one attempt at one replica. A range without a result has to be read with
//! [`Client::read_range_with`], which tries other replicas and knows holes.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use fabric::deadline::Deadline;
use fabric::rpc::{CallOptions, FaultCode, RpcError};
use threefs_core::ids::{ChainId, InodeId};
use threefs_core::layout::ChunkSpan;
use threefs_core::message::{ReadMany, ReadPart, StorageReply, StorageRequest};

use crate::Client;
use crate::config::BUSY_TIMEOUT_FACTOR;
use crate::error::{Attempts, ClientError, OperationName};
use crate::files::FileHandle;
use crate::read::{Replica, verify};
use crate::window::ProgressTimeout;

/// Reads of one chain.
#[derive(Clone, Debug)]
pub struct ReadBatch {
    chain: ChainId,
    /// Index of each range in the request, and its read.
    parts: Vec<(usize, ReadPart)>,
    bytes: u64,
}

/// Whether a storage service has refused batches: one of an earlier version does not know them.
#[derive(Default)]
pub(crate) struct Batches(Mutex<Option<Instant>>);

impl Batches {
    /// They are tried again after this.
    const PAUSE: Duration = Duration::from_secs(60);

    pub(crate) fn refused(&self) {
        *self.lock() = Some(Instant::now());
    }

    pub(crate) fn are_refused(&self) -> bool {
        self.lock().is_some_and(|refused| refused.elapsed() < Self::PAUSE)
    }

    fn lock(&self) -> MutexGuard<'_, Option<Instant>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ReadBatch {
    /// A batch of all parts.
    pub(crate) fn of(chain: ChainId, parts: Vec<ReadPart>, bytes: u64) -> Self {
        Self { chain, parts: parts.into_iter().enumerate().collect(), bytes }
    }

    /// Indices of the ranges, in the order of the reads.
    pub fn ranges(&self) -> impl Iterator<Item = usize> {
        self.parts.iter().map(|&(range, _)| range)
    }
}

impl Client {
    /// Divides ranges of a file, each an offset and a length, into batches. Ranges in several chunks,
    /// and those larger than a batch, are in none.
    ///
    /// # Errors
    /// The routing does not have the file's chains within the deadline.
    pub async fn plan_batches(
        &self,
        file: &FileHandle,
        ranges: &[(u64, u64)],
        deadline: Deadline,
    ) -> Result<Vec<ReadBatch>, ClientError> {
        // A batch has no epoch.
        if file.is_in_snapshot() || self.0.batches.are_refused() {
            return Ok(Vec::new());
        }
        let what: OperationName = Arc::from(format!("read `{}`", file.path));
        let chains = self.chains(&what, &file.layout, deadline).await?;
        let mut open: BTreeMap<ChainId, ReadBatch> = BTreeMap::new();
        let mut batches = Vec::new();
        for (range, &(offset, length)) in ranges.iter().enumerate() {
            let spans = file.layout.spans(offset, length)?;
            let &[ChunkSpan { index, offset, length }] = &spans[..] else { continue };
            let bytes = u64::from(length);
            if bytes > ReadMany::BYTES_MAX {
                continue;
            }
            // A resolved layout has at least one chain.
            let chain = chains.get(index as usize % chains.len().max(1)).copied();
            let chain = chain.unwrap_or_default();
            let empty = || ReadBatch { chain, parts: Vec::new(), bytes: 0 };
            let batch = open.entry(chain).or_insert_with(empty);
            let is_full = batch.parts.len() == ReadMany::PARTS_MAX
                || batch.bytes + bytes > ReadMany::BYTES_MAX;
            if is_full {
                batches.push(std::mem::replace(batch, empty()));
            }
            batch.parts.push((range, ReadPart { index, offset, length }));
            batch.bytes += bytes;
        }
        batches.extend(open.into_values());
        Ok(batches)
    }

    /// Reads a batch. Returns the data of ranges that were read, by their index: data that is shorter
    /// than its range is followed by zeros.
    pub async fn read_batch(
        &self,
        file: &FileHandle,
        batch: &ReadBatch,
        deadline: Deadline,
    ) -> Vec<(usize, Bytes)> {
        let patience = ProgressTimeout::from(deadline);
        let Some(_room) = self.0.window.acquire(batch.bytes as usize, &patience).await else {
            return Vec::new();
        };
        let what: OperationName = Arc::from(format!("read `{}`", file.path));
        let read = self.send_batch(&what, file.inode, batch, deadline).await;
        if !read.is_empty() {
            self.record_progress(&patience);
        }
        read
    }

    /// Reads a batch for which the caller has permits.
    pub(crate) async fn send_batch(
        &self,
        what: &OperationName,
        inode: InodeId,
        batch: &ReadBatch,
        deadline: Deadline,
    ) -> Vec<(usize, Bytes)> {
        match self.try_batch(what, inode, batch, deadline).await {
            Ok(results) => results,
            Err(error) => {
                tracing::debug!(%what, %error, "a batch of reads is repeated one by one");
                Vec::new()
            }
        }
    }

    async fn try_batch(
        &self,
        what: &OperationName,
        inode: InodeId,
        batch: &ReadBatch,
        deadline: Deadline,
    ) -> Result<Vec<(usize, Bytes)>, ClientError> {
        let mut attempts = Attempts::of(&**what);
        let turn = self.0.read_turn.fetch_add(1, Relaxed);
        let routing = self.0.routing.current(&mut attempts, deadline).await?;
        let chosen = routing
            .as_ref()
            .and_then(|routing| Some((routing, self.replica(routing, batch.chain, turn, &[])?)));
        let Some((routing, replica)) = chosen else { return Ok(Vec::new()) };
        let Replica { to, distance, .. } = replica;
        let parts = batch.parts.iter().map(|&(_, part)| part).collect();
        let request = StorageRequest::ReadMany(ReadMany { to, inode, parts });
        let timeout = self.0.config.read_attempt_timeout;
        let options =
            CallOptions { not_after: None, class: request.class(), idle_timeout: Some(timeout) };
        let attempt = deadline.within(timeout * BUSY_TIMEOUT_FACTOR);
        let call = self.read_from(routing, &replica, &request, attempt, options).await;
        let (results, mut payload) = match attempts.call(call)? {
            Ok((Ok(StorageReply::ReadMany(results)), payload)) => (results, payload),
            Err(RpcError::Faulted { fault, .. }) if fault.code == FaultCode::BadRequest => {
                self.0.batches.refused();
                return Ok(Vec::new());
            }
            _ => return Ok(Vec::new()),
        };
        let mut read = Vec::with_capacity(results.len());
        for (&(range, _), result) in batch.parts.iter().zip(results) {
            let Ok(done) = result else { continue };
            let data = payload.split_to(payload.len().min(done.length as usize));
            // An empty chunk was removed, or never existed: a hole, or the file was replaced.
            if done.chunk_length > 0
                && let Ok(data) = verify(done, data)
            {
                self.0.near.count(distance, data.len());
                read.push((range, data));
            }
        }
        Ok(read)
    }
}
