//! Entries of a trash as tuples.

use threefs_core::ids::InodeId;
use threefs_meta::{EntryKind, TrashEntry, TrashId};

/// Time of the removal in milliseconds since 1970, inode.
pub(crate) type RawTrashId = (u64, u64);

/// id, path, name, kind, whether it is an empty directory, size, user.
pub(crate) type RawTrashEntry = (RawTrashId, Option<String>, String, &'static str, bool, u64, u32);

pub(crate) fn trash_id((removed_ms, inode): RawTrashId) -> TrashId {
    TrashId { removed_ms, inode: InodeId(inode) }
}

pub(crate) fn raw_trash_entry(entry: TrashEntry) -> RawTrashEntry {
    let TrashEntry { id, path, name, kind, empty, length, removed_by } = entry;
    let kind = match kind {
        EntryKind::File => "file",
        EntryKind::Directory => "directory",
        EntryKind::Symlink => "symlink",
        EntryKind::Special(_) => "special",
    };
    ((id.removed_ms, id.inode.0), path, name, kind, empty, length, removed_by)
}
