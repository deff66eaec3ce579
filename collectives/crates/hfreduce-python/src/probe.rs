//! Probes of this machine: memory bandwidth, instruction set, addresses for other machines.

use std::sync::Barrier;
use std::time::Instant;

use fabric::interfaces::{interfaces, source_towards};
use hfreduce_kernels::Isa;
use pyo3::exceptions::{PyMemoryError, PyValueError};
use pyo3::prelude::*;

use crate::endpoint::address_selector;

const THREADS_MAX: usize = 1024;
/// Passes over the arrays; the best one counts, since others only take away.
const PASSES: usize = 3;

/// The memory's speed: STREAM's triad over three arrays a thread, in bytes per second of all.
#[pyclass(module = "hfreduce._native")]
pub struct Triad {
    arrays: Vec<[Vec<u8>; 3]>,
}

/// Descriptors that a rank of a group may open.
#[pyfunction]
#[pyo3(signature = (ranks, local_ranks, streams = None))]
pub fn descriptors_needed(ranks: usize, local_ranks: usize, streams: Option<usize>) -> usize {
    hfreduce_engine::descriptors_needed(ranks, local_ranks, streams)
}

#[pymethods]
impl Triad {
    #[new]
    fn new(py: Python<'_>, threads: usize, array_bytes: usize) -> PyResult<Self> {
        if !(1..=THREADS_MAX).contains(&threads) || array_bytes < 4096 {
            return Err(PyValueError::new_err(format!(
                "{threads} threads, arrays of {array_bytes} bytes: give 1 to {THREADS_MAX} and at \
                 least 4096"
            )));
        }
        let array = |fill: u8| -> Result<Vec<u8>, std::collections::TryReserveError> {
            let mut bytes = Vec::new();
            bytes.try_reserve_exact(array_bytes)?;
            bytes.resize(array_bytes, fill);
            Ok(bytes)
        };
        let arrays = py.detach(|| {
            (0..threads).map(|_| Ok([array(0)?, array(1)?, array(2)?])).collect::<Result<_, _>>()
        });
        let arrays = arrays.map_err(|error: std::collections::TryReserveError| {
            PyMemoryError::new_err(format!("{threads} × 3 arrays of {array_bytes} bytes: {error}"))
        })?;
        Ok(Self { arrays })
    }

    /// Bytes per second of the best of three passes.
    fn measure(&mut self, py: Python<'_>) -> f64 {
        py.detach(|| {
            let bytes: usize = self.arrays.iter().flatten().map(Vec::len).sum();
            bytes as f64 / best_pass(&mut self.arrays)
        })
    }
}

/// Seconds that the slowest thread took in the quickest pass.
fn best_pass(arrays: &mut [[Vec<u8>; 3]]) -> f64 {
    let barrier = Barrier::new(arrays.len());
    let times: Vec<[f64; PASSES]> = std::thread::scope(|scope| {
        let barrier = &barrier;
        let run = move |[a, b, c]: &mut [Vec<u8>; 3]| {
            [(); PASSES].map(|()| {
                barrier.wait();
                let start = Instant::now();
                hfreduce_kernels::triad(b, c, a);
                start.elapsed().as_secs_f64()
            })
        };
        let running: Vec<_> = arrays.iter_mut().map(|own| scope.spawn(move || run(own))).collect();
        running.into_iter().filter_map(|thread| thread.join().ok()).collect()
    });
    let slowest = |pass: usize| times.iter().map(|time| time[pass]).fold(0.0, f64::max);
    (0..PASSES).map(slowest).fold(f64::INFINITY, f64::min)
}

/// The instruction set in force: `scalar`, `avx2` or `avx512`.
#[pyfunction]
pub fn instruction_set() -> &'static str {
    Isa::chosen().name()
}

/// The widest instruction set of the processor, independent of HFREDUCE_ISA.
#[pyfunction]
pub fn best_instruction_set() -> &'static str {
    Isa::best().name()
}

/// Interfaces and addresses at which other ranks would reach a rank of this node, best first, for a
/// value of HFREDUCE_ADDRESS and a host of the group.
#[pyfunction]
#[pyo3(signature = (address = None, towards = None))]
pub fn reached_at(
    py: Python<'_>,
    address: Option<String>,
    towards: Option<String>,
) -> PyResult<Vec<String>> {
    let preference = address_selector(address.as_deref())?;
    let selection =
        py.detach(|| preference.select(&interfaces(), source_towards(towards.as_deref())));
    let selection = selection.map_err(|error| PyValueError::new_err(error.to_string()))?;
    Ok(selection.iter().map(ToString::to_string).collect())
}
