//! Writes of file ranges: split into chunks and written concurrently, in a session of the metadata
//! service.
//!
//! A write reserves its range, if the file counts for a quota, writes the chunks, and reports the
//! length. It completes when its data is durable on all serving replicas **and** the file length that
//! makes it visible is durable.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use bytes::Bytes;
use fabric::deadline::Deadline;
use threefs_core::chunk::ContentChange;
use threefs_core::ids::{ChunkId, InodeId};
use threefs_meta::protocol::{BATCH_MAX, REPORT_RANGES_MAX};
use threefs_meta::{
    InodeKind, LengthReport, MetaChange, MetaError, MetaReply, Reservation, SessionId, Written,
};
use tokio::task::JoinSet;

use crate::Client;
use crate::error::{ClientError, OperationName};
use crate::files::FileHandle;
use crate::routing::{ChunkLocation, ChunkRange};
use crate::window::{ProgressTimeout, task_result};

/// Number of concurrent truncations after which a write gives up.
const TRUNCATIONS_MAX: usize = 16;

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
        let paths: Vec<&str> = writes.iter().map(|write| write.path.as_str()).collect();
        let files = self.open_or_create(&paths, create).await?;
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

    pub(crate) async fn write_files(&self, mut writes: Vec<FileWrite>) -> Result<(), ClientError> {
        for write in &writes {
            write.file.check_writable()?;
        }
        let mut truncations = 0;
        while !writes.is_empty() {
            let mut sessions = HashMap::new();
            let truncated = match self.write_reserved(&mut writes, &mut sessions).await {
                Ok(truncated) => truncated,
                Err(error) => {
                    self.end_sessions(sessions, self.deadline()).await;
                    // A concurrent truncation has dropped the reservation.
                    truncations += 1;
                    match error {
                        ClientError::NotReserved { .. } if truncations < TRUNCATIONS_MAX => {
                            continue;
                        }
                        error => return Err(error),
                    }
                }
            };
            // A concurrent truncation may have removed the data, so it is written again.
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

    /// Reserves, writes and reports once; after an error the caller ends `sessions`. Returns the new
    /// `truncate_version` of files whose report came too late.
    async fn write_reserved(
        &self,
        writes: &mut [FileWrite],
        sessions: &mut HashMap<InodeId, SessionId>,
    ) -> Result<HashMap<InodeId, u64>, ClientError> {
        // Each step has the full timeout: the transfer may take long.
        self.reserve(writes, sessions, self.deadline()).await?;
        self.write_once(writes, &ProgressTimeout::start(self.0.config.timeout)).await?;
        self.report_lengths(writes, sessions, self.deadline()).await
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
                outcome = outcome.and(task_result(finished));
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
            outcome = outcome.and(task_result(finished));
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

impl Client {
    /// Charges the quotas before anything is written. `sessions` gets those that hold the
    /// reservations, after an error too.
    async fn reserve(
        &self,
        writes: &mut [FileWrite],
        sessions: &mut HashMap<InodeId, SessionId>,
        deadline: Deadline,
    ) -> Result<(), ClientError> {
        let mut by_inode: BTreeMap<InodeId, (Reservation, OperationName)> = BTreeMap::new();
        for FileWrite { file, offset, payload } in writes.iter().filter(|write| write.file.quota) {
            let (inode, truncate_version) = (file.inode, file.truncate_version);
            let (session, end) = (SessionId(rand::random()), offset + payload.len() as u64);
            let reservation = Reservation { inode, session, end, truncate_version };
            let current = by_inode.entry(inode).or_insert((reservation, Arc::clone(&file.path)));
            current.0.end = current.0.end.max(end);
        }
        let requested: Vec<(Reservation, OperationName)> = by_inode.into_values().collect();
        for page in requested.chunks(BATCH_MAX) {
            let mut reservations: Vec<Reservation> = page.iter().map(|it| it.0).collect();
            let what = page.first().map_or_else(String::new, |(_, path)| format!("write `{path}`"));
            while !reservations.is_empty() {
                let change = MetaChange::Reserve { reservations: reservations.clone() };
                let inodes = match self.0.metadata.change(&what, change, &self.1, deadline).await? {
                    MetaReply::Inodes(inodes) if inodes.len() == reservations.len() => inodes,
                    other => return Err(ClientError::unexpected("meta", &other)),
                };
                // Files that were truncated meanwhile are reserved again, for their new version.
                let (mut retries, mut refusal) = (Vec::new(), None);
                for (reservation, inode) in reservations.iter().zip(inodes) {
                    let inode = match inode {
                        Ok(inode) => inode,
                        Err(error) => {
                            refusal.get_or_insert(error);
                            continue;
                        }
                    };
                    match inode.kind {
                        InodeKind::File { truncate_version, .. }
                            if truncate_version != reservation.truncate_version =>
                        {
                            retries.push(Reservation { truncate_version, ..*reservation });
                            let of_file = |it: &&mut FileWrite| it.file.inode == reservation.inode;
                            for write in writes.iter_mut().filter(of_file) {
                                write.file.truncate_version = truncate_version;
                            }
                        }
                        _ => {
                            sessions.insert(reservation.inode, reservation.session);
                        }
                    }
                }
                if let Some(error) = refusal {
                    return Err(error.into());
                }
                reservations = retries;
            }
        }
        Ok(())
    }

    /// Releases the reservations of failed writes. If that fails too, the service releases them
    /// when it has not heard from this client for a while.
    async fn end_sessions(&self, sessions: HashMap<InodeId, SessionId>, deadline: Deadline) {
        let ends: Vec<(InodeId, SessionId)> = sessions.into_iter().collect();
        for page in ends.chunks(BATCH_MAX) {
            let change = MetaChange::ReportLengths { reports: Vec::new(), ends: page.to_vec() };
            let finished =
                self.0.metadata.change("end write sessions", change, &self.1, deadline).await;
            if let Err(error) = finished {
                tracing::info!(%error, "could not release reservations; they expire later");
            }
        }
    }

    /// Makes lengths durable. Returns the new `truncate_version` of files whose report came too
    /// late.
    async fn report_lengths(
        &self,
        writes: &[FileWrite],
        sessions: &HashMap<InodeId, SessionId>,
        deadline: Deadline,
    ) -> Result<HashMap<InodeId, u64>, ClientError> {
        let mut ends: BTreeMap<InodeId, (LengthReport, &OperationName)> = BTreeMap::new();
        for FileWrite { file, offset, payload } in writes {
            let (inode, truncate_version) = (file.inode, file.truncate_version);
            let length = offset + payload.len() as u64;
            let written = Written::default();
            let report = LengthReport { inode, length, truncate_version, written };
            let current = ends.entry(inode).or_insert((report, &file.path));
            current.0.length = current.0.length.max(length);
            current.0.written.add_bytes(*offset, length, file.layout.chunk_bytes);
        }
        let ends: Vec<(LengthReport, &OperationName)> = ends.into_values().collect();
        let mut truncated = HashMap::new();
        for page in pages(split(ends)) {
            let reports = page.iter().map(|part| part.report.clone()).collect();
            let what =
                page.first().map_or_else(String::new, |part| format!("write `{}`", part.path));
            // Sent with the last report of a file.
            let finished = |part: &Part<'_>| {
                let session = sessions.get(&part.report.inode).filter(|_| part.last)?;
                Some((part.report.inode, *session))
            };
            let ends = page.iter().filter_map(finished).collect();
            let change = MetaChange::ReportLengths { reports, ends };
            let inodes = match self.0.metadata.change(&what, change, &self.1, deadline).await? {
                MetaReply::Inodes(inodes) if inodes.len() == page.len() => inodes,
                other => return Err(ClientError::unexpected("meta", &other)),
            };
            for (Part { report, path, .. }, inode) in page.iter().zip(inodes) {
                let inode = inode.map_err(|error| match error {
                    MetaError::NotFound { .. } => MetaError::NotFound { path: path.to_string() },
                    other => other,
                })?;
                if let InodeKind::File { length, truncate_version, .. } = inode.kind
                    && truncate_version != report.truncate_version
                    && length < report.length
                {
                    truncated.insert(inode.id, truncate_version);
                }
            }
        }
        Ok(truncated)
    }
}

/// A part of a file's report.
struct Part<'a> {
    report: LengthReport,
    path: &'a OperationName,
    last: bool,
}

/// Splits reports to the maximum number of ranges of a change; parts of one file stay adjacent.
fn split(reports: Vec<(LengthReport, &OperationName)>) -> Vec<Part<'_>> {
    let mut parts = Vec::with_capacity(reports.len());
    for (mut report, path) in reports {
        loop {
            let written = report.written.take(REPORT_RANGES_MAX);
            let last = report.written.is_empty();
            parts.push(Part { report: LengthReport { written, ..report.clone() }, path, last });
            if last {
                break;
            }
        }
    }
    parts
}

/// Groups parts into changes.
fn pages(parts: Vec<Part<'_>>) -> Vec<Vec<Part<'_>>> {
    let mut pages: Vec<Vec<Part<'_>>> = Vec::new();
    let mut ranges = REPORT_RANGES_MAX;
    for part in parts {
        ranges += part.report.written.ranges();
        match pages.last_mut() {
            Some(page) if ranges <= REPORT_RANGES_MAX && page.len() < BATCH_MAX => page.push(part),
            _ => {
                ranges = part.report.written.ranges();
                pages.push(vec![part]);
            }
        }
    }
    pages
}
