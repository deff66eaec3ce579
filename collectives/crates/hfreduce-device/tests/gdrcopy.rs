//! Small copies by the processor: which copies, when, and the fallback if it cannot.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod support;

use std::sync::atomic::Ordering;
use std::time::Duration;

use hfreduce_device::gdr::{FUNCTIONS, LIBRARY};
use hfreduce_device::windows::{READ_BYTES_MAX, WRITE_BYTES_MAX};
use hfreduce_device::{Device, Range, Settings};
use hfreduce_engine::{Call, DType, ErrorKind, Kind, WaitError};
use support::{Stub, TIMEOUT, Tensor};
use support::{allreduce, eventually, placement, run, settings, sum, values};

const SMALL: usize = READ_BYTES_MAX / 4;

#[test]
fn the_size_decides_between_processor_and_copy_engine() {
    let stubs = [Stub::new(), Stub::new()];
    run(&placement(2, 1), |comm| {
        let stub = &stubs[comm.rank() as usize];
        let device = stub.device_with_gdrcopy();
        assert_eq!(device.gdrcopy(), Ok(()));
        for (numel, how) in [
            (1, "rw"),
            (SMALL, "rw"),
            (SMALL + 1, "Ddw"),
            (WRITE_BYTES_MAX / 4, "Ddw"),
            (WRITE_BYTES_MAX / 4 + 1, "DdUu"),
        ] {
            let before = stub.journal().len();
            let tensor = stub.tensor(&values(comm.rank(), numel));
            let work = allreduce(&device, comm, &tensor, 0, TIMEOUT).unwrap();
            work.wait(None).unwrap();
            assert!(work.drain(TIMEOUT));
            assert_eq!(tensor.read(), sum(2, numel), "{numel}");
            assert_eq!(stub.journal()[before..], *how, "{numel}");
        }
        let expected = 2 * 4 + 2 * READ_BYTES_MAX + 4 * (SMALL + 1) + WRITE_BYTES_MAX;
        let copied = device.counters().by_processor_bytes.load(Ordering::Relaxed);
        assert_eq!(copied, expected as u64);
    });
    stubs.iter().for_each(|stub| stub.assert_clean("after several sizes"));
}

#[test]
fn a_rank_without_input_or_output_copies_in_one_direction() {
    let stubs = [Stub::new(), Stub::new()];
    run(&placement(2, 1), |comm| {
        let stub = &stubs[comm.rank() as usize];
        let device = stub.device_with_gdrcopy();
        let tensor = stub.tensor(&values(comm.rank(), SMALL));
        let root = comm.rank() == 1;
        let call = Call { root: 1, ..Call::new(Kind::Broadcast, DType::F32, TIMEOUT, false) };
        // SAFETY: the tensor outlives the work.
        let work = unsafe { device.start(comm, call, tensor.range(), Range::default(), 0) };
        work.unwrap().wait(None).unwrap();
        assert_eq!(tensor.read(), values(1, SMALL));
        assert_eq!(stub.journal(), if root { "r" } else { "w" });
    });
    stubs.iter().for_each(|stub| stub.assert_clean("after a broadcast"));
}

#[test]
fn memory_is_not_accessed_before_the_callers_stream_reaches_it() {
    let stubs = [Stub::new(), Stub::new()];
    run(&placement(2, 1), |comm| {
        let stub = &stubs[comm.rank() as usize];
        let device = stub.device_with_gdrcopy();
        let stream = stub.stream();
        let tensor = stub.tensor(&[-1.0; SMALL]);
        stub.gate(stream);
        let work = allreduce(&device, comm, &tensor, stream, TIMEOUT).unwrap();
        // Polled repeatedly, so a copy that starts too early would be seen.
        let pauses = || device.counters().pauses.load(Ordering::Relaxed);
        eventually("a poll", || pauses() > 3);
        assert_eq!(stub.journal(), "");
        tensor.write(&values(comm.rank(), SMALL));
        stub.open();
        work.wait(None).unwrap();
        assert_eq!((tensor.read(), stub.journal()), (sum(2, SMALL), "rw".to_owned()));
    });
    stubs.iter().for_each(|stub| stub.assert_sound("after a gate"));
}

#[test]
fn windows_are_reused_but_never_for_other_memory() {
    let stubs = [Stub::new(), Stub::new()];
    run(&placement(2, 1), |comm| {
        let stub = &stubs[comm.rank() as usize];
        let device = stub.device_with_gdrcopy();
        let add = |tensor: &Tensor<'_>| {
            tensor.write(&values(comm.rank(), SMALL));
            let work = allreduce(&device, comm, tensor, 0, TIMEOUT).unwrap();
            work.wait(None).unwrap();
            assert_eq!(tensor.read(), sum(2, SMALL));
        };
        let tensor = stub.tensor(&[0.0; SMALL]);
        (0..20).for_each(|_| add(&tensor));
        assert_eq!(stub.count("pins"), 1);
        // The old window maps pages that have been freed.
        for (same, pins) in [(false, 2), (true, 3)] {
            tensor.again(same);
            (0..3).for_each(|_| add(&tensor));
            assert_eq!(stub.count("pins"), pins);
        }
        let many: Vec<Tensor<'_>> = (0..70).map(|_| stub.tensor(&[0.0; SMALL])).collect();
        many.iter().for_each(add);
        assert_eq!((stub.count("pins"), stub.count("windows")), (73, 64 + 1), "and a session");
        many[69..].iter().for_each(add);
        assert_eq!(stub.count("pins"), 73);
    });
    stubs.iter().for_each(|stub| stub.assert_clean("after many windows"));
}

#[test]
fn copy_engines_replace_gdrcopy_after_any_failure() {
    for call in FUNCTIONS {
        let stubs = [Stub::new(), Stub::new()];
        run(&placement(2, 1), |comm| {
            let stub = &stubs[comm.rank() as usize];
            if comm.rank() == 0 {
                stub.fail(call, 1, 22, false);
            }
            let device = stub.device_with_gdrcopy();
            for numel in [SMALL, SMALL, 2 * SMALL] {
                let tensor = stub.tensor(&values(comm.rank(), numel));
                let work = allreduce(&device, comm, &tensor, 0, TIMEOUT).unwrap();
                work.wait(None).unwrap();
                assert!(work.drain(TIMEOUT));
                assert_eq!(tensor.read(), sum(2, numel), "{call}");
            }
            if comm.rank() == 0 && *call == "gdr_open" {
                assert!(device.gdrcopy().unwrap_err().contains("/dev/gdrdrv"));
            }
            let releases = ["gdr_close", "gdr_unmap", "gdr_unpin_buffer"].contains(call);
            // The last copy down uses the engine in any case.
            let engine = stub.journal().matches(['D', 'U']).count();
            assert_eq!(engine > 1, comm.rank() == 0 && !releases, "{call}: {}", stub.journal());
        });
        stubs[1].assert_clean(call);
        stubs[0].assert_sound(call);
    }
}

#[test]
fn operations_succeed_without_gdrcopy() {
    let stub = Stub::new();
    run(&placement(1, 2), |comm| {
        for (library, why) in [
            (Some("libgdrapi-missing.so"), "libgdrapi-missing.so"),
            (Some("libc.so.6"), "it has no gdr_open"),
            (None, "disabled"),
        ] {
            let gdrcopy = library.map(str::to_owned);
            let device = Device::open(&stub.cuda, 0, Settings { gdrcopy, ..settings() }).unwrap();
            assert!(device.gdrcopy().unwrap_err().contains(why), "{:?}", device.gdrcopy());
            let tensor = stub.tensor(&values(comm.rank(), SMALL));
            allreduce(&device, comm, &tensor, 0, TIMEOUT).unwrap().wait(None).unwrap();
            assert_eq!(tensor.read(), sum(2, SMALL));
        }
    });
    assert_eq!(Settings::default().gdrcopy.as_deref(), Some(LIBRARY));
    stub.assert_clean("without GDRCopy");
}

#[test]
fn a_copy_that_does_not_return_blocks_no_caller() {
    let stubs = [Stub::new(), Stub::new()];
    run(&placement(2, 1), |comm| {
        let stub = &stubs[comm.rank() as usize];
        let tensor = stub.tensor(&values(comm.rank(), SMALL));
        let gdrcopy = Some(stub.path().to_owned());
        let grace_period = Duration::from_millis(100);
        let settings = Settings { grace_period, gdrcopy, ..settings() };
        let device = Device::open(&stub.cuda, 0, settings).unwrap();
        if comm.rank() == 0 {
            stub.stall("gdr_copy_from_mapping");
        }
        let work = allreduce(&device, comm, &tensor, 0, Duration::from_secs(4)).unwrap();
        let WaitError::Failed(error) = work.wait(None).unwrap_err() else { panic!() };
        assert_eq!(error.cause.kind, ErrorKind::TimedOut, "{error}");
        // On a very slow host the fault may not have occurred in time.
        if stubs[0].count("stalls") > 0 {
            assert_eq!(error.cause.peer, Some(0), "{error}");
            assert!(comm.rank() == 1 || !work.is_drained());
        }
        drop(device);
        stub.open();
        // Memory in use at the close is released, and the tensor can be reused.
        assert!(work.drain(TIMEOUT));
        comm.close(TIMEOUT);
    });
    stubs[0].assert_sound("after a hung copy");
    stubs[1].assert_clean("after its peer's");
}
