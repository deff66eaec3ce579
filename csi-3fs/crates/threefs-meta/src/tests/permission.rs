//! Permissions: mode and owner are enforced for the caller, whatever the client.

use crate::identity::Identity;
use crate::permission::{READ, WRITE};
use crate::protocol::{
    At, LayoutDefaults, MetaChange, MetaError, MetaQuery, MetaRequest, MetaResult, Nanoseconds,
    RenameMode, SetMode, SetTime,
};
use crate::tests::fixture::{Fixture, create, rename, soon};

const ALICE: Identity = Identity::user(1000, 100);
const BOB: Identity = Identity::user(1001, 101);

async fn ask(fixture: &Fixture, caller: &Identity, change: MetaChange) -> MetaResult {
    let (id, caller) = (fixture.next_id(), caller.clone());
    fixture.tree.answer(MetaRequest::Change { id, caller, change }, soon()).await
}

fn make_directory(path: &str, mode: u32) -> MetaChange {
    let (at, defaults) = (At::path(path), LayoutDefaults::default());
    MetaChange::MakeDirectory { at, mode, parents: false, defaults }
}

fn attributes(path: &str) -> MetaChange {
    MetaChange::SetAttributes {
        at: At::path(path),
        follow: true,
        mode: None,
        uid: None,
        gid: None,
        accessed: None,
        modified: None,
    }
}

fn change_mode(path: &str, new: u32) -> MetaChange {
    let MetaChange::SetAttributes { at, .. } = attributes(path) else { unreachable!() };
    MetaChange::SetAttributes {
        at,
        follow: true,
        mode: Some(new),
        uid: None,
        gid: None,
        accessed: None,
        modified: None,
    }
}

fn change_owner(path: &str, uid: Option<u32>, gid: Option<u32>) -> MetaChange {
    MetaChange::SetAttributes {
        at: At::path(path),
        follow: true,
        mode: None,
        uid,
        gid,
        accessed: None,
        modified: None,
    }
}

fn change_times(path: &str, time: SetTime) -> MetaChange {
    MetaChange::SetAttributes {
        at: At::path(path),
        follow: true,
        mode: None,
        uid: None,
        gid: None,
        accessed: Some(time),
        modified: Some(time),
    }
}

fn denied(result: &MetaResult) -> bool {
    matches!(result, Err(MetaError::PermissionDenied { .. }))
}

fn not_permitted(result: &MetaResult) -> bool {
    matches!(result, Err(MetaError::NotPermitted { .. }))
}

#[tokio::test]
async fn creating_moving_and_removing_names_requires_write_permission_on_the_directory() {
    let fixture = Fixture::memory().await;
    assert!(denied(&ask(&fixture, &ALICE, create("/file")).await), "the root is root's");
    ask(&fixture, &Identity::ROOT, make_directory("/home", 0o755)).await.unwrap();
    ask(&fixture, &Identity::ROOT, change_owner("/home", Some(1000), Some(100))).await.unwrap();
    ask(&fixture, &ALICE, create("/home/file")).await.unwrap();
    let file = fixture.stat("/home/file").await.unwrap();
    assert_eq!((file.uid, file.gid), (1000, 100));
    for change in [
        create("/home/bob"),
        rename("/home/file", "/home/other"),
        MetaChange::Unlink { at: At::path("/home/file") },
        make_directory("/home/directory", 0o755),
        MetaChange::SetLength { at: At::path("/home/file"), length: 0 },
    ] {
        let result = ask(&fixture, &BOB, change.clone()).await;
        assert!(denied(&result), "{change:?}: {result:?}");
    }
    // Without search permission, the existence of a name is not revealed.
    ask(&fixture, &ALICE, change_mode("/home", 0o700)).await.unwrap();
    let stat = |caller: &Identity| MetaRequest::Query {
        caller: caller.clone(),
        query: MetaQuery::Stat { at: At::path("/home/nothing"), follow: true },
    };
    assert!(denied(&fixture.tree.answer(stat(&BOB), soon()).await));
    let nothing = fixture.tree.answer(stat(&ALICE), soon()).await;
    assert!(matches!(nothing, Err(MetaError::NotFound { .. })));
}

#[tokio::test]
async fn in_a_sticky_directory_users_remove_only_their_files() {
    let fixture = Fixture::memory().await;
    ask(&fixture, &Identity::ROOT, make_directory("/tmp", 0o1777)).await.unwrap();
    ask(&fixture, &ALICE, create("/tmp/alice")).await.unwrap();
    ask(&fixture, &BOB, create("/tmp/bob")).await.unwrap();
    let unlink = || MetaChange::Unlink { at: At::path("/tmp/alice") };
    assert!(not_permitted(&ask(&fixture, &BOB, unlink()).await));
    assert!(not_permitted(&ask(&fixture, &BOB, rename("/tmp/alice", "/tmp/x")).await));
    assert!(not_permitted(&ask(&fixture, &BOB, rename("/tmp/bob", "/tmp/alice")).await));
    let exchange = MetaChange::Rename {
        from: At::path("/tmp/bob"),
        to: At::path("/tmp/alice"),
        mode: RenameMode::Exchange,
    };
    assert!(not_permitted(&ask(&fixture, &BOB, exchange).await));
    ask(&fixture, &ALICE, unlink()).await.unwrap();
    ask(&fixture, &Identity::ROOT, MetaChange::Unlink { at: At::path("/tmp/bob") }).await.unwrap();
}

#[tokio::test]
async fn only_the_owner_changes_mode_owner_and_times() {
    let fixture = Fixture::memory().await;
    ask(&fixture, &Identity::ROOT, make_directory("/open", 0o777)).await.unwrap();
    ask(&fixture, &ALICE, create("/open/file")).await.unwrap();
    assert!(not_permitted(&ask(&fixture, &BOB, change_mode("/open/file", 0o777)).await));
    assert!(not_permitted(&ask(&fixture, &ALICE, change_owner("/open/file", Some(1), None)).await));
    assert!(not_permitted(&ask(&fixture, &ALICE, change_owner("/open/file", None, Some(7))).await));
    let member = Identity { groups: vec![7], ..ALICE };
    ask(&fixture, &member, change_owner("/open/file", None, Some(7))).await.unwrap();
    // Outside the group the set-group bit is cleared, as it is by a change of owner.
    ask(&fixture, &ALICE, change_mode("/open/file", 0o6755)).await.unwrap();
    assert_eq!(fixture.stat("/open/file").await.unwrap().mode, 0o4755);
    ask(&fixture, &Identity::ROOT, change_owner("/open/file", Some(1000), None)).await.unwrap();
    assert_eq!(fixture.stat("/open/file").await.unwrap().mode, 0o755);
    let past = SetTime::At(Nanoseconds(5));
    assert!(not_permitted(&ask(&fixture, &BOB, change_times("/open/file", past)).await));
    assert!(denied(&ask(&fixture, &BOB, change_times("/open/file", SetTime::Now)).await));
    ask(&fixture, &ALICE, change_mode("/open/file", 0o666)).await.unwrap();
    ask(&fixture, &BOB, change_times("/open/file", SetTime::Now)).await.unwrap();
    ask(&fixture, &ALICE, change_times("/open/file", past)).await.unwrap();
    assert_eq!(fixture.stat("/open/file").await.unwrap().modified, Nanoseconds(5));
}

#[tokio::test]
async fn entries_created_in_a_setgid_directory_inherit_its_group() {
    let fixture = Fixture::memory().await;
    ask(&fixture, &Identity::ROOT, make_directory("/team", 0o2777)).await.unwrap();
    ask(&fixture, &Identity::ROOT, change_owner("/team", None, Some(55))).await.unwrap();
    ask(&fixture, &ALICE, create("/team/file")).await.unwrap();
    ask(&fixture, &ALICE, make_directory("/team/below", 0o755)).await.unwrap();
    assert_eq!(fixture.stat("/team/file").await.unwrap().gid, 55);
    let below = fixture.stat("/team/below").await.unwrap();
    assert_eq!((below.gid, below.mode), (55, 0o2755));
}

#[tokio::test]
async fn open_checks_the_file_mode() {
    let fixture = Fixture::memory().await;
    ask(&fixture, &Identity::ROOT, make_directory("/d", 0o777)).await.unwrap();
    ask(&fixture, &ALICE, create("/d/file")).await.unwrap();
    let file = fixture.stat("/d/file").await.unwrap();
    let open = |caller: &Identity, access| MetaRequest::Query {
        caller: caller.clone(),
        query: MetaQuery::Open { at: At::inode(file.id), access, client: fixture.client },
    };
    fixture.tree.answer(open(&BOB, READ), soon()).await.unwrap();
    assert!(denied(&fixture.tree.answer(open(&BOB, READ | WRITE), soon()).await));
    fixture.tree.answer(open(&ALICE, READ | WRITE), soon()).await.unwrap();
}

#[tokio::test]
async fn attributes_are_set_read_listed_and_bounded() {
    let fixture = Fixture::memory().await;
    fixture.create("/file").await;
    let set = |name: &str, value: Option<Vec<u8>>, mode| MetaChange::SetAttribute {
        at: At::path("/file"),
        name: name.into(),
        value,
        mode,
    };
    const ANY: SetMode = SetMode::Any;
    fixture.change(set("user.b", Some(b"2".to_vec()), ANY)).await.unwrap();
    fixture.change(set("user.a", Some(vec![]), SetMode::Create)).await.unwrap();
    let list = MetaQuery::ListAttributes { at: At::path("/file") };
    let names = fixture.query(list.clone()).await.unwrap();
    assert_eq!(names, crate::MetaReply::Names(vec!["user.a".into(), "user.b".into()]));
    let refused_changes = [
        (set("user.a", Some(vec![]), SetMode::Create), "already exists"),
        (set("user.c", Some(vec![]), SetMode::Replace), "no attribute"),
        (set("user.c", Some(vec![]), SetMode::Was(vec![])), "no attribute"),
        (set("user.a", Some(vec![7]), SetMode::Was(vec![8])), "already exists"),
        (set("user.c", None, ANY), "no attribute"),
        (set("security.selinux", Some(vec![]), ANY), "must start with `user.`"),
        (set("user.", Some(vec![]), ANY), "must start with `user.`"),
        (set("user.big", Some(vec![0; 65537]), ANY), "at most 65536"),
    ];
    for (change, text) in refused_changes {
        let error = fixture.change(change.clone()).await.unwrap_err().to_string();
        assert!(error.contains(text), "{change:?}: {error}");
    }
    fixture.change(set("user.big", Some(vec![0; 65536]), ANY)).await.unwrap();
    let more = fixture.change(set("user.more", Some(vec![0; 65536]), ANY)).await.unwrap_err();
    assert!(matches!(more, MetaError::NoSpace { .. }), "{more}");
    fixture.change(set("user.a", None, ANY)).await.unwrap();
    let get = MetaQuery::GetAttribute { at: At::path("/file"), name: "user.b".into() };
    let value = fixture.query(get).await.unwrap();
    assert_eq!(value, crate::MetaReply::Attribute(b"2".to_vec()));
    fixture.change(MetaChange::Unlink { at: At::path("/file") }).await.unwrap();
    fixture.collect_all().await;
    let mut txn = fixture.store.begin().await.unwrap();
    let remaining = txn.range(&threefs_kv::KeyRange::prefix(b"XATT"), 10).await.unwrap();
    assert!(remaining.is_empty(), "attributes are removed with their inode");
}
