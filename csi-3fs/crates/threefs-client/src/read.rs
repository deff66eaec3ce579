//! Reads of file ranges: split into chunks, read concurrently from any serving replica, holes filled
//! with zeros.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use bytes::Bytes;
use fabric::deadline::Deadline;
use fabric::rpc::{CallOptions, Payload};
use threefs_core::checksum::Checksum;
use threefs_core::error::StorageError;
use threefs_core::ids::{ChainId, TargetId};
use threefs_core::message::{
    Address, ReadDone, ReadRequest, StorageReply, StorageRequest, StorageResult,
};
use threefs_core::routing::{ChainTarget, RoutingInfo};
use threefs_core::snapshot_inode;
use threefs_meta::MetaError;
use tokio::task::JoinSet;

use crate::Client;
use crate::config::BUSY_TIMEOUT_FACTOR;
use crate::error::{Attempts, CallError, ClientError, OperationName};
use crate::files::FileHandle;
use crate::near::{Candidate, Distance, choose};
use crate::routing::{ChunkLocation, ChunkRange, who};
use crate::storage::{Overload, ROUTING_PAUSE, is_overloaded};
use crate::window::{ProgressTimeout, task_result};

/// Rounds over all serving replicas, all of them damaged, before the chunk counts as corrupt: a
/// repair in progress needs a moment.
const CORRUPT_ROUNDS: u32 = 5;

/// One read from one chunk, into the caller's buffer `slot` at `at`.
#[derive(Clone)]
pub(crate) struct ChunkRead {
    pub what: OperationName,
    pub location: ChunkLocation,
    pub offset: u32,
    pub length: u32,
    pub slot: usize,
    pub at: usize,
    /// Index of its file in the plan.
    pub file: usize,
}

impl Client {
    /// Passes the data of each read to `deliver` as it arrives, in any order; `None` if the chunk
    /// does not exist.
    pub(crate) async fn read_chunks(
        &self,
        reads: Vec<ChunkRead>,
        patience: ProgressTimeout,
        mut deliver: impl FnMut(ChunkRead, Option<Bytes>),
    ) -> Result<(), ClientError> {
        let mut tasks: JoinSet<Result<(ChunkRead, Option<Bytes>), ClientError>> = JoinSet::new();
        let is_single = reads.len() == 1;
        for read in reads {
            let permit = self.0.window.acquire(read.length as usize, &patience).await;
            while let Some(finished) = tasks.try_join_next() {
                let (read, bytes) = task_result(finished)?;
                deliver(read, bytes);
            }
            let (client, patience) = (self.clone(), patience.clone());
            let work = async move {
                let _room = permit;
                let ChunkRead { ref what, location, offset, length, .. } = read;
                let bytes = client.read(what, location, offset, length, patience.clone()).await?;
                client.record_progress(&patience);
                Ok((read, bytes))
            };
            if is_single {
                let (read, bytes) = work.await?;
                deliver(read, bytes);
                return Ok(());
            }
            tasks.spawn(work);
        }
        while let Some(finished) = tasks.join_next().await {
            let (read, bytes) = task_result(finished)?;
            deliver(read, bytes);
        }
        Ok(())
    }
}

/// Number of concurrent truncations after which a read gives up.
const ABSENT_ROUNDS_MAX: usize = 16;

/// A read of a range of a file.
#[derive(Clone, Debug)]
pub struct ReadRange {
    /// Path of the file.
    pub path: String,
    /// Offset of the range.
    pub offset: u64,
    /// Maximum length; `None` = to the end of the file.
    pub length: Option<u64>,
}

/// Ranges whose files have been looked up, and the length of each result.
#[derive(Default)]
pub struct ReadPlan {
    lengths: Vec<usize>,
    reads: Vec<ChunkRead>,
    files: Vec<FileHandle>,
}

impl ReadPlan {
    /// Result length of each range, in the order of the request.
    pub fn lengths(&self) -> &[usize] {
        &self.lengths
    }
}

impl Client {
    /// Looks up files and splits ranges into chunks. Ranges are truncated at the end of their file.
    ///
    /// # Errors
    /// Any [`ClientError`].
    pub async fn plan_read(&self, ranges: &[ReadRange]) -> Result<ReadPlan, ClientError> {
        let deadline = self.deadline();
        let paths: Vec<&str> = ranges.iter().map(|range| range.path.as_str()).collect();
        let current = self.look_up(&paths, "read").await?;
        let mut plan =
            ReadPlan { lengths: Vec::with_capacity(ranges.len()), ..ReadPlan::default() };
        for range in ranges {
            let (file, length) = current
                .get(range.path.as_str())
                .cloned()
                .unwrap_or_else(|| Err(MetaError::NotFound { path: range.path.clone() }.into()))?;
            self.plan_range(&mut plan, &file, length, range.offset, range.length, deadline).await?;
        }
        Ok(plan)
    }

    /// As [`Client::plan_read`], for one range of an open file.
    ///
    /// # Errors
    /// Any [`ClientError`].
    pub async fn plan_read_at(
        &self,
        file: &FileHandle,
        offset: u64,
        length: u64,
    ) -> Result<ReadPlan, ClientError> {
        let mut plan = ReadPlan::default();
        let (file_length, file) = self.current(file).await?;
        let deadline = self.deadline();
        self.plan_range(&mut plan, &file, file_length, offset, Some(length), deadline).await?;
        Ok(plan)
    }

    /// Executes a read plan into the caller's buffers, one for each range, each at least as long as
    /// planned. Holes become zeros.
    ///
    /// # Errors
    /// Any [`ClientError`]; the contents of the buffers are then unspecified.
    pub async fn read_planned(
        &self,
        plan: ReadPlan,
        buffers: &mut [&mut [u8]],
    ) -> Result<(), ClientError> {
        self.read_planned_until(plan, buffers, ProgressTimeout::start(self.0.config.timeout)).await
    }

    pub(crate) async fn read_planned_until(
        &self,
        plan: ReadPlan,
        buffers: &mut [&mut [u8]],
        patience: ProgressTimeout,
    ) -> Result<(), ClientError> {
        self.read_planned_with(plan, patience, |read, data| {
            let end = read.at + read.length as usize;
            let out = buffers.get_mut(read.slot).and_then(|it| it.get_mut(read.at..end));
            let Some(out) = out else { return };
            let (filled, rest) = out.split_at_mut(data.len());
            filled.copy_from_slice(&data);
            rest.fill(0);
        })
        .await
    }

    /// Passes the data of each chunk to `deliver` as it arrives: at most the read's length, the rest
    /// is zeros. A chunk that was absent at first may be delivered again.
    pub(crate) async fn read_planned_with(
        &self,
        plan: ReadPlan,
        patience: ProgressTimeout,
        mut deliver: impl FnMut(&ChunkRead, Bytes),
    ) -> Result<(), ClientError> {
        let ReadPlan { mut reads, mut files, .. } = plan;
        for _ in 0..ABSENT_ROUNDS_MAX {
            let mut absent = Vec::new();
            self.read_chunks(reads, patience.clone(), |read, bytes| {
                let is_absent = bytes.is_none();
                let mut data = bytes.unwrap_or_default();
                data.truncate(read.length as usize);
                deliver(&read, data);
                if is_absent {
                    absent.push(read);
                }
            })
            .await?;
            if absent.is_empty() {
                return Ok(());
            }
            reads = self.classify_absent(&mut files, absent, patience.deadline()).await?;
            if reads.is_empty() {
                return Ok(());
            }
        }
        let path = files.first().map_or_else(String::new, |file| file.path.to_string());
        let mut attempts = Attempts::of(format!("read `{path}`"));
        attempts.record_failure("the file", "it is repeatedly truncated and rewritten");
        Err(attempts.unavailable(self.0.config.timeout))
    }

    pub(crate) async fn plan_range(
        &self,
        plan: &mut ReadPlan,
        file: &FileHandle,
        file_length: u64,
        offset: u64,
        length: Option<u64>,
        deadline: Deadline,
    ) -> Result<(), ClientError> {
        let remaining = file_length.saturating_sub(offset);
        let length = length.map_or(remaining, |length| length.min(remaining));
        let slot = plan.lengths.len();
        plan.lengths.push(usize::try_from(length).map_err(|_| ClientError::InvalidArgument {
            detail: format!("`{}`: {length} bytes do not fit into memory", file.path),
        })?);
        if length == 0 {
            return Ok(());
        }
        let what: OperationName = Arc::from(format!("read `{}`", file.path));
        let ranges = self.locate(&what, file, offset, length, deadline).await?;
        let number = plan.files.len();
        plan.files.push(file.clone());
        let mut at = 0;
        for ChunkRange { location, offset, length } in ranges {
            plan.reads.push(ChunkRead {
                what: Arc::clone(&what),
                location,
                offset,
                length,
                slot,
                at,
                file: number,
            });
            at += length as usize;
        }
        Ok(())
    }
}

impl Client {
    /// Reads a part of one chunk with separate requests; see [`Client::read`].
    pub(crate) async fn read_alone(
        &self,
        what: &OperationName,
        location: ChunkLocation,
        (offset, length): (u32, u32),
        patience: ProgressTimeout,
    ) -> Result<Option<Bytes>, ClientError> {
        let mut attempts = Attempts::of(&**what);
        let mut timeout = self.0.config.read_attempt_timeout;
        let turn = self.0.read_turn.fetch_add(1, Relaxed);
        let mut tried = Vec::new();
        let mut damaged_replies: u32 = 0;
        let mut overload = Overload::default();
        while !patience.expired() {
            let deadline = patience.deadline();
            let Some(routing) = self.0.routing.current(&mut attempts, deadline).await? else {
                break;
            };
            let Some(choice) = self.replica(&routing, location.chain, turn, &tried) else {
                attempts.record_failure(&location.chain.to_string(), "it has no SERVING target");
                self.0.routing.wait_newer(routing.version, deadline.within(ROUTING_PAUSE)).await;
                continue;
            };
            let Replica { to, place: replica, distance, serving: replicas } = choice;
            tried.push(replica.target);
            let who = who(&routing, &replica);
            let read = ReadRequest { to, chunk: location.chunk, offset, length };
            let request = match snapshot_inode::split(location.chunk.inode) {
                Some(_) => StorageRequest::ReadUpTo(read),
                None => StorageRequest::Read(read),
            };
            let options = CallOptions {
                not_after: None,
                class: request.class(),
                idle_timeout: Some(timeout),
            };
            let attempt = deadline.within(timeout * BUSY_TIMEOUT_FACTOR);
            let call = self.read_from(&routing, &choice, &request, attempt, options);
            match attempts.call(call.await)? {
                // An empty chunk was removed, or never existed.
                Ok((Ok(StorageReply::Read(read)), _)) if read.chunk_length == 0 => return Ok(None),
                Ok((Ok(StorageReply::Read(read)), payload)) => match verify(read, payload) {
                    Ok(payload) => {
                        self.0.near.count(distance, payload.len());
                        return Ok(Some(payload));
                    }
                    Err(detail) => attempts.record_failure(&who, detail),
                },
                Ok((Ok(other), _)) => return Err(ClientError::unexpected(&who, &other)),
                Ok((Err(StorageError::ChunkNotFound { .. }), _)) => return Ok(None),
                Ok((Err(error @ StorageError::ChunkCorrupt { .. }), _)) => {
                    attempts.record_failure(&who, error);
                    damaged_replies += 1;
                    if damaged_replies >= replicas * CORRUPT_ROUNDS {
                        return Err(attempts.corrupt(location.chunk));
                    }
                    if damaged_replies.is_multiple_of(replicas) {
                        tokio::time::sleep(ROUTING_PAUSE).await;
                    }
                }
                Ok((Err(error), _)) => {
                    self.after_refusal(&routing, &who, error, &mut attempts, deadline).await?;
                }
                Err(error) if is_overloaded(&error) => {
                    attempts.record_failure(&who, &error);
                    overload.pause(deadline).await;
                }
                Err(error) => {
                    attempts.rpc(&who, &error)?;
                    timeout *= 2;
                    if replicas == 1 {
                        let pause = deadline.within(ROUTING_PAUSE);
                        self.0.routing.wait_newer(routing.version, pause).await;
                    }
                }
            }
        }
        Err(attempts.unavailable(self.0.config.timeout))
    }

    /// Makes one attempt of a read at one replica.
    pub(crate) async fn read_from(
        &self,
        routing: &RoutingInfo,
        replica: &Replica,
        request: &StorageRequest,
        deadline: Deadline,
        options: CallOptions<'_>,
    ) -> Result<(StorageResult, Bytes), CallError> {
        let node = replica.place.node;
        let mut reading = self.0.near.start(node, replica.distance);
        let reply = self.call(routing, node, request, Payload::empty(), deadline, options).await;
        if let Some(reading) = &mut reading {
            reading.overloaded =
                matches!(&reply, Err(CallError::Rpc(error)) if is_overloaded(error));
        }
        reply
    }

    /// Selects a serving replica, preferring nodes that have answered recently, those that this read
    /// has not `tried` yet, and near ones.
    pub(crate) fn replica(
        &self,
        routing: &RoutingInfo,
        chain: ChainId,
        turn: usize,
        tried: &[TargetId],
    ) -> Option<Replica> {
        let chain = routing.chain(chain)?;
        let serving: Vec<ChainTarget> = chain.serving().copied().collect();
        let trusted: Vec<ChainTarget> =
            serving.iter().filter(|it| !self.0.peers.is_suspected(it.node)).copied().collect();
        let places = if trusted.is_empty() { &serving } else { &trusted };
        let candidate = |place: &ChainTarget| {
            let distance = self.0.near.distance(routing, place.node);
            let busy = distance < Distance::Other && self.0.near.is_busy(place.node);
            let tried = tried.iter().filter(|target| **target == place.target).count() as u32;
            Candidate { distance, busy, tried }
        };
        let candidates: Vec<Candidate> = places.iter().map(candidate).collect();
        let chosen = choose(&candidates, turn)?;
        let (place, distance) = (*places.get(chosen)?, candidates.get(chosen)?.distance);
        let to = Address { chain: chain.id, chain_version: chain.version, target: place.target };
        Some(Replica { to, place, distance, serving: serving.len() as u32 })
    }
}

/// The replica for an attempt of a read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Replica {
    pub to: Address,
    pub place: ChainTarget,
    pub distance: Distance,
    /// Number of serving replicas.
    pub serving: u32,
}

/// The payload of a reply, if it is complete and undamaged.
pub(crate) fn verify(read: ReadDone, payload: Bytes) -> Result<Bytes, String> {
    let checksum = Checksum::of(&payload);
    if payload.len() != read.length as usize || checksum != read.checksum {
        return Err(format!(
            "received {} bytes with checksum {checksum}, expected {} bytes with {}",
            payload.len(),
            read.length,
            read.checksum
        ));
    }
    Ok(payload)
}
