//! Changes of mode, owner and times.

use threefs_kv::{Operation, Transaction};

use crate::identity::Identity;
use crate::ops::lookup::{FinalSymlink, find};
use crate::ops::{Inputs, OpError, store, visible};
use crate::permission::{SET_GROUP, SET_USER, WRITE};
use crate::protocol::{At, Inode, MetaError, MetaReply, SetTime};

/// `MetaChange::SetAttributes`.
pub(crate) struct SetAttributes<'a> {
    pub caller: &'a Identity,
    pub at: &'a At,
    pub follow: bool,
    pub mode: Option<u32>,
    pub uid: Option<u32>,
    pub gid: Option<u32>,
    pub accessed: Option<SetTime>,
    pub modified: Option<SetTime>,
    pub inputs: Inputs,
}

impl Operation for SetAttributes<'_> {
    type Output = MetaReply;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<MetaReply, OpError> {
        let last = if self.follow { FinalSymlink::Follow } else { FinalSymlink::Keep };
        let mut row = find(txn, self.caller, self.at, last).await?;
        let inode = &mut row.inode;
        self.set_owner(inode)?;
        if let Some(mode) = self.mode {
            self.check_owner(inode, "can change its mode")?;
            inode.mode = mode & 0o7777;
            if !self.caller.is_root()
                && !self.caller.may_be_in_group(inode.gid)
                && !inode.is_directory()
            {
                inode.mode &= !SET_GROUP;
            }
        }
        self.check_times(inode)?;
        let time = |set: SetTime| match set {
            SetTime::Now => self.inputs.now,
            SetTime::At(time) => time,
        };
        inode.accessed = self.accessed.map_or(inode.accessed, time);
        inode.changed = self.inputs.now;
        if let Some(modified) = self.modified {
            inode.modified = time(modified);
        }
        store(txn, &mut row).await?;
        if self.modified.is_some() && row.inode.is_directory() {
            // The new time holds until the entries change again.
            txn.clear(&crate::rows::directory_time(row.inode.id));
        }
        Ok(MetaReply::Inode(visible(txn, row).await?))
    }
}

impl SetAttributes<'_> {
    /// Root changes the owner to any user, the owner changes the group to a group that it belongs to.
    /// The set-user and set-group bits are cleared.
    fn set_owner(&self, inode: &mut Inode) -> Result<(), OpError> {
        if self.uid.is_none() && self.gid.is_none() {
            return Ok(());
        }
        let same_user = self.uid.is_none_or(|uid| uid == inode.uid);
        let own_group =
            self.gid.is_none_or(|gid| gid == inode.gid || self.caller.may_be_in_group(gid));
        let may_change_mode =
            self.caller.is_root() || (self.caller.owns(inode) && same_user && own_group);
        if !may_change_mode {
            return Err(self.not_permitted("can set its group, to one of its own groups"));
        }
        inode.uid = self.uid.unwrap_or(inode.uid);
        inode.gid = self.gid.unwrap_or(inode.gid);
        if !inode.is_directory() && inode.mode & 0o111 != 0 {
            inode.mode &= !SET_USER;
            // Without the group's execute bit it means mandatory locking.
            if inode.mode & 0o010 != 0 {
                inode.mode &= !SET_GROUP;
            }
        }
        Ok(())
    }

    fn check_times(&self, inode: &Inode) -> Result<(), OpError> {
        let times = [self.accessed, self.modified];
        let explicit = times.iter().any(|time| matches!(time, Some(SetTime::At(_))));
        let now = times.iter().any(|time| matches!(time, Some(SetTime::Now)));
        if explicit {
            self.check_owner(inode, "can set its times")?;
        } else if now && !self.caller.owns(inode) {
            self.caller.check(inode, WRITE, &self.at.path)?;
        }
        Ok(())
    }

    fn check_owner(&self, inode: &Inode, what: &str) -> Result<(), OpError> {
        if self.caller.owns(inode) { Ok(()) } else { Err(self.not_permitted(what)) }
    }

    fn not_permitted(&self, what: &str) -> OpError {
        let reason = format!("only the owner {what}, and uid {} is not the owner", self.caller.uid);
        MetaError::NotPermitted { path: self.at.path.clone(), reason }.into()
    }
}
