//! Store in a PostgreSQL database, for several machines and processes.
//!
//! | part | responsibility |
//! |---|---|
//! | `config`, `open` | connection, tables, and checks before the first use |
//! | `server`, `head` | the history that must not go back, durable settings, errors |
//! | `session` | one connection to the server that accepts writes |
//! | `snapshots`, `group`, `snapshot` | transactions that start together read one snapshot |
//! | `committer`, `lane`, `writer`, `statements` | group commit under the lock of the head row |
//! | `plan` | pure: the conflicts and the folded writes of a batch |
//! | `watcher`, `written` | watches, from the table of commits |
//! | `dump_source`, `load_target` | all rows of a store, read or written at once |

mod committer;
mod config;
mod dump_source;
mod group;
mod head;
mod lane;
mod load_target;
mod open;
mod plan;
mod server;
mod session;
mod snapshot;
mod snapshots;
mod statements;
mod watcher;
mod writer;
mod written;

pub use config::PostgresConfig;
pub(crate) use dump_source::DumpSource;
pub(crate) use load_target::LoadTarget;

use std::sync::Arc;

use fabric::BoxFuture;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::{Backend, Commit, KvError, Room, Snapshot, Versionstamp, Watch};
use committer::{Committer, Job};
use server::Server;
use snapshot::PostgresSnapshot;
use snapshots::Snapshots;
use watcher::Watchers;

/// Maximum number of queued commits; further ones wait.
const QUEUE_MAX: usize = 4096;

/// The PostgreSQL backend.
pub(crate) struct Postgres {
    server: Arc<Server>,
    snapshots: Snapshots,
    queue: mpsc::Sender<Job>,
    watchers: Watchers,
    /// Aborted when the store is closed.
    _tasks: JoinSet<()>,
}

impl Postgres {
    /// Connects, and checks that the server can be used.
    pub(crate) async fn open(config: PostgresConfig) -> Result<Self, KvError> {
        let server = open::open(&config).await?;
        let watchers = Watchers::new(Arc::clone(&server));
        let mut tasks = JoinSet::new();
        let (snapshots, starter) = Snapshots::start(Arc::clone(&server));
        tasks.spawn(starter);
        let (queue, jobs) = mpsc::channel(QUEUE_MAX);
        tasks.spawn(Committer::new(Arc::clone(&server), jobs, watchers.watches()).run());
        Ok(Self { server, snapshots, queue, watchers, _tasks: tasks })
    }
}

impl Backend for Postgres {
    fn snapshot(&self) -> BoxFuture<'_, Result<Box<dyn Snapshot>, KvError>> {
        Box::pin(async {
            let shared = self.snapshots.newest().await?;
            Ok(Box::new(PostgresSnapshot::new(shared)) as Box<dyn Snapshot>)
        })
    }

    fn commit(&self, commit: Commit) -> BoxFuture<'_, Result<Versionstamp, KvError>> {
        Box::pin(async move {
            let (done, reply) = oneshot::channel();
            let job = Job { commit, since: Instant::now(), done };
            let stopped = || self.server.broken("the committer has exited");
            self.queue.send(job).await.map_err(|_| stopped())?;
            reply.await.unwrap_or_else(|_| {
                Err(KvError::CommitUnknown { detail: "the committer exited".into() })
            })
        })
    }

    fn watch(&self, key: &[u8]) -> Watch {
        self.watchers.watch(key)
    }

    /// PostgreSQL reports no free space of its disk.
    fn room(&self) -> Result<Option<Room>, KvError> {
        Ok(None)
    }

    fn exclusive_opening(&self) -> Option<u128> {
        None
    }
}
