//! Handle of a store, with retries of transactions.

use std::sync::Arc;
use std::time::Duration;

use fabric::deadline::Deadline;

use crate::embedded::{Embedded, EmbeddedConfig};
use crate::etcd::{Etcd, EtcdConfig};
use crate::memory::MemoryBackend;
use crate::postgres::{Postgres, PostgresConfig};
use crate::{Backend, Commit, KvError, Limits, Room, Snapshot, Transaction, Versionstamp, Watch};
use fabric::BoxFuture;

/// Maximum pause between two attempts.
const BACKOFF_MAX: Duration = Duration::from_millis(64);

/// A store. Clones share it.
#[derive(Clone)]
pub struct Store(Arc<dyn Backend>);

impl Store {
    /// An in-memory store.
    pub fn memory() -> Self {
        Self::new(MemoryBackend::new(Some(rand::random())))
    }

    /// An in-memory store that behaves as one that several processes share, for tests.
    pub fn shared_memory() -> Self {
        Self::new(MemoryBackend::new(None))
    }

    /// A store in a local folder. One process can open it at a time.
    ///
    /// # Errors
    /// [`KvError::Broken`] if the folder cannot be used or another process holds it.
    pub fn embedded(config: EmbeddedConfig) -> Result<Self, KvError> {
        Ok(Self::new(Embedded::open(config)?))
    }

    /// A store in an etcd cluster, which several processes can open at a time.
    ///
    /// # Errors
    /// [`KvError::Broken`] if the cluster cannot be used, with the remedy; [`KvError::Unavailable`]
    /// if no member replies.
    pub async fn etcd(config: EtcdConfig) -> Result<Self, KvError> {
        Ok(Self::new(Etcd::open(config).await?))
    }

    /// A store in a PostgreSQL database, which several processes can open at a time.
    ///
    /// # Errors
    /// [`KvError::Broken`] if the server cannot be used, with the remedy; [`KvError::Unavailable`]
    /// if no server accepts writes.
    pub async fn postgres(config: PostgresConfig) -> Result<Self, KvError> {
        Ok(Self::new(Postgres::open(config).await?))
    }

    /// A store with another backend.
    pub fn new(backend: impl Backend) -> Self {
        Self(Arc::new(backend))
    }

    /// Starts a transaction.
    ///
    /// # Errors
    /// Errors of the store.
    pub async fn begin(&self) -> Result<Transaction, KvError> {
        Transaction::begin(Arc::clone(&self.0)).await
    }

    /// Watches a key; see [`Watch`].
    pub fn watch(&self, key: &[u8]) -> Watch {
        self.0.watch(key)
    }

    /// Id of this opening of the store, if no other process can have it open at the same time: a
    /// writer with another id is dead. `None` for stores shared by processes.
    pub fn exclusive_opening(&self) -> Option<u128> {
        self.0.exclusive_opening()
    }

    /// Space usage of the store, if it is bounded.
    ///
    /// # Errors
    /// The usage cannot be read.
    pub fn room(&self) -> Result<Option<Room>, KvError> {
        self.0.room()
    }

    /// Runs an operation in a transaction and commits it; repeats it on conflicts, until the
    /// deadline.
    ///
    /// # Errors
    /// The error of the operation (then nothing is committed), or of the store.
    pub async fn transact<O: Operation>(
        &self,
        deadline: Deadline,
        operation: &O,
    ) -> Result<O::Output, O::Error> {
        let mut attempts = 0u32;
        loop {
            attempts += 1;
            let error = match self.attempt(operation, deadline).await {
                Err(error) if error.retryable_conflict() => error,
                result => return result,
            };
            // The first conflict is retried at once: the other transaction has committed by now.
            let pause = match attempts {
                1 => Duration::ZERO,
                _ => Duration::from_millis(1 << attempts.min(8) >> 2).min(BACKOFF_MAX),
            };
            match deadline.remaining() {
                Some(remaining) if remaining > pause => tokio::time::sleep(pause).await,
                _ => {
                    let last = error.describe();
                    return Err(KvError::DeadlinePassed { attempts, last }.into());
                }
            }
        }
    }

    /// Only the start is limited by the deadline: it may wait for other snapshots to end. A commit
    /// is never abandoned, because its outcome would be unknown.
    async fn attempt<O: Operation>(
        &self,
        operation: &O,
        deadline: Deadline,
    ) -> Result<O::Output, O::Error> {
        let result = tokio::time::timeout_at(deadline.instant().into(), self.begin()).await;
        let mut transaction = result.unwrap_or_else(|_| {
            let last = "none could start: the store does not reply, or too many are open".into();
            Err(KvError::DeadlinePassed { attempts: 0, last })
        })?;
        let output = operation.run(&mut transaction).await?;
        transaction.commit().await?;
        Ok(output)
    }
}

/// A store can wrap another one: wrappers delay, count or fail its operations.
impl Backend for Store {
    fn snapshot(&self) -> BoxFuture<'_, Result<Box<dyn Snapshot>, KvError>> {
        self.0.snapshot()
    }

    fn commit(&self, commit: Commit) -> BoxFuture<'_, Result<Versionstamp, KvError>> {
        self.0.commit(commit)
    }

    fn limits(&self) -> Limits {
        self.0.limits()
    }

    fn watch(&self, key: &[u8]) -> Watch {
        self.0.watch(key)
    }

    fn room(&self) -> Result<Option<Room>, KvError> {
        self.0.room()
    }

    fn exclusive_opening(&self) -> Option<u128> {
        self.0.exclusive_opening()
    }
}

/// An operation in one transaction. It may run many times before it commits, so it must have no
/// effects outside its transaction.
pub trait Operation: Sync {
    /// Its result.
    type Output: Send;
    /// Its error.
    type Error: From<KvError> + Retry + Send;
    /// Reads and writes in the transaction.
    fn run(
        &self,
        txn: &mut Transaction,
    ) -> impl Future<Output = Result<Self::Output, Self::Error>> + Send;
}

/// Classification of errors for the retries of [`Store::transact`].
pub trait Retry {
    /// Whether this is a conflict, including one during a read.
    fn retryable_conflict(&self) -> bool;
    /// Description for the error at the deadline.
    fn describe(&self) -> String;
}

impl Retry for KvError {
    fn retryable_conflict(&self) -> bool {
        self.retryable()
    }

    fn describe(&self) -> String {
        self.to_string()
    }
}
