//! Makes directories, with what is missing above them if so asked.

use threefs_core::ids::InodeId;
use threefs_kv::{Operation, Transaction};

use super::create::insert;
use super::walk::{Last, Place, Slot, slot, split, walk};
use super::{Birth, Given, OpError, load, load_named, visible};
use crate::identity::Identity;
use crate::protocol::{At, InodeKind, LayoutDefaults, MetaError, MetaReply};
use crate::rows::InodeRow;

/// `MetaChange::MakeDirectory`. With `parents`, `given` holds an inode for each name of the path.
pub(crate) struct MakeDirectory<'a> {
    pub who: &'a Identity,
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
        self.defaults.validate()?;
        if !self.parents {
            let slot = slot(txn, self.who, self.at, Last::Keep).await?;
            if slot.found.is_some() {
                return Err(MetaError::Exists { path: self.at.path.clone() }.into());
            }
            let row = self.make(txn, &slot, self.given.first_inode).await?;
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
        slot: &Slot,
        id: InodeId,
    ) -> Result<InodeRow, OpError> {
        slot.check(self.who, self.at)?;
        let Slot { parent, name, .. } = slot;
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
        let (who, given, mode) = (self.who, &self.given, self.mode);
        let mut row = Birth { who, parent: &parent.inode, given, mode }.inode(id, 2, kind);
        row.name.clone_from(name);
        insert(txn, parent, name, &mut row, given).await?;
        Ok(row)
    }

    /// Walks every prefix of the path and makes what is missing.
    async fn make_all(&self, txn: &mut Transaction) -> Result<InodeRow, OpError> {
        let mut prefix = if self.at.path.starts_with('/') { "/".to_owned() } else { String::new() };
        let mut last = None;
        for (number, name) in (0..).zip(split(&self.at.path)) {
            prefix.push_str(name);
            let at = At { directory: self.at.directory, path: prefix.clone() };
            last = Some(match walk(txn, self.who, &at, Last::Follow).await? {
                Place::Bare(id) => load(txn, id, &prefix).await?,
                Place::Entry { found: Some(entry), .. } => load_named(txn, entry, &prefix).await?,
                Place::Entry { found: None, .. } => {
                    let slot = slot(txn, self.who, &at, Last::Follow).await?;
                    let id = InodeId(self.given.first_inode.0 + number);
                    self.make(txn, &slot, id).await?
                }
            });
            prefix.push('/');
        }
        let row = match last {
            Some(row) => row,
            None => super::walk::find(txn, self.who, self.at, Last::Follow).await?,
        };
        if !row.inode.is_directory() {
            return Err(MetaError::Exists { path: self.at.path.clone() }.into());
        }
        Ok(row)
    }
}
