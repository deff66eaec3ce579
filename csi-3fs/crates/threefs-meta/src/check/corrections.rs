//! Corrections of counters that contradict what they count in the snapshot.

use std::collections::{BTreeMap, HashMap};

use threefs_core::ids::InodeId;

use crate::check::{Checker, Names, Node};
use crate::protocol::{Correction, EntryKind, ROOT};

/// Corrections that are kept; the next repair makes further ones.
const CORRECTIONS_MAX: usize = 100_000;

impl Checker {
    pub(super) fn correct_all(&mut self, corrections: impl IntoIterator<Item = Correction>) {
        let room = CORRECTIONS_MAX.saturating_sub(self.found.corrections.len());
        self.found.corrections.extend(corrections.into_iter().take(room));
    }

    /// The error of a quota is that of its counters without the errors of the quotas directly below
    /// it, since a correction of those also applies to it. This part does not change when quotas
    /// are moved or removed.
    pub(super) fn correct_quotas(&mut self, errors: &HashMap<InodeId, [i64; 4]>) {
        let mut own: BTreeMap<InodeId, [i64; 4]> = BTreeMap::new();
        for (id, error) in errors {
            subtract(own.entry(*id).or_default(), error);
            let above = self.quotas.get(id).and_then(|quota| quota.above);
            if let Some(above) = above {
                let inverse = error.map(|part| 0_i64.saturating_sub(part));
                subtract(own.entry(above).or_default(), &inverse);
            }
        }
        let wrong = own.into_iter().filter(|(_, more)| *more != [0; 4]);
        let corrections = wrong.map(|(directory, more)| Correction::Quota { directory, more });
        self.correct_all(corrections);
    }
}

/// Makes `sums` less by `error`: a correction is the negative of an error.
fn subtract(sums: &mut [i64; 4], error: &[i64; 4]) {
    for (sum, part) in sums.iter_mut().zip(error) {
        *sum = sum.saturating_sub(*part);
    }
}

/// The correction of the counters of an inode with names, which is neither queued nor in a trash. An
/// inode whose names contradict it in another way is not corrected.
pub(super) fn correction(
    inode: InodeId,
    node: &Node,
    names: Option<&Names>,
    metadata_bytes: u64,
) -> Option<Correction> {
    let count = names.map_or(0, |names| names.count);
    let is_named = match node.kind {
        EntryKind::Directory if inode == ROOT => count == 0,
        EntryKind::Directory => {
            let place = names.map(|names| (Some(names.parent), &names.name));
            count == 1 && place == Some((node.parent, &node.name))
        }
        kind => names.is_some_and(|names| names.kind == kind),
    };
    let links = match node.kind {
        EntryKind::Directory => node.links,
        _ => count,
    };
    let is_right = node.links == links && node.metadata_bytes == metadata_bytes;
    let version = node.version;
    (is_named && !is_right && !node.dead).then_some(Correction::Inode {
        inode,
        version,
        links,
        metadata_bytes,
    })
}
