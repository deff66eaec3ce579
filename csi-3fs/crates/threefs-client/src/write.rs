//! Writes of file ranges: split into chunks and written concurrently.
//!
//! A write completes when its data is durable on all serving replicas **and** the file length that
//! makes it visible is durable.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use threefs_core::chunk::ContentChange;
use threefs_core::ids::ChunkId;
use threefs_meta::MetaError;
use tokio::task::JoinSet;

use crate::Client;
use crate::error::{ClientError, OperationName};
use crate::files::FileHandle;
use crate::routing::{ChunkLocation, ChunkRange};
use crate::window::{ProgressTimeout, joined};

/// Number of concurrent truncations after which a write gives up.
const TRUNCATIONS_MAX: usize = 16;
/// Maximum number of concurrent file creations: enough to share the metadata store's flushes.
const CREATES_IN_FLIGHT_MAX: usize = 64;

/// A write to a range of a file.
#[derive(Clone, Debug)]
pub struct WriteRange {
    /// Path of the file.
    pub path: String,
    /// Offset of the range.
    pub offset: u64,
    /// Data to write.
    pub payload: Bytes,
}

pub(crate) struct FileWrite {
    pub file: FileHandle,
    pub offset: u64,
    pub payload: Bytes,
}

impl Client {
    /// Writes many ranges; all are durable when this returns. Writes to one chunk keep their order.
    ///
    /// # Errors
    /// Any [`ClientError`]; any part of the batch may have been written, and the batch may be
    /// retried.
    pub async fn batch_write(
        &self,
        writes: Vec<WriteRange>,
        create: bool,
    ) -> Result<(), ClientError> {
        let files = self.files_for(&writes, create).await?;
        let writes = writes.into_iter().filter_map(|write| {
            let file = files.get(&write.path)?.clone();
            Some(FileWrite { file, offset: write.offset, payload: write.payload })
        });
        self.write_files(writes.collect()).await
    }

    /// Writes one range of an open file; durable when this returns.
    ///
    /// # Errors
    /// Any [`ClientError`].
    pub async fn write_at(
        &self,
        file: &FileHandle,
        offset: u64,
        payload: Bytes,
    ) -> Result<(), ClientError> {
        let write = FileWrite { file: file.clone(), offset, payload };
        self.write_files(vec![write]).await
    }

    async fn write_files(&self, mut writes: Vec<FileWrite>) -> Result<(), ClientError> {
        let mut truncations = 0;
        while !writes.is_empty() {
            // Each step has the full timeout: the transfer may take long.
            let sessions = self.reserve(&mut writes, self.deadline()).await?;
            let patience = ProgressTimeout::start(self.0.config.timeout);
            let written = self.write_once(&writes, &patience).await;
            if let Err(error) = written {
                self.end_sessions(sessions, self.deadline()).await;
                // A concurrent truncation has dropped the reservation.
                truncations += 1;
                match error {
                    ClientError::NotReserved { .. } if truncations < TRUNCATIONS_MAX => continue,
                    error => return Err(error),
                }
            }
            let truncated = self.report_lengths(&writes, sessions, self.deadline()).await?;
            // A concurrent truncation may have removed the data, so write it retries.
            writes.retain_mut(|write| match truncated.get(&write.file.inode) {
                Some(version) => {
                    write.file.truncate_version = *version;
                    true
                }
                None => false,
            });
        }
        Ok(())
    }

    pub(crate) async fn write_once(
        &self,
        writes: &[FileWrite],
        patience: &ProgressTimeout,
    ) -> Result<(), ClientError> {
        let mut pieces = Vec::new();
        for FileWrite { file, offset, payload } in writes {
            let what: OperationName = Arc::from(format!("write `{}`", file.path));
            let (mut rest, length) = (payload.clone(), payload.len() as u64);
            let ranges = self.locate(&what, file, *offset, length, patience.deadline()).await?;
            for ChunkRange { location, offset, length } in ranges {
                pieces.push(ChunkWrite {
                    what: Arc::clone(&what),
                    location,
                    offset,
                    payload: rest.split_to(length as usize),
                });
            }
        }
        self.write_chunks(pieces, patience).await
    }

    async fn files_for(
        &self,
        writes: &[WriteRange],
        create: bool,
    ) -> Result<HashMap<String, FileHandle>, ClientError> {
        let paths: Vec<&str> = writes.iter().map(|write| write.path.as_str()).collect();
        let mut files = HashMap::new();
        let mut missing = Vec::new();
        for (path, current) in self.look_up(&paths, "write").await? {
            match current {
                Ok((file, _)) => {
                    files.insert(path.to_owned(), file);
                }
                Err(ClientError::Meta(MetaError::NotFound { .. })) if create => {
                    missing.push(path.to_owned());
                }
                Err(error) => return Err(error),
            }
        }
        let mut creates: JoinSet<Result<FileHandle, ClientError>> = JoinSet::new();
        for path in missing {
            if creates.len() >= CREATES_IN_FLIGHT_MAX
                && let Some(created) = creates.join_next().await
            {
                insert(&mut files, created)?;
            }
            let client = self.clone();
            creates.spawn(async move { client.create(&path, false).await });
        }
        while let Some(created) = creates.join_next().await {
            insert(&mut files, created)?;
        }
        Ok(files)
    }
}

fn insert(
    files: &mut HashMap<String, FileHandle>,
    created: Result<Result<FileHandle, ClientError>, tokio::task::JoinError>,
) -> Result<(), ClientError> {
    let file = joined(created)?;
    files.insert(file.path.to_string(), file);
    Ok(())
}

/// One write into one chunk.
pub(crate) struct ChunkWrite {
    pub what: OperationName,
    pub location: ChunkLocation,
    pub offset: u32,
    pub payload: Bytes,
}

impl Client {
    /// Writes to one chunk keep their order, different chunks are written concurrently. After an
    /// error no new write is started, and those in flight are awaited: a write that takes effect
    /// after this has returned could undo a newer one.
    pub(crate) async fn write_chunks(
        &self,
        writes: Vec<ChunkWrite>,
        patience: &ProgressTimeout,
    ) -> Result<(), ClientError> {
        let mut tasks: JoinSet<Result<(), ClientError>> = JoinSet::new();
        let mut outcome = Ok(());
        for of_chunk in by_chunk(writes) {
            let bytes = of_chunk.iter().map(|write| write.payload.len()).max().unwrap_or(0);
            // After the deadline, the update itself reports which service did not answer.
            let permit = self.0.window.acquire(bytes, patience).await;
            while let Some(finished) = tasks.try_join_next() {
                outcome = outcome.and(joined(finished));
            }
            if outcome.is_err() {
                break;
            }
            let (client, patience) = (self.clone(), patience.clone());
            tasks.spawn(async move {
                let _room = permit;
                for ChunkWrite { what, location, offset, payload } in of_chunk {
                    let change = ContentChange::Write { offset };
                    client.update(&what, location, change, payload, patience.clone()).await?;
                    client.record_progress(&patience);
                }
                Ok(())
            });
        }
        while let Some(finished) = tasks.join_next().await {
            outcome = outcome.and(joined(finished));
        }
        outcome
    }
}

/// Groups writes by chunk, in the order of the first write of each chunk.
fn by_chunk(writes: Vec<ChunkWrite>) -> Vec<Vec<ChunkWrite>> {
    let mut indexes: HashMap<ChunkId, usize> = HashMap::new();
    let mut groups: Vec<Vec<ChunkWrite>> = Vec::new();
    for write in writes {
        let index = *indexes.entry(write.location.chunk).or_insert(groups.len());
        match groups.get_mut(index) {
            Some(group) => group.push(write),
            None => groups.push(vec![write]),
        }
    }
    groups
}
