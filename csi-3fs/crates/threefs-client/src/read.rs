//! Reads of file ranges: split into chunks, read concurrently, holes filled with zeros.

use std::sync::Arc;

use bytes::Bytes;
use fabric::deadline::Deadline;
use threefs_meta::MetaError;
use tokio::task::JoinSet;

use crate::Client;
use crate::chunks::{ChunkLocation, OperationName};
use crate::error::{Attempts, ClientError};
use crate::files::{FileHandle, location};
use crate::progress::ProgressTimeout;
use crate::window::joined;

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
        mut deliver: impl FnMut(ChunkRead, Option<&[u8]>),
    ) -> Result<(), ClientError> {
        let mut tasks: JoinSet<Result<(ChunkRead, Option<Bytes>), ClientError>> = JoinSet::new();
        for read in reads {
            let permit = self.0.window.acquire(read.length as usize, &patience).await;
            while let Some(finished) = tasks.try_join_next() {
                let (read, bytes) = joined(finished)?;
                deliver(read, bytes.as_deref());
            }
            let (client, patience) = (self.clone(), patience.clone());
            tasks.spawn(async move {
                let _room = permit;
                let ChunkRead { ref what, location, offset, length, .. } = read;
                let bytes = client.read(what, location, offset, length, patience.clone()).await?;
                client.record_progress(&patience);
                Ok((read, bytes))
            });
        }
        while let Some(finished) = tasks.join_next().await {
            let (read, bytes) = joined(finished)?;
            deliver(read, bytes.as_deref());
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
        let ReadPlan { mut reads, mut files, .. } = plan;
        for _ in 0..ABSENT_ROUNDS_MAX {
            let mut absent = Vec::new();
            self.read_chunks(reads, patience.clone(), |read, bytes| {
                let end = read.at + read.length as usize;
                let out = buffers.get_mut(read.slot).and_then(|it| it.get_mut(read.at..end));
                let Some(out) = out else { return };
                let data = bytes.unwrap_or_default();
                let (filled, rest) = out.split_at_mut(data.len().min(read.length as usize));
                filled.copy_from_slice(&data[..filled.len()]);
                rest.fill(0);
                if bytes.is_none() {
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
        attempts.failed("the file", "it is repeatedly truncated and rewritten");
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
        let chains = self.chains(&what, &file.layout, deadline).await?;
        let number = plan.files.len();
        plan.files.push(file.clone());
        for span in file.layout.spans(offset, length)? {
            let at = u64::from(span.index) * u64::from(file.layout.chunk_bytes)
                + u64::from(span.offset)
                - offset;
            plan.reads.push(ChunkRead {
                what: Arc::clone(&what),
                location: location(file, &chains, span.index),
                offset: span.offset,
                length: span.length,
                slot,
                // Below `length`, which fits.
                at: at as usize,
                file: number,
            });
        }
        Ok(())
    }
}
