//! Scenarios: a group, its operations and one fault, defined by a seed.

use hfreduce_plan::{NodePlace, Plan};

use crate::SimError;
use crate::event_queue::{MILLISECOND, Time};
use crate::seed::Seed;

/// The fault.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    /// The process exits immediately.
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
    pub fn name(&self) -> &'static str {
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
