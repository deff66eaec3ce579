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
/// Maximum number of entries in one page of a listing.
pub const LIST_LIMIT_MAX: u32 = 4096;
/// The longest value of an extended attribute.
pub const ATTRIBUTE_BYTES_MAX: usize = 64 << 10;
/// Maximum size of all extended attributes of an inode, names and values.
pub const ATTRIBUTES_BYTES_MAX: usize = 128 << 10;
/// Prefix of extended attributes that only the control plane reads, sets and removes.
pub const RESERVED_ATTRIBUTES: &str = "user.threefs.";
/// Charge of a name in addition to its bytes: the row of the directory entry.
pub const NAME_ROW_BYTES: u64 = 64;
/// Charge of a write session: its row.
pub const SESSION_ROW_BYTES: u64 = 64;
/// Bytes of names, attributes, link targets and write sessions per inode of a directory's inode
/// limit.
pub const METADATA_BYTES_PER_INODE: u64 = 1024;
/// Bytes in addition to that.
pub const METADATA_BYTES_MIN: u64 = 1 << 20;
/// Maximum number of files in a batch.
pub const BATCH_MAX: usize = 1024;
