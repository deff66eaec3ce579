//! Lengths of files: reports and truncations.

use super::*;

#[tokio::test]
async fn lengths_grow_by_reports_and_reports_from_before_a_truncation_are_ignored() {
    let fixture = Fixture::memory().await;
    let before = fixture.create("/file").await;
    let reports = vec![report(&before, 100), report(&before, 50)];
    fixture.change(MetaChange::ReportLengths { reports, ends: vec![] }).await.unwrap();
    assert_eq!(fixture.stat("/file").await.unwrap().length(), 100);
    fixture.change(set_length("/file", 10)).await.unwrap();
    assert_eq!(*fixture.recorder.trims.lock().unwrap(), [(before.id, 10)]);
    let reports = vec![report(&before, 80)];
    fixture.change(MetaChange::ReportLengths { reports, ends: vec![] }).await.unwrap();
    let after = fixture.stat("/file").await.unwrap();
    assert_eq!(after.length(), 10);
    let reports = vec![report(&after, 80)];
    fixture.change(MetaChange::ReportLengths { reports, ends: vec![] }).await.unwrap();
    assert_eq!(fixture.stat("/file").await.unwrap().length(), 80);
    fixture.change(set_length("/file", 200)).await.unwrap();
    assert_eq!(fixture.recorder.trims.lock().unwrap().len(), 1, "an extension truncates nothing");
}

#[tokio::test]
async fn reports_of_many_files_with_all_their_ranges_are_answered() {
    const FILES: usize = 256;
    let fixture = Fixture::memory().await;
    let mut files = Vec::new();
    for number in 0..FILES {
        files.push(fixture.create(&format!("/{number}")).await);
    }
    let chunk = 1u64 << 20;
    let ranges = crate::written::RANGES_MAX as u64;
    let each = crate::written::REPORT_RANGES_MAX / FILES;
    for from in (0..ranges).step_by(each) {
        let mut written = crate::Written::default();
        for number in from..from + each as u64 {
            let at = ((1 << 30) + number * 2) * chunk;
            written.add_bytes(at, at + 1, 1 << 20);
        }
        let length = ((1 << 30) + ranges * 2) * chunk;
        let of =
            |file: &Inode| LengthReport { length, written: written.clone(), ..report(file, 0) };
        let reports: Vec<LengthReport> = files.iter().map(of).collect();
        let id = fixture.next_id();
        let change = MetaChange::ReportLengths { reports, ends: vec![] };
        let request = MetaRequest::Change { id, caller: Identity::ROOT, change };
        for _ in 0..2 {
            let answer = fixture.tree.answer(request.clone(), soon()).await.unwrap();
            let MetaReply::Inodes(inodes) = answer else { panic!("{answer:?}") };
            assert!(inodes.iter().all(|it| it.as_ref().unwrap().length() == length));
        }
    }
    let InodeKind::File { written, .. } = fixture.stat("/0").await.unwrap().kind else { panic!() };
    assert_eq!(written.ranges() as u64, ranges);
}

/// Each commit is a flush of the store, which the caller waits for.
#[tokio::test]
async fn an_extension_takes_one_commit_and_a_truncation_two() {
    let fixture = Fixture::memory().await;
    let file = fixture.create("/file").await;
    let commits = || async { fixture.store.snapshot().await.unwrap().version() };
    for (length, expected) in [(100, 1), (100, 1), (200, 1), (50, 2), (0, 2), (0, 2)] {
        let before = commits().await;
        let id = fixture.next_id();
        let change = set_length("/file", length);
        let request = MetaRequest::Change { id, caller: Identity::ROOT, change };
        let answer = fixture.tree.answer(request.clone(), soon()).await.unwrap();
        assert_eq!(commits().await - before, expected, "to {length}");
        assert_eq!(fixture.tree.answer(request, soon()).await.unwrap(), answer, "sent again");
        assert_eq!(commits().await - before, expected, "to {length}, sent again");
        assert!(matches!(answer, MetaReply::Inode(inode) if inode.length() == length));
    }
    assert_eq!(*fixture.recorder.trims.lock().unwrap(), [50, 0, 0].map(|to| (file.id, to)));
}

/// Storage is unavailable for a moment; opening the file in the meantime completes the truncation.
#[tokio::test]
async fn a_repeated_truncation_does_not_remove_later_data() {
    for length in [3, 0] {
        let fixture = Fixture::memory().await;
        let file = fixture.create("/file").await;
        let reports = vec![report(&file, 9)];
        fixture.change(MetaChange::ReportLengths { reports, ends: vec![] }).await.unwrap();
        let id = fixture.next_id();
        let change = set_length("/file", length);
        let request = MetaRequest::Change { id, caller: Identity::ROOT, change };
        fixture.recorder.refuse.store(true, SeqCst);
        fixture.tree.answer(request.clone(), soon()).await.unwrap_err();
        fixture.recorder.refuse.store(false, SeqCst);
        let (file, _) = open_session(&fixture, "/file").await;
        assert_eq!(file.length(), length);
        let reports = vec![report(&file, 50)];
        fixture.change(MetaChange::ReportLengths { reports, ends: vec![] }).await.unwrap();
        let answer = fixture.tree.answer(request, soon()).await.unwrap();
        assert!(matches!(answer, MetaReply::Inode(inode) if inode.length() == length));
        assert_eq!(fixture.stat("/file").await.unwrap().length(), 50);
        assert_eq!(*fixture.recorder.trims.lock().unwrap(), [(file.id, length)]);
    }
}

#[tokio::test]
async fn the_end_of_a_truncation_does_not_affect_a_later_one() {
    let fixture = Fixture::memory().await;
    let file = fixture.create("/file").await;
    let reports = vec![report(&file, 9)];
    fixture.change(MetaChange::ReportLengths { reports, ends: vec![] }).await.unwrap();
    fixture.recorder.refuse.store(true, SeqCst);
    fixture.change(set_length("/file", 3)).await.unwrap_err();
    let version = |inode: &Inode| match inode.kind {
        InodeKind::File { truncate_version, .. } => truncate_version,
        _ => 0,
    };
    let inode = fixture.stat("/file").await.unwrap();
    for (of_cut, closed) in [(0, true), (1, false)] {
        let truncate_version = version(&file) + of_cut;
        let finish = crate::ops::FinishTrim { inode: inode.id, truncate_version };
        fixture.store.transact(soon(), &finish).await.unwrap();
        assert_eq!(fixture.change(open("/file")).await.is_err(), closed);
    }
}

#[tokio::test]
async fn a_truncation_pending_in_storage_excludes_writers_until_it_completes() {
    let fixture = Fixture::memory().await;
    let file = fixture.create("/file").await;
    fixture
        .change(MetaChange::ReportLengths { reports: vec![report(&file, 9)], ends: vec![] })
        .await
        .unwrap();
    fixture.recorder.refuse.store(true, SeqCst);
    let id = fixture.next_id();
    let cut = MetaRequest::Change { id, caller: Identity::ROOT, change: set_length("/file", 3) };
    let error = fixture.tree.answer(cut.clone(), soon()).await.unwrap_err();
    assert!(error.retryable() && error.to_string().contains("storage is away"), "{error}");
    assert!(fixture.change(open("/file")).await.unwrap_err().retryable());
    // The next run of the service completes what this one started.
    let next = Fixture::open(fixture.store.clone(), config()).await;
    next.tree.finish_all_trims().await.unwrap();
    assert_eq!(*next.recorder.trims.lock().unwrap(), [(file.id, 3)]);
    let (file, _) = open_session(&next, "/file").await;
    assert_eq!(file.length(), 3);
    next.change(MetaChange::ReportLengths { reports: vec![report(&file, 7)], ends: vec![] })
        .await
        .unwrap();
}

#[tokio::test]
async fn an_answered_truncation_is_not_repeated_by_its_retry() {
    let fixture = Fixture::memory().await;
    let file = fixture.create("/file").await;
    fixture
        .change(MetaChange::ReportLengths { reports: vec![report(&file, 9)], ends: vec![] })
        .await
        .unwrap();
    let request = MetaRequest::Change {
        id: fixture.next_id(),
        caller: Identity::ROOT,
        change: set_length("/file", 0),
    };
    let first = fixture.tree.answer(request.clone(), soon()).await.unwrap();
    let MetaReply::Inode(cut) = &first else { panic!() };
    fixture
        .change(MetaChange::ReportLengths { reports: vec![report(cut, 5)], ends: vec![] })
        .await
        .unwrap();
    assert_eq!(fixture.tree.answer(request, soon()).await.unwrap(), first);
    assert_eq!(fixture.stat("/file").await.unwrap().length(), 5);
}
