//! Store in an etcd cluster, for several machines and processes.
//!
//! | part | responsibility |
//! |---|---|
//! | `revisions`, `reads`, `snapshot` | reads at one revision |
//! | `committer`, `footprint`, `batch`, `refusals` | group commit of disjoint batches |
//! | `plan`, `layer`, `guard` | pure: one request for many commits, and its losers |
//! | `lane` | a request is executed once or not at all, also if its reply is lost |
//! | `members` | calls, their errors, and restored clusters |
//! | `open` | checks before the first use |
//! | `health` | compaction, space, alarms |
//! | `dump_source`, `load_target`, `load_row` | all rows of a store, read or written at once |

mod batch;
mod committer;
mod config;
mod dump_source;
mod footprint;
mod health;
mod lane;
mod load_row;
mod load_target;
mod members;
mod open;
mod plan;
mod reads;
mod refusals;
mod revisions;
mod rows;
mod snapshot;
mod watcher;

#[cfg(test)]
mod plan_test;

pub use config::EtcdConfig;
pub(crate) use dump_source::DumpSource;
pub(crate) use load_target::LoadTarget;
pub(crate) use open::peek;

use std::sync::{Arc, Mutex, PoisonError};

use fabric::BoxFuture;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::{
    Backend, COMMIT_BYTES_MAX, Commit, KEY_BYTES_MAX, KvError, Limits, Room, Snapshot,
    VALUE_BYTES_MAX, Versionstamp, Watch,
};
use batch::{Job, Shared};
use committer::Committer;
use health::Health;
use revisions::Revisions;
use snapshot::EtcdSnapshot;
use watcher::Watchers;

/// Maximum number of queued commits; further ones wait.
const QUEUE_MAX: usize = 4096;
/// Maximum number of mutations of a commit: half the operations of a request.
const MUTATIONS_MAX: usize = 4000;

/// The etcd backend.
pub(crate) struct Etcd {
    shared: Arc<Shared>,
    revisions: Revisions,
    queue: mpsc::Sender<Job>,
    room: Arc<Mutex<Option<Room>>>,
    watchers: Watchers,
    /// Aborted when the store is closed.
    _tasks: JoinSet<()>,
}

impl Etcd {
    /// Connects, and checks that the cluster can be used.
    pub(crate) async fn open(config: EtcdConfig) -> Result<Self, KvError> {
        let shared = Arc::new(open::open(config).await?);
        let watchers = Watchers::new(Arc::clone(&shared.members), shared.rows.clone());
        let mut tasks = JoinSet::new();
        let (revisions, reader) = Revisions::start(Arc::clone(&shared.members), &shared.rows);
        tasks.spawn(reader);
        let (queue, jobs) = mpsc::channel(QUEUE_MAX);
        tasks.spawn(Committer::new(Arc::clone(&shared), jobs, watchers.watches()).run());
        let mut health = Health::new(Arc::clone(&shared));
        health.check().await;
        let room = health.room();
        tasks.spawn(health.run());
        Ok(Self { shared, revisions, queue, room, watchers, _tasks: tasks })
    }
}

impl Backend for Etcd {
    fn snapshot(&self) -> BoxFuture<'_, Result<Box<dyn Snapshot>, KvError>> {
        Box::pin(async {
            let at = self.revisions.newest().await?;
            let (members, rows) = (Arc::clone(&self.shared.members), self.shared.rows.clone());
            Ok(Box::new(EtcdSnapshot::new(members, rows, at)) as Box<dyn Snapshot>)
        })
    }

    fn commit(&self, commit: Commit) -> BoxFuture<'_, Result<Versionstamp, KvError>> {
        Box::pin(async move {
            let (done, reply) = oneshot::channel();
            let job = Job { commit, since: Instant::now(), done };
            let stopped = || self.shared.members.broken("the committer has exited".into());
            self.queue.send(job).await.map_err(|_| stopped())?;
            reply.await.unwrap_or_else(|_| {
                Err(KvError::CommitUnknown { detail: "the committer exited".into() })
            })
        })
    }

    fn limits(&self) -> Limits {
        Limits {
            key_bytes: KEY_BYTES_MAX,
            value_bytes: VALUE_BYTES_MAX,
            commit_bytes: COMMIT_BYTES_MAX,
            mutations: MUTATIONS_MAX,
        }
    }

    fn watch(&self, key: &[u8]) -> Watch {
        self.watchers.watch(key)
    }

    fn room(&self) -> Result<Option<Room>, KvError> {
        Ok(*self.room.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn exclusive_opening(&self) -> Option<u128> {
        None
    }
}
