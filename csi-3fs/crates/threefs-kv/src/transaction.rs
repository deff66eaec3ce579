//! Transaction: reads from a snapshot, sees its own writes, and records its reads.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use crate::resolver::add;
use crate::{
    Backend, BoundedAdd, Commit, KeyRange, KvError, Limits, Mutation, Row, Snapshot, Versionstamp,
};

/// Maximum number of rows that a range read requests from the store at once.
const ROWS_PER_READ_MAX: usize = 4096;
/// Maximum number of rows of a snapshot that a transaction keeps after it has read them.
const ROWS_KEPT_MAX: usize = 1024;

/// A transaction. Dropping it without `commit` has no effect.
pub struct Transaction {
    backend: Arc<dyn Backend>,
    snapshot: Box<dyn Snapshot>,
    /// Rows that were read one by one: a row of a snapshot is read once.
    rows_read: HashMap<Vec<u8>, Option<Vec<u8>>>,
    commit: Commit,
    written: BTreeMap<Vec<u8>, OwnWrite>,
    cleared: Vec<KeyRange>,
    bytes: usize,
    limits: Limits,
    /// The first write that exceeded a limit; returned by `commit`, so that writes are infallible.
    limit_error: Option<KvError>,
}

/// A write of this transaction to a row.
#[derive(Clone)]
enum OwnWrite {
    Value(Option<Vec<u8>>),
    /// Added to a row that it has not written otherwise.
    Added(i64),
}

/// Whether a read conflicts with concurrent writes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Isolation {
    Conflict,
    Snapshot,
}

impl Transaction {
    pub(crate) async fn begin(backend: Arc<dyn Backend>) -> Result<Self, KvError> {
        let snapshot = backend.snapshot().await?;
        let commit = Commit { read_version: snapshot.version(), ..Commit::default() };
        let limits = backend.limits();
        Ok(Self {
            backend,
            snapshot,
            rows_read: HashMap::new(),
            commit,
            written: BTreeMap::new(),
            cleared: Vec::new(),
            bytes: 0,
            limits,
            limit_error: None,
        })
    }

    /// The version of its snapshot.
    pub fn read_version(&self) -> u64 {
        self.commit.read_version
    }

    /// Reads a row. If another transaction writes it before this one commits, this one conflicts.
    ///
    /// # Errors
    /// [`KvError::TooOld`], or an error of the store.
    pub async fn get(&mut self, key: &[u8]) -> Result<Option<Vec<u8>>, KvError> {
        self.read(key, Isolation::Conflict).await
    }

    /// Reads a row without conflicts.
    ///
    /// # Errors
    /// As [`Transaction::get`].
    pub async fn snapshot_get(&mut self, key: &[u8]) -> Result<Option<Vec<u8>>, KvError> {
        self.read(key, Isolation::Snapshot).await
    }

    /// Reads at most `limit` rows of a range in key order. Concurrent writes to the part that was
    /// read conflict.
    ///
    /// # Errors
    /// As [`Transaction::get`].
    pub async fn range(&mut self, range: &KeyRange, limit: usize) -> Result<Vec<Row>, KvError> {
        let rows = self.read_range(range, limit).await?;
        let mut resume = range.clone();
        if let (true, Some((last, _))) = (rows.len() >= limit, rows.last()) {
            resume.end.clone_from(last);
            resume.end.push(0);
        }
        if limit > 0 {
            self.commit.read_ranges.push(resume);
        }
        Ok(rows)
    }

    /// [`Transaction::range`] without conflicts.
    ///
    /// # Errors
    /// As [`Transaction::get`].
    pub async fn snapshot_range(
        &mut self,
        range: &KeyRange,
        limit: usize,
    ) -> Result<Vec<Row>, KvError> {
        self.read_range(range, limit).await
    }

    /// Writes a row.
    pub fn set(&mut self, key: &[u8], value: impl Into<Vec<u8>>) {
        let value = value.into();
        self.account(key.len(), value.len());
        self.written.insert(key.to_vec(), OwnWrite::Value(Some(value.clone())));
        self.commit.mutations.push(Mutation::Set { key: key.to_vec(), value });
    }

    /// Removes a row, if it exists.
    pub fn clear(&mut self, key: &[u8]) {
        self.account(key.len(), 0);
        self.written.insert(key.to_vec(), OwnWrite::Value(None));
        self.commit.mutations.push(Mutation::Clear { key: key.to_vec() });
    }

    /// Removes all rows of a range.
    pub fn clear_range(&mut self, range: KeyRange) {
        if range.is_empty() {
            return;
        }
        self.account(range.start.len().max(range.end.len()), 0);
        self.written.retain(|key, _| !range.contains(key));
        self.cleared.push(range.clone());
        self.commit.mutations.push(Mutation::ClearRange { range });
    }

    /// Adds to a row with an `i64` (little endian), without reading it: additions of different
    /// transactions do not conflict.
    pub fn atomic_add(&mut self, key: &[u8], delta: i64) {
        self.account(key.len(), 8);
        let own = match self.written.get(key) {
            Some(OwnWrite::Added(before)) => OwnWrite::Added(before.wrapping_add(delta)),
            Some(OwnWrite::Value(value)) => match add(key, value.as_deref(), delta) {
                Ok(sum) => OwnWrite::Value(Some(sum.to_le_bytes().to_vec())),
                Err(error) => {
                    self.limit_error.get_or_insert(error);
                    return;
                }
            },
            None if self.cleared.iter().any(|range| range.contains(key)) => {
                OwnWrite::Value(Some(delta.to_le_bytes().to_vec()))
            }
            None => OwnWrite::Added(delta),
        };
        self.written.insert(key.to_vec(), own);
        self.commit.mutations.push(Mutation::Add { key: key.to_vec(), delta });
    }

    /// Adds to a counter row without reading it, if the result is at most `max`; otherwise `commit`
    /// fails with [`KvError::OverBound`]. Additions to one row are summed, with the lowest of their
    /// bounds. The result is not readable before the commit.
    pub fn bounded_add(&mut self, key: &[u8], delta: i64, max: i64) {
        self.add_within(BoundedAdd { key: key.to_vec(), delta, max, strict: false });
    }

    fn add_within(&mut self, addition: BoundedAdd) {
        self.account(addition.key.len(), 8);
        match self.commit.bounded_adds.iter_mut().find(|before| before.key == addition.key) {
            Some(before) => {
                before.delta = before.delta.saturating_add(addition.delta);
                before.max = before.max.min(addition.max);
                before.strict |= addition.strict;
            }
            None => self.commit.bounded_adds.push(addition),
        }
    }

    /// Requires that a counter row is at most `max` when this transaction commits; otherwise `commit`
    /// fails with [`KvError::OverBound`]. Neither reads nor writes it, so it does not conflict with
    /// additions.
    pub fn require_at_most(&mut self, key: &[u8], max: i64) {
        self.add_within(BoundedAdd { key: key.to_vec(), delta: 0, max, strict: true });
    }

    /// The sum of all [`Transaction::bounded_add`] to a row so far.
    pub fn pending_bounded_add(&self, key: &[u8]) -> i64 {
        let addition = self.commit.bounded_adds.iter().find(|addition| addition.key == key);
        addition.map_or(0, |addition| addition.delta)
    }

    /// Writes a row with the key `prefix`, a [`Versionstamp`], `suffix`; see
    /// [`Mutation::SetStamped`]. It is not readable before the commit.
    pub fn set_stamped(&mut self, prefix: &[u8], suffix: &[u8], value: impl Into<Vec<u8>>) {
        let value = value.into();
        self.account(prefix.len() + 10 + suffix.len(), value.len());
        let (prefix, suffix) = (prefix.to_vec(), suffix.to_vec());
        self.commit.mutations.push(Mutation::SetStamped { prefix, suffix, value });
    }

    /// Whether it has written nothing.
    pub fn is_read_only(&self) -> bool {
        self.commit.mutations.is_empty() && self.commit.bounded_adds.is_empty()
    }

    /// Commits. `Ok` means checked, applied and durable. A read-only transaction always succeeds:
    /// its reads are from one snapshot.
    ///
    /// # Errors
    /// [`KvError::Conflict`] and [`KvError::TooOld`] (repeat it), [`KvError::TooLarge`],
    /// [`KvError::NoSpace`], [`KvError::Unavailable`], [`KvError::CommitUnknown`].
    pub async fn commit(self) -> Result<Versionstamp, KvError> {
        let read_only = self.is_read_only();
        let Self { backend, snapshot, mut commit, limit_error, .. } = self;
        if let Some(limit_error) = limit_error {
            return Err(limit_error);
        }
        if read_only {
            return Ok(Versionstamp::new(commit.read_version, 0));
        }
        // Snapshots keep old pages of the store alive, and this one is no longer needed.
        commit.seen = snapshot.into_seen();
        backend.commit(commit).await
    }

    fn account(&mut self, key_bytes: usize, value_bytes: usize) {
        self.bytes += key_bytes + value_bytes;
        let bounds = [
            ("key", key_bytes, self.limits.key_bytes),
            ("value", value_bytes, self.limits.value_bytes),
            ("transaction", self.bytes, self.limits.commit_bytes),
            ("mutations", self.commit.mutations.len() + 1, self.limits.mutations),
        ];
        for (what, size, size_max) in bounds {
            if size > size_max {
                self.limit_error.get_or_insert(KvError::TooLarge { what, size, size_max });
            }
        }
    }

    async fn read(&mut self, key: &[u8], guard: Isolation) -> Result<Option<Vec<u8>>, KvError> {
        if let Some(OwnWrite::Value(value)) = self.written.get(key) {
            return Ok(value.clone());
        }
        if key.len() > self.limits.key_bytes {
            let (what, size, size_max) = ("key", key.len(), self.limits.key_bytes);
            return Err(KvError::TooLarge { what, size, size_max });
        }
        let own = self.written.get(key).cloned();
        if own.is_none() && self.cleared.iter().any(|range| range.contains(key)) {
            return Ok(None);
        }
        if guard == Isolation::Conflict {
            self.commit.read_keys.push(key.to_vec());
        }
        let value = self.read_once(key).await?;
        match own {
            Some(OwnWrite::Added(delta)) => {
                Ok(Some(add(key, value.as_deref(), delta)?.to_le_bytes().to_vec()))
            }
            _ => Ok(value),
        }
    }

    async fn read_once(&mut self, key: &[u8]) -> Result<Option<Vec<u8>>, KvError> {
        if let Some(value) = self.rows_read.get(key) {
            return Ok(value.clone());
        }
        let value = self.snapshot.get(key).await?;
        if self.rows_read.len() < ROWS_KEPT_MAX {
            self.rows_read.insert(key.to_vec(), value.clone());
        }
        Ok(value)
    }

    /// The rows of the snapshot, overlaid with this transaction's writes.
    async fn read_range(&self, range: &KeyRange, limit: usize) -> Result<Vec<Row>, KvError> {
        let mut rows = Vec::new();
        let mut rest = range.clone();
        while rows.len() < limit && !rest.is_empty() {
            let read_limit = (limit - rows.len()).min(ROWS_PER_READ_MAX);
            let stored_rows = self.snapshot.range(&rest, read_limit).await?;
            // The store's rows are known up to here; writes beyond it are merged in the next round.
            let known_range = match stored_rows.last() {
                Some((last, _)) if stored_rows.len() >= read_limit => {
                    KeyRange::new(rest.start.clone(), [last.as_slice(), &[0]].concat())
                }
                _ => rest.clone(),
            };
            let mut merged: BTreeMap<Vec<u8>, Vec<u8>> = stored_rows
                .into_iter()
                .filter(|(key, _)| !self.cleared.iter().any(|range| range.contains(key)))
                .collect();
            for (key, own) in self.written.range(known_range.start.clone()..known_range.end.clone())
            {
                match own {
                    OwnWrite::Value(Some(value)) => {
                        merged.insert(key.clone(), value.clone());
                    }
                    OwnWrite::Value(None) => {
                        merged.remove(key);
                    }
                    OwnWrite::Added(delta) => {
                        let sum = add(key, merged.get(key).map(Vec::as_slice), *delta)?;
                        merged.insert(key.clone(), sum.to_le_bytes().to_vec());
                    }
                }
            }
            rows.extend(merged);
            rest.start = known_range.end;
        }
        rows.truncate(limit);
        Ok(rows)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
    use std::time::Duration;

    use fabric::BoxFuture;
    use fabric::deadline::Deadline;

    use super::*;
    use crate::{Operation, Seen, Store, Watch};

    /// Counts the rows that are read one by one.
    struct Counted(Store, Arc<AtomicU64>);

    struct CountedSnapshot(Box<dyn Snapshot>, Arc<AtomicU64>);

    impl Backend for Counted {
        fn snapshot(&self) -> BoxFuture<'_, Result<Box<dyn Snapshot>, KvError>> {
            Box::pin(async {
                let snapshot = Backend::snapshot(&self.0).await?;
                let counted = CountedSnapshot(snapshot, Arc::clone(&self.1));
                Ok(Box::new(counted) as Box<dyn Snapshot>)
            })
        }

        fn commit(&self, commit: Commit) -> BoxFuture<'_, Result<Versionstamp, KvError>> {
            self.0.commit(commit)
        }

        fn watch(&self, key: &[u8]) -> Watch {
            self.0.watch(key)
        }

        fn exclusive_opening(&self) -> Option<u128> {
            self.0.exclusive_opening()
        }
    }

    impl Snapshot for CountedSnapshot {
        fn version(&self) -> u64 {
            self.0.version()
        }

        fn get<'a>(&'a self, key: &'a [u8]) -> BoxFuture<'a, Result<Option<Vec<u8>>, KvError>> {
            self.1.fetch_add(1, SeqCst);
            self.0.get(key)
        }

        fn range<'a>(
            &'a self,
            range: &'a KeyRange,
            limit: usize,
        ) -> BoxFuture<'a, Result<Vec<Row>, KvError>> {
            self.0.range(range, limit)
        }

        fn into_seen(self: Box<Self>) -> Seen {
            self.0.into_seen()
        }
    }

    struct Write(&'static [u8]);

    impl Operation for Write {
        type Output = ();
        type Error = KvError;

        async fn run(&self, txn: &mut Transaction) -> Result<(), KvError> {
            txn.set(b"a", self.0);
            Ok(())
        }
    }

    /// Reads rows several times. At the first attempt, another transaction changes one of them after
    /// the first read, which is without a conflict.
    struct ReadAgain<'a>(&'a Store, &'a AtomicU64);

    impl Operation for ReadAgain<'_> {
        type Output = Option<Vec<u8>>;
        type Error = KvError;

        async fn run(&self, txn: &mut Transaction) -> Result<Self::Output, KvError> {
            let first = txn.snapshot_get(b"a").await?;
            if self.1.fetch_add(1, SeqCst) == 0 {
                self.0.transact(soon(), &Write(b"2")).await?;
            }
            for _ in 0..3 {
                assert_eq!(txn.get(b"a").await?, first);
                assert_eq!(txn.get(b"absent").await?, None);
            }
            txn.set(b"a", b"3");
            assert_eq!(txn.get(b"a").await?.as_deref(), Some(b"3".as_slice()));
            Ok(first)
        }
    }

    fn soon() -> Deadline {
        Deadline::after(Duration::from_secs(60))
    }

    #[tokio::test]
    async fn a_row_is_read_once_and_conflicts_if_a_later_read_does() {
        let (inner, attempts) = (Store::memory(), AtomicU64::new(0));
        let reads = Arc::new(AtomicU64::new(0));
        inner.transact(soon(), &Write(b"1")).await.unwrap();
        let store = Store::new(Counted(inner.clone(), Arc::clone(&reads)));
        let read = store.transact(soon(), &ReadAgain(&inner, &attempts)).await.unwrap();
        assert_eq!((read.as_deref(), attempts.load(SeqCst)), (Some(b"2".as_slice()), 2));
        assert_eq!(reads.load(SeqCst), 4, "two rows in each attempt");
    }
}
