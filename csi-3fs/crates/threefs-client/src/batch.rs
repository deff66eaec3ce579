//! Many chunk operations side by side, within bounds on their number and bytes.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use threefs_core::chunk::ContentChange;
use threefs_core::ids::ChunkId;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinSet;

use crate::Client;
use crate::chunks::{Place, What};
use crate::error::ClientError;
use crate::patience::{Patience, Progress};

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
    progress: Arc<Progress>,
}

/// Room for one chunk operation, until it is dropped.
struct Entered {
    _operation: OwnedSemaphorePermit,
    _bytes: OwnedSemaphorePermit,
}

impl Window {
    pub(crate) fn new(operations_max: usize, bytes_max: usize) -> Self {
        Self {
            operations: Arc::new(Semaphore::new(operations_max)),
            bytes: Arc::new(Semaphore::new(bytes_max)),
            bytes_max,
            progress: Arc::new(Progress::start()),
        }
    }

    /// Waits for room as long as operations before this one move. A single operation larger than
    /// the window gets all of it. `None` when patience is over.
    async fn enter(&self, bytes: usize, patience: &Patience) -> Option<Entered> {
        let bytes = u32::try_from(bytes.min(self.bytes_max)).unwrap_or(u32::MAX);
        let (operations, all_bytes) = (Arc::clone(&self.operations), Arc::clone(&self.bytes));
        let mut entered = std::pin::pin!(async move {
            // Both only fail when the semaphore is closed, which never happens.
            let _operation = operations.acquire_owned().await.ok()?;
            Some(Entered { _operation, _bytes: all_bytes.acquire_many_owned(bytes).await.ok()? })
        });
        loop {
            let deadline = patience.behind(&self.progress);
            match tokio::time::timeout_at(deadline.instant().into(), &mut entered).await {
                Ok(entered) => return entered,
                Err(_) if patience.behind(&self.progress).passed() => return None,
                Err(_) => {}
            }
        }
    }
}

impl Client {
    /// A chunk operation has ended well.
    fn moved(&self, patience: &Patience) {
        patience.moved();
        self.0.window.progress.moved();
    }

    /// Writes to one chunk keep their order, different chunks go side by side. After an error
    /// nothing new begins, and what is under way is awaited: a write that took effect after the
    /// caller had gone on could undo a newer one.
    pub(crate) async fn write_chunks(
        &self,
        writes: Vec<ChunkWrite>,
        patience: &Patience,
    ) -> Result<(), ClientError> {
        let mut tasks: JoinSet<Result<(), ClientError>> = JoinSet::new();
        let mut outcome = Ok(());
        for of_chunk in by_chunk(writes) {
            let bytes = of_chunk.iter().map(|write| write.payload.len()).max().unwrap_or(0);
            // Past the deadline the update itself says what did not answer.
            let room = self.0.window.enter(bytes, patience).await;
            while let Some(ended) = tasks.try_join_next() {
                outcome = outcome.and(joined(ended));
            }
            if outcome.is_err() {
                break;
            }
            let (client, patience) = (self.clone(), patience.clone());
            tasks.spawn(async move {
                let _room = room;
                for ChunkWrite { what, place, offset, payload } in of_chunk {
                    let change = ContentChange::Write { offset };
                    client.update(&what, place, change, payload, patience.clone()).await?;
                    client.moved(&patience);
                }
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
        patience: Patience,
        mut deliver: impl FnMut(ChunkRead, Option<&[u8]>),
    ) -> Result<(), ClientError> {
        let mut tasks: JoinSet<Result<(ChunkRead, Option<Bytes>), ClientError>> = JoinSet::new();
        for read in reads {
            let room = self.0.window.enter(read.length as usize, &patience).await;
            while let Some(ended) = tasks.try_join_next() {
                let (read, bytes) = joined(ended)?;
                deliver(read, bytes.as_deref());
            }
            let (client, patience) = (self.clone(), patience.clone());
            tasks.spawn(async move {
                let _room = room;
                let ChunkRead { ref what, place, offset, length, .. } = read;
                let bytes = client.read(what, place, offset, length, patience.clone()).await?;
                client.moved(&patience);
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
