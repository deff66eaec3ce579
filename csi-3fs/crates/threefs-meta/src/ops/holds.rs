//! Holds: rows for removed files that clients have open.
//!
//! A file that was removed while a client of any service had it open must not be collected. So each
//! service checks every removal and stores holds for the files that its clients have open, before
//! it publishes that it has checked the round of the removal; the collector waits for that. Opening
//! a file that has been removed already stores a hold at once. Marking a file dead reads its holds,
//! so the two conflict.

use threefs_core::ids::{ClientId, InodeId};
use threefs_kv::{KeyRange, Operation, Transaction};

use crate::clients::holds::Hold;
use crate::ops::OpError;
use crate::rows::{self, HOLDS, HoldRow, InodeRow, REMOVALS, RemovalRow};

/// One page of removals of rounds up to `until`, and the key to continue from.
pub(crate) struct ListRemoved<'a> {
    pub from: &'a [u8],
    pub until: u64,
    pub limit: usize,
}

impl Operation for ListRemoved<'_> {
    type Output = (Vec<RemovalRow>, Option<Vec<u8>>);
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<Self::Output, OpError> {
        let end = [REMOVALS, &self.until.saturating_add(1).to_be_bytes()].concat();
        let range = KeyRange::new(self.from, end);
        let page = txn.snapshot_range(&range, self.limit).await?;
        let next = rows::after_page(&page, self.limit);
        let removals = page.iter().map(|(key, value)| rows::decode(key, value));
        Ok((removals.collect::<Result<_, _>>()?, next))
    }
}

/// Which of these inodes have no name any more.
pub(crate) struct Removed<'a>(pub &'a [InodeId]);

impl Operation for Removed<'_> {
    type Output = Vec<InodeId>;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<Self::Output, OpError> {
        let mut removed = Vec::new();
        for inode in self.0 {
            let key = rows::inode(*inode);
            if let Some(value) = txn.snapshot_get(&key).await?
                && InodeRow::decode(&key, &value)?.inode.links == 0
            {
                removed.push(*inode);
            }
        }
        Ok(removed)
    }
}

/// Stores holds for files that still exist; returns those that cannot be read any more.
pub(crate) struct SetHolds<'a>(pub &'a [Hold]);

impl Operation for SetHolds<'_> {
    type Output = Vec<InodeId>;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<Self::Output, OpError> {
        let mut unreadable = Vec::new();
        for Hold { inode, run_id, clients } in self.0 {
            let row = rows::read_inode(txn, *inode).await?;
            if row.as_ref().is_none_or(|row| row.dead) {
                unreadable.push(*inode);
            }
            if row.is_some() {
                let row = HoldRow { clients: clients.clone() };
                rows::write(txn, &rows::hold(*inode, *run_id), &row)?;
            }
        }
        Ok(unreadable)
    }
}

/// Removes holds of a service.
pub(crate) struct ClearHolds<'a> {
    pub run_id: u64,
    pub inodes: &'a [InodeId],
}

impl Operation for ClearHolds<'_> {
    type Output = ();
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<(), OpError> {
        for inode in self.inodes {
            txn.clear(&rows::hold(*inode, self.run_id));
        }
        Ok(())
    }
}

/// One page of all holds, and the key to continue from.
pub(crate) struct ListHolds<'a> {
    pub from: &'a [u8],
    pub limit: usize,
}

impl Operation for ListHolds<'_> {
    type Output = (Vec<Hold>, Option<Vec<u8>>);
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<Self::Output, OpError> {
        let range = KeyRange { start: self.from.to_vec(), ..KeyRange::prefix(HOLDS) };
        let page = txn.snapshot_range(&range, self.limit).await?;
        let mut holds = Vec::new();
        for (key, value) in &page {
            let HoldRow { clients } = rows::decode(key, value)?;
            let (inode, run_id) = (rows::inode_of_key(key)?, rows::run_of_key(key)?);
            holds.push(Hold { inode, run_id, clients });
        }
        Ok((holds, rows::after_page(&page, self.limit)))
    }
}

/// A client has reported its open files: it does not need these holds of former services.
pub(crate) struct ReleaseFormer<'a> {
    pub client: ClientId,
    pub holds: &'a [Hold],
}

impl Operation for ReleaseFormer<'_> {
    type Output = ();
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<(), OpError> {
        for Hold { inode, run_id, .. } in self.holds {
            let key = rows::hold(*inode, *run_id);
            let Some(mut row) = rows::read::<HoldRow>(txn, &key).await? else { continue };
            row.clients.retain(|client| *client != self.client);
            match row.clients.is_empty() {
                true => txn.clear(&key),
                false => rows::write(txn, &key, &row)?,
            }
        }
        Ok(())
    }
}
