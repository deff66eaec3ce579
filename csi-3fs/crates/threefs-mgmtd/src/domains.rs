//! Placement in the manager: its inputs, the initial chains, the report of failure domains, and the
//! rate of moves.

use std::collections::{BTreeMap, BTreeSet};

use threefs_core::ids::{ChainId, NodeId};
use threefs_core::routing::Chain;
use threefs_core::time::Millis;

use crate::growth::{unused, waits};
use crate::manager::{Manager, deadline};
use crate::ops::{MakeChains, OpError, SetMoveRate};
use crate::pace::Pace;
use crate::placement::{Members, Placement, Rule, Site, Use, WEIGHT_MAX, worst_share};
use crate::protocol::MgmtdError;
use crate::report::{DomainReport, DomainViolation};
use crate::view::View;

impl Manager {
    /// Failure domains of the cluster.
    ///
    /// # Errors
    /// [`MgmtdError::NotPrimary`].
    pub async fn domains(&self, now: Millis) -> Result<DomainReport, MgmtdError> {
        let mut role = self.role.lock().await;
        let view = self.view(&mut role, now)?;
        Ok(self.domain_report(view, now))
    }

    /// The placement after all moves in progress.
    pub(crate) fn placement(
        &self,
        view: &View,
        now: Millis,
        leaving: &BTreeSet<NodeId>,
    ) -> Placement {
        let nodes_of = |chain: &Chain| -> BTreeSet<NodeId> {
            let source = view.routing.moves.get(&chain.id).map(|this| this.source);
            let stays = chain.targets.iter().filter(|place| Some(place.target) != source);
            stays.map(|place| place.node).collect()
        };
        let sizes = view.sizes();
        let chains: BTreeMap<ChainId, Members> = view
            .routing
            .chains
            .values()
            .map(|chain| {
                let size = sizes.get(&chain.id).copied().unwrap_or(1);
                (chain.id, Members { nodes: nodes_of(chain), size })
            })
            .collect();
        let occupied: BTreeSet<NodeId> =
            chains.values().flat_map(|chain| chain.nodes.iter().copied()).collect();
        let (full, weights) = (view.full(now), view.weights());
        let state = |node: &NodeId| {
            if leaving.contains(node) {
                Use::Leaving
            } else if !view.is_alive(*node, &self.timers, now) {
                Use::Dead
            } else if full.contains(node) || !view.capacities.contains_key(node) {
                Use::Full
            } else {
                Use::Open
            }
        };
        let nodes = view.nodes.iter().map(|(node, row)| {
            let weight = weights.get(node).copied().unwrap_or(WEIGHT_MAX);
            (*node, Site { location: row.info.location.clone(), weight, state: state(node) })
        });
        // A node that was removed after it was drained has no part in the domain rule.
        let nodes = nodes.filter(|(node, site)| site.state != Use::Dead || occupied.contains(node));
        let unavailable = self.unavailable(view, now);
        let starts = |chain: &&Chain| chain.head().is_none() && waits(chain, &unavailable);
        let waiting = unused(view).filter(starts).count();
        Placement { chains, nodes: nodes.collect(), replicas: self.bootstrap.replicas, waiting }
    }

    /// Nodes of the initial chains, and the domain rule.
    pub(crate) fn first_chains(&self, view: &View, now: Millis) -> (Vec<Vec<NodeId>>, Rule) {
        let mut placement = self.placement(view, now, &BTreeSet::new());
        placement.nodes.values_mut().for_each(|site| site.state = Use::Open);
        let rule = placement.rule();
        (placement.new_chains(&rule, self.bootstrap.chains_per_node), rule)
    }

    /// The domain rule and the chains that violate it after the moves in progress.
    pub(crate) fn domain_report(&self, view: &View, now: Millis) -> DomainReport {
        let placement = self.placement(view, now, &view.goal.leaving);
        let rule = placement.rule();
        let mut violations: Vec<DomainViolation> = placement
            .violations(&rule)
            .map(|(chain, members)| DomainViolation {
                chain,
                nodes: members.nodes.iter().copied().collect(),
            })
            .collect();
        let violations_total = violations.len() as u32;
        violations.truncate(DomainReport::VIOLATIONS_MAX);
        DomainReport {
            level: rule.level(),
            failover_share: worst_share(&placement, &rule),
            reasons: rule.reasons,
            violations,
            violations_total,
        }
    }

    /// Creates the initial chains, once all expected nodes are alive.
    pub(crate) async fn make_chains(&self, view: &mut View, now: Millis) -> Result<(), OpError> {
        if !view.routing.chains.is_empty() {
            return Ok(());
        }
        let nodes: Vec<NodeId> = view.nodes.keys().copied().collect();
        let alive = nodes.iter().all(|node| view.is_alive(*node, &self.timers, now));
        let may_make = view.may_make_chains(&self.timers, now);
        // A service registers its disks one after the other; later ones get chains as new nodes do.
        let services: BTreeSet<NodeId> = nodes.iter().map(|node| node.service()).collect();
        if services.len() < self.bootstrap.nodes as usize || !alive || !may_make {
            return Ok(());
        }
        let (chains, rule) = self.first_chains(view, now);
        let make = MakeChains { fence: view.fence, nodes: &chains };
        let new_chains = self.store.transact(deadline(), &make).await?;
        let Some((version, chains, table)) = new_chains else { return Ok(()) };
        let level = rule.level().map_or("service".into(), |level| level.to_string());
        tracing::info!(
            chains = chains.len(),
            nodes = nodes.len(),
            separated_by = level,
            "initial chains created"
        );
        rule.reasons.iter().for_each(|reason| tracing::info!("{reason}"));
        view.routing.tables.push(table);
        self.apply(view, version, chains);
        Ok(())
    }

    /// The limit of the bytes per second that moves copy, 0 for none, after it is set to
    /// `bytes_per_second` if given.
    ///
    /// # Errors
    /// [`MgmtdError::NotPrimary`].
    pub async fn move_rate(
        &self,
        bytes_per_second: Option<u64>,
        now: Millis,
    ) -> Result<u64, MgmtdError> {
        let mut role = self.role.lock().await;
        let view = self.view(&mut role, now)?;
        let Some(bytes_per_second) = bytes_per_second else {
            return Ok(view.pace.bytes_per_second);
        };
        let set = SetMoveRate { fence: view.fence, bytes_per_second };
        let result: Result<(), OpError> = self.store.transact(deadline(), &set).await;
        if result.is_ok() {
            view.pace = Pace::new(bytes_per_second);
            tracing::info!(bytes_per_second, "limit of moves changed");
        }
        self.reply_or_step_down(&mut role, result.map_err(Into::into))?;
        Ok(bytes_per_second)
    }
}
