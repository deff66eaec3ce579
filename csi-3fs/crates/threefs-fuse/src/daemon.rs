//! Daemon state and running requests: caller identity, file handles, and calls to the metadata
//! service on behalf of a request or of the mount.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use fabric::deadline::Deadline;
use rustix::io::Errno;
use threefs_client::{Client, ClientError};
use threefs_core::ids::InodeId;
use threefs_meta::{At, Identity, Inode, MetaChange, MetaQuery, MetaReply};
use threefs_rings::control::VIRTUAL_DIRECTORY;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

use crate::appends::Appends;
use crate::claim::Gate;
use crate::config::UnansweredCalls;
use crate::device::Device;
use crate::errors::errno;
use crate::files::Files;
use crate::journal::{Journal, Ticket};
use crate::listings::Listings;
use crate::locks::Locks;
use crate::rings::Rings;
use crate::virtual_nodes::is_virtual;
use crate::wire::{NO_ID, RESENT, Request};
use crate::write_behind::WriteBehind;

/// Node number of the mount's root in the FUSE protocol.
const ROOT_NODE: u64 = 1;

/// A daemon that serves one mount.
pub(crate) struct Daemon {
    pub client: Client,
    pub device: Arc<Device>,
    pub locks: Locks,
    pub appends: Appends,
    pub journal: Journal,
    pub files: Files,
    pub pending: WriteBehind,
    pub listings: Listings,
    pub rings: Rings,
    pub root: InodeId,
    pub read_only: bool,
    pub valid: Duration,
    pub gate: Option<Gate>,
    pub write_back: bool,
    pub timeout: Duration,
    pub permits: Arc<Semaphore>,
    /// Running requests, for interrupts.
    pub running: Mutex<HashMap<u64, Arc<Notify>>>,
    /// Files that were reported open and are closed now.
    pub closed: Mutex<Vec<InodeId>>,
    pub closed_notify: Notify,
    pub resumed: bool,
    pub unanswered: Arc<UnansweredCalls>,
    /// Part of all handles of this daemon, to distinguish them from those of its predecessors.
    pub tag: u64,
}

/// A running request.
pub(crate) struct Call<'a> {
    pub request: &'a Request,
    pub deadline: Deadline,
    /// The change that it makes; dropped after the answer was sent.
    pub ticket: Option<Ticket<'a>>,
    /// Counts among the running requests.
    pub permit: Option<OwnedSemaphorePermit>,
    /// Notified of a signal of the caller.
    pub interrupted: Arc<Notify>,
    /// The kernel's pages of the file are dropped once the request is answered: before that, they
    /// may be locked.
    pub drops_pages: bool,
    /// Follows the body of the answer: the data of a read.
    pub data: Vec<Bytes>,
}

impl Call<'_> {
    /// Number of the request, and whether the kernel resent it.
    pub(crate) fn number(&self) -> (u64, bool) {
        (self.request.unique & !RESENT, self.request.unique & RESENT != 0)
    }

    /// Identity of the caller. A FUSE request carries one group only and, from another PID
    /// namespace, not even a process, so permission checks that involve groups are left to the
    /// kernel: mounts of 3FS have `default_permissions`, under which it checks every operation with
    /// all groups of the caller. Without a caller ([`NO_ID`]) its decision stands for every class.
    pub(crate) fn identity(&self) -> Identity {
        let user = match self.request.uid {
            NO_ID => Identity::ROOT,
            uid => Identity::user(uid, self.request.gid),
        };
        Identity { kernel_checked: true, ..user }
    }
}

impl Daemon {
    pub(crate) fn running(&self) -> MutexGuard<'_, HashMap<u64, Arc<Notify>>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until this mount may be served.
    pub(crate) async fn wait_servable(&self, deadline: Deadline) -> Result<(), Errno> {
        match &self.gate {
            Some(gate) => gate.wait_open(deadline).await,
            None => Ok(()),
        }
    }

    /// Returns once this mount must never be served again.
    pub(crate) async fn wait_lost(&self) {
        match &self.gate {
            Some(gate) => gate.wait_lost().await,
            None => std::future::pending().await,
        }
    }

    /// Whether this mount may be served now.
    pub(crate) fn is_servable(&self) -> bool {
        self.gate.as_ref().is_none_or(Gate::is_open)
    }

    /// Whether a handle was issued by a previous daemon of this mount.
    pub(crate) fn is_former(&self, handle: u64) -> bool {
        self.resumed && handle & !0xffff_ffff != self.tag
    }

    /// A handle of this daemon, with a number below 2^32. A file's handle identifies only the
    /// daemon that issued it.
    pub(crate) fn handle(&self, number: u64) -> u64 {
        self.tag | number & 0xffff_ffff
    }

    /// Current attributes of an inode.
    pub(crate) async fn stat(&self, call: &Call<'_>, inode: InodeId) -> Result<Inode, Errno> {
        let query = MetaQuery::Stat { at: At::inode(inode), follow: false };
        let reply = self.query_as_root(call, &format!("stat {inode}"), query).await?;
        inode_of(reply)
    }

    /// The inode of a FUSE node number.
    pub(crate) fn inode(&self, node: u64) -> InodeId {
        if node == ROOT_NODE { self.root } else { InodeId(node) }
    }

    /// Whether a name in a directory is that of the virtual directory.
    pub(crate) fn is_virtual_name(&self, node: u64, name: &[u8]) -> bool {
        node == ROOT_NODE && name == VIRTUAL_DIRECTORY.as_bytes() && !self.write_back
    }

    /// A name in the directory of a request.
    pub(crate) fn entry(&self, node: u64, name: &[u8]) -> Result<At, Errno> {
        if is_virtual(node) || self.is_virtual_name(node, name) {
            return Err(Errno::PERM);
        }
        let name = std::str::from_utf8(name).map_err(|_| Errno::ILSEQ)?;
        Ok(At::entry(self.inode(node), name))
    }

    /// Queries with the caller's identity.
    pub(crate) async fn query(
        &self,
        call: &Call<'_>,
        operation: &str,
        query: MetaQuery,
    ) -> Result<MetaReply, Errno> {
        let by_inode = query_is_by_inode(&query);
        let result = self.client.query_for(&call.identity(), operation, query, call.deadline).await;
        result.map_err(|error| self.errno_of(operation, &error, by_inode))
    }

    /// Queries as root: the caller was authorized when it opened the inode.
    pub(crate) async fn query_as_root(
        &self,
        call: &Call<'_>,
        operation: &str,
        query: MetaQuery,
    ) -> Result<MetaReply, Errno> {
        let by_inode = query_is_by_inode(&query);
        let result = self.client.query_for(&Identity::ROOT, operation, query, call.deadline).await;
        result.map_err(|error| self.errno_of(operation, &error, by_inode))
    }

    /// Makes the change of a request with the caller's identity; once, even if the kernel resends
    /// the request to a later daemon.
    pub(crate) async fn change<'a>(
        &'a self,
        call: &mut Call<'a>,
        operation: &str,
        change: MetaChange,
    ) -> Result<MetaReply, Errno> {
        let identity = call.identity();
        self.change_as(call, identity, operation, change).await
    }

    /// As `change`, with another identity.
    pub(crate) async fn change_as<'a>(
        &'a self,
        call: &mut Call<'a>,
        identity: Identity,
        operation: &str,
        change: MetaChange,
    ) -> Result<MetaReply, Errno> {
        if self.read_only {
            return Err(Errno::ROFS);
        }
        let by_inode = change_is_by_inode(&change);
        let client = match &change {
            MetaChange::SetLength { at, .. } if by_inode => self.client_for(at.directory)?,
            _ => self.client.clone(),
        };
        let (unique, resent) = call.number();
        let ticket = match call.ticket.take() {
            Some(ticket) => ticket,
            None => self.journal.start(unique, resent).ok_or(Errno::BUSY)?,
        };
        let id = ticket.id();
        call.ticket = Some(ticket);
        let deadline = call.deadline;
        let result = client.change_for(id, &identity, operation, change, deadline).await;
        result.map_err(|error| self.errno_of(operation, &error, by_inode))
    }

    /// Makes a change for the mount itself, as root; it must be idempotent.
    pub(crate) async fn notify(
        &self,
        operation: &str,
        change: MetaChange,
        deadline: Deadline,
    ) -> Result<MetaReply, ClientError> {
        let ticket = self.journal.start(0, false).ok_or_else(|| ClientError::InvalidArgument {
            detail: "too many changes are in flight".into(),
        })?;
        self.client.change_for(ticket.id(), &Identity::ROOT, operation, change, deadline).await
    }

    /// The errno of an error; logs it, as a warning if the errno alone does not explain the cause.
    pub(crate) fn errno_of(&self, operation: &str, error: &ClientError, by_inode: bool) -> Errno {
        let number = errno(error, by_inode);
        match number {
            Errno::TIMEDOUT | Errno::IO | Errno::NOSPC | Errno::DQUOT => {
                tracing::warn!(operation, %error, errno = number.raw_os_error(), "refused");
            }
            _ => tracing::debug!(operation, %error, errno = number.raw_os_error(), "refused"),
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
        MetaQuery::ReportOpenFiles { .. }
        | MetaQuery::Quotas { .. }
        | MetaQuery::PathOf { .. }
        | MetaQuery::Status
        | MetaQuery::Role
        | MetaQuery::Capabilities { .. }
        | MetaQuery::StatMany { .. }
        | MetaQuery::StatChunks { .. }
        | MetaQuery::Lock(_)
        | MetaQuery::Trash(_)
        | MetaQuery::Snapshot(_)
        | MetaQuery::Audit(_)
        | MetaQuery::Epochs { .. } => false,
    }
}

fn change_is_by_inode(change: &MetaChange) -> bool {
    match change {
        MetaChange::SetLength { at, .. }
        | MetaChange::SetAttributes { at, .. }
        | MetaChange::SetAttribute { at, .. } => at.path.is_empty(),
        MetaChange::Create { .. }
        | MetaChange::Open { .. }
        | MetaChange::Close { .. }
        | MetaChange::ReportLengths { .. }
        | MetaChange::Reserve { .. }
        | MetaChange::MakeDirectory { .. }
        | MetaChange::MakeSymlink { .. }
        | MetaChange::MakeSpecial { .. }
        | MetaChange::Link { .. }
        | MetaChange::Rename { .. }
        | MetaChange::Unlink { .. }
        | MetaChange::RemoveDirectory { .. }
        | MetaChange::RemoveTree { .. }
        | MetaChange::SetQuota { .. }
        | MetaChange::Lock(_)
        | MetaChange::Trash(_)
        | MetaChange::Snapshot(_) => false,
    }
}

/// The inode of a reply.
pub(crate) fn inode_of(reply: MetaReply) -> Result<Inode, Errno> {
    match reply {
        MetaReply::Inode(inode) => Ok(inode),
        other => Err(unexpected(&other)),
    }
}

/// Handles a reply of an unexpected kind.
pub(crate) fn unexpected(reply: &MetaReply) -> Errno {
    tracing::error!(?reply, "unexpected reply from the metadata service");
    Errno::IO
}
