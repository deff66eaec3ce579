//! Limits of names, paths, batches and attributes, and the cost of rows in quotas.

use threefs_core::ids::InodeId;

/// The root directory.
pub const ROOT: InodeId = InodeId(1);
/// The longest name, as on Linux.
pub const NAME_BYTES_MAX: usize = 255;
/// The longest path, as on Linux.
pub const PATH_BYTES_MAX: usize = 4096;
/// Symbolic links that one path may go through, as on Linux.
pub const SYMLINKS_MAX: usize = 40;
/// Entries of one page of a listing at most.
pub const LIST_LIMIT_MAX: u32 = 4096;
/// The longest value of an extended attribute.
pub const ATTRIBUTE_BYTES_MAX: usize = 64 << 10;
/// All extended attributes of an inode, names and values.
pub const ATTRIBUTES_BYTES_MAX: usize = 128 << 10;
/// Extended attributes that only the control plane sees, sets and removes.
pub const RESERVED_ATTRIBUTES: &str = "user.threefs.";
/// What one name costs beside its bytes: the row of a directory entry.
pub const NAME_ROW_BYTES: u64 = 64;
/// What a write session costs: its row.
pub const SESSION_ROW_BYTES: u64 = 64;
/// Bytes of names, attributes, link targets and write sessions that a directory with a limit of
/// inodes may have for each of them.
pub const METADATA_BYTES_PER_INODE: u64 = 1024;
/// And those that it may have anyway.
pub const METADATA_BYTES_MIN: u64 = 1 << 20;
/// Files of one batch at most.
pub const BATCH_MAX: usize = 1024;
