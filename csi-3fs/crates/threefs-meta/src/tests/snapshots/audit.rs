//! Audit queries of files of snapshots: each state with chunks that must exist, as the snapshot shows it.

use std::sync::Arc;

use threefs_core::ids::{Epoch, InodeId};

use crate::ops::view;
use crate::protocol::{
    At, AuditAnswer, AuditQuery, InodeKind, LengthReport, MetaChange, MetaQuery, MetaReply,
    SHOWN_FILES_MAX, ShownFile,
};
use crate::tests::fixture::Fixture;
use crate::tests::snapshots::{TestFences, remove_snapshot};
use crate::written::Written;

const LAST: InodeId = InodeId(1 << 40);

async fn ask(fixture: &Fixture, query: AuditQuery) -> AuditAnswer {
    match fixture.query(MetaQuery::Audit(query)).await.unwrap() {
        MetaReply::Audit(answer) => answer,
        other => panic!("{other:?}"),
    }
}

/// All states of files that snapshots show.
pub(super) async fn shown_files(fixture: &Fixture) -> Vec<ShownFile> {
    let (mut all, mut after) = (Vec::new(), InodeId(0));
    while after < LAST {
        let answer = ask(fixture, AuditQuery::Shown { after, until: LAST }).await;
        let AuditAnswer::Shown { files, until } = answer else { panic!("{answer:?}") };
        assert!(until > after && files.len() <= SHOWN_FILES_MAX);
        assert!(files.iter().all(|file| file.stored > after && file.stored <= until));
        all.extend(files);
        after = until;
    }
    all
}

/// Written chunks beyond those in the inode.
pub(super) async fn further_chunks(fixture: &Fixture, inode: InodeId) -> Written {
    let (mut all, mut after) = (Written::default(), None);
    loop {
        let answer = ask(fixture, AuditQuery::Written { inode, after }).await;
        let AuditAnswer::Written { written, next } = answer else { panic!("{answer:?}") };
        all.merge(&written);
        match next {
            Some(_) => after = next,
            None => return all,
        }
    }
}

async fn stat(fixture: &Fixture, at: At) -> (InodeId, Option<Written>) {
    let stat = MetaQuery::Stat { at, follow: false };
    let MetaReply::Inode(inode) = fixture.query(stat).await.unwrap() else { panic!("no inode") };
    match inode.kind {
        InodeKind::File { written, .. } => (inode.id, Some(written)),
        _ => (inode.id, None),
    }
}

async fn epoch(fixture: &Fixture, inode: InodeId) -> Epoch {
    let query = MetaQuery::Epochs { inodes: vec![inode] };
    let MetaReply::Epochs(epochs) = fixture.query(query).await.unwrap() else { panic!("no epoch") };
    epochs[0].unwrap().epoch
}

impl Fixture {
    /// Compares all files of snapshots, by path, with the states of an audit.
    pub(super) async fn check_shown(&self, paths: impl Iterator<Item = String>) {
        let mut audited = shown_files(self).await;
        for file in &audited {
            let (inode, written) = stat(self, At::inode(file.file.inode)).await;
            assert_eq!((inode, written.as_ref()), (file.file.inode, Some(&file.file.written)));
            assert_eq!(view::split(inode).unwrap().1, file.stored);
            assert_eq!(epoch(self, inode).await, file.epoch);
            assert_eq!(epoch(self, file.snapshot).await, file.epoch);
        }
        let mut unseen: std::collections::BTreeSet<InodeId> =
            audited.iter().map(|file| file.file.inode).collect();
        audited.sort_by_key(|file| (file.stored, file.epoch));
        for path in paths {
            let (inode, written) = stat(self, At::path(&path)).await;
            unseen.remove(&inode);
            let Some(written) = written.filter(|it| !it.is_empty()) else { continue };
            let (stored, epoch) = (view::raw(inode), epoch(self, inode).await);
            let state = audited.iter().rfind(|it| it.stored == stored && it.epoch <= epoch);
            let state = state.unwrap_or_else(|| panic!("no state of {path}"));
            assert_eq!(state.file.written, written, "{path}");
        }
        assert!(unseen.is_empty(), "no path leads to {unseen:?}");
    }
}

/// More states than an answer has, of files that change in every epoch.
#[tokio::test]
async fn pages_have_whole_inodes() {
    const FILES: usize = 150;
    const SNAPSHOTS: usize = 8;
    let fixture = Fixture::memory().await.with_fences(Arc::new(TestFences::default()));
    fixture.volume("/v").await;
    let mut files = Vec::new();
    for number in 0..FILES {
        files.push(fixture.create(&format!("/v/{number}")).await);
    }
    let InodeKind::File { truncate_version, .. } = files[0].kind else { panic!("no file") };
    for number in 1..=SNAPSHOTS as u64 {
        let report = |inode: &crate::Inode| {
            let written = Written::of_bytes(0, number << 20, 1 << 20);
            let (inode, length) = (inode.id, number << 20);
            LengthReport { inode, length, truncate_version, written }
        };
        let reports = files.iter().map(report).collect();
        fixture.change(MetaChange::ReportLengths { reports, ends: vec![] }).await.unwrap();
        fixture.snapshot("/v", &number.to_string()).await.unwrap();
    }
    let path = |number: usize, file: usize| format!("/v/.snapshots/{number}/{file}");
    let paths = |numbers: Vec<usize>| {
        numbers.into_iter().flat_map(move |number| (0..FILES).map(move |file| path(number, file)))
    };
    assert_eq!(shown_files(&fixture).await.len(), FILES * SNAPSHOTS);
    fixture.check_shown(paths((1..=SNAPSHOTS).collect())).await;
    fixture.change(remove_snapshot("/v", "3")).await.unwrap();
    fixture.check_shown(paths(vec![1, 2, 4, 5, 6, 7, 8])).await;
}
