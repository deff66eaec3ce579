//! Isolation of trashes: only root uses one, within the directory of the credential.

use super::*;
use crate::identity::Identity;
use crate::protocol::MetaRequest;
use crate::tests::fixture::soon;
use crate::tests::scope::{Volumes, is_refused};

fn list(path: &str) -> MetaQuery {
    MetaQuery::Trash(TrashQuery::List { at: At::path(path), after: None })
}

#[tokio::test]
async fn a_credential_reaches_the_trash_of_its_volume_only() {
    let volumes = Volumes::new().await;
    let fixture = &volumes.fixture;
    for path in ["/volumes/a", "/volumes/b"] {
        fixture.change(keep(path, DAY)).await.unwrap();
    }
    fixture.create("/volumes/a/data/mine").await;
    fixture.change(unlink("/volumes/a/data/mine")).await.unwrap();
    fixture.change(unlink("/volumes/b/data/secret")).await.unwrap();
    let (mine, secret) =
        (trash(fixture, "/volumes/a").await[0].id, trash(fixture, "/volumes/b").await[0].id);
    // The credential's directory is its root.
    match volumes.query(list("/")).await.unwrap() {
        MetaReply::Trash(TrashAnswer::Page { entries, .. }) => {
            let paths: Vec<_> = entries.iter().map(|entry| entry.path.as_deref()).collect();
            assert_eq!(paths, [Some("data/mine")]);
        }
        other => panic!("{other:?}"),
    }
    let other = At::inode(fixture.stat("/volumes/b").await.unwrap().id);
    let list_other = MetaQuery::Trash(TrashQuery::List { at: other.clone(), after: None });
    is_refused(volumes.query(list_other).await);
    for change in [
        TrashChange::Restore { at: other.clone(), id: secret, to: None },
        TrashChange::Purge { at: other.clone(), ids: vec![secret] },
        TrashChange::Keep { at: At::path("/"), seconds: 0 },
    ] {
        is_refused(volumes.change(MetaChange::Trash(change)).await);
    }
    is_refused(volumes.query(MetaQuery::Trash(TrashQuery::Count)).await);
    // An id of another volume names nothing in this one.
    let foreign = volumes.change(restore("/", secret, None)).await;
    assert!(matches!(foreign, Err(MetaError::NotFound { .. })), "{foreign:?}");
    volumes.change(purge("/", &[secret])).await.unwrap();
    assert_eq!(trash(fixture, "/volumes/b").await.len(), 1);
    let outside = TrashChange::Restore {
        at: At::path("/"),
        id: mine,
        to: Some(At { directory: other.directory, path: "stolen".into() }),
    };
    is_refused(volumes.change(MetaChange::Trash(outside)).await);
    let reader = volumes.grant(volumes.a.id, true);
    is_refused(volumes.change_with(&reader, restore("/", mine, None)).await);
    is_refused(volumes.change_with(&reader, purge("/", &[mine])).await);
    volumes.change(restore("/", mine, None)).await.unwrap();
    assert_eq!(fixture.stat("/volumes/a/data/mine").await.unwrap().id, mine.inode);
    check_tree(&fixture.store).await;
}

#[tokio::test]
async fn only_root_uses_a_trash() {
    let fixture = Fixture::memory().await;
    volume(&fixture).await;
    fixture.create("/v/file").await;
    fixture.change(unlink("/v/file")).await.unwrap();
    let id = trash(&fixture, "/v").await[0].id;
    let caller = Identity::user(1000, 1000);
    let query = MetaRequest::Query { caller: caller.clone(), query: list("/v") };
    is_refused(fixture.tree.answer(query, soon()).await);
    for change in [keep("/v", 0), restore("/v", id, None), purge("/v", &[id])] {
        let (id, caller) = (fixture.next_id(), caller.clone());
        is_refused(fixture.tree.answer(MetaRequest::Change { id, caller, change }, soon()).await);
    }
}

/// A volume is in a tree that was removed from another volume. A user of the inner volume
/// must not restore the tree around it.
#[tokio::test]
async fn an_entry_does_not_restore_directories_of_another_trash() {
    let fixture = Fixture::memory().await;
    volume(&fixture).await;
    fixture.make_directory("/v/tree").await;
    let inner = volume_with_trash(&fixture, "/v/tree/inner").await;
    fixture.create("/v/tree/inner/file").await;
    fixture.change(unlink("/v/tree/inner/file")).await.unwrap();
    let id = trash(&fixture, "/v/tree/inner").await[0].id;
    fixture.change(remove_tree("/v/tree")).await.unwrap();
    let restore_inner =
        MetaChange::Trash(TrashChange::Restore { at: At::inode(inner.id), id, to: None });
    let error = fixture.change(restore_inner).await.unwrap_err();
    assert!(error.to_string().contains("is gone"), "{error}");
    check_tree(&fixture.store).await;
    let tree = entry_of(&fixture, "tree").await;
    fixture.change(restore("/v", tree.id, None)).await.unwrap();
    fixture.change(restore("/v/tree/inner", id, None)).await.unwrap();
    check_tree(&fixture.store).await;
    fixture.change(remove_tree("/v/tree")).await.unwrap();
    fixture.tree.expire_trash(later(2 * DAY), InodeId(0)).await.unwrap();
    fixture.collect_all().await;
    check_tree(&fixture.store).await;
    assert_eq!(count_inodes(&fixture.store).await, 2);
}

/// The directory of an entry became a volume with another quota.
#[tokio::test]
async fn an_entry_stays_in_its_quota() {
    let fixture = Fixture::memory().await;
    volume(&fixture).await;
    fixture.make_directory("/v/d").await;
    fixture.create("/v/d/file").await;
    fixture.change(unlink("/v/d/file")).await.unwrap();
    fixture.change(set_quota("/v/d", None)).await.unwrap();
    let id = entry_of(&fixture, "d/file").await.id;
    let refused = fixture.change(restore("/v", id, None)).await;
    assert!(matches!(refused, Err(MetaError::CrossQuota { .. })), "{refused:?}");
    fixture.change(restore("/v", id, Some("/v/file"))).await.unwrap();
    check_tree(&fixture.store).await;
}
