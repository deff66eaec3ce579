//! Storing of the nodes' capacities.

use threefs_core::ids::NodeId;
use threefs_kv::{Operation, Transaction};

use super::{Fence, OpError, fence};
use crate::rows;

/// Stores the capacities of these nodes, in bytes.
pub(crate) struct SetCapacities<'a> {
    pub fence: Fence,
    pub capacities: &'a [(NodeId, u64)],
}

impl Operation for SetCapacities<'_> {
    type Output = ();
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<(), OpError> {
        fence(txn, self.fence).await?;
        for (node, bytes) in self.capacities {
            rows::write(txn, &rows::capacity(*node), bytes)?;
        }
        Ok(())
    }
}
