//! Fencing of updates: an update must not start after its expiry, when its client may have lost its
//! lease. It may be delayed in the network or on a stopped node.
//!
//! As in the product, the expiry is by the receiving node's clock: an earlier reading of it by the
//! client, plus the remaining time, less the possible clock drift.

use std::collections::{BTreeMap, BTreeSet};

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use threefs_core::chunk::StoreUpdate;
use threefs_core::ids::RequestTag;
use threefs_core::replica::{Check, OpId};
use threefs_core::time::Millis;

use super::{Simulation, Violation};
use crate::mutations::Mutation;
use crate::topology::At;

/// Seed of the generator of expiries.
const FENCING_SEED: u64 = 0x7269_6768;
/// Seed of the choice of schedules with purges.
const PURGES_SEED: u64 = 0x7075_7267;
/// The slowest clock of a node, relative to the client's.
const RATE_MIN: f64 = 0.8;
/// Maximum time that a client retries an update: as for other updates, or so short that delayed
/// copies of forwards arrive after a purge.
const TRIES_US_MAX: [u64; 2] = [120_000, 30_000];
/// The fastest clock of a node, with a margin for rounding.
const RATE_MAX: f64 = 1.3;

/// Expiry of a request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Expiry {
    /// By the receiving node's clock.
    pub at: Millis,
    /// The remaining time when it was sent, for mutations.
    pub left_ms: u64,
}

/// Expiries of updates, in true time.
#[derive(Debug)]
pub(crate) struct Fencing {
    rng: ChaCha8Rng,
    some: bool,
    /// Removed chunks are purged; then removals are frequent, and every update expires.
    pub(crate) purges: bool,
    tries_us_max: u64,
    ends: BTreeMap<RequestTag, u64>,
    /// Operations that have started: by node, chain and opening of the store.
    started: BTreeSet<(usize, usize, u64, OpId)>,
}

impl Fencing {
    pub(crate) fn new(seed: u64, mutation: Mutation) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed ^ FENCING_SEED);
        let forced = matches!(
            mutation,
            Mutation::IgnoreExpiry | Mutation::ExpireFromArrival | Mutation::Without(Check::Expiry)
        );
        let some = rng.random_bool(0.4) || forced;
        let mut of_purges = ChaCha8Rng::seed_from_u64(seed ^ PURGES_SEED);
        let purges = of_purges.random_bool(0.3) || mutation.needs_purges();
        let short = purges && of_purges.random_bool(0.5);
        let tries_us_max = TRIES_US_MAX[usize::from(short)];
        Self { rng, some, purges, tries_us_max, ends: BTreeMap::new(), started: BTreeSet::new() }
    }

    /// Time by a node's clock after which removed chunks are purged.
    pub(crate) fn purge_after_ms(&self) -> Option<u64> {
        self.purges.then_some((self.tries_us_max as f64 / 1_000.0 * RATE_MAX) as u64 + 1)
    }

    /// Starts an update; returns when it expires.
    pub(crate) fn start_update(&mut self, tag: RequestTag, now: u64) -> Option<u64> {
        let endless = !self.some || self.rng.random_bool(0.3);
        if endless && !self.purges {
            return None;
        }
        let end = now + self.rng.random_range(5_000..self.tries_us_max);
        self.end_at(tag, end)
    }

    /// Starts an update that expires at `end`, or earlier if that exceeds the retry time.
    pub(crate) fn end_by(&mut self, tag: RequestTag, end: u64, now: u64) -> Option<u64> {
        let limit = if self.purges { now + self.tries_us_max } else { u64::MAX };
        self.end_at(tag, end.min(limit))
    }

    fn end_at(&mut self, tag: RequestTag, end: u64) -> Option<u64> {
        self.ends.insert(tag, end);
        Some(end)
    }
}

impl Simulation {
    /// The expiry of `tag` as its client sends it to a node.
    pub(crate) fn expiry(&mut self, tag: RequestTag, node: usize) -> Option<Expiry> {
        let end = *self.fencing.ends.get(&tag)?;
        // The client has read the node's clock a while ago.
        let read_at = self.now.saturating_sub(self.fencing.rng.random_range(0..8_000));
        let received_at = self.fencing.rng.random_range(read_at..=self.now);
        let left_ms = (end.saturating_sub(received_at) as f64 * RATE_MIN / 1_000.0) as u64;
        let at = self.nodes[node].clock(read_at).after(left_ms);
        Some(Expiry { at, left_ms: end.saturating_sub(self.now) / 1_000 })
    }

    /// The expiry as received by a node.
    pub(crate) fn received_expiry(&self, node: usize, expires: Option<Expiry>) -> Option<Millis> {
        match (expires, self.mutation) {
            (None, _) | (_, Mutation::IgnoreExpiry) => None,
            (Some(expires), Mutation::ExpireFromArrival) => {
                Some(self.nodes[node].clock(self.now).after(expires.left_ms))
            }
            (Some(expires), _) => Some(expires.at),
        }
    }

    /// Checks that an update has not expired when a node makes it durable.
    pub(crate) fn check_fencing(
        &mut self,
        at: At,
        op: OpId,
        update: &StoreUpdate,
    ) -> Result<(), Violation> {
        let opening = self.hosted(at).opening;
        if !self.fencing.started.insert((at.node, at.chain, opening, op)) {
            // Its successor may have it: the head tries again.
            return Ok(());
        }
        let Some(tag) = update.tags.newest().map(|newest| newest.tag) else { return Ok(()) };
        let Some(end) = self.fencing.ends.get(&tag) else { return Ok(()) };
        let hosted = self.hosted(at);
        let chain = hosted.replica.as_ref().and_then(|replica| replica.chain());
        let head = chain.and_then(|chain| chain.head());
        let is_applied = hosted
            .store
            .slots()
            .get(&update.chunk)
            .is_some_and(|slot| slot.committed.state.tags.iter().any(|entry| entry.tag == tag));
        // Successors complete what the head has started, and the head repairs its chunks.
        let starts = head.is_some_and(|head| head.target == at.target()) && !is_applied;
        if starts && self.now > *end {
            let late = self.now - end;
            return Err(self.violation(format!("{tag} was started {late} us after its expiry")));
        }
        Ok(())
    }
}
