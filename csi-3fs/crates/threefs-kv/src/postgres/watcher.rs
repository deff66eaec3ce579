//! Watches of keys: the table of commits says which keys each batch has written.
//!
//! The table is read while a key is watched. Nothing is lost with a connection, as notifications
//! would be, and NOTIFY holds a lock of the whole server until the standby has acknowledged.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::head::{signed, unsigned};
use super::server::{CallError, Server};
use super::session::Session;
use super::written;
use crate::Watch;
use crate::watch::Watches;

/// Time between two reads of the table.
const PERIOD: Duration = Duration::from_millis(50);
/// Pause before a session is replaced.
const PAUSE: Duration = Duration::from_millis(200);
/// Timeout of a read.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum number of commits that are read at once.
const COMMITS_MAX: usize = 1000;

#[derive(Clone)]
pub(crate) struct Watchers {
    server: Arc<Server>,
    watches: Watches,
    running: Arc<Mutex<bool>>,
}

impl Watchers {
    pub(crate) fn new(server: Arc<Server>) -> Self {
        Self { server, watches: Watches::default(), running: Arc::default() }
    }

    /// The watches of this process.
    pub(crate) fn watches(&self) -> Watches {
        self.watches.clone()
    }

    /// Watches a key from the newest known commit on.
    pub(crate) fn watch(&self, key: &[u8]) -> Watch {
        let mut running = self.running();
        let watch = self.watches.watch(key);
        if !std::mem::replace(&mut running, true) {
            tokio::spawn(self.clone().run(self.server.newest().version));
        }
        watch
    }

    fn running(&self) -> MutexGuard<'_, bool> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a key is watched; if not, the task ends.
    fn needed(&self) -> bool {
        let mut running = self.running();
        *running = self.watches.any();
        *running
    }

    async fn run(self, mut version: u64) {
        let mut session = None;
        while self.needed() {
            match self.follow(&mut session, &mut version).await {
                Ok(()) => tokio::time::sleep(PERIOD).await,
                Err(error) => {
                    tracing::debug!(?error, "watches are repeated");
                    session = None;
                    tokio::time::sleep(PAUSE).await;
                }
            }
        }
    }

    /// Reads the commits after a version.
    async fn follow(
        &self,
        session: &mut Option<Session>,
        version: &mut u64,
    ) -> Result<(), CallError> {
        let session = match session {
            Some(session) => session,
            None => session.insert(Session::connect(&self.server).await?),
        };
        // The commit of the version itself shows that none after it was forgotten.
        let statement = format!(
            "SELECT version, written FROM {}.commits WHERE version >= $1::int8 \
             ORDER BY version LIMIT {COMMITS_MAX}",
            self.server.schema
        );
        let from = signed(*version);
        let rows = self.server.call(TIMEOUT, session.client.query(&statement, &[&from])).await?;
        let classify = |error| self.server.classify(&error);
        for (at, row) in rows.iter().enumerate() {
            let now = unsigned(row.try_get(0).map_err(classify)?);
            let hashes: Vec<i32> = row.try_get(1).map_err(classify)?;
            if at == 0 && now > *version {
                self.watches.written_where(now, |_| true);
            } else if now > *version {
                self.watches.written_where(now, |key| written::contains(&hashes, key));
            }
            *version = now;
        }
        Ok(())
    }
}
