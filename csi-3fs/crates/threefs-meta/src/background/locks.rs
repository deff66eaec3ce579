//! The end of lock sessions whose clients do not renew them.

use std::time::Duration;

use fabric::boot_instant::BootInstant;
use threefs_core::ids::ClientId;

use crate::background::services::Observer;
use crate::background::transaction;
use crate::ops::{self, OpError};
use crate::rows::{self, LOCK_SESSIONS, LockSessionRow};
use crate::tree::Tree;

/// Rows per transaction.
const PAGE: usize = 1024;
/// Observations in one lease.
const OBSERVATIONS: u32 = 10;

/// Lock sessions, by client and number, and their renewals.
pub(crate) type SessionObserver = Observer<(ClientId, u64), (u64, bool)>;

impl Tree {
    pub(crate) fn session_observer(&self) -> SessionObserver {
        Observer::new(Duration::from_millis(self.config.lock_lease_ms))
    }

    /// Runs until the future is dropped.
    pub(crate) async fn run_lock_expiry(&self) {
        let mut observer = self.session_observer();
        let pause = Duration::from_millis(self.config.lock_lease_ms) / OBSERVATIONS;
        loop {
            tokio::time::sleep(pause).await;
            if let Err(error) = self.end_silent_lock_sessions(&mut observer).await {
                tracing::warn!(%error, "lock sessions could not be checked");
            }
        }
    }

    /// Ends lock sessions that have not been renewed for a whole lease, if this service is the
    /// collector, and completes the end of others.
    pub(crate) async fn end_silent_lock_sessions(
        &self,
        observer: &mut SessionObserver,
    ) -> Result<(), OpError> {
        if !self.lead().await? {
            *observer = self.session_observer();
            return Ok(());
        }
        let (mut sessions, mut after) = (Vec::new(), Vec::new());
        loop {
            let list = ops::ListRows { prefix: LOCK_SESSIONS, after: &after, limit: PAGE };
            let page = self.as_collector(&list).await?;
            for (key, value) in &page {
                let row: LockSessionRow = rows::decode(key, value)?;
                let client = rows::client_of_key(key)?;
                sessions.push(((client, row.session), (row.renewal, row.ended)));
            }
            match page.last() {
                Some((last, _)) if page.len() == PAGE => after.clone_from(last),
                _ => break,
            }
        }
        for ((client, session), (renewal, _)) in observer.observe(BootInstant::now(), &sessions) {
            let renewal = Some(renewal);
            if self.end_lock_session(client, session, renewal, transaction()).await? {
                tracing::warn!(%client, session, "a client has lost its locks: it did not renew them");
            }
        }
        Ok(())
    }
}
