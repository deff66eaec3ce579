//! Symbolic links in `3fs-virt/iovs`: programs that create shared memory themselves publish its
//! path there under the memory's id, before they pass the id to the library.
//!
//! A link only tells the library which file in `/dev/shm` has the id; this daemon does not follow
//! it. Links are visible to their user, and lost with the daemon.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;

/// Maximum number of links of a user.
const LINKS_MAX: usize = 4096;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Link {
    pub name: Vec<u8>,
    pub target: Vec<u8>,
    pub user: u32,
    pub group: u32,
}

#[derive(Default)]
pub(crate) struct Links {
    links: Mutex<State>,
}

#[derive(Default)]
struct State {
    links: HashMap<u32, Link>,
    next: u32,
}

impl Links {
    /// Adds a link; returns its number.
    ///
    /// # Errors
    /// `EEXIST`, or `ENOSPC` if the user has too many links.
    pub(crate) fn add(&self, link: Link) -> Result<u32, Errno> {
        let mut state = self.state();
        if state.links.values().any(|other| other.name == link.name && other.user == link.user) {
            return Err(Errno::EXIST);
        }
        if state.links.values().filter(|other| other.user == link.user).count() >= LINKS_MAX {
            return Err(Errno::NOSPC);
        }
        loop {
            // A number stays below 2^31: node numbers end there.
            state.next = (state.next + 1) & (u32::MAX >> 1);
            if !state.links.contains_key(&state.next) {
                break;
            }
        }
        let number = state.next;
        state.links.insert(number, link);
        Ok(number)
    }

    pub(crate) fn get(&self, number: u32) -> Option<Link> {
        self.state().links.get(&number).cloned()
    }

    /// A user's link.
    pub(crate) fn find(&self, name: &[u8], user: u32) -> Option<(u32, Link)> {
        let state = self.state();
        let found = state.links.iter().find(|(_, link)| link.name == name && link.user == user);
        found.map(|(number, link)| (*number, link.clone()))
    }

    /// Removes a user's link; false if there is none.
    pub(crate) fn remove(&self, name: &[u8], user: u32) -> bool {
        let mut state = self.state();
        let before = state.links.len();
        state.links.retain(|_, link| link.name != name || link.user != user);
        state.links.len() < before
    }

    /// A user's links, by number.
    pub(crate) fn of_user(&self, user: u32) -> Vec<(u32, Link)> {
        let state = self.state();
        let links = state.links.iter().filter(|(_, link)| link.user == user);
        let mut links: Vec<_> = links.map(|(number, link)| (*number, link.clone())).collect();
        links.sort_unstable_by_key(|(number, _)| *number);
        links
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.links.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link(name: &str, user: u32) -> Link {
        let (name, target) = (name.as_bytes().to_vec(), b"/dev/shm/memory".to_vec());
        Link { name, target, user, group: user }
    }

    #[test]
    fn each_user_has_separate_links() {
        let links = Links::default();
        let number = links.add(link("a", 1)).unwrap();
        assert_eq!(links.add(link("a", 1)), Err(Errno::EXIST));
        assert!(links.add(link("a", 2)).is_ok());
        assert_eq!(links.find(b"a", 1), Some((number, link("a", 1))));
        assert_eq!(links.find(b"a", 3), None);
        assert!(links.remove(b"a", 1) && !links.remove(b"a", 1));
        assert_eq!(links.get(number), None);
        assert_eq!(links.of_user(2).len(), 1);
    }

    #[test]
    fn a_user_has_a_limited_number_of_links() {
        let links = Links::default();
        for number in 0..LINKS_MAX {
            links.add(link(&number.to_string(), 1)).unwrap();
        }
        assert_eq!(links.add(link("more", 1)), Err(Errno::NOSPC));
        assert!(links.add(link("more", 2)).is_ok());
    }
}
