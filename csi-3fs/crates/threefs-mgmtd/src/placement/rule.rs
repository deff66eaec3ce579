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
    /// because a node's domain is unknown.
    caps: [Option<u32>; 3],
    /// Why a level does not separate all replicas.
    pub reasons: Vec<String>,
}

impl Rule {
    /// The rule of these nodes. Dead ones count, draining ones do not: the rule changes when an
    /// operator adds or drains nodes, and not with failures.
    pub(crate) fn new(nodes: &BTreeMap<NodeId, Site>, replicas: u32) -> Self {
        let sites: Vec<Named<'_>> = nodes
            .iter()
            .filter(|(_, site)| site.state != Use::Leaving)
            .map(|(node, site)| (*node, site))
            .collect();
        let mut rule = Self { caps: [None; 3], reasons: Vec::new() };
        let mut reasons = Vec::new();
        // The innermost level first: a host fails more often than a zone.
        for level in Level::ALL.into_iter().rev() {
            match rule.cap(&sites, level, replicas) {
                Ok(cap) => {
                    rule.caps[level as usize] = Some(cap);
                    if cap > 1 {
                        let count = domains(&sites, level).len();
                        reasons.push(format!(
                            "{count} {level}s of these sizes cannot hold one of {replicas} \
                             replicas each: up to {cap} are in one {level}"
                        ));
                    }
                }
                Err(reason) => reasons.extend(reason),
            }
        }
        reasons.reverse();
        Self { reasons, ..rule }
    }

    /// The outermost level at which all replicas of a chain are in different domains.
    pub(crate) fn level(&self) -> Option<Level> {
        Level::ALL.into_iter().find(|level| self.cap_of(*level) == Some(1))
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
    fn cap(&self, sites: &[Named<'_>], level: Level, replicas: u32) -> Result<u32, Option<String>> {
        let unknown: Vec<NodeId> = sites
            .iter()
            .filter(|(_, site)| site.location.domain(level).is_none())
            .map(|(node, _)| *node)
            .collect();
        if let Some(first) = unknown.first() {
            let reason = format!(
                "{level}s are not used: {} of {} nodes have none, for example {first}",
                unknown.len(),
                sites.len()
            );
            return Err((unknown.len() < sites.len()).then_some(reason));
        }
        let total = weight(sites);
        let all = u64::from(replicas) * total;
        let placed = |cap: u32| self.supply(sites, level, cap, total, replicas).min(all);
        Ok((1..replicas).find(|cap| placed(*cap) >= placed(replicas)).unwrap_or(replicas.max(1)))
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
        let node = |site: &Site| total.min(share(u64::from(site.weight)));
        let inner = Level::ALL.into_iter().filter(|inner| *inner > level);
        let inner = inner.filter_map(|inner| Some((inner, self.cap_of(inner)?))).next();
        let domain = |inside: &Vec<Named<'_>>| {
            let supply = match inner {
                Some((inner, cap)) => self.supply(inside, inner, cap, total, replicas),
                None => inside.iter().map(|(_, site)| node(site)).sum(),
            };
            supply.min(u64::from(cap) * total).min(share(weight(inside)))
        };
        domains(sites, level).values().map(domain).sum()
    }
}

fn weight(sites: &[Named<'_>]) -> u64 {
    sites.iter().map(|(_, site)| u64::from(site.weight)).sum()
}

/// The nodes of each domain.
fn domains<'a>(sites: &[Named<'a>], level: Level) -> BTreeMap<&'a str, Vec<Named<'a>>> {
    let mut domains: BTreeMap<&str, Vec<Named<'a>>> = BTreeMap::new();
    for (node, site) in sites {
        if let Some(domain) = site.location.domain(level) {
            domains.entry(domain).or_default().push((*node, *site));
        }
    }
    domains
}
