//! Registration state of the store: its tree, generation, cluster and claim.

use threefs_core::ids::{ClusterId, TreeId};
use threefs_kv::{Operation, Transaction};
use threefs_mgmtd::{Claim, MetaRegistered, MetaRegistration};

use crate::ops::OpError;
use crate::protocol::ROOT;
use crate::rows::{self, CLAIM, CLUSTER, GENERATION, NEXT_INODE, PROCESS, TREE};

/// Inode numbers of each adopted store: there is room for two thousand adoptions, and in each for
/// four thousand restores.
const INODES_PER_ADOPTION: u64 = 1 << 52;

/// Increments the generation of the store, durably, and returns the registration request.
pub(crate) struct StartRegistration {
    /// The id of the tree if it has none yet.
    pub fresh: TreeId,
    pub process: u128,
}

impl Operation for StartRegistration {
    type Output = MetaRegistration;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<MetaRegistration, OpError> {
        let tree = match rows::read(txn, TREE).await? {
            Some(tree) => tree,
            None => {
                rows::write(txn, TREE, &self.fresh)?;
                self.fresh
            }
        };
        let generation = rows::read::<u64>(txn, GENERATION).await?.unwrap_or(0) + 1;
        rows::write(txn, GENERATION, &generation)?;
        rows::write(txn, PROCESS, &self.process)?;
        registration(txn, tree, generation, self.process).await
    }
}

async fn registration(
    txn: &mut Transaction,
    tree: TreeId,
    generation: u64,
    process: u128,
) -> Result<MetaRegistration, OpError> {
    let cluster = rows::read::<ClusterId>(txn, CLUSTER).await?;
    let claim = rows::read::<Claim>(txn, CLAIM).await?.unwrap_or_default();
    Ok(MetaRegistration { tree, generation, process, cluster, claim })
}

/// The registration request of the service that has started last over the store.
pub(crate) struct LatestRegistration;

impl Operation for LatestRegistration {
    type Output = Option<MetaRegistration>;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<Self::Output, OpError> {
        let tree = rows::read(txn, TREE).await?;
        let generation = rows::read(txn, GENERATION).await?;
        let process = rows::read(txn, PROCESS).await?;
        let (Some(tree), Some(generation), Some(process)) = (tree, generation, process) else {
            return Ok(None);
        };
        registration(txn, tree, generation, process).await.map(Some)
    }
}

/// Stores the reply of mgmtd.
pub(crate) struct FinishRegistration {
    pub registered: MetaRegistered,
}

impl Operation for FinishRegistration {
    type Output = ();
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<(), OpError> {
        let MetaRegistered { cluster, generation, adoptions } = self.registered;
        rows::write(txn, CLUSTER, &cluster)?;
        // Another service may have started over the store since.
        let stored = rows::read::<u64>(txn, GENERATION).await?.unwrap_or(0);
        rows::write(txn, GENERATION, &generation.max(stored))?;
        if rows::read::<Claim>(txn, CLAIM).await? == Some(Claim::Adopted) {
            let next: u64 = rows::read(txn, NEXT_INODE).await?.unwrap_or(ROOT.0 + 1);
            let first = u64::from(adoptions).saturating_mul(INODES_PER_ADOPTION);
            rows::write(txn, NEXT_INODE, &next.max(first))?;
        }
        txn.clear(CLAIM);
        Ok(())
    }
}

/// Stores a decision of the operator for the next registration.
pub(crate) struct WriteClaim(pub Claim);

impl Operation for WriteClaim {
    type Output = ();
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<(), OpError> {
        Ok(rows::write(txn, CLAIM, &self.0)?)
    }
}
