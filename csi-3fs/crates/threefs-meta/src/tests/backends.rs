//! Stores for tests: interleaved transactions, unknown commits, counted reads.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};

use fabric::BoxFuture;
use threefs_kv::{
    Backend, Commit, KeyRange, KvError, Row, Seen, Snapshot, Store, Versionstamp, Watch,
};

/// A store that yields before each operation, so that transactions interleave.
pub(crate) struct Yielding(pub Store);

struct YieldingSnapshot(Box<dyn Snapshot>);

/// Yields zero to two times, differently each time.
async fn yield_some() {
    static CALLS: AtomicU64 = AtomicU64::new(0);
    let call = CALLS.fetch_add(1, SeqCst).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    for _ in 0..(call >> 62) {
        tokio::task::yield_now().await;
    }
}

impl Backend for Yielding {
    fn snapshot(&self) -> BoxFuture<'_, Result<Box<dyn Snapshot>, KvError>> {
        Box::pin(async {
            yield_some().await;
            Ok(Box::new(YieldingSnapshot(self.0.snapshot().await?)) as Box<dyn Snapshot>)
        })
    }

    fn commit(&self, commit: Commit) -> BoxFuture<'_, Result<Versionstamp, KvError>> {
        Box::pin(async {
            yield_some().await;
            self.0.commit(commit).await
        })
    }

    fn watch(&self, key: &[u8]) -> Watch {
        self.0.watch(key)
    }

    fn exclusive_opening(&self) -> Option<u128> {
        self.0.exclusive_opening()
    }
}

impl Snapshot for YieldingSnapshot {
    fn version(&self) -> u64 {
        self.0.version()
    }

    fn get<'a>(&'a self, key: &'a [u8]) -> BoxFuture<'a, Result<Option<Vec<u8>>, KvError>> {
        Box::pin(async {
            yield_some().await;
            self.0.get(key).await
        })
    }

    fn range<'a>(
        &'a self,
        range: &'a KeyRange,
        limit: usize,
    ) -> BoxFuture<'a, Result<Vec<Row>, KvError>> {
        Box::pin(async move {
            yield_some().await;
            self.0.range(range, limit).await
        })
    }

    fn into_seen(self: Box<Self>) -> Seen {
        self.0.into_seen()
    }
}

/// A store that commits and, while the flag is set, reports the outcome as unknown.
pub(crate) struct UnknownOutcome(pub Store, pub Arc<AtomicBool>);

impl Backend for UnknownOutcome {
    fn snapshot(&self) -> BoxFuture<'_, Result<Box<dyn Snapshot>, KvError>> {
        Backend::snapshot(&self.0)
    }

    fn commit(&self, commit: Commit) -> BoxFuture<'_, Result<Versionstamp, KvError>> {
        Box::pin(async {
            let stamp = self.0.commit(commit).await?;
            match self.1.load(SeqCst) {
                true => Err(KvError::CommitUnknown { detail: "the disk did not reply".into() }),
                false => Ok(stamp),
            }
        })
    }

    fn watch(&self, key: &[u8]) -> Watch {
        self.0.watch(key)
    }

    fn exclusive_opening(&self) -> Option<u128> {
        self.0.exclusive_opening()
    }
}

/// A store that records the maximum number of reads of a transaction.
pub(crate) struct MostReads(pub Store, pub Arc<AtomicU64>);

struct CountingSnapshot {
    snapshot: Box<dyn Snapshot>,
    reads: AtomicU64,
    most: Arc<AtomicU64>,
}

impl CountingSnapshot {
    fn count(&self) {
        self.most.fetch_max(self.reads.fetch_add(1, SeqCst) + 1, SeqCst);
    }
}

impl Backend for MostReads {
    fn snapshot(&self) -> BoxFuture<'_, Result<Box<dyn Snapshot>, KvError>> {
        Box::pin(async {
            let (snapshot, most) = (Backend::snapshot(&self.0).await?, Arc::clone(&self.1));
            let reads = AtomicU64::new(0);
            Ok(Box::new(CountingSnapshot { snapshot, reads, most }) as Box<dyn Snapshot>)
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

impl Snapshot for CountingSnapshot {
    fn version(&self) -> u64 {
        self.snapshot.version()
    }

    fn get<'a>(&'a self, key: &'a [u8]) -> BoxFuture<'a, Result<Option<Vec<u8>>, KvError>> {
        self.count();
        self.snapshot.get(key)
    }

    fn range<'a>(
        &'a self,
        range: &'a KeyRange,
        limit: usize,
    ) -> BoxFuture<'a, Result<Vec<Row>, KvError>> {
        self.count();
        self.snapshot.range(range, limit)
    }

    fn into_seen(self: Box<Self>) -> Seen {
        self.snapshot.into_seen()
    }
}
