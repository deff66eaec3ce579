//! Embedded store: rows in LMDB, with group commit.
//!
//! Reads use the memory map directly, at an LMDB snapshot. Commits are queued for one thread, which
//! takes all waiting ones, checks each for conflicts since its snapshot (`Resolver`), applies the
//! valid ones in one LMDB transaction, syncs once, and then replies. The version of a commit is the
//! number of its LMDB transaction.
//!
//! One process holds the folder (an advisory lock that the kernel releases when the process dies),
//! because the resolver's state is in that process.

use std::ops::Bound;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use heed::types::Bytes;
use heed::{CommitOrAbort, Database, Env, EnvOpenOptions, MdbError, RoTxn, RwTxn, WithoutTls};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};

use crate::folder::{Ownership, check_loaded, sync_folder, take_ownership};
use crate::resolver::{Resolver, add, add_within, stamped_key};
use crate::watch::Watches;
use crate::{
    Backend, Commit, KeyRange, KvError, Mutation, Room, Row, Seen, Snapshot, Versionstamp, Watch,
};
use fabric::BoxFuture;

/// Keys below are reserved for the store.
pub(crate) const RESERVED_KEYS_END: &[u8] = &[1];
/// Written by every batch, because LMDB does not number a transaction without changes.
const VERSION_KEY: &[u8] = b"\0version";
/// Maximum number of transactions per disk write.
const BATCH_MAX: usize = 1024;
/// Maximum number of queued commits; further ones wait.
const QUEUE_MAX: usize = 4096;
/// Maximum number of snapshots, each of which needs a slot of LMDB's reader table. Further ones
/// wait.
const SNAPSHOTS_MAX: usize = 2048;
/// Writes that are kept for conflict checks; older transactions are refused.
const WRITES_MAX: usize = 200_000;
/// A snapshot keeps LMDB from reusing pages, so its age is bounded.
const SNAPSHOT_AGE_MAX: Duration = Duration::from_secs(5);

pub(crate) type Rows = Database<'static, Bytes, Bytes>;

/// Default maximum size of a store.
pub const MAP_BYTES_MAX: usize = 64 << 30;

/// Configuration of an embedded store.
#[derive(Clone, Debug)]
pub struct EmbeddedConfig {
    /// The folder; created if it is missing.
    pub path: PathBuf,
    /// Maximum size of the store; address space only until it is used.
    pub map_bytes_max: usize,
}

impl EmbeddedConfig {
    /// A store of at most 64 GiB.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), map_bytes_max: MAP_BYTES_MAX }
    }
}

/// The embedded store.
pub(crate) struct Embedded {
    env: Env<WithoutTls>,
    rows: Rows,
    path: PathBuf,
    snapshots: Arc<Semaphore>,
    watches: Watches,
    opening: u128,
    queue: Option<mpsc::Sender<Job>>,
    committer: Option<JoinHandle<()>>,
}

struct Job {
    commit: Commit,
    reply: oneshot::Sender<Result<Versionstamp, KvError>>,
}

impl Embedded {
    pub(crate) fn open(config: EmbeddedConfig) -> Result<Self, KvError> {
        let path = config.path;
        let broken = |detail: String| KvError::broken(&path, detail);
        std::fs::create_dir_all(&path).map_err(|error| broken(error.to_string()))?;
        let owner = take_ownership(&path)?;
        check_loaded(&path)?;
        let mut options = EnvOpenOptions::new().read_txn_without_tls();
        options.map_size(config.map_bytes_max).max_readers(SNAPSHOTS_MAX as u32 + 16);
        // SAFETY: no other process maps or changes these files: `owner` is an exclusive lock on the
        // folder, and heed itself refuses to open one folder twice in a process.
        let env = unsafe { options.open(&path) }.map_err(|error| broken(error.to_string()))?;
        env.clear_stale_readers().map_err(|error| broken(error.to_string()))?;
        let rows = open_rows(&env).map_err(|error| broken(error.to_string()))?;
        sync_folder(&path).map_err(|error| broken(error.to_string()))?;
        let watches = Watches::default();
        let (queue, jobs) = mpsc::channel(QUEUE_MAX);
        let committer = Committer {
            env: env.clone(),
            rows,
            path: path.clone(),
            resolver: Resolver::new(u64::MAX, WRITES_MAX),
            watches: watches.clone(),
            _owner: owner,
        };
        let committer = std::thread::Builder::new()
            .name("kv-commit".into())
            .spawn(move || committer.run(jobs))
            .map_err(|error| broken(error.to_string()))?;
        Ok(Self {
            env,
            rows,
            path,
            opening: rand::random(),
            snapshots: Arc::new(Semaphore::new(SNAPSHOTS_MAX)),
            watches,
            queue: Some(queue),
            committer: Some(committer),
        })
    }
}

pub(crate) fn open_rows(env: &Env<WithoutTls>) -> Result<Rows, heed::Error> {
    let txn = env.write_txn()?;
    let database = env.create_databases_and_commit(txn, |opener, txn| {
        let rows = opener.create_database::<Bytes, Bytes>(txn, None)?;
        let version = txn_version(txn).to_le_bytes();
        rows.put(txn, VERSION_KEY, &version)?;
        Ok::<_, heed::Error>(CommitOrAbort::<_, ()>::Commit(rows))
    })?;
    Ok(database.unwrap_commit())
}

impl Drop for Embedded {
    fn drop(&mut self) {
        // Closes the queue, so that the thread commits the rest and exits.
        self.queue = None;
        if let Some(committer) = self.committer.take() {
            let _ = committer.join();
        }
    }
}

fn txn_version(txn: &RwTxn<'_>) -> u64 {
    txn.id() as u64
}

impl Backend for Embedded {
    fn snapshot(&self) -> BoxFuture<'_, Result<Box<dyn Snapshot>, KvError>> {
        Box::pin(async move {
            let closed = |error: &dyn std::fmt::Display| KvError::broken(&self.path, error);
            let place = Arc::clone(&self.snapshots).acquire_owned().await;
            let place = place.map_err(|error| closed(&error))?;
            let txn = self.env.clone().static_read_txn().map_err(|error| closed(&error))?;
            let snapshot = EmbeddedSnapshot {
                version: txn.id() as u64,
                txn: Mutex::new(txn),
                rows: self.rows,
                path: self.path.clone(),
                started: Instant::now(),
                _place: place,
            };
            Ok(Box::new(snapshot) as Box<dyn Snapshot>)
        })
    }

    fn commit(&self, commit: Commit) -> BoxFuture<'_, Result<Versionstamp, KvError>> {
        Box::pin(async move {
            let exited =
                || KvError::broken(&self.path, "the commit thread has exited; restart the service");
            let (reply, answer) = oneshot::channel();
            let queue = self.queue.as_ref().ok_or_else(exited)?;
            queue.send(Job { commit, reply }).await.map_err(|_| exited())?;
            answer.await.unwrap_or_else(|_| {
                Err(KvError::CommitUnknown { detail: "the commit thread exited".into() })
            })
        })
    }

    fn watch(&self, key: &[u8]) -> Watch {
        self.watches.watch(key)
    }

    fn room(&self) -> Result<Option<Room>, KvError> {
        let broken = |detail: String| KvError::broken(&self.path, detail);
        let txn = self.env.read_txn().map_err(|error| broken(error.to_string()))?;
        let stat = self.rows.stat(&txn).map_err(|error| broken(error.to_string()))?;
        let pages = stat.branch_pages + stat.leaf_pages + stat.overflow_pages;
        let file = self.env.real_disk_size().map_err(|error| broken(error.to_string()))?;
        let disk = rustix::fs::statvfs(&self.path).map_err(|error| broken(error.to_string()))?;
        let growable = file.saturating_add(disk.f_bavail.saturating_mul(disk.f_frsize));
        let used_bytes = pages as u64 * u64::from(stat.page_size);
        let max_bytes = growable.min(self.env.info().map_size as u64);
        Ok(Some(Room { used_bytes, max_bytes }))
    }

    fn exclusive_opening(&self) -> Option<u128> {
        Some(self.opening)
    }
}

struct EmbeddedSnapshot {
    version: u64,
    /// LMDB requires one thread at a time in a read transaction; the lock has no contention.
    txn: Mutex<RoTxn<'static, WithoutTls>>,
    rows: Rows,
    path: PathBuf,
    started: Instant,
    _place: OwnedSemaphorePermit,
}

impl EmbeddedSnapshot {
    fn txn(&self) -> Result<MutexGuard<'_, RoTxn<'static, WithoutTls>>, KvError> {
        if self.started.elapsed() > SNAPSHOT_AGE_MAX {
            return Err(KvError::TooOld { version: self.version });
        }
        Ok(self.txn.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn read(&self, key: &[u8]) -> Result<Option<Vec<u8>>, KvError> {
        if key < RESERVED_KEYS_END {
            return Ok(None);
        }
        let value = self.rows.get(&*self.txn()?, key).map(|value| value.map(<[u8]>::to_vec));
        value.map_err(|error| self.broken(&error))
    }

    fn read_range(&self, range: &KeyRange, limit: usize) -> Result<Vec<Row>, KvError> {
        let start = range.start.as_slice().max(RESERVED_KEYS_END);
        let end = range.end.as_slice();
        if start >= end {
            return Ok(Vec::new());
        }
        let txn = self.txn()?;
        let bounds = (Bound::Included(start), Bound::Excluded(end));
        let rows = self.rows.range(&txn, &bounds).map_err(|error| self.broken(&error))?;
        rows.take(limit)
            .map(|row| row.map(|(key, value)| (key.to_vec(), value.to_vec())))
            .collect::<Result<_, _>>()
            .map_err(|error| self.broken(&error))
    }

    fn broken(&self, error: &heed::Error) -> KvError {
        KvError::broken(&self.path, error)
    }
}

impl Snapshot for EmbeddedSnapshot {
    fn version(&self) -> u64 {
        self.version
    }

    fn get<'a>(&'a self, key: &'a [u8]) -> BoxFuture<'a, Result<Option<Vec<u8>>, KvError>> {
        Box::pin(std::future::ready(self.read(key)))
    }

    fn range<'a>(
        &'a self,
        range: &'a KeyRange,
        limit: usize,
    ) -> BoxFuture<'a, Result<Vec<Row>, KvError>> {
        Box::pin(std::future::ready(self.read_range(range, limit)))
    }

    fn into_seen(self: Box<Self>) -> Seen {
        Seen::new()
    }
}

/// The commit thread.
struct Committer {
    env: Env<WithoutTls>,
    rows: Rows,
    path: PathBuf,
    resolver: Resolver,
    watches: Watches,
    _owner: Ownership,
}

/// A job that passed its conflict check, with its position.
struct Admitted {
    job: Job,
    stamp: Versionstamp,
}

impl Committer {
    fn run(mut self, mut jobs: mpsc::Receiver<Job>) {
        let version = self.env.read_txn().map(|txn| txn.id() as u64);
        self.resolver = Resolver::new(version.unwrap_or(u64::MAX), WRITES_MAX);
        let mut batch = Vec::with_capacity(BATCH_MAX);
        while let Some(first) = jobs.blocking_recv() {
            batch.push(first);
            while let (true, Ok(job)) = (batch.len() < BATCH_MAX, jobs.try_recv()) {
                batch.push(job);
            }
            self.commit_batch(&mut batch);
        }
    }

    fn commit_batch(&mut self, batch: &mut Vec<Job>) {
        let env = self.env.clone();
        let mut txn = match env.write_txn() {
            Ok(txn) => txn,
            Err(error) => {
                let error = KvError::broken(&self.path, error);
                batch.drain(..).for_each(|job| drop(job.reply.send(Err(error.clone()))));
                return;
            }
        };
        let version = txn_version(&txn);
        let mut admitted: Vec<Admitted> = Vec::with_capacity(batch.len());
        let mut result = Ok(());
        let mut batch_keys = Vec::new();
        for job in batch.drain(..) {
            // Fits: a batch is far shorter than 2^16.
            let stamp = Versionstamp::new(version, admitted.len() as u16);
            let checked = self
                .resolver
                .check(&job.commit)
                .and_then(|()| self.check_counters(&txn, &job.commit));
            if let Err(error) = checked {
                drop(job.reply.send(Err(error)));
                continue;
            }
            if result.is_ok() {
                let mut keys = Vec::new();
                result = self.apply(&mut txn, &job.commit, stamp, &mut keys);
                self.resolver.record(version, keys.clone());
                batch_keys.append(&mut keys);
            }
            admitted.push(Admitted { job, stamp });
        }
        if admitted.is_empty() {
            return;
        }
        let committed = result
            .and_then(|()| self.rows.put(&mut txn, VERSION_KEY, &version.to_le_bytes()))
            .map_err(|error| (error, false))
            .and_then(|()| txn.commit().map_err(|error| (error, true)));
        match committed {
            Ok(()) => {
                self.watches.written(version, &batch_keys);
                // An error means that the caller no longer waits; the commit remains valid.
                admitted
                    .into_iter()
                    .for_each(|admission| drop(admission.job.reply.send(Ok(admission.stamp))));
            }
            Err((error, in_commit)) => self.fail(admitted, version, &error, in_commit),
        }
    }

    /// Fails a batch, of which nothing is visible. Only for a full store it is known not to be on
    /// disk.
    fn fail(&mut self, admitted: Vec<Admitted>, version: u64, error: &heed::Error, commit: bool) {
        tracing::error!(path = %self.path.display(), %error, "commit failed");
        let detail = error.to_string();
        let full = match error {
            heed::Error::Mdb(MdbError::MapFull) => true,
            heed::Error::Io(error) => {
                matches!(error.raw_os_error(), Some(libc_errno::ENOSPC | libc_errno::EDQUOT))
            }
            _ => false,
        };
        let error = match (full, commit) {
            (true, _) => KvError::NoSpace {
                store: self.path.display().to_string(),
                detail: format!("{detail}; free space or enlarge `map_bytes_max`"),
            },
            (false, true) => KvError::CommitUnknown { detail },
            (false, false) => KvError::broken(&self.path, detail),
        };
        // Records of the failed batch must not cause conflicts: drop all of them; transactions from
        // before the last durable version are repeated.
        self.resolver = Resolver::new(version - 1, WRITES_MAX);
        admitted
            .into_iter()
            .for_each(|admission| drop(admission.job.reply.send(Err(error.clone()))));
    }

    /// Checks counters before anything is applied, because a batch is applied as a whole.
    fn check_counters(&self, txn: &RwTxn<'_>, commit: &Commit) -> Result<(), KvError> {
        for mutation in &commit.mutations {
            if let Mutation::Add { key, .. } = mutation {
                let value =
                    self.rows.get(txn, key).map_err(|error| KvError::broken(&self.path, error))?;
                add(key, value, 0)?;
            }
        }
        for addition in &commit.bounded_adds {
            let value = self
                .rows
                .get(txn, &addition.key)
                .map_err(|error| KvError::broken(&self.path, error))?;
            add_within(addition, value)?;
        }
        Ok(())
    }

    /// Applies a commit and adds the written keys to `keys`.
    fn apply(
        &self,
        txn: &mut RwTxn<'_>,
        commit: &Commit,
        stamp: Versionstamp,
        keys: &mut Vec<Vec<u8>>,
    ) -> Result<(), heed::Error> {
        for mutation in &commit.mutations {
            match mutation {
                Mutation::Set { key, value } => {
                    self.rows.put(txn, key, value)?;
                    keys.push(key.clone());
                }
                Mutation::Clear { key } => {
                    self.rows.delete(txn, key)?;
                    keys.push(key.clone());
                }
                Mutation::ClearRange { range } => self.clear_range(txn, range, keys)?,
                Mutation::Add { key, delta } => {
                    let value = self.rows.get(txn, key)?;
                    // Checked before, or set by this transaction as a counter.
                    let sum = add(key, value, *delta).unwrap_or(*delta);
                    self.rows.put(txn, key, &sum.to_le_bytes())?;
                    keys.push(key.clone());
                }
                Mutation::SetStamped { prefix, suffix, value } => {
                    let key = stamped_key(prefix, stamp, suffix);
                    self.rows.put(txn, &key, value)?;
                    keys.push(key);
                }
            }
        }
        for addition in commit.bounded_adds.iter().filter(|addition| addition.writes()) {
            let value = self.rows.get(txn, &addition.key)?;
            // Checked before, or cleared by this transaction.
            let sum = add_within(addition, value).unwrap_or(addition.delta);
            self.rows.put(txn, &addition.key, &sum.to_le_bytes())?;
            keys.push(addition.key.clone());
        }
        Ok(())
    }

    fn clear_range(
        &self,
        txn: &mut RwTxn<'_>,
        range: &KeyRange,
        keys: &mut Vec<Vec<u8>>,
    ) -> Result<(), heed::Error> {
        let start = range.start.as_slice().max(RESERVED_KEYS_END);
        let end = range.end.as_slice();
        if start >= end {
            return Ok(());
        }
        let bounds = (Bound::Included(start), Bound::Excluded(end));
        for row in self.rows.range(txn, &bounds)? {
            keys.push(row?.0.to_vec());
        }
        self.rows.delete_range(txn, &bounds)?;
        Ok(())
    }
}

/// The two errors of a full disk.
mod libc_errno {
    pub(super) const ENOSPC: i32 = rustix::io::Errno::NOSPC.raw_os_error();
    pub(super) const EDQUOT: i32 = rustix::io::Errno::DQUOT.raw_os_error();
}
