//! Executes a change at most once, however often it is sent.

use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use threefs_kv::{KvError, Operation, Transaction, VALUE_BYTES_MAX};

use super::OpError;
use crate::protocol::{InodeKind, MetaError, MetaReply, Nanoseconds, RequestId};
use crate::rows::{self, AnswerRow};
use crate::written::Written;

/// An answer in its row: a value of the store, less the time.
const ANSWER_BYTES_MAX: usize = VALUE_BYTES_MAX - 64;

/// A change with its identity. The answer is stored by the same transaction that makes the change.
pub(crate) struct AnswerOnce<'a, O> {
    pub id: RequestId,
    pub now: Nanoseconds,
    /// Sequences of this client below have their answers and are never retried. It is raised
    /// before any answer is forgotten.
    pub floor: &'a AtomicU64,
    /// Answers to forget along the way: those from here on below `id.finished_below`.
    pub forget_from: u64,
    pub operation: O,
}

impl<O> Operation for AnswerOnce<'_, O>
where
    O: Operation<Output = MetaReply, Error = OpError>,
{
    type Output = MetaReply;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<MetaReply, OpError> {
        if let Some(reply) = answered(txn, self.id, self.floor).await? {
            return Ok(reply);
        }
        let reply = self.operation.run(txn).await?;
        self.keep(txn, &reply)?;
        Ok(reply)
    }
}

impl<O> AnswerOnce<'_, O> {
    /// Stores the answer and clears those that are not wanted any more.
    fn keep(&self, txn: &mut Transaction, reply: &MetaReply) -> Result<(), OpError> {
        let key = rows::answer(self.id.client, self.id.sequence);
        let encode = |reply: &MetaReply| {
            postcard::to_allocvec(reply).map_err(|error| KvError::bad_row(&key, error.to_string()))
        };
        let mut encoded = encode(reply)?;
        if encoded.len() > ANSWER_BYTES_MAX {
            encoded = encode(&without_ranges(reply))?;
        }
        rows::write(txn, &key, &AnswerRow { answered: self.now, reply: encoded })?;
        for sequence in self.forget_from..self.id.finished_below {
            txn.clear(&rows::answer(self.id.client, sequence));
        }
        Ok(())
    }
}

/// The answer to a batch without the ranges that were written: those of many files are more than a
/// value may be. Who asks again takes their chunks for unknown until it looks at the file.
fn without_ranges(reply: &MetaReply) -> MetaReply {
    let mut reply = reply.clone();
    if let MetaReply::Inodes(inodes) = &mut reply {
        for inode in inodes.iter_mut().flatten() {
            if let InodeKind::File { written, .. } = &mut inode.kind {
                *written = Written::default();
            }
        }
    }
    reply
}

async fn answered(
    txn: &mut Transaction,
    id: RequestId,
    floor: &AtomicU64,
) -> Result<Option<MetaReply>, OpError> {
    let key = rows::answer(id.client, id.sequence);
    if let Some(row) = rows::read::<AnswerRow>(txn, &key).await? {
        return Ok(Some(rows::decode(&key, &row.reply)?));
    }
    // After the read: if the answer was forgotten before this snapshot, the floor had been raised
    // before that; if it is forgotten later, this transaction conflicts.
    if id.sequence < floor.load(SeqCst) {
        return Err(MetaError::Invalid {
            field: "sequence".into(),
            value: id.sequence.to_string(),
            reason: "the client has declared this change finished".into(),
        }
        .into());
    }
    Ok(None)
}
