//! A store that two processes use in turn: each finds the other's commits only in the store itself.

use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use fabric::BoxFuture;
use threefs_kv::{Backend, Commit, KvError, Limits, Room, Snapshot, Store, Versionstamp, Watch};

pub(crate) struct InTurn {
    openings: [Store; 2],
    next: AtomicUsize,
}

impl InTurn {
    pub(crate) fn new(openings: [Store; 2]) -> Self {
        Self { openings, next: AtomicUsize::new(0) }
    }

    fn next(&self) -> &Store {
        &self.openings[self.next.fetch_add(1, SeqCst) % 2]
    }
}

impl Backend for InTurn {
    fn snapshot(&self) -> BoxFuture<'_, Result<Box<dyn Snapshot>, KvError>> {
        Backend::snapshot(self.next())
    }

    fn commit(&self, commit: Commit) -> BoxFuture<'_, Result<Versionstamp, KvError>> {
        self.next().commit(commit)
    }

    fn limits(&self) -> Limits {
        self.openings[0].limits()
    }

    fn watch(&self, key: &[u8]) -> Watch {
        self.next().watch(key)
    }

    fn room(&self) -> Result<Option<Room>, KvError> {
        self.openings[0].room()
    }

    fn exclusive_opening(&self) -> Option<u128> {
        None
    }
}
