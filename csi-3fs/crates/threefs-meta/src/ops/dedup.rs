//! Deduplication of changes: a change is executed at most once, however often it is sent.

pub(crate) mod answers;

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use threefs_core::ids::InodeId;
use threefs_kv::{KvError, Operation, Transaction};

use crate::ops::{AnswerBudget, OpError, load};
use crate::protocol::{Inode, MetaError, MetaReply, Nanoseconds, RequestId};
use crate::rows::{self, AnswerRow};

/// A change with its request id. The transaction that makes the change also stores its answer.
pub(crate) struct Dedup<'a, O> {
    pub id: RequestId,
    pub now: Nanoseconds,
    /// Changes of this client with a lower sequence are finished and never retried, as far as this
    /// service knows; the client's `FLOR` row is the one that all services share.
    pub floor: &'a AtomicU64,
    /// Finished changes whose answers this change drops.
    pub finished: Range<u64>,
    /// The volume of the caller's ticket; `None` for a holder of the cluster key.
    pub volume: Option<InodeId>,
    pub room: AnswerBudget,
    pub operation: O,
}

impl<O> Operation for Dedup<'_, O>
where
    O: Operation<Output = MetaReply, Error = OpError>,
{
    type Output = MetaReply;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<MetaReply, OpError> {
        if let Some(reply) = stored_reply(txn, self.id, self.floor).await? {
            return Ok(reply);
        }
        let reply = self.operation.run(txn).await?;
        self.keep(txn, &reply).await?;
        Ok(reply)
    }
}

impl<O> Dedup<'_, O> {
    /// Stores the answer and drops those of finished changes.
    async fn keep(&self, txn: &mut Transaction, reply: &MetaReply) -> Result<(), OpError> {
        let key = rows::answer(self.id.client, self.id.sequence);
        // Of a batch, only which files it changed: a retry reads their inodes again.
        let changed = match reply {
            MetaReply::Inodes(inodes) => Some(inodes.iter().map(file_of).collect::<Vec<_>>()),
            _ => None,
        };
        let encoded = match &changed {
            Some(changed) => postcard::to_allocvec(changed),
            None => postcard::to_allocvec(reply),
        };
        let encoded = encoded.map_err(|error| KvError::bad_row(&key, error.to_string()))?;
        answers::forget(txn, self.id.client, self.finished.clone()).await?;
        let (answered_at, reply, volume) = (self.now, encoded, self.volume);
        let row = AnswerRow { answered_at, reply, volume, batch: changed.is_some() };
        answers::keep(txn, &key, &row, self.room).await
    }
}

/// Stored part of one answer of a batch.
type Changed = Result<InodeId, MetaError>;

fn file_of(answer: &Result<Inode, MetaError>) -> Changed {
    answer.as_ref().map(|inode| inode.id).map_err(Clone::clone)
}

/// The answer to a batch that was executed earlier: the current inodes, which are never older than
/// the result of the batch.
async fn now_of(txn: &mut Transaction, changed: Vec<Changed>) -> Result<MetaReply, OpError> {
    let mut inodes = Vec::with_capacity(changed.len());
    for file in changed {
        inodes.push(match file {
            Ok(id) => match load(txn, id, "").await {
                Ok(row) => Ok(row.inode),
                Err(OpError::Refused(error)) => Err(error),
                Err(error) => return Err(error),
            },
            Err(error) => Err(error),
        });
    }
    Ok(MetaReply::Inodes(inodes))
}

async fn stored_reply(
    txn: &mut Transaction,
    id: RequestId,
    floor: &AtomicU64,
) -> Result<Option<MetaReply>, OpError> {
    let key = rows::answer(id.client, id.sequence);
    if let Some(value) = txn.get(&key).await? {
        let row = AnswerRow::decode(&key, &value)?;
        if row.batch {
            return now_of(txn, rows::decode(&key, &row.reply)?).await.map(Some);
        }
        return Ok(Some(rows::decode(&key, &row.reply)?));
    }
    // The transaction that drops an answer raises the floor. So if the answer was dropped before
    // this snapshot, its floor is visible; if it is dropped later, this transaction conflicts.
    let shared = rows::floor_of(txn, id.client).await?;
    if id.sequence < shared.max(floor.load(SeqCst)) {
        return Err(MetaError::Invalid {
            field: "sequence".into(),
            value: id.sequence.to_string(),
            reason: "the client has declared this change finished".into(),
        }
        .into());
    }
    Ok(None)
}
