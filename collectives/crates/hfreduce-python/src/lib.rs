//! Python bindings. Thin: arguments are converted here, nothing is decided here.
//!
//! Pointers arrive as integers; the Python side keeps the tensors alive until the work has ended.
//! Blocking calls release the interpreter lock.

mod arguments;
mod communicator;
mod completions;
mod daemon;
mod endpoint;
mod errors;
mod flight;
mod gpu;
mod join;
mod memory;
mod operations;
mod probe;
mod rendezvous;
mod settings;
mod work;

use fabric::interfaces::VIRTUAL_PREFIXES;
use hfreduce_engine::{DType, ReduceOp};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    for dtype in DType::ALL {
        module.add(dtype.name().to_uppercase(), dtype.code())?;
    }
    for op in ReduceOp::ALL {
        module.add(op.name().to_uppercase(), op as u8)?;
    }
    module.add("CollectiveError", module.py().get_type::<errors::CollectiveError>())?;
    module.add_class::<endpoint::Endpoint>()?;
    module.add_class::<endpoint::Newcomer>()?;
    module.add_class::<daemon::Daemon>()?;
    module.add_class::<operations::Operations>()?;
    module.add_class::<operations::OnGpu>()?;
    module.add_class::<communicator::Communicator>()?;
    module.add_class::<completions::Completions>()?;
    module.add_class::<memory::Registered>()?;
    module.add_class::<work::Work>()?;
    module.add("GpuError", module.py().get_type::<errors::GpuError>())?;
    module.add_class::<gpu::Gpu>()?;
    module.add_function(pyo3::wrap_pyfunction!(flight::read_flight, module)?)?;
    module.add_function(pyo3::wrap_pyfunction!(flight::flight_folders, module)?)?;
    module.add_class::<settings::Settings>()?;
    module.add_class::<settings::Place>()?;
    module.add_class::<settings::Topology>()?;
    module.add_function(wrap_pyfunction!(settings::load_topology, module)?)?;
    module.add_function(wrap_pyfunction!(settings::settings_table, module)?)?;
    module.add_class::<rendezvous::Rendezvous>()?;
    module.add_class::<join::Membership>()?;
    module.add_function(wrap_pyfunction!(join::join, module)?)?;
    module.add_function(wrap_pyfunction!(rendezvous::pack, module)?)?;
    module.add_function(wrap_pyfunction!(rendezvous::unpack, module)?)?;
    module.add_function(wrap_pyfunction!(rendezvous::blob_bytes_max, module)?)?;
    module.add_class::<probe::Triad>()?;
    module.add_function(wrap_pyfunction!(probe::instruction_set, module)?)?;
    module.add_function(wrap_pyfunction!(probe::descriptors_needed, module)?)?;
    module.add_function(wrap_pyfunction!(probe::reached_at, module)?)?;
    module.add("INWARD", PyTuple::new(module.py(), VIRTUAL_PREFIXES)?)?;
    module.add_function(wrap_pyfunction!(probe::best_instruction_set, module)?)?;
    module.add_function(wrap_pyfunction!(gpu::without_gdrcopy, module)?)?;
    Ok(())
}
