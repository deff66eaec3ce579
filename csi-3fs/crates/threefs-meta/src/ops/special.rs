//! Makes FIFOs, sockets and devices: an inode and a name. The kernel of each node does the rest.

use threefs_kv::{Operation, Transaction};

use super::create::insert;
use super::walk::{Last, slot};
use super::{Birth, Given, OpError};
use crate::identity::Identity;
use crate::protocol::{At, InodeKind, MetaError, MetaReply, SpecialKind};

/// `MetaChange::MakeSpecial`.
pub(crate) struct MakeSpecial<'a> {
    pub who: &'a Identity,
    pub at: &'a At,
    pub mode: u32,
    pub kind: SpecialKind,
    pub device: u32,
    pub given: Given,
}

impl Operation for MakeSpecial<'_> {
    type Output = MetaReply;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<MetaReply, OpError> {
        let is_device =
            matches!(self.kind, SpecialKind::CharacterDevice | SpecialKind::BlockDevice);
        if is_device && !self.who.is_root() {
            let reason = "only root makes devices".into();
            return Err(MetaError::NotPermitted { path: self.at.path.clone(), reason }.into());
        }
        let slot = slot(txn, self.who, self.at, Last::Keep).await?;
        if slot.found.is_some() {
            return Err(MetaError::Exists { path: self.at.path.clone() }.into());
        }
        slot.check(self.who, self.at)?;
        let (who, given, parent, mode) = (self.who, &self.given, &slot.parent.inode, self.mode);
        let device = if is_device { self.device } else { 0 };
        let kind = InodeKind::Special { kind: self.kind, device };
        let mut row = Birth { who, parent, given, mode }.inode(given.first_inode, 1, kind);
        insert(txn, &slot.parent, &slot.name, &mut row, given).await?;
        Ok(MetaReply::Inode(row.inode))
    }
}
