//! POSIX permission checks of a caller on an inode.

use crate::error::MetaError;
use crate::identity::Identity;
use crate::protocol::Inode;

/// List a directory, read a file.
pub const READ: u32 = 4;
/// Change the names in a directory, write a file.
pub const WRITE: u32 = 2;
/// Traverse a directory, execute a file.
pub const EXECUTE: u32 = 1;
/// In a directory with this bit, only the owner of an entry or of the directory removes or renames
/// it.
pub const STICKY: u32 = 0o1000;
/// Files created in a directory with this bit get the directory's group.
pub const SET_GROUP: u32 = 0o2000;
/// A program with this bit runs as its owner.
pub const SET_USER: u32 = 0o4000;

impl Identity {
    /// Whether the caller owns the inode, or is root.
    pub fn owns(&self, inode: &Inode) -> bool {
        self.is_root() || self.uid == inode.uid
    }

    /// Whether mode and owner permit all of `access` ([`READ`] | [`WRITE`] | [`EXECUTE`]). The
    /// first matching class decides, even if a later one would permit more.
    pub fn allows(&self, inode: &Inode, access: u32) -> bool {
        if self.is_root() {
            let executable = inode.is_directory() || inode.mode & 0o111 != 0;
            return access & EXECUTE == 0 || executable;
        }
        let mode = if self.uid == inode.uid {
            inode.mode >> 6
        } else if self.in_group(inode.gid) {
            inode.mode >> 3
        } else if self.kernel_checked {
            inode.mode | inode.mode >> 3
        } else {
            inode.mode
        };
        mode & access == access
    }

    /// [`Self::allows`] as a result.
    pub(crate) fn check(&self, inode: &Inode, access: u32, path: &str) -> Result<(), MetaError> {
        if self.allows(inode, access) {
            return Ok(());
        }
        let requested: String = [(READ, 'r'), (WRITE, 'w'), (EXECUTE, 'x')]
            .iter()
            .filter_map(|(bit, letter)| (access & bit != 0).then_some(*letter))
            .collect();
        Err(MetaError::PermissionDenied {
            path: if path.is_empty() { inode.id.to_string() } else { path.into() },
            detail: format!(
                "uid {} gid {} requests {requested} of {} with mode {:o}, owner {}, group {}",
                self.uid, self.gid, inode.id, inode.mode, inode.uid, inode.gid
            ),
        })
    }

    /// In a sticky directory only the owner of an entry's inode, or of the directory, removes it.
    pub(crate) fn check_sticky(
        &self,
        directory: &Inode,
        inode: &Inode,
        path: &str,
    ) -> Result<(), MetaError> {
        if directory.mode & STICKY == 0 || self.owns(directory) || self.owns(inode) {
            return Ok(());
        }
        Err(MetaError::NotPermitted {
            path: path.into(),
            reason: format!(
                "the directory is sticky and belongs to uid {}, the entry to uid {}, the caller is uid {}",
                directory.uid, inode.uid, self.uid
            ),
        })
    }
}

#[cfg(test)]
mod tests {
    use threefs_core::ids::InodeId;

    use super::*;
    use crate::protocol::{InodeKind, Nanoseconds};

    fn inode(mode: u32) -> Inode {
        let time = Nanoseconds(0);
        Inode {
            id: InodeId(9),
            version: 1,
            kind: InodeKind::Symlink { target: "x".into() },
            mode,
            uid: 10,
            gid: 20,
            links: 1,
            accessed: time,
            modified: time,
            changed: time,
            quota: None,
        }
    }

    fn caller(uid: u32, gid: u32, groups: &[u32]) -> Identity {
        Identity { groups: groups.to_vec(), ..Identity::user(uid, gid) }
    }

    #[test]
    fn the_first_matching_class_decides() {
        let cases = [
            (0o700, caller(10, 1, &[]), READ | WRITE | EXECUTE, true),
            (0o077, caller(10, 20, &[]), READ, false),
            (0o070, caller(11, 20, &[]), READ | WRITE, true),
            (0o070, caller(11, 1, &[3, 20]), READ | WRITE, true),
            (0o707, caller(11, 20, &[]), READ, false),
            (0o004, caller(11, 21, &[]), READ, true),
            (0o004, caller(11, 21, &[]), READ | WRITE, false),
            (0o000, caller(0, 0, &[]), READ | WRITE, true),
            (0o000, caller(0, 0, &[]), EXECUTE, false),
            (0o001, caller(0, 0, &[]), EXECUTE, true),
        ];
        for (mode, caller, access, expected) in cases {
            assert_eq!(
                caller.allows(&inode(mode), access),
                expected,
                "{mode:o} {caller:?} {access}"
            );
        }
    }

    #[test]
    fn a_check_by_the_kernel_counts_for_the_group_class_only() {
        let checked = |uid| Identity { kernel_checked: true, ..caller(uid, 1, &[]) };
        assert!(checked(11).allows(&inode(0o770), READ | WRITE), "one of its groups may be 20");
        assert!(checked(11).allows(&inode(0o704), READ));
        assert!(!checked(11).allows(&inode(0o700), READ), "no group permits that");
        assert!(!checked(11).allows(&inode(0o754), WRITE));
        assert!(!checked(10).allows(&inode(0o077), READ), "the owner class decides");
        assert!(!caller(11, 1, &[]).allows(&inode(0o770), READ));
    }
}
