//! Who asks, and what modes and owners allow him.

use serde::{Deserialize, Serialize};
use threefs_core::ids::InodeId;

use crate::error::MetaError;
use crate::protocol::inode::Inode;

/// May list a directory, read a file.
pub const READ: u32 = 4;
/// May change a directory's names, a file's content.
pub const WRITE: u32 = 2;
/// May go through a directory, execute a file.
pub const EXECUTE: u32 = 1;
/// Who is in a directory with this bit removes or renames only what is his (or if the directory is).
pub const STICKY: u32 = 0o1000;
/// What is made in a directory with this bit has the directory's group.
pub const SET_GROUP: u32 = 0o2000;
/// A program with this bit runs as its owner.
pub const SET_USER: u32 = 0o4000;
/// Groups besides the first one that are looked at, as many as Linux gives a process at most.
pub const GROUPS_MAX: usize = 65_536;

/// The caller of an operation. The cluster's key lets a client say for whom it asks: a mount says
/// it of the process that made the system call.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Identity {
    /// The user; 0 may do everything.
    pub uid: u32,
    /// The group that new files get.
    pub gid: u32,
    /// Further groups.
    pub groups: Vec<u32>,
    /// The kernel of the mount has checked modes and owners for all groups of the caller, of which
    /// the request names one only. Where the group of an inode decides, its word stands; the
    /// classes of the owner and of others are checked here nevertheless.
    pub kernel_checked: bool,
    /// What it may do besides.
    pub role: Role,
    /// The directory that is all of the tree for this caller, if its credential is for one. The
    /// service sets it; nothing that a caller sends does.
    #[serde(skip)]
    pub scope: Option<InodeId>,
}

/// What a caller may do besides what modes and owners allow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Role {
    /// Nothing.
    #[default]
    User,
    /// Manages volumes: sees and changes reserved attributes. Its paths lead through no symbolic
    /// link and never upwards, because tenants make both.
    ControlPlane,
}

impl Identity {
    /// Who may do everything.
    pub const ROOT: Self = Self::user(0, 0);
    /// Who manages volumes.
    pub const CONTROL_PLANE: Self = Self {
        uid: 0,
        gid: 0,
        groups: Vec::new(),
        kernel_checked: false,
        role: Role::ControlPlane,
        scope: None,
    };

    /// A user with one group.
    pub const fn user(uid: u32, gid: u32) -> Self {
        Self { uid, gid, groups: Vec::new(), kernel_checked: false, role: Role::User, scope: None }
    }

    /// True for who manages volumes.
    pub fn is_control_plane(&self) -> bool {
        self.role == Role::ControlPlane
    }

    /// True for who may do everything.
    pub fn is_root(&self) -> bool {
        self.uid == 0
    }

    /// Whether one of his groups is this one, as far as the request names them.
    pub fn in_group(&self, gid: u32) -> bool {
        self.gid == gid || self.groups.contains(&gid)
    }

    /// Whether one of his groups may be this one: the kernel knows, and has checked.
    pub fn may_be_in_group(&self, gid: u32) -> bool {
        self.kernel_checked || self.in_group(gid)
    }

    /// Whether the inode is his, or he may do everything.
    pub fn owns(&self, inode: &Inode) -> bool {
        self.is_root() || self.uid == inode.uid
    }

    /// Whether modes and owners allow all of `access` ([`READ`] | [`WRITE`] | [`EXECUTE`]). The
    /// class that fits first decides, even where a later one would allow more.
    pub fn allowed(&self, inode: &Inode, access: u32) -> bool {
        if self.is_root() {
            let executable = inode.is_directory() || inode.mode & 0o111 != 0;
            return access & EXECUTE == 0 || executable;
        }
        let granted = if self.uid == inode.uid {
            inode.mode >> 6
        } else if self.in_group(inode.gid) {
            inode.mode >> 3
        } else if self.kernel_checked {
            inode.mode | inode.mode >> 3
        } else {
            inode.mode
        };
        granted & access == access
    }

    /// `allowed`, or the error of it.
    pub(crate) fn check(&self, inode: &Inode, access: u32, path: &str) -> Result<(), MetaError> {
        if self.allowed(inode, access) {
            return Ok(());
        }
        let wanted: String = [(READ, 'r'), (WRITE, 'w'), (EXECUTE, 'x')]
            .iter()
            .filter_map(|(bit, letter)| (access & bit != 0).then_some(*letter))
            .collect();
        Err(MetaError::PermissionDenied {
            path: if path.is_empty() { inode.id.to_string() } else { path.into() },
            detail: format!(
                "uid {} gid {} wants {wanted} of {} with mode {:o}, owner {}, group {}",
                self.uid, self.gid, inode.id, inode.mode, inode.uid, inode.gid
            ),
        })
    }

    /// In a sticky directory only the owner of a name's inode, or of the directory, removes it.
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
                "its directory is sticky, it belongs to uid {}, the directory to uid {}, \
                 and uid {} asks",
                inode.uid, directory.uid, self.uid
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
    fn the_first_class_that_fits_decides() {
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
                caller.allowed(&inode(mode), access),
                expected,
                "{mode:o} {caller:?} {access}"
            );
        }
    }

    #[test]
    fn where_the_kernel_has_checked_only_the_group_class_is_left_to_it() {
        let checked = |uid| Identity { kernel_checked: true, ..caller(uid, 1, &[]) };
        assert!(checked(11).allowed(&inode(0o770), READ | WRITE), "one of its groups may be 20");
        assert!(checked(11).allowed(&inode(0o704), READ));
        assert!(!checked(11).allowed(&inode(0o700), READ), "no group could give it that");
        assert!(!checked(11).allowed(&inode(0o754), WRITE));
        assert!(!checked(10).allowed(&inode(0o077), READ), "the owner's class decides for him");
        assert!(!caller(11, 1, &[]).allowed(&inode(0o770), READ));
    }
}
