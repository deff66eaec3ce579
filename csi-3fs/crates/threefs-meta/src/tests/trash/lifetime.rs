//! The end of entries: expiry, purge, removal of the volume; a store that is nearly full.

use super::*;

#[tokio::test]
async fn entries_expire_after_the_retention_and_free_the_quota() {
    let fixture = Fixture::memory().await;
    volume(&fixture).await;
    let file_inode = file(&fixture, "/v/file", 10).await;
    fixture.make_directory("/v/d").await;
    fixture.change(remove_tree("/v/d")).await.unwrap();
    fixture.change(unlink("/v/file")).await.unwrap();
    fixture.tree.expire_trash(later(DAY - 60), InodeId(0)).await.unwrap();
    assert_eq!(trash(&fixture, "/v").await.len(), 2);
    fixture.tree.expire_trash(later(DAY + 60), InodeId(0)).await.unwrap();
    assert!(trash(&fixture, "/v").await.is_empty());
    check_tree(&fixture.store).await;
    fixture.collect_all().await;
    assert_eq!(used(&fixture).await, (0, 0));
    // Storage forgets a file of a quota twice.
    assert_eq!(*fixture.recorder.trims.lock().unwrap(), [(file_inode.id, 0); 2]);
    // Another quota does not change the retention; 0 ends it for what is kept.
    fixture.change(set_quota("/v", Some(500))).await.unwrap();
    fixture.create("/v/file").await;
    fixture.change(unlink("/v/file")).await.unwrap();
    assert_eq!(trash(&fixture, "/v").await.len(), 1);
    fixture.change(keep("/v", 0)).await.unwrap();
    fixture.tree.expire_trash(now(), InodeId(0)).await.unwrap();
    assert!(trash(&fixture, "/v").await.is_empty());
}

#[tokio::test]
async fn one_round_of_expiry_is_bounded_and_fair() {
    let fixture = Fixture::memory().await;
    volume_with_trash(&fixture, "/busy").await;
    volume_with_trash(&fixture, "/quiet").await;
    let many = TRASH_PAGE_MAX * 70;
    for number in 0..many {
        fixture.create(&format!("/busy/{number}")).await;
        fixture.change(unlink(&format!("/busy/{number}"))).await.unwrap();
    }
    fixture.create("/quiet/file").await;
    fixture.change(unlink("/quiet/file")).await.unwrap();
    fixture.tree.expire_trash(later(2 * DAY), InodeId(0)).await.unwrap();
    assert!(trash(&fixture, "/quiet").await.is_empty());
    assert_eq!(trash(&fixture, "/busy").await.len(), many - TRASH_PAGE_MAX * 63);
    fixture.tree.expire_trash(later(2 * DAY), InodeId(0)).await.unwrap();
    assert!(trash(&fixture, "/busy").await.is_empty());
}

#[tokio::test]
async fn every_volume_has_its_turn_in_some_round() {
    let fixture = Fixture::memory().await;
    let volumes: Vec<String> = (0..200).map(|number| format!("/v{number:03}")).collect();
    for volume in &volumes {
        volume_with_trash(&fixture, volume).await;
        fixture.create(&format!("{volume}/file")).await;
        fixture.change(unlink(&format!("{volume}/file"))).await.unwrap();
    }
    // Only the entry of the last one expires: the other volumes keep theirs.
    let (last, others) = volumes.split_last().unwrap();
    for volume in others {
        fixture.change(keep(volume, 10 * DAY)).await.unwrap();
    }
    let mut after = InodeId(0);
    for _ in 0..4 {
        after = fixture.tree.expire_trash(later(2 * DAY), after).await.unwrap();
    }
    assert!(trash(&fixture, last).await.is_empty());
    assert_eq!(after, InodeId(0), "the next round starts again");
    for volume in others {
        assert_eq!(trash(&fixture, volume).await.len(), 1);
    }
}

#[tokio::test]
async fn a_full_quota_is_freed_by_a_purge() {
    let fixture = Fixture::memory().await;
    volume(&fixture).await;
    file(&fixture, "/v/file", 1000).await;
    fixture.change(unlink("/v/file")).await.unwrap();
    let grow = async |path: &str| {
        let inode = fixture.create(path).await;
        let set = MetaChange::SetLength { at: At::inode(inode.id), length: 900 };
        fixture.change(set).await
    };
    let full = grow("/v/more").await;
    assert!(matches!(full, Err(MetaError::QuotaExceeded { .. })), "{full:?}");
    let entry = entry_of(&fixture, "file").await;
    fixture.change(purge("/v", &[entry.id])).await.unwrap();
    fixture.change(purge("/v", &[entry.id])).await.unwrap();
    grow("/v/other").await.unwrap();
    check_tree(&fixture.store).await;
    let many = vec![entry.id; TRASH_PAGE_MAX + 1];
    let refused = fixture.change(purge("/v", &many)).await;
    assert!(matches!(refused, Err(MetaError::Invalid { .. })), "{refused:?}");
}

#[tokio::test]
async fn an_open_file_is_readable_after_its_purge() {
    let fixture = Fixture::memory().await;
    volume(&fixture).await;
    let (client, opened) = (ClientId(5), file(&fixture, "/v/file", 9).await);
    let open = MetaQuery::Open { at: At::inode(opened.id), access: 4, client };
    fixture.query(open).await.unwrap();
    fixture.change(unlink("/v/file")).await.unwrap();
    let entry = entry_of(&fixture, "file").await;
    fixture.change(purge("/v", &[entry.id])).await.unwrap();
    fixture.collect_all().await;
    let stat = || MetaQuery::Stat { at: At::inode(opened.id), follow: false };
    assert!(fixture.query(stat()).await.is_ok(), "a client has it open");
    assert_eq!(used(&fixture).await, (9, 1));
    check_tree(&fixture.store).await;
    let (add, release) = (Vec::new(), vec![opened.id]);
    let close = MetaQuery::ReportOpenFiles { client, add, release, all: false };
    fixture.query(close).await.unwrap();
    fixture.collect_all().await;
    assert!(fixture.query(stat()).await.is_err());
    assert_eq!(used(&fixture).await, (0, 0));
}

#[tokio::test]
async fn a_volume_is_removed_with_its_trash() {
    for whole in [true, false] {
        let fixture = Fixture::memory().await;
        volume(&fixture).await;
        for number in 0..300 {
            fixture.create(&format!("/v/{number}")).await;
            fixture.change(unlink(&format!("/v/{number}"))).await.unwrap();
        }
        let remove = if whole { remove_tree("/v") } else { remove_directory("/v") };
        fixture.change(remove).await.unwrap();
        fixture.collect_all().await;
        check_tree(&fixture.store).await;
        assert_eq!(count_inodes(&fixture.store).await, 1);
    }
}

/// A removal must free space in a store that is nearly full.
#[tokio::test]
async fn a_store_that_is_nearly_full_keeps_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let config_of_store = EmbeddedConfig { path: folder.path().into(), map_bytes_max: 4 << 20 };
    let fixture = Fixture::open(Store::embedded(config_of_store).unwrap(), config()).await;
    volume(&fixture).await;
    fixture.create("/v/file").await;
    let mut files = 0;
    loop {
        let path = format!("/{files}");
        let (at, name) = (At::path(&path), "user.a".into());
        let (value, mode) = (Some(vec![7; 60 << 10]), crate::SetMode::Any);
        if fixture.change(crate::tests::fixture::create(&path)).await.is_err()
            || fixture.change(MetaChange::SetAttribute { at, name, value, mode }).await.is_err()
        {
            break;
        }
        files += 1;
        assert!(files < 200, "the store is never full");
    }
    fixture.change(unlink("/v/file")).await.unwrap();
    assert!(trash(&fixture, "/v").await.is_empty());
    fixture.collect_all().await;
    check_tree(&fixture.store).await;
}
