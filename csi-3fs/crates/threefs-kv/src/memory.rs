//! In-memory store, with all row versions that a snapshot can still see.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::resolver::{Resolver, add, add_within, stamped_key};
use crate::watch::Watches;
use crate::{
    Backend, Commit, KeyRange, KvError, Mutation, Row, Seen, Snapshot, Versionstamp, Watch,
};
use fabric::BoxFuture;

/// Writes that are kept for conflict checks; older transactions are refused.
const WRITES_MAX: usize = 100_000;

/// The in-memory store. Its rows last as long as the process.
pub(crate) struct MemoryBackend {
    state: Arc<Mutex<State>>,
    watches: Watches,
    /// `None` if it stands for a store that several processes share.
    opening: Option<u128>,
}

struct State {
    version: u64,
    resolver: Resolver,
    /// Every version of every row, oldest first.
    rows: BTreeMap<Vec<u8>, Vec<Written>>,
    /// Number of snapshots at each version.
    snapshots: BTreeMap<u64, usize>,
}

impl MemoryBackend {
    pub(crate) fn new(opening: Option<u128>) -> Self {
        let state = State {
            version: 0,
            resolver: Resolver::new(0, WRITES_MAX),
            rows: BTreeMap::new(),
            snapshots: BTreeMap::new(),
        };
        Self { state: Arc::new(Mutex::new(state)), watches: Watches::default(), opening }
    }

    fn apply(&self, commit: Commit) -> Result<Versionstamp, KvError> {
        let mut state = lock(&self.state);
        state.resolver.check(&commit)?;
        let stamp = Versionstamp::new(state.version + 1, 0);
        let changes = state.changes(&commit, stamp)?;
        state.version += 1;
        let keys: Vec<Vec<u8>> = changes.keys().cloned().collect();
        self.watches.written(state.version, &keys);
        state.resolver.record(stamp.version(), keys);
        let oldest = state.snapshots.keys().next().copied().unwrap_or(state.version);
        for (key, value) in changes {
            state.write(key, value, oldest);
        }
        Ok(stamp)
    }
}

impl State {
    fn newest(&self, key: &[u8]) -> Option<&[u8]> {
        visible(self.rows.get(key)?, self.version)
    }

    /// The new value of each row that a commit changes.
    fn changes(
        &self,
        commit: &Commit,
        stamp: Versionstamp,
    ) -> Result<BTreeMap<Vec<u8>, Option<Vec<u8>>>, KvError> {
        let mut changes: BTreeMap<Vec<u8>, Option<Vec<u8>>> = BTreeMap::new();
        for mutation in &commit.mutations {
            match mutation {
                Mutation::Set { key, value } => {
                    changes.insert(key.clone(), Some(value.clone()));
                }
                Mutation::Clear { key } => {
                    changes.insert(key.clone(), None);
                }
                Mutation::ClearRange { range } => {
                    let rows = self.rows.range(range.start.clone()..range.end.clone());
                    let existing = rows.filter(|(_, rows)| visible(rows, self.version).is_some());
                    changes.extend(existing.map(|(key, _)| (key.clone(), None)));
                    for (_, value) in changes.range_mut(range.start.clone()..range.end.clone()) {
                        *value = None;
                    }
                }
                Mutation::Add { key, delta } => {
                    let current = match changes.get(key) {
                        Some(own) => own.as_deref(),
                        None => self.newest(key),
                    };
                    let sum = add(key, current, *delta)?;
                    changes.insert(key.clone(), Some(sum.to_le_bytes().to_vec()));
                }
                Mutation::SetStamped { prefix, suffix, value } => {
                    changes.insert(stamped_key(prefix, stamp, suffix), Some(value.clone()));
                }
            }
        }
        for addition in &commit.bounded_adds {
            let current = match changes.get(&addition.key) {
                Some(own) => own.as_deref(),
                None => self.newest(&addition.key),
            };
            let sum = add_within(addition, current)?;
            if !addition.writes() {
                continue;
            }
            changes.insert(addition.key.clone(), Some(sum.to_le_bytes().to_vec()));
        }
        Ok(changes)
    }

    fn write(&mut self, key: Vec<u8>, value: Option<Vec<u8>>, oldest_snapshot: u64) {
        let version = self.version;
        let versions = self.rows.entry(key.clone()).or_default();
        versions.push((version, value));
        // Versions older than the one that the oldest snapshot sees are not needed.
        let position = versions.iter().rposition(|(version, _)| *version <= oldest_snapshot);
        versions.drain(..position.unwrap_or(0));
        if matches!(versions.as_slice(), [(_, None)]) {
            self.rows.remove(&key);
        }
    }
}

/// A version and the value of the row from it on; `None` is a removal.
type Written = (u64, Option<Vec<u8>>);

fn visible(versions: &[Written], version: u64) -> Option<&[u8]> {
    versions.iter().rev().find(|(row_version, _)| *row_version <= version)?.1.as_deref()
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Backend for MemoryBackend {
    fn snapshot(&self) -> BoxFuture<'_, Result<Box<dyn Snapshot>, KvError>> {
        let mut state = lock(&self.state);
        let version = state.version;
        *state.snapshots.entry(version).or_default() += 1;
        let snapshot = MemorySnapshot { state: Arc::clone(&self.state), version };
        Box::pin(std::future::ready(Ok(Box::new(snapshot) as Box<dyn Snapshot>)))
    }

    fn commit(&self, commit: Commit) -> BoxFuture<'_, Result<Versionstamp, KvError>> {
        Box::pin(async move { self.apply(commit) })
    }

    fn watch(&self, key: &[u8]) -> Watch {
        self.watches.watch(key)
    }

    fn exclusive_opening(&self) -> Option<u128> {
        self.opening
    }
}

struct MemorySnapshot {
    state: Arc<Mutex<State>>,
    version: u64,
}

impl Drop for MemorySnapshot {
    fn drop(&mut self) {
        let mut state = lock(&self.state);
        if let Some(count) = state.snapshots.get_mut(&self.version) {
            *count -= 1;
            if *count == 0 {
                state.snapshots.remove(&self.version);
            }
        }
    }
}

impl Snapshot for MemorySnapshot {
    fn version(&self) -> u64 {
        self.version
    }

    fn get<'a>(&'a self, key: &'a [u8]) -> BoxFuture<'a, Result<Option<Vec<u8>>, KvError>> {
        let state = lock(&self.state);
        let value = state.rows.get(key).and_then(|versions| visible(versions, self.version));
        Box::pin(std::future::ready(Ok(value.map(<[u8]>::to_vec))))
    }

    fn range<'a>(
        &'a self,
        range: &'a KeyRange,
        limit: usize,
    ) -> BoxFuture<'a, Result<Vec<Row>, KvError>> {
        let mut rows = Vec::new();
        if !range.is_empty() {
            let state = lock(&self.state);
            let state_rows = state.rows.range(range.start.clone()..range.end.clone());
            rows = state_rows
                .filter_map(|(key, versions)| {
                    Some((key.clone(), visible(versions, self.version)?.to_vec()))
                })
                .take(limit)
                .collect();
        }
        Box::pin(std::future::ready(Ok(rows)))
    }

    fn into_seen(self: Box<Self>) -> Seen {
        Seen::new()
    }
}
