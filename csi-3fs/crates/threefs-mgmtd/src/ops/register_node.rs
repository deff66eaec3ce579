//! Registration of a node with its address and incarnation.

use threefs_core::ids::{Incarnation, RoutingVersion};
use threefs_core::routing::NodeInfo;
use threefs_kv::{Operation, Transaction};

use super::{Fence, OpError, fence, next_routing_version};
use crate::rows::{self, NodeRow};

/// Writes the node with `incarnation` as the current one, and records the previous one as former.
pub(crate) struct RegisterNode {
    pub fence: Fence,
    pub info: NodeInfo,
    pub incarnation: Incarnation,
}

impl Operation for RegisterNode {
    type Output = (RoutingVersion, NodeRow);
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<(RoutingVersion, NodeRow), OpError> {
        fence(txn, self.fence).await?;
        let key = rows::node(self.info.id);
        let before: Option<NodeRow> = rows::read(txn, &key).await?;
        let row = NodeRow::next(before, self.info.clone(), self.incarnation);
        rows::write(txn, &key, &row)?;
        let version = next_routing_version(txn).await?;
        Ok((version, row))
    }
}
