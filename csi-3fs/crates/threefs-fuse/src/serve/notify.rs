//! Notification of the metadata service: periodic and final reports of open files and file lengths.

use std::sync::PoisonError;
use std::time::{Duration, Instant};

use fabric::deadline::Deadline;
use threefs_core::ids::InodeId;
use threefs_meta::{Identity, MetaQuery, MetaReply};

use crate::config::FuseError;
use crate::daemon::{Daemon, unexpected};

/// Interval of the reports of open files and of unreported lengths.
const INTERVAL: Duration = Duration::from_secs(1);
/// How long shutdown waits for running requests, and for each predecessor's file.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(1);
/// How long shutdown waits for pending bytes: they are of files that were not closed, or whose close
/// timed out.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(3);

impl Daemon {
    /// Reports open files and file lengths until it is cancelled.
    pub(super) async fn report_periodically(&self) {
        let mut all = true;
        let mut switches = self.client.metadata_switches();
        loop {
            let notified = tokio::time::timeout(INTERVAL, self.closed_notify.notified()).await;
            if notified.is_err() {
                self.report_lengths().await;
                self.pending.release_unused_memory(&self.journal);
            }
            // Another metadata service does not know the files that were opened through the former.
            all |= std::mem::replace(&mut switches, self.client.metadata_switches()) != switches;
            all = self.report_open_files(all).await;
        }
    }

    /// Reports closed files now. A file that is about to be unlinked must not count as open because
    /// its close was not reported: it would count for its quota until it is collected.
    pub(crate) async fn report_closed(&self) {
        let any = !self.closed.lock().unwrap_or_else(PoisonError::into_inner).is_empty();
        if any {
            self.report_open_files(false).await;
        }
    }

    /// Returns whether the next report must be complete.
    async fn report_open_files(&self, all: bool) -> bool {
        let release = {
            let mut closed = self.closed.lock().unwrap_or_else(PoisonError::into_inner);
            std::mem::take(&mut *closed)
        };
        // Files that were reopened meanwhile stay open.
        let release: Vec<InodeId> =
            release.into_iter().filter(|inode| self.files.get(*inode).is_none()).collect();
        let add = if all { self.files.inodes() } else { Vec::new() };
        let client = self.journal.client();
        let query = MetaQuery::ReportOpenFiles { client, add, release: release.clone(), all };
        let deadline = Deadline::after(self.timeout);
        let reply =
            self.client.query_for(&Identity::ROOT, "report open files", query, deadline).await;
        match reply {
            Ok(MetaReply::OpenFilesReported { complete }) => !complete,
            Ok(other) => {
                unexpected(&other);
                true
            }
            Err(error) => {
                tracing::warn!(%error, "could not report the open files to the metadata service");
                self.closed.lock().unwrap_or_else(PoisonError::into_inner).extend(release);
                true
            }
        }
    }

    /// Final report: no file is open any more. Requests that are still running may have changed
    /// lengths too.
    pub(super) async fn report_final(&self) -> Result<(), FuseError> {
        let deadline = Instant::now() + SHUTDOWN_TIMEOUT;
        while !self.running().is_empty() && Instant::now() < deadline {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        if !self.running().is_empty() {
            self.unanswered.note();
        }
        drop(self.rings.sessions.close_all());
        // The next daemon, if there is one, writes what is left.
        let drained = self.pending.drain_all(Deadline::after(DRAIN_TIMEOUT)).await;
        self.report_lengths().await;
        // Includes files that were closed while the metadata service was unavailable.
        self.report_former_lengths(SHUTDOWN_TIMEOUT).await;
        // The next holders see these lengths, and no write follows. Otherwise the lease ends.
        if self.running().is_empty() {
            self.end_all_locks(SHUTDOWN_TIMEOUT).await;
        }
        let release = self.files.inodes();
        self.closed.lock().unwrap_or_else(PoisonError::into_inner).extend(release);
        let _ = self.report_open_files(false).await;
        if drained.is_err() {
            return Err(FuseError::Unwritten(self.pending.files()));
        }
        match self.journal.dirty().len() {
            0 => self.unanswered.check(),
            files => Err(FuseError::UnreportedLengths(files)),
        }
    }
}
