//! Upper bounds of reply sizes, which the service reserves before it builds a reply.

use crate::ops::NAMES_MAX;
use crate::protocol::{
    ATTRIBUTE_BYTES_MAX, ATTRIBUTES_BYTES_MAX, AUDIT_RANGES_MAX, AuditQuery, BATCH_MAX,
    LIST_LIMIT_MAX, MetaChange, MetaQuery, MetaRequest, NAME_BYTES_MAX, PATH_BYTES_MAX,
    SHOWN_FILES_MAX, SNAPSHOTS_MAX, SnapshotQuery, TRASH_PAGE_MAX, TrashQuery,
};
use crate::written::RANGES_MAX;

/// A directory entry without its name: lengths, inode number, kind.
const ENTRY_BYTES: usize = 24;
/// An inode with the maximum number of ranges. Parts that errors or links repeat from the request
/// are covered by the request.
const INODE_BYTES: usize = 256 + RANGES_MAX * 10;
/// A file of a snapshot: the file, two inodes and an epoch.
const SHOWN_FILE_BYTES: usize = INODE_BYTES + 40;
/// A signed capability.
const CAPABILITY_BYTES: usize = 256;
/// Volume and epoch of a file: three numbers.
const EPOCH_BYTES: usize = 24;
/// The path of a directory.
const PATH_BYTES: usize = 64 << 10;
/// An entry of a trash: its path, its name, numbers.
const TRASH_ENTRY_BYTES: usize = PATH_BYTES_MAX + 2 * NAME_BYTES_MAX + 64;

/// A snapshot without its name.
const SNAPSHOT_BYTES: usize = 48;

/// Upper bound of the reply in bytes, or 0 for short replies, which the number of calls bounds.
pub(crate) fn reply_bytes(request: &MetaRequest) -> usize {
    match request {
        MetaRequest::Query { query, .. } => of_query(query),
        MetaRequest::Change { change, .. } => match change {
            MetaChange::ReportLengths { reports, .. } => inodes(reports.len()),
            MetaChange::Reserve { reservations } => {
                inodes(reservations.len()) + capabilities(reservations.len())
            }
            MetaChange::Create { .. }
            | MetaChange::Open { .. }
            | MetaChange::Close { .. }
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
            | MetaChange::SetQuota { .. }
            | MetaChange::Lock(_)
            | MetaChange::Trash(_)
            | MetaChange::Snapshot(_) => 0,
        },
    }
}

fn of_query(query: &MetaQuery) -> usize {
    match query {
        MetaQuery::List { limit, .. } => {
            let limit = if *limit == 0 { LIST_LIMIT_MAX } else { (*limit).min(LIST_LIMIT_MAX) };
            limit as usize * (NAME_BYTES_MAX + ENTRY_BYTES)
        }
        MetaQuery::StatMany { at } => inodes(at.len()),
        MetaQuery::Audit(AuditQuery::Files { limit, .. }) => inodes((*limit as usize).max(2)),
        MetaQuery::Audit(AuditQuery::Written { .. }) => AUDIT_RANGES_MAX * 10 + 64,
        MetaQuery::Audit(AuditQuery::Names { .. }) => {
            (NAMES_MAX + 1) * (NAME_BYTES_MAX + ENTRY_BYTES)
        }
        MetaQuery::Audit(AuditQuery::Unknown { inodes }) => inodes.len().min(BATCH_MAX) * 10 + 64,
        MetaQuery::Audit(AuditQuery::Shown { .. }) => SHOWN_FILES_MAX * SHOWN_FILE_BYTES + 64,
        MetaQuery::Audit(AuditQuery::StartRepair { .. } | AuditQuery::Repair { .. }) => 64,
        MetaQuery::StatChunks { chunks, .. } => INODE_BYTES + chunks.len().min(BATCH_MAX) * 10,
        MetaQuery::Capabilities { inodes } => capabilities(inodes.len()),
        MetaQuery::Epochs { inodes } => inodes.len().min(BATCH_MAX) * EPOCH_BYTES + 64,
        MetaQuery::GetAttribute { .. } => ATTRIBUTE_BYTES_MAX,
        MetaQuery::ListAttributes { .. } => ATTRIBUTES_BYTES_MAX,
        MetaQuery::PathOf { .. } => PATH_BYTES,
        MetaQuery::Trash(TrashQuery::List { .. }) => TRASH_PAGE_MAX * TRASH_ENTRY_BYTES,
        MetaQuery::Snapshot(SnapshotQuery::List { .. }) => {
            SNAPSHOTS_MAX * (NAME_BYTES_MAX + SNAPSHOT_BYTES)
        }
        MetaQuery::Stat { .. }
        | MetaQuery::Open { .. }
        | MetaQuery::ReportOpenFiles { .. }
        | MetaQuery::Quotas { .. }
        | MetaQuery::Lock(_)
        | MetaQuery::Trash(TrashQuery::Count)
        | MetaQuery::Status
        | MetaQuery::Role => 0,
    }
}

fn capabilities(count: usize) -> usize {
    count.min(BATCH_MAX) * CAPABILITY_BYTES
}

/// A single inode is a short reply.
fn inodes(count: usize) -> usize {
    if count > 1 { count.min(BATCH_MAX) * INODE_BYTES } else { 0 }
}

#[cfg(test)]
mod tests {
    use threefs_core::ids::{Epoch, InodeId, TableId, TableVersion};
    use threefs_core::layout::{ChainChoice, Layout};

    use super::*;
    use crate::identity::Identity;
    use crate::protocol::{
        At, AuditAnswer, AuditedFile, Entry, EntryKind, Inode, InodeKind, MetaReply, MetaResult,
        ShownFile,
    };
    use crate::{Nanoseconds, Written};

    fn encoded(reply: MetaReply) -> usize {
        let reply: MetaResult = Ok(reply);
        fabric::rpc::encode(&reply).unwrap().len()
    }

    fn query(query: MetaQuery) -> usize {
        reply_bytes(&MetaRequest::Query { caller: Identity::ROOT, query })
    }

    #[test]
    fn the_longest_page_fits() {
        let entry = Entry {
            name: "n".repeat(NAME_BYTES_MAX),
            inode: InodeId(u64::MAX),
            kind: EntryKind::Directory,
        };
        for limit in [1, 1_000, LIST_LIMIT_MAX] {
            let entries = vec![entry.clone(); limit as usize];
            let list = MetaQuery::List { at: At::path("/"), after: String::new(), limit };
            assert!(encoded(MetaReply::Page { entries, more: true }) <= query(list) + 16);
        }
        let all = |limit| query(MetaQuery::List { at: At::path("/"), after: String::new(), limit });
        assert_eq!((all(0), all(u32::MAX)), (all(LIST_LIMIT_MAX), all(LIST_LIMIT_MAX)));
    }

    #[test]
    fn the_longest_inodes_fit() {
        let mut written = Written::default();
        for number in 0..RANGES_MAX as u64 {
            let at = u64::from(u32::MAX) - number * 2;
            written.merge(&Written::of_bytes(at, at + 1, 1));
        }
        assert_eq!(written.ranges(), RANGES_MAX);
        let layout = Layout {
            table: TableId(u32::MAX),
            table_version: TableVersion(u32::MAX),
            chunk_bytes: 1 << 26,
            stripe: u32::MAX,
            chains: ChainChoice::Explicit(Vec::new()),
        };
        let (length, reserved) = (u64::MAX, u64::MAX);
        let (truncate_version, content) = (u64::MAX, u64::MAX);
        let kind = InodeKind::File { layout, length, reserved, truncate_version, content, written };
        let time = Nanoseconds(i64::MIN);
        let inode = Inode {
            id: InodeId(u64::MAX),
            version: u64::MAX,
            kind,
            mode: u32::MAX,
            uid: u32::MAX,
            gid: u32::MAX,
            links: u32::MAX,
            accessed: time,
            modified: time,
            changed: time,
            quota: Some(InodeId(u64::MAX)),
        };
        let InodeKind::File { layout, written, .. } = inode.kind.clone() else { unreachable!() };
        let files = vec![AuditedFile { inode: inode.id, layout, written }; BATCH_MAX];
        let inodes = vec![inode.id; BATCH_MAX];
        let page = MetaReply::Audit(AuditAnswer::Files { inodes, files, more: true });
        for limit in [BATCH_MAX as u32, u32::MAX] {
            let files = query(MetaQuery::Audit(AuditQuery::Files { after: inode.id, limit }));
            assert!(encoded(page.clone()) <= files);
        }
        let (stored, until) = (inode.id, inode.id);
        let epoch = Epoch::new(u32::MAX, u32::MAX);
        let InodeKind::File { layout, written, .. } = inode.kind.clone() else { unreachable!() };
        let file = AuditedFile { inode: stored, layout, written };
        let files = vec![ShownFile { file, stored, epoch, snapshot: stored }; SHOWN_FILES_MAX];
        let shown = query(MetaQuery::Audit(AuditQuery::Shown { after: stored, until }));
        assert!(encoded(MetaReply::Audit(AuditAnswer::Shown { files, until })) <= shown);
        let at = vec![At::path("/"); BATCH_MAX];
        let reply = MetaReply::Inodes(vec![Ok(inode); BATCH_MAX]);
        assert!(encoded(reply) <= query(MetaQuery::StatMany { at }));
    }
}
