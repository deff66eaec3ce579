//! How a daemon runs, what it says when it serves, and why it may not.

use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::Serialize;
use threefs_client::ClientError;

use crate::claim::ClaimConfig;

/// How a daemon runs.
pub struct FuseConfig {
    /// The directory that is the mount's root.
    pub root: String,
    /// Refuses every change.
    pub read_only: bool,
    /// Whether another daemon has served the mount before.
    pub resume: bool,
    /// What that one left, and this one leaves.
    pub state: Option<PathBuf>,
    /// How long an operation waits for services that do not answer.
    pub timeout: Duration,
    /// The claim without which nothing is served, if the mount needs one.
    pub claim: Option<ClaimConfig>,
    /// Whether the kernel may keep what is written and write it behind: only where no other node
    /// has the files. An fsync or a close still means durable.
    pub write_back: bool,
    /// How long names and attributes are valid in the kernel without asking; an open always asks.
    pub valid: Duration,
    /// Asked at the end, also by who ends the daemon before the mount.
    pub left_open: Arc<LeftOpen>,
}

/// Operations under a claim of which nobody has seen the answer. Services begin nothing after the
/// end of the renewal that it was sent under; until then the claim must not go to another node.
#[derive(Debug)]
pub struct LeftOpen {
    trusted: Option<Duration>,
    at: Mutex<Option<Instant>>,
}

impl LeftOpen {
    /// `trusted`: how long a renewal of the mount's claim is, if it has one. `resume`: a daemon
    /// before this one may have left some.
    pub fn new(trusted: Option<Duration>, resume: bool) -> Self {
        Self { trusted, at: Mutex::new(resume.then(Instant::now)) }
    }

    pub(crate) fn note(&self) {
        *self.at.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }

    /// Whether all is answered, or too old to be begun.
    ///
    /// # Errors
    /// [`FuseError::Unsure`].
    pub fn check(&self) -> Result<(), FuseError> {
        let at = *self.at.lock().unwrap_or_else(PoisonError::into_inner);
        match (self.trusted, at) {
            (Some(trusted), Some(at)) if at.elapsed() < trusted => Err(FuseError::Unsure(trusted)),
            _ => Ok(()),
        }
    }
}

/// Why a daemon cannot serve.
#[derive(Debug, thiserror::Error)]
pub enum FuseError {
    /// The descriptor is none of /dev/fuse, or not mounted.
    #[error("descriptor of /dev/fuse: {0}; open it, mount with `fd=N`, then start the daemon")]
    Device(io::Error),
    /// The state file cannot be used.
    #[error("state file: {0}")]
    State(io::Error),
    /// The root cannot be had.
    #[error("root of the mount: {0}")]
    Root(#[from] ClientError),
    /// The root is no directory.
    #[error("`{0}` is not a directory; name one, or make it first")]
    NotADirectory(String),
    /// Another node uses what only one may use.
    #[error(
        "node `{holder}` uses it and only one node may; end its pods, or wait until it is gone"
    )]
    Claimed {
        /// Which node.
        holder: String,
    },
    /// The kernel said something else than it should.
    #[error("{0}")]
    Protocol(String),
    /// It was unmounted soon after an operation that nobody waited for until its answer came.
    #[error(
        "an operation of the last {} s has no answer and may still be begun: keep the claim for so long",
        .0.as_secs_f64()
    )]
    Unsure(Duration),
    /// It was unmounted while the metadata service did not answer.
    #[error("{0} files are longer than the metadata service knows: it did not answer")]
    Untold(usize),
}

/// What is told once the mount is served.
#[derive(Clone, Debug, Serialize)]
pub struct Ready {
    /// Always true.
    pub ready: bool,
    /// The root's inode.
    pub root: u64,
    /// Which daemon of the mount this is, from 1.
    pub life: u64,
    /// Whether it took over a mount that another daemon had served.
    pub resumed: bool,
    /// Whether what the other left unanswered is answered now. False on kernels before 6.9: those
    /// requests wait until they are interrupted.
    pub resent: bool,
}
