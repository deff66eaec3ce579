//! Seeded failures: a fault, its victim and its time, and a check of the errors that every survivor reports.

use std::collections::{BTreeMap, BTreeSet};

use hfreduce_plan::{NodePlace, Plan};

use crate::SimError;
use crate::event_queue::{MILLISECOND, SECOND, Time, seconds};
use crate::group::{Group, Report, TICK};

/// The fault.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    /// The process exits at once.
    Killed,
    /// The process is suspended, for this time or for good.
    Stopped(Option<Time>),
    /// The node loses its network: no traffic passes, and no connection is closed.
    Unplugged,
    /// No traffic passes between this node and the one at the end of this link.
    Cut(usize),
    /// The rank's next call is late by this time.
    Slow(Time),
    /// The rank sends this to the node at the end of this link.
    Garbage(usize, Garbage),
}

impl Fault {
    /// The name of the fault's kind.
    pub fn word(&self) -> &'static str {
        match self {
            Fault::Killed => "killed",
            Fault::Stopped(None) => "stopped",
            Fault::Stopped(Some(_)) => "stopped for a while",
            Fault::Unplugged => "unplugged",
            Fault::Cut(_) => "cut",
            Fault::Slow(_) => "slow",
            Fault::Garbage(..) => "garbage",
        }
    }
}

/// Sixty-four bytes that violate the protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Garbage {
    /// Random bytes.
    Noise(u64),
    /// More credits than exist.
    Credits,
    /// A payload longer than any slot.
    Oversize,
    /// A tree that does not exist.
    Tree,
    /// A frame that is not valid on this connection.
    Stray,
}

/// A seeded bug in the driver, to verify that the simulation detects it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bug {
    /// A rank that receives an abort does not forward it.
    DropsAborts,
    /// Ranks do not check heartbeats.
    IgnoresHeartbeats,
}

/// A group, its operations and one fault.
#[derive(Debug, Clone)]
pub struct Scenario {
    /// Seed of the scenario.
    pub seed: u64,
    /// The nodes.
    pub plan: Plan,
    /// Ranks of each node.
    pub locals: usize,
    /// Sizes of the allreduces that every rank calls one after another.
    pub sizes_bytes: Vec<u64>,
    /// Time between an operation's end and the next call.
    pub pause: Time,
    /// Time without a heartbeat after which a peer counts as failed.
    pub liveness: Time,
    /// Timeout of an operation.
    pub timeout: Time,
    /// The fault.
    pub fault: Fault,
    /// The rank that it affects.
    pub victim: usize,
    /// The time at which it happens.
    pub at: Time,
    /// The seeded bug.
    pub bug: Option<Bug>,
}

/// A small random number generator, so that a scenario is defined by one number.
#[derive(Debug, Clone)]
pub struct Seed(pub u64);

impl Seed {
    /// The next number below `bound`.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (word ^ (word >> 31)) % bound.max(1)
    }
}

impl Scenario {
    /// The scenario of a seed: 2 to 32 ranks, one to three on each node, in up to three zones.
    ///
    /// # Errors
    /// None is expected: a plan exists for every such list.
    pub fn of(number: u64) -> Result<Self, SimError> {
        let mut seed = Seed(number);
        let locals = 1 + seed.below(3) as usize;
        let nodes = 2 + seed.below(32 / locals as u64 - 1) as usize;
        let zones = 1 + seed.below(3.min(nodes as u64));
        let places: Vec<NodePlace> = (0..nodes)
            .map(|node| NodePlace::new(format!("n{node}"), format!("z{}", node as u64 % zones)))
            .collect();
        let plan = Plan::new(&places)?;
        let sizes_bytes: Vec<u64> =
            (0..10 + seed.below(10)).map(|_| 4 * seed.below(60_000)).collect();
        let liveness = (500 + seed.below(1_000)) * MILLISECOND;
        let timeout = liveness + (500 + seed.below(2_000)) * MILLISECOND;
        let victim = seed.below((nodes * locals) as u64) as usize;
        let links = neighbors(&plan, victim / locals);
        let link = seed.below(links as u64) as usize;
        let mut scenario = Self {
            seed: number,
            plan,
            locals,
            sizes_bytes,
            pause: seed.below(40) * MILLISECOND,
            liveness,
            timeout,
            fault: Fault::Killed,
            victim,
            at: 1 + seed.below(600 * MILLISECOND),
            bug: None,
        };
        scenario.fault = match seed.below(8) {
            0 | 1 => Fault::Killed,
            2 => Fault::Stopped(None),
            3 => Fault::Stopped(Some(seed.below(2 * liveness))),
            4 => Fault::Unplugged,
            5 => Fault::Cut(link),
            6 => Fault::Slow(seed.below(2 * timeout)),
            _ => Fault::Garbage(link, garbage(&mut seed)),
        };
        if matches!(scenario.fault, Fault::Garbage(..)) {
            scenario.victim -= scenario.victim % locals; // The rank with connections.
        }
        Ok(scenario)
    }

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
            let gone = matches!(self.fault, Fault::Killed | Fault::Stopped(None));
            if gone && rank == self.victim {
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

fn neighbors(plan: &Plan, node: usize) -> usize {
    hfreduce_core::Flows::new(plan, node).peers().len()
}

fn garbage(seed: &mut Seed) -> Garbage {
    match seed.below(5) {
        0 => Garbage::Noise(seed.below(u64::MAX)),
        1 => Garbage::Credits,
        2 => Garbage::Oversize,
        3 => Garbage::Tree,
        _ => Garbage::Stray,
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
        *kinds.entry(scenario.fault.word()).or_insert(0) += 1;
    }
    Ok(kinds)
}
