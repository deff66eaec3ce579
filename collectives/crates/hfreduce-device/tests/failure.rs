//! Drivers that fail and GPUs that hang: one error on every rank, and no copy into anybody's memory.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod support;

use std::time::Duration;

use hfreduce_device::cuda::FUNCTIONS;
use hfreduce_device::{Device, Settings};
use hfreduce_engine::{ErrorKind, WaitError};
use support::{ALL, CHUNK_BYTES, DOWN, Stub, TIMEOUT, UP};
use support::{allreduce, eventually, placement, run, settings, sum, values};

const NUMEL: usize = 10 * CHUNK_BYTES / 4;
const ILLEGAL_ADDRESS: i32 = 700;
/// A deadline that passes, after all that comes before it on a busy machine.
const SHORT: Duration = Duration::from_secs(4);

/// What gives something back: where that fails, it is still there.
const RELEASES: [&str; 5] = [
    "cuDevicePrimaryCtxRelease_v2",
    "cuCtxPopCurrent_v2",
    "cuStreamDestroy_v2",
    "cuEventDestroy_v2",
    "cuMemHostUnregister",
];

/// One allreduce of two ranks of which rank 0's driver has this fault; true if it was met.
fn with_fault(call: &str, after: i64, sticky: bool) -> bool {
    let what = format!("{call} fails at call {after} (for good: {sticky})");
    let stubs = [Stub::new(), Stub::new()];
    let failed = run(&placement(2, 1), |comm| {
        let stub = &stubs[comm.rank() as usize];
        let tensor = stub.tensor(&values(comm.rank(), NUMEL));
        if comm.rank() == 0 {
            stub.fail(call, after, ILLEGAL_ADDRESS, sticky);
        }
        let opened = stub.device(0);
        let error = match &opened {
            Err(error) => Some(comm.fail(ErrorKind::Device, "open", error.to_string())),
            Ok(device) => match allreduce(device, comm, &tensor, 0, TIMEOUT) {
                Err(error) => Some(error),
                Ok(work) => match work.wait(None) {
                    Err(WaitError::Failed(error)) => {
                        assert!(sticky || work.drain(TIMEOUT), "{what}");
                        Some(error)
                    }
                    waited => waited.map(|()| None).unwrap(),
                },
            },
        };
        drop(opened);
        if let Some(error) = &error {
            assert_eq!(error.cause.kind, ErrorKind::Device, "{what}: {error}");
            assert_eq!(error.cause.peer, Some(0), "{what}: {error}");
            let said = ["on device 0", call, "ILLEGAL_ADDRESS (700)", "CUDA_LAUNCH_BLOCKING"];
            let said = said.iter().filter(|word| !error.cause.detail.contains(**word));
            // A context that is lost fails with the next call, whatever that is.
            let missing: Vec<_> = said.filter(|word| !sticky || **word != call).collect();
            assert!(missing.is_empty(), "{what}: {missing:?} in {error}");
        } else {
            assert_eq!(tensor.read(), sum(2, NUMEL), "{what}");
        }
        // A rank that failed while its peer had the sum already leaves late: both stay until then.
        comm.close(TIMEOUT);
        error.is_some()
    });
    stubs[1].assert_clean(&what);
    if sticky || RELEASES.contains(&call) {
        stubs[0].assert_sound(&what);
    } else {
        stubs[0].assert_clean(&what);
    }
    failed[0]
}

#[test]
fn any_call_that_fails_once_is_named_on_every_rank_and_leaves_nothing() {
    let mut met = 0;
    // The driver is up when the fault begins; two are asked by others.
    let before = ["cuInit", "cuGetErrorName", "cuGetErrorString", "cuDeviceGetCount"];
    let before = [before.as_slice(), &["cuPointerGetAttribute"]].concat();
    for call in FUNCTIONS.iter().filter(|call| !before.contains(call)) {
        let mut here = 0;
        for after in [1, 2, 5, 11] {
            here += i32::from(with_fault(call, after, false));
        }
        assert!(here > 0 || RELEASES.contains(call), "{call} failed and nobody noticed");
        met += here;
    }
    assert!(met > 20, "{met}");
}

#[test]
fn a_context_that_is_lost_is_named_and_its_memory_is_nobodys() {
    let calls = ["cuMemcpyDtoHAsync_v2", "cuMemcpyHtoDAsync_v2", "cuEventQuery", "cuEventRecord"];
    for call in calls {
        for after in [1, 4] {
            assert!(with_fault(call, after, true), "{call}");
        }
    }
}

#[test]
fn a_copy_that_does_not_end_is_told_by_the_deadline_and_keeps_its_memory() {
    std::thread::scope(|scope| {
        for direction in [DOWN, UP] {
            scope.spawn(move || hung_copy(direction));
        }
    });
}

fn hung_copy(direction: i32) {
    let stubs = [Stub::new(), Stub::new()];
    // A machine so slow that it did not come that far in time has shown nothing.
    let met = || direction == DOWN || stubs[0].journal().contains('U');
    run(&placement(2, 1), |comm| {
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
            assert!(error.cause.peer == Some(0) || !met(), "{error}");
            // Raised in time, though the GPU still has our addresses.
            assert!(!work.is_drained() || !met());
            let queued = stub.journal().matches(['D', 'U']).count();
            stub.allow(direction, ALL);
            assert!(work.drain(TIMEOUT));
            assert_eq!(stub.journal().matches(['D', 'U']).count(), queued, "a copy began late");
        } else if direction == DOWN {
            let WaitError::Failed(error) = waited.unwrap_err() else { panic!("still running") };
            assert_eq!(error.cause.peer, Some(0), "{error}");
        } else {
            // It has the sum; the other's trouble comes after that.
            eventually("the news", || comm.error().is_some());
            assert!(comm.error().unwrap().cause.peer == Some(0) || !met());
        }
        drop((work, device, tensor));
        comm.close(TIMEOUT);
    });
    stubs.iter().for_each(|stub| stub.assert_clean("after a hung copy"));
}

#[test]
fn what_a_hung_gpu_knows_is_never_given_to_anybody_else() {
    let stubs = [Stub::new(), Stub::new()];
    run(&placement(2, 1), |comm| {
        let stub = &stubs[comm.rank() as usize];
        let device = impatient(stub, comm.rank() == 0);
        let tensor = stub.tensor(&values(comm.rank(), NUMEL));
        if comm.rank() == 0 {
            stub.allow(DOWN, 1);
        }
        let work = allreduce(&device, comm, &tensor, 0, SHORT).unwrap();
        assert!(work.wait(None).is_err());
        drop(device);
        if comm.rank() == 0 {
            // Closed with copies under way: the block stays registered and mapped for them.
            assert!(!work.is_drained() && stub.count("registrations") == 1);
            stub.allow(DOWN, ALL);
            eventually("the late copies", || all_done(stub));
        }
        comm.close(TIMEOUT);
    });
    stubs[0].assert_sound("after closing over a hung copy");
    stubs[1].assert_clean("after its peer's");
}

#[test]
fn a_driver_that_does_not_come_back_holds_nobody() {
    let calls = ["cuMemcpyDtoHAsync_v2", "cuMemcpyHtoDAsync_v2", "cuEventQuery"];
    std::thread::scope(|scope| {
        for call in calls {
            scope.spawn(move || stalled(call));
        }
    });
}

/// A device that is closed over what hangs, on the rank where something does.
fn impatient(stub: &Stub, hangs: bool) -> Device {
    let patience = if hangs { Duration::from_millis(100) } else { settings().patience };
    Device::open(&stub.cuda, 0, Settings { patience, ..settings() }).unwrap()
}

/// Everything that was queued has been done.
fn all_done(stub: &Stub) -> bool {
    let journal = stub.journal();
    journal.matches(['D', 'U']).count() == journal.matches(['d', 'u']).count()
}

fn stalled(call: &str) {
    let stubs = [Stub::new(), Stub::new()];
    run(&placement(2, 1), |comm| {
        let stub = &stubs[comm.rank() as usize];
        let device = impatient(stub, comm.rank() == 0);
        let tensor = stub.tensor(&values(comm.rank(), NUMEL));
        if comm.rank() == 0 {
            stub.stall(call);
        }
        let work = allreduce(&device, comm, &tensor, 0, SHORT).unwrap();
        let waited = work.wait(None);
        if comm.rank() == 0 {
            let WaitError::Failed(error) = waited.unwrap_err() else { panic!("{call}") };
            assert_eq!(error.cause.kind, ErrorKind::TimedOut, "{call}");
            // A machine so slow that it did not come that far has shown nothing.
            if stub.count("stalls") > 0 {
                assert_eq!(error.cause.peer, Some(0), "{call}: {error}");
                assert!(!work.is_drained(), "{call}");
            }
        }
        drop(device);
        stub.open();
        // What was closed over is kept for ever, whatever comes back later.
        assert!(comm.rank() == 1 || stub.count("registrations") > 0 || work.drain(TIMEOUT));
        let stalled = if call.contains("HtoD") { 'u' } else { 'd' };
        let seen = || stub.count("stalls") == 0 || stub.journal().contains(stalled);
        eventually("the end of all copies", || seen() && all_done(stub));
        comm.close(TIMEOUT);
    });
    stubs.iter().for_each(|stub| stub.assert_sound(call));
}

#[test]
fn a_slow_gpu_is_waited_for() {
    let stub = Stub::new();
    stub.delay(Duration::from_millis(2));
    run(&placement(2, 1), |comm| {
        let device = stub.device(comm.rank() as i32).unwrap();
        let tensor = stub.tensor(&values(comm.rank(), NUMEL));
        let work = allreduce(&device, comm, &tensor, 0, TIMEOUT).unwrap();
        while let Err(error) = work.wait(Some(Duration::from_millis(1))) {
            assert!(matches!(error, WaitError::StillRunning { .. }), "{error}");
        }
        assert_eq!(tensor.read(), sum(2, NUMEL));
    });
    stub.assert_clean("after a slow GPU");
}

#[test]
fn the_other_rank_dies_and_the_gpus_copies_end_first() {
    let stubs = [Stub::new(), Stub::new()];
    run(&placement(2, 1), |comm| {
        let stub = &stubs[comm.rank() as usize];
        if comm.rank() == 1 {
            comm.abort("enough");
            return;
        }
        let device = stub.device(0).unwrap();
        let tensor = stub.tensor(&values(0, NUMEL));
        let raised = match allreduce(&device, comm, &tensor, 0, TIMEOUT) {
            Err(error) => error,
            Ok(work) => {
                let WaitError::Failed(error) = work.wait(None).unwrap_err() else { panic!() };
                assert!(work.drain(TIMEOUT));
                error
            }
        };
        assert_eq!((raised.cause.kind, raised.cause.peer), (ErrorKind::Aborted, Some(1)));
    });
    stubs.iter().for_each(|stub| stub.assert_clean("after an abort"));
}
