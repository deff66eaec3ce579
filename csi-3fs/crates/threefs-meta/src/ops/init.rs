//! Initialization: the first rows of a tree, and allocation of inode numbers.

use threefs_core::ids::InodeId;
use threefs_kv::{KvError, Operation, Transaction};

use crate::ops::{OpError, store};
use crate::protocol::{Inode, InodeKind, LayoutDefaults, Nanoseconds, ROOT};
use crate::rows::{
    self, InodeRow, NEXT_INODE, ROUND, SCHEMA, SCHEMA_VERSION, SCHEMA_WITH_SNAPSHOTS,
    SCHEMAS_PREVIOUS,
};

/// Above the versions of every store: the rows may come from a dump of another one.
const ROUND_AFTER_VERSIONS: u64 = 1 << 62;

/// Creates the root if it is missing; upgrades a store of a previous schema and refuses any
/// other.
pub(crate) struct InitTree(pub Nanoseconds);

impl Operation for InitTree {
    type Output = ();
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<(), OpError> {
        match rows::read::<u64>(txn, SCHEMA).await? {
            Some(SCHEMA_VERSION | SCHEMA_WITH_SNAPSHOTS) => return Ok(()),
            Some(previous) if SCHEMAS_PREVIOUS.contains(&previous) => {
                // Removals in the queues have versions in place of rounds: all of them have ended.
                rows::write(txn, ROUND, &ROUND_AFTER_VERSIONS)?;
                return Ok(rows::write(txn, SCHEMA, &SCHEMA_VERSION)?);
            }
            None => {}
            Some(version) => {
                let detail = format!(
                    "the tree has schema {version}, this program has {SCHEMA_WITH_SNAPSHOTS}; run the version \
                     that wrote it"
                );
                return Err(KvError::bad_row(SCHEMA, detail).into());
            }
        }
        rows::write(txn, SCHEMA, &SCHEMA_VERSION)?;
        let inode = Inode {
            id: ROOT,
            version: 0,
            kind: InodeKind::Directory { parent: ROOT, defaults: LayoutDefaults::default() },
            mode: 0o755,
            uid: 0,
            gid: 0,
            links: 2,
            accessed: self.0,
            modified: self.0,
            changed: self.0,
            quota: None,
        };
        store(txn, &mut InodeRow::new(inode)).await
    }
}

/// Allocates this many inode numbers and returns the first. Numbers lost in a crash are never used.
pub(crate) struct ReserveInodes(pub u64);

impl Operation for ReserveInodes {
    type Output = InodeId;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<InodeId, OpError> {
        let first: u64 = rows::read(txn, NEXT_INODE).await?.unwrap_or(ROOT.0 + 1);
        rows::write(txn, NEXT_INODE, &(first + self.0))?;
        Ok(InodeId(first))
    }
}
