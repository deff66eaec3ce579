//! Makes directories, with what is missing above them if so asked.

use threefs_core::ids::InodeId;
use threefs_kv::{Operation, Transaction};

use super::create::insert;
use super::walk::{Last, Place, Slot, slot, split, walk};
use super::{Given, OpError, load, load_named, new_inode, visible};
use crate::protocol::{At, InodeKind, LayoutDefaults, MetaError, MetaReply};
use crate::rows::InodeRow;

/// `MetaChange::MakeDirectory`. With `parents`, `given` holds an inode for each name of the path.
pub(crate) struct MakeDirectory<'a> {
    pub at: &'a At,
    pub mode: u32,
    pub parents: bool,
    pub defaults: LayoutDefaults,
    pub given: Given,
}

/// How many names a path has, so how many inodes making all of it can need.
pub(crate) fn names_of(path: &str) -> u64 {
    split(path).count() as u64
}

impl Operation for MakeDirectory<'_> {
    type Output = MetaReply;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<MetaReply, OpError> {
        if !self.parents {
            let Slot { parent, name, found } = slot(txn, self.at, Last::Keep).await?;
            if found.is_some() {
                return Err(MetaError::Exists { path: self.at.path.clone() }.into());
            }
            let row = self.make(txn, &parent, &name, self.given.first_inode)?;
            return Ok(MetaReply::Inode(row.inode));
        }
        let row = self.make_all(txn).await?;
        Ok(MetaReply::Inode(visible(txn, row).await?))
    }
}

impl MakeDirectory<'_> {
    fn make(
        &self,
        txn: &mut Transaction,
        parent: &InodeRow,
        name: &str,
        id: InodeId,
    ) -> Result<InodeRow, OpError> {
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
        let mut row = new_inode(&self.given, id, self.mode, 2, kind);
        row.name = name.into();
        insert(txn, parent, name, &row, &self.given)?;
        Ok(row)
    }

    /// Walks every prefix of the path and makes what is missing.
    async fn make_all(&self, txn: &mut Transaction) -> Result<InodeRow, OpError> {
        let mut prefix = if self.at.path.starts_with('/') { "/".to_owned() } else { String::new() };
        let mut last = None;
        for (number, name) in (0..).zip(split(&self.at.path)) {
            prefix.push_str(name);
            let at = At { directory: self.at.directory, path: prefix.clone() };
            last = Some(match walk(txn, &at, Last::Follow).await? {
                Place::Bare(id) => load(txn, id, &prefix).await?,
                Place::Entry { found: Some(entry), .. } => load_named(txn, entry, &prefix).await?,
                Place::Entry { found: None, .. } => {
                    let Slot { parent, name, .. } = slot(txn, &at, Last::Follow).await?;
                    self.make(txn, &parent, &name, InodeId(self.given.first_inode.0 + number))?
                }
            });
            prefix.push('/');
        }
        let row = match last {
            Some(row) => row,
            None => super::walk::find(txn, self.at, Last::Follow).await?,
        };
        if !row.inode.is_directory() {
            return Err(MetaError::Exists { path: self.at.path.clone() }.into());
        }
        Ok(row)
    }
}
