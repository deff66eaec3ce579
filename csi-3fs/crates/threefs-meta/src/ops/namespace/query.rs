//! Queries: stat, listings and paths.

use threefs_core::ids::InodeId;
use threefs_kv::{KeyRange, KvError, Operation, Transaction};

use crate::identity::Identity;
use crate::ops::file::written_rows;
use crate::ops::lookup::{FinalSymlink, find, not_a_directory};
use crate::ops::{CheckService, OpError, load, not_found, refuse_snapshot, view, visible};
use crate::permission::{READ, WRITE};
use crate::protocol::{At, Entry, InodeKind, LIST_LIMIT_MAX, MetaReply, ROOT, Written};
use crate::rows::{self, DentryRow, REMOVED};

/// `MetaQuery::Stat`.
pub(crate) struct Stat<'a> {
    pub caller: &'a Identity,
    pub at: &'a At,
    pub follow: bool,
}

impl Operation for Stat<'_> {
    type Output = MetaReply;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<MetaReply, OpError> {
        let last = if self.follow { FinalSymlink::Follow } else { FinalSymlink::Keep };
        let row = find(txn, self.caller, self.at, last).await?;
        Ok(MetaReply::Inode(visible(txn, row).await?))
    }
}

/// `MetaQuery::Open`. The caller has recorded the open file before: a collection or release after
/// this read sees it.
pub(crate) struct OpenInode<'a> {
    pub caller: &'a Identity,
    pub at: &'a At,
    pub access: u32,
    /// The service, if others share the store: one that they have removed must not open files,
    /// because its table of open files does not count any more.
    pub service: Option<u64>,
}

impl Operation for OpenInode<'_> {
    type Output = MetaReply;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<MetaReply, OpError> {
        if let Some(run_id) = self.service {
            CheckService { run_id }.run(txn).await?;
        }
        let row = find(txn, self.caller, self.at, FinalSymlink::Keep).await?;
        if self.access & WRITE != 0 {
            refuse_snapshot(row.inode.id, &self.at.path)?;
        }
        self.caller.check(&row.inode, self.access, &self.at.path)?;
        Ok(MetaReply::Inode(visible(txn, row).await?))
    }
}

/// `MetaQuery::StatMany`, all from one snapshot.
pub(crate) struct StatMany<'a> {
    pub caller: &'a Identity,
    pub at: &'a [At],
}

impl Operation for StatMany<'_> {
    type Output = MetaReply;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<MetaReply, OpError> {
        let mut inodes = Vec::with_capacity(self.at.len());
        for at in self.at {
            match find(txn, self.caller, at, FinalSymlink::Follow).await {
                Ok(row) => inodes.push(Ok(visible(txn, row).await?)),
                Err(OpError::Refused(error)) => inodes.push(Err(error)),
                Err(error) => return Err(error),
            }
        }
        Ok(MetaReply::Inodes(inodes))
    }
}

/// `MetaQuery::StatChunks`.
pub(crate) struct StatChunks<'a> {
    pub caller: &'a Identity,
    pub at: &'a At,
    pub chunks: &'a [u32],
}

impl Operation for StatChunks<'_> {
    type Output = MetaReply;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<MetaReply, OpError> {
        let mut inode = find(txn, self.caller, self.at, FinalSymlink::Keep).await?.inode;
        if let InodeKind::File { written, .. } = &mut inode.kind {
            let mut existing = Written::default();
            if written.has_more() {
                existing = written_rows::written_among(txn, inode.id, self.chunks).await?;
            }
            for chunk in self.chunks.iter().filter(|chunk| written.contains(**chunk)) {
                existing.add(*chunk, *chunk);
            }
            *written = existing;
        }
        Ok(MetaReply::Inode(inode))
    }
}

/// `MetaQuery::List`.
pub(crate) struct List<'a> {
    pub caller: &'a Identity,
    pub at: &'a At,
    pub after: &'a str,
    pub limit: u32,
}

impl Operation for List<'_> {
    type Output = MetaReply;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<MetaReply, OpError> {
        let row = find(txn, self.caller, self.at, FinalSymlink::Follow).await?;
        if !row.inode.is_directory() {
            return Err(not_a_directory(self.at));
        }
        self.caller.check(&row.inode, READ, &self.at.path)?;
        let limit = match self.limit {
            0 => LIST_LIMIT_MAX as usize,
            limit => limit.min(LIST_LIMIT_MAX) as usize,
        };
        if refuse_snapshot(row.inode.id, "").is_err() {
            return self.list_snapshot(txn, row.inode.id, limit).await;
        }
        let prefix = rows::dentries(row.inode.id);
        let mut range = KeyRange::prefix(&prefix);
        if !self.after.is_empty() {
            range = range.after(&rows::dentry(row.inode.id, self.after));
        }
        let mut rows_read = txn.snapshot_range(&range, limit + 1).await?;
        let more = rows_read.len() > limit;
        rows_read.truncate(limit);
        let entries = rows_read.into_iter().map(|(key, value)| {
            let name = key.get(prefix.len()..).map(<[u8]>::to_vec).unwrap_or_default();
            let name = String::from_utf8(name)
                .map_err(|_| KvError::bad_row(&key, "the name is not UTF-8"))?;
            let DentryRow { inode, kind, .. } = DentryRow::decode(&key, &value)?;
            Ok::<_, KvError>(Entry { name, inode, kind })
        });
        Ok(MetaReply::Page { entries: entries.collect::<Result<_, _>>()?, more })
    }
}

impl List<'_> {
    async fn list_snapshot(
        &self,
        txn: &mut Transaction,
        directory: InodeId,
        limit: usize,
    ) -> Result<MetaReply, OpError> {
        let mut listed = view::list(txn, directory, self.after, limit + 1).await?;
        let more = listed.len() > limit;
        listed.truncate(limit);
        let entries = listed.into_iter().map(|(name, DentryRow { inode, kind, .. })| {
            let name = String::from_utf8(name)
                .map_err(|error| KvError::bad_row(error.as_bytes(), "the name is not UTF-8"))?;
            Ok::<_, KvError>(Entry { name, inode, kind })
        });
        Ok(MetaReply::Page { entries: entries.collect::<Result<_, _>>()?, more })
    }
}

/// `MetaQuery::PathOf`.
pub(crate) struct PathOf(pub InodeId);

impl Operation for PathOf {
    type Output = MetaReply;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<MetaReply, OpError> {
        let mut names = Vec::new();
        let mut id = self.0;
        while id != ROOT {
            let row = load(txn, id, "").await?;
            id = match row.parent() {
                Some(REMOVED) => return Err(not_found("", self.0)),
                Some(parent) => parent,
                None => return Err(not_a_directory(&At::inode(self.0))),
            };
            names.push(row.name);
        }
        names.reverse();
        Ok(MetaReply::Path(format!("/{}", names.join("/"))))
    }
}

/// Number of rows with a prefix, up to a limit.
pub(crate) struct CountRows {
    pub prefix: &'static [u8],
    pub limit: usize,
}

impl Operation for CountRows {
    type Output = u64;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<u64, OpError> {
        let rows = txn.snapshot_range(&KeyRange::prefix(self.prefix), self.limit).await?;
        Ok(rows.len() as u64)
    }
}
