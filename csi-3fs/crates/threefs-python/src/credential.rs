//! Tickets: issued offline by a holder of the key file.

use std::path::Path;

use fabric::auth::keys::Keys;
use fabric::auth::ticket::{SealedTicket, Ticket};
use pyo3::prelude::*;

use crate::errors;

/// The content of a credential file for one directory. Read access to it grants the credential.
#[pyfunction]
#[pyo3(signature = (key_file, *, cluster, directory, path, read_only, node, expires_unix_s))]
#[allow(clippy::too_many_arguments)]
pub fn issue_ticket(
    py: Python<'_>,
    key_file: &str,
    cluster: String,
    directory: u64,
    path: String,
    read_only: bool,
    node: String,
    expires_unix_s: u64,
) -> PyResult<String> {
    let invalid = |error: fabric::auth::AuthError| errors::invalid(py, &error.to_string());
    let keys = Keys::read(Path::new(key_file)).map_err(invalid)?;
    let ticket = Ticket { cluster, key_id: 0, directory, path, read_only, node, expires_unix_s };
    Ok(ticket.seal(&keys.current()).map_err(invalid)?.to_text())
}

/// The permissions of a ticket sealed by a key of the key file, expired or not: the fields of
/// `read_ticket`.
#[pyfunction]
pub fn verify_ticket(
    py: Python<'_>,
    key_file: &str,
    ticket: &str,
) -> PyResult<(String, u64, String, bool, String, u64)> {
    let invalid = |error: fabric::auth::AuthError| errors::invalid(py, &error.to_string());
    let keys = Keys::read(Path::new(key_file)).map_err(invalid)?;
    let sealed = SealedTicket::parse(Path::new("ticket"), ticket.as_bytes()).map_err(invalid)?;
    if !sealed.is_genuine(&keys.current()) {
        return Err(errors::invalid(py, "the ticket is not sealed by a key of the key file"));
    }
    Ok(fields(&sealed))
}

/// The permissions of a credential file: cluster, directory's inode, path, read-only, node, expiry
/// in seconds since 1970.
#[pyfunction]
pub fn read_ticket(
    py: Python<'_>,
    file: &str,
) -> PyResult<(String, u64, String, bool, String, u64)> {
    let path = Path::new(file);
    let content = std::fs::read(path)?;
    let sealed = SealedTicket::parse(path, &content)
        .map_err(|error| errors::invalid(py, &error.to_string()))?;
    Ok(fields(&sealed))
}

fn fields(sealed: &SealedTicket) -> (String, u64, String, bool, String, u64) {
    let Ticket { cluster, directory, path, read_only, node, expires_unix_s, .. } =
        sealed.ticket().clone();
    (cluster, directory, path, read_only, node, expires_unix_s)
}
