//! Reads and writes of ranges of files: cut into chunks, moved side by side, lengths reported.
//!
//! A write is over when its bytes are durable on all serving replicas **and** the file's length
//! that makes them visible is durable.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use bytes::Bytes;
use fabric::deadline::Deadline;
use threefs_core::ids::{ChainId, ChunkId, InodeId};
use threefs_core::layout::{Layout, LayoutError};
use threefs_meta::protocol::{BATCH_MAX, REPORT_RANGES_MAX};
use threefs_meta::{
    At, InodeKind, LengthReport, MetaChange, MetaError, MetaReply, Reservation, SessionId, Written,
};
use tokio::task::JoinSet;

use crate::Client;
use crate::batch::{ChunkRead, ChunkWrite};
use crate::chunks::{Place, What};
use crate::error::{Attempts, ClientError};
use crate::files::FileHandle;
use crate::patience::Patience;

/// Times that a read follows truncations by others before it gives up.
const ABSENT_ROUNDS_MAX: usize = 16;
/// Truncations by others that a write follows before it gives up.
const CUTS_MAX: usize = 16;
/// Files that are created side by side: enough to share the metadata store's flushes.
const CREATES_IN_FLIGHT_MAX: usize = 64;

/// Bytes for a range of a file.
#[derive(Clone, Debug)]
pub struct WriteRange {
    /// The file.
    pub path: String,
    /// Where they go.
    pub offset: u64,
    /// The bytes.
    pub payload: Bytes,
}

/// A range of a file that is wanted.
#[derive(Clone, Debug)]
pub struct ReadRange {
    /// The file.
    pub path: String,
    /// From where on.
    pub offset: u64,
    /// How many bytes at most; `None` = to the end.
    pub length: Option<u64>,
}

/// Ranges whose files have been looked up: how much each will give.
#[derive(Default)]
pub struct ReadPlan {
    lengths: Vec<usize>,
    reads: Vec<ChunkRead>,
    files: Vec<FileHandle>,
}

impl ReadPlan {
    /// Bytes that each range will give, in the order that they were asked in.
    pub fn lengths(&self) -> &[usize] {
        &self.lengths
    }
}

pub(crate) struct FileWrite {
    pub file: FileHandle,
    pub offset: u64,
    pub payload: Bytes,
}

impl Client {
    /// Writes many ranges; all are durable when this ends. Writes to one chunk keep their order.
    ///
    /// # Errors
    /// Any [`ClientError`]; any part of the batch may then have been written, and the same batch
    /// may be written again.
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

    /// Writes one range of an open file; durable when this ends.
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

    /// Looks up files and cuts ranges into chunks. What lies beyond a file's end is cut off.
    ///
    /// # Errors
    /// Any [`ClientError`].
    pub async fn plan_read(&self, ranges: &[ReadRange]) -> Result<ReadPlan, ClientError> {
        let deadline = self.deadline();
        let paths: Vec<&str> = ranges.iter().map(|range| range.path.as_str()).collect();
        let known = self.look_up(&paths, "read").await?;
        let mut plan =
            ReadPlan { lengths: Vec::with_capacity(ranges.len()), ..ReadPlan::default() };
        for range in ranges {
            let (file, length) = known
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
        let (file_length, file) = self.newest(file).await?;
        let deadline = self.deadline();
        self.plan_range(&mut plan, &file, file_length, offset, Some(length), deadline).await?;
        Ok(plan)
    }

    /// Reads what was planned into the caller's buffers, one for each range, each at least as long
    /// as the plan says. Holes become zeros.
    ///
    /// # Errors
    /// Any [`ClientError`]; the buffers' contents are then unspecified.
    pub async fn read_planned(
        &self,
        plan: ReadPlan,
        buffers: &mut [&mut [u8]],
    ) -> Result<(), ClientError> {
        self.read_planned_until(plan, buffers, Patience::start(self.0.config.timeout)).await
    }

    pub(crate) async fn read_planned_until(
        &self,
        plan: ReadPlan,
        buffers: &mut [&mut [u8]],
        patience: Patience,
    ) -> Result<(), ClientError> {
        let ReadPlan { mut reads, mut files, .. } = plan;
        for _ in 0..ABSENT_ROUNDS_MAX {
            let mut absent = Vec::new();
            self.read_chunks(reads, patience.clone(), |read, bytes| {
                let end = read.at + read.length as usize;
                let out = buffers.get_mut(read.slot).and_then(|it| it.get_mut(read.at..end));
                let Some(out) = out else { return };
                let found = bytes.unwrap_or_default();
                let (filled, rest) = out.split_at_mut(found.len().min(read.length as usize));
                filled.copy_from_slice(&found[..filled.len()]);
                rest.fill(0);
                if bytes.is_none() {
                    absent.push(read);
                }
            })
            .await?;
            if absent.is_empty() {
                return Ok(());
            }
            reads = self.sort_absent(&mut files, absent, patience.deadline()).await?;
            if reads.is_empty() {
                return Ok(());
            }
        }
        let path = files.first().map_or_else(String::new, |file| file.path.to_string());
        let mut attempts = Attempts::of(format!("read `{path}`"));
        attempts.failed("the file", "it is truncated and written again and again");
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
        let left = file_length.saturating_sub(offset);
        let length = length.map_or(left, |length| length.min(left));
        let slot = plan.lengths.len();
        plan.lengths.push(usize::try_from(length).map_err(|_| ClientError::InvalidArgument {
            detail: format!("`{}`: {length} bytes are more than memory can hold", file.path),
        })?);
        if length == 0 {
            return Ok(());
        }
        let what: What = Arc::from(format!("read `{}`", file.path));
        let chains = self.chains(&what, &file.layout, deadline).await?;
        let number = plan.files.len();
        plan.files.push(file.clone());
        for span in file.layout.spans(offset, length)? {
            let at = u64::from(span.index) * u64::from(file.layout.chunk_bytes)
                + u64::from(span.offset)
                - offset;
            plan.reads.push(ChunkRead {
                what: Arc::clone(&what),
                place: place(file, &chains, span.index),
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

    async fn write_files(&self, mut writes: Vec<FileWrite>) -> Result<(), ClientError> {
        let mut cuts = 0;
        while !writes.is_empty() {
            // Each step has the whole time-out: the one in the middle may rightly take long.
            let sessions = self.reserve(&mut writes, self.deadline()).await?;
            let patience = Patience::start(self.0.config.timeout);
            let written = self.write_once(&writes, &patience).await;
            if let Err(error) = written {
                self.end_sessions(sessions, self.deadline()).await;
                // A file was cut meanwhile, and the reservation with it.
                cuts += 1;
                match error {
                    ClientError::NotReserved { .. } if cuts < CUTS_MAX => continue,
                    error => return Err(error),
                }
            }
            let truncated = self.report_lengths(&writes, sessions, self.deadline()).await?;
            // A truncation came between: it may have cut what was written, so write it again.
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
        patience: &Patience,
    ) -> Result<(), ClientError> {
        let mut pieces = Vec::new();
        for FileWrite { file, offset, payload } in writes {
            let what: What = Arc::from(format!("write `{}`", file.path));
            let chains = self.chains(&what, &file.layout, patience.deadline()).await?;
            let mut rest = payload.clone();
            for span in file.layout.spans(*offset, payload.len() as u64)? {
                pieces.push(ChunkWrite {
                    what: Arc::clone(&what),
                    place: place(file, &chains, span.index),
                    offset: span.offset,
                    payload: rest.split_to(span.length as usize),
                });
            }
        }
        self.write_chunks(pieces, patience).await
    }

    /// Has the quotas charged for what will be written, before anything is. Gives the sessions that
    /// hold it.
    async fn reserve(
        &self,
        writes: &mut [FileWrite],
        deadline: Deadline,
    ) -> Result<HashMap<InodeId, SessionId>, ClientError> {
        let mut wanted: BTreeMap<InodeId, (Reservation, What)> = BTreeMap::new();
        for FileWrite { file, offset, payload } in writes.iter().filter(|write| write.file.quota) {
            let (inode, truncate_version) = (file.inode, file.truncate_version);
            let (session, end) = (SessionId(rand::random()), offset + payload.len() as u64);
            let reservation = Reservation { inode, session, end, truncate_version };
            let known = wanted.entry(inode).or_insert((reservation, Arc::clone(&file.path)));
            known.0.end = known.0.end.max(end);
        }
        let wanted: Vec<(Reservation, What)> = wanted.into_values().collect();
        let mut sessions = HashMap::new();
        for page in wanted.chunks(BATCH_MAX) {
            let mut reservations: Vec<Reservation> = page.iter().map(|it| it.0).collect();
            let what = page.first().map_or_else(String::new, |(_, path)| format!("write `{path}`"));
            while !reservations.is_empty() {
                let change = MetaChange::Reserve { reservations: reservations.clone() };
                let reserved = self.0.metadata.change(&what, change, deadline).await;
                let inodes = match reserved {
                    Ok(MetaReply::Inodes(inodes)) if inodes.len() == reservations.len() => inodes,
                    Ok(other) => {
                        self.end_sessions(sessions, deadline).await;
                        return Err(ClientError::unexpected("meta", &other));
                    }
                    Err(error) => {
                        self.end_sessions(sessions, deadline).await;
                        return Err(error);
                    }
                };
                // Those that were cut meanwhile are reserved again, for their new version.
                let mut again = Vec::new();
                for (reservation, inode) in reservations.iter().zip(inodes) {
                    match inode?.kind {
                        InodeKind::File { truncate_version, .. }
                            if truncate_version != reservation.truncate_version =>
                        {
                            again.push(Reservation { truncate_version, ..*reservation });
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
                reservations = again;
            }
        }
        Ok(sessions)
    }

    /// Gives back what was reserved for writes that failed. If that fails too, the service does it
    /// once it has not heard of this client for a while.
    async fn end_sessions(&self, sessions: HashMap<InodeId, SessionId>, deadline: Deadline) {
        let ends: Vec<(InodeId, SessionId)> = sessions.into_iter().collect();
        for page in ends.chunks(BATCH_MAX) {
            let change = MetaChange::ReportLengths { reports: Vec::new(), ends: page.to_vec() };
            let ended = self.0.metadata.change("end write sessions", change, deadline).await;
            if let Err(error) = ended {
                tracing::info!(%error, "reserved space stays reserved for a while");
            }
        }
    }

    /// Makes lengths durable. Gives the new `truncate_version` of files whose report came too late.
    async fn report_lengths(
        &self,
        writes: &[FileWrite],
        sessions: HashMap<InodeId, SessionId>,
        deadline: Deadline,
    ) -> Result<HashMap<InodeId, u64>, ClientError> {
        let mut ends: BTreeMap<InodeId, (LengthReport, &What)> = BTreeMap::new();
        for FileWrite { file, offset, payload } in writes {
            let (inode, truncate_version) = (file.inode, file.truncate_version);
            let length = offset + payload.len() as u64;
            let written = Written::default();
            let report = LengthReport { inode, length, truncate_version, written };
            let known = ends.entry(inode).or_insert((report, &file.path));
            known.0.length = known.0.length.max(length);
            known.0.written.add_bytes(*offset, length, file.layout.chunk_bytes);
        }
        let ends: Vec<(LengthReport, &What)> = ends.into_values().collect();
        let mut truncated = HashMap::new();
        for page in pages(split(ends)) {
            let reports = page.iter().map(|part| part.report.clone()).collect();
            let what =
                page.first().map_or_else(String::new, |part| format!("write `{}`", part.path));
            // With the last report of a file.
            let ended = |part: &Part<'_>| {
                let session = sessions.get(&part.report.inode).filter(|_| part.last)?;
                Some((part.report.inode, *session))
            };
            let ends = page.iter().filter_map(ended).collect();
            let change = MetaChange::ReportLengths { reports, ends };
            let inodes = match self.0.metadata.change(&what, change, deadline).await? {
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

    async fn files_for(
        &self,
        writes: &[WriteRange],
        create: bool,
    ) -> Result<HashMap<String, FileHandle>, ClientError> {
        let paths: Vec<&str> = writes.iter().map(|write| write.path.as_str()).collect();
        let mut files = HashMap::new();
        let mut missing = Vec::new();
        for (path, known) in self.look_up(&paths, "write").await? {
            match known {
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

    /// File and length of each path, without doubles, in the order of first mention.
    async fn look_up<'a>(
        &self,
        paths: &[&'a str],
        verb: &str,
    ) -> Result<BTreeMap<&'a str, Result<(FileHandle, u64), ClientError>>, ClientError> {
        let mut unique: Vec<&str> = paths.to_vec();
        unique.sort_unstable();
        unique.dedup();
        let places = unique.iter().map(|path| At::path(*path)).collect();
        let inodes = self.stat_many(verb, unique.first().unwrap_or(&""), places).await?;
        let known = unique.into_iter().zip(inodes).map(|(path, inode)| {
            let file = inode.map_err(ClientError::Meta);
            (path, file.and_then(|it| Ok((FileHandle::of(path, &it)?, it.length()))))
        });
        Ok(known.collect())
    }

    /// The chains of a layout. A table that is newer than the known routing is waited for.
    pub(crate) async fn chains(
        &self,
        what: &What,
        layout: &Layout,
        deadline: Deadline,
    ) -> Result<Vec<ChainId>, ClientError> {
        let mut attempts = Attempts::of(&**what);
        while let Some(routing) = self.0.routing.newest(&mut attempts, deadline).await? {
            match layout.resolve(&routing) {
                Err(error @ LayoutError::NoTable { .. }) if !deadline.passed() => {
                    attempts.failed("mgmtd", error);
                    self.0.routing.newer_than(routing.version, deadline).await;
                }
                Err(LayoutError::NoTable { .. }) => break,
                resolved => return Ok(resolved?),
            }
        }
        Err(attempts.unavailable(self.0.config.timeout))
    }
}

/// One of the reports of a file.
struct Part<'a> {
    report: LengthReport,
    path: &'a What,
    last: bool,
}

/// Reports with no more ranges than a change may carry, those of one file one after the other.
fn split(reports: Vec<(LengthReport, &What)>) -> Vec<Part<'_>> {
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

/// What one change may carry each.
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

impl From<MetaError> for ClientError {
    fn from(error: MetaError) -> Self {
        Self::Meta(error)
    }
}

fn insert(
    files: &mut HashMap<String, FileHandle>,
    created: Result<Result<FileHandle, ClientError>, tokio::task::JoinError>,
) -> Result<(), ClientError> {
    let file = created.map_err(|error| ClientError::Protocol {
        who: "a task of this client".into(),
        detail: error.to_string(),
    })??;
    files.insert(file.path.to_string(), file);
    Ok(())
}

pub(crate) fn place(file: &FileHandle, chains: &[ChainId], index: u32) -> Place {
    Place {
        // A resolved layout has at least one chain.
        chain: chains.get(index as usize % chains.len().max(1)).copied().unwrap_or_default(),
        chunk: ChunkId::new(file.inode, index),
        chunk_bytes: file.layout.chunk_bytes,
    }
}
