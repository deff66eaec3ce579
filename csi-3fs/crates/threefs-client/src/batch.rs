//! Many chunk operations side by side, within bounds on their number and bytes.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use fabric::deadline::Deadline;
use threefs_core::chunk::ContentChange;
use threefs_core::ids::ChunkId;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinSet;

use crate::Client;
use crate::chunks::{Place, What};
use crate::error::ClientError;

/// One write into one chunk.
pub(crate) struct ChunkWrite {
    pub what: What,
    pub place: Place,
    pub offset: u32,
    pub payload: Bytes,
}

/// One read from one chunk, for the caller's buffer `slot` at `at`.
#[derive(Clone)]
pub(crate) struct ChunkRead {
    pub what: What,
    pub place: Place,
    pub offset: u32,
    pub length: u32,
    pub slot: usize,
    pub at: usize,
    /// Which file of the plan it is of.
    pub file: usize,
}

/// Bounds what is in flight. Shared by all operations of a client.
#[derive(Clone)]
pub(crate) struct Window {
    operations: Arc<Semaphore>,
    bytes: Arc<Semaphore>,
    bytes_max: usize,
}

impl Window {
    pub(crate) fn new(operations_max: usize, bytes_max: usize) -> Self {
        Self {
            operations: Arc::new(Semaphore::new(operations_max)),
            bytes: Arc::new(Semaphore::new(bytes_max)),
            bytes_max,
        }
    }

    /// Waits for room. A single operation larger than the window gets all of it.
    async fn enter(&self, bytes: usize) -> Option<(OwnedSemaphorePermit, OwnedSemaphorePermit)> {
        let bytes = u32::try_from(bytes.min(self.bytes_max)).unwrap_or(u32::MAX);
        // Both only fail when the semaphore is closed, which never happens.
        let operation = Arc::clone(&self.operations).acquire_owned().await.ok()?;
        Some((operation, Arc::clone(&self.bytes).acquire_many_owned(bytes).await.ok()?))
    }
}

impl Client {
    /// Writes to one chunk keep their order, different chunks go side by side. After an error
    /// nothing new begins, and what is under way is awaited: a write that took effect after the
    /// caller had gone on could undo a newer one.
    pub(crate) async fn write_chunks(
        &self,
        writes: Vec<ChunkWrite>,
        deadline: Deadline,
    ) -> Result<(), ClientError> {
        let mut tasks: JoinSet<Result<(), ClientError>> = JoinSet::new();
        let mut outcome = Ok(());
        for of_chunk in by_chunk(writes) {
            let bytes = of_chunk.iter().map(|write| write.payload.len()).max().unwrap_or(0);
            let entered = self.0.window.enter(bytes);
            let room = tokio::time::timeout_at(deadline.instant().into(), entered).await;
            while let Some(ended) = tasks.try_join_next() {
                outcome = outcome.and(joined(ended));
            }
            if outcome.is_err() {
                break;
            }
            // Past the deadline the update itself says who did not answer.
            let room = room.ok().flatten();
            let client = self.clone();
            tasks.spawn(async move {
                for write in of_chunk {
                    let change = ContentChange::Write { offset: write.offset };
                    client
                        .update(&write.what, write.place, change, write.payload, deadline)
                        .await?;
                }
                drop(room);
                Ok(())
            });
        }
        while let Some(ended) = tasks.join_next().await {
            outcome = outcome.and(joined(ended));
        }
        outcome
    }

    /// Hands each read's bytes to `deliver` as they come, in any order; none where the chunk does not
    /// exist.
    pub(crate) async fn read_chunks(
        &self,
        reads: Vec<ChunkRead>,
        deadline: Deadline,
        mut deliver: impl FnMut(ChunkRead, Option<&[u8]>),
    ) -> Result<(), ClientError> {
        let mut tasks: JoinSet<Result<(ChunkRead, Option<Bytes>), ClientError>> = JoinSet::new();
        for read in reads {
            let entered = self.0.window.enter(read.length as usize);
            let room = tokio::time::timeout_at(deadline.instant().into(), entered).await;
            while let Some(ended) = tasks.try_join_next() {
                let (read, bytes) = joined(ended)?;
                deliver(read, bytes.as_deref());
            }
            let room = room.ok().flatten();
            let client = self.clone();
            tasks.spawn(async move {
                let ChunkRead { ref what, place, offset, length, .. } = read;
                let bytes = client.read(what, place, offset, length, deadline).await?;
                drop(room);
                Ok((read, bytes))
            });
        }
        while let Some(ended) = tasks.join_next().await {
            let (read, bytes) = joined(ended)?;
            deliver(read, bytes.as_deref());
        }
        Ok(())
    }
}

pub(crate) fn joined<T>(
    ended: Result<Result<T, ClientError>, tokio::task::JoinError>,
) -> Result<T, ClientError> {
    ended.unwrap_or_else(|error| {
        Err(ClientError::Protocol {
            who: "a task of this client".into(),
            detail: error.to_string(),
        })
    })
}

/// The writes of each chunk in their order; chunks in the order of their first write.
fn by_chunk(writes: Vec<ChunkWrite>) -> Vec<Vec<ChunkWrite>> {
    let mut places: HashMap<ChunkId, usize> = HashMap::new();
    let mut groups: Vec<Vec<ChunkWrite>> = Vec::new();
    for write in writes {
        let place = *places.entry(write.place.chunk).or_insert(groups.len());
        match groups.get_mut(place) {
            Some(group) => group.push(write),
            None => groups.push(vec![write]),
        }
    }
    groups
}
