//! Random operations: the counters of quotas equal the sum over the inodes.

use super::*;
use crate::protocol::{TrashAnswer, TrashChange, TrashQuery};
use crate::tests::trash;

#[derive(Clone, Debug)]
enum Action {
    Change(Kind, usize, usize, u64),
    Collect,
    Recount,
    Expire,
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Create,
    MakeDirectory,
    Unlink,
    RemoveDirectory,
    RemoveTree,
    Rename,
    Exchange,
    Link,
    Report,
    Reserve,
    EndSession,
    SetLength,
    SetQuota,
    Open,
    Close,
    Keep,
    Restore,
    Purge,
}

const PLACES: [&str; 12] = [
    "/a", "/b", "/a/x", "/a/y", "/b/x", "/b/y", "/a/x/1", "/a/x/2", "/b/x/1", "/a/y/1", "/c", "/d",
];

fn action() -> impl Strategy<Value = Action> {
    use Kind::*;
    let kinds = prop::sample::select(vec![
        Create,
        Create,
        Create,
        MakeDirectory,
        MakeDirectory,
        MakeDirectory,
        Unlink,
        RemoveDirectory,
        RemoveTree,
        Rename,
        Rename,
        Rename,
        Exchange,
        Link,
        Report,
        Report,
        Reserve,
        Reserve,
        EndSession,
        SetLength,
        SetQuota,
        SetQuota,
        Open,
        Close,
        Keep,
        Keep,
        Restore,
        Restore,
        Purge,
    ]);
    let places = 0..PLACES.len();
    prop_oneof![
        12 => (kinds, places.clone(), places, 0u64..60)
            .prop_map(|(kind, first, two, number)| Action::Change(kind, first, two, number)),
        1 => Just(Action::Collect),
        1 => Just(Action::Recount),
        1 => Just(Action::Expire),
    ]
}

/// The change that an action makes; `None` if the path has no file for it, or the action is a query.
async fn change_of(
    fixture: &Fixture,
    kind: Kind,
    path: &str,
    two: &str,
    number: u64,
) -> Option<MetaChange> {
    let at = || At::path(path);
    let file = fixture.stat(path).await.ok().filter(|inode| !inode.is_directory());
    let session = u128::from(number % 3);
    Some(match kind {
        Kind::Create => create(path),
        Kind::MakeDirectory => make_directory(path, false),
        Kind::Unlink => MetaChange::Unlink { at: at() },
        Kind::RemoveDirectory => MetaChange::RemoveDirectory { at: at() },
        Kind::RemoveTree => MetaChange::RemoveTree { at: at() },
        Kind::Rename => rename(path, two),
        Kind::Exchange => {
            MetaChange::Rename { from: at(), to: At::path(two), mode: RenameMode::Exchange }
        }
        Kind::Link => MetaChange::Link { from: at(), to: At::path(two) },
        Kind::Report => report(&file?, number, &[]),
        Kind::Reserve => reserve(&file?, session, number),
        Kind::EndSession => report(&file?, 0, &[session]),
        Kind::SetLength => MetaChange::SetLength { at: At::inode(file?.id), length: number },
        Kind::SetQuota => set_quota(path, Some(2 * number), Some(number / 10)),
        Kind::Keep => trash::keep(path, number / 20 * 1000),
        Kind::Restore | Kind::Purge => {
            let volume = fixture.stat(path).await.ok()?.quota?;
            let list = TrashQuery::List { at: At::inode(volume), after: None };
            let reply = fixture.query(MetaQuery::Trash(list)).await.ok()?;
            let MetaReply::Trash(TrashAnswer::Page { entries, .. }) = reply else { return None };
            let id = entries.get(number as usize % entries.len().max(1))?.id;
            let (at, to) = (At::inode(volume), number.is_multiple_of(2).then(|| At::path(two)));
            MetaChange::Trash(match kind {
                Kind::Restore => TrashChange::Restore { at, id, to },
                _ => TrashChange::Purge { at, ids: vec![id] },
            })
        }
        Kind::Open => {
            let (client, at) = (fixture.client, At::inode(file?.id));
            let _ = fixture.query(MetaQuery::Open { at, access: 4, client }).await;
            return None;
        }
        Kind::Close => {
            let (client, release) = (fixture.client, vec![file?.id]);
            let report_open =
                MetaQuery::ReportOpenFiles { client, add: vec![], release, all: true };
            let _ = fixture.query(report_open).await;
            return None;
        }
    })
}

async fn run(actions: Vec<Action>) {
    let fixture = Fixture::memory().await;
    for action in &actions {
        match action {
            Action::Collect => {
                let _ = fixture.tree.collect().await.unwrap();
            }
            Action::Recount => fixture.recount().await,
            // Nothing has expired except in volumes that keep nothing any more.
            Action::Expire => {
                fixture.tree.expire_trash(crate::tree::now(), InodeId(0)).await.unwrap();
            }
            Action::Change(kind, first, two, number) => {
                let (first, two) = (PLACES[*first], PLACES[*two]);
                let Some(change) = change_of(&fixture, *kind, first, two, *number).await else {
                    continue;
                };
                match fixture.change(change).await {
                    Err(error @ MetaError::Damaged { .. }) => panic!("{error}"),
                    Err(MetaError::Unavailable { detail }) => panic!("{detail}"),
                    _ => {}
                }
            }
        }
        check_tree(&fixture.store).await;
    }
    // No chunks are stored, so a recount charges each file only for what it needs.
    fixture.recount().await;
    check_tree(&fixture.store).await;
    let mut txn = fixture.store.begin().await.unwrap();
    for (key, value) in txn.range(&KeyRange::prefix(b"INOD"), usize::MAX).await.unwrap() {
        let row = InodeRow::decode(&key, &value).unwrap();
        if row.charged {
            assert_eq!((row.charged_end, row.excess), (row.needed_end(), 0), "{}", row.inode.id);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]
    #[test]
    fn counters_equal_the_sum_over_the_inodes(actions in prop::collection::vec(action(), 1..60)) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(run(actions));
    }
}
