//! Seeded failures: runs of scenarios, and a check of the errors that every survivor reports.

use std::collections::{BTreeMap, BTreeSet};

use crate::event_queue::{SECOND, Time, seconds};
use crate::group::{Group, Report, TICK};
use crate::scenario::{Bug, Fault, Scenario};

impl Scenario {
    /// Simulates the scenario.
    pub fn run(&self) -> Report {
        // A false failure, or a hang after a pause that every rank survives, shows only later.
        let after = match self.fault {
            Fault::Slow(_) | Fault::Stopped(Some(_)) => 4 * SECOND,
            _ => SECOND,
        };
        Group::new(self).run(self.at + self.bound() + after)
    }

    /// Time after the fault by which every survivor must have failed.
    pub fn bound(&self) -> Time {
        // A check ten times a second may be one period late, and a wave of aborts takes milliseconds.
        const SLACK: Time = 3 * TICK;
        match self.fault {
            Fault::Killed | Fault::Garbage(..) => SLACK,
            Fault::Stopped(None) | Fault::Unplugged | Fault::Cut(_) => self.liveness + SLACK,
            Fault::Stopped(Some(span)) => span.max(self.liveness) + SLACK,
            // Called at the latest when the previous operation ended, which takes milliseconds.
            Fault::Slow(_) => self.pause + self.timeout + 2 * SLACK,
        }
    }

    /// The ranks that a survivor may report.
    fn culprits(&self, of: usize) -> BTreeSet<u32> {
        let node = self.victim / self.locals;
        let owner = |node: usize| (node * self.locals) as u32;
        let peers = hfreduce_core::Flows::new(&self.plan, node).peers().to_vec();
        match &self.fault {
            Fault::Unplugged if of / self.locals == node => peers.into_iter().map(owner).collect(),
            Fault::Unplugged => BTreeSet::from([owner(node)]),
            Fault::Cut(link) => BTreeSet::from([owner(node), owner(peers[*link])]),
            _ => BTreeSet::from([self.victim as u32]),
        }
    }

    /// Whether survivors must fail (true), must not fail (false), or may do either (none).
    fn must_fail(&self, report: &Report) -> Option<bool> {
        let near = |span: Time, limit: Time, margin: Time| {
            (span.abs_diff(limit) > margin).then_some(span > limit)
        };
        match self.fault {
            Fault::Stopped(Some(span)) => near(span, self.liveness, 4 * TICK),
            Fault::Slow(_) if !report.was_late => Some(false),
            Fault::Slow(by) => near(by, self.timeout, 4 * TICK + self.pause),
            _ => Some(true),
        }
    }

    /// Checks the report of a run.
    ///
    /// # Errors
    /// The first rank that hung, failed too late, reported an innocent rank, or failed without a fault.
    pub fn check(&self, report: &Report) -> Result<(), String> {
        let must_fail = self.must_fail(report);
        for (rank, ending) in report.endings.iter().enumerate() {
            let has_ended = matches!(self.fault, Fault::Killed | Fault::Stopped(None));
            if has_ended && rank == self.victim {
                continue;
            }
            let violation = |what: String| {
                Err(format!(
                    "seed {}: {:?} of rank {}: rank {rank} {what}",
                    self.seed, self.fault, self.victim
                ))
            };
            let Some((at, cause)) = &ending.failed else {
                if must_fail == Some(true) {
                    return violation(format!(
                        "never fails; it waits in operation {}",
                        ending.completed
                    ));
                }
                if must_fail == Some(false) && ending.completed < self.sizes_bytes.len() {
                    return violation(format!("hangs in operation {}", ending.completed));
                }
                continue;
            };
            if must_fail == Some(false) {
                return violation(format!("fails without a fault: {cause:?}"));
            }
            let culprits = self.culprits(rank);
            if !cause.peer.is_some_and(|peer| culprits.contains(&peer)) {
                return violation(format!(
                    "reports {:?} instead of one of {culprits:?}: {cause:?}",
                    cause.peer
                ));
            }
            let late = at.saturating_sub(self.at);
            if late > self.bound() {
                return violation(format!(
                    "fails {:.3} s after the fault, later than the allowed {:.3} s",
                    seconds(late),
                    seconds(self.bound())
                ));
            }
        }
        Ok(())
    }
}

/// Runs many seeds; returns how often each kind of fault occurred.
///
/// # Errors
/// The first violation.
pub fn try_seeds(
    seeds: std::ops::Range<u64>,
    bug: Option<Bug>,
) -> Result<BTreeMap<&'static str, u64>, String> {
    let mut kinds = BTreeMap::new();
    for seed in seeds {
        let mut scenario = Scenario::of(seed).map_err(|error| error.to_string())?;
        scenario.bug = bug;
        scenario.check(&scenario.run())?;
        *kinds.entry(scenario.fault.name()).or_insert(0) += 1;
    }
    Ok(kinds)
}
