//! Table of pending handshakes: selects the handshake to evict when the table is full. Pure.
//!
//! An honest handshake takes a few round trips; a long one is most likely a silent, unauthenticated
//! peer. When the table is full, the oldest handshake of the source address with the most
//! handshakes is evicted, so that one source cannot evict the handshakes of others, and many
//! sources evict only old ones.

use std::collections::HashMap;
use std::net::IpAddr;

/// Maximum number of pending handshakes. Each uses a descriptor and about 200 bytes, and no thread.
pub(crate) const HANDSHAKES_MAX: usize = 128;

/// Pending handshakes, oldest first, each with the caller's data.
#[derive(Debug)]
pub(crate) struct HandshakeTable<T> {
    most: usize,
    entries: Vec<(IpAddr, T)>,
}

impl<T> HandshakeTable<T> {
    pub(crate) fn new(most: usize) -> Self {
        Self { most: most.max(1), entries: Vec::new() }
    }

    /// Adds a handshake; returns the evicted one, if any.
    pub(crate) fn add(&mut self, source: IpAddr, handshake: T) -> Option<T> {
        self.entries.push((source_of(source), handshake));
        (self.entries.len() > self.most).then(|| self.evict()).flatten()
    }

    /// Removes the oldest handshake of the source that has the most of them.
    pub(crate) fn evict(&mut self) -> Option<T> {
        let mut counts: HashMap<IpAddr, usize> = HashMap::new();
        for (source, _) in &self.entries {
            *counts.entry(*source).or_default() += 1;
        }
        let most = counts.values().copied().max()?;
        let at = self.entries.iter().position(|(source, _)| counts.get(source) == Some(&most))?;
        Some(self.entries.remove(at).1)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.entries.iter().map(|(_, handshake)| handshake)
    }

    /// Removes and returns every handshake for which `ends` is true.
    pub(crate) fn take_if(&mut self, mut ends: impl FnMut(&mut T) -> bool) -> Vec<T> {
        self.entries.extract_if(.., |(_, handshake)| ends(handshake)).map(|(_, h)| h).collect()
    }
}

/// An IPv6 host usually has a 64-bit network to itself.
fn source_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(v6) => IpAddr::V6((u128::from(v6) >> 64 << 64).into()),
        v4 => v4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn v4(last: u8) -> IpAddr {
        [10, 0, 0, last].into()
    }

    #[test]
    fn no_connection_is_evicted_while_there_is_space() {
        let mut table = HandshakeTable::new(3);
        assert!((0..3).all(|at| table.add(v4(1), at).is_none()));
        assert_eq!(table.iter().copied().collect::<Vec<_>>(), [0, 1, 2]);
    }

    #[test]
    fn the_busiest_source_loses_its_oldest_connection() {
        let mut table = HandshakeTable::new(4);
        table.add(v4(1), "honest");
        for flood in ["a", "b", "c"] {
            table.add(v4(2), flood);
        }
        assert_eq!(table.add(v4(2), "d"), Some("a"));
        assert_eq!(table.add(v4(3), "another"), Some("b"));
        assert_eq!(table.add(v4(2), "e"), Some("c"));
        assert!(table.iter().any(|one| *one == "honest"));
    }

    #[test]
    fn among_equal_sources_the_oldest_connection_is_evicted() {
        let mut table = HandshakeTable::new(2);
        table.add(v4(1), 1);
        table.add(v4(2), 2);
        assert_eq!(table.add(v4(3), 3), Some(1));
    }

    #[test]
    fn one_network_of_ipv6_is_one_source() {
        let mut table = HandshakeTable::new(2);
        table.add(v4(1), 0);
        table.add("2001:db8::1".parse().unwrap(), 1);
        assert_eq!(table.add("2001:db8::2".parse().unwrap(), 2), Some(1));
        let mapped_address: IpAddr = "::ffff:10.0.0.1".parse().unwrap();
        assert_eq!(source_of(mapped_address), v4(1));
    }

    #[test]
    fn a_flood_never_displaces_the_newest() {
        let mut table = HandshakeTable::new(HANDSHAKES_MAX);
        for at in 0..10_000_u32 {
            let source = IpAddr::from((0x7f00_0000 + at % 250).to_be_bytes());
            assert_ne!(table.add(source, at), Some(at));
        }
        assert_eq!(table.iter().count(), HANDSHAKES_MAX);
    }
}
