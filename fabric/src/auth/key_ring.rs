//! Key ring: one key, or two during key rotation. The first key signs; all keys are accepted.

use std::fmt;

use super::key::Key;

/// Maximum number of keys in a ring: the old and the new one.
pub(super) const KEYS_MAX: usize = 2;

/// The keys of a cluster at one point in time.
#[derive(Clone)]
pub struct KeyRing {
    /// The first key signs. Never empty.
    keys: Vec<(u32, Key)>,
}

impl KeyRing {
    /// A ring of these keys, at least one; the first one signs.
    pub(super) fn new(keys: Vec<(u32, Key)>) -> Self {
        Self { keys }
    }

    /// A ring with one key, whose id is 0.
    pub fn of(key: Key) -> Self {
        Self { keys: vec![(0, key)] }
    }

    /// The signing key and its id.
    pub fn signing(&self) -> (u32, &Key) {
        // A ring has at least one key.
        let (id, key) = &self.keys[0];
        (*id, key)
    }

    /// The key with this id.
    pub fn get(&self, id: u32) -> Option<&Key> {
        self.keys.iter().find(|(key_id, _)| *key_id == id).map(|(_, key)| key)
    }

    /// Fingerprints of the keys for one purpose: equal for rings with the same key, and the keys
    /// cannot be computed from them. Ids of keys do not count.
    pub fn fingerprints(&self, purpose: &str) -> Vec<[u8; 32]> {
        self.keys.iter().map(|(_, key)| key.fingerprint(purpose)).collect()
    }

    /// Key ids; the signing key comes first.
    pub fn ids(&self) -> impl Iterator<Item = u32> + '_ {
        self.keys.iter().map(|(id, _)| *id)
    }
}

impl fmt::Debug for KeyRing {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "KeyRing({:?})", self.ids().collect::<Vec<_>>())
    }
}
