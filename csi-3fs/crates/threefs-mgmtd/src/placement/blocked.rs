//! Why a replica on a draining node stays there.

use std::collections::BTreeSet;

use threefs_core::ids::{ChainId, NodeId};

use super::{Placement, PlannedMove, Rule, Use};

impl Placement {
    /// The replicas on draining nodes that have none of these moves, with the reason.
    pub(crate) fn without_place<'a>(
        &'a self,
        rule: &'a Rule,
        moves: &[PlannedMove],
    ) -> impl Iterator<Item = (ChainId, NodeId, String)> + 'a {
        let planned: BTreeSet<(ChainId, NodeId)> =
            moves.iter().map(|step| (step.chain, step.from)).collect();
        let places = self
            .chains
            .iter()
            .flat_map(|(chain, members)| members.nodes.iter().map(move |node| (*chain, *node)));
        places
            .filter(|(_, node)| self.state(*node) == Some(Use::Leaving))
            .filter(move |place| !planned.contains(place))
            .map(|(chain, from)| (chain, from, self.no_place(rule, chain, from)))
    }

    fn no_place(&self, rule: &Rule, chain: ChainId, from: NodeId) -> String {
        let has = |node: &NodeId| self.chains.get(&chain).is_some_and(|it| it.nodes.contains(node));
        let (mut dead, mut full, mut near, mut leaving) = (0, 0, 0, 0);
        for (node, site) in self.nodes.iter().filter(|(node, _)| !has(node)) {
            match site.state {
                Use::Dead => dead += 1,
                Use::Full => full += 1,
                Use::Leaving => leaving += 1,
                Use::Open => {
                    let planned = PlannedMove { chain, from, to: *node };
                    near += u32::from(!self.permits(rule, &planned));
                }
            }
        }
        let reasons = [
            (dead, "dead"),
            (full, "full, of unknown capacity, or had a move abandoned in the last ten minutes"),
            (near, "in a service, zone, rack or host with too many replicas of the chain"),
            (leaving, "drained too"),
        ];
        let reasons: Vec<String> = reasons
            .into_iter()
            .filter(|(count, _)| *count > 0)
            .map(|(count, reason)| format!("{count} are {reason}"))
            .collect();
        if reasons.is_empty() {
            return "all other nodes have a replica of the chain: add a node".into();
        }
        format!("of the nodes without a replica of the chain, {}", reasons.join(", "))
    }
}
