//! Invariants of the rows of a store: they form one tree, and every counter matches what it counts.

use std::collections::{BTreeMap, BTreeSet};

use threefs_core::ids::InodeId;
use threefs_kv::{KeyRange, Store, Transaction};

use crate::protocol::{EntryKind, SESSION_ROW_BYTES};
use crate::rows::{
    self, DentryRow, InodeRow, QuotaRow, REMOVED, RemovalRow, TrashRow, TrashedDirectoryRow,
};

/// Reads all rows and panics unless they form one tree: every name has its inode, every directory
/// has one name and the right parent, link counts match names, and inodes without names are queued
/// for collection.
pub(crate) async fn check_tree(store: &Store) {
    let mut txn = store.begin().await.unwrap();
    let all = |prefix: &'static [u8]| KeyRange::prefix(prefix);
    let inodes: BTreeMap<InodeId, InodeRow> = txn
        .range(&all(b"INOD"), usize::MAX)
        .await
        .unwrap()
        .iter()
        .map(|(key, value)| {
            (rows::inode_of_key(key).unwrap(), InodeRow::decode(key, value).unwrap())
        })
        .collect();
    let mut names: BTreeMap<InodeId, Vec<(InodeId, String)>> = BTreeMap::new();
    for (key, value) in txn.range(&all(b"DENT"), usize::MAX).await.unwrap() {
        let parent = rows::inode_of_key(&key).unwrap();
        let name = String::from_utf8(key[12..].to_vec()).unwrap();
        let entry: DentryRow = rows::decode(&key, &value).unwrap();
        let row = inodes.get(&entry.inode).unwrap_or_else(|| panic!("`{name}` has no inode"));
        assert_eq!(row.kind(), entry.kind, "`{name}`");
        let directory = inodes.get(&parent).unwrap_or_else(|| panic!("`{name}` has no directory"));
        assert!(directory.inode.is_directory(), "`{name}` is in a file");
        names.entry(entry.inode).or_default().push((parent, name));
    }
    check_quotas(&mut txn, &inodes).await;
    check_answers(&mut txn).await;
    check_subdirectories(&mut txn, &inodes).await;
    let trash = check_trash(&mut txn, &inodes).await;
    let queued: BTreeSet<InodeId> = txn
        .range(&all(b"GCQU"), usize::MAX)
        .await
        .unwrap()
        .iter()
        .chain(txn.range(&all(b"GCDE"), usize::MAX).await.unwrap().iter())
        .chain(txn.range(&all(b"GCLA"), usize::MAX).await.unwrap().iter())
        .map(|(key, value)| rows::decode::<RemovalRow>(key, value).unwrap().inode)
        .collect();
    for (id, row) in &inodes {
        let names = names.get(id).cloned().unwrap_or_default();
        let kept = trash.get(id);
        let charged_names: Vec<_> = names.iter().chain(kept).cloned().collect();
        check_metadata_bytes(&mut txn, row, &charged_names).await;
        assert!(!queued.contains(id) || kept.is_none(), "{id}: queued and in the trash");
        let is_queued = queued.contains(id) || kept.is_some();
        match row.kind() {
            EntryKind::Directory if *id == crate::protocol::ROOT => assert!(names.is_empty()),
            EntryKind::Directory if row.parent() == Some(REMOVED) => {
                assert!(names.is_empty() && is_queued, "{id}: removed, {names:?}");
            }
            EntryKind::Directory => {
                let expected = vec![(row.parent().unwrap(), row.name.clone())];
                assert_eq!(names, expected, "{id}: names differ from its row");
                climb(&inodes, *id);
            }
            _ => {
                assert_eq!(row.inode.links as usize, names.len(), "{id}: links, {names:?}");
                assert_eq!(is_queued, names.is_empty(), "{id}: queued");
            }
        }
    }
}

/// Each entry of a trash has a charged inode without a link, and a directory knows its entry.
/// Returns the directory and the name of each.
async fn check_trash(
    txn: &mut Transaction,
    inodes: &BTreeMap<InodeId, InodeRow>,
) -> BTreeMap<InodeId, (InodeId, String)> {
    let mut kept = BTreeMap::new();
    let mut directories = BTreeMap::new();
    for (key, value) in txn.range(&KeyRange::prefix(rows::TRASH), usize::MAX).await.unwrap() {
        let (volume, id) =
            (rows::inode_of_key(&key).unwrap(), rows::trash_id_of_key(&key).unwrap());
        let entry: TrashRow = rows::decode(&key, &value).unwrap();
        let row = inodes.get(&id.inode).unwrap_or_else(|| panic!("{id:?} has no inode"));
        assert_eq!((row.inode.links, row.inode.quota), (0, Some(volume)), "{id:?}");
        assert!(row.charged && !row.dead, "{id:?}");
        assert_eq!(row.kind(), entry.kind, "{id:?}");
        if entry.kind == EntryKind::Directory {
            assert_eq!(row.parent(), Some(REMOVED), "{id:?}");
            directories.insert(id.inode, TrashedDirectoryRow { volume, id });
        }
        assert!(kept.insert(id.inode, (entry.parent, entry.name)).is_none(), "{id:?}: twice");
    }
    for (key, value) in txn.range(&KeyRange::prefix(b"TRDI"), usize::MAX).await.unwrap() {
        let id = rows::inode_of_key(&key).unwrap();
        let location = rows::decode(&key, &value).unwrap();
        assert_eq!(directories.remove(&id), Some(location), "{id} is not in that trash");
    }
    assert!(directories.is_empty(), "directories without a location: {directories:?}");
    kept
}

/// Each directory with a name counts its subdirectories, and no other row has such a counter.
async fn check_subdirectories(txn: &mut Transaction, inodes: &BTreeMap<InodeId, InodeRow>) {
    let mut expected: BTreeMap<InodeId, i64> = BTreeMap::new();
    for (id, row) in inodes {
        if let Some(parent) = row.parent().filter(|parent| parent != id && *parent != REMOVED) {
            *expected.entry(parent).or_default() += 1;
        }
    }
    for (key, value) in txn.range(&KeyRange::prefix(b"DSUB"), usize::MAX).await.unwrap() {
        let id = rows::inode_of_key(&key).unwrap();
        let counter = i64::from_le_bytes(value.try_into().unwrap());
        let row = inodes.get(&id).unwrap_or_else(|| panic!("{id} has a counter but no inode"));
        if row.parent() != Some(REMOVED) {
            assert_eq!(counter, expected.remove(&id).unwrap_or_default(), "{id}: directories");
        }
    }
    expected.retain(|id, _| inodes[id].parent() != Some(REMOVED));
    assert!(expected.is_empty(), "not counted: {expected:?}");
}

/// Charged metadata bytes equal those of names, attributes, targets and sessions.
async fn check_metadata_bytes(txn: &mut Transaction, row: &InodeRow, names: &[(InodeId, String)]) {
    let name_bytes: usize = names.iter().map(|(_, name)| name.len() + 64).sum();
    let prefix = rows::attributes(row.inode.id);
    let attributes = txn.range(&KeyRange::prefix(&prefix), usize::MAX).await.unwrap();
    let attributes: usize =
        attributes.iter().map(|(key, value)| key.len() - prefix.len() + value.len()).sum();
    let target = match &row.inode.kind {
        crate::InodeKind::Symlink { target } => target.len(),
        _ => 0,
    };
    let sessions = KeyRange::prefix(&rows::sessions(row.inode.id));
    let sessions = txn.range(&sessions, usize::MAX).await.unwrap().len();
    let sessions = sessions * SESSION_ROW_BYTES as usize;
    let expected = (name_bytes + attributes + target + sessions) as u64;
    if row.parent() != Some(REMOVED) {
        assert_eq!(row.metadata_bytes, expected, "{}: metadata", row.inode.id);
    }
}

/// Quota counters match the inodes that they count, and each name is in a directory of its inode's
/// quota.
async fn check_quotas(txn: &mut Transaction, inodes: &BTreeMap<InodeId, InodeRow>) {
    let quotas: BTreeMap<InodeId, QuotaRow> = txn
        .range(&KeyRange::prefix(b"QUOT"), usize::MAX)
        .await
        .unwrap()
        .iter()
        .map(|(key, value)| {
            (rows::inode_of_key(key).unwrap(), QuotaRow::decode(key, value).unwrap())
        })
        .collect();
    let mut expected: BTreeMap<InodeId, (i64, i64, i64, i64)> = BTreeMap::new();
    for (id, row) in inodes.iter().filter(|(_, row)| row.charged) {
        let mut next = match row.inode.quota {
            Some(quota) if quota == *id => quotas[id].above,
            quota => quota,
        };
        while let Some((id, quota)) = next.and_then(|id| Some((id, quotas.get(&id)?))) {
            let sums = expected.entry(id).or_default();
            assert!(
                row.charged_end >= row.needed_end() + row.excess,
                "{id} is charged less than it needs"
            );
            sums.0 += (row.charged_end - row.excess) as i64;
            sums.1 += row.excess as i64;
            sums.2 += 1;
            sums.3 += row.metadata_bytes as i64;
            next = quota.above;
        }
    }
    for id in quotas.keys() {
        let mut counter = async |key: Vec<u8>| {
            let bytes = txn.get(&key).await.unwrap();
            bytes.map_or(0, |bytes| i64::from_le_bytes(bytes.try_into().unwrap()))
        };
        let counters = (
            counter(rows::quota_bytes(*id)).await,
            counter(rows::quota_excess(*id)).await,
            counter(rows::quota_inodes(*id)).await,
            counter(rows::quota_metadata(*id)).await,
        );
        assert_eq!(counters, expected.get(id).copied().unwrap_or_default(), "use of quota {id}");
    }
}

/// Counters of answers match the stored answers.
async fn check_answers(txn: &mut Transaction) {
    let mut expected: BTreeMap<InodeId, i64> = BTreeMap::new();
    for (key, value) in txn.range(&KeyRange::prefix(rows::ANSWERS), usize::MAX).await.unwrap() {
        let row = rows::AnswerRow::decode(&key, &value).unwrap();
        for volume in row.volume.iter().flat_map(|volume| [*volume, rows::ALL_VOLUMES]) {
            *expected.entry(volume).or_default() += row.bytes();
        }
    }
    for (key, value) in txn.range(&KeyRange::prefix(rows::ANSWER_BYTES), usize::MAX).await.unwrap()
    {
        let volume = rows::inode_of_key(&key).unwrap();
        let counter = i64::from_le_bytes(value.try_into().unwrap());
        assert_eq!(counter, expected.remove(&volume).unwrap_or_default(), "answers of {volume}");
    }
    assert!(expected.is_empty(), "answers that are not counted: {expected:?}");
}

/// Walks from a directory up to the root, or to the top of a removed tree.
fn climb(inodes: &BTreeMap<InodeId, InodeRow>, from: InodeId) {
    let mut at = from;
    for _ in 0..=inodes.len() {
        match inodes[&at].parent() {
            Some(REMOVED) => return,
            Some(parent) if parent == at => return,
            Some(parent) => at = parent,
            None => panic!("{at} is above {from} but not a directory"),
        }
    }
    panic!("{from} is in a cycle");
}
