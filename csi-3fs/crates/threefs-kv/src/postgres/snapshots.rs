//! Snapshots: transactions that start at the same time share a session and its snapshot.
//!
//! A snapshot is a REPEATABLE READ transaction, which needs a connection, and PostgreSQL has few.
//! Callers that wait while a snapshot starts share the next one: it starts after their call, so it
//! contains everything that was committed before.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

use super::group::{Group, Reader, Request};
use super::server::Server;
use crate::KvError;

/// Maximum number of snapshots, and of sessions for them.
const READERS_MAX: usize = 8;
/// Time without a free session or a server after which a transaction cannot start.
const TIMEOUT: Duration = Duration::from_secs(10);

/// A snapshot that several transactions read. It ends when the last one drops it.
#[derive(Clone, Debug)]
pub(crate) struct Shared {
    pub version: u64,
    pub requests: mpsc::Sender<Request>,
}

type Waiter = oneshot::Sender<Result<Shared, KvError>>;

/// Handle of the task that starts snapshots.
pub(crate) struct Snapshots {
    server: Arc<Server>,
    waiters: mpsc::UnboundedSender<Waiter>,
}

impl Snapshots {
    pub(crate) fn start(server: Arc<Server>) -> (Self, impl Future<Output = ()> + use<>) {
        let (waiters, waiting) = mpsc::unbounded_channel();
        let task = run(Arc::clone(&server), waiting);
        (Self { server, waiters }, task)
    }

    /// A snapshot that includes everything that was committed before the call.
    pub(crate) async fn newest(&self) -> Result<Shared, KvError> {
        let (waiter, reply) = oneshot::channel();
        let closed = || self.server.unavailable("the store is being closed".into());
        self.waiters.send(waiter).map_err(|_| closed())?;
        match tokio::time::timeout(TIMEOUT, reply).await {
            Ok(reply) => reply.unwrap_or_else(|_| Err(closed())),
            Err(_) => {
                let detail = format!("no snapshot in {TIMEOUT:?}: all {READERS_MAX} are in use");
                Err(self.server.unavailable(detail))
            }
        }
    }
}

async fn run(server: Arc<Server>, mut waiters: mpsc::UnboundedReceiver<Waiter>) {
    let (back, mut free) = mpsc::channel::<Option<Reader>>(READERS_MAX);
    for _ in 0..READERS_MAX {
        let _ = back.try_send(None);
    }
    let mut waiting = Vec::new();
    while waiters.recv_many(&mut waiting, usize::MAX).await > 0 {
        let Some(mut reader) = free.recv().await else { return };
        // A session that exists is preferred to a new one.
        let mut absent = 0;
        while reader.is_none()
            && let Ok(other) = free.try_recv()
        {
            absent += 1;
            reader = other;
        }
        for _ in 0..absent {
            let _ = back.try_send(None);
        }
        while let Ok(waiter) = waiters.try_recv() {
            waiting.push(waiter);
        }
        let (server, back) = (Arc::clone(&server), back.clone());
        let group = std::mem::take(&mut waiting);
        tokio::spawn(async move {
            let reader = serve(&server, reader, group).await;
            // Fits: it was taken from there.
            let _ = back.try_send(reader);
        });
    }
}

/// Starts a snapshot for a group of transactions, and serves their reads until all have ended.
async fn serve(server: &Server, reader: Option<Reader>, waiters: Vec<Waiter>) -> Option<Reader> {
    let started = Instant::now();
    let (requests, receiver) = mpsc::channel(waiters.len().max(1) * 4);
    match Group::start(server, reader, receiver).await {
        Ok(group) => {
            for waiter in waiters {
                let shared = Shared { version: group.version(), requests: requests.clone() };
                let _ = waiter.send(Ok(shared));
            }
            drop(requests);
            group.run(server, started).await
        }
        Err(error) => {
            let error = server.error(error);
            waiters.into_iter().for_each(|waiter| drop(waiter.send(Err(error.clone()))));
            None
        }
    }
}
