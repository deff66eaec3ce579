//! GPU memory of ranks that a daemon serves: the ranks copy, the daemon reduces and needs no GPU.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod support;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use hfreduce_daemon::{Daemon, Rules};
use hfreduce_engine::flight::Folders;
use hfreduce_engine::{Buffer, Call, CollectiveError, DType, ErrorKind, Kind, WaitError};
use support::{
    ALL, CHUNK_BYTES, DOWN, Stub, TIMEOUT, Tensor, UP, allreduce, eventually, placement, run_at,
};
use support::{sum, values};

/// Several engine chunks and copies, and a remainder that is neither.
const NUMEL: usize = 8 * CHUNK_BYTES / 4 + 3;
const ILLEGAL_ADDRESS: i32 = 700;

/// A daemon in a separate thread. Stops when dropped.
struct Served {
    path: PathBuf,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    _folder: tempfile::TempDir,
}

impl Served {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("hfreduced.sock");
        let rules = Rules {
            mode: 0o600,
            ranks_max: 8,
            memory_max: None,
            descriptors_max: None,
            folders: Folders::default(),
        };
        let daemon = Daemon::bind(&path, rules).unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let thread = std::thread::spawn(move || {
            while !stopped.load(Ordering::SeqCst) {
                daemon.accept_for(Duration::from_millis(20)).unwrap();
            }
        });
        Self { path, stop, thread: Some(thread), _folder: folder }
    }

    /// The socket path of every rank.
    fn all(&self) -> impl Fn(u32) -> Option<PathBuf> {
        |_| Some(self.path.clone())
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        self.thread.take().unwrap().join().unwrap();
    }
}

#[test]
fn sums_are_correct_for_a_mix_of_ranks_with_and_without_daemons() {
    let (stub, daemon) = (Stub::new(), Served::new());
    for served in [2, 1] {
        for layout in [placement(1, 2), placement(2, 1), placement(2, 2)] {
            let world = layout.len() as u32;
            let at = |rank: u32| (rank % 2 < served).then(|| daemon.path.clone());
            run_at(&layout, at, |comm| {
                let device = stub.device(comm.rank() as i32 % 2).unwrap();
                for numel in [0, 1, 1000, NUMEL, 3 * NUMEL] {
                    let tensor = stub.tensor(&values(comm.rank(), numel));
                    let work = allreduce(&device, comm, &tensor, 0, TIMEOUT).unwrap();
                    work.wait(None).unwrap();
                    assert!(work.is_done() && work.drain(TIMEOUT) && work.error().is_none());
                    assert_eq!(tensor.read(), sum(world, numel), "{numel}");
                }
                // Several concurrent operations, and one on host memory between them.
                let tensors: Vec<_> =
                    (0..3).map(|_| stub.tensor(&values(comm.rank(), NUMEL))).collect();
                let start = |at: usize| allreduce(&device, comm, &tensors[at], 0, TIMEOUT).unwrap();
                let (one, two) = (start(0), start(1));
                let mut host = values(comm.rank(), 1000);
                // SAFETY: the vector outlives the operation, which is waited for.
                let buffer = unsafe { Buffer::new([(host.as_mut_ptr().cast(), 4000)]) };
                let call = Call::new(Kind::Allreduce, DType::F32, TIMEOUT, true);
                let work = comm.call(Call { input: buffer, ..call });
                let three = start(2);
                work.unwrap().wait(None).unwrap();
                [three, two, one].iter().for_each(|work| work.wait(None).unwrap());
                assert!(tensors.iter().all(|tensor| tensor.read() == sum(world, NUMEL)));
                assert_eq!(host, sum(world, 1000));
            });
            stub.assert_clean("after sums");
        }
    }
}

#[test]
fn every_operation_copies_exactly_this_ranks_parts() {
    let (stub, daemon) = (Stub::new(), Served::new());
    run_at(&placement(2, 2), daemon.all(), |comm| {
        let (rank, world) = (comm.rank(), 4_usize);
        let device = stub.device(0).unwrap();
        let own = values(rank, NUMEL);
        let call = |kind, root| Call { root, ..Call::new(kind, DType::F32, TIMEOUT, false) };
        let run_one = |call: Call<'_>, input: &Tensor<'_>, output: &Tensor<'_>| {
            // SAFETY: the tensors outlive the work, which is waited for.
            let work = unsafe { device.start(comm, call, input.range(), output.range(), 0) };
            work.unwrap().wait(None).unwrap();
        };
        let tensor = stub.tensor(&own);
        run_one(call(Kind::Broadcast, 1), &tensor, &tensor);
        assert_eq!(tensor.read(), values(1, NUMEL));
        let tensor = stub.tensor(&own);
        run_one(call(Kind::Reduce, 2), &tensor, &tensor);
        assert_eq!(tensor.read(), if rank == 2 { sum(4, NUMEL) } else { own.clone() });
        let (input, output) = (stub.tensor(&own), stub.tensor(&vec![0.0; world * NUMEL]));
        run_one(call(Kind::Allgather, 0), &input, &output);
        let all: Vec<f32> = (0..4).flat_map(|rank| values(rank, NUMEL)).collect();
        assert_eq!(output.read(), all);
        let (input, output) =
            (stub.tensor(&values(rank, world * NUMEL)), stub.tensor(&vec![0.0; NUMEL]));
        run_one(call(Kind::ReduceScatter, 0), &input, &output);
        let block = rank as usize * NUMEL..(rank as usize + 1) * NUMEL;
        assert_eq!(output.read(), sum(4, world * NUMEL)[block]);
        // Point-to-point: the input is copied before the call.
        let counts = [500; 4];
        let (input, output) = (stub.tensor(&values(rank, 2000)), stub.tensor(&[0.0; 2000]));
        let alltoall = Call { counts: [&counts; 2], ..call(Kind::Alltoall, 0) };
        run_one(alltoall, &input, &output);
        let own = rank as usize * 500..(rank as usize + 1) * 500;
        let rows: Vec<f32> = (0..4).flat_map(|r| values(r, 2000)[own.clone()].to_vec()).collect();
        assert_eq!(output.read(), rows);
    });
    stub.assert_clean("after every operation");
}

#[test]
fn the_first_chunk_is_copied_up_before_the_last_one_is_copied_down() {
    let (stubs, daemon) = ([Stub::new(), Stub::new()], Served::new());
    run_at(&placement(2, 1), daemon.all(), |comm| {
        let stub = &stubs[comm.rank() as usize];
        let device = stub.device(0).unwrap();
        let tensor = stub.tensor(&values(comm.rank(), NUMEL));
        // Three of the nine copies down run, and the others only once a sum has been copied up.
        stub.allow(DOWN, 3);
        let work = allreduce(&device, comm, &tensor, 0, TIMEOUT).unwrap();
        eventually("a copy up", || stub.journal().contains('u'));
        assert_eq!(stub.journal().matches('d').count(), 3);
        stub.allow(DOWN, ALL);
        work.wait(None).unwrap();
        assert_eq!(tensor.read(), sum(2, NUMEL));
    });
    stubs.iter().for_each(|stub| stub.assert_clean("after an overlap"));
}

#[test]
fn small_copies_use_the_processor_and_slow_ones_are_awaited() {
    let (stubs, daemon) = ([Stub::new(), Stub::new()], Served::new());
    stubs[1].delay(Duration::from_millis(2));
    run_at(&placement(1, 2), daemon.all(), |comm| {
        let stub = &stubs[comm.rank() as usize];
        let device = stub.device_with_gdrcopy();
        for numel in [1, 1000, NUMEL] {
            let tensor = stub.tensor(&values(comm.rank(), numel));
            let work = allreduce(&device, comm, &tensor, 0, TIMEOUT).unwrap();
            while let Err(error) = work.wait(Some(Duration::from_millis(1))) {
                assert!(matches!(error, WaitError::StillRunning { .. }), "{error}");
            }
            assert_eq!(tensor.read(), sum(2, numel), "{numel}");
        }
        assert!(stub.journal().contains(['r', 'w']));
    });
    stubs.iter().for_each(|stub| stub.assert_clean("after small ones"));
}

/// One allreduce of two served ranks in which rank 0's driver has this fault; true if the fault occurred.
fn with_fault(daemon: &Served, call: &str, after: i64, sticky: bool) -> bool {
    let what = format!("{call} fails at call {after} (for good: {sticky})");
    let stubs = [Stub::new(), Stub::new()];
    let failed = run_at(&placement(2, 1), daemon.all(), |comm| {
        let stub = &stubs[comm.rank() as usize];
        let tensor = stub.tensor(&values(comm.rank(), NUMEL));
        let device = stub.device(0).unwrap();
        if comm.rank() == 0 {
            stub.fail(call, after, ILLEGAL_ADDRESS, sticky);
        }
        let error: Option<CollectiveError> = match allreduce(&device, comm, &tensor, 0, TIMEOUT) {
            Err(error) => Some(error),
            Ok(work) => match work.wait(None) {
                Err(WaitError::Failed(error)) => {
                    assert!(sticky || work.drain(TIMEOUT), "{what}");
                    Some(error)
                }
                waited => waited.map(|()| None).unwrap(),
            },
        };
        drop(device);
        if let Some(error) = &error {
            assert_eq!(error.cause.kind, ErrorKind::Device, "{what}: {error}");
            assert_eq!(error.cause.peer, Some(0), "{what}: {error}");
            assert!(error.cause.detail.contains("on device 0"), "{what}: {error}");
        } else {
            assert_eq!(tensor.read(), sum(2, NUMEL), "{what}");
        }
        comm.close(TIMEOUT);
        error.is_some()
    });
    stubs[1].assert_clean(&what);
    stubs[0].assert_sound(&what);
    failed[0]
}

#[test]
fn every_rank_reports_a_failed_call_and_the_daemon_continues() {
    let daemon = Served::new();
    let calls = ["cuMemcpyDtoHAsync_v2", "cuMemcpyHtoDAsync_v2", "cuEventQuery", "cuEventRecord"];
    for call in calls {
        for after in [1, 4] {
            assert!(with_fault(&daemon, call, after, false), "{call}");
            assert!(with_fault(&daemon, call, after, true), "{call}");
        }
    }
    assert!(with_fault(&daemon, "cuMemHostRegister_v2", 1, false));
}

#[test]
fn a_hung_copy_is_reported_at_the_deadline_and_its_memory_is_not_reused() {
    const SHORT: Duration = Duration::from_secs(4);
    for direction in [DOWN, UP] {
        let (stubs, daemon) = ([Stub::new(), Stub::new()], Served::new());
        run_at(&placement(2, 1), daemon.all(), |comm| {
            let stub = &stubs[comm.rank() as usize];
            let device = stub.device(0).unwrap();
            let tensor = stub.tensor(&values(comm.rank(), NUMEL));
            if comm.rank() == 0 {
                stub.allow(direction, 2);
            }
            let work = allreduce(&device, comm, &tensor, 0, SHORT).unwrap();
            let waited = work.wait(None);
            if comm.rank() == 0 {
                let WaitError::Failed(error) = waited.unwrap_err() else { panic!("still running") };
                assert_eq!(error.cause.kind, ErrorKind::TimedOut, "{error}");
                // On a very slow host the fault may not have occurred in time.
                let fault_occurred = direction == DOWN || stub.journal().contains('U');
                assert!(error.cause.peer == Some(0) || !fault_occurred, "{error}");
                assert!(!work.is_drained() || !fault_occurred);
                stub.allow(direction, ALL);
                assert!(work.drain(TIMEOUT));
            } else if direction == DOWN {
                let WaitError::Failed(error) = waited.unwrap_err() else { panic!("still running") };
                assert_eq!(error.cause.peer, Some(0), "{error}");
            }
            drop((work, device, tensor));
            comm.close(TIMEOUT);
        });
        stubs.iter().for_each(|stub| stub.assert_clean("after a hung copy"));
    }
}

#[test]
fn a_stopping_daemon_keeps_memory_of_running_copies() {
    let stubs = [Stub::new(), Stub::new()];
    let daemon = std::sync::Mutex::new(Some(Served::new()));
    let path = daemon.lock().unwrap().as_ref().unwrap().path.clone();
    run_at(
        &placement(1, 2),
        |_| Some(path.clone()),
        |comm| {
            let stub = &stubs[comm.rank() as usize];
            let device = stub.device(0).unwrap();
            let tensor = stub.tensor(&values(comm.rank(), NUMEL));
            if comm.rank() == 0 {
                stub.allow(DOWN, 2);
            }
            let work = allreduce(&device, comm, &tensor, 0, TIMEOUT);
            if comm.rank() == 0 {
                drop(daemon.lock().unwrap().take());
            }
            let error = match work {
                Err(error) => error,
                Ok(work) => {
                    let WaitError::Failed(error) = work.wait(None).unwrap_err() else { panic!() };
                    stub.allow(DOWN, ALL);
                    assert!(work.drain(TIMEOUT));
                    error
                }
            };
            assert!(error.to_string().contains("hfreduced on this node"), "{error}");
        },
    );
    stubs.iter().for_each(|stub| stub.assert_clean("after the end of a daemon"));
}
