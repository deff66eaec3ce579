//! Locks requested with volume credentials.

use threefs_core::ids::{ClientId, InodeId};

use crate::protocol::{
    At, LockAnswer, LockChange, LockKind, LockQuery, LockRequest, MetaChange, MetaQuery, MetaReply,
};
use crate::tests::fixture::create;
use crate::tests::scope::{Volumes, is_refused};

const SESSION: u64 = 5;

fn lock(inode: InodeId) -> LockRequest {
    let (kind, owner, first, last) = (LockKind::Posix, 1, 0, u64::MAX);
    LockRequest { inode, kind, owner, first, last, exclusive: true, pid: 0 }
}

#[tokio::test]
async fn files_of_other_volumes_can_not_be_locked_or_tested() {
    let volumes = Volumes::new().await;
    let session = SESSION;
    let change = |change| volumes.change(MetaChange::Lock(change));
    change(LockChange::Start { session }).await.unwrap();
    let (lock, inode) = (lock(volumes.secret.id), volumes.secret.id);
    is_refused(change(LockChange::Set { session, lock, wait: None }).await);
    is_refused(change(LockChange::Set { session, lock, wait: Some(1) }).await);
    is_refused(change(LockChange::Clear { session, lock }).await);
    is_refused(change(LockChange::ClearFile { session, inode }).await);
    is_refused(change(LockChange::Cancel { session, lock, wait: 1 }).await);
    let client = ClientId(1);
    is_refused(volumes.query(MetaQuery::Lock(LockQuery::Test { client, lock })).await);
    is_refused(volumes.query(MetaQuery::Lock(LockQuery::Await { client, lock, wait: 1 })).await);
}

#[tokio::test]
async fn a_read_only_credential_locks_files_of_its_volume() {
    let volumes = Volumes::new().await;
    let MetaReply::Opened { inode, .. } = volumes.change(create("/data/file")).await.unwrap()
    else {
        panic!("not created")
    };
    let grant = volumes.grant(volumes.a.id, true);
    let session = SESSION;
    let change = |change| volumes.change_with(&grant, MetaChange::Lock(change));
    change(LockChange::Start { session }).await.unwrap();
    let set = change(LockChange::Set { session, lock: lock(inode.id), wait: None }).await;
    assert_eq!(set, Ok(MetaReply::Lock(LockAnswer::Granted)));
    let append = LockRequest { kind: LockKind::Append, ..lock(inode.id) };
    is_refused(change(LockChange::Set { session, lock: append, wait: None }).await);
    change(LockChange::End { session }).await.unwrap();
}

#[tokio::test]
async fn locks_of_a_removed_file_can_be_released() {
    let volumes = Volumes::new().await;
    let MetaReply::Opened { inode, .. } = volumes.change(create("/data/file")).await.unwrap()
    else {
        panic!("not created")
    };
    let (session, lock) = (SESSION, lock(inode.id));
    let change = |change| volumes.change(MetaChange::Lock(change));
    change(LockChange::Start { session }).await.unwrap();
    let set = change(LockChange::Set { session, lock, wait: None }).await;
    assert_eq!(set, Ok(MetaReply::Lock(LockAnswer::Granted)));
    volumes.change(MetaChange::Unlink { at: At::path("/data/file") }).await.unwrap();
    let released = change(LockChange::Clear { session, lock }).await;
    assert_eq!(released, Ok(MetaReply::Lock(LockAnswer::Released { in_use: false })));
}
