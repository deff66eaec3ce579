//! The newest revision, by one linearizable read for all that wait.

use std::sync::Arc;
use std::time::Duration;

use etcd_client::GetOptions;
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

use super::members::{CallError, Members};
use super::rows::Rows;
use crate::KvError;

/// Time without a leader after which a snapshot fails: elections take one to three seconds.
const TIMEOUT: Duration = Duration::from_secs(5);

/// A revision, and a member that has applied it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct At {
    pub revision: u64,
    pub member: usize,
}

type Waiter = oneshot::Sender<Result<At, KvError>>;

/// Handle of the reader.
pub(crate) struct Revisions(mpsc::UnboundedSender<Waiter>);

impl Revisions {
    pub(crate) fn start(
        members: Arc<Members>,
        rows: &Rows,
    ) -> (Self, impl Future<Output = ()> + use<>) {
        let (sender, mut waiters) = mpsc::unbounded_channel::<Waiter>();
        let key = rows.internal("identity");
        let reader = async move {
            let mut waiting = Vec::new();
            // Waiters that arrive during a read need the next one: a commit may lie between.
            while waiters.recv_many(&mut waiting, usize::MAX).await > 0 {
                let newest = newest(&members, &key).await;
                waiting.drain(..).for_each(|waiter| drop(waiter.send(newest.clone())));
            }
        };
        (Self(sender), reader)
    }

    /// A revision that includes everything that was committed before the call.
    pub(crate) async fn newest(&self) -> Result<At, KvError> {
        let (waiter, reply) = oneshot::channel();
        let stopped = || KvError::Unavailable {
            store: "etcd".into(),
            detail: "the store is being closed".into(),
        };
        self.0.send(waiter).map_err(|_| stopped())?;
        reply.await.unwrap_or_else(|_| Err(stopped()))
    }
}

/// Reads the revision.
///
/// # Errors
/// No member replies, or the cluster is another one.
pub(crate) async fn newest(members: &Members, key: &[u8]) -> Result<At, KvError> {
    let deadline = Instant::now() + TIMEOUT;
    let floor = members.newest();
    let read = members.any(members.preferred(), deadline, |mut client, _| {
        let key = key.to_vec();
        async move { client.get(key, Some(GetOptions::new().with_count_only())).await }
    });
    match read.await {
        Ok((reply, member)) => Ok(At { revision: members.observe(reply.header(), floor)?, member }),
        Err(CallError::NoSpace(detail)) => Err(members.unavailable(detail)),
        Err(error) => Err(members.error(error)),
    }
}
