//! Watches: waiting for a key to be written.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::watch;

/// Completes once a commit has written the key after the watch started. Start the watch, then read,
/// then wait: so no write is missed.
#[derive(Debug)]
pub struct Watch(watch::Receiver<u64>);

impl Watch {
    /// Completes when the key has been written. The caller sets the deadline: if the store is
    /// closed, it never completes.
    pub async fn changed(&mut self) {
        if self.0.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

/// The watched keys of a store.
#[derive(Clone, Debug, Default)]
pub(crate) struct Watches(Arc<Mutex<HashMap<Vec<u8>, watch::Sender<u64>>>>);

impl Watches {
    pub(crate) fn watch(&self, key: &[u8]) -> Watch {
        let mut watched = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // Keys without watchers are removed at each new watch, so the map stays small.
        watched.retain(|_, sender| sender.receiver_count() > 0);
        Watch(watched.entry(key.to_vec()).or_insert_with(|| watch::channel(0).0).subscribe())
    }

    /// Whether a watch of the key exists.
    pub(crate) fn is_watched(&self, key: &[u8]) -> bool {
        let watched = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        watched.get(key).is_some_and(|sender| sender.receiver_count() > 0)
    }

    /// Whether a watch of any key exists.
    pub(crate) fn any(&self) -> bool {
        let watched = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        watched.values().any(|sender| sender.receiver_count() > 0)
    }

    /// Wakes the watches of all keys for which `is_written` holds.
    pub(crate) fn written_where(&self, version: u64, is_written: impl Fn(&[u8]) -> bool) {
        let watched = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for (_, sender) in watched.iter().filter(|(key, _)| is_written(key)) {
            sender.send_replace(version);
        }
    }

    pub(crate) fn written(&self, version: u64, keys: &[Vec<u8>]) {
        let watched = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if watched.is_empty() {
            return;
        }
        for key in keys {
            if let Some(sender) = watched.get(key) {
                sender.send_replace(version);
            }
        }
    }
}
