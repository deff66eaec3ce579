//! How an operation asks the cluster: for the process that made the system call.

use rustix::io::Errno;
use threefs_client::ClientError;
use threefs_core::ids::InodeId;
use threefs_meta::{At, Identity, Inode, MetaChange, MetaQuery, MetaReply};

use crate::daemon::{Call, Daemon};
use crate::errors::errno;

/// The node number that the kernel gives the root of a mount.
const ROOT_NODE: u64 = 1;

impl Daemon {
    /// The inode behind a number of the kernel's.
    pub(crate) fn inode(&self, node: u64) -> InodeId {
        if node == ROOT_NODE { self.root } else { InodeId(node) }
    }

    /// A name in the directory that a request is about.
    pub(crate) fn entry(&self, node: u64, name: &[u8]) -> Result<At, Errno> {
        let name = std::str::from_utf8(name).map_err(|_| Errno::ILSEQ)?;
        Ok(At::entry(self.inode(node), name))
    }

    /// Asks for the caller.
    pub(crate) async fn query(
        &self,
        call: &Call<'_>,
        what: &str,
        query: MetaQuery,
    ) -> Result<MetaReply, Errno> {
        let by_inode = query_is_by_inode(&query);
        let result = self.client.query_for(&call.identity(), what, query, call.deadline).await;
        result.map_err(|error| self.failed(what, &error, by_inode))
    }

    /// Asks for whoever was allowed to open what this is about.
    pub(crate) async fn query_as_root(
        &self,
        call: &Call<'_>,
        what: &str,
        query: MetaQuery,
    ) -> Result<MetaReply, Errno> {
        let by_inode = query_is_by_inode(&query);
        let result = self.client.query_for(&Identity::ROOT, what, query, call.deadline).await;
        result.map_err(|error| self.failed(what, &error, by_inode))
    }

    /// Makes the one change of a request, for the caller; once, even if the kernel sends the request
    /// to a later daemon again.
    pub(crate) async fn change<'a>(
        &'a self,
        call: &mut Call<'a>,
        what: &str,
        change: MetaChange,
    ) -> Result<MetaReply, Errno> {
        let who = call.identity();
        self.change_as(call, who, what, change).await
    }

    /// As `change`, for somebody else than the caller.
    pub(crate) async fn change_as<'a>(
        &'a self,
        call: &mut Call<'a>,
        who: Identity,
        what: &str,
        change: MetaChange,
    ) -> Result<MetaReply, Errno> {
        if self.read_only {
            return Err(Errno::ROFS);
        }
        let by_inode = change_is_by_inode(&change);
        let (unique, resent) = call.number();
        let ticket = match call.ticket.take() {
            Some(ticket) => ticket,
            None => self.journal.begin(unique, resent).ok_or(Errno::BUSY)?,
        };
        let id = ticket.id();
        call.ticket = Some(ticket);
        let deadline = call.deadline;
        let result = self.client.change_for(id, &who, what, change, deadline).await;
        result.map_err(|error| self.failed(what, &error, by_inode))
    }

    /// Tells the metadata service something of the mount's own: may be told twice.
    pub(crate) async fn tell(
        &self,
        what: &str,
        change: MetaChange,
        deadline: fabric::deadline::Deadline,
    ) -> Result<MetaReply, ClientError> {
        let ticket = self.journal.begin(0, false).ok_or_else(|| ClientError::InvalidArgument {
            detail: "too many changes are under way".into(),
        })?;
        self.client.change_for(ticket.id(), &Identity::ROOT, what, change, deadline).await
    }

    /// The number of an error, which is logged if nobody could know its reason otherwise.
    pub(crate) fn failed(&self, what: &str, error: &ClientError, by_inode: bool) -> Errno {
        let number = errno(error, by_inode);
        match number {
            Errno::TIMEDOUT | Errno::IO | Errno::NOSPC | Errno::DQUOT => {
                tracing::warn!(what, %error, errno = number.raw_os_error(), "refused");
            }
            _ => tracing::debug!(what, %error, errno = number.raw_os_error(), "refused"),
        }
        number
    }
}

fn query_is_by_inode(query: &MetaQuery) -> bool {
    match query {
        MetaQuery::Stat { at, .. }
        | MetaQuery::Open { at, .. }
        | MetaQuery::List { at, .. }
        | MetaQuery::GetAttribute { at, .. }
        | MetaQuery::ListAttributes { at } => at.path.is_empty(),
        _ => false,
    }
}

fn change_is_by_inode(change: &MetaChange) -> bool {
    match change {
        MetaChange::SetLength { at, .. }
        | MetaChange::SetAttributes { at, .. }
        | MetaChange::SetAttribute { at, .. } => at.path.is_empty(),
        _ => false,
    }
}

/// The inode of an answer.
pub(crate) fn inode_of(reply: MetaReply) -> Result<Inode, Errno> {
    match reply {
        MetaReply::Inode(inode) => Ok(inode),
        other => Err(unexpected(&other)),
    }
}

/// An answer of another kind than was asked for.
pub(crate) fn unexpected(reply: &MetaReply) -> Errno {
    tracing::error!(?reply, "the metadata service answered another question");
    Errno::IO
}
