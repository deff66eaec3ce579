//! A truncation that continues after another service has completed it keeps later data.

use std::sync::Mutex;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use bytes::Bytes;
use fabric::deadline::Deadline;
use threefs_core::chunk::ContentChange;
use threefs_core::ids::{ChainId, ChunkId, InodeId, TableId, TableVersion};
use threefs_core::layout::{ChainChoice, Layout};
use threefs_meta::{ChunkTrimmer, Pending};

use super::*;
use crate::cluster_test::{Cluster, whole};
use crate::error::OperationName;
use crate::routing::ChunkLocation;

const INODE: InodeId = InodeId(42);
const CHUNK_BYTES: u32 = 1 << 20;
const LONG: Duration = Duration::from_secs(120);

async fn write(client: &Client, index: u32, content: &'static [u8]) {
    let what: OperationName = "test".into();
    let chunk = ChunkId::new(INODE, index);
    let location = ChunkLocation { chain: ChainId(1), chunk, chunk_bytes: CHUNK_BYTES };
    let (change, content) = (ContentChange::Write { offset: 0 }, Bytes::from_static(content));
    client.update(&what, location, change, content, Deadline::after(LONG)).await.unwrap();
}

async fn read(client: &Client, index: u32) -> Option<Bytes> {
    let what: OperationName = "test".into();
    let chunk = ChunkId::new(INODE, index);
    let location = ChunkLocation { chain: ChainId(1), chunk, chunk_bytes: CHUNK_BYTES };
    client.read(&what, location, 0, CHUNK_BYTES, Deadline::after(LONG)).await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_truncation_that_continues_late_keeps_later_data() {
    let cluster = Cluster::of_three(64 << 20).await;
    let client = cluster.client();
    whole(&client).await;
    for index in 0..3 {
        write(&client, index, b"before").await;
    }
    let layout = Layout {
        table: TableId(1),
        table_version: TableVersion(1),
        chunk_bytes: CHUNK_BYTES,
        stripe: 1,
        chains: ChainChoice::Explicit(vec![ChainId(1)]),
    };
    let range = 3..u64::from(CHUNK_BYTES) * 9;
    let cut = async |pending: Pending| {
        ChunkTrimmer::trim(&client, INODE, &layout, range.clone(), pending, Deadline::after(LONG))
            .await
    };
    // It is pending when it is checked; then another service completes it, and a client writes.
    let checks = Arc::new(AtomicU32::new(0));
    let (writer, count) = (client.clone(), Arc::clone(&checks));
    let late: Pending = Arc::new(move || {
        let (writer, count) = (writer.clone(), Arc::clone(&count));
        Box::pin(async move {
            if count.fetch_add(1, SeqCst) > 0 {
                return Err("another service has completed it".into());
            }
            write(&writer, 1, b"later").await;
            write(&writer, 5, b"new").await;
            Ok(())
        })
    });
    let error = cut(late).await.unwrap_err();
    assert!(error.contains("another service"), "{error}");
    assert_eq!(checks.load(SeqCst), 2);
    assert_eq!(read(&client, 1).await.unwrap(), &b"latere"[..]);
    assert_eq!(read(&client, 5).await.unwrap(), &b"new"[..]);

    // While it is pending, every listed chunk is cut, also after it has been written meanwhile.
    let contents = Arc::new(Mutex::new(vec![&b"once"[..], b"twice"]));
    let writer = client.clone();
    let pending: Pending = Arc::new(move || {
        let content = contents.lock().unwrap().pop();
        let writer = writer.clone();
        Box::pin(async move {
            if let Some(content) = content {
                write(&writer, 1, content).await;
            }
            Ok(())
        })
    });
    cut(pending).await.unwrap();
    assert_eq!(read(&client, 0).await.unwrap(), &b"bef"[..]);
    for index in [1, 2, 5] {
        assert_eq!(read(&client, index).await, None, "chunk {index}");
    }
}
