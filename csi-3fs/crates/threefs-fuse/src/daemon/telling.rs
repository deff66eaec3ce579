//! What the metadata service is told: what is held open, how long files are, and the last words.

use std::sync::PoisonError;
use std::time::{Duration, Instant};

use fabric::deadline::Deadline;
use threefs_core::ids::InodeId;
use threefs_meta::{Identity, MetaQuery, MetaReply};

use super::Daemon;
use crate::calls::unexpected;
use crate::config::FuseError;

/// Between two messages about what is held open, and looks for lengths that nobody was told.
const PACE: Duration = Duration::from_secs(1);
/// How long the end waits for each of the things that are still to be told.
const LAST_WORDS: Duration = Duration::from_secs(1);

impl Daemon {
    /// Tells the metadata service, again and again, what is held open and how long files are.
    pub(super) async fn keep_in_touch(&self) {
        let mut all = true;
        loop {
            let paced = tokio::time::timeout(PACE, self.released_now.notified()).await;
            if paced.is_err() {
                self.tell_lengths().await;
            }
            all = self.tell_holds(all).await;
        }
    }

    /// What is about to lose its name must not count as open only because nobody was told that it
    /// was closed: it would count for its quota until it is collected.
    pub(crate) async fn tell_released(&self) {
        let any = !self.released.lock().unwrap_or_else(PoisonError::into_inner).is_empty();
        if any {
            self.tell_holds(false).await;
        }
    }

    /// Gives whether everything must be told next time.
    async fn tell_holds(&self, all: bool) -> bool {
        let release = {
            let mut released = self.released.lock().unwrap_or_else(PoisonError::into_inner);
            std::mem::take(&mut *released)
        };
        // What was opened again meanwhile is held.
        let release: Vec<InodeId> =
            release.into_iter().filter(|inode| self.files.get(*inode).is_none()).collect();
        let add = if all { self.files.inodes() } else { Vec::new() };
        let client = self.journal.client();
        let hold = MetaQuery::ReportOpenFiles { client, add, release: release.clone(), all };
        let deadline = Deadline::after(self.timeout);
        let told = self.client.query_for(&Identity::ROOT, "hold open files", hold, deadline).await;
        match told {
            Ok(MetaReply::OpenFilesReported { complete }) => !complete,
            Ok(other) => {
                unexpected(&other);
                true
            }
            Err(error) => {
                tracing::warn!(%error, "the metadata service does not hear what is open");
                self.released.lock().unwrap_or_else(PoisonError::into_inner).extend(release);
                true
            }
        }
    }

    /// The end: nothing is open any more. What is in work still may tell something, too.
    pub(super) async fn tell_all(&self) -> Result<(), FuseError> {
        let deadline = Instant::now() + LAST_WORDS;
        while !self.running().is_empty() && Instant::now() < deadline {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        if !self.running().is_empty() {
            self.left_open.note();
        }
        self.tell_lengths().await;
        // Of files, too, that were closed while the metadata service was away.
        self.tell_former(LAST_WORDS).await;
        let release = self.files.inodes();
        self.released.lock().unwrap_or_else(PoisonError::into_inner).extend(release);
        let _ = self.tell_holds(false).await;
        match self.journal.all_untold().len() {
            0 => self.left_open.check(),
            files => Err(FuseError::Untold(files)),
        }
    }
}
