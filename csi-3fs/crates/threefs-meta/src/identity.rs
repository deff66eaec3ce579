//! Caller identity.

use serde::{Deserialize, Serialize};
use threefs_core::ids::InodeId;

/// Supplementary groups that are checked, as many as Linux allows a process.
pub const GROUPS_MAX: usize = 65_536;

/// The caller of an operation. A client with the cluster key states the caller: a mount uses the
/// process that made the system call.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Identity {
    /// The user; 0 has all permissions.
    pub uid: u32,
    /// The primary group, which new files get.
    pub gid: u32,
    /// Supplementary groups.
    pub groups: Vec<u32>,
    /// The kernel of the mount has checked mode and owner for all groups of the caller, of which
    /// the request names only one. Its decision stands where the group class applies; the owner and
    /// other classes are checked again here.
    pub kernel_checked: bool,
    /// Permissions beyond mode and owner.
    pub role: Role,
    /// The directory that the caller sees as the root, if its credential is restricted to one. Set
    /// by the service, never by a request.
    #[serde(skip)]
    pub scope: Option<InodeId>,
}

/// Permissions beyond mode and owner.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Role {
    /// Nothing.
    #[default]
    User,
    /// Manages volumes: reads and changes reserved attributes. Its paths contain no symbolic link
    /// and no `..`, because tenants control both.
    ControlPlane,
}

impl Identity {
    /// Root, with all permissions.
    pub const ROOT: Self = Self::user(0, 0);
    /// The control plane, which manages volumes.
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

    /// Whether this is the control plane.
    pub fn is_control_plane(&self) -> bool {
        self.role == Role::ControlPlane
    }

    /// Whether this is root.
    pub fn is_root(&self) -> bool {
        self.uid == 0
    }

    /// Whether the caller is in this group, as far as the request names its groups.
    pub fn in_group(&self, gid: u32) -> bool {
        self.gid == gid || self.groups.contains(&gid)
    }

    /// Whether the caller may be in this group; the kernel has checked it.
    pub fn may_be_in_group(&self, gid: u32) -> bool {
        self.kernel_checked || self.in_group(gid)
    }
}
