//! History of volumes: former states do not overlap, are indexed, and keep their inodes, and each name
//! that a snapshot shows leads to a state of its inode in the epoch of the snapshot.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use threefs_core::ids::InodeId;
use threefs_kv::KvError;

use crate::check::Checker;
use crate::protocol::EntryKind;
use crate::rows::history::{self as keys, FormerValue, SnapshotRow};
use crate::rows::{self, DentryRow};

/// A name until the end of an epoch. It has less than its row.
struct FormerName {
    inode: InodeId,
    directory: InodeId,
    is_directory: bool,
    since: u32,
    end: u32,
}

/// Rows of the history.
#[derive(Default)]
pub(super) struct History {
    /// Epochs of each row, from the one of its state to the one in which it ended, by the key
    /// without the end.
    spans: BTreeMap<Vec<u8>, Vec<(u32, u32)>>,
    /// The epoch of the current state, by the same key.
    current: HashMap<Vec<u8>, u32>,
    named: Vec<FormerName>,
    /// Epochs of the snapshots of a volume that are not being removed.
    snapshots: HashMap<InodeId, BTreeSet<u32>>,
    /// Bytes by key.
    rows: HashMap<Vec<u8>, i64>,
    /// Keys of the rows in the index, with the volume.
    index: HashMap<Vec<u8>, InodeId>,
    /// Inodes with former states.
    pub(super) inodes: BTreeSet<InodeId>,
}

impl Checker {
    /// Takes a row of the history.
    pub(super) fn history_row(&mut self, key: &[u8], value: &[u8]) -> Result<(), KvError> {
        let history = &mut self.history;
        let prefix = key.get(..4).unwrap_or_default();
        if prefix == keys::ENDS {
            let row = keys::key_of_end(key)?.to_vec();
            history.index.insert(row, rows::inode_of_key(key)?);
            return Ok(());
        }
        let end = keys::end_of_key(key)?;
        let since = match prefix {
            keys::FORMER_INODES => {
                history.inodes.insert(rows::inode_of_key(key)?);
                keys::decode_former(key, value)?.since
            }
            keys::FORMER_NAMES => {
                let entry = DentryRow::decode(key, value)?;
                let (inode, directory) = (entry.inode, rows::inode_of_key(key)?);
                let is_directory = entry.kind == EntryKind::Directory;
                let since = entry.since;
                history.named.push(FormerName { inode, directory, is_directory, since, end });
                since
            }
            _ => rows::decode::<FormerValue>(key, value)?.since,
        };
        let of = key.get(..key.len() - 4).unwrap_or_default().to_vec();
        history.spans.entry(of).or_default().push((since, end));
        history.rows.insert(key.to_vec(), keys::former_bytes(key, value));
        Ok(())
    }

    /// Takes the epoch of a current row: `prefix` is that of its former states.
    pub(super) fn current_row(&mut self, prefix: Vec<u8>, since: u32) {
        if since > 0 {
            self.history.current.insert(prefix, since);
        }
    }

    pub(super) fn snapshot_row(&mut self, key: &[u8], value: &[u8]) -> Result<(), KvError> {
        let snapshot: SnapshotRow = rows::decode(key, value)?;
        if !snapshot.removed {
            let epochs = self.history.snapshots.entry(rows::inode_of_key(key)?).or_default();
            epochs.insert(snapshot.epoch);
        }
        keys::number_of_key(key).map(drop)
    }

    /// Bytes of the history by volume.
    pub(super) fn history_bytes(&self) -> HashMap<InodeId, i64> {
        let mut bytes: HashMap<InodeId, i64> = HashMap::new();
        for (key, volume) in &self.history.index {
            let more = self.history.rows.get(key).copied().unwrap_or_default();
            *bytes.entry(*volume).or_default() += more;
        }
        bytes
    }

    pub(super) fn check_history(&mut self) {
        let mut findings: Vec<(InodeId, String)> = Vec::new();
        let of_key = |key: &[u8]| rows::inode_of_key(key).unwrap_or_default();
        for (prefix, spans) in &self.history.spans {
            let mut ended = 0;
            // In the order of their ends, as their keys.
            for (since, end) in spans {
                if since >= end || *since < ended {
                    let detail = format!("has former states that overlap: {since} to {end}");
                    findings.push((of_key(prefix), detail));
                }
                ended = *end;
            }
            let current = self.history.current.get(prefix);
            if current.is_some_and(|current| *current < ended) {
                let detail = format!("has a former state until {ended}, after its current one");
                findings.push((of_key(prefix), detail));
            }
        }
        for key in self.history.rows.keys() {
            if !self.history.index.contains_key(key) {
                findings.push((of_key(key), "has a former state that is not indexed".into()));
            }
        }
        for (key, volume) in &self.history.index {
            if !self.history.rows.contains_key(key) {
                let detail = format!("is in the index of {volume} without a former state");
                findings.push((of_key(key), detail));
            }
        }
        for name in &self.history.named {
            // A directory may have been a volume, which is gone.
            if !name.is_directory && !self.inodes.contains_key(&name.inode) {
                let detail = format!("has a former name in {} but no inode", name.directory);
                findings.push((name.inode, detail));
            }
        }
        for inode in &self.history.inodes {
            if !self.inodes.contains_key(inode) {
                findings.push((*inode, "has former states but no inode".into()));
            }
        }
        findings.extend(self.names_without_state());
        for (inode, detail) in findings {
            self.add("history", inode, detail);
        }
    }

    /// Names that a snapshot shows although their inode has no state of its epoch.
    fn names_without_state(&self) -> Vec<(InodeId, String)> {
        let current =
            self.names.iter().map(|(id, names)| (*id, names.parent, names.since, u32::MAX));
        let former = self.history.named.iter();
        let former = former.map(|name| (name.inode, name.directory, name.since, name.end));
        let mut findings = Vec::new();
        for (id, directory, since, end) in current.chain(former) {
            if let Some(epoch) = self.epoch_without_state(id, since, end) {
                let detail = format!(
                    "has a name in {directory} in the snapshot of epoch {epoch}, but no state of it"
                );
                findings.push((id, detail));
            }
        }
        findings
    }

    /// The first epoch of a snapshot within a range in which an inode has no state.
    fn epoch_without_state(&self, id: InodeId, since: u32, end: u32) -> Option<u32> {
        let node = self.inodes.get(&id)?;
        // A volume in another one is an empty directory in the snapshots of that one.
        let volume = node.quota.filter(|volume| *volume != id)?;
        let snapshots = self.history.snapshots.get(&volume)?;
        // Without a link its current state is not shown.
        let end = if node.links > 0 { end.min(node.since) } else { end };
        if since >= end {
            return None;
        }
        let formers = self.history.spans.get(&keys::former_inodes(id));
        let formers = formers.map(Vec::as_slice).unwrap_or_default();
        snapshots.range(since..end).copied().find(|epoch| {
            // In the order of their ends.
            let next = formers.partition_point(|(_, end)| end <= epoch);
            formers.get(next).is_none_or(|(since, _)| since > epoch)
        })
    }
}
