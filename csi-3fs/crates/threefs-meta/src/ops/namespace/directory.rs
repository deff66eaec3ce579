//! Creation of directories, optionally with missing parents.

use threefs_core::ids::InodeId;
use threefs_kv::{Operation, Transaction};

use crate::identity::Identity;
use crate::ops::lookup::{FinalSymlink, NameInDirectory, Resolved, lookup, lookup_name, split};
use crate::ops::namespace::create::insert;
use crate::ops::{Inputs, NewInode, OpError, load, load_named, visible};
use crate::protocol::{At, InodeKind, LayoutDefaults, MetaError, MetaReply};
use crate::rows::InodeRow;

/// `MetaChange::MakeDirectory`. With `parents`, `inputs` holds an inode for each name of the path.
pub(crate) struct MakeDirectory<'a> {
    pub caller: &'a Identity,
    pub at: &'a At,
    pub mode: u32,
    pub parents: bool,
    pub defaults: LayoutDefaults,
    pub inputs: Inputs,
}

/// Number of names in a path: the inodes that creating all of it can need.
pub(crate) fn count_names(path: &str) -> u64 {
    split(path).count() as u64
}

impl Operation for MakeDirectory<'_> {
    type Output = MetaReply;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<MetaReply, OpError> {
        self.defaults.validate()?;
        if !self.parents {
            let name_in = lookup_name(txn, self.caller, self.at, FinalSymlink::Keep).await?;
            if name_in.entry.is_some() {
                return Err(MetaError::Exists { path: self.at.path.clone() }.into());
            }
            let row = self.make(txn, &name_in, self.inputs.first_inode).await?;
            return Ok(MetaReply::Inode(row.inode));
        }
        let row = self.make_all(txn).await?;
        Ok(MetaReply::Inode(visible(txn, row).await?))
    }
}

impl MakeDirectory<'_> {
    async fn make(
        &self,
        txn: &mut Transaction,
        name_in: &NameInDirectory,
        id: InodeId,
    ) -> Result<InodeRow, OpError> {
        name_in.check(self.caller, self.at)?;
        let NameInDirectory { parent, name, .. } = name_in;
        let mut defaults = self.defaults;
        if let InodeKind::Directory { defaults: inherited, .. } = parent.inode.kind {
            if defaults.chunk_bytes == 0 {
                defaults.chunk_bytes = inherited.chunk_bytes;
            }
            if defaults.stripe == 0 {
                defaults.stripe = inherited.stripe;
            }
        }
        let kind = InodeKind::Directory { parent: parent.inode.id, defaults };
        let (caller, inputs, mode) = (self.caller, &self.inputs, self.mode);
        let mut row = NewInode { caller, parent: &parent.inode, inputs, mode }.inode(id, 2, kind);
        row.name.clone_from(name);
        insert(txn, parent, name, &mut row, inputs).await?;
        Ok(row)
    }

    /// Looks up every prefix of the path and creates what is missing.
    async fn make_all(&self, txn: &mut Transaction) -> Result<InodeRow, OpError> {
        let mut prefix = if self.at.path.starts_with('/') { "/".to_owned() } else { String::new() };
        let mut last = None;
        for (number, name) in (0..).zip(split(&self.at.path)) {
            prefix.push_str(name);
            let at = At { directory: self.at.directory, path: prefix.clone() };
            last = Some(match lookup(txn, self.caller, &at, FinalSymlink::Follow).await? {
                Resolved::Inode(id) => load(txn, id, &prefix).await?,
                Resolved::Entry { entry: Some(entry), .. } => {
                    load_named(txn, entry, &prefix).await?
                }
                Resolved::Entry { entry: None, .. } => {
                    let name_in = lookup_name(txn, self.caller, &at, FinalSymlink::Follow).await?;
                    let id = InodeId(self.inputs.first_inode.0 + number);
                    self.make(txn, &name_in, id).await?
                }
            });
            prefix.push('/');
        }
        let row = match last {
            Some(row) => row,
            None => {
                crate::ops::lookup::find(txn, self.caller, self.at, FinalSymlink::Follow).await?
            }
        };
        if !row.inode.is_directory() {
            return Err(MetaError::Exists { path: self.at.path.clone() }.into());
        }
        Ok(row)
    }
}
