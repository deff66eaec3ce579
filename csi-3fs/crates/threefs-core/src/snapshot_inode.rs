//! Numbers of inodes in snapshots.
//!
//! An inode of a snapshot has the number 2^63 + snapshot number × 2^55 + inode, so locations,
//! listings and handles work as for others. The chunks of a file of a snapshot are versions of the
//! chunks of its inode, up to the epoch of the snapshot.

use crate::ids::InodeId;

const IN_SNAPSHOT: u64 = 1 << 63;
const NUMBER_SHIFT: u32 = 55;
/// Inodes with numbers below this one can be in snapshots.
pub const INODES_MAX: u64 = 1 << NUMBER_SHIFT;

/// Number of the snapshot and inode, of the number of an inode in a snapshot.
#[must_use]
pub fn split(id: InodeId) -> Option<(u8, InodeId)> {
    let rest = id.0.checked_sub(IN_SNAPSHOT)?;
    let number = (rest >> NUMBER_SHIFT) as u8;
    Some((number, InodeId(rest & (INODES_MAX - 1))))
}

/// The inode of which a number is the one in a snapshot, or the inode itself.
#[must_use]
pub fn raw(id: InodeId) -> InodeId {
    split(id).map_or(id, |(_, raw)| raw)
}

/// The number of an inode in a snapshot.
#[must_use]
pub fn join(number: u8, id: InodeId) -> InodeId {
    InodeId(IN_SNAPSHOT | u64::from(number) << NUMBER_SHIFT | id.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_in_a_snapshot_names_the_snapshot_and_the_inode() {
        for number in [0, 1, 254, 255] {
            for inode in [0, 1, 7, INODES_MAX - 1] {
                let id = join(number, InodeId(inode));
                assert_eq!(split(id), Some((number, InodeId(inode))));
                assert_eq!(raw(id), InodeId(inode));
            }
        }
        for inode in [0, 7, INODES_MAX, IN_SNAPSHOT - 1] {
            assert_eq!((split(InodeId(inode)), raw(InodeId(inode))), (None, InodeId(inode)));
        }
    }
}
