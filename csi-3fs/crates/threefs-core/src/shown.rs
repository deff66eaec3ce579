//! Epochs of a volume that its snapshots show. They decide which versions of chunks are kept.
//!
//! A snapshot of epoch `s` shows the newest version of each chunk up to `s`. So the version of epoch
//! `a`, which the version of epoch `b` follows, is shown by the snapshots of `a` to `b - 1`.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::ids::Epoch;

/// The epochs of a volume that snapshots show.
///
/// It stays true: snapshots of epochs below `below` are only removed. So an old list keeps versions
/// that a newer one does not, and the order of lists does not matter.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShownEpochs {
    /// Number of the volume ([`Epoch::volume`]).
    pub volume: u32,
    /// The list is complete for epochs below this one: a later one may have a snapshot that is not
    /// listed yet.
    pub below: u32,
    /// The epochs of the snapshots ([`Epoch::count`]).
    pub counts: BTreeSet<u32>,
}

impl ShownEpochs {
    /// Whether all snapshots that can show a version are listed. `next`: the epoch of the version
    /// that follows it.
    #[must_use]
    pub fn is_complete_to(&self, next: Epoch) -> bool {
        next.volume == self.volume && next.count <= self.below
    }

    /// Whether a snapshot of the list shows the version of `epoch`, which the one of `next` follows.
    #[must_use]
    pub fn shows(&self, epoch: Epoch, next: Epoch) -> bool {
        let first = match epoch.volume {
            0 => 0,
            volume if volume == self.volume => epoch.count,
            // Chunks of a volume with epochs do not move to another one.
            _ => return true,
        };
        first >= next.count || self.counts.range(first..next.count).next().is_some()
    }

    /// Whether no snapshot of this epoch exists, now or later: its versions may be dropped.
    #[must_use]
    pub fn hides(&self, epoch: Epoch) -> bool {
        epoch.volume == self.volume
            && epoch.count < self.below
            && !self.counts.contains(&epoch.count)
    }

    /// Whether there may be versions that no snapshot shows according to this list, but not according
    /// to the one `before`.
    #[must_use]
    pub fn hides_more_than(&self, before: Option<&Self>) -> bool {
        let was_hidden = |count: u32| {
            before.is_some_and(|list| count < list.below && !list.counts.contains(&count))
        };
        let mut listed = self.counts.range(..self.below).copied().chain([self.below]);
        let mut next = 0;
        // Between two listed epochs all are hidden, or were hidden before.
        listed.any(|end| {
            let hides = (next..end).any(|count| !was_hidden(count));
            next = end.saturating_add(1);
            hides
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(below: u32, counts: &[u32]) -> ShownEpochs {
        ShownEpochs { volume: 3, below, counts: counts.iter().copied().collect() }
    }

    #[test]
    fn a_version_is_shown_by_the_snapshots_until_the_next_version() {
        let shown = list(9, &[2, 5]);
        let of = |count| Epoch::new(3, count);
        let first = Epoch::default();
        for (epoch, next, shows) in [
            (first, of(1), false),
            (first, of(2), false),
            (first, of(3), true),
            (of(2), of(3), true),
            (of(3), of(5), false),
            (of(3), of(6), true),
            (of(6), of(9), false),
            // No version follows it in its volume.
            (of(6), of(6), true),
            (Epoch::new(4, 1), of(2), true),
        ] {
            assert_eq!(shown.shows(epoch, next), shows, "{epoch} {next}");
        }
        assert!(shown.is_complete_to(of(9)) && !shown.is_complete_to(of(10)));
        assert!(!shown.is_complete_to(Epoch::new(4, 9)));
        let hidden: Vec<u32> = (0..12).filter(|count| shown.hides(of(*count))).collect();
        assert_eq!(hidden, [0, 1, 3, 4, 6, 7, 8]);
        assert!(!shown.hides(Epoch::new(4, 1)) && !shown.hides(first));
    }

    #[test]
    fn a_list_hides_more_after_a_removal_and_after_an_epoch_without_a_snapshot() {
        let before = list(3, &[0, 1, 2]);
        for (after, more) in [
            (list(3, &[0, 1, 2]), false),
            (list(4, &[0, 1, 2, 3]), false),
            (list(3, &[0, 2]), true),
            (list(3, &[0, 1]), true),
            (list(4, &[0, 1, 2]), true),
            (list(6, &[0, 1, 2, 3, 5]), true),
        ] {
            assert_eq!(after.hides_more_than(Some(&before)), more, "{after:?}");
        }
        assert!(!list(3, &[0, 1, 2]).hides_more_than(None));
        assert!(list(3, &[0, 2]).hides_more_than(None));
        assert!(!list(3, &[0, 2]).hides_more_than(Some(&list(3, &[0, 2]))));
        assert!(!list(0, &[]).hides_more_than(None));
    }
}
