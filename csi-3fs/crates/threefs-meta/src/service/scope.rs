//! Authorization of volume credentials: requests inside their directory, and nothing else.
//!
//! Path lookup (`ops::lookup`) confines paths; inodes in a request are checked here
//! before it runs; operations of the control plane are refused.

use fabric::BoxFuture;
use fabric::auth::ticket::{Grant, Ticket};
use fabric::deadline::Deadline;
use threefs_core::ids::InodeId;
use threefs_core::terms::FileTerms;

use crate::clients::open_files::OPEN_FILES_PER_VOLUME_MAX;
use crate::identity::Role;
use crate::ops::{self, ScopePartition};
use crate::permission::WRITE;
use crate::protocol::{
    At, BATCH_MAX, LockChange, LockKind, LockQuery, MetaChange, MetaError, MetaQuery, MetaReply,
    MetaRequest, MetaResult, RESERVED_ATTRIBUTES, ROOT, TrashChange, TrashQuery,
};
use crate::tree::{Tree, check_batch};

/// The reserved attribute with the claim of a mount, on the directory of its credential.
const CLAIM: &str = "user.threefs.claim";

impl Tree {
    /// Answers one request, as far as the sender's grant permits.
    ///
    /// # Errors
    /// Any [`MetaError`].
    pub fn answer_for<'a>(
        &'a self,
        grant: &'a Grant,
        request: MetaRequest,
        deadline: Deadline,
    ) -> BoxFuture<'a, MetaResult> {
        match grant.ticket() {
            None => self.answer(request, deadline),
            Some(ticket) => Box::pin(self.answer_within(ticket, request, deadline)),
        }
    }

    async fn answer_within(
        &self,
        ticket: &Ticket,
        mut request: MetaRequest,
        deadline: Deadline,
    ) -> MetaResult {
        let scope = InodeId(ticket.directory);
        permit(ticket, &request)?;
        let claims = attribute_of(&request) == Some(CLAIM);
        match &mut request {
            MetaRequest::Query { caller, .. } | MetaRequest::Change { caller, .. } => {
                caller.scope = Some(scope);
                // The stated identity counts only for the mount's claim, which is permitted above.
                if !claims {
                    caller.role = Role::User;
                }
            }
        }
        let refusals = self.confine(scope, &mut request, deadline).await?;
        let mut reply = self.answer(request, deadline).await?;
        match &mut reply {
            // Quotas above the directory belong to the control plane.
            MetaReply::Quotas(quotas) => {
                let own = quotas.iter().position(|quota| quota.directory == scope);
                quotas.truncate(own.map_or(0, |own| own + 1));
            }
            MetaReply::Names(names) => names.retain(|name| !name.starts_with(RESERVED_ATTRIBUTES)),
            // In the order of the request.
            MetaReply::Inodes(inodes) => {
                for (position, error) in refusals {
                    inodes.insert(position.min(inodes.len()), Err(error));
                }
            }
            _ => {}
        }
        Ok(reply)
    }

    /// Removes inodes outside the directory from a request. A file that was moved out does not fail
    /// the rest of a batch: returns the positions and errors of such files.
    async fn confine(
        &self,
        scope: InodeId,
        request: &mut MetaRequest,
        deadline: Deadline,
    ) -> Result<Vec<(usize, MetaError)>, MetaError> {
        let mut refusals = Vec::new();
        match request {
            // An inode that does not exist yet may later belong to another volume.
            MetaRequest::Query { query: MetaQuery::ReportOpenFiles { add, .. }, .. } => {
                // At most as many as are tracked, and in parts: a list may be as long as a message.
                add.truncate(OPEN_FILES_PER_VOLUME_MAX);
                let mut inside = Vec::new();
                for part in add.chunks(BATCH_MAX) {
                    inside.extend(self.sides(scope, part, deadline).await?.inside);
                    tokio::task::yield_now().await;
                }
                *add = inside;
            }
            MetaRequest::Change { change: MetaChange::Close { inode, report, .. }, .. } => {
                let inodes: Vec<_> =
                    report.iter().map(|report| report.inode).chain([*inode]).collect();
                let sides = self.sides(scope, &inodes, deadline).await?;
                if let Some(inode) = sides.outside.first() {
                    return Err(outside(*inode, scope));
                }
            }
            MetaRequest::Change { change: MetaChange::ReportLengths { reports, ends }, .. } => {
                check_batch("reports", reports.len().max(ends.len()))?;
                let inodes: Vec<_> = ends.iter().map(|(inode, _)| *inode).collect();
                let sides = self.sides(scope, &inodes, deadline).await?;
                ends.retain(|(inode, _)| !sides.outside.contains(inode));
                let inodes: Vec<_> = reports.iter().map(|report| report.inode).collect();
                let sides = self.sides(scope, &inodes, deadline).await?;
                refusals = refuse(&inodes, &sides, scope);
                reports.retain(|report| !sides.outside.contains(&report.inode));
            }
            MetaRequest::Change { change: MetaChange::Reserve { reservations }, .. } => {
                check_batch("reservations", reservations.len())?;
                let inodes: Vec<_> =
                    reservations.iter().map(|reservation| reservation.inode).collect();
                let sides = self.sides(scope, &inodes, deadline).await?;
                refusals = refuse(&inodes, &sides, scope);
                reservations.retain(|reservation| !sides.outside.contains(&reservation.inode));
            }
            MetaRequest::Change {
                change: MetaChange::Lock(LockChange::ClearFile { inode, .. }),
                ..
            } => {
                let sides = self.sides(scope, &[*inode], deadline).await?;
                if sides.outside.contains(inode) {
                    return Err(outside(*inode, scope));
                }
            }
            MetaRequest::Change {
                change:
                    MetaChange::Lock(
                        LockChange::Set { lock, .. }
                        | LockChange::Clear { lock, .. }
                        | LockChange::Cancel { lock, .. },
                    ),
                ..
            }
            | MetaRequest::Query {
                query: MetaQuery::Lock(LockQuery::Test { lock, .. } | LockQuery::Await { lock, .. }),
                ..
            } => {
                let sides = self.sides(scope, &[lock.inode], deadline).await?;
                if let Some(inode) = sides.outside.first() {
                    return Err(outside(*inode, scope));
                }
            }
            // They name a lock session, which only its client knows.
            MetaRequest::Change {
                change: MetaChange::Lock(LockChange::Start { .. } | LockChange::End { .. }),
                ..
            }
            | MetaRequest::Query {
                query: MetaQuery::Lock(LockQuery::Renew { .. } | LockQuery::Recalls { .. }),
                ..
            } => {}
            // Refused by `permit`, or confined where the capabilities are signed.
            MetaRequest::Query {
                query:
                    MetaQuery::PathOf { .. }
                    | MetaQuery::Status
                    | MetaQuery::Role
                    | MetaQuery::Trash(TrashQuery::Count)
                    | MetaQuery::Audit(_)
                    | MetaQuery::Epochs { .. }
                    | MetaQuery::Capabilities { .. },
                ..
            }
            | MetaRequest::Change { change: MetaChange::SetQuota { .. }, .. } => {}
            // They name locations, which the operations check.
            MetaRequest::Query {
                query:
                    MetaQuery::Stat { .. }
                    | MetaQuery::StatMany { .. }
                    | MetaQuery::StatChunks { .. }
                    | MetaQuery::List { .. }
                    | MetaQuery::Open { .. }
                    | MetaQuery::Quotas { .. }
                    | MetaQuery::GetAttribute { .. }
                    | MetaQuery::ListAttributes { .. }
                    | MetaQuery::Trash(TrashQuery::List { .. })
                    | MetaQuery::Snapshot(_),
                ..
            }
            | MetaRequest::Change {
                change:
                    MetaChange::Create { .. }
                    | MetaChange::Open { .. }
                    | MetaChange::SetLength { .. }
                    | MetaChange::MakeDirectory { .. }
                    | MetaChange::MakeSymlink { .. }
                    | MetaChange::MakeSpecial { .. }
                    | MetaChange::Link { .. }
                    | MetaChange::Rename { .. }
                    | MetaChange::Unlink { .. }
                    | MetaChange::RemoveDirectory { .. }
                    | MetaChange::RemoveTree { .. }
                    | MetaChange::SetAttributes { .. }
                    | MetaChange::SetAttribute { .. }
                    | MetaChange::Trash(_)
                    | MetaChange::Snapshot(_),
                ..
            } => {}
        }
        Ok(refusals)
    }

    /// Capability terms of files; `None` if it is not a readable file.
    pub(crate) async fn terms(
        &self,
        inodes: &[InodeId],
        until_unix_s: u64,
        deadline: Deadline,
    ) -> Result<Vec<Option<FileTerms>>, MetaError> {
        Ok(self.transact(deadline, &ops::Terms { inodes, until_unix_s }).await?)
    }

    /// Which inodes are inside the directory.
    pub(crate) async fn sides(
        &self,
        scope: InodeId,
        inodes: &[InodeId],
        deadline: Deadline,
    ) -> Result<ScopePartition, MetaError> {
        if inodes.is_empty() {
            return Ok(ScopePartition::default());
        }
        Ok(self.transact(deadline, &ops::PartitionByScope { scope, inodes }).await?)
    }
}

fn refuse(inodes: &[InodeId], sides: &ScopePartition, scope: InodeId) -> Vec<(usize, MetaError)> {
    let places = inodes.iter().enumerate().filter(|(_, inode)| sides.outside.contains(inode));
    places.map(|(position, inode)| (position, outside(*inode, scope))).collect()
}

pub(crate) fn outside(inode: InodeId, scope: InodeId) -> MetaError {
    ops::outside(&inode.to_string(), scope).into()
}

fn permit(ticket: &Ticket, request: &MetaRequest) -> Result<(), MetaError> {
    let refusal = |what: &str, why: &str| {
        let path = ticket.path.clone();
        let reason = format!("{what} {why}, and the credential is for this directory alone");
        Err(MetaError::NotPermitted { path, reason })
    };
    let control = |what: &str| refusal(what, "needs the cluster key");
    match request {
        MetaRequest::Query { query, .. } => match query {
            MetaQuery::PathOf { .. } => control("the path of a directory"),
            // Capabilities name it.
            MetaQuery::Epochs { .. } => control("the epoch of a volume"),
            MetaQuery::Status
            | MetaQuery::Role
            | MetaQuery::Trash(TrashQuery::Count)
            | MetaQuery::Audit(_) => control("the state of the service"),
            MetaQuery::GetAttribute { at, name } => reserved(ticket, at, name),
            MetaQuery::Open { access, .. } if ticket.read_only && access & WRITE != 0 => {
                Err(read_only(ticket))
            }
            MetaQuery::Stat { .. }
            | MetaQuery::StatMany { .. }
            | MetaQuery::StatChunks { .. }
            | MetaQuery::List { .. }
            | MetaQuery::Open { .. }
            | MetaQuery::ReportOpenFiles { .. }
            | MetaQuery::Quotas { .. }
            | MetaQuery::Capabilities { .. }
            | MetaQuery::Lock(_)
            | MetaQuery::Trash(TrashQuery::List { .. })
            | MetaQuery::Snapshot(_)
            | MetaQuery::ListAttributes { .. } => Ok(()),
        },
        MetaRequest::Change { change, .. } => match change {
            MetaChange::SetQuota { .. } => control("setting a quota"),
            MetaChange::Trash(TrashChange::Keep { .. }) => control("setting the retention"),
            MetaChange::Lock(LockChange::Set { lock, .. })
                if lock.kind == LockKind::Append && ticket.read_only =>
            {
                Err(read_only(ticket))
            }
            // As on one node, who may read a file may lock it.
            MetaChange::Open { write: false, .. } | MetaChange::Lock(_) => Ok(()),
            _ if ticket.read_only => Err(read_only(ticket)),
            MetaChange::SetAttribute { at, name, .. } => reserved(ticket, at, name),
            MetaChange::Create { .. }
            | MetaChange::Open { .. }
            | MetaChange::Close { .. }
            | MetaChange::ReportLengths { .. }
            | MetaChange::Reserve { .. }
            | MetaChange::SetLength { .. }
            | MetaChange::MakeDirectory { .. }
            | MetaChange::MakeSymlink { .. }
            | MetaChange::MakeSpecial { .. }
            | MetaChange::Link { .. }
            | MetaChange::Rename { .. }
            | MetaChange::Unlink { .. }
            | MetaChange::RemoveDirectory { .. }
            | MetaChange::RemoveTree { .. }
            | MetaChange::SetAttributes { .. }
            | MetaChange::Snapshot(_)
            | MetaChange::Trash(TrashChange::Restore { .. } | TrashChange::Purge { .. }) => Ok(()),
        },
    }
}

/// The extended attribute that a request reads or sets.
fn attribute_of(request: &MetaRequest) -> Option<&str> {
    match request {
        MetaRequest::Query { query: MetaQuery::GetAttribute { name, .. }, .. }
        | MetaRequest::Change { change: MetaChange::SetAttribute { name, .. }, .. } => Some(name),
        _ => None,
    }
}

fn read_only(ticket: &Ticket) -> MetaError {
    let reason = "the credential is read-only".into();
    MetaError::NotPermitted { path: ticket.path.clone(), reason }
}

/// A mount may set its claim on its credential's directory; all other reserved attributes belong to
/// the control plane.
fn reserved(ticket: &Ticket, at: &At, name: &str) -> Result<(), MetaError> {
    let own = at.directory == ROOT || at.directory.0 == ticket.directory;
    let own = own && at.path.split('/').all(|name| name.is_empty() || name == ".");
    if !name.starts_with(RESERVED_ATTRIBUTES) || (own && name == CLAIM) {
        return Ok(());
    }
    let reason = format!("attribute `{name}` is reserved: it requires the cluster key");
    Err(MetaError::NotPermitted { path: at.path.clone(), reason })
}
