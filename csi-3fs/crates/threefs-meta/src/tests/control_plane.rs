//! The control plane is unaffected by data of tenants: links in its paths, attributes that resemble
//! its own.

use threefs_kv::{EmbeddedConfig, Store};

use crate::protocol::{
    At, MetaChange, MetaError, MetaQuery, MetaReply, MetaRequest, MetaResult, Reservation,
    SessionId, SetMode,
};
use crate::tests::fixture::{Fixture, soon};
use crate::tests::invariants::check_tree;
use crate::{EntryKind, Identity, Inode, InodeKind, LengthReport, SpecialKind, Written};

const RECORD: &str = "user.threefs.volume";

async fn change_as(fixture: &Fixture, caller: &Identity, change: MetaChange) -> MetaResult {
    let (id, caller) = (fixture.next_id(), caller.clone());
    fixture.tree.answer(MetaRequest::Change { id, caller, change }, soon()).await
}

async fn query_as(fixture: &Fixture, caller: &Identity, query: MetaQuery) -> MetaResult {
    fixture.tree.answer(MetaRequest::Query { caller: caller.clone(), query }, soon()).await
}

fn symlink(path: &str, target: &str) -> MetaChange {
    MetaChange::MakeSymlink { at: At::path(path), target: target.into() }
}

fn attribute(path: &str, name: &str, value: Option<&[u8]>) -> MetaChange {
    let (at, name, value) = (At::path(path), name.into(), value.map(<[u8]>::to_vec));
    MetaChange::SetAttribute { at, name, value, mode: SetMode::Any }
}

#[tokio::test]
async fn a_path_of_the_control_plane_follows_no_links_and_no_parent_entries() {
    let fixture = Fixture::memory().await;
    fixture.make_directory("/volumes/a/data").await;
    fixture.make_directory("/volumes/b/data").await;
    for (path, target) in
        [("/volumes/a/data/all", "/"), ("/volumes/a/data/rel", "../../b"), ("/alias", "volumes")]
    {
        fixture.change(symlink(path, target)).await.unwrap();
    }
    let caller = Identity::CONTROL_PLANE;
    for path in ["/volumes/a/data/all", "/volumes/a/data/rel/data", "/alias/b/data"] {
        let stat = MetaQuery::Stat { at: At::path(path), follow: true };
        assert!(query_as(&fixture, &Identity::ROOT, stat.clone()).await.is_ok());
        let error = query_as(&fixture, &caller, stat).await.unwrap_err();
        assert!(matches!(error, MetaError::SymlinkOnPath { .. }), "{path}: {error}");
        let quota = |path: &str| MetaChange::SetQuota {
            at: At::path(path),
            bytes_max: Some(1),
            inodes_max: None,
        };
        let under = format!("{path}/x");
        for change in [
            quota(path),
            crate::tests::fixture::make_directory(&under, false),
            crate::tests::fixture::make_directory(&under, true),
            MetaChange::RemoveTree { at: At::path(format!("{path}/volumes")) },
            attribute(&under, RECORD, Some(b"{}")),
        ] {
            let error = change_as(&fixture, &caller, change.clone()).await.unwrap_err();
            assert!(matches!(error, MetaError::SymlinkOnPath { .. }), "{change:?}: {error}");
        }
    }
    let up = MetaQuery::Stat { at: At::path("/volumes/a/../b"), follow: true };
    assert!(matches!(query_as(&fixture, &caller, up).await, Err(MetaError::Invalid { .. })));
    let link = MetaQuery::Stat { at: At::path("/alias"), follow: false };
    assert!(query_as(&fixture, &caller, link).await.is_ok(), "it may look at a link itself");
    assert!(fixture.stat("/volumes/b/data").await.is_ok());
    check_tree(&fixture.store).await;
}

#[tokio::test]
async fn reserved_attributes_are_restricted_to_the_control_plane() {
    let fixture = Fixture::memory().await;
    fixture.make_directory("/v").await;
    let caller = Identity::CONTROL_PLANE;
    change_as(&fixture, &caller, attribute("/v", RECORD, Some(b"record"))).await.unwrap();
    for tenant in [Identity::ROOT, Identity::user(1000, 1000)] {
        for value in [Some(&b"forged"[..]), None] {
            for name in [RECORD, "user.threefs.claim", "user.threefs.anything"] {
                let error = change_as(&fixture, &tenant, attribute("/v", name, value)).await;
                assert!(matches!(error, Err(MetaError::NotPermitted { .. })), "{name}: {error:?}");
            }
        }
        let get = MetaQuery::GetAttribute { at: At::path("/v"), name: RECORD.into() };
        let error = query_as(&fixture, &tenant, get).await;
        assert!(matches!(error, Err(MetaError::NoAttribute { .. })), "{error:?}");
        let list = MetaQuery::ListAttributes { at: At::path("/v") };
        let names = query_as(&fixture, &tenant, list).await.unwrap();
        assert_eq!(names, MetaReply::Names(Vec::new()));
    }
    change_as(&fixture, &Identity::ROOT, attribute("/v", "user.threefsx", Some(b"1")))
        .await
        .unwrap();
    let get = MetaQuery::GetAttribute { at: At::path("/v"), name: RECORD.into() };
    let attribute = query_as(&fixture, &caller, get).await.unwrap();
    assert_eq!(attribute, MetaReply::Attribute(b"record".to_vec()));
}

/// A volume with an inode limit cannot fill the shared store: names, attributes and link targets
/// count as well, and are released with their inodes.
#[tokio::test]
async fn a_limit_of_inodes_bounds_all_metadata_of_a_volume() {
    let fixture = Fixture::memory().await;
    fixture.make_directory("/v").await;
    let quota = MetaChange::SetQuota {
        at: At::path("/v"),
        bytes_max: Some(1 << 30),
        inodes_max: Some(100),
    };
    fixture.change(quota).await.unwrap();
    let value = vec![7; 64 << 10];
    let mut refusal = None;
    for number in 0..100 {
        fixture.create(&format!("/v/{number}")).await;
        let set = attribute(&format!("/v/{number}"), "user.a", Some(&value));
        if let Err(error) = fixture.change(set).await {
            refusal = Some((number, error));
            break;
        }
    }
    let (number, error) = refusal.expect("attributes must count");
    assert!(number < 20 && error.to_string().contains("attributes"), "{number}: {error}");
    check_tree(&fixture.store).await;
    // Names of one inode are not inodes, but count as metadata.
    fixture.change(attribute("/v/0", "user.a", None)).await.unwrap();
    let mut links = 0;
    let error = loop {
        let to = At::path(format!("/v/{}{links}", "n".repeat(200)));
        match fixture.change(MetaChange::Link { from: At::path("/v/0"), to }).await {
            Ok(_) => links += 1,
            Err(error) => break error,
        }
        assert!(links < 2000, "hard links must count");
    };
    assert!(matches!(error, MetaError::QuotaExceeded { .. }), "{error}");
    check_tree(&fixture.store).await;
    fixture.change(MetaChange::RemoveTree { at: At::path("/v") }).await.unwrap();
    fixture.collect_all().await;
    check_tree(&fixture.store).await;
}

#[tokio::test]
async fn special_files_are_created_moved_linked_and_removed() {
    let fixture = Fixture::memory().await;
    let make = |path: &str, kind, device| MetaChange::MakeSpecial {
        at: At::path(path),
        mode: 0o640,
        kind,
        device,
    };
    fixture.change(make("/pipe", SpecialKind::Fifo, 9)).await.unwrap();
    fixture.change(make("/null", SpecialKind::CharacterDevice, 0x103)).await.unwrap();
    let user = Identity::user(5, 5);
    fixture.make_directory("/tmp").await;
    let open = MetaChange::SetAttributes {
        at: At::path("/tmp"),
        follow: true,
        mode: Some(0o777),
        uid: None,
        gid: None,
        accessed: None,
        modified: None,
    };
    fixture.change(open).await.unwrap();
    change_as(&fixture, &user, make("/tmp/socket", SpecialKind::Socket, 0)).await.unwrap();
    let device = make("/tmp/disk", SpecialKind::BlockDevice, 1);
    let error = change_as(&fixture, &user, device).await.unwrap_err();
    assert!(matches!(error, MetaError::NotPermitted { .. }), "{error}");
    let to = At::path("/tmp/pipe");
    fixture.change(MetaChange::Link { from: At::path("/pipe"), to }).await.unwrap();
    fixture.change(crate::tests::fixture::rename("/null", "/tmp/null")).await.unwrap();
    let MetaReply::Page { entries, .. } = fixture
        .query(MetaQuery::List { at: At::path("/tmp"), after: String::new(), limit: 0 })
        .await
        .unwrap()
    else {
        panic!()
    };
    let kinds: Vec<EntryKind> = entries.iter().map(|entry| entry.kind).collect();
    let special = [SpecialKind::CharacterDevice, SpecialKind::Fifo, SpecialKind::Socket];
    assert_eq!(kinds, special.map(EntryKind::Special));
    check_tree(&fixture.store).await;
    fixture.change(MetaChange::RemoveTree { at: At::path("/tmp") }).await.unwrap();
    fixture.change(MetaChange::Unlink { at: At::path("/pipe") }).await.unwrap();
    fixture.collect_all().await;
    assert_eq!(crate::tests::fixture::count_inodes(&fixture.store).await, 1);
    assert!(fixture.recorder.trims.lock().unwrap().is_empty(), "they have no chunks");
}

/// The shared store: when nearly full, it refuses growth, and removals make it usable again.
#[tokio::test]
async fn a_store_that_is_nearly_full_still_removes() {
    let folder = tempfile::tempdir().unwrap();
    let config = EmbeddedConfig { path: folder.path().into(), map_bytes_max: 4 << 20 };
    let store = Store::embedded(config).unwrap();
    let fixture = Fixture::open(store, crate::tests::fixture::config()).await;
    let (mut files, value) = (0, vec![7; 60 << 10]);
    let open = |path: &str| MetaChange::Open { at: At::path(path), write: true };
    let writer = fixture.create("/writer").await;
    fixture.change(reserve(&writer, 1, 1)).await.unwrap();
    let error = loop {
        let create = async {
            fixture.change(crate::tests::fixture::create(&format!("/{files}"))).await?;
            fixture.change(attribute(&format!("/{files}"), "user.a", Some(&value))).await
        };
        match create.await {
            Ok(_) => files += 1,
            Err(error) => break error,
        }
        assert!(files < 200, "the store is never full");
    };
    assert!(matches!(error, MetaError::NoSpace { .. }), "{error}");
    assert!(error.to_string().contains("reserved for removals"), "{error}");
    let link = MetaChange::Link { from: At::path("/0"), to: At::path("/link") };
    let create = crate::tests::fixture::make_directory("/d", false);
    for change in [create, symlink("/l", "x"), link, open("/writer")] {
        let result = fixture.change(change).await;
        assert!(matches!(result, Err(MetaError::NoSpace { .. })), "{result:?}");
    }
    // An existing session continues; a new one is refused without a trace.
    fixture.change(reserve(&writer, 1, 10)).await.unwrap();
    let Ok(MetaReply::Inodes(results)) = fixture.change(reserve(&writer, 2, 20)).await else {
        panic!("a batch is refused by file")
    };
    assert!(matches!(results[..], [Err(MetaError::NoSpace { .. })]), "{results:?}");
    let Ok(MetaReply::Inodes(inodes)) = fixture.change(reserve(&writer, 1, 11)).await else {
        panic!()
    };
    let InodeKind::File { reserved, .. } = inodes[0].as_ref().unwrap().kind else { panic!() };
    assert_eq!(reserved, 11);
    check_tree(&fixture.store).await;
    let cut = MetaChange::SetLength { at: At::path("/writer"), length: 0 };
    fixture.change(cut).await.unwrap();
    change_as(&fixture, &Identity::CONTROL_PLANE, open("/writer")).await.unwrap();
    report_places(&fixture, "/0", 0..100).await.unwrap();
    let result = report_places(&fixture, "/0", 0..300).await;
    assert!(matches!(result, Err(MetaError::NoSpace { .. })), "more than its inode keeps");
    let caller = Identity::CONTROL_PLANE;
    change_as(&fixture, &caller, attribute("/0", RECORD, Some(b"{}"))).await.unwrap();
    for number in 0..files {
        fixture.change(MetaChange::Unlink { at: At::path(format!("/{number}")) }).await.unwrap();
    }
    fixture.collect_all().await;
    fixture.create("/again").await;
    check_tree(&fixture.store).await;
}

fn reserve(file: &Inode, session: u128, end: u64) -> MetaChange {
    let (inode, session) = (file.id, SessionId(session));
    let reservation = Reservation { inode, session, end, truncate_version: 0 };
    MetaChange::Reserve { reservations: vec![reservation] }
}

/// Reports every second chunk.
async fn report_places(fixture: &Fixture, path: &str, places: std::ops::Range<u32>) -> MetaResult {
    let inode = fixture.stat(path).await?;
    let InodeKind::File { truncate_version, ref layout, .. } = inode.kind else { panic!() };
    let length = u64::from(2 * places.end) * u64::from(layout.chunk_bytes);
    let mut written = Written::default();
    places.for_each(|position| written.add(2 * position, 2 * position));
    let report = LengthReport { inode: inode.id, length, truncate_version, written };
    let change = MetaChange::ReportLengths { reports: vec![report], ends: Vec::new() };
    fixture.change(change).await
}
