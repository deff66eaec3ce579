use super::*;
use hfreduce_core::{Determinism, Kind};

fn about(rank: u32) -> RankInfo {
    RankInfo {
        job: "default/gpt".into(),
        rank,
        world_size: 4,
        node: "a1".into(),
        zone: "A".into(),
        reached_at: "eth0 10.0.0.5".into(),
        group: 0xfeed,
        epoch: 2,
        links: vec![(2, "b0".into(), 4)],
    }
}

fn fingerprint(count: u64) -> Fingerprint {
    Fingerprint {
        kind: Kind::Allreduce,
        dtype: 0,
        element_bytes: 4,
        op: 0,
        root: 0,
        count,
        shape: 0,
        modes: Determinism::DEFAULT,
    }
}

fn folders(root: &Path) -> Folders {
    Folders { run: vec![root.join("run")], dumps: Some(root.join("dumps")) }
}

#[test]
fn another_process_reads_what_was_written() {
    let root = tempfile::tempdir().unwrap();
    let recorder = Recorder::new(&folders(root.path()), &about(1));
    let now = Instant::now();
    recorder.open();
    let first = recorder.called(7, &fingerprint(1000), 4000, 60_000, now);
    let second = recorder.called(8, &fingerprint(5), 20, 60_000, now);
    recorder.cut(first, 4);
    recorder.progress(first, 4, 3);
    recorder.finished(first, false, now + std::time::Duration::from_millis(2));
    recorder.waits_for(second, Some(0));
    recorder.waiting(Some(8), "waiting for rank 0 to call it", Some(0));
    let peer_state = |rank, link| {
        (PeerState { rank, link, entered: 9, waiting_for: Some(0), closed: false }, now)
    };
    recorder.beat(now, [peer_state(1, false), peer_state(2, true)].into_iter());
    let record = read_file(recorder.path().unwrap()).unwrap();
    assert_eq!((record.rank, record.world_size, record.epoch), (1, 4, 2));
    assert_eq!((&*record.job, &*record.node, &*record.zone), ("default/gpt", "a1", "A"));
    assert_eq!(record.reached_at, "eth0 10.0.0.5");
    assert_eq!(
        (record.state, record.pid, &*record.group),
        ("open", std::process::id(), "000000000000feed")
    );
    assert_eq!(record.waiting.unwrap().phase, "waiting for rank 0 to call it");
    assert_eq!((&*record.peers[0].node, &*record.peers[1].node), ("a1", "b0"));
    assert_eq!((record.peers[1].sequence, record.peers[1].waiting_for), (Some(8), Some(0)));
    assert_eq!((record.peers[0].streams, record.peers[1].streams), (0, 4));
    let [one, two] = &record.entries[..] else { panic!("{:?}", record.entries) };
    assert_eq!((one.sequence, one.state, one.chunks, one.chunks_delivered), (7, "completed", 4, 3));
    assert_eq!(one.finished_ns - one.called_ns, 2_000_000);
    assert_eq!(one.operation, "allreduce(1000 × float32, sum)");
    assert_eq!((two.state, two.finished_ns, two.waiting_for), ("started", 0, Some(0)));
}

#[test]
fn the_last_operations_are_kept_and_updates_of_old_ones_ignored() {
    let recorder = Recorder::new(&Folders::default(), &about(1));
    let now = Instant::now();
    for sequence in 0..RECORDS as u64 + 10 {
        recorder.called(sequence, &fingerprint(sequence), 0, 0, now);
    }
    recorder.finished(3, true, now);
    let record = recorder.snapshot().unwrap();
    assert_eq!(record.entries.len(), RECORDS);
    assert_eq!((record.entries[0].sequence, record.operations), (10, RECORDS as u64 + 10));
    assert!(record.entries.iter().all(|entry| entry.state == "started"));
}

#[test]
fn the_file_is_removed_at_an_orderly_end_and_the_dump_stays() {
    let root = tempfile::tempdir().unwrap();
    let recorder = Recorder::new(&folders(root.path()), &about(1));
    let path = recorder.path().unwrap().to_owned();
    recorder.called(0, &fingerprint(1), 4, 0, Instant::now());
    let dump = recorder.broke(br#"{"kind":"peer_died"}"#).unwrap().to_owned();
    assert_eq!(recorder.broke(b"{}"), Some(&*dump), "the first reason stays");
    drop(recorder);
    assert!(!path.exists());
    let read: serde_json::Value = serde_json::from_slice(&std::fs::read(dump).unwrap()).unwrap();
    assert_eq!((&read["format"], &read["version"]), (&"hfreduce-flight".into(), &1.into()));
    assert_eq!((&read["cause"]["kind"], &read["state"]), (&"peer_died".into(), &"broken".into()));
    assert_eq!(read["entries"][0]["kind"], "allreduce");
}

#[test]
fn a_folder_that_others_may_write_to_is_not_used() {
    use std::os::unix::fs::PermissionsExt;
    let root = tempfile::tempdir().unwrap();
    std::fs::set_permissions(root.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
    let open = Folders { run: vec![root.path().into()], dumps: Some(root.path().into()) };
    let recorder = Recorder::new(&open, &about(1));
    recorder.called(0, &fingerprint(1), 4, 0, Instant::now());
    assert_eq!((recorder.path(), recorder.broke(b"{}")), (None, None));
    assert_eq!(recorder.snapshot().unwrap().entries.len(), 1, "it records all the same");
}

#[test]
fn files_of_processes_before_the_last_boot_are_removed() {
    let root = tempfile::tempdir().unwrap();
    let folders = folders(root.path());
    let recorder = Recorder::new(&folders, &about(1));
    let mut bytes = std::fs::read(recorder.path().unwrap()).unwrap();
    bytes[at::BOOT * 8 + 8] ^= 1;
    let old = root.path().join("run/old.flight");
    let foreign = root.path().join("run/foreign.flight");
    std::fs::write(&old, bytes).unwrap();
    std::fs::write(&foreign, "something else").unwrap();
    let _another = Recorder::new(&folders, &about(2));
    assert!(!old.exists() && foreign.exists() && recorder.path().unwrap().exists());
}

#[test]
fn a_folder_of_dumps_is_bounded() {
    let root = tempfile::tempdir().unwrap();
    let folders = folders(root.path());
    for group in 0..140 {
        let recorder = Recorder::new(&folders, &RankInfo { group, ..about(1) });
        assert!(recorder.broke(b"{}").is_some());
    }
    assert_eq!(std::fs::read_dir(root.path().join("dumps")).unwrap().count(), 128);
}

proptest::proptest! {
    #[test]
    fn the_valid_part_of_a_damaged_file_is_read(
        damage in proptest::collection::vec((0..BYTES, 0..=255_u8), 1..200),
        length in 0..BYTES,
    ) {
        let recorder = Recorder::new(&Folders::default(), &about(1));
        recorder.called(0, &fingerprint(1), 4, 0, Instant::now());
        recorder.waiting(Some(0), "waiting", None);
        let [mut bytes, mut later] = recorder.memory.reads();
        for (turn, (at, byte)) in damage.into_iter().enumerate() {
            bytes[at] = byte;
            if turn % 4 > 0 {
                later[at] = byte;
            }
        }
        let _ = Snapshot::of(DoubleRead(&bytes, &later), None);
        proptest::prop_assert!(Snapshot::of(DoubleRead(&bytes[..length], &later), None).is_err());
        proptest::prop_assert!(Snapshot::of(DoubleRead(&bytes, &later[..length]), None).is_err());
    }
}
