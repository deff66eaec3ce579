//! Remembers a node, its address and its present life.

use threefs_core::ids::{Incarnation, RoutingVersion};
use threefs_core::routing::NodeInfo;
use threefs_kv::{Operation, Transaction};

use super::{Fence, OpError, fence, next_routing_version};
use crate::rows::{self, FORMER_LIVES_MAX, NodeRow};

/// Writes the node with `incarnation` as its present life; the life before joins the former ones.
pub(crate) struct RegisterNode {
    pub own: Fence,
    pub info: NodeInfo,
    pub incarnation: Incarnation,
}

impl Operation for RegisterNode {
    type Output = (RoutingVersion, NodeRow);
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<(RoutingVersion, NodeRow), OpError> {
        fence(txn, self.own).await?;
        let key = rows::node(self.info.id);
        let before: Option<NodeRow> = rows::read(txn, &key).await?;
        let mut former_lives = Vec::new();
        if let Some(before) = before {
            former_lives = before.former_lives;
            if before.incarnation != self.incarnation {
                former_lives.push(before.incarnation);
            }
            let surplus = former_lives.len().saturating_sub(FORMER_LIVES_MAX);
            former_lives.drain(..surplus);
        }
        let row = NodeRow { info: self.info.clone(), incarnation: self.incarnation, former_lives };
        rows::write(txn, &key, &row)?;
        let version = next_routing_version(txn).await?;
        Ok((version, row))
    }
}
