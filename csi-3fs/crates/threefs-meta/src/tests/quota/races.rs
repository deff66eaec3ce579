//! Concurrent writers do not exceed a quota.

use super::*;

/// Many writers fill a quota to its last byte and inode, and none exceeds it.
async fn race(store: Store, writers: u64) {
    let fixture = Arc::new(Fixture::open(store, config()).await);
    fixture.make_directory("/v/in").await;
    fixture.change(set_quota("/v", Some(1000), Some(40))).await.unwrap();
    fixture.change(set_quota("/v/in", Some(900), None)).await.unwrap();
    let tasks: Vec<_> = (0..writers)
        .map(|number| {
            let fixture = Arc::clone(&fixture);
            tokio::spawn(async move {
                let (mut files, mut bytes) = (0u64, 0u64);
                for round in 0..20u64 {
                    let path = format!("/v/in/{number}-{round}");
                    let client = ClientId(u128::from(number) + 1);
                    let at = |sequence| RequestId { client, sequence, finished_below: 0 };
                    let call = |sequence, change| MetaRequest::Change {
                        id: at(sequence),
                        caller: Identity::ROOT,
                        change,
                    };
                    let result =
                        fixture.tree.answer(call(3 * round + 1, create(&path)), soon()).await;
                    let file = match result {
                        Ok(MetaReply::Opened { inode, .. }) => inode,
                        Err(MetaError::QuotaExceeded { .. }) => continue,
                        other => panic!("{other:?}"),
                    };
                    files += 1;
                    let grow = reserve(&file, 1, 7 + number);
                    match fixture.tree.answer(call(3 * round + 2, grow), soon()).await {
                        Ok(_) => {}
                        Err(MetaError::QuotaExceeded { .. }) => continue,
                        other => panic!("{other:?}"),
                    }
                    let request = report(&file, 7 + number, &[1]);
                    fixture.tree.answer(call(3 * round + 3, request), soon()).await.unwrap();
                    bytes += 7 + number;
                }
                (files, bytes)
            })
        })
        .collect();
    let (mut files, mut bytes) = (0, 0);
    for task in tasks {
        let request = task.await.unwrap();
        files += request.0;
        bytes += request.1;
        let quota = quotas(&fixture, "/v").await[0];
        assert!(quota.bytes_used <= 1000 && quota.inodes_used <= 40, "{quota:?}");
    }
    assert_eq!(used(&fixture, "/v/in").await, (bytes, files));
    assert_eq!(files, 39, "every inode was given away, one is the directory");
    check_tree(&fixture.store).await;
}

#[tokio::test]
async fn no_race_exceeds_a_limit_in_memory() {
    for _ in 0..10 {
        race(Store::new(Yielding(Store::memory())), 8).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_race_exceeds_a_limit_on_disk() {
    let folder = tempfile::tempdir().unwrap();
    race(Store::embedded(EmbeddedConfig::new(folder.path())).unwrap(), 16).await;
}
