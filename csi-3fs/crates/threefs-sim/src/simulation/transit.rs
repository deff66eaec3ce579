//! Payloads that are damaged on the way to a node, in some schedules: TCP's checksum misses some
//! damage.

use bytes::Bytes;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::Packet;
use crate::mutations::Mutation;

/// Seed of the generator of damage.
const TRANSIT_SEED: u64 = 0x7472_616e;

/// Damage of payloads.
#[derive(Debug)]
pub(crate) struct Transit {
    // A separate generator, so that schedules without damage are unaffected.
    rng: ChaCha8Rng,
    chance: f64,
}

impl Transit {
    pub(crate) fn new(seed: u64, mutation: Mutation) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed ^ TRANSIT_SEED);
        let some = rng.random_bool(0.15) || mutation == Mutation::TrustPayload;
        let chance = if some { rng.random_range(0.01..0.2) } else { 0.0 };
        Self { rng, chance }
    }

    /// The packet as it arrives: perhaps with one bit of its payload flipped.
    pub(crate) fn pass(&mut self, mut packet: Packet) -> Packet {
        if let Packet::Request { payload, .. } | Packet::Response { payload, .. } = &mut packet
            && !payload.is_empty()
            && self.rng.random_bool(self.chance)
        {
            let mut bytes = payload.to_vec();
            let at = self.rng.random_range(0..bytes.len());
            bytes[at] ^= 1 << self.rng.random_range(0..8);
            *payload = Bytes::from(bytes);
        }
        packet
    }
}
