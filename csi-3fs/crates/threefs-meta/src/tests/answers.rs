//! Answers kept for retries: bounded per volume, and none is dropped that a client may still
//! request.

use std::sync::Arc;

use fabric::auth::ticket::{Grant, Ticket};
use threefs_core::ids::{ClientId, InodeId};
use threefs_kv::{EmbeddedConfig, Store};

use crate::protocol::{
    At, InodeKind, LengthReport, MetaChange, MetaError, MetaReply, MetaRequest, MetaResult,
    RequestId, SetTime,
};
use crate::rows;
use crate::tests::fixture::{Fixture, config, create, soon};
use crate::tests::invariants::check_tree;
use crate::written::RANGES_MAX;
use crate::{Identity, Written};

/// Files of one batch.
const FILES: usize = 200;
/// The limit of a volume in a store of 64 MiB.
const BOUND: i64 = 1 << 20;

struct Volumes {
    fixture: Fixture,
    a: InodeId,
    b: InodeId,
    _folder: tempfile::TempDir,
}

impl Volumes {
    /// A fixture with a file in `/a` whose inode has the maximum size.
    async fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().into();
        let store = Store::embedded(EmbeddedConfig { path, map_bytes_max: 64 << 20 }).unwrap();
        let fixture = Fixture::open(store, config()).await;
        let mut volumes = Vec::new();
        for path in ["/a", "/b"] {
            volumes.push(fixture.make_directory(path).await.id);
            let at = At::path(path);
            let quota = MetaChange::SetQuota { at, bytes_max: None, inodes_max: None };
            fixture.change(quota).await.unwrap();
        }
        let file = fixture.create("/a/file").await.id;
        let mut written = Written::default();
        (0..RANGES_MAX as u32).for_each(|number| written.add(number * 1_000, number * 1_000));
        let report = LengthReport { inode: file, length: 1 << 40, truncate_version: 0, written };
        let change = MetaChange::ReportLengths { reports: vec![report], ends: Vec::new() };
        fixture.change(change).await.unwrap();
        let (a, b) = (volumes[0], volumes[1]);
        Self { fixture, a, b, _folder: folder }
    }

    async fn ask(&self, volume: InodeId, id: RequestId, change: MetaChange) -> MetaResult {
        let grant = Grant::Volume(Arc::new(Ticket {
            cluster: "default".into(),
            key_id: 0,
            directory: volume.0,
            path: "/".into(),
            read_only: false,
            node: String::new(),
            expires_unix_s: u64::MAX,
        }));
        let request = MetaRequest::Change { id, caller: Identity::ROOT, change };
        self.fixture.tree.answer_for(&grant, request, soon()).await
    }

    /// A change with a long answer.
    fn change(&self) -> MetaChange {
        MetaChange::SetAttributes {
            at: At::path("/file"),
            follow: true,
            mode: None,
            uid: None,
            gid: None,
            accessed: None,
            modified: Some(SetTime::Now),
        }
    }

    /// Bytes of answers in the store, independent of the counters.
    async fn stored_bytes(&self) -> i64 {
        let mut txn = self.fixture.store.begin().await.unwrap();
        let all = threefs_kv::KeyRange::prefix(rows::ANSWERS);
        let rows = txn.range(&all, usize::MAX).await.unwrap();
        let own_rows = rows
            .iter()
            .filter(|(key, value)| rows::AnswerRow::decode(key, value).unwrap().volume.is_some());
        own_rows.map(|(_, value)| value.len() as i64).sum()
    }
}

/// With one client id, and with a new one each time.
#[tokio::test]
async fn a_ticket_does_not_fill_the_store_with_answers() {
    for ids in [1, u128::MAX] {
        let volumes = Volumes::new().await;
        let (mut sequence, mut first) = (0, None);
        let error = loop {
            sequence += 1;
            let client = ClientId(7 + u128::from(sequence) % ids);
            let id = RequestId { client, sequence, finished_below: 0 };
            match volumes.ask(volumes.a, id, volumes.change()).await {
                Ok(reply) => _ = first.get_or_insert(reply),
                Err(error) => break error,
            }
            assert!(sequence < 5_000, "{} bytes are kept", volumes.stored_bytes().await);
        };
        assert!(matches!(error, MetaError::AnswersFull { .. }), "{error}");
        assert!(error.retryable());
        let text = error.to_string();
        assert!(text.contains(&BOUND.to_string()) && text.contains("acknowledge"), "{text}");
        assert!(
            (BOUND / 2..=BOUND).contains(&volumes.stored_bytes().await),
            "{}",
            volumes.stored_bytes().await
        );
        check_tree(&volumes.fixture.store).await;

        // No answer was dropped that may be requested again, and nothing is executed twice.
        let client = ClientId(7 + 1 % ids);
        let id = RequestId { client, sequence: 1, finished_below: 0 };
        let again = volumes.ask(volumes.a, id, volumes.change()).await;
        assert_eq!(Some(again.unwrap()), first);

        if ids != 1 {
            // Its own changes so far.
            sequence = 1;
        }
        // Another volume has separate space, and acknowledged answers make room for the next ones.
        let id = RequestId { client: ClientId(1), sequence: 1, finished_below: 1 };
        volumes.ask(volumes.b, id, create("/file")).await.unwrap();
        sequence += 1;
        let id = RequestId { client, sequence, finished_below: sequence };
        volumes.ask(volumes.a, id, volumes.change()).await.unwrap();
        check_tree(&volumes.fixture.store).await;

        // A client that acknowledges each answer is never refused.
        for _ in 0..100 {
            sequence += 1;
            let id = RequestId { client, sequence, finished_below: sequence };
            volumes.ask(volumes.a, id, volumes.change()).await.unwrap();
        }
        // Answers of stopped clients count until they are swept.
        let tree = &volumes.fixture.tree;
        tree.sweep(tree.config.answer_keep_ms + tree.uptime_ms() + 1_000).await.unwrap();
        assert_eq!(volumes.stored_bytes().await, 0);
        check_tree(&volumes.fixture.store).await;
    }
}

/// A client that writes many files in one change and stops leaves few bytes.
#[tokio::test]
async fn a_batch_keeps_a_short_record_and_its_retry_reads_the_current_files() {
    let volumes = Volumes::new().await;
    let mut files = Vec::new();
    for number in 0..FILES {
        files.push(volumes.fixture.create(&format!("/a/{number}")).await.id);
    }
    let report = |inode: &InodeId| LengthReport {
        inode: *inode,
        length: 1,
        truncate_version: 0,
        written: Written::of_bytes(0, 1, 1),
    };
    let mut reports: Vec<LengthReport> = files.iter().map(report).collect();
    // One that does not exist.
    reports.push(LengthReport { inode: InodeId(1 << 40), ..reports[0].clone() });
    let change = MetaChange::ReportLengths { reports, ends: Vec::new() };
    let id = RequestId { client: ClientId(1), sequence: 1, finished_below: 0 };
    let first = volumes.ask(volumes.a, id, change.clone()).await.unwrap();
    assert!(volumes.stored_bytes().await < 20 * FILES as i64, "{}", volumes.stored_bytes().await);
    assert_eq!(volumes.ask(volumes.a, id, change.clone()).await.unwrap(), first);
    let cut = MetaChange::SetLength { at: At::path("/a/0"), length: 0 };
    volumes.fixture.change(cut).await.unwrap();
    let again = volumes.ask(volumes.a, id, change).await.unwrap();
    let (MetaReply::Inodes(first), MetaReply::Inodes(again)) = (first, again) else { panic!() };
    assert_eq!(again[1..], first[1..]);
    assert!(first[FILES].is_err());
    let Ok(InodeKind::File { length, content, truncate_version, .. }) =
        again[0].as_ref().map(|inode| inode.kind.clone())
    else {
        panic!("{again:?}")
    };
    assert_eq!((length, content, truncate_version), (0, 2, 1), "it is executed once");
}
