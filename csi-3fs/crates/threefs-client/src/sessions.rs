//! Write sessions: quota reservations before a write, and length reports after it.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use fabric::deadline::Deadline;
use threefs_core::ids::InodeId;
use threefs_meta::protocol::{BATCH_MAX, REPORT_RANGES_MAX};
use threefs_meta::{
    InodeKind, LengthReport, MetaChange, MetaError, MetaReply, Reservation, SessionId, Written,
};

use crate::Client;
use crate::error::{ClientError, OperationName};
use crate::write::FileWrite;

impl Client {
    /// Charges the quotas before anything is written. Returns the sessions that hold the
    /// reservations.
    pub(crate) async fn reserve(
        &self,
        writes: &mut [FileWrite],
        deadline: Deadline,
    ) -> Result<HashMap<InodeId, SessionId>, ClientError> {
        let mut by_inode: BTreeMap<InodeId, (Reservation, OperationName)> = BTreeMap::new();
        for FileWrite { file, offset, payload } in writes.iter().filter(|write| write.file.quota) {
            let (inode, truncate_version) = (file.inode, file.truncate_version);
            let (session, end) = (SessionId(rand::random()), offset + payload.len() as u64);
            let reservation = Reservation { inode, session, end, truncate_version };
            let current = by_inode.entry(inode).or_insert((reservation, Arc::clone(&file.path)));
            current.0.end = current.0.end.max(end);
        }
        let requested: Vec<(Reservation, OperationName)> = by_inode.into_values().collect();
        let mut sessions = HashMap::new();
        for page in requested.chunks(BATCH_MAX) {
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
                // Files that were truncated meanwhile are reserved again, for their new version.
                let mut retries = Vec::new();
                for (reservation, inode) in reservations.iter().zip(inodes) {
                    match inode?.kind {
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
                reservations = retries;
            }
        }
        Ok(sessions)
    }

    /// Releases the reservations of failed writes. If that fails too, the service releases them
    /// when it has not heard from this client for a while.
    pub(crate) async fn end_sessions(
        &self,
        sessions: HashMap<InodeId, SessionId>,
        deadline: Deadline,
    ) {
        let ends: Vec<(InodeId, SessionId)> = sessions.into_iter().collect();
        for page in ends.chunks(BATCH_MAX) {
            let change = MetaChange::ReportLengths { reports: Vec::new(), ends: page.to_vec() };
            let finished = self.0.metadata.change("end write sessions", change, deadline).await;
            if let Err(error) = finished {
                tracing::info!(%error, "could not release reservations; they expire later");
            }
        }
    }

    /// Makes lengths durable. Returns the new `truncate_version` of files whose report came too
    /// late.
    pub(crate) async fn report_lengths(
        &self,
        writes: &[FileWrite],
        sessions: HashMap<InodeId, SessionId>,
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
