//! Write-back of file lengths and written chunks to the metadata service.

use std::time::Duration;

use fabric::deadline::Deadline;
use rustix::io::Errno;
use threefs_client::{ClientError, FileHandle};
use threefs_core::ids::InodeId;
use threefs_meta::protocol::REPORT_RANGES_MAX;
use threefs_meta::{
    At, Inode, InodeKind, LengthReport, LockKind, MetaChange, MetaError, MetaQuery, MetaReply,
    Written,
};

use super::TRUNCATIONS_MAX;
use crate::daemon::{Call, Daemon, unexpected};
use crate::files::{OpenFile, session_of};
use crate::wire::{Body, Fields};

impl Daemon {
    /// Reports the length to the metadata service if it is unreported; with `last` also ends the
    /// write session and its reservation. Durable when it returns: the metadata half of an fsync.
    pub(crate) async fn report_length(
        &self,
        id: InodeId,
        open: &OpenFile,
        last: bool,
        deadline: Deadline,
    ) -> Result<(), Errno> {
        let _one_at_a_time = open.reporting.lock().await;
        for _ in 0..TRUNCATIONS_MAX {
            let report = PendingReport::start(open, last);
            if !report.dirty && !report.ends {
                return Ok(());
            }
            let inode = match self.send_report(id, &report, deadline).await? {
                Ok(inode) => inode,
                Err(error) => {
                    let result = Err(ClientError::Meta(error));
                    if is_final(&result) {
                        // The file is gone: its length is not needed.
                        report.complete();
                        self.journal.mark_clean(id);
                    }
                    return result.map_err(|error| self.errno_of(&report_name(id), &error, true));
                }
            };
            let truncated = self.apply_report(id, &report, inode.as_ref());
            let (more, dirty) = (report.more, report.dirty);
            report.complete();
            if !truncated {
                if let Some(inode) = &inode {
                    self.files.advance(inode, u64::from(dirty));
                }
                if !more {
                    return Ok(());
                }
            }
        }
        Err(Errno::IO)
    }

    /// Sends a report; returns the file's inode, if it is in the reply, or why meta rejected it.
    async fn send_report(
        &self,
        id: InodeId,
        report: &PendingReport<'_>,
        deadline: Deadline,
    ) -> Result<Result<Option<Inode>, MetaError>, Errno> {
        let length_report = LengthReport {
            inode: id,
            length: report.length,
            truncate_version: report.truncate_version,
            written: report.written.clone(),
        };
        let session = session_of(self.journal.client(), id);
        let change = MetaChange::ReportLengths {
            reports: if report.dirty { vec![length_report] } else { Vec::new() },
            ends: if report.ends { vec![(id, session)] } else { Vec::new() },
        };
        let operation = report_name(id);
        match self.notify(&operation, change, deadline).await {
            Ok(MetaReply::Inodes(mut inodes)) => Ok(inodes.pop().transpose()),
            Ok(other) => Err(unexpected(&other)),
            Err(error) => Err(self.errno_of(&operation, &error, true)),
        }
    }

    /// Updates the file and the journal after a report. Returns whether another client has
    /// truncated the file, so that its length must be reported again.
    fn apply_report(&self, id: InodeId, report: &PendingReport<'_>, inode: Option<&Inode>) -> bool {
        let mut state = report.open.state();
        if report.ends {
            state.end_session();
        }
        let truncated =
            inode.is_some_and(|inode| truncate_version_of(inode) != Some(report.truncate_version));
        if let Some(inode) = inode {
            // Truncated before or after the write: acknowledged writes count.
            state.dirty |= truncated && inode.length() < report.length;
            state.dirty |= report.more;
            // Keeps a length that has grown since.
            state.follow(inode);
        }
        // A write that sets `dirty` adds its journal entry afterwards.
        if !state.dirty {
            self.journal.mark_clean(id);
        } else if !truncated {
            self.journal.remove_written(id, report.truncate_version, &report.written);
        }
        truncated
    }

    /// Each close of a descriptor releases the POSIX locks of its process.
    pub(crate) async fn flush<'a>(&'a self, call: &mut Call<'a>) -> Result<Body, Errno> {
        let mut fields = Fields(&call.request.body);
        let (handle, _unused) =
            (fields.u64().ok_or(Errno::INVAL)?, fields.u64().ok_or(Errno::INVAL)?);
        let owner = fields.u64().ok_or(Errno::INVAL)?;
        let flushed = self.flush_length(call, handle).await;
        if self.locks.is_locked(self.inode(call.request.node)) {
            self.release_owner(call, LockKind::Posix, owner).await;
        }
        flushed
    }

    async fn flush_length(&self, call: &mut Call<'_>, handle: u64) -> Result<Body, Errno> {
        let id = self.inode(call.request.node);
        if self.files.get(id).is_none() && !self.is_former(handle) {
            return Ok(Body::default());
        }
        let open = self.file_of(call, handle).await?;
        let synced = self.sync_pending(id, call.deadline).await;
        let last = open.state().handles <= 1;
        self.report_length(id, &open, last, call.deadline).await?;
        synced?;
        Ok(Body::default())
    }

    pub(crate) async fn fsync(&self, call: &mut Call<'_>) -> Result<Body, Errno> {
        let handle = Fields(&call.request.body).u64().ok_or(Errno::INVAL)?;
        let (open, id) = (self.file_of(call, handle).await?, self.inode(call.request.node));
        self.sync_pending(id, call.deadline).await?;
        self.report_length(id, &open, false, call.deadline).await?;
        Ok(Body::default())
    }

    /// Reports all unreported lengths. The next close or fsync retries those that fail.
    pub(crate) async fn report_lengths(&self) {
        for (id, open) in self.files.dirty() {
            if !self.is_servable() {
                return;
            }
            let deadline = Deadline::after(Duration::from_secs(5));
            if let Err(error) = self.report_length(id, &open, false, deadline).await {
                tracing::debug!(inode = id.0, %error, "the length will be reported later");
            }
        }
    }

    /// Finds and reports the lengths that a previous daemon had not reported, before they are
    /// needed.
    pub(crate) async fn report_former_lengths(&self, timeout: Duration) {
        for id in self.journal.dirty() {
            let deadline = Deadline::after(timeout);
            if self.wait_servable(deadline).await.is_err() {
                return;
            }
            let reported = self.report_former_length(id, deadline).await;
            if is_final(&reported) {
                self.journal.mark_clean(id);
            } else if let Err(error) = reported {
                // The length is found when the file is opened, or used through an old handle.
                tracing::warn!(inode = id.0, %error, "could not report the length of a file");
                if !matches!(error, ClientError::Meta(_)) {
                    return;
                }
            }
        }
    }

    pub(crate) async fn report_former_length(
        &self,
        id: InodeId,
        deadline: Deadline,
    ) -> Result<(), ClientError> {
        let query = MetaQuery::Stat { at: At::inode(id), follow: false };
        let operation = format!("take over {id}");
        let root = threefs_meta::Identity::ROOT;
        let MetaReply::Inode(inode) =
            self.client.query_for(&root, &operation, query, deadline).await?
        else {
            return Ok(());
        };
        let file = FileHandle::of(&id.to_string(), &inode)?;
        let end = self.former_end(&file, inode.length(), deadline).await?;
        let truncate_version = file.truncate_version;
        let mut unreported = self.journal.written(id, truncate_version);
        loop {
            let written = unreported.take(REPORT_RANGES_MAX);
            let report = LengthReport { inode: id, length: end, truncate_version, written };
            let change = MetaChange::ReportLengths { reports: vec![report], ends: Vec::new() };
            if let MetaReply::Inodes(inodes) = self.notify(&operation, change, deadline).await? {
                inodes.into_iter().try_for_each(|inode| inode.map(drop))?;
            }
            if unreported.is_empty() {
                return Ok(());
            }
        }
    }

    /// End of the data that previous daemons wrote to a file, at least `length`: from the stored
    /// chunks, and from the journal in case storage has lost them.
    pub(super) async fn former_end(
        &self,
        file: &FileHandle,
        length: u64,
        deadline: Deadline,
    ) -> Result<u64, ClientError> {
        let stored_end = self.client.stored_end(file, length, deadline).await?;
        let written = self.journal.written(file.inode, file.truncate_version);
        let last = written.iter().last().map_or(0, |(_, last)| u64::from(last));
        let start = last * u64::from(file.layout.chunk_bytes);
        Ok(if written.is_empty() { stored_end } else { stored_end.max(start + 1) })
    }
}

/// A length report in flight. Unless it completes, dropping it marks the file dirty again.
struct PendingReport<'a> {
    open: &'a OpenFile,
    length: u64,
    truncate_version: u64,
    dirty: bool,
    written: Written,
    /// More chunks are unreported than one report holds.
    more: bool,
    /// The report ends the write session.
    ends: bool,
}

impl<'a> PendingReport<'a> {
    fn start(open: &'a OpenFile, last: bool) -> Self {
        let mut state = open.state();
        let dirty = std::mem::take(&mut state.dirty);
        state.reporting = dirty;
        let written = state.unreported.take(REPORT_RANGES_MAX);
        let more = !state.unreported.is_empty();
        let (length, truncate_version) = (state.length, state.file.truncate_version);
        let ends = last && state.has_session && !more;
        drop(state);
        Self { open, length, truncate_version, dirty, written, more, ends }
    }

    fn complete(mut self) {
        self.dirty = false;
    }
}

impl Drop for PendingReport<'_> {
    fn drop(&mut self) {
        let mut state = self.open.state();
        state.reporting = false;
        state.dirty |= self.dirty;
        if self.dirty && state.file.truncate_version == self.truncate_version {
            state.unreported.merge(&self.written);
        }
    }
}

fn report_name(id: InodeId) -> String {
    format!("report the length of {id}")
}

/// Whether nothing is left to report: the report succeeded, or the file is gone. A report rejected
/// for another reason (no space, a quota) is of an acknowledged write and must be retried.
fn is_final(reported: &Result<(), ClientError>) -> bool {
    matches!(reported, Ok(()) | Err(ClientError::Meta(MetaError::NotFound { .. })))
}

pub(super) fn truncate_version_of(inode: &Inode) -> Option<u64> {
    match inode.kind {
        InodeKind::File { truncate_version, .. } => Some(truncate_version),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_rejected_for_lack_of_space_must_be_retried() {
        let detail = "the store is nearly full".to_owned();
        assert!(!is_final(&Err(ClientError::Meta(MetaError::NoSpace { detail }))));
        let path = "7".to_owned();
        assert!(is_final(&Err(ClientError::Meta(MetaError::NotFound { path }))));
        assert!(is_final(&Ok(())));
    }
}
