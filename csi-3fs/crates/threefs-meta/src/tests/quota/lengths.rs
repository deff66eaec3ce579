//! Layouts and lengths: bounds that keep the counters of a quota exact.

use super::*;

#[tokio::test]
async fn the_layout_of_a_file_bounds_its_length() {
    let fixture = Fixture::memory().await;
    fixture.create("/file").await;
    let set = |length| MetaChange::SetLength { at: At::path("/file"), length };
    // A sparse pebibyte has only a length.
    fixture.change(set(1 << 50)).await.unwrap();
    assert_eq!(fixture.stat("/file").await.unwrap().length(), 1 << 50);
    let error = refusal(&fixture, set(1 << 53)).await;
    assert!(matches!(error, MetaError::FileTooLarge { .. }), "{error}");
    assert_eq!(LayoutDefaults::default().chunk_bytes, 0);
}

/// Reported and reserved lengths are bounded like set ones: kernels fail lookups of a length beyond
/// 2^63, and one near it would use up the quotas above.
#[tokio::test]
async fn a_reported_length_over_the_maximum_is_refused() {
    let fixture = Fixture::memory().await;
    fixture.make_directory("/v").await;
    fixture.change(set_quota("/v", None, None)).await.unwrap();
    let file = fixture.create("/v/file").await;
    let InodeKind::File { layout, .. } = &file.kind else { panic!("{file:?}") };
    let max = u64::from(layout.chunk_bytes) << 32;
    let names_the_bound = |error: MetaError| {
        let MetaError::FileTooLarge { detail } = error else { return false };
        detail.contains(&max.to_string())
    };
    let is_refused = |reply: Result<MetaReply, MetaError>| match reply {
        Ok(MetaReply::Inodes(inodes)) => {
            inodes.into_iter().all(|inode| inode.is_err_and(names_the_bound))
        }
        Err(error) => names_the_bound(error),
        Ok(_) => false,
    };
    for length in [max + 1, i64::MAX as u64, i64::MAX as u64 + 1, u64::MAX - 1, u64::MAX] {
        assert!(is_refused(fixture.change(report(&file, length, &[])).await), "report {length}");
        assert!(is_refused(fixture.change(reserve(&file, 1, length)).await), "reserve {length}");
        let written = crate::Written::of_bytes(0, length, layout.chunk_bytes);
        let report = LengthReport { inode: file.id, length, truncate_version: 0, written };
        let close =
            MetaChange::Close { inode: file.id, session: SessionId(1), report: Some(report) };
        assert!(is_refused(fixture.change(close).await), "close {length}");
        assert_eq!(fixture.stat("/v/file").await.unwrap(), file);
        assert_eq!(used(&fixture, "/v").await, (0, 1));
        check_tree(&fixture.store).await;
    }
    fixture.change(report(&file, max, &[])).await.unwrap();
    assert_eq!(used(&fixture, "/v").await, (max, 1));
}

/// A sparse file of 2^58 bytes costs nothing: files of a volume without a byte limit must not use
/// up the counters above it.
#[tokio::test]
async fn sparse_files_exhaust_only_the_counters_of_their_volume() {
    let fixture = Fixture::memory().await;
    for path in ["/v", "/v/hostile", "/v/other"] {
        fixture.make_directory(path).await;
        fixture.change(set_quota(path, None, None)).await.unwrap();
    }
    let hostile = fixture.stat("/v/hostile").await.unwrap().id;
    let layout = LayoutDefaults { chunk_bytes: 64 << 20, stripe: 1 };
    let mut refusals = 0;
    // As many of the longest files as fit, then the rest.
    let lengths = [1 << 58; 31].into_iter().chain((0..=58).rev().map(|shift| 1 << shift));
    for (number, length) in lengths.enumerate() {
        let at = At::path(format!("/v/hostile/{number}"));
        let (mode, exclusive, write, track_open) = (0o644, true, false, false);
        let create =
            MetaChange::Create { at: at.clone(), mode, exclusive, layout, write, track_open };
        fixture.change(create).await.unwrap();
        match fixture.change(MetaChange::SetLength { at, length }).await {
            Ok(_) => {}
            Err(MetaError::QuotaExceeded { directory, .. }) if directory == hostile => {
                refusals += 1
            }
            Err(error) => panic!("{error}"),
        }
    }
    assert!(refusals > 0);
    check_tree(&fixture.store).await;
    let file = fixture.create("/v/other/file").await;
    fixture.change(report(&file, 1 << 52, &[])).await.unwrap();
    // The sum of these lengths exceeds a counter, so a limit of the directory would not be exact.
    let plain = fixture.make_directory("/plain").await;
    for number in 0..33 {
        let at = At::entry(plain.id, number.to_string());
        let (mode, exclusive, write, track_open) = (0o644, true, false, false);
        let create =
            MetaChange::Create { at: at.clone(), mode, exclusive, layout, write, track_open };
        fixture.change(create).await.unwrap();
        fixture.change(MetaChange::SetLength { at, length: 1 << 58 }).await.unwrap();
    }
    let error = refusal(&fixture, set_quota("/plain", None, None)).await;
    assert!(error.to_string().contains("remove sparse ones"), "{error}");
}

/// Invalid defaults are refused when they are set, not by each creation.
#[tokio::test]
async fn a_directory_refuses_a_layout_that_its_files_cannot_have() {
    let fixture = Fixture::memory().await;
    let make = |path: &str, chunk_bytes, parents| {
        let defaults = LayoutDefaults { chunk_bytes, stripe: 0 };
        MetaChange::MakeDirectory { at: At::path(path), mode: 0o755, parents, defaults }
    };
    for chunk_bytes in [1, 100_000, (64 << 10) - 1, 32 << 10, 128 << 20, u32::MAX] {
        for parents in [false, true] {
            let error = refusal(&fixture, make("/d", chunk_bytes, parents)).await;
            assert!(matches!(error, MetaError::Invalid { .. }), "{error}");
            assert!(error.to_string().contains(&format!("`{chunk_bytes}`")), "{error}");
        }
    }
    for (path, chunk_bytes) in [("/a", 0), ("/b", 64 << 10), ("/c/d", 64 << 20)] {
        fixture.change(make(path, chunk_bytes, true)).await.unwrap();
        fixture.create(&format!("{path}/file")).await;
    }
}
