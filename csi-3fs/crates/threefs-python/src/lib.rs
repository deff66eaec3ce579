//! Python bindings: conversion of arguments and results only.
//!
//! | module | content |
//! |---|---|
//! | `addresses` | addresses of services in arguments and configuration |
//! | `audit` | an audit of chunks against the tree |
//! | `backup` | dumps of the services' stores |
//! | `buffer` | memory of Python objects without a copy |
//! | `client` | the client's methods, blocking, with the GIL released |
//! | `copier` | copies of trees |
//! | `credential` | issuing and reading tickets |
//! | `file` | an open file |
//! | `errors` | the client's errors as classes of `threefs.errors` |
//! | `rings` | rings in shared memory |
//! | `runtime` | threads of a client, and fork safety |
//! | `fuse` | FUSE daemon process |
//! | `service` | processes of mgmtd, meta and storage |
//! | `store` | the store in the configuration of mgmtd and meta |

mod addresses;
mod audit;
mod backup;
mod buffer;
mod client;
mod copier;
mod credential;
mod errors;
mod file;
mod fuse;
mod rings;
mod runtime;
mod service;
mod snapshots;
mod store;
mod trash;

use pyo3::prelude::*;

use buffer::View;

/// CRC32C (Castagnoli) of contiguous bytes, continued from `initial`.
#[pyfunction]
#[pyo3(name = "crc32c", signature = (data, initial = 0))]
fn checksum(py: Python<'_>, data: &Bound<'_, PyAny>, initial: u32) -> PyResult<u32> {
    let view = View::readable(data)?;
    Ok(py.detach(|| ::crc32c::crc32c_append(initial, view.as_slice())))
}

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(checksum, module)?)?;
    module.add_function(wrap_pyfunction!(service::run_service, module)?)?;
    module.add_function(wrap_pyfunction!(credential::issue_ticket, module)?)?;
    module.add_function(wrap_pyfunction!(credential::read_ticket, module)?)?;
    module.add_function(wrap_pyfunction!(credential::verify_ticket, module)?)?;
    module.add_function(wrap_pyfunction!(fuse::run_fuse, module)?)?;
    module.add_function(wrap_pyfunction!(backup::store_check, module)?)?;
    module.add_function(wrap_pyfunction!(backup::store_dump, module)?)?;
    module.add_function(wrap_pyfunction!(backup::store_adopt, module)?)?;
    module.add_function(wrap_pyfunction!(backup::store_load, module)?)?;
    module.add_function(wrap_pyfunction!(backup::store_rekey, module)?)?;
    module.add_function(wrap_pyfunction!(backup::store_verify, module)?)?;
    module.add_function(wrap_pyfunction!(rings::register_fd, module)?)?;
    module.add_function(wrap_pyfunction!(rings::deregister_fd, module)?)?;
    module.add_function(wrap_pyfunction!(rings::extract_mount_point, module)?)?;
    module.add("MOUNT_READS_OFFSET", threefs_fuse::READS_OFFSET)?;
    module.add_class::<rings::RingMemory>()?;
    module.add_class::<rings::PyRing>()?;
    module.add_class::<audit::ChunkAudit>()?;
    module.add_class::<client::Client>()?;
    module.add_class::<copier::Copier>()?;
    module.add_class::<file::File>()
}
