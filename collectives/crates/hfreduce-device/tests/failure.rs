//! Drivers that fail and GPUs that hang: one error on every rank, and no copy into released memory.
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
/// A deadline that passes, but after all preceding steps even on a busy host.
const SHORT: Duration = Duration::from_secs(4);

/// Functions that release something: if one fails, the resource remains.
const RELEASES: [&str; 5] = [
    "cuDevicePrimaryCtxRelease_v2",
    "cuCtxPopCurrent_v2",
    "cuStreamDestroy_v2",
    "cuEventDestroy_v2",
    "cuMemHostUnregister",
];

/// One allreduce of two ranks in which rank 0's driver has this fault; true if the fault occurred.
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
            let expected = ["on device 0", call, "ILLEGAL_ADDRESS (700)", "CUDA_LAUNCH_BLOCKING"];
            let expected = expected.iter().filter(|word| !error.cause.detail.contains(**word));
            // A lost context fails at the next call, whichever that is.
            let missing: Vec<_> = expected.filter(|word| !sticky || **word != call).collect();
            assert!(missing.is_empty(), "{what}: {missing:?} in {error}");
        } else {
            assert_eq!(tensor.read(), sum(2, NUMEL), "{what}");
        }
        // A rank that failed after its peer had the sum closes late: both stay until then.
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
fn every_rank_reports_any_call_that_fails_once_without_leaks() {
    let mut failure_count = 0;
    // The driver is initialised when the fault starts; other code calls the rest.
    let before = ["cuInit", "cuGetErrorName", "cuGetErrorString", "cuDeviceGetCount"];
    let before = [before.as_slice(), &["cuPointerGetAttribute"]].concat();
    for call in FUNCTIONS.iter().filter(|call| !before.contains(call)) {
        let mut failures = 0;
        for after in [1, 2, 5, 11] {
            failures += i32::from(with_fault(call, after, false));
        }
        assert!(failures > 0 || RELEASES.contains(call), "the failure of {call} was not reported");
        failure_count += failures;
    }
    assert!(failure_count > 20, "{failure_count}");
}

#[test]
fn a_lost_context_is_reported_and_its_memory_is_not_reused() {
    let calls = ["cuMemcpyDtoHAsync_v2", "cuMemcpyHtoDAsync_v2", "cuEventQuery", "cuEventRecord"];
    for call in calls {
        for after in [1, 4] {
            assert!(with_fault(call, after, true), "{call}");
        }
    }
}

#[test]
fn a_hung_copy_is_reported_at_the_deadline_and_its_memory_is_not_reused() {
    std::thread::scope(|scope| {
        for direction in [DOWN, UP] {
            scope.spawn(move || hung_copy(direction));
        }
    });
}

fn hung_copy(direction: i32) {
    let stubs = [Stub::new(), Stub::new()];
    // On a very slow host the fault may not have occurred in time.
    let fault_occurred = || direction == DOWN || stubs[0].journal().contains('U');
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
            assert!(error.cause.peer == Some(0) || !fault_occurred(), "{error}");
            // Returned in time, although the GPU still uses the memory.
            assert!(!work.is_drained() || !fault_occurred());
            let queued = stub.journal().matches(['D', 'U']).count();
            stub.allow(direction, ALL);
            assert!(work.drain(TIMEOUT));
            assert_eq!(stub.journal().matches(['D', 'U']).count(), queued, "a copy started late");
        } else if direction == DOWN {
            let WaitError::Failed(error) = waited.unwrap_err() else { panic!("still running") };
            assert_eq!(error.cause.peer, Some(0), "{error}");
        } else {
            // This rank has the sum; the other rank's failure follows.
            eventually("the abort", || comm.error().is_some());
            assert!(comm.error().unwrap().cause.peer == Some(0) || !fault_occurred());
        }
        drop((work, device, tensor));
        comm.close(TIMEOUT);
    });
    stubs.iter().for_each(|stub| stub.assert_clean("after a hung copy"));
}

#[test]
fn memory_known_to_a_hung_gpu_is_never_reused() {
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
            // Closed with copies in progress: the block stays registered and mapped for them.
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
fn a_driver_call_that_does_not_return_blocks_no_caller() {
    let calls = ["cuMemcpyDtoHAsync_v2", "cuMemcpyHtoDAsync_v2", "cuEventQuery"];
    std::thread::scope(|scope| {
        for call in calls {
            scope.spawn(move || stalled(call));
        }
    });
}

/// Opens a device with short grace period on the rank that hangs.
fn impatient(stub: &Stub, hangs: bool) -> Device {
    let grace_period = if hangs { Duration::from_millis(100) } else { settings().grace_period };
    Device::open(&stub.cuda, 0, Settings { grace_period, ..settings() }).unwrap()
}

/// True if all queued copies are done.
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
            // On a very slow host the fault may not have occurred in time.
            if stub.count("stalls") > 0 {
                assert_eq!(error.cause.peer, Some(0), "{call}: {error}");
                assert!(!work.is_drained(), "{call}");
            }
        }
        drop(device);
        stub.open();
        // Memory in use at the close is kept forever, even if the call returns later.
        assert!(comm.rank() == 1 || stub.count("registrations") > 0 || work.drain(TIMEOUT));
        let stalled = if call.contains("HtoD") { 'u' } else { 'd' };
        let has_stalled = || stub.count("stalls") == 0 || stub.journal().contains(stalled);
        eventually("the end of all copies", || has_stalled() && all_done(stub));
        comm.close(TIMEOUT);
    });
    stubs.iter().for_each(|stub| stub.assert_sound(call));
}

#[test]
fn a_slow_gpu_is_awaited() {
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
fn copies_are_drained_before_an_abort_by_another_rank_returns_the_memory() {
    let stubs = [Stub::new(), Stub::new()];
    run(&placement(2, 1), |comm| {
        let stub = &stubs[comm.rank() as usize];
        if comm.rank() == 1 {
            comm.abort("abort of the test");
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
