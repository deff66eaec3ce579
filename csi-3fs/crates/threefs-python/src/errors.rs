//! Mapping of client errors to the classes of `threefs.errors`.

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use threefs_client::ClientError;
use threefs_meta::MetaError;

/// The Python exception for an error of the client.
pub(crate) fn from_client(py: Python<'_>, error: &ClientError) -> PyErr {
    let message = error.to_string();
    match error {
        ClientError::Meta(meta) => from_meta(py, meta, &message),
        ClientError::NoSpace { .. } => make(py, "NoSpace", &message, &[]),
        ClientError::Corrupt { .. } => make(py, "Corrupt", &message, &[]),
        ClientError::Lost { path, .. } => make(py, "Corrupt", &message, &[("path", path)]),
        ClientError::Stale { path } => make(py, "Stale", &message, &[("path", path)]),
        ClientError::Unavailable { who, deadline, .. } => {
            let details = PyDict::new(py);
            let set = details
                .set_item("who", who)
                .and_then(|()| details.set_item("deadline_seconds", deadline.as_secs_f64()));
            match set {
                Ok(()) => construct(py, "Unavailable", &message, &details),
                Err(error) => error,
            }
        }
        ClientError::Refused { .. } | ClientError::Fenced { .. } => {
            make(py, "PermissionDenied", &message, &[])
        }
        ClientError::InvalidArgument { .. } => make(py, "InvalidArgument", &message, &[]),
        ClientError::NotReserved { .. }
        | ClientError::Changed { .. }
        | ClientError::Protocol { .. } => make(py, "ThreeFSError", &message, &[]),
    }
}

/// A wrong argument.
pub(crate) fn invalid(py: Python<'_>, message: &str) -> PyErr {
    make(py, "InvalidArgument", message, &[])
}

fn from_meta(py: Python<'_>, error: &MetaError, message: &str) -> PyErr {
    let (class, path) = match error {
        MetaError::NotFound { path } => ("NotFound", Some(path)),
        MetaError::Exists { path } => ("Exists", Some(path)),
        MetaError::NotADirectory { path } => ("NotADirectory", Some(path)),
        MetaError::IsADirectory { path } => ("IsADirectory", Some(path)),
        MetaError::NotEmpty { path } => ("DirectoryNotEmpty", Some(path)),
        MetaError::TooManySymlinks { path }
        | MetaError::SymlinkOnPath { path, .. }
        | MetaError::IsRoot { path } => ("InvalidArgument", Some(path)),
        MetaError::PermissionDenied { path, .. } | MetaError::NotPermitted { path, .. } => {
            ("PermissionDenied", Some(path))
        }
        MetaError::ReadOnly { path } => ("ReadOnly", Some(path)),
        MetaError::CrossQuota { path, .. } => ("CrossQuota", Some(path)),
        MetaError::NoAttribute { path, .. } => ("NoAttribute", Some(path)),
        MetaError::QuotaExceeded { .. } => ("QuotaExceeded", None),
        MetaError::NotSupported { path, .. } => ("InvalidArgument", Some(path)),
        MetaError::FileTooLarge { .. } => ("InvalidArgument", None),
        MetaError::Invalid { .. } | MetaError::NameTooLong { .. } => ("InvalidArgument", None),
        MetaError::Unavailable { .. }
        | MetaError::AnswersFull { .. }
        | MetaError::TooManyLocks { .. } => ("Unavailable", None),
        MetaError::NoSpace { .. } => ("NoSpace", None),
        MetaError::Damaged { .. } => ("Corrupt", None),
    };
    match path {
        Some(path) => make(py, class, message, &[("path", path)]),
        None => make(py, class, message, &[]),
    }
}

fn make(py: Python<'_>, class: &str, message: &str, details: &[(&str, &str)]) -> PyErr {
    let keywords = PyDict::new(py);
    for (name, value) in details {
        if let Err(error) = keywords.set_item(name, value) {
            return error;
        }
    }
    construct(py, class, message, &keywords)
}

fn construct(py: Python<'_>, class: &str, message: &str, keywords: &Bound<'_, PyDict>) -> PyErr {
    let error = py
        .import("threefs.errors")
        .and_then(|module| module.getattr(class))
        .and_then(|class| class.call((message,), Some(keywords)));
    match error {
        Ok(error) => PyErr::from_value(error),
        // The package is incomplete: keep the message.
        Err(cause) => PyRuntimeError::new_err(format!("{class}: {message} ({cause})")),
    }
}
