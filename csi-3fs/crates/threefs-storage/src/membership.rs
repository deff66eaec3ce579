//! Membership records of the targets in their folders (`threefs_core::membership`).

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use threefs_core::checksum::Checksum;
use threefs_core::heartbeat::SeenRouting;
use threefs_core::ids::{RoutingVersion, StoreId, TargetId};
use threefs_core::membership::MembershipRecord;
use threefs_core::routing::Chain;

use crate::identity::replace;

/// Name of the file: the checksum of the record on the first line, then the record.
const FILE: &str = "membership";
const DRAFT: &str = "membership.tmp";

/// The records of a node.
#[derive(Default)]
pub(crate) struct Memberships(Mutex<BTreeMap<TargetId, MembershipRecord>>);

impl Memberships {
    /// Reads the records of all targets in a data folder. A damaged one proves nothing.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub(crate) fn read(data: &Path) -> io::Result<Self> {
        let mut records = BTreeMap::new();
        for entry in std::fs::read_dir(data)? {
            let entry = entry?;
            if !entry.file_type()?.is_dir() {
                continue;
            }
            let folder = entry.path();
            let record = read(&folder);
            if let Some(record) = record.filter(|it| folder.ends_with(folder_name(it.target))) {
                records.insert(record.target, record);
            }
        }
        Ok(Self(Mutex::new(records)))
    }

    /// The target of a record and its chain.
    pub(crate) fn chains(&self) -> Vec<(TargetId, Chain)> {
        let records = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        records.values().map(|record| (record.target, record.chain.clone())).collect()
    }

    pub(crate) fn get(&self, target: TargetId) -> Option<MembershipRecord> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(&target).cloned()
    }

    /// Replaces the record of a target by what its folder contains for this store.
    pub(crate) fn reread(&self, target: TargetId, folder: &Path, store: StoreId) {
        let record = read(folder).filter(|it| it.store == store && it.target == target);
        let mut records = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match record {
            Some(record) => drop(records.insert(target, record)),
            None => drop(records.remove(&target)),
        }
    }

    pub(crate) fn remove(&self, target: TargetId) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&target);
    }

    /// Makes a record durable. Blocks.
    pub(crate) fn write(&self, folder: &Path, record: MembershipRecord) -> io::Result<()> {
        let json = serde_json::to_vec(&record).map_err(io::Error::other)?;
        let content = [format!("{}\n", Checksum::of(&json)).as_bytes(), &json].concat();
        replace(folder, DRAFT, FILE, &content)?;
        let mut records = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        records.insert(record.target, record);
        Ok(())
    }

    /// What a heartbeat reports.
    pub(crate) fn seen(&self, version: RoutingVersion) -> SeenRouting {
        let records = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        SeenRouting { version, records: records.values().cloned().collect() }
    }
}

/// Name of a target's folder.
pub(crate) fn folder_name(target: TargetId) -> PathBuf {
    format!("target-{}", target.0).into()
}

fn read(folder: &Path) -> Option<MembershipRecord> {
    let file = folder.join(FILE);
    let text = match std::fs::read_to_string(&file) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
        Err(error) => {
            tracing::warn!("cannot read {file:?}: {error}");
            return None;
        }
    };
    let record = text.split_once('\n').and_then(|(checksum, json)| {
        let is_intact = Checksum::of(json.as_bytes()).to_string() == checksum;
        serde_json::from_str(json).ok().filter(|_| is_intact)
    });
    if record.is_none() {
        tracing::warn!("{file:?} is damaged: the target has no membership record");
    }
    record
}

#[cfg(test)]
mod tests {
    use threefs_core::ids::{ChainId, ChainVersion, NodeId};
    use threefs_core::routing::{ChainTarget, PublicState};

    use super::*;

    fn record(target: u64, version: u32) -> MembershipRecord {
        let (target, node, state) = (TargetId(target), NodeId(1), PublicState::Serving);
        let targets = vec![ChainTarget { target, node, state }];
        let chain = Chain { id: ChainId(7), version: ChainVersion(version), targets };
        MembershipRecord { target, store: StoreId(u128::MAX - 3), complete: true, chain }
    }

    #[test]
    fn records_survive_and_damaged_or_foreign_ones_do_not_count() {
        let data = tempfile::tempdir().unwrap();
        let records = Memberships::read(data.path()).unwrap();
        for (target, version) in [(1, 3), (1, 4), (2, 5), (3, 6)] {
            let folder = data.path().join(folder_name(TargetId(target)));
            std::fs::create_dir_all(&folder).unwrap();
            records.write(&folder, record(target, version)).unwrap();
        }
        let file = |target| data.path().join(folder_name(TargetId(target))).join(FILE);
        let text = std::fs::read_to_string(file(2)).unwrap();
        std::fs::write(file(2), text.replace("\"version\":5", "\"version\":9")).unwrap();
        std::fs::copy(file(1), file(3)).unwrap();
        let records = Memberships::read(data.path()).unwrap();
        assert_eq!(records.get(TargetId(1)), Some(record(1, 4)));
        assert_eq!(records.chains().len(), 1, "{:?}", records.chains());
        assert_eq!(records.seen(RoutingVersion(3)).records, [record(1, 4)]);
        let folder = data.path().join(folder_name(TargetId(1)));
        records.reread(TargetId(1), &folder, StoreId(8));
        assert_eq!(records.get(TargetId(1)), None, "it is of another store");
    }
}
