//! Unauthenticated connections: selects the connection to evict when there are too many. Pure.
//!
//! They have a separate small pool, so that no number of them can take the slot of a cluster
//! member. A new connection is always accepted: if the limit of its address, or of the pool, is
//! reached, the oldest connection of the address with the most connections is evicted. A member
//! authenticates in a few round trips, so an old connection is a silent one.

use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;

/// See the module documentation. Dropping `T` closes the connection.
#[derive(Debug)]
pub(super) struct Unauthenticated<T> {
    total_max: usize,
    address_max: usize,
    total: usize,
    /// Connections by address, the oldest first.
    by_address: HashMap<IpAddr, VecDeque<(u64, T)>>,
}

impl<T> Unauthenticated<T> {
    pub(super) fn new(total_max: usize, address_max: usize) -> Self {
        let (total_max, address_max) = (total_max.max(1), address_max.max(1));
        Self { total_max, address_max, total: 0, by_address: HashMap::new() }
    }

    /// Adds a connection; returns the evicted one, if any.
    pub(super) fn insert(&mut self, address: IpAddr, number: u64, end: T) -> Option<T> {
        let full = self.by_address.get(&address).is_some_and(|it| it.len() >= self.address_max);
        let evicted = if full {
            self.pop(address)
        } else if self.total >= self.total_max {
            // At most `total_max` addresses are examined.
            let most =
                self.by_address.iter().max_by_key(|(_, it)| (it.len(), std::cmp::Reverse(it[0].0)));
            most.map(|(address, _)| *address).and_then(|address| self.pop(address))
        } else {
            None
        };
        self.by_address.entry(address).or_default().push_back((number, end));
        self.total += 1;
        evicted
    }

    /// Removes a connection that has authenticated or closed.
    pub(super) fn remove(&mut self, address: IpAddr, number: u64) {
        let Some(of_address) = self.by_address.get_mut(&address) else { return };
        let before = of_address.len();
        of_address.retain(|(it, _)| *it != number);
        self.total -= before - of_address.len();
        if of_address.is_empty() {
            self.by_address.remove(&address);
        }
    }

    fn pop(&mut self, address: IpAddr) -> Option<T> {
        let of_address = self.by_address.get_mut(&address)?;
        let evicted = of_address.pop_front();
        self.total -= usize::from(evicted.is_some());
        if of_address.is_empty() {
            self.by_address.remove(&address);
        }
        evicted.map(|(_, end)| end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(last: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, last])
    }

    #[test]
    fn an_address_over_its_share_loses_its_oldest_connection() {
        let mut connections = Unauthenticated::new(8, 2);
        assert_eq!(connections.insert(address(1), 1, 1), None);
        assert_eq!(connections.insert(address(1), 2, 2), None);
        assert_eq!(connections.insert(address(2), 3, 3), None);
        assert_eq!(connections.insert(address(1), 4, 4), Some(1));
        connections.remove(address(1), 2);
        assert_eq!(connections.insert(address(1), 5, 5), None);
        assert_eq!(connections.total, 3);
    }

    #[test]
    fn a_full_pool_evicts_from_the_address_with_the_most_connections() {
        let mut connections = Unauthenticated::new(4, 3);
        for (number, last) in [(1, 7), (2, 9), (3, 9), (4, 9)] {
            assert_eq!(connections.insert(address(last), number, number), None);
        }
        assert_eq!(
            connections.insert(address(1), 5, 5),
            Some(2),
            "7 came first, but 9 has the most"
        );
        assert_eq!(connections.insert(address(2), 6, 6), Some(3));
        for (number, last) in [(1, 7), (4, 9), (5, 1), (6, 2)] {
            connections.remove(address(last), number);
            connections.remove(address(last), number);
        }
        assert_eq!((connections.total, connections.by_address.len()), (0, 0));
    }
}
