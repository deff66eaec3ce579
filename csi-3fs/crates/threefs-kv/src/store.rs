//! A store as its users hold it.

use std::sync::Arc;
use std::time::Duration;

use fabric::deadline::Deadline;

use crate::embedded::{Embedded, EmbeddedConfig};
use crate::memory::Memory;
use crate::{Backend, Commit, KvError, Room, Snapshot, Transaction, Versionstamp, Watch};
use fabric::BoxFuture;

/// The longest pause between two attempts.
const BACKOFF_MAX: Duration = Duration::from_millis(64);

/// A store. Clones are the same store.
#[derive(Clone)]
pub struct Store(Arc<dyn Backend>);

impl Store {
    /// Rows in memory, gone with it.
    pub fn memory() -> Self {
        Self::new(Memory::new())
    }

    /// Rows in one folder of this machine. One process holds it at a time.
    ///
    /// # Errors
    /// [`KvError::Broken`] when the folder cannot be used or another process holds it.
    pub fn embedded(config: EmbeddedConfig) -> Result<Self, KvError> {
        Ok(Self::new(Embedded::open(config)?))
    }

    /// Any other store.
    pub fn new(backend: impl Backend) -> Self {
        Self(Arc::new(backend))
    }

    /// Begins a transaction.
    ///
    /// # Errors
    /// What the store says.
    pub async fn begin(&self) -> Result<Transaction, KvError> {
        Transaction::begin(Arc::clone(&self.0)).await
    }

    /// Watches a key; see [`Watch`].
    pub fn watch(&self, key: &[u8]) -> Watch {
        self.0.watch(key)
    }

    /// A number of this opening of the store, if no other process can have it open meanwhile:
    /// whoever wrote under another number is dead. `None` for stores that many processes share.
    pub fn exclusive_opening(&self) -> Option<u128> {
        self.0.exclusive_opening()
    }

    /// How full the store is, if it has a bound of its own.
    ///
    /// # Errors
    /// When that cannot be read.
    pub fn room(&self) -> Result<Option<Room>, KvError> {
        self.0.room()
    }

    /// Runs an operation in a transaction and commits; runs it again when it conflicts, until the
    /// deadline.
    ///
    /// # Errors
    /// What the operation returns (then nothing is committed), or the store's error.
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
            // The first conflict is run again at once: what it met has been committed by now.
            let pause = match attempts {
                1 => Duration::ZERO,
                _ => Duration::from_millis(1 << attempts.min(8) >> 2).min(BACKOFF_MAX),
            };
            match deadline.remaining() {
                Some(left) if left > pause => tokio::time::sleep(pause).await,
                _ => {
                    let last = error.describe();
                    return Err(KvError::DeadlinePassed { attempts, last }.into());
                }
            }
        }
    }

    /// Only beginning is cut off at the deadline: it may wait for others' snapshots to end. A commit
    /// is never abandoned, or nobody would know whether it happened.
    async fn attempt<O: Operation>(
        &self,
        operation: &O,
        deadline: Deadline,
    ) -> Result<O::Output, O::Error> {
        let begun = tokio::time::timeout_at(deadline.instant().into(), self.begin()).await;
        let mut transaction = begun.unwrap_or_else(|_| {
            let last = "too many transactions are open".into();
            Err(KvError::DeadlinePassed { attempts: 0, last })
        })?;
        let output = operation.run(&mut transaction).await?;
        transaction.commit().await?;
        Ok(output)
    }
}

/// A store can stand behind another: wrappers delay, count or break what goes through them.
impl Backend for Store {
    fn snapshot(&self) -> BoxFuture<'_, Result<Box<dyn Snapshot>, KvError>> {
        self.0.snapshot()
    }

    fn commit(&self, commit: Commit) -> BoxFuture<'_, Result<Versionstamp, KvError>> {
        self.0.commit(commit)
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

/// Something that is done in one transaction. It may be run many times before it commits, so it has
/// no effect but through its transaction.
pub trait Operation: Sync {
    /// What it finds or makes.
    type Output: Send;
    /// Why it does not.
    type Error: From<KvError> + Retry + Send;
    /// Reads and writes.
    fn run(
        &self,
        txn: &mut Transaction,
    ) -> impl Future<Output = Result<Self::Output, Self::Error>> + Send;
}

/// How [`Store::transact`] tells an error that running again may cure.
pub trait Retry {
    /// True for a conflict, also one that `body` met while it read.
    fn retryable_conflict(&self) -> bool;
    /// For the message when no time is left.
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
