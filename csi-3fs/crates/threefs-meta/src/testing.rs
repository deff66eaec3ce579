//! Helpers of this crate's tests: a tree with chains, a trimmer that writes down what it is asked,
//! and a check that the rows of a store make a tree.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fabric::BoxFuture;
use fabric::deadline::Deadline;
use threefs_core::ids::{ChainId, ClientId, InodeId, TableVersion};
use threefs_core::layout::Layout;
use threefs_core::routing::{ChainTable, RoutingInfo};
use threefs_kv::{
    Backend, Commit, KeyRange, KvError, Row, Snapshot, Store, Transaction, Versionstamp, Watch,
};
use tokio::sync::watch;

use crate::Identity;
use crate::RenameMode;
use crate::chunks::{ChunkTrimmer, DeadFile};
use crate::config::TreeConfig;
use crate::protocol::{
    At, EntryKind, Inode, LayoutDefaults, MetaChange, MetaQuery, MetaReply, MetaRequest,
    MetaResult, RequestId, SESSION_ROW_BYTES,
};
use crate::rows::{self, DentryRow, InodeRow, QuotaRow, REMOVED, RemovalRow};
use crate::tree::Tree;

pub(crate) fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(60))
}

/// Remembers every trim and question; refuses while told so.
#[derive(Default)]
pub(crate) struct Recorder {
    pub trims: Mutex<Vec<(InodeId, u64)>>,
    /// Files that cannot be forgotten now.
    pub unavailable: Mutex<Vec<InodeId>>,
    /// Of trims and removals: the bound of where chunks may be.
    pub ends: Mutex<Vec<(InodeId, u64)>>,
    pub refuse: AtomicBool,
    /// Where the chunks of files end that have some.
    pub stored: Mutex<BTreeMap<InodeId, u64>>,
    /// The ranges in which ends were asked for.
    pub asked: Mutex<Vec<(InodeId, Range<u64>)>>,
}

impl ChunkTrimmer for Recorder {
    fn trim<'a>(
        &'a self,
        inode: InodeId,
        _layout: &'a Layout,
        range: Range<u64>,
        _deadline: Deadline,
    ) -> BoxFuture<'a, Result<(), String>> {
        Box::pin(async move {
            if self.refuse.load(SeqCst) {
                return Err("storage is away".into());
            }
            self.trims.lock().unwrap().push((inode, range.start));
            self.ends.lock().unwrap().push((inode, range.end));
            Ok(())
        })
    }

    fn forget<'a>(
        &'a self,
        files: &'a [DeadFile],
        _deadline: Deadline,
    ) -> BoxFuture<'a, Vec<Result<(), String>>> {
        let forget = |file: &DeadFile| {
            let unavailable = self.unavailable.lock().unwrap().contains(&file.inode);
            if self.refuse.load(SeqCst) || unavailable {
                return Err("storage is away".into());
            }
            self.trims.lock().unwrap().push((file.inode, 0));
            self.ends.lock().unwrap().push((file.inode, file.end));
            Ok(())
        };
        Box::pin(std::future::ready(files.iter().map(forget).collect()))
    }

    fn stored_end<'a>(
        &'a self,
        inode: InodeId,
        _layout: &'a Layout,
        range: Range<u64>,
        _deadline: Deadline,
    ) -> BoxFuture<'a, Result<u64, String>> {
        self.asked.lock().unwrap().push((inode, range.clone()));
        let stored = self.stored.lock().unwrap().get(&inode).copied().unwrap_or_default();
        let end = match self.refuse.load(SeqCst) {
            true => Err("storage is away".into()),
            false => Ok(stored.clamp(range.start, range.end)),
        };
        Box::pin(std::future::ready(end))
    }
}

/// A tree as one client sees it.
pub(crate) struct Fixture {
    pub tree: Tree,
    pub store: Store,
    pub recorder: Arc<Recorder>,
    pub client: ClientId,
    sequence: AtomicU64,
}

impl Fixture {
    pub(crate) async fn memory() -> Self {
        Self::open(Store::memory(), config()).await
    }

    /// In memory, with transactions that interleave.
    pub(crate) async fn interleaving() -> Self {
        Self::open(Store::new(Yielding(Store::memory())), config()).await
    }

    pub(crate) async fn open(store: Store, config: TreeConfig) -> Self {
        let recorder = Arc::new(Recorder::default());
        let trimmer = Arc::clone(&recorder) as Arc<dyn ChunkTrimmer>;
        let tree = Tree::open(store.clone(), config, routing(), trimmer).await.unwrap();
        let client = ClientId(rand::random());
        Self { tree, store, recorder, client, sequence: AtomicU64::new(1) }
    }

    pub(crate) fn next_id(&self) -> RequestId {
        let sequence = self.sequence.fetch_add(1, SeqCst);
        RequestId { client: self.client, sequence, finished_below: 0 }
    }

    pub(crate) async fn change(&self, change: MetaChange) -> MetaResult {
        self.tree
            .answer(MetaRequest::Change { id: self.next_id(), who: Identity::ROOT, change }, soon())
            .await
    }

    pub(crate) async fn query(&self, query: MetaQuery) -> MetaResult {
        self.tree.answer(MetaRequest::Query { who: Identity::ROOT, query }, soon()).await
    }

    pub(crate) async fn stat(&self, path: &str) -> Result<Inode, crate::MetaError> {
        match self.query(MetaQuery::Stat { at: At::path(path), follow: true }).await? {
            MetaReply::Inode(inode) => Ok(inode),
            other => panic!("{other:?}"),
        }
    }

    pub(crate) async fn create(&self, path: &str) -> Inode {
        match self.change(create(path)).await.unwrap() {
            MetaReply::Opened { inode, .. } => inode,
            other => panic!("{other:?}"),
        }
    }

    pub(crate) async fn make_directory(&self, path: &str) -> Inode {
        match self.change(make_directory(path, true)).await.unwrap() {
            MetaReply::Inode(inode) => inode,
            other => panic!("{other:?}"),
        }
    }

    /// Counts all files again that count for more than they need and have done so for long enough.
    pub(crate) async fn recount(&self) {
        self.tree.recount(&mut Vec::new()).await.unwrap();
    }

    /// Collects until nothing is left to collect.
    pub(crate) async fn collect_all(&self) {
        while self.tree.collect().await.unwrap() > 0 {}
    }
}

pub(crate) fn config() -> TreeConfig {
    TreeConfig {
        collect_delay_ms: 0,
        dead_grace_ms: 0,
        recount_wait_ms: 0,
        ..TreeConfig::default()
    }
}

pub(crate) fn routing() -> watch::Receiver<Arc<RoutingInfo>> {
    let chains = (1..=4).map(ChainId).collect();
    let table = ChainTable { id: threefs_mgmtd::FIRST_TABLE, version: TableVersion(1), chains };
    let routing = RoutingInfo { tables: vec![table], ..RoutingInfo::default() };
    watch::channel(Arc::new(routing)).1
}

pub(crate) fn create(path: &str) -> MetaChange {
    let (at, layout) = (At::path(path), LayoutDefaults::default());
    MetaChange::Create { at, mode: 0o644, exclusive: false, layout, write: false, hold: false }
}

pub(crate) fn make_directory(path: &str, parents: bool) -> MetaChange {
    let (at, defaults) = (At::path(path), LayoutDefaults::default());
    MetaChange::MakeDirectory { at, mode: 0o755, parents, defaults }
}

pub(crate) fn rename(from: &str, to: &str) -> MetaChange {
    MetaChange::Rename { from: At::path(from), to: At::path(to), mode: RenameMode::Replace }
}

/// Reads all rows and panics unless they make one tree: every name has its inode, every directory
/// one name and the right parent, links are as many as names, and what no name reaches is queued
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
        let row = inodes.get(&entry.inode).unwrap_or_else(|| panic!("`{name}` names nothing"));
        assert_eq!(row.kind(), entry.kind, "`{name}`");
        let holder = inodes.get(&parent).unwrap_or_else(|| panic!("`{name}` is in nothing"));
        assert!(holder.inode.is_directory(), "`{name}` is in a file");
        names.entry(entry.inode).or_default().push((parent, name));
    }
    check_quotas(&mut txn, &inodes).await;
    check_answers(&mut txn).await;
    check_subdirectories(&mut txn, &inodes).await;
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
        check_metadata_bytes(&mut txn, row, &names).await;
        let is_queued = queued.contains(id);
        match row.kind() {
            EntryKind::Directory if *id == crate::protocol::ROOT => assert!(names.is_empty()),
            EntryKind::Directory if row.parent() == Some(REMOVED) => {
                assert!(names.is_empty() && is_queued, "{id}: removed, {names:?}");
            }
            EntryKind::Directory => {
                let expected = vec![(row.parent().unwrap(), row.name.clone())];
                assert_eq!(names, expected, "{id} has other names than it says");
                climb(&inodes, *id);
            }
            _ => {
                assert_eq!(row.inode.links as usize, names.len(), "{id}: links, {names:?}");
                assert_eq!(is_queued, names.is_empty(), "{id}: queued");
            }
        }
    }
}

/// Each directory that has a name counts the directories in it, and no other row counts anything.
async fn check_subdirectories(txn: &mut Transaction, inodes: &BTreeMap<InodeId, InodeRow>) {
    let mut expected: BTreeMap<InodeId, i64> = BTreeMap::new();
    for (id, row) in inodes {
        if let Some(parent) = row.parent().filter(|parent| parent != id && *parent != REMOVED) {
            *expected.entry(parent).or_default() += 1;
        }
    }
    for (key, value) in txn.range(&KeyRange::prefix(b"DSUB"), usize::MAX).await.unwrap() {
        let id = rows::inode_of_key(&key).unwrap();
        let counted = i64::from_le_bytes(value.try_into().unwrap());
        let row = inodes.get(&id).unwrap_or_else(|| panic!("{id} is counted in and gone"));
        if row.parent() != Some(REMOVED) {
            assert_eq!(counted, expected.remove(&id).unwrap_or_default(), "{id}: directories");
        }
    }
    expected.retain(|id, _| inodes[id].parent() != Some(REMOVED));
    assert!(expected.is_empty(), "not counted: {expected:?}");
}

/// What is kept of names, attributes and targets is what they are.
async fn check_metadata_bytes(txn: &mut Transaction, row: &InodeRow, names: &[(InodeId, String)]) {
    let named: usize = names.iter().map(|(_, name)| name.len() + 64).sum();
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
    let expected = (named + attributes + target + sessions) as u64;
    if row.parent() != Some(REMOVED) {
        assert_eq!(row.metadata_bytes, expected, "{}: metadata", row.inode.id);
    }
}

/// Counters are exactly what the inodes that count for them are, and each name is in a directory of
/// its inode's quota.
async fn check_quotas(txn: &mut Transaction, inodes: &BTreeMap<InodeId, InodeRow>) {
    let quotas: BTreeMap<InodeId, QuotaRow> = txn
        .range(&KeyRange::prefix(b"QUOT"), usize::MAX)
        .await
        .unwrap()
        .iter()
        .map(|(key, value)| (rows::inode_of_key(key).unwrap(), rows::decode(key, value).unwrap()))
        .collect();
    let mut expected: BTreeMap<InodeId, (i64, i64, i64, i64)> = BTreeMap::new();
    for (id, row) in inodes.iter().filter(|(_, row)| row.charged) {
        let mut next = match row.inode.quota {
            Some(quota) if quota == *id => quotas[id].above,
            quota => quota,
        };
        while let Some((id, quota)) = next.and_then(|id| Some((id, quotas.get(&id)?))) {
            let counted = expected.entry(id).or_default();
            assert!(
                row.charged_end >= row.needed_end() + row.excess,
                "{id} counts for less than it needs"
            );
            counted.0 += (row.charged_end - row.excess) as i64;
            counted.1 += row.excess as i64;
            counted.2 += 1;
            counted.3 += row.metadata_bytes as i64;
            next = quota.above;
        }
    }
    for id in quotas.keys() {
        let mut counted = async |key: Vec<u8>| {
            let bytes = txn.get(&key).await.unwrap();
            bytes.map_or(0, |bytes| i64::from_le_bytes(bytes.try_into().unwrap()))
        };
        let counted = (
            counted(rows::quota_bytes(*id)).await,
            counted(rows::quota_excess(*id)).await,
            counted(rows::quota_inodes(*id)).await,
            counted(rows::quota_metadata(*id)).await,
        );
        assert_eq!(counted, expected.get(id).copied().unwrap_or_default(), "use of quota {id}");
    }
}

/// Counters of kept answers are exactly what is kept.
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
        let counted = i64::from_le_bytes(value.try_into().unwrap());
        assert_eq!(counted, expected.remove(&volume).unwrap_or_default(), "answers of {volume}");
    }
    assert!(expected.is_empty(), "answers that are not counted: {expected:?}");
}

/// From a directory one must come to the root, or to the top of something removed.
fn climb(inodes: &BTreeMap<InodeId, InodeRow>, from: InodeId) {
    let mut at = from;
    for _ in 0..=inodes.len() {
        match inodes[&at].parent() {
            Some(REMOVED) => return,
            Some(parent) if parent == at => return,
            Some(parent) => at = parent,
            None => panic!("{at} is above {from} and no directory"),
        }
    }
    panic!("{from} is in a circle");
}

/// How many inodes there are.
pub(crate) async fn count_inodes(store: &Store) -> usize {
    let mut txn = store.begin().await.unwrap();
    txn.range(&KeyRange::prefix(b"INOD"), usize::MAX).await.unwrap().len()
}

/// A store that lets others run before everything it does, so that transactions interleave.
pub(crate) struct Yielding(pub Store);

struct YieldingSnapshot(Box<dyn Snapshot>);

/// Zero to two turns for others, differently each time.
async fn yield_some() {
    static CALLS: AtomicU64 = AtomicU64::new(0);
    let call = CALLS.fetch_add(1, SeqCst).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    for _ in 0..(call >> 62) {
        tokio::task::yield_now().await;
    }
}

impl Backend for Yielding {
    fn snapshot(&self) -> BoxFuture<'_, Result<Box<dyn Snapshot>, KvError>> {
        Box::pin(async {
            yield_some().await;
            Ok(Box::new(YieldingSnapshot(self.0.snapshot().await?)) as Box<dyn Snapshot>)
        })
    }

    fn commit(&self, commit: Commit) -> BoxFuture<'_, Result<Versionstamp, KvError>> {
        Box::pin(async {
            yield_some().await;
            self.0.commit(commit).await
        })
    }

    fn watch(&self, key: &[u8]) -> Watch {
        self.0.watch(key)
    }

    fn exclusive_opening(&self) -> Option<u128> {
        self.0.exclusive_opening()
    }
}

impl Snapshot for YieldingSnapshot {
    fn version(&self) -> u64 {
        self.0.version()
    }

    fn get<'a>(&'a self, key: &'a [u8]) -> BoxFuture<'a, Result<Option<Vec<u8>>, KvError>> {
        Box::pin(async {
            yield_some().await;
            self.0.get(key).await
        })
    }

    fn range<'a>(
        &'a self,
        range: &'a KeyRange,
        limit: usize,
    ) -> BoxFuture<'a, Result<Vec<Row>, KvError>> {
        Box::pin(async move {
            yield_some().await;
            self.0.range(range, limit).await
        })
    }
}

/// A store that commits and then, while told so, says that it does not know whether it did.
pub(crate) struct Unsure(pub Store, pub Arc<AtomicBool>);

impl Backend for Unsure {
    fn snapshot(&self) -> BoxFuture<'_, Result<Box<dyn Snapshot>, KvError>> {
        Backend::snapshot(&self.0)
    }

    fn commit(&self, commit: Commit) -> BoxFuture<'_, Result<Versionstamp, KvError>> {
        Box::pin(async {
            let stamp = self.0.commit(commit).await?;
            match self.1.load(SeqCst) {
                true => Err(KvError::CommitUnknown { detail: "the disk said nothing".into() }),
                false => Ok(stamp),
            }
        })
    }

    fn watch(&self, key: &[u8]) -> Watch {
        self.0.watch(key)
    }

    fn exclusive_opening(&self) -> Option<u128> {
        self.0.exclusive_opening()
    }
}

/// A store that notes the most reads of one transaction.
pub(crate) struct MostReads(pub Store, pub Arc<AtomicU64>);

struct CountingSnapshot {
    snapshot: Box<dyn Snapshot>,
    reads: AtomicU64,
    most: Arc<AtomicU64>,
}

impl CountingSnapshot {
    fn count(&self) {
        self.most.fetch_max(self.reads.fetch_add(1, SeqCst) + 1, SeqCst);
    }
}

impl Backend for MostReads {
    fn snapshot(&self) -> BoxFuture<'_, Result<Box<dyn Snapshot>, KvError>> {
        Box::pin(async {
            let (snapshot, most) = (Backend::snapshot(&self.0).await?, Arc::clone(&self.1));
            let reads = AtomicU64::new(0);
            Ok(Box::new(CountingSnapshot { snapshot, reads, most }) as Box<dyn Snapshot>)
        })
    }

    fn commit(&self, commit: Commit) -> BoxFuture<'_, Result<Versionstamp, KvError>> {
        self.0.commit(commit)
    }

    fn watch(&self, key: &[u8]) -> Watch {
        self.0.watch(key)
    }

    fn exclusive_opening(&self) -> Option<u128> {
        self.0.exclusive_opening()
    }
}

impl Snapshot for CountingSnapshot {
    fn version(&self) -> u64 {
        self.snapshot.version()
    }

    fn get<'a>(&'a self, key: &'a [u8]) -> BoxFuture<'a, Result<Option<Vec<u8>>, KvError>> {
        self.count();
        self.snapshot.get(key)
    }

    fn range<'a>(
        &'a self,
        range: &'a KeyRange,
        limit: usize,
    ) -> BoxFuture<'a, Result<Vec<Row>, KvError>> {
        self.count();
        self.snapshot.range(range, limit)
    }
}
