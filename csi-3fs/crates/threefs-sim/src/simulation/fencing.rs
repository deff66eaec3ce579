//! Updates that may not be begun after a moment, because their client may have lost the right to them
//! by then. What it asked for may lie anywhere: with a node that is stopped, or on its way.
//!
//! As in the product, the moment is told by the receiving node's clock: from a reading of it that
//! the client has got some time ago, less what the node's clock may be slower.

use std::collections::BTreeMap;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use threefs_core::chunk::StoreUpdate;
use threefs_core::ids::RequestTag;
use threefs_core::replica::Check;
use threefs_core::time::Millis;

use super::{Simulation, Violation};
use crate::mutations::Mutation;
use crate::topology::At;

/// Tells the generator of rights from that of everything else.
const FENCING_SEED: u64 = 0x7269_6768;
/// Tells the choice of schedules with purges from everything else.
const PURGES_SEED: u64 = 0x7075_7267;
/// The slowest clock of a node, beside the client's.
const RATE_MIN: f64 = 0.8;
/// No client tries to update a chunk for longer: as other updates do, or so short that copies of
/// forwards come later than a purge.
const TRIES_US_MAX: [u64; 2] = [120_000, 30_000];
/// The fastest clock of a node, and something for its rounding.
const RATE_MAX: f64 = 1.3;

/// Until when a request may be begun.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Expiry {
    /// By the receiving node's clock.
    pub at: Millis,
    /// How long that was when it was sent, for those who count wrongly.
    pub left_ms: u64,
}

/// Until when updates may be begun, in true time.
#[derive(Debug)]
pub(crate) struct Fencing {
    rng: ChaCha8Rng,
    some: bool,
    /// Removed chunks are purged; then there are many, and no update is tried without an end.
    pub(crate) purges: bool,
    tries_us_max: u64,
    ends: BTreeMap<RequestTag, u64>,
}

impl Fencing {
    pub(crate) fn new(seed: u64, mutation: Mutation) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed ^ FENCING_SEED);
        let needed = matches!(
            mutation,
            Mutation::IgnoreExpiry | Mutation::ExpireFromArrival | Mutation::Without(Check::Expiry)
        );
        let some = rng.random_bool(0.4) || needed;
        let mut of_purges = ChaCha8Rng::seed_from_u64(seed ^ PURGES_SEED);
        let purges = of_purges.random_bool(0.3) || mutation.needs_purges();
        let short = purges && of_purges.random_bool(0.5);
        let tries_us_max = TRIES_US_MAX[usize::from(short)];
        Self { rng, some, purges, tries_us_max, ends: BTreeMap::new() }
    }

    /// After so long, by a node's clock, removed chunks are purged.
    pub(crate) fn purge_after_ms(&self) -> Option<u64> {
        self.purges.then_some((self.tries_us_max as f64 / 1_000.0 * RATE_MAX) as u64 + 1)
    }

    /// A client begins an update; when it will give it up.
    pub(crate) fn begin(&mut self, tag: RequestTag, now: u64) -> Option<u64> {
        let endless = !self.some || self.rng.random_bool(0.3);
        if endless && !self.purges {
            return None;
        }
        let end = now + self.rng.random_range(5_000..self.tries_us_max);
        self.end_at(tag, end)
    }

    /// A client begins an update that ends at a certain moment, if it may try for so long.
    pub(crate) fn end_by(&mut self, tag: RequestTag, end: u64, now: u64) -> Option<u64> {
        let bound = if self.purges { now + self.tries_us_max } else { u64::MAX };
        self.end_at(tag, end.min(bound))
    }

    fn end_at(&mut self, tag: RequestTag, end: u64) -> Option<u64> {
        self.ends.insert(tag, end);
        Some(end)
    }
}

impl Simulation {
    /// What a client can say to a node of the moment when `tag` ends.
    pub(crate) fn expiry(&mut self, tag: RequestTag, node: usize) -> Option<Expiry> {
        let end = *self.fencing.ends.get(&tag)?;
        // The node said what its clock showed a while ago, and the client heard it later.
        let said = self.now.saturating_sub(self.fencing.rng.random_range(0..8_000));
        let heard = self.fencing.rng.random_range(said..=self.now);
        let left_ms = (end.saturating_sub(heard) as f64 * RATE_MIN / 1_000.0) as u64;
        let at = self.nodes[node].clock(said).after(left_ms);
        Some(Expiry { at, left_ms: end.saturating_sub(self.now) / 1_000 })
    }

    /// As a node takes it.
    pub(crate) fn received_expiry(&self, node: usize, expires: Option<Expiry>) -> Option<Millis> {
        match (expires, self.mutation) {
            (None, _) | (_, Mutation::IgnoreExpiry) => None,
            (Some(expires), Mutation::ExpireFromArrival) => {
                Some(self.nodes[node].clock(self.now).after(expires.left_ms))
            }
            (Some(expires), _) => Some(expires.at),
        }
    }

    /// A node makes an update durable: is it still its client's to make?
    pub(crate) fn check_fencing(&self, at: At, update: &StoreUpdate) -> Result<(), Violation> {
        let Some(tag) = update.tags.newest().map(|newest| newest.tag) else { return Ok(()) };
        let Some(end) = self.fencing.ends.get(&tag) else { return Ok(()) };
        let hosted = self.hosted(at);
        let chain = hosted.replica.as_ref().and_then(|replica| replica.chain());
        let head = chain.and_then(|chain| chain.head());
        let known =
            hosted.store.slots().get(&update.chunk).is_some_and(|slot| {
                slot.committed.state.tags.iter().any(|applied| applied.tag == tag)
            });
        // Others end what the head began, and the head repairs what it has.
        let begins = head.is_some_and(|head| head.target == at.target()) && !known;
        if begins && self.now > *end {
            let late = self.now - end;
            return Err(self.violation(format!("{tag} was begun {late} us after its right ended")));
        }
        Ok(())
    }
}
