//! Suspicions that files have refuted before they are confirmed.

use std::collections::BTreeSet;

use fabric::deadline::Deadline;
use threefs_core::chunk::ContentChange;
use threefs_core::ids::{ChainId, InodeId};

use super::{Audit, Compared};
use crate::audit_test::{LONG, WithTree, change, located, write};

/// The leaked inodes among these.
async fn leaked(audit: &Audit, chain: ChainId, inode: InodeId) -> Vec<InodeId> {
    let mut compared = Compared::default();
    let confirmed = audit.tree.confirm_unknown(chain, BTreeSet::from([inode]), &mut compared).await;
    assert!(confirmed.is_ok());
    compared.leaked.iter().map(|(inode, ..)| *inode).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn files_that_are_created_or_collected_after_their_chunk_was_listed_are_not_leaked() {
    let tree = WithTree::start().await;
    let client = tree.client();
    let audit = client.audit().await.unwrap();
    client.batch_write(vec![write("/file", 0, 100)], true).await.unwrap();
    let location = located(&client, "/file", 0).await;
    let (chain, inode) = (location.chain, location.chunk.inode);
    assert_eq!(leaked(&audit, chain, inode).await, []);
    client.unlink("/file").await.unwrap();
    assert_eq!(leaked(&audit, chain, inode).await, []);
    let deadline = Deadline::after(LONG);
    while audit.tree.unknown_of(&[inode]).await.unwrap().is_empty() {
        assert!(!deadline.passed(), "the file was not collected");
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    assert_eq!(leaked(&audit, chain, inode).await, []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn chunks_that_are_written_or_cut_after_they_were_absent_are_not_missing() {
    let tree = WithTree::start().await;
    let client = tree.client();
    let mut audit = client.audit().await.unwrap();
    client.batch_write(vec![write("/file", 0, 5 << 20)], true).await.unwrap();
    let location = located(&client, "/file", 1).await;
    let suspects = vec![(location.chain, location.chunk.last_version())];
    let page = audit.next_page().await.unwrap();
    // It exists.
    audit.confirm_missing(&page, suspects.clone()).await.unwrap();
    assert_eq!(audit.report().missing_chunks, 0);
    // It is a hole.
    let file = client.open("/file").await.unwrap();
    client.set_length(&file, 1).await.unwrap();
    client.set_length(&file, 5 << 20).await.unwrap();
    audit.confirm_missing(&page, suspects.clone()).await.unwrap();
    assert_eq!(audit.report().missing_chunks, 0);
    // It is lost.
    client.batch_write(vec![write("/file", 0, 5 << 20)], false).await.unwrap();
    change(&client, location, ContentChange::Remove, &[]).await;
    audit.confirm_missing(&page, suspects).await.unwrap();
    assert_eq!(audit.report().missing_chunks, 1);
}
