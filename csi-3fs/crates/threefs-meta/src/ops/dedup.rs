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
    /// service knows; the client's `FINI` row is the one that all services share.
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

/// The stored answer of a change that was executed earlier.
pub(crate) async fn stored_reply(
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
    if id.sequence < floor.load(SeqCst) {
        return Err(finished(id.sequence).into());
    }
    // The transaction that drops an answer raises the floor, which the commit checks. That the answer
    // is absent is not enough: to a distributed store, a row that was written and removed since this
    // snapshot is as absent as before.
    rows::require_floor(txn, id.client, id.sequence);
    Ok(None)
}

/// The error for a change that its client never repeats: this is a late duplicate.
pub(crate) fn finished(sequence: u64) -> MetaError {
    MetaError::Invalid {
        field: "sequence".into(),
        value: sequence.to_string(),
        reason: "the client has declared this change finished".into(),
    }
}

#[cfg(test)]
mod tests {
    use threefs_core::ids::ClientId;
    use threefs_kv::Store;

    use super::*;

    const CLIENT: ClientId = ClientId(7);

    struct Nothing;

    impl Operation for Nothing {
        type Output = MetaReply;
        type Error = OpError;

        async fn run(&self, _txn: &mut Transaction) -> Result<MetaReply, OpError> {
            Ok(MetaReply::Done)
        }
    }

    fn change(sequence: u64, floor: &AtomicU64) -> Dedup<'_, Nothing> {
        Dedup {
            id: RequestId { client: CLIENT, sequence, finished_below: 0 },
            now: Nanoseconds(0),
            floor,
            finished: 0..0,
            volume: None,
            room: AnswerBudget::of(None),
            operation: Nothing,
        }
    }

    /// Its answer was written and dropped through another service while it was executed.
    #[tokio::test]
    async fn a_change_that_is_finished_meanwhile_is_not_committed() {
        let (store, floor) = (Store::memory(), AtomicU64::new(0));
        let mut late = store.begin().await.unwrap();
        let mut next = store.begin().await.unwrap();
        change(4, &floor).run(&mut late).await.unwrap();
        change(5, &floor).run(&mut next).await.unwrap();
        let mut other = store.begin().await.unwrap();
        answers::forget(&mut other, CLIENT, [3, 4]).await.unwrap();
        other.commit().await.unwrap();
        let error = OpError::from(late.commit().await.unwrap_err());
        assert_eq!(MetaError::from(error), finished(4));
        next.commit().await.unwrap();
        // A lower floor and sequences beyond the counter change nothing.
        for sequences in [[1, 2], [u64::MAX - 1, u64::MAX]] {
            let mut other = store.begin().await.unwrap();
            answers::forget(&mut other, CLIENT, sequences).await.unwrap();
            other.commit().await.unwrap();
            let mut again = store.begin().await.unwrap();
            change(4, &floor).run(&mut again).await.unwrap();
            assert!(again.commit().await.is_err());
        }
    }
}
