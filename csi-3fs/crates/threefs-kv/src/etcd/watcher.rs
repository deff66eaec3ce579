//! Watches of keys: one etcd watch for each key that is watched.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use etcd_client::{Error, WatchOptions};

use super::members::{CALL_TIMEOUT, CallError, Members};
use super::rows::{Rows, signed};
use crate::Watch;
use crate::watch::Watches;

/// Pause before a watch is created again, and period of the check whether it is still needed.
const PAUSE: Duration = Duration::from_millis(200);

#[derive(Clone)]
pub(crate) struct Watchers {
    members: Arc<Members>,
    rows: Rows,
    watches: Watches,
    running: Arc<Mutex<HashSet<Vec<u8>>>>,
}

impl Watchers {
    pub(crate) fn new(members: Arc<Members>, rows: Rows) -> Self {
        Self { members, rows, watches: Watches::default(), running: Arc::default() }
    }

    /// The watches of this process.
    pub(crate) fn watches(&self) -> Watches {
        self.watches.clone()
    }

    /// Watches a key from the newest known revision on.
    pub(crate) fn watch(&self, key: &[u8]) -> Watch {
        let mut running = self.running();
        let watch = self.watches.watch(key);
        if running.insert(key.to_vec()) {
            tokio::spawn(self.clone().run(key.to_vec(), self.members.newest() + 1));
        }
        watch
    }

    fn running(&self) -> MutexGuard<'_, HashSet<Vec<u8>>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a key is watched; if not, its task ends.
    fn needed(&self, key: &[u8]) -> bool {
        let mut running = self.running();
        let needed = self.watches.is_watched(key);
        if !needed {
            running.remove(key);
        }
        needed
    }

    async fn run(self, key: Vec<u8>, mut revision: u64) {
        while self.needed(&key) {
            match self.follow(&key, &mut revision).await {
                // The lost revisions may have contained a write.
                Err(CallError::Compacted) => {
                    revision = self.members.newest() + 1;
                    self.watches.written(revision, std::slice::from_ref(&key));
                }
                _ => tokio::time::sleep(PAUSE).await,
            }
        }
    }

    async fn follow(&self, key: &[u8], revision: &mut u64) -> Result<(), CallError> {
        let (row, from) = (self.rows.row(key), signed(*revision));
        let member = self.members.preferred();
        let created = self.members.call(member, CALL_TIMEOUT, |mut client| async move {
            client.watch(row, Some(WatchOptions::new().with_start_revision(from))).await
        });
        let mut stream = created.await?;
        while self.needed(key) {
            let Ok(message) = tokio::time::timeout(PAUSE, stream.message()).await else { continue };
            let message = message.map_err(|error: Error| CallError::Failed(error.to_string()))?;
            let Some(message) = message else { return Ok(()) };
            let endpoint = self.members.endpoint(member);
            let checked = self.members.check_cluster(endpoint, message.header());
            checked.map_err(CallError::Refused)?;
            if message.compact_revision() > 0 {
                return Err(CallError::Compacted);
            }
            if message.canceled() {
                return Ok(());
            }
            if message.events().is_empty() {
                continue;
            }
            let newest = message.header().map_or(0, |header| header.revision().unsigned_abs());
            *revision = (*revision).max(newest + 1);
            self.watches.written(newest, &[key.to_vec()]);
        }
        Ok(())
    }
}
