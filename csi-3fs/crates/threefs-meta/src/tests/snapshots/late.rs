//! A snapshot that is made while a change is being executed: the change is repeated after it.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use threefs_kv::{Operation, Transaction};

use crate::Identity;
use crate::ops::{self, Inputs, OpError};
use crate::protocol::{At, LengthReport, MetaReply, RenameMode, SetMode, Written};
use crate::tests::fixture::{Fixture, make_directory, soon};
use crate::tests::invariants::check_tree;
use crate::tests::snapshots::TestFences;
use crate::tree::now;

/// A change during whose first attempt a snapshot is made, after it has read and written.
struct Late<'a, O> {
    change: O,
    fixture: &'a Fixture,
    snapshot: &'a str,
    attempts: AtomicUsize,
}

impl<O> Operation for Late<'_, O>
where
    O: Operation<Output = MetaReply, Error = OpError>,
{
    type Output = MetaReply;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<MetaReply, OpError> {
        let reply = self.change.run(txn).await?;
        if self.attempts.fetch_add(1, SeqCst) == 0 {
            self.fixture.snapshot("/v", self.snapshot).await.unwrap();
        }
        Ok(reply)
    }
}

/// Executes a change; a snapshot that is made meanwhile shows what there was before.
async fn late<O>(fixture: &Fixture, snapshot: &str, change: O)
where
    O: Operation<Output = MetaReply, Error = OpError> + Send,
{
    let before = fixture.everything("/v").await;
    let late = Late { change, fixture, snapshot, attempts: AtomicUsize::new(0) };
    fixture.store.transact(soon(), &late).await.unwrap();
    assert_eq!(late.attempts.load(SeqCst), 2, "{snapshot} was repeated");
    let base = format!("/v/.snapshots/{snapshot}");
    assert_eq!(fixture.everything(&base).await, before, "{snapshot}");
    assert_ne!(fixture.everything("/v").await, before, "{snapshot} was made");
    check_tree(&fixture.store).await;
}

#[tokio::test]
async fn a_change_during_a_snapshot_is_after_it() {
    let fixture = Fixture::memory().await.with_fences(Arc::new(TestFences::default()));
    fixture.volume("/v").await;
    fixture.change(make_directory("/v/d", false)).await.unwrap();
    let file = fixture.create("/v/d/f").await.id;
    let caller = &Identity::ROOT;
    let inputs = async |names: u64| Inputs {
        now: now(),
        uptime: fixture.tree.uptime(),
        excess_allowed: true,
        first_inode: fixture.store.transact(soon(), &ops::ReserveInodes(names)).await.unwrap(),
        full: None,
    };
    let at = At::path("/v/d/new");
    let make = ops::MakeDirectory {
        caller,
        at: &at,
        mode: 0o755,
        parents: false,
        defaults: Default::default(),
        inputs: inputs(1).await,
    };
    late(&fixture, "make", make).await;
    let (from, to) = (At::path("/v/d/new"), At::path("/v/moved"));
    let open_files = &fixture.tree.open_files;
    let rename = ops::Rename {
        caller,
        from: &from,
        to: &to,
        mode: RenameMode::Replace,
        open_files,
        inputs: inputs(1).await,
    };
    late(&fixture, "rename", rename).await;
    let at = At::path("/v/d");
    let set = ops::SetAttributes {
        caller,
        at: &at,
        follow: true,
        mode: Some(0o700),
        uid: None,
        gid: None,
        accessed: None,
        modified: None,
        inputs: inputs(1).await,
    };
    late(&fixture, "mode", set).await;
    let set = ops::SetAttribute {
        caller,
        at: &at,
        name: "user.x",
        value: Some(b"1"),
        mode: &SetMode::Any,
        inputs: inputs(1).await,
    };
    late(&fixture, "attribute", set).await;
    let written = Written::of_bytes(0, 100, 1 << 20);
    let report = [LengthReport { inode: file, length: 100, truncate_version: 0, written }];
    let report = ops::ReportLengths { reports: &report, ends: &[], inputs: inputs(1).await };
    late(&fixture, "report", report).await;
    let at = At::path("/v/d/f");
    let unlink = ops::Unlink { caller, at: &at, open_files, inputs: inputs(1).await };
    late(&fixture, "unlink", unlink).await;
    let at = At::path("/v/d");
    let remove = ops::RemoveDirectory { caller, at: &at, open_files, inputs: inputs(1).await };
    late(&fixture, "rmdir", remove).await;
}
