//! The domain rule: how many replicas of a chain a failure domain may have.

use std::collections::BTreeMap;

use threefs_core::ids::NodeId;
use threefs_core::location::{Level, Location};

use super::{Site, Use};

/// A level is enforced only as far as no domain must take more than this multiple of its share of
/// the data: a zone with one small node cannot hold a replica of every chain.
const OVERLOAD_MAX: u64 = 2;

type Named<'a> = (NodeId, &'a Site);

/// The domain rule of a topology.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Rule {
    /// Maximum number of replicas of a chain in a domain, by level; `None` = unlimited,
    /// because no domain is known.
    caps: [Option<u32>; 3],
    /// Whether the domain of some node is unknown, by level.
    partial: [bool; 3],
    /// Why a level does not separate all replicas.
    pub reasons: Vec<String>,
}

impl Rule {
    /// The rule of these nodes. Dead ones count, draining ones do not: the rule changes when an
    /// operator adds or drains nodes, and not with failures. A node without a domain counts as a
    /// separate domain, and has no influence on the limit of the others.
    pub(crate) fn new(nodes: &BTreeMap<NodeId, Site>, replicas: u32) -> Self {
        let sites: Vec<Named<'_>> = nodes
            .iter()
            .filter(|(_, site)| site.state != Use::Leaving)
            .map(|(node, site)| (*node, site))
            .collect();
        let mut rule = Self { caps: [None; 3], partial: [false; 3], reasons: Vec::new() };
        let mut reasons = Vec::new();
        // The innermost level first: a host fails more often than a zone.
        for level in Level::ALL.into_iter().rev() {
            let is_known = |named: &Named<'_>| named.1.location.domain(level).is_some();
            let (known, unknown): (Vec<Named<'_>>, Vec<Named<'_>>) =
                sites.iter().copied().partition(is_known);
            if known.is_empty() {
                continue;
            }
            let cap = rule.cap(&known, level, replicas);
            rule.caps[level as usize] = Some(cap);
            rule.partial[level as usize] = !unknown.is_empty();
            if let Some((first, _)) = unknown.first() {
                reasons.push(format!(
                    "{} of {} nodes have no {level}, for example {first}: their replicas may be in \
                     the {level} of another one of the chain; label them",
                    unknown.len(),
                    sites.len()
                ));
            } else if cap > 1 {
                let count = domains(&known, level).len();
                reasons.push(format!(
                    "{count} {level}s of these sizes cannot hold one of {replicas} replicas each: \
                     up to {cap} are in one {level}"
                ));
            }
        }
        reasons.reverse();
        Self { reasons, ..rule }
    }

    /// The outermost level at which all replicas of a chain are in different domains.
    pub(crate) fn level(&self) -> Option<Level> {
        let separates = |level: &Level| !self.partial[*level as usize];
        Level::ALL.into_iter().find(|level| self.cap_of(*level) == Some(1) && separates(level))
    }

    /// Maximum number of replicas of a chain in a domain of this level.
    pub(crate) fn cap_of(&self, level: Level) -> Option<u32> {
        self.caps[level as usize]
    }

    /// The number of replicas above the limits, over all domains.
    pub(crate) fn excess<'a>(&self, members: impl Iterator<Item = &'a Location> + Clone) -> u32 {
        let limited = Level::ALL.into_iter().filter_map(|level| Some((level, self.cap_of(level)?)));
        limited
            .map(|(level, cap)| {
                let mut counts: BTreeMap<&str, u32> = BTreeMap::new();
                for domain in members.clone().filter_map(|location| location.domain(level)) {
                    *counts.entry(domain).or_default() += 1;
                }
                counts.values().map(|count| count.saturating_sub(cap)).sum::<u32>()
            })
            .sum()
    }

    /// The smallest limit of a level with which all replicas can be placed, given the limits of the
    /// inner levels.
    fn cap(&self, sites: &[Named<'_>], level: Level, replicas: u32) -> u32 {
        let total = weight(sites);
        let all = u64::from(replicas) * total;
        let placed = |cap: u32| self.supply(sites, level, cap, total, replicas).min(all);
        (1..replicas).find(|cap| placed(*cap) >= placed(replicas)).unwrap_or(replicas.max(1))
    }

    /// How many replicas of a chain these nodes can take with this limit of a level and those of
    /// the inner ones, times the weight of all nodes.
    fn supply(
        &self,
        sites: &[Named<'_>],
        level: Level,
        cap: u32,
        total: u64,
        replicas: u32,
    ) -> u64 {
        let share = |weight: u64| OVERLOAD_MAX * u64::from(replicas) * weight;
        let inner = Level::ALL.into_iter().filter(|inner| *inner > level);
        let inner = inner.filter_map(|inner| Some((inner, self.cap_of(inner)?))).next();
        let domain = |inside: &Vec<Named<'_>>| {
            let supply = match inner {
                Some((inner, cap)) => self.supply(inside, inner, cap, total, replicas),
                None => services(inside).map(|weight| total.min(share(weight))).sum(),
            };
            supply.min(u64::from(cap) * total).min(share(weight(inside)))
        };
        domains(sites, level).iter().map(domain).sum()
    }
}

fn weight(sites: &[Named<'_>]) -> u64 {
    sites.iter().map(|(_, site)| u64::from(site.weight)).sum()
}

/// The weight of each service: it takes one replica of a chain, on one of its disks.
fn services(sites: &[Named<'_>]) -> impl Iterator<Item = u64> {
    let mut services: BTreeMap<NodeId, u64> = BTreeMap::new();
    for (node, site) in sites {
        *services.entry(node.service()).or_default() += u64::from(site.weight);
    }
    services.into_values()
}

/// The nodes of each domain, and each node without one.
fn domains<'a>(sites: &[Named<'a>], level: Level) -> Vec<Vec<Named<'a>>> {
    let mut domains: BTreeMap<&str, Vec<Named<'a>>> = BTreeMap::new();
    let mut single = Vec::new();
    for (node, site) in sites {
        match site.location.domain(level) {
            Some(domain) => domains.entry(domain).or_default().push((*node, *site)),
            None => single.push(vec![(*node, *site)]),
        }
    }
    domains.into_values().chain(single).collect()
}
