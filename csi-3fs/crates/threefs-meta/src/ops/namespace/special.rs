//! Creation of FIFOs, sockets and devices: an inode and a name; the node's kernel does the rest.

use threefs_kv::{Operation, Transaction};

use crate::identity::Identity;
use crate::ops::lookup::{FinalSymlink, lookup_name};
use crate::ops::namespace::create::insert;
use crate::ops::{Inputs, NewInode, OpError};
use crate::protocol::{At, InodeKind, MetaError, MetaReply, SpecialKind};

/// `MetaChange::MakeSpecial`.
pub(crate) struct MakeSpecial<'a> {
    pub caller: &'a Identity,
    pub at: &'a At,
    pub mode: u32,
    pub kind: SpecialKind,
    pub device: u32,
    pub inputs: Inputs,
}

impl Operation for MakeSpecial<'_> {
    type Output = MetaReply;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<MetaReply, OpError> {
        let is_device =
            matches!(self.kind, SpecialKind::CharacterDevice | SpecialKind::BlockDevice);
        if is_device && !self.caller.is_root() {
            let reason = "only root creates devices".into();
            return Err(MetaError::NotPermitted { path: self.at.path.clone(), reason }.into());
        }
        let name_in = lookup_name(txn, self.caller, self.at, FinalSymlink::Keep).await?;
        if name_in.entry.is_some() {
            return Err(MetaError::Exists { path: self.at.path.clone() }.into());
        }
        name_in.check(self.caller, self.at)?;
        let (caller, inputs, parent, mode) =
            (self.caller, &self.inputs, &name_in.parent.inode, self.mode);
        let device = if is_device { self.device } else { 0 };
        let kind = InodeKind::Special { kind: self.kind, device };
        let mut row = NewInode { caller, parent, inputs, mode }.inode(inputs.first_inode, 1, kind);
        insert(txn, &name_in.parent, &name_in.name, &mut row, inputs).await?;
        Ok(MetaReply::Inode(row.inode))
    }
}
