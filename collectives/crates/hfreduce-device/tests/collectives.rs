//! Operations on GPU memory: correct results, in the right order, without leaks.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod support;

use std::sync::Arc;

use hfreduce_device::{Cuda, Device, DeviceError, DeviceWork, Settings};
use hfreduce_engine::{Buffer, Call, Communicator, DType, ErrorKind, Kind, Watermarks};
use support::{ALL, CHUNK_BYTES, DOWN, Stub, TIMEOUT, Tensor};
use support::{allreduce, eventually, placement, run, settings, sum, values};

/// Several engine chunks and copies, and a remainder that is neither.
const NUMEL: usize = 8 * CHUNK_BYTES / 4 + 3;

fn call(kind: Kind, root: u32) -> Call<'static> {
    Call { root, ..Call::new(kind, DType::F32, TIMEOUT, false) }
}

fn run_one(
    device: &Device,
    comm: &Communicator,
    call: Call<'_>,
    input: &Tensor<'_>,
    output: &Tensor<'_>,
) {
    // SAFETY: the tests keep their tensors until the work is drained.
    let work = unsafe { device.start(comm, call, input.range(), output.range(), 0) };
    work.unwrap().wait(None).unwrap();
}

#[test]
fn sums_of_every_size_are_correct_on_every_gpu() {
    let stub = Stub::new();
    for layout in [placement(1, 2), placement(2, 1), placement(2, 2)] {
        let world = layout.len() as u32;
        run(&layout, |comm| {
            let device = stub.device(comm.rank() as i32 % 2).unwrap();
            for numel in [0, 1, 1000, NUMEL] {
                let tensor = stub.tensor(&values(comm.rank(), numel));
                let work = allreduce(&device, comm, &tensor, 0, TIMEOUT).unwrap();
                work.wait(None).unwrap();
                assert!(work.is_done() && work.drain(TIMEOUT) && work.error().is_none());
                assert_eq!(tensor.read(), sum(world, numel), "{numel}");
            }
        });
        stub.assert_clean("after sums");
    }
}

#[test]
fn every_tree_operation_is_correct() {
    let stub = Stub::new();
    run(&placement(2, 2), |comm| {
        let (rank, world) = (comm.rank(), 4_usize);
        let device = stub.device(0).unwrap();
        let own = values(rank, NUMEL);

        let tensor = stub.tensor(&own);
        run_one(&device, comm, call(Kind::Broadcast, 1), &tensor, &tensor);
        assert_eq!(tensor.read(), values(1, NUMEL));

        let tensor = stub.tensor(&own);
        run_one(&device, comm, call(Kind::Reduce, 2), &tensor, &tensor);
        assert_eq!(tensor.read(), if rank == 2 { sum(4, NUMEL) } else { own.clone() });

        let (input, output) = (stub.tensor(&own), stub.tensor(&vec![0.0; world * NUMEL]));
        run_one(&device, comm, call(Kind::Allgather, 0), &input, &output);
        let all: Vec<f32> = (0..4).flat_map(|rank| values(rank, NUMEL)).collect();
        assert_eq!(output.read(), all);

        let (input, output) =
            (stub.tensor(&values(rank, world * NUMEL)), stub.tensor(&vec![0.0; NUMEL]));
        run_one(&device, comm, call(Kind::ReduceScatter, 0), &input, &output);
        let block = rank as usize * NUMEL..(rank as usize + 1) * NUMEL;
        assert_eq!(output.read(), sum(4, world * NUMEL)[block]);
    });
    stub.assert_clean("after trees");
}

#[test]
fn point_to_point_operations_read_the_streams_output() {
    let stub = Stub::new();
    run(&placement(2, 1), |comm| {
        let rank = comm.rank();
        let device = stub.device(0).unwrap();
        let stream = stub.stream();
        let (input, output) = (stub.tensor(&values(rank, 2000)), stub.tensor(&[0.0; 2000]));
        let counts = [1000, 1000];
        let call = Call { counts: [&counts; 2], ..call(Kind::Alltoall, 0) };
        // SAFETY: both tensors outlive the work.
        let work = unsafe { device.start(comm, call, input.range(), output.range(), stream) };
        work.unwrap().wait(None).unwrap();
        let half = rank as usize * 1000..(rank as usize + 1) * 1000;
        let expected = [&values(0, 2000)[half.clone()], &values(1, 2000)[half]].concat();
        assert_eq!(output.read(), expected);
    });
    stub.assert_sound("after pairs");
}

#[test]
fn pipelined_memory_is_refused_where_the_input_must_be_complete() {
    run(&placement(2, 1), |comm| {
        let mut data = [1.0_f32; 10];
        // SAFETY: the array outlives the refusal.
        let input = unsafe { Buffer::new([(data.as_mut_ptr().cast(), 40)]) };
        let input = input.pipelined(Arc::new(Watermarks::default()));
        let peer = Some(1 - comm.rank());
        let refused = comm.call(Call { input, peer, ..call(Kind::Send, 0) });
        assert_eq!(refused.err().unwrap().cause.kind, ErrorKind::Invalid);
    });
}

#[test]
fn the_first_chunk_is_copied_up_before_the_last_one_is_copied_down() {
    let stubs = [Stub::new(), Stub::new()];
    run(&placement(2, 1), |comm| {
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
        let journal = stub.journal();
        assert!(journal.find('u') < journal.rfind('d'), "{journal}");
        assert_eq!((journal.matches('d').count(), journal.matches('u').count()), (9, 9));
    });
    stubs.iter().for_each(|stub| stub.assert_clean("after an overlap"));
}

#[test]
fn a_second_operation_is_copied_down_while_the_first_is_reduced() {
    let stub = Stub::new();
    let world = run(&placement(2, 1), |comm| {
        let device = stub.device(0).unwrap();
        let tensors: Vec<Tensor<'_>> =
            (0..5).map(|_| stub.tensor(&values(comm.rank(), NUMEL))).collect();
        let works: Vec<DeviceWork> = tensors
            .iter()
            .map(|tensor| allreduce(&device, comm, tensor, 0, TIMEOUT).unwrap())
            .collect();
        works.iter().rev().for_each(|work| work.wait(None).unwrap());
        assert!(tensors.iter().all(|tensor| tensor.read() == sum(2, NUMEL)));
    });
    assert_eq!(world.len(), 2);
    stub.assert_clean("after five");
}

#[test]
fn memory_is_not_read_before_the_callers_stream_reaches_it() {
    let stubs = [Stub::new(), Stub::new()];
    run(&placement(2, 1), |comm| {
        let stub = &stubs[comm.rank() as usize];
        let device = stub.device(0).unwrap();
        let stream = stub.stream();
        let tensor = stub.tensor(&vec![-1.0; NUMEL]);
        stub.gate(stream);
        let work = allreduce(&device, comm, &tensor, stream, TIMEOUT).unwrap();
        eventually("a queued copy", || stub.journal().contains('D'));
        assert!(!stub.journal().contains('d'));
        tensor.write(&values(comm.rank(), NUMEL));
        stub.open();
        work.wait(None).unwrap();
        assert_eq!(tensor.read(), sum(2, NUMEL));
    });
    stubs.iter().for_each(|stub| stub.assert_sound("after a gate"));
}

#[test]
fn pinned_memory_is_bounded_and_reused() {
    let stub = Stub::new();
    run(&placement(2, 1), |comm| {
        let limit = 3 << 20;
        let device =
            Device::open(&stub.cuda, 0, Settings { pinned_bytes_max: limit, ..settings() });
        let device = device.unwrap();
        let tensors: Vec<Tensor<'_>> =
            (0..8).map(|_| stub.tensor(&values(comm.rank(), NUMEL))).collect();
        // More than fits: the later operations wait for the memory of the earlier ones.
        let works: Vec<DeviceWork> = tensors
            .iter()
            .map(|tensor| allreduce(&device, comm, tensor, 0, TIMEOUT).unwrap())
            .collect();
        assert!(device.pinned_bytes() <= limit);
        works.iter().for_each(|work| work.wait(None).unwrap());
        assert!(tensors.iter().all(|tensor| tensor.read() == sum(2, NUMEL)));
        let registered = stub.count("registrations");
        assert!((2..=8).contains(&registered), "{registered}");
        let whole = stub.tensor(&vec![0.0; limit]);
        let refused = allreduce(&device, comm, &whole, 0, TIMEOUT).err().unwrap();
        assert!(refused.cause.detail.contains("HFREDUCE_PINNED_BYTES"), "{refused}");
    });
    stub.assert_clean("after a full arena");
}

#[test]
fn errors_about_missing_gpus_contain_the_remedy() {
    let missing = Cuda::load("libcuda-missing.so.1").unwrap_err();
    assert!(matches!(missing, DeviceError::Library { .. }), "{missing}");
    assert!(missing.to_string().contains("HFREDUCE_CUDA_LIBRARY"), "{missing}");
    let without_symbols = Cuda::load("libc.so.6").unwrap_err();
    assert!(
        matches!(without_symbols, DeviceError::Symbol { symbol: "cuInit", .. }),
        "{without_symbols}"
    );
    let stub = Stub::new();
    let invalid_ordinal = stub.device(7).err().unwrap();
    let DeviceError::Call { call: "cuDeviceGet", device: 7, code: 101, .. } = invalid_ordinal
    else {
        panic!("{invalid_ordinal}");
    };
    assert!(invalid_ordinal.to_string().contains("CUDA_VISIBLE_DEVICES"), "{invalid_ordinal}");
    let host = 1_u64;
    assert_eq!(stub.cuda.owner_of((&raw const host).addr() as u64), None);
    assert_eq!(stub.cuda.owner_of(stub.tensor(&[1.0]).range().pointer), Some(0));
    stub.assert_clean("after refusals");
}

#[test]
fn the_list_of_functions_contains_no_launch() {
    let copies = ["cuMemcpyDtoHAsync_v2", "cuMemcpyHtoDAsync_v2"];
    for name in hfreduce_device::cuda::FUNCTIONS {
        let harmless = !["Launch", "Graph", "Memset", "Module"].iter().any(|w| name.contains(w));
        assert!(harmless && (!name.contains("Memcpy") || copies.contains(name)), "{name}");
    }
}
