//! Storing that the cluster has snapshots.

use threefs_kv::{Operation, Transaction};

use super::{Fence, OpError, fence};
use crate::rows::SNAPSHOTS;

/// From now on, earlier releases of mgmtd cannot become the primary.
pub(crate) struct EnableSnapshots(pub Fence);

impl Operation for EnableSnapshots {
    type Output = ();
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<(), OpError> {
        fence(txn, self.0).await?;
        txn.set(SNAPSHOTS, []);
        Ok(())
    }
}
