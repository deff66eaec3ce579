//! An empty store that is filled with the rows of a dump.
//!
//! A load writes its row first, if the store has no rows. Each batch compares the revision of that row,
//! so a load that was interrupted and is repeated fences the earlier one, and a batch whose reply is
//! lost can be sent again. The last request marks the row as complete. No service serves the store
//! before, and none can have started since: both writes compare the rows of the other.

use std::sync::Arc;
use std::time::Duration;

use etcd_client::{
    Compare, CompareOp, DeleteOptions, GetOptions, KeyValue, Txn, TxnOp, TxnOpResponse, TxnResponse,
};
use tokio::time::Instant;

use super::config::EtcdConfig;
use super::load_row::{FORMAT, LoadRow, ROW};
use super::members::{CallError, Members};
use super::open;
use super::rows::{Rows, signed, unsigned};
use crate::KvError;

/// Rows of a request.
const BATCH_ROWS: usize = 4000;
/// Bytes of a request of several rows.
const BATCH_BYTES: usize = 2 << 20;
/// Timeout of a call: a request is larger than that of a commit.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);
/// Time for which a request is repeated.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Pause between two attempts.
const PAUSE: Duration = Duration::from_millis(200);
/// What a store has before a load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Empty,
    /// Rows of another load, whose row has this revision.
    Interrupted(u64),
    /// The row of this load, with its revision.
    Own(u64),
    /// Rows of services, or of a complete load.
    Occupied,
}

/// A store that is being filled.
pub(crate) struct LoadTarget {
    members: Arc<Members>,
    rows: Rows,
    id: u128,
    /// Revision of the row of this load.
    revision: u64,
    pending: Vec<TxnOp>,
    pending_bytes: usize,
}

impl LoadTarget {
    /// Whether the store has no rows, except those of an interrupted load.
    ///
    /// # Errors
    /// No member replies.
    pub(crate) async fn is_empty(config: &EtcdConfig) -> Result<bool, KvError> {
        let (members, rows) = open::connect(config)?;
        let target = Self::new(members, rows);
        let state = target.send(&Txn::new().and_then(target.read_state())).await?;
        Ok(target.state(&state)? != State::Occupied)
    }

    /// Reserves an empty store for this load; `None` if it has rows. Those of an interrupted load
    /// are removed.
    ///
    /// # Errors
    /// A bound of a member is too low, or no member replies.
    pub(crate) async fn start(config: &EtcdConfig) -> Result<Option<Self>, KvError> {
        let (members, rows) = open::connect(config)?;
        open::check_all_bounds(&members, &rows).await?;
        let mut target = Self::new(members, rows);
        let (start, end) = target.rows.all_of_store();
        let empty = Compare::mod_revision(start, CompareOp::Less, 1).with_range(end);
        let reserve = target.write_row(empty, false)?;
        let reply = target.send(&reserve).await?;
        if reply.succeeded() {
            target.revision = revision_of(&reply);
            return Ok(Some(target));
        }
        match target.state(&reply)? {
            // The reply to an earlier attempt was lost.
            State::Own(revision) => target.revision = revision,
            State::Interrupted(revision) => target.take_over(revision).await?,
            State::Occupied => return Ok(None),
            State::Empty => {
                let detail = "the rows of this prefix were removed meanwhile; repeat the load";
                return Err(target.members.broken(detail.into()));
            }
        }
        Ok(Some(target))
    }

    fn new(members: Arc<Members>, rows: Rows) -> Self {
        let (id, revision) = (rand::random(), 0);
        Self { members, rows, id, revision, pending: Vec::new(), pending_bytes: 0 }
    }

    /// Continues the interrupted load with the row of this revision.
    async fn take_over(&mut self, interrupted: u64) -> Result<(), KvError> {
        let unchanged = self.row_is(interrupted);
        let reply = self.send(&self.write_row(unchanged, false)?).await?;
        self.revision = match reply.succeeded() {
            true => revision_of(&reply),
            false => self.own_row(&reply, false)?,
        };
        let (start, end) = self.rows.all();
        loop {
            let keys = GetOptions::new()
                .with_range(end.clone())
                .with_keys_only()
                .with_limit(signed(BATCH_ROWS as u64));
            let read = Txn::new().and_then([TxnOp::get(start.clone(), Some(keys))]);
            let reply = self.send(&read).await?;
            let rows = reads(&reply).into_iter().next().unwrap_or_default();
            let Some(last) = rows.last() else { return Ok(()) };
            let after = DeleteOptions::new().with_range([last.key(), &[0]].concat());
            self.write([TxnOp::delete(start.clone(), Some(after))].into()).await?;
        }
    }

    /// Writes a row, with others. No row may be written twice: requests are repeated, and a late
    /// copy of one would undo the second write.
    ///
    /// # Errors
    /// The store is full, another load has started, or no member replies.
    pub(crate) async fn put(&mut self, key: Vec<u8>, value: Vec<u8>) -> Result<(), KvError> {
        let bytes = key.len() + self.rows.overhead() + value.len() + 64;
        if self.pending.len() == BATCH_ROWS || self.pending_bytes + bytes > BATCH_BYTES {
            self.flush().await?;
        }
        self.pending_bytes += bytes;
        self.pending.push(TxnOp::put(self.rows.row(&key), value, None));
        Ok(())
    }

    /// Sends the rows that wait.
    async fn flush(&mut self) -> Result<(), KvError> {
        self.pending_bytes = 0;
        let pending = std::mem::take(&mut self.pending);
        match pending.is_empty() {
            true => Ok(()),
            false => self.write(pending).await,
        }
    }

    /// Ends the load: services can serve the store.
    ///
    /// # Errors
    /// As [`LoadTarget::put`].
    pub(crate) async fn finish(mut self) -> Result<(), KvError> {
        self.flush().await?;
        let complete = self.write_row(self.row_is(self.revision), true)?;
        let reply = self.send(&complete).await?;
        match reply.succeeded() {
            true => Ok(()),
            // The reply to an earlier attempt was lost.
            false => self.own_row(&reply, true).map(drop),
        }
    }

    async fn write(&mut self, operations: Vec<TxnOp>) -> Result<(), KvError> {
        let txn = Txn::new().when([self.row_is(self.revision)]).and_then(operations);
        match self.send(&txn).await?.succeeded() {
            true => Ok(()),
            false => Err(self.fenced()),
        }
    }

    fn row_is(&self, revision: u64) -> Compare {
        Compare::mod_revision(self.rows.internal(ROW), CompareOp::Equal, signed(revision))
    }

    /// Writes the row of this load under a condition; otherwise reads the state.
    fn write_row(&self, condition: Compare, complete: bool) -> Result<Txn, KvError> {
        let value = LoadRow { format: FORMAT, id: self.id, complete }.encode()?;
        Ok(Txn::new()
            .when([condition])
            .and_then([TxnOp::put(self.rows.internal(ROW), value, None)])
            .or_else(self.read_state()))
    }

    /// Reads of the row of a load, and of one row of the store.
    fn read_state(&self) -> [TxnOp; 2] {
        let (start, end) = self.rows.all_of_store();
        let any = GetOptions::new().with_range(end).with_limit(1).with_keys_only();
        [TxnOp::get(self.rows.internal(ROW), None), TxnOp::get(start, Some(any))]
    }

    /// What a store has, from the reply to [`LoadTarget::read_state`].
    fn state(&self, reply: &TxnResponse) -> Result<State, KvError> {
        let mut state = reads(reply).into_iter();
        let (row, any) = (state.next().unwrap_or_default(), state.next().unwrap_or_default());
        let Some(row) = row.first() else {
            return Ok(if any.is_empty() { State::Empty } else { State::Occupied });
        };
        let (load, revision) = (LoadRow::decode(row)?, unsigned(row.mod_revision()));
        Ok(match load {
            LoadRow { format: FORMAT, complete: false, id } if id == self.id => {
                State::Own(revision)
            }
            LoadRow { format: FORMAT, complete: false, .. } => State::Interrupted(revision),
            _ => State::Occupied,
        })
    }

    /// The revision of the row of this load, which an earlier attempt has written.
    fn own_row(&self, reply: &TxnResponse, complete: bool) -> Result<u64, KvError> {
        let rows = reads(reply).into_iter().next().unwrap_or_default();
        let own = LoadRow { format: FORMAT, id: self.id, complete };
        match rows.first() {
            Some(row) if LoadRow::decode(row)? == own => Ok(unsigned(row.mod_revision())),
            _ => Err(self.fenced()),
        }
    }

    fn fenced(&self) -> KvError {
        self.members.broken("another load into this prefix has started; stop one of them".into())
    }

    /// Sends a request until a member replies: it may be executed more than once.
    async fn send(&self, txn: &Txn) -> Result<TxnResponse, KvError> {
        let deadline = Instant::now() + TIMEOUT;
        let mut member = self.members.preferred();
        loop {
            let floor = self.members.newest();
            let sent = self.members.call(member, CALL_TIMEOUT, |mut client| async move {
                client.txn(txn.clone()).await
            });
            match sent.await {
                Ok(reply) => {
                    self.members.observe(reply.header(), floor)?;
                    return Ok(reply);
                }
                Err(CallError::Failed(detail)) if Instant::now() < deadline => {
                    tracing::debug!(detail, "a request of a load is repeated");
                    member += 1;
                    tokio::time::sleep(PAUSE).await;
                }
                Err(error) => return Err(self.members.error(error)),
            }
        }
    }
}

fn revision_of(reply: &TxnResponse) -> u64 {
    reply.header().map_or(0, |header| unsigned(header.revision()))
}

/// The rows of each read of a reply.
fn reads(reply: &TxnResponse) -> Vec<Vec<KeyValue>> {
    let replies = reply.op_responses().into_iter();
    replies
        .filter_map(|reply| match reply {
            TxnOpResponse::Get(mut read) => Some(read.take_kvs()),
            _ => None,
        })
        .collect()
}
