//! Small reads that are started at the same time share requests.
//!
//! The first read of a file's chain yields once before it is sent, and takes the reads with it that
//! other tasks have added meanwhile. No read waits for others to arrive: the runtime resumes a task
//! that yields when no other one is ready. Reads that a request does not answer are sent one by one.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use fabric::BoxFuture;
use fabric::deadline::Deadline;
use threefs_core::ids::{ChainId, InodeId};
use threefs_core::message::{ReadMany, ReadPart};
use threefs_core::snapshot_inode;
use tokio::sync::oneshot;

use crate::Client;
use crate::error::{ClientError, OperationName};
use crate::read_batch::ReadBatch;
use crate::routing::ChunkLocation;
use crate::window::ProgressTimeout;

/// Larger reads have a request each, whose cost is then small.
const SMALL_BYTES_MAX: u32 = 64 << 10;

/// Reads of a request have the file and the chain in common.
type Key = (InodeId, ChainId);

/// Reads that will be sent together.
#[derive(Debug)]
struct Group<T> {
    parts: Vec<ReadPart>,
    waiting: Vec<T>,
    bytes: u64,
}

impl<T> Default for Group<T> {
    fn default() -> Self {
        Self { parts: Vec::new(), waiting: Vec::new(), bytes: 0 }
    }
}

/// The place of a read in its group.
#[derive(Debug)]
enum Joined<T> {
    /// The first one sends the group.
    First,
    /// The first one of a new group; it also sends the previous one, which is full.
    FirstAfter(Group<T>),
    Further,
}

/// Groups that have not been sent yet, by what their reads have in common.
struct Groups<T>(HashMap<Key, Group<T>>);

impl<T> Groups<T> {
    fn join(&mut self, key: Key, part: ReadPart, waiting: T) -> Joined<T> {
        let group = self.0.entry(key).or_default();
        let is_full = group.parts.len() == ReadMany::PARTS_MAX
            || group.bytes + u64::from(part.length) > ReadMany::BYTES_MAX;
        let full = if is_full { Some(std::mem::take(group)) } else { None };
        group.parts.push(part);
        group.waiting.push(waiting);
        group.bytes += u64::from(part.length);
        match full {
            Some(full) => Joined::FirstAfter(full),
            None if group.parts.len() == 1 => Joined::First,
            None => Joined::Further,
        }
    }

    fn take(&mut self, key: Key) -> Option<Group<T>> {
        self.0.remove(&key)
    }
}

/// Small reads of a client.
pub(crate) struct Gather(Mutex<Groups<oneshot::Sender<Bytes>>>);

impl Default for Gather {
    fn default() -> Self {
        Self(Mutex::new(Groups(HashMap::new())))
    }
}

impl Gather {
    fn lock(&self) -> MutexGuard<'_, Groups<oneshot::Sender<Bytes>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Sends a group, or drops it if the first read is cancelled: the others then continue one by one.
struct First<'a> {
    client: &'a Client,
    key: Key,
}

impl Drop for First<'_> {
    fn drop(&mut self) {
        drop(self.client.0.gather.lock().take(self.key));
    }
}

impl Client {
    /// Reads a part of one chunk from any serving replica; `None` if the chunk does not exist.
    pub(crate) fn read<'a>(
        &'a self,
        what: &'a OperationName,
        location: ChunkLocation,
        offset: u32,
        length: u32,
        patience: impl Into<ProgressTimeout>,
    ) -> BoxFuture<'a, Result<Option<Bytes>, ClientError>> {
        let (patience, range) = (patience.into(), (offset, length));
        Box::pin(async move {
            let deadline = patience.deadline();
            match self.read_gathered(what, location, range, deadline).await {
                Some(data) => Ok(Some(data)),
                None => Box::pin(self.read_alone(what, location, range, patience)).await,
            }
        })
    }

    /// Reads a part of a chunk together with other reads; `None`: it has to be read alone.
    async fn read_gathered(
        &self,
        what: &OperationName,
        location: ChunkLocation,
        (offset, length): (u32, u32),
        deadline: Deadline,
    ) -> Option<Bytes> {
        // A group has no epoch.
        let is_snapshot = snapshot_inode::split(location.chunk.inode).is_some();
        if length > SMALL_BYTES_MAX || is_snapshot || self.0.batches.are_refused() {
            return None;
        }
        let key = (location.chunk.inode, location.chain);
        let part = ReadPart { index: location.chunk.index, offset, length };
        let (sender, reply) = oneshot::channel();
        let joined = self.0.gather.lock().join(key, part, sender);
        let first = match joined {
            Joined::First => true,
            Joined::FirstAfter(full) => {
                self.send_group(what, key, full, deadline);
                true
            }
            Joined::Further => false,
        };
        if first {
            let first = First { client: self, key };
            tokio::task::yield_now().await;
            let group = self.0.gather.lock().take(key);
            std::mem::forget(first);
            match group {
                Some(group) if group.parts.len() > 1 => self.send_group(what, key, group, deadline),
                Some(_) => return None,
                // Sent by another read.
                None => {}
            }
        }
        tokio::time::timeout_at(deadline.instant().into(), reply).await.ok()?.ok()
    }

    /// Sends a group from a separate task: its first read may be cancelled.
    fn send_group(
        &self,
        what: &OperationName,
        (inode, chain): Key,
        group: Group<oneshot::Sender<Bytes>>,
        deadline: Deadline,
    ) {
        let (client, what) = (self.clone(), what.clone());
        tokio::spawn(async move {
            let batch = ReadBatch::of(chain, group.parts, group.bytes);
            let mut waiting: Vec<_> = group.waiting.into_iter().map(Some).collect();
            for (index, data) in client.send_batch(&what, inode, &batch, deadline).await {
                if let Some(waiting) = waiting.get_mut(index).and_then(Option::take) {
                    let _ = waiting.send(data);
                }
            }
        });
    }
}

#[cfg(test)]
#[path = "gather_test.rs"]
mod tests;
